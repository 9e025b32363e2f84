"""Runs with adapters, by their commands: what a checkpoint holds, resuming bit for bit, bases, beginnings."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
import run_copies
import tiny
from flax import nnx
from flax.traverse_util import flatten_dict

from maxghost import adapters, config, load_model, train
from maxghost.adapters import quantized
from maxghost.checkpoint import compare, open_tree
from maxghost.checkpoint.layouts import read_checkpoint
from maxghost.config import ConfigError
from maxghost.interop import hf_checkpoint, model_path, peft
from maxghost.interop.convert import convert
from maxghost.interop.linen_scaling import rescale_checkpoint
from maxghost.interop.load_tree import open_load
from maxghost.scorelog import load
from maxghost.training import state

KEYS = (
  "steps=4", "checkpoint_period=2", "max_num_checkpoints_to_keep=0", "async_checkpointing=false",
  "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=6", "base_mlp_dim=24",
  "base_num_decoder_layers=2", "max_target_length=32", "per_device_batch_size=4",
  "dataset_type=synthetic", "ghost_val_sets=words", "eval_interval=-1", "run_name=run", "enable_tensorboard=false",
  "remat_policy=minimal",
)  # fmt: skip
UNSTACKED = "scan_layers=false"
LORA = ("lora_rank=3", "lora_alpha=5", "adam_weight_decay=0", "lora_dropout=0.2", "ghost_direction=path")


def keys_of(folder, base, *more) -> list[str]:
  return [*KEYS, *LORA, f"base_output_directory={folder}", f"load_parameters_path={base}", *more]


def begin(folder, seed: int) -> None:
  """A run of one step without adapters."""
  place = (f"base_output_directory={folder}", f"init_weights_seed={seed}")
  assert train.main([*KEYS, "ghost_enabled=false", "steps=1", *place]) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """(folder of a base, folder of a finished run with adapters on it, of which a copy was interrupted)."""
  folder = tmp_path_factory.mktemp("runs")
  with tiny.cheap_compilation(), tiny.one_device():
    begin(folder / "base", 4)
    assert train.main(keys_of(folder / "whole", folder / "base" / "run")) == 0
  last = run_copies.interrupted(folder / "whole", folder / "broken")
  return folder, last


def test_a_run_resumes_bit_for_bit_from_adapters_alone(runs, capsys):
  folder, last = runs
  checkpoint = folder / "whole" / "run" / "checkpoints" / last
  positions = json.loads((checkpoint / "positions" / "metadata").read_text())
  held = [name for name in positions["checksums"] if name.startswith("model/")]
  assert len(held) == 14 and all("/lora/" in name for name in held)
  assert "model/decoder/layers/mlp/wo/kernel" in positions["frozen"]
  assert sum(file.stat().st_size for file in (checkpoint / "items").rglob("*") if file.is_file()) < 400_000
  base, moved = folder / "base", folder / "moved"
  base.rename(moved)  # a base may move, but not change
  try:
    with tiny.cheap_compilation(), tiny.one_device():
      assert train.main(keys_of(folder / "broken", moved / "run")) == 0
  finally:
    moved.rename(base)
  assert config.load(folder / "broken" / "run" / "config.yml").checkpoint.given == str(moved / "run")
  assert "Continuing after 2 completed steps" in capsys.readouterr().out
  logs = [load(folder / name / "run") for name in ("whole", "broken")]
  np.testing.assert_array_equal(*(log["contribution"] for log in logs))
  assert compare.main([str(folder / name / "run" / "checkpoints" / last) for name in ("whole", "broken")]) == 0


@pytest.mark.parametrize("what", ["changed", "gone"])
def test_a_base_may_not_change(runs, what, capsys):
  folder, _ = runs
  base, kept = folder / "base", folder / "kept"
  run_copies.interrupted(folder / "whole", folder / what)
  base.rename(kept)
  try:
    with tiny.cheap_compilation(), tiny.one_device():
      if what == "changed":
        begin(base, 5)
      code = train.main(keys_of(folder / what, base / "run"))
  finally:
    shutil.rmtree(base, ignore_errors=True)
    kept.rename(base)
  found = capsys.readouterr().err
  if what == "changed":
    assert code == 1 and re.search("gives other frozen arrays than the run in .* began with", found)
  else:
    assert code == 2 and f"there is no model folder {base / 'run'}" in found


def opened(*keys) -> tuple[config.Config, dict]:
  """(configuration, {path: array} that a run of these keys begins with)."""
  cfg = config.load(*keys)
  place = load_model.check_config(cfg)
  tree = state.to_tree(state.abstract_arrays(state.abstract_split(cfg)[1]))
  found = load_model.open_adapted(place, cfg, {"model": tree["model"]})()
  return cfg, {"/".join(path): np.asarray(x) for path, x in flatten_dict(found["model"]).items()}


def test_a_run_begins_with_the_adapters_of_another_on_a_base_in_few_bits(runs, tmp_path):
  folder, _ = runs
  keys = keys_of(tmp_path, folder / "base" / "run", "lora_weight_qtype=nf4")
  cfg, found = opened(*keys, f"lora_restore_path={folder / 'whole' / 'run'}")
  graphdef, abstract = nnx.split(adapters.create_abstract(cfg))
  assert {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(abstract)} == set(found)
  _, plain = opened(*keys_of(tmp_path, folder / "base" / "run"))
  kernel = plain["decoder/layers/self_attention/out/kernel"]
  parts = {name: found[f"decoder/layers/self_attention/out/{name}"] for name in quantized.NAMES["nf4"]}
  back = quantized.dequantize(parts, "nf4", "float32", 1).reshape(kernel.shape)
  assert 0 < np.abs(back - kernel).max() < 0.2 * np.abs(kernel).max()
  assert found["decoder/layers/mlp/wi_0/lora/b"].any()
  # The same from a folder of PEFT, and the merged model of `load` has the same logits as the adapters.
  place, run_cfg = load_model.find(folder / "whole" / "run")
  settings, arrays = load_model.merge.open_adapter(folder / "whole" / "run", run_cfg.model)
  peft.save_adapter(tmp_path / "peft", run_cfg.model, settings, arrays)
  _, again = opened(*keys_of(tmp_path, folder / "base" / "run"), f"lora_restore_path={tmp_path / 'peft'}")
  for label in arrays:
    np.testing.assert_array_equal(again[label], found[label])
  graphdef, abstract = nnx.split(adapters.create_abstract(run_cfg))
  tokens = np.arange(9, dtype=np.int32)[None]
  ours = nnx.merge(graphdef, state.from_tree(_nested(again), abstract))(tokens)
  graphdef, merged = load_model.load(place, run_cfg)
  np.testing.assert_allclose(nnx.merge(graphdef, merged)(tokens), ours, atol=2e-6)


def test_adapters_are_merged_into_a_base_in_the_format_of_maxtext(runs, tmp_path, capsys):
  """Its query weights are scaled as they are read: by `generate`, in few bits too, and by an export."""
  folder, _ = runs
  place, cfg = load_model.find(folder / "whole" / "run")
  convert(folder / "base" / "run" / "checkpoints" / "1", tmp_path / "linen", to="linen", say=lambda _: None)
  rescale_checkpoint(tmp_path / "linen", tmp_path / "maxtext", 6, "maxtext", say=lambda _: None)
  on_maxtext = config.replace(cfg, load_parameters_path=str(tmp_path / "maxtext"))
  tokens = np.arange(9, dtype=np.int32)[None]
  for few_bits in ("", "int8w"):
    graphdefs = (load_model.load(place, config.replace(c, quantization=few_bits)) for c in (cfg, on_maxtext))
    expected, found = (tiny.logits(nnx.merge(*loaded), tokens) for loaded in graphdefs)
    np.testing.assert_allclose(found, expected, atol=1e-2 if few_bits else 2e-6)
  shutil.copytree(folder / "whole" / "run", tmp_path / "run")
  config.save(on_maxtext, tmp_path / "run" / "config.yml")
  hf_checkpoint.export_model(tmp_path / "run", tmp_path / "hf", say=lambda _: None)
  found = tiny.logits(nnx.merge(*load_model.load(*load_model.find(tmp_path / "hf"))), tokens)
  np.testing.assert_allclose(found, tiny.logits(nnx.merge(*load_model.load(place, cfg)), tokens), atol=2e-6)


def test_a_base_in_host_memory_is_read_and_takes_the_adapters_of_another_run(runs, tmp_path):
  """Its configuration is valid with adapters alone (two_pass), and so is not that of its base."""
  keys = keys_of(tmp_path, runs[0] / "base" / "run", f"lora_restore_path={runs[0] / 'whole' / 'run'}")
  _, wanted = opened(*keys)
  _, found = opened(*keys, "offload_to_host=[weights]", "segment_lengths=[2]")
  assert found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in found)


def test_adapters_are_merged_into_the_base_that_they_were_trained_on(runs, tmp_path, capsys):
  """In few bits: what its codes stand for, also of matrices without an adapter."""
  folder, _ = runs
  keys = keys_of(
    tmp_path, folder / "base" / "run", "lora_weight_qtype=nf4", "lora_module_path=.*/(query|wo)", "steps=2"
  )
  with tiny.cheap_compilation(), tiny.one_device():
    assert train.main(keys) == 0
  place, cfg = load_model.find(tmp_path / "run")
  _, begun = opened(*keys)
  settings, arrays = load_model.merge.open_adapter(tmp_path / "run", cfg.model)
  assert settings.base_qtype == "nf4" and any(x.any() for label, x in arrays.items() if label.endswith("b"))
  graphdef, abstract = nnx.split(adapters.create_abstract(cfg))
  tokens = np.arange(9, dtype=np.int32)[None]
  ours = nnx.merge(graphdef, state.from_tree(_nested(begun | arrays), abstract))(tokens)
  graphdef, merged = load_model.load(place, cfg)
  np.testing.assert_allclose(tiny.logits(nnx.merge(graphdef, merged), tokens), ours, atol=2e-6)
  assert "into the matrices that nf4 makes of " in capsys.readouterr().out
  plain = load_model.merge.merged(
    read_checkpoint(open_tree(model_path.find(folder / "base" / "run").tree)), cfg.model,
    dataclasses.replace(settings, base_qtype=""), arrays,
  )  # fmt: skip
  graphdef, abstract = nnx.split(adapters.create_abstract(load_model.plain(cfg)))
  wanted = {"model": state.to_tree(state.abstract_arrays(abstract))}
  stored = state.from_tree(open_load(plain, wanted)()["model"], abstract)
  assert np.abs(nnx.merge(graphdef, stored)(tokens) - ours).max() > 1e-3


def test_adapters_on_a_base_in_bfloat16_are_merged_into_its_rounded_matrices(runs, tmp_path):
  """The merged model is the one that was trained, as with a base in few bits."""
  folder, run = runs[0], tmp_path / "run"
  shutil.copytree(folder / "whole" / "run", run)
  cfg = config.replace(config.load(run / "config.yml"), lora_weight_qtype="bfloat16")
  config.save(cfg, run / "config.yml")
  arrays = load_model.merge.open_adapter(run, cfg.model)[1]
  _, begun = opened(*keys_of(tmp_path, folder / "base" / "run", "lora_weight_qtype=bfloat16"))
  graphdef, abstract = nnx.split(adapters.create_abstract(cfg))
  tokens = np.arange(9, dtype=np.int32)[None]
  ours = tiny.logits(nnx.merge(graphdef, state.from_tree(_nested(begun | arrays), abstract)), tokens)
  graphdef, merged = load_model.load(*load_model.find(run))
  np.testing.assert_allclose(tiny.logits(nnx.merge(graphdef, merged), tokens), ours, atol=2e-6)


def test_an_export_of_a_run_with_adapters_is_its_base_with_them(runs, tmp_path):
  run, base = runs[0] / "whole" / "run", runs[0] / "base" / "run"
  for source, target, adapter in ((run, "run", ""), (base, "merged", run), (base, "base", "")):
    hf_checkpoint.export_model(source, tmp_path / target, adapter=adapter, say=lambda line: None)
  own, merged, plain = ((tmp_path / x / "model.safetensors").read_bytes() for x in ("run", "merged", "base"))
  assert own == merged != plain


def test_adapters_of_another_model_are_not_merged(runs):
  """Also where its matrices have the same shapes."""
  run = runs[0] / "whole" / "run"
  model = load_model.find(run)[1].model
  with pytest.raises(ConfigError, match=r"^the base is another model than .*run: they differ in vocab_size$"):
    load_model.merge.open_adapter(run, dataclasses.replace(model, vocab_size=model.vocab_size + 1))


def test_a_run_with_adapters_is_a_teacher_with_them(runs):
  found = []
  for run in (runs[0] / "whole" / "run", runs[0] / "base" / "run"):
    cfg = load_model.plain(load_model.find(run)[1])
    _, open_teacher = load_model.teacher(config.replace(cfg, objective="distill", distill_teacher=str(run)))
    graphdef, abstract = nnx.split(adapters.create_abstract(cfg))
    held = open_teacher(state.to_tree(state.abstract_arrays(abstract)))()["model"]
    tokens = np.arange(9, dtype=np.int32)[None]
    found.append(nnx.merge(graphdef, state.from_tree(held, abstract))(tokens))
    graphdef, merged = load_model.load(*load_model.find(run))
    np.testing.assert_array_equal(nnx.merge(graphdef, merged)(tokens), found[-1])
  assert np.abs(found[0] - found[1]).max() > 1e-3


def test_adapters_of_layers_that_are_not_stacked(runs, tmp_path):
  """They come from a run in either form, may be on some layers only, and go through a folder of PEFT."""
  folder, _ = runs
  keys = keys_of(tmp_path, folder / "base" / "run")
  whole = f"lora_restore_path={folder / 'whole' / 'run'}"
  stacked, apart = (opened(*keys, whole, form)[1] for form in ("scan_layers=true", UNSTACKED))
  for label in ("mlp/wi_0/lora/b", "self_attention/out/lora/a", "mlp/wo/kernel"):
    for i in range(2):
      np.testing.assert_array_equal(apart[f"decoder/layers_{i}/{label}"], stacked[f"decoder/layers/{label}"][i])
  some = [*keys, UNSTACKED, "lora_module_path=decoder/layers_1/.*/query", "steps=2", "ghost_enabled=false"]
  with tiny.cheap_compilation(), tiny.one_device():
    assert train.main(some) == 0
  place, cfg = load_model.find(tmp_path / "run")
  _, begun = opened(*some, f"lora_restore_path={tmp_path / 'run'}")
  assert begun["decoder/layers_1/self_attention/query/lora/b"].any()
  graphdef, abstract = nnx.split(adapters.create_abstract(cfg))
  tokens = np.arange(9, dtype=np.int32)[None]
  ours = tiny.logits(nnx.merge(graphdef, state.from_tree(_nested(begun), abstract)), tokens)
  graphdef, merged = load_model.load(place, cfg)
  np.testing.assert_allclose(tiny.logits(nnx.merge(graphdef, merged), tokens), ours, atol=2e-6)
  command = ["adapter", str(tmp_path / "run"), str(tmp_path / "peft")]
  assert hf_checkpoint.main([*command, "--ram_mb", "8"]) == 2  # an adapter is written whole
  assert hf_checkpoint.main(command) == 0
  assert json.loads((tmp_path / "peft" / peft.CONFIG).read_text())["target_modules"] == ["1.self_attn.q_proj"]
  _, again = opened(*some, f"lora_restore_path={tmp_path / 'peft'}")
  assert again.keys() == begun.keys() and all(np.array_equal(again[name], begun[name]) for name in begun)


@pytest.mark.parametrize("key", ["load_parameters_path", "load_full_state_path"])
def test_adapters_alone_are_not_the_model_that_a_run_begins_with(runs, key, tmp_path):
  run, base = runs[0] / "whole" / "run", runs[0] / "base" / "run"
  said = (
    rf"{key}=.*run holds adapters alone; use load_parameters_path={base} lora_restore_path={run} with its lora_rank"
  )
  with pytest.raises(ConfigError, match=said):
    load_model.check_config(config.load(*KEYS, f"base_output_directory={tmp_path}", f"{key}={run}"))
  with pytest.raises(ConfigError, match=f"holds adapters of its own; give its base, {base}, to merge x into"):
    load_model.load(*load_model.find(run), adapter="x")


def _nested(flat: dict) -> dict:
  from flax.traverse_util import unflatten_dict

  return unflatten_dict({tuple(label.split("/")): jax.numpy.asarray(x) for label, x in flat.items()})


@pytest.mark.parametrize(
  ("keys", "text"),
  [
    ("lora_rank=4", "a is (2, 16, 3) there; it has lora_rank=3 lora_alpha=5"),
    ("lora_alpha=6", "its scale is another; it has lora_rank=3"),
    ("lora_module_path=.*/query", "is (2, 16, 3) there; it has lora_rank=3"),
    ("lora_restore_path=/nowhere", "lora_restore_path=/nowhere: there is no model folder /nowhere"),
  ],
)
def test_adapters_that_do_not_fit_are_refused(runs, keys, text, tmp_path):
  folder, _ = runs
  restore = f"lora_restore_path={folder / 'whole' / 'run'}"
  with pytest.raises(ConfigError, match=re.escape(text)):
    opened(*keys_of(tmp_path, folder / "base" / "run", restore), keys)


def test_a_run_with_adapters_of_no_model_says_how_to_train_them_for_one(tmp_path):
  cfg = config.load(None, "lora_rank=4")
  with pytest.raises(ConfigError, match="without a base; train them with load_parameters_path"):
    model_path.with_base(model_path.ModelPlace(tmp_path, cfg, None), cfg)
