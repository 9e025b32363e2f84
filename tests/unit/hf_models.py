"""The tiny Hugging Face models of tests/fixtures/hf as this project's configurations and weights.

Made by tests/fixtures/make_hf_fixtures.py. D embed dim, H query heads, K key/value heads, h head width, F feed-forward
width, E experts, T positions, V vocabulary.
"""

import json
import re
from pathlib import Path

import numpy as np
import tiny

from maxghost import config, models

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "hf"
NAMES = ("gpt2", "llama2", "llama3", "mistral", "mixtral", "qwen3", "qwen3_moe", "gpt_oss")
# Keys of the families as their file in configs/models has them; sizes come from the folder's config.json.
MODEL_FILES = {
  "gpt2": "gpt2-small", "llama2": "llama2-7b", "llama3": "llama3.1-8b", "mistral": "mistral-7b",
  "mixtral": "mixtral-8x7b", "qwen3": "qwen3-0.6b", "qwen3_moe": "qwen3-30b-a3b", "gpt_oss": "gpt-oss-20b",
}  # fmt: skip
KEYS = {
  "hidden_size": "base_emb_dim", "n_embd": "base_emb_dim", "num_hidden_layers": "base_num_decoder_layers",
  "n_layer": "base_num_decoder_layers", "num_attention_heads": "base_num_query_heads", "n_head": "base_num_query_heads",
  "num_key_value_heads": "base_num_kv_heads", "head_dim": "head_dim", "intermediate_size": "base_mlp_dim",
  "n_inner": "base_mlp_dim", "moe_intermediate_size": "base_moe_mlp_dim", "vocab_size": "vocab_size",
  "rms_norm_eps": "normalization_layer_epsilon", "layer_norm_epsilon": "normalization_layer_epsilon",
  "tie_word_embeddings": "logits_via_embedding", "num_local_experts": "num_experts", "num_experts": "num_experts",
  "num_experts_per_tok": "num_experts_per_tok", "n_positions": "trainable_position_size",
  "sliding_window": "sliding_window_size",
}  # fmt: skip
ROPE_KEYS = {
  "rope_theta": "rope_max_timescale", "factor": "rope_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
  "original_max_position_embeddings": "original_max_position_embeddings", "truncate": "rope_truncate",
  "low_freq_factor": "rope_low_freq_factor", "high_freq_factor": "rope_high_freq_factor",
}  # fmt: skip


def load(name: str, **changes) -> tuple[config.Config, dict, np.ndarray, np.ndarray]:
  """(configuration, {label: stacked float32 value}, tokens [2, T], logits [2, T, V]) of a fixture."""
  published = json.loads((FOLDER / name / "config.json").read_text())
  keys = {ours: published[theirs] for theirs, ours in KEYS.items() if published.get(theirs) is not None}
  rope = published.get("rope_parameters") or {}
  keys |= {ours: rope[theirs] for theirs, ours in ROPE_KEYS.items() if theirs in rope}
  if name == "gpt2":
    keys |= {"base_num_kv_heads": keys["base_num_query_heads"], "head_dim": 5}
  if name in ("mixtral", "gpt_oss"):
    keys["base_moe_mlp_dim"] = keys["base_mlp_dim"]
  if name == "qwen3_moe":
    keys.pop("sliding_window_size", None)
  keys |= {"tokenizer_type": "huggingface", "max_target_length": 19, "attention": "dot_product"} | changes
  loaded = config.load(f"model_name={MODEL_FILES[name]}", *(f"{key}={text(value)}" for key, value in keys.items()))
  parity = np.load(FOLDER / name / "logits.npz")
  weights = read_safetensors(FOLDER / name / "model.safetensors")
  return loaded, stacked(name, loaded.model, weights), parity["tokens"], parity["logits"]


def model(name: str, **changes):
  """(model, configuration, tokens, logits) of a fixture."""
  cfg, values, tokens, logits = load(name, **changes)
  return tiny.with_values(models.create_abstract(cfg), values), cfg, tokens, logits


def in_transformers(folder: Path, **options):
  """The model of a folder in float32 without fused kernels, in any version of transformers."""
  import torch
  import transformers

  experts = {"experts_implementation": "eager"} if int(transformers.__version__.split(".")[0]) >= 5 else {}
  load = transformers.AutoModelForCausalLM.from_pretrained
  return load(folder, dtype=torch.float32, attn_implementation="eager", **experts, **options)


def text(value) -> str:
  return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
  raw = path.read_bytes()
  start = 8 + int.from_bytes(raw[:8], "little")
  entries = json.loads(raw[8:start])
  entries.pop("__metadata__", None)
  out = {}
  for name, entry in entries.items():
    assert entry["dtype"] == "F32"
    first, last = (start + offset for offset in entry["data_offsets"])
    out[name] = np.frombuffer(raw[first:last], np.float32).reshape(entry["shape"])
  return out


def stacked(name: str, cfg, weights: dict) -> dict:
  """{label: value}, unlike layers of a cycle apart, like ones stacked on axis 0."""
  cycle = cfg.inhomogeneous_layer_cycle_interval
  values: dict = {}
  layers: dict[str, dict[int, dict]] = {}
  for key, value in weights.items():
    found = re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)", key)
    if found:
      layers.setdefault(found[2], {})[int(found[1])] = value
    else:
      values |= outside(key, value)
  for i in range(cfg.base_num_decoder_layers):
    inner = layer(name, cfg, {part: by_layer[i] for part, by_layer in layers.items()})
    prefix = "decoder/layers/" + (f"layers_{i % cycle}/" if cycle > 1 else "")
    for label, value in inner.items():
      values.setdefault(prefix + label, []).append(value)
  return {label: np.stack(v) if isinstance(v, list) else v for label, v in values.items()}


def outside(key: str, value) -> dict:
  key = key.removeprefix("model.").removeprefix("transformer.")
  names = {
    "embed_tokens.weight": "token_embedder/embedding", "wte.weight": "token_embedder/embedding",
    "wpe.weight": "decoder/position_embedder/embedding", "norm.weight": "decoder/decoder_norm/scale",
    "ln_f.weight": "decoder/decoder_norm/scale", "ln_f.bias": "decoder/decoder_norm/bias",
  }  # fmt: skip
  return {"decoder/logits_dense/kernel": value.T} if key == "lm_head.weight" else {names[key]: value}


def layer(name: str, cfg, w: dict) -> dict:
  attention, mlp = {"gpt_oss": ("GptOssAttention", "GptOssMlp"), "qwen3_moe": ("self_attention", "moe_block")}.get(
    name, ("self_attention", "MoeBlock_0" if name == "mixtral" else "mlp")
  )
  if name == "gpt2":
    return gpt2_layer(cfg, w)
  out = {
    "pre_self_attention_layer_norm/scale": w["input_layernorm.weight"],
    "post_self_attention_layer_norm/scale": w["post_attention_layernorm.weight"],
  }
  heads = {"q": cfg.base_num_query_heads, "k": cfg.base_num_kv_heads, "v": cfg.base_num_kv_heads}
  for letter, ours in (("q", "query"), ("k", "key"), ("v", "value")):
    split = (heads[letter], cfg.head_dim)
    out[f"{attention}/{ours}/kernel"] = w[f"self_attn.{letter}_proj.weight"].T.reshape(-1, *split)
    if cfg.attention_bias:
      out[f"{attention}/{ours}/bias"] = w[f"self_attn.{letter}_proj.bias"].reshape(split)
  out[f"{attention}/out/kernel"] = w["self_attn.o_proj.weight"].T.reshape(heads["q"], cfg.head_dim, -1)
  if cfg.attention_bias:
    out[f"{attention}/out/bias"] = w["self_attn.o_proj.bias"]
  if cfg.attention_sink:
    out[f"{attention}/sinks"] = w["self_attn.sinks"]
  if cfg.use_qk_norm:
    out |= {f"{attention}/{side}_norm/scale": w[f"self_attn.{side[0]}_norm.weight"] for side in ("query", "key")}
  return out | {f"{mlp}/{label}": value for label, value in feed_forward(name, cfg, w).items()}


def feed_forward(name: str, cfg, w: dict) -> dict:
  if cfg.num_experts == 1:
    names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    return {f"{ours}/kernel": w[f"mlp.{theirs}.weight"].T for ours, theirs in names.items()}
  if name == "gpt_oss":
    out = {"gate/kernel": w["mlp.router.weight"].T, "gate/bias": w["mlp.router.bias"]}
    for suffix in ("", "_bias"):
      gate_up = w[f"mlp.experts.gate_up_proj{suffix}"]
      out |= {f"wi_0{suffix}": gate_up[..., ::2], f"wi_1{suffix}": gate_up[..., 1::2]}
      out[f"wo{suffix}"] = w[f"mlp.experts.down_proj{suffix}"]
    return out
  if name == "mixtral":
    prefix, names = "block_sparse_moe", {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}
  else:
    prefix, names = "mlp", {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
  out = {"gate/kernel": w[f"{prefix}.gate.weight"].T}
  for ours, theirs in names.items():
    experts = [w[f"{prefix}.experts.{e}.{theirs}.weight"].T for e in range(cfg.num_experts)]
    out[ours] = np.stack(experts)
  return out


def gpt2_layer(cfg, w: dict) -> dict:
  """Conv1D keeps its weight as [inputs, outputs]; query, key and value are one matrix."""
  split, out = (cfg.base_num_query_heads, cfg.head_dim), {}
  for i, ours in enumerate(("query", "key", "value")):
    out[f"self_attention/{ours}/kernel"] = np.split(w["attn.c_attn.weight"], 3, -1)[i].reshape(-1, *split)
    out[f"self_attention/{ours}/bias"] = np.split(w["attn.c_attn.bias"], 3)[i].reshape(split)
  out["self_attention/out/kernel"] = w["attn.c_proj.weight"].reshape(*split, -1)
  out["self_attention/out/bias"] = w["attn.c_proj.bias"]
  for ours, theirs in (("wi", "c_fc"), ("wo", "c_proj")):
    out |= {f"mlp/{ours}/kernel": w[f"mlp.{theirs}.weight"], f"mlp/{ours}/bias": w[f"mlp.{theirs}.bias"]}
  for ours, theirs in (("pre", "ln_1"), ("post", "ln_2")):
    norm = f"{ours}_self_attention_layer_norm"
    out |= {f"{norm}/scale": w[f"{theirs}.weight"], f"{norm}/bias": w[f"{theirs}.bias"]}
  return out
