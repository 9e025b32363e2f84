"""Serving: many requests at once against one at a time, decode speed by slots, and against transformers.

  python benchmarks/serving.py [--rounds 5] [--tokens 48] [--cache 512] [--transformers] [key=value ...]

A model of SmolLM2-135M's shapes with random weights, float32 (key=value arguments change it). 16 requests of unequal
length run in 4 slots and one at a time: the tokens must be the same. Then every slot of engines of 1, 4 and 8 slots is
in use, and the time of a decode step is taken in turns; a step's tokens are its slots. --transformers: the same weights
in Hugging Face's library on the same CPU, greedy, with as many rows.
"""

import sys
import tempfile
import time

import _measure
import numpy as np
from _measure import Figure
from flax import nnx

from maxghost import config as configuration
from maxghost import models
from maxghost.data.tokenizers import ByteTokenizer
from maxghost.serving import Batcher, Engine, Request

SMOLLM2 = (
  "base_emb_dim=576", "base_num_query_heads=9", "base_num_kv_heads=3", "head_dim=64", "base_mlp_dim=1536",
  "base_num_decoder_layers=30", "vocab_size=49152", "logits_via_embedding=true", "dtype=float32",
  "weight_dtype=float32", "normalization_layer_epsilon=1e-5", "rope_max_timescale=100000",
)  # fmt: skip
PROMPT = 64


def same_tokens(graphdef, state, given) -> tuple[int, int]:
  """(requests whose tokens differ from those alone, tokens compared)."""
  engine = Engine(graphdef, slots=4, cache_size=given.cache, prefill_chunk=64)
  params = engine.load_params(state)
  engine.warm_up(params)
  batcher = Batcher(engine, params, ByteTokenizer())
  rng = np.random.default_rng(0)
  requests = [
    Request(tuple(rng.integers(0, engine.vocab_size, 1 + 11 * i % 97).tolist()), max_tokens=4 + 7 * i % 29)
    for i in range(16)
  ]

  def ids(job):
    return [token for piece in job for token in piece.ids]

  alone = [ids(batcher.submit(request)) for request in requests]
  jobs = [batcher.submit(request) for request in reversed(requests)]
  together = [ids(job) for job in jobs][::-1]
  batcher.close()
  return sum(a != b for a, b in zip(alone, together, strict=True)), sum(map(len, alone))


def steps(graphdef, state, slots: int, given) -> callable:
  """Seconds of a decode step with all slots in use."""
  engine = Engine(graphdef, slots=slots, cache_size=given.cache, prefill_chunk=PROMPT)
  params, held = engine.load_params(state), None
  rng = np.random.default_rng(slots)
  prompts = [rng.integers(0, engine.vocab_size, PROMPT).tolist() for _ in range(slots)]

  def run() -> float:
    nonlocal held
    held = held or engine.init_decode_state()
    for slot, prompt in enumerate(prompts):
      held = engine.insert(engine.prefill(params, prompt), held, slot)
    begin = time.perf_counter()
    for _ in range(given.tokens):
      held, _ = engine.generate(params, held)
    return (time.perf_counter() - begin) / given.tokens

  return run


def theirs(cfg, state, rows: int, given) -> callable:
  """Seconds of a step of transformers' generate: of `tokens` + 1 new tokens less that of one."""
  import torch
  import transformers

  from maxghost.checkpoint.layouts import MAXGHOST, ReadOptions, read_checkpoint
  from maxghost.checkpoint.layouts_store import tree_from_memory, write_json
  from maxghost.interop import huggingface, huggingface_config, safetensors_files
  from maxghost.training.state import to_tree

  with tempfile.TemporaryDirectory() as folder:
    from pathlib import Path

    checkpoint = read_checkpoint(tree_from_memory({"model": to_tree(state)}), ReadOptions(layout=MAXGHOST, scan_axis=0))
    safetensors_files.write_tensors(Path(folder), huggingface.planned_tensors(checkpoint, cfg.model), 1 << 30)
    write_json(Path(folder) / "config.json", huggingface_config.config_json(cfg.model, "float32", given.cache, {}))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
  prompts = torch.from_numpy(np.random.default_rng(rows).integers(0, cfg.model.vocab_size, (rows, PROMPT)))
  options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(prompts)}

  def run() -> float:
    seconds = []
    for count in (1, given.tokens + 1):
      begin = time.perf_counter()
      with torch.inference_mode():
        out = model.generate(prompts, max_new_tokens=count, min_new_tokens=count, **options)
      assert out.shape[1] == PROMPT + count
      seconds.append(time.perf_counter() - begin)
    return (seconds[1] - seconds[0]) / given.tokens

  return run


def main() -> int:
  given = _measure.arguments(__doc__, rounds=5, tokens=48, cache=512, transformers=False)
  cfg = configuration.load(str(_measure.BASE), *SMOLLM2, *given.overrides)
  graphdef, state = nnx.split(models.create(cfg, rngs=nnx.Rngs(0)))
  differ, compared = same_tokens(graphdef, state, given)
  contenders = {f"engine, slots {slots}": steps(graphdef, state, slots, given) for slots in (1, 4, 8)}
  if given.transformers:
    contenders |= {f"transformers, rows {rows}": theirs(cfg, state, rows, given) for rows in (1, 8)}
  seconds = _measure.take_turns(contenders, given.rounds)
  table = []
  for name, times in seconds.items():
    median = float(np.median(times))
    table.append({"decode": name, "ms per step": 1e3 * median, "tokens/s": int(name.rsplit(" ", 1)[1]) / median})
  figures = [
    Figure(f"requests of 16 in 4 slots with other tokens than alone ({compared} tokens)", differ, 0),
    Figure(
      "decode tokens/s of 8 slots over 1", 8 * _measure.ratio(seconds, "engine, slots 1", "engine, slots 8"), 3.0, True
    ),
  ]
  if given.transformers:
    figures += [
      Figure(f"decode tokens/s over transformers' with {rows} row{'s' * (rows > 1)}",
             _measure.ratio(seconds, f"transformers, rows {rows}", f"engine, slots {rows}"), None, True)
      for rows in (1, 8)
    ]  # fmt: skip
  return _measure.publish("serving", table, figures, path=given.json)


if __name__ == "__main__":
  sys.exit(_measure.run(main))
