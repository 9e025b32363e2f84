"""LoRA adapters in PEFT's folders, and merged: names, shapes, bits, refusals; with `--run-hf`, in the hands of PEFT."""

import contextlib
import json
import re
import warnings

import hf_models
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny
from flax import nnx

from maxghost import adapters, config, generate, load_model
from maxghost.checkpoint.layouts import read_checkpoint
from maxghost.checkpoint.layouts_layers import LayerReader
from maxghost.config import ConfigError
from maxghost.interop import hf_checkpoint, huggingface, merge, peft
from maxghost.interop.__main__ import main as checkpoint_command
from maxghost.interop.peft import CONFIG, TENSORS, Settings

RANK = 3
MODELS = {name: hf_models.load(name)[0].model for name in hf_models.NAMES}


def silent(line):
  pass


def make_arrays(model, seed=0, dtype=np.float32, share=False, experts=True) -> dict[str, np.ndarray]:
  """Random adapters of every matrix that may have one. share: one A for the parts of a module, as PEFT makes it."""
  rng, leaves = np.random.default_rng(seed), {}
  for place in peft.places(model):
    sizes, rule = place.rule.sizes, place.rule
    if rule.lead and not experts:
      continue
    rows, lead = np.prod([sizes[x] for x in rule.inputs]), [sizes[x] for x in rule.lead]
    a = rng.normal(size=(*lead, rows, RANK))
    for leaf_a, leaf_b in place.leaves:
      if leaf_a in leaves:
        continue
      a = a if share else rng.normal(size=a.shape)
      leaves[leaf_a] = {None: a.astype(dtype)}
      leaves[leaf_b] = {None: rng.normal(size=(*lead, RANK, *(sizes[x] for x in rule.outputs))).astype(dtype)}
  return peft.stack(leaves, model, "test")


def equal(found, expected) -> None:
  assert found.keys() == expected.keys()
  for label, values in expected.items():
    assert found[label].dtype == values.dtype and found[label].tobytes() == values.tobytes(), label


def files(folder) -> dict[str, bytes]:
  return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", hf_models.NAMES)
def test_an_adapter_survives_the_way_to_peft_and_back(name, tmp_path):
  """All matrices of the family, with an own A each; then folder to folder, byte by byte."""
  model, settings = MODELS[name], Settings(RANK, 5.0, 0.25, use_rslora=name == "gpt2")
  arrays = make_arrays(model, dtype=ml_dtypes.bfloat16 if name == "mistral" else np.float32)
  peft.save_adapter(tmp_path / "a", model, settings, arrays, base="base/model")
  found, again = peft.load_adapter(tmp_path / "a", model)
  assert (found.rank, found.alpha, found.dropout, found.use_rslora) == (RANK, 5.0, 0.25, name == "gpt2")
  assert found.base_qtype == "" and found.config["r"] == RANK
  equal(again, arrays)
  peft.save_adapter(tmp_path / "b", model, found, again)
  assert files(tmp_path / "a") == files(tmp_path / "b")


def test_one_A_for_the_parts_of_a_module_stays_one(tmp_path):
  """As PEFT trains c_attn of GPT-2, and experts in one parameter; rank and scale need no pattern then."""
  for name in ("gpt2", "gpt_oss"):
    model, arrays = MODELS[name], make_arrays(MODELS[name], share=True)
    peft.save_adapter(tmp_path / name, model, Settings(RANK, 5.0), arrays)
    content = json.loads((tmp_path / name / CONFIG).read_text())
    assert content["rank_pattern"] == content["alpha_pattern"] == {}
    equal(peft.load_adapter(tmp_path / name, model)[1], arrays)


def test_a_folder_with_patterns_of_its_own_gets_those_of_parts_that_were_trained_apart(tmp_path):
  model, given = MODELS["gpt2"], {"c_fc": 5.0, "attn.c_attn": 5.0}  # the same alpha, said twice
  peft.save_adapter(tmp_path / "a", model, Settings(RANK, 5.0), make_arrays(model, share=True))
  content = json.loads((tmp_path / "a" / CONFIG).read_text())
  (tmp_path / "a" / CONFIG).write_text(json.dumps(content | {"alpha_pattern": given}))
  settings, arrays = peft.load_adapter(tmp_path / "a", model)
  apart = make_arrays(model, seed=1)
  assert arrays.keys() == apart.keys()
  peft.save_adapter(tmp_path / "b", model, settings, apart)
  content = json.loads((tmp_path / "b" / CONFIG).read_text())
  assert (content["rank_pattern"], content["alpha_pattern"]) == ({"c_attn": 9}, {"c_attn": 15.0})
  equal(peft.load_adapter(tmp_path / "b", model)[1], apart)


def test_names_and_shapes_are_those_of_peft(tmp_path):
  """docs/huggingface.md; seen in the folders that PEFT writes."""

  def written(name, **options) -> dict[str, list]:
    peft.save_adapter(tmp_path / name, MODELS[name], Settings(RANK, 5.0), make_arrays(MODELS[name], **options))
    tensors = safetensors.numpy.load_file(tmp_path / name / TENSORS)
    return {key.removeprefix("base_model.model."): [*x.shape] for key, x in tensors.items()}

  llama = written("llama2")
  assert llama["model.layers.2.self_attn.k_proj.lora_A.weight"] == [RANK, 12]
  assert llama["model.layers.2.self_attn.k_proj.lora_B.weight"] == [16, RANK]
  assert llama["model.layers.0.mlp.down_proj.lora_A.weight"] == [RANK, 18]
  assert llama["lm_head.lora_B.weight"] == [29, RANK]
  gpt2 = written("gpt2")
  assert gpt2["transformer.h.3.attn.c_attn.lora_A.weight"] == [3 * RANK, 15]
  assert gpt2["transformer.h.3.attn.c_attn.lora_B.weight"] == [45, 3 * RANK]
  content = json.loads((tmp_path / "gpt2" / CONFIG).read_text())
  assert content["fan_in_fan_out"] and content["target_modules"] == ["c_attn", "c_fc", "c_proj"]
  assert (content["rank_pattern"], content["alpha_pattern"]) == ({"c_attn": 9}, {"c_attn": 15.0})
  mixtral = written("mixtral")
  assert mixtral["model.layers.1.block_sparse_moe.experts.4.w2.lora_A.weight"] == [RANK, 14]
  oss = written("gpt_oss", share=True)
  assert oss["model.layers.3.mlp.experts.base_layer.lora_A.weight"] == [5 * RANK, 10]
  assert oss["model.layers.3.mlp.experts.base_layer.lora_B.weight"] == [14, 5 * RANK]
  assert oss["model.layers.3.mlp.experts.lora_B.weight"] == [10, 5 * RANK]
  content = json.loads((tmp_path / "gpt_oss" / CONFIG).read_text())
  assert content["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]


def test_a_leaf_name_that_two_modules_share_is_written_with_its_parent(tmp_path):
  model = MODELS["gpt2"]
  arrays = {label: x for label, x in make_arrays(model).items() if "/out/" in label}
  peft.save_adapter(tmp_path / "a", model, Settings(RANK, 5.0), arrays)
  assert json.loads((tmp_path / "a" / CONFIG).read_text())["target_modules"] == ["attn.c_proj"]


def change(**entries):
  return lambda content, tensors: (content | entries, tensors)


def edited(make):
  return lambda content, tensors: (content, make(dict(tensors)))


Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
REFUSED = {
  "use_dora=True is not known here": change(use_dora=True),
  "bias=all: trained biases are not read; only bias=none is": change(bias="all"),
  r"modules_to_save=\['lm_head'\] is not known here": change(modules_to_save=["lm_head"]),
  "peft_type=IA3 is not read; only LORA is": change(peft_type="IA3"),
  "init_lora_weights=pissa changes the base weights": change(init_lora_weights="pissa"),
  r"layer_replication=\[\[0, 2\]\] is not known here": change(layer_replication=[[0, 2]]),
  "r=0, lora_alpha=5.0: no rank and number": change(r=0),
  "r=3, lora_alpha=nan: no rank and number": change(lora_alpha=float("nan")),
  r"q_proj rank 7 and alpha 5.0; one rank \(3\)": change(rank_pattern={"q_proj": 7}),
  r"q_proj rank 3 and alpha 9; one rank \(3\) and scale": change(alpha_pattern={"q_proj": 9}),
  r"q_proj.lora_A.weight is \[3, 12\], rank 4 and the model make it \[4, 12\]": change(r=4),
  "targets k_proj, but adapter_model.safetensors holds no tensors of it": edited(
    lambda x: {name: value for name, value in x.items() if "k_proj" not in name}
  ),
  f"lacks {Q}": edited(lambda x: {name: value for name, value in x.items() if name != Q}),
  "has base_model.model.model.embed_tokens.lora_embedding_A, which the model has no matrix for": edited(
    lambda x: x | {"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((3, 29), np.float32)}
  ),
  r"is \[3, 5\], rank 3 and the model make it \[3, 12\]": edited(lambda x: x | {Q: np.zeros((3, 5), np.float32)}),
  "2 of 3 layers have decoder/layers/self_attention/query/lora/a; adapt all layers or none": edited(
    lambda x: {name: value for name, value in x.items() if "layers.1.self_attn.q_proj" not in name}
  ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_supported_is_refused_by_name(text, tmp_path):
  model = MODELS["llama2"]
  peft.save_adapter(tmp_path / "a", model, Settings(RANK, 5.0), make_arrays(model))
  content = json.loads((tmp_path / "a" / CONFIG).read_text())
  content, tensors = REFUSED[text](content, safetensors.numpy.load_file(tmp_path / "a" / TENSORS))
  (tmp_path / "a" / CONFIG).write_text(json.dumps(content))
  safetensors.numpy.save_file(tensors, tmp_path / "a" / TENSORS)
  with pytest.raises(ConfigError, match=text):
    peft.load_adapter(tmp_path / "a", model)


def test_targets_and_patterns_are_looked_up_by_the_names_of_peft(tmp_path):
  """A target parameter by its own name, Mixtral's router by that of its tensors, an excluded module not at all."""
  q, own, router = "self_attn.q_proj.weight", {"alpha_pattern": {"q_proj.weight": 9}}, "mlp.gate.weight"
  linear = {"target_modules": ["q_proj", "k_proj"], "alpha_pattern": {}}
  left_out = "k_proj", r"model\.layers\.\d\.self_attn\.k_proj"
  cases = [
    ("llama2", {"target_modules": ["v_proj"], "target_parameters": [q], **own}, "q_proj rank 3 and alpha 9"),
    ("llama2", {"target_modules": ["v_proj"], "target_parameters": [q], "alpha_pattern": {"q_proj": 9}}, ""),
    ("llama2", {"target_modules": ["q_proj"], **own}, ""),
    ("mixtral", {"target_parameters": [router], "alpha_pattern": {"gate.weight": 9}}, r"mlp\.gate rank 3 and alpha 9"),
    ("mixtral", {"target_parameters": [router], "alpha_pattern": {"block_sparse_moe.gate.weight": 9}}, ""),
    ("llama2", linear, "targets k_proj"),
    *(("llama2", linear | {"exclude_modules": x}, "") for x in ([left_out[0]], *left_out[1:], f".*{left_out[0]}")),
  ]
  for i, (name, entries, refused) in enumerate(cases):
    folder = tmp_path / str(i)
    peft.save_adapter(folder, MODELS[name], Settings(RANK, 5.0), make_arrays(MODELS[name], experts=False))
    tensors = safetensors.numpy.load_file(folder / TENSORS)
    kept = {x.replace("block_sparse_moe", "mlp"): v for x, v in tensors.items() if re.search("[qv]_proj|gate.lora", x)}
    safetensors.numpy.save_file(kept, folder / TENSORS)
    content = json.loads((folder / CONFIG).read_text()) | {"target_modules": ["v_proj"]}
    (folder / CONFIG).write_text(json.dumps(content | entries))
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
      found = peft.load_adapter(folder, MODELS[name])[1]
      assert len(found) == (6 if name == "mixtral" else 4), entries


def test_no_damage_of_an_adapter_folder_ends_in_a_traceback(tmp_path):
  """Entries of any type, and flipped bits in either file; what is read has the names and shapes of the model."""
  model = MODELS["llama2"]
  peft.save_adapter(tmp_path / "a", model, Settings(RANK, 5.0), arrays := make_arrays(model))
  whole = {name: (tmp_path / "a" / name).read_bytes() for name in (CONFIG, TENSORS)}
  content, rng, refused, kinds = json.loads(whole[CONFIG]), np.random.default_rng(3), 0, 0
  values = (None, True, -1, 10**30, 0.5, "x", "(", [], [[]], [{}], {}, {"x": {}}, {"(": 1}, {"q_proj": None})
  damaged = [(CONFIG, json.dumps(content | {name: value}).encode()) for name in content for value in values]
  for name, raw in whole.items():
    for place in rng.integers(0, min(len(raw), 4000), 150):
      damaged.append((name, raw[:place] + bytes([raw[place] ^ 1 << int(rng.integers(8))]) + raw[place + 1 :]))
  for name, raw in damaged:
    (tmp_path / "a" / name).write_bytes(raw)
    try:
      found = merge.open_adapter(tmp_path / "a", model)[1]
      assert {label: x.shape for label, x in found.items()} == {label: x.shape for label, x in arrays.items()}
    except ConfigError as error:
      assert error.problems and "\n" not in error.problems[0]
      kinds += "of another type than PEFT writes" in error.problems[0]
      refused += 1
    (tmp_path / "a" / name).write_bytes(whole[name])
  assert refused > 150 and kinds > 5


def test_folders_and_arrays_that_do_not_fit(tmp_path):
  gpt2, mixtral = MODELS["gpt2"], MODELS["mixtral"]
  with pytest.raises(ConfigError, match=r"adapter_config.json is damaged or half copied"):
    peft.load_adapter(tmp_path, gpt2)
  arrays = make_arrays(gpt2)
  for text, wrong in {
    r"c_attn holds .*; adapt all, decoder/layers/self_attention/key/lora/a is missing": {
      label: x for label, x in arrays.items() if "/key/" not in label
    },
    "decoder/layers/mlp/wi_7/lora/a is no adapter": arrays | {"decoder/layers/mlp/wi_7/lora/a": np.zeros((4, 2, 3))},
    "no adapter to write": {},
  }.items():
    with pytest.raises(ConfigError, match=text):
      peft.save_adapter(tmp_path / "out", gpt2, Settings(RANK, 5.0), wrong)
    assert not (tmp_path / "out").exists()
  peft.save_adapter(tmp_path / "own", gpt2, Settings(RANK, 5.0), arrays)
  tensors = safetensors.numpy.load_file(tmp_path / "own" / TENSORS)
  name = "base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"
  safetensors.numpy.save_file(tensors | {name: tensors[name] + 1}, tmp_path / "own" / TENSORS)
  with pytest.raises(ConfigError, match="has rank 9 for 3 parts, but its B is not block-diagonal"):
    peft.load_adapter(tmp_path / "own", gpt2)
  peft.save_adapter(tmp_path / "moe", mixtral, Settings(RANK, 5.0), make_arrays(mixtral))
  tensors = safetensors.numpy.load_file(tmp_path / "moe" / TENSORS)
  fewer = {name: x for name, x in tensors.items() if "layers.1.block_sparse_moe.experts.2.w1" not in name}
  safetensors.numpy.save_file(fewer, tmp_path / "moe" / TENSORS)
  with pytest.raises(ConfigError, match=r"an expert of layer 1 has no .*wi_0_lora_a; adapt all experts or none"):
    peft.load_adapter(tmp_path / "moe", mixtral)


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "mixtral"])
def test_merging_adds_the_product_in_float32_and_leaves_the_base(name, tmp_path, capsys):
  """Against float64, layer by layer; the base's files and arrays keep their bits, also where layers are stacked."""
  cfg, source = hf_models.load(name)[0], hf_models.FOLDER / name
  arrays, settings = make_arrays(cfg.model), Settings(RANK, 5.0)
  hf_checkpoint.import_model(source, tmp_path / "in", say=silent)
  before = read_checkpoint(huggingface.open_tree(source)).params.leaves
  leaves, count = peft.unstack(arrays, cfg.model), 0
  for tree in (huggingface.open_tree(source), huggingface.open_tree(tmp_path / "in")):
    found = merge.merged(read_checkpoint(tree), cfg.model, settings, arrays).params.leaves
    for (path, layer), ref in found.items():
      whole = tuple(slice(0, n) for n in ref.shape)
      w = LayerReader(1 << 30).part(before[path, layer], whole)
      value = LayerReader(1 << 30).part(ref, whole)
      a = leaves.get((peft.adapter_path("/".join(path), "a"), layer))
      if a is None:
        assert value.tobytes() == w.tobytes()
        continue
      b = leaves[peft.adapter_path("/".join(path), "b"), layer]
      wide_a, wide_b = a.astype(np.float64), b.reshape(*b.shape[: a.ndim - 1], -1).astype(np.float64)
      expected = w + 5.0 / RANK * (wide_a @ wide_b).reshape(w.shape)
      np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
      assert value.dtype == w.dtype
      block = tuple(slice(1, n) for n in ref.shape)
      assert LayerReader(0).part(ref, block).tobytes() == value[block].tobytes()
      count += 1
  assert count == len(leaves)
  narrow = merge.merged_array(np.ones((4, 5), ml_dtypes.bfloat16), np.full((4, 2), 0.02), np.full((2, 5), 0.1), 0.5)
  assert narrow.dtype == ml_dtypes.bfloat16 and (narrow == ml_dtypes.bfloat16(1.002)).all()
  halves = np.full((4, 2), 0.02, np.float16), np.full((2, 5), 0.1, np.float16)  # PEFT's dtype is the adapter's own
  assert merge.merged_array(np.ones((4, 5), ml_dtypes.bfloat16), *halves, 0.5).tobytes() == narrow.tobytes()
  peft.save_adapter(tmp_path / "adapter", cfg.model, settings, arrays)
  command = ["hf", "export", str(tmp_path / "in"), str(tmp_path / "out"), "--adapter", str(tmp_path / "adapter")]
  assert (checkpoint_command(command), checkpoint_command(command)) == (0, 2)
  assert f"target {tmp_path / 'out'} exists" in capsys.readouterr().err
  expected = merge.merged(read_checkpoint(huggingface.open_tree(source)), cfg.model, settings, arrays).params.leaves
  for leaf, ref in read_checkpoint(huggingface.open_tree(tmp_path / "out")).params.leaves.items():
    whole = tuple(slice(0, n) for n in ref.shape)
    assert LayerReader(0).part(ref, whole).tobytes() == LayerReader(0).part(expected[leaf], whole).tobytes()
  other = MODELS["llama2"]
  with pytest.raises(ConfigError, match=r"its adapter|has no matrix for"):
    merge.merged(read_checkpoint(huggingface.open_tree(source)), cfg.model, settings, make_arrays(other))


# In the hands of PEFT.


@contextlib.contextmanager
def quiet():
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    yield


def adapted_by_peft(name, torch, peft_library, **options):
  """A model of transformers with a random adapter: every A and B from a normal distribution."""
  pytest.importorskip("transformers")
  model = hf_models.in_transformers(hf_models.FOLDER / name)
  made = peft_library.get_peft_model(model, peft_library.LoraConfig(r=RANK, lora_alpha=5, **options)).eval()
  generator = torch.Generator().manual_seed(3)
  for parameter_name, parameter in made.named_parameters():
    if "lora_" in parameter_name:
      parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
  return made


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
  "llama3": {"target_modules": "all-linear"},
  "qwen3": {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
  "gpt2": {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
  "mixtral": {"target_modules": ["k_proj", "o_proj"], "target_parameters": EXPERTS},
  "qwen3_moe": {"target_modules": ["q_proj"], "target_parameters": EXPERTS[:1]},
  "gpt_oss": {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
}


@pytest.mark.hf
@pytest.mark.parametrize("name", CASES)
def test_adapters_of_peft_and_adapters_for_peft(name, tmp_path):
  """Logits and merged weights of PEFT's own adapter; its folder again bit by bit; ours, with an own A for each part."""
  torch, library = pytest.importorskip("torch"), pytest.importorskip("peft")
  cfg, _, tokens, _ = hf_models.load(name)
  with quiet():
    theirs = adapted_by_peft(name, torch, library, task_type="CAUSAL_LM", **CASES[name])
    theirs.save_pretrained(tmp_path / "theirs")
  settings, arrays = peft.load_adapter(tmp_path / "theirs", cfg.model)
  peft.save_adapter(tmp_path / "again", cfg.model, settings, arrays)
  assert (tmp_path / "again" / TENSORS).read_bytes() == (tmp_path / "theirs" / TENSORS).read_bytes()
  assert json.loads((tmp_path / "again" / CONFIG).read_text()) == json.loads((tmp_path / "theirs" / CONFIG).read_text())

  def logits_of(model) -> np.ndarray:
    with torch.no_grad():
      return model.eval()(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()

  def merged_logits(adapter, folder) -> np.ndarray:
    hf_checkpoint.export_model(hf_models.FOLDER / name, folder, adapter=adapter, say=silent)
    graphdef, state = load_model.load(*load_model.find(folder), silent)
    return np.asarray(load_model_logits(graphdef, state, tokens))

  def close(found, expected, tolerance=1e-5) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())

  expected = logits_of(theirs)
  logits, gradients = adapted_here(name, cfg, settings, arrays, tokens)
  close(logits, expected)
  torch.nn.functional.cross_entropy(
    theirs(torch.from_numpy(tokens).long(), use_cache=False).logits[:, :-1].flatten(0, 1).double(),
    torch.from_numpy(tokens).long()[:, 1:].flatten(),
  ).backward()
  (tmp_path / "gradients").mkdir()
  (tmp_path / "gradients" / CONFIG).write_bytes((tmp_path / "theirs" / CONFIG).read_bytes())
  grads = {n.replace(".default", ""): p.grad.numpy() for n, p in theirs.named_parameters() if "lora_" in n}
  safetensors.numpy.save_file(grads, tmp_path / "gradients" / TENSORS)
  shared = {"gpt2": "query|key|value", "mixtral": "wi_[01]", "qwen3_moe": "wi_[01]", "gpt_oss": "wi_[01]"}.get(name)
  for label, values in peft.load_adapter(tmp_path / "gradients", cfg.model)[1].items():
    parts = [label]
    if label.endswith("a") and shared:  # one A there is one for each part here
      parts = [other for other in gradients if re.sub(shared, "*", other) == re.sub(shared, "*", label)]
    close(sum(gradients[part] for part in parts), values, 3e-5)  # two float32 backward passes
  close(merged_logits(tmp_path / "theirs", tmp_path / "merged"), expected)
  rng = np.random.default_rng(0)
  own = {label: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype) for label, x in arrays.items()}
  new = peft.Settings(settings.rank, settings.alpha, 0.0, settings.use_rslora)
  peft.save_adapter(tmp_path / "ours", cfg.model, new, own)
  with quiet():
    base = theirs.unload()
    loaded = library.PeftModel.from_pretrained(base, tmp_path / "ours")
    close(logits_of(loaded), merged_logits(tmp_path / "ours", tmp_path / "merged_ours"))
    loaded.merge_and_unload().save_pretrained(tmp_path / "theirs_merged")
  trees = [read_checkpoint(huggingface.open_tree(tmp_path / x)).params.leaves for x in ("theirs_merged", "merged_ours")]
  for leaf, ref in trees[0].items():
    whole = tuple(slice(0, n) for n in ref.shape)
    close(*(LayerReader(1 << 30).part(tree[leaf], whole) for tree in reversed(trees)))


def adapted_here(name, cfg, settings, arrays, tokens):
  """(logits, {label: gradient}) of the model with adapters in its layers."""
  with_adapters = config.replace(
    cfg, adam_weight_decay=0.0, lora_rank=settings.rank, lora_alpha=settings.scale * settings.rank,
    lora_module_path="|".join(
      {re.sub("(/lora/|_lora_)[ab]$", "", label) for label in arrays}
    ),
  )  # fmt: skip
  values = hf_models.load(name)[1] | arrays
  graphdef, trained, rest = nnx.split(
    tiny.with_values(adapters.create_abstract(with_adapters), values), nnx.LoRAParam, ...
  )
  assert set(tiny.by_label(trained)) == set(arrays)

  def loss(trained, rest, tokens):
    logits = nnx.merge(graphdef, trained, rest)(tokens)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1)
    return losses.mean(), logits

  gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(trained, rest, tokens)
  return np.asarray(logits), tiny.by_label(gradients)


def test_a_model_generates_and_exports_with_its_adapter(tmp_path, capsys):
  """The adapter of a checkpoint with lora_rank: out to PEFT, and merged by `maxghost generate`."""
  source, cfg = hf_models.FOLDER / "llama2", hf_models.load("llama2")[0]
  settings, arrays = Settings(RANK, 5.0), make_arrays(cfg.model)
  peft.save_adapter(tmp_path / "peft", cfg.model, settings, arrays)
  hf_checkpoint.export_model(source, tmp_path / "merged", adapter=tmp_path / "peft", say=silent)
  place, loaded = load_model.find(source)
  found, expected = (
    tiny.by_label(load_model.load(*at, silent, adapter)[1])
    for at, adapter in (((place, loaded), str(tmp_path / "peft")), (load_model.find(tmp_path / "merged"), ""))
  )
  equal(found, expected)
  flags = generate.from_keys([f"load_parameters_path={source}", "prompt=a", f"lora_restore_path={tmp_path / 'peft'}"])
  assert flags[-1] == f"--adapter={tmp_path / 'peft'}"
  assert checkpoint_command(["hf", "adapter", str(source), str(tmp_path / "no")]) == 2
  assert (
    "llama2 holds no adapter: it is neither a folder of PEFT nor a run with lora_rank above 0"
    in capsys.readouterr().err
  )


def load_model_logits(graphdef, state, tokens):
  return jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens))(state, tokens)
