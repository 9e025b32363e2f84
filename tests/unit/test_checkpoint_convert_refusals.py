"""What the converter must get right or refuse by name, row by row of the table of known converter defects.

The rows are those of docs/checkpoints.md. "Refuses" means: LayoutError with this text, and nothing at the target.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_convert_trees import (
  E,
  L,
  M,
  Numbers,
  convert_tree,
  linen,
  model,
  nnx,
  orbax_leaves,
  same_bytes,
  save,
  unpack,
  wrap,
)

from maxghost.checkpoint.compare import compare_checkpoints
from maxghost.checkpoint.layouts import ReadOptions
from maxghost.checkpoint.layouts_store import LayoutError, open_tree
from maxghost.interop import convert as convert_module
from maxghost.interop.convert import convert, main


def silent(_):
  pass


def refuses(source: Path, text: str, **options) -> None:
  """Asserts that converting raises with `text` and leaves nothing behind."""
  folder = source.parent
  before = sorted(p.name for p in folder.iterdir())
  with pytest.raises(LayoutError, match=text) as caught:
    convert(source, folder / "out", say=silent, **options)
  assert len(str(caught.value).splitlines()) == 1
  assert sorted(p.name for p in folder.iterdir()) == before


def two_layers(**changes) -> dict:
  """A Linen tree of layers_0, layers_1; `changes` maps leaf names of layers_1 to other arrays (None = absent)."""
  numbers = Numbers()
  layers = [{"attn": {"kernel": numbers(4, 3)}, "extra": {"kernel": numbers(2)}} for _ in range(2)]
  for name, value in changes.items():
    if value is None:
      del layers[1][name]
    else:
      layers[1][name] = {"kernel": value}
  return {"params": {"params": {"decoder": {"layers_0": layers[0], "layers_1": layers[1]}}}, "step": np.int32(0)}


def test_row_1_moments_in_another_form_than_parameters(tmp_path):
  """Handled: such a checkpoint (written by the old converter) is told apart from a good one, and repaired."""
  good, broken = linen("scanned"), linen("scanned")
  for moment in ("mu", "nu"):
    decoder = broken["opt_state"][0][moment]["params"]["decoder"]
    stacked = decoder.pop("layers")
    for i in range(L):
      decoder[f"layers_{i}"] = _map(lambda x, i=i: np.take(x, i, axis=min(1, x.ndim - 1)), stacked)
  save(tmp_path / "good", good)
  save(tmp_path / "broken", broken)
  result = compare_checkpoints(tmp_path / "good", tmp_path / "broken")
  assert [(row.path, row.kind) for row in result.rows] == [(f"opt_state/0/{m}", "structure") for m in ("mu", "nu")]
  lines = []
  convert(tmp_path / "broken", tmp_path / "fixed", to="linen", say=lines.append)
  assert sum(line.startswith("repaired: decoder/layers unscanned in opt_state/0/") for line in lines) == 2
  same_bytes(orbax_leaves(tmp_path / "good"), orbax_leaves(tmp_path / "fixed"))


def _map(change, tree):
  return {k: _map(change, v) for k, v in tree.items()} if isinstance(tree, dict) else change(tree)


def test_row_1_moment_of_another_shape_is_refused(tmp_path):
  tree = linen("scanned")
  tree["opt_state"][0]["mu"]["params"]["decoder"]["decoder_norm"]["scale"] = np.zeros(E + 1, np.float32)
  text = r"opt_state/0/mu: leaf decoder/decoder_norm/scale has shape \(6,\), its parameter \(5,\)"
  refuses(save(tmp_path / "a", tree), text)


def test_row_1_moment_missing_from_one_tree_is_refused(tmp_path):
  tree = linen("unscanned")
  del tree["opt_state"][0]["nu"]["params"]["decoder"]["layers_1"]["norm"]
  refuses(save(tmp_path / "a", tree), "leaf decoder/layers/norm/scale of layer 1 is missing from opt_state/0/nu")


def test_row_2_layer_form_is_kept_unless_asked(tmp_path):
  for form in ("scanned", "unscanned"):
    save(tmp_path / form, linen(form))
    convert(tmp_path / form, tmp_path / f"{form}_nnx", say=silent)
    convert(tmp_path / f"{form}_nnx", tmp_path / f"{form}_back", say=silent)
    same_bytes(orbax_leaves(tmp_path / form), orbax_leaves(tmp_path / f"{form}_back"))


def test_row_3_scalars_per_layer(tmp_path):
  save(tmp_path / "a", linen("unscanned"))
  convert(tmp_path / "a", tmp_path / "b", layers="scanned", say=silent)
  before, stacked = orbax_leaves(tmp_path / "a"), orbax_leaves(tmp_path / "b")
  each = [before[("params", "params", "decoder", f"layers_{i}", "temperature")] for i in range(L)]
  np.testing.assert_array_equal(stacked[("model", "decoder", "layers", "temperature")], np.array(each), strict=True)
  convert(tmp_path / "b", tmp_path / "c", layers="unscanned", say=silent)
  same_bytes(before, orbax_leaves(tmp_path / "c"))


@pytest.mark.parametrize("container", ["dense_layers", "moe_layers", "local_layers", "blocks", "tower"])
def test_row_4_any_container_at_any_depth(container, tmp_path):
  """`tower` is no name anyone knows: equal modules of several sub-modules, numbered from 0."""
  params = {"decoder": {"inner": model(Numbers(), form="unscanned", container=container)["decoder"]}}
  params["decoder"]["mlp"] = {"wi_0": {"kernel": np.ones((2, 3))}, "wi_1": {"kernel": np.zeros((2, 3))}}
  save(tmp_path / "a", {"params": {"params": params}})
  convert(tmp_path / "a", tmp_path / "b", layers="scanned", say=silent)
  stacked = orbax_leaves(tmp_path / "b")
  assert stacked[("model", "decoder", "inner", container, "MoeBlock_0", "wo")].shape[1] == L
  assert stacked[("model", "decoder", "mlp", "wi_1", "kernel")].shape == (2, 3)  # no layers, although numbered
  convert(tmp_path / "b", tmp_path / "c", layers="unscanned", say=silent)
  same_bytes(orbax_leaves(tmp_path / "a"), orbax_leaves(tmp_path / "c"))


def test_row_4_several_containers_of_different_depth_and_length(tmp_path):
  numbers = Numbers()
  params = {
    "decoder": {
      "dense_layers": {"w": numbers(5, 2, 7)},
      "moe_layers": {"w": numbers(5, 3, 4)},
      "blocks": {"w": numbers(6, 4)},
    },
    "vision_encoder": {"tower": {"layers": {"0": {"w": numbers(6)}, "1": {"w": numbers(6)}}}},
  }
  save(tmp_path / "a", {"model": params, "optimizer": {"step": np.uint32(3)}})
  convert(tmp_path / "a", tmp_path / "b", to="linen", layers="unscanned", say=silent)
  paths = {path[2:] for path in orbax_leaves(tmp_path / "b") if path[0] == "params"}
  assert {("decoder", "dense_layers_1", "w"), ("decoder", "moe_layers_2", "w")} <= paths
  assert ("vision_encoder", "tower", "layers_1", "w") in paths and len(paths) == 11


def test_row_4_blocks_of_unlike_layers(tmp_path):
  """Two unlike layers stacked three times are the six layers 0..5 in turn."""
  numbers = Numbers()
  block = {"layers_0": {"full": {"w": numbers(5, L, 4)}}, "layers_1": {"sliding": {"w": numbers(7, L)}}}
  save(tmp_path / "a", {"params": {"params": {"decoder": {"layers": block}}}})
  convert(tmp_path / "a", tmp_path / "b", to="linen", layers="unscanned", say=silent)
  leaves = orbax_leaves(tmp_path / "b")
  assert len(leaves) == 2 * L
  np.testing.assert_array_equal(
    leaves[("params", "params", "decoder", "layers_5", "sliding", "w")], block["layers_1"]["sliding"]["w"][:, 2]
  )
  convert(tmp_path / "b", tmp_path / "c", to="linen", layers="scanned", say=silent)
  same_bytes(orbax_leaves(tmp_path / "a"), orbax_leaves(tmp_path / "c"))
  # Written by another program, the period has to be given.
  save(tmp_path / "d", {"params": {"params": _lists_to_dicts(leaves)}})
  refuses(tmp_path / "d", "exists in layers", to="linen", layers="scanned")
  convert(tmp_path / "d", tmp_path / "e", to="linen", layers="scanned", layer_period=2, say=silent)
  same_bytes(orbax_leaves(tmp_path / "a"), orbax_leaves(tmp_path / "e"))


def _lists_to_dicts(leaves: dict) -> dict:
  tree: dict = {}
  for path, leaf in leaves.items():
    here = tree
    for key in path[2:-1]:
      here = here.setdefault(key, {})
    here[path[-1]] = leaf
  return tree


def test_row_5_layers_of_different_shape_or_dtype(tmp_path):
  save(tmp_path / "shape", two_layers(attn=np.zeros((4, 8), np.float32)))
  text = (
    r"cannot stack decoder/layers_\*: leaf attn/kernel has shape \(4,3\) in layers_0 but \(4,8\) in layers_1; "
    "use --layers unscanned"
  )
  refuses(tmp_path / "shape", text, layers="scanned")
  import ml_dtypes

  save(tmp_path / "dtype", two_layers(attn=np.zeros((4, 3), ml_dtypes.bfloat16)))
  text = "leaf attn/kernel has dtype float32 in layers_0 but bfloat16 in layers_1"
  refuses(tmp_path / "dtype", text, layers="scanned")
  convert(tmp_path / "shape", tmp_path / "kept", say=silent)  # kept apart, they are no problem


def test_row_6_leaf_in_some_layers_only(tmp_path):
  save(tmp_path / "a", two_layers(extra=None))
  text = "leaf extra/kernel exists in layers 0 but not in 1 .*use --layers unscanned"
  refuses(tmp_path / "a", text, layers="scanned")
  convert(tmp_path / "a", tmp_path / "b", say=silent)
  convert(tmp_path / "b", tmp_path / "c", say=silent)
  same_bytes(orbax_leaves(tmp_path / "a"), orbax_leaves(tmp_path / "c"))


def test_row_7_gap_in_layer_indices(tmp_path):
  tree = two_layers()
  decoder = tree["params"]["params"]["decoder"]
  decoder["layers_2"] = decoder.pop("layers_1")
  save(tmp_path / "a", tree)
  refuses(tmp_path / "a", "layer indices under decoder are not contiguous: 0, 2", layers="scanned")


@pytest.mark.parametrize("layers", ["keep", "unscanned"])
@pytest.mark.parametrize("size", [2, 6])
def test_row_8_number_of_layers_differs_between_leaves(size, layers, tmp_path):
  stacked = {"a": np.zeros((5, L, 7)), "b": np.zeros((4, size, 7)), "c": np.zeros((5, L))}
  save(tmp_path / "a", {"params": {"params": {"decoder": {"layers": stacked}}}})
  refuses(tmp_path / "a", f"leaf decoder/layers/b has size {size} on scan axis 1, expected L=3", layers=layers)


def test_row_9_random_state_is_told_by_what_it_is(tmp_path):
  """Keys and counts have their layer axis first; a parameter whose name holds 'rng' is a parameter."""
  import jax

  tree = nnx("scanned")
  key = jax.random.split(jax.random.key(3), L)
  tree["model"]["decoder"]["layers"]["burngate"] = {"kernel": np.arange(E * L * 2.0).reshape(E, L, 2)}
  tree["model"]["decoder"]["layers"]["rngs"] = {"params": {"key": key, "count": np.arange(L, dtype=np.uint32)}}
  tree["optimizer"].pop("opt_state")
  out = convert_tree(tree, "linen", layers="unscanned")
  layer = out["nnx_aux"]["model"]["decoder"]["layers_2"]["rngs"]["params"]
  assert jax.random.key_data(layer["key"]).tolist() == jax.random.key_data(key[2]).tolist() and layer["count"] == 2
  assert "rngs" not in out["params"]["params"]["decoder"]["layers_2"]
  assert out["params"]["params"]["decoder"]["layers_2"]["burngate"]["kernel"].shape == (E, 2)
  back = convert_tree(out, "nnx", layers="scanned")["model"]["decoder"]["layers"]["rngs"]["params"]
  assert back["key"].dtype == key.dtype
  np.testing.assert_array_equal(jax.random.key_data(back["key"]), jax.random.key_data(key))


def test_row_9_random_state_as_plain_words(tmp_path):
  """As this trainer saves it: uint32 words without a key type."""
  tree = nnx("unscanned")
  words = np.arange(4, dtype=np.uint32)
  tree["model"]["dropout"] = {"rngs": {"key": words, "count": np.uint32(7)}}
  save(tmp_path / "a", tree)
  convert(tmp_path / "a", tmp_path / "b", say=silent)
  leaves = orbax_leaves(tmp_path / "b")
  np.testing.assert_array_equal(leaves[("nnx_aux", "model", "dropout", "rngs", "key")], words)
  lines = []
  convert(tmp_path / "a", tmp_path / "c", drop_rngs=True, say=lines.append)
  assert "dropped 2 random-state leaves (--drop_rngs)" in lines
  assert not any("nnx_aux" in path for path in orbax_leaves(tmp_path / "c"))


def test_row_10_other_persistent_state_and_unknown_keys(tmp_path):
  tree = linen() | {"nnx_aux": {"model": {"bn": {"mean": np.ones(3, np.float32)}}}}
  save(tmp_path / "a", tree)
  convert(tmp_path / "a", tmp_path / "b", say=silent)
  assert ("model", "bn", "mean") in orbax_leaves(tmp_path / "b")
  convert(tmp_path / "b", tmp_path / "c", say=silent)
  same_bytes(orbax_leaves(tmp_path / "a"), orbax_leaves(tmp_path / "c"))
  stats = linen()
  stats["params"]["batch_stats"] = {"bn": {"mean": np.ones(3)}}
  refuses(save(tmp_path / "stats", stats), "unknown key 'params/batch_stats'; pass --keep params/batch_stats or")
  save(tmp_path / "d", linen() | {"ema": {"w": np.ones(2)}})
  refuses(tmp_path / "d", "unknown top-level key 'ema'; pass --keep ema or --drop ema")
  convert(tmp_path / "d", tmp_path / "kept", read=ReadOptions(keep=("ema",)), say=silent)
  assert ("ema", "w") in orbax_leaves(tmp_path / "kept")
  lines = []
  convert(tmp_path / "d", tmp_path / "dropped", read=ReadOptions(drop=("ema",)), say=lines.append)
  assert "dropped: 1 leaves, the first ema/w" in lines
  refuses(tmp_path / "a", "--drop emma: the checkpoint has no such extra key", read=ReadOptions(drop=("emma",)))
  convert(save(tmp_path / "nnx", nnx()), tmp_path / "own", to="maxghost", say=silent)
  refuses(tmp_path / "own", "--drop optimizer: the checkpoint has no such", read=ReadOptions(drop=("optimizer",)))


def test_row_11_wrong_direction(tmp_path):
  save(tmp_path / "linen", linen())
  save(tmp_path / "nnx", nnx())
  refuses(tmp_path / "nnx", "source is NNX layout; linen_to_nnx refused", direction="linen_to_nnx")
  refuses(tmp_path / "linen", "source is Linen layout; nnx_to_linen refused", direction="nnx_to_linen")
  refuses(tmp_path / "nnx", "contradict", direction="nnx_to_linen", to="maxghost")


def test_row_12_step_list_and_holes(tmp_path):
  """A chain of twelve: '10' comes after '2', EmptyStates become None up to the highest entry."""
  tree = nnx("unscanned")
  adam = tree["optimizer"]["opt_state"].pop("0")
  del tree["optimizer"]["opt_state"]["2"]
  tree["optimizer"]["opt_state"] |= {"2": adam, "10": {"count": np.int32(5)}}
  out = convert_tree(wrap(tree))
  assert isinstance(out["opt_state"], list) and [x is None for x in out["opt_state"]] == [
    i not in (2, 10) for i in range(11)
  ]
  assert out["step"].dtype == np.int32 and out["step"] == 9 and out["opt_state"][10]["count"] == 5
  for value in (2**31, 2**32 - 1):
    tree["optimizer"]["step"] = np.uint32(value)
    with pytest.raises(LayoutError, match=f"step={value}: only 0 to 2147483647 can be moved"):
      convert_tree(tree)
  bad = linen() | {"step": np.int32(-1)}
  with pytest.raises(LayoutError, match="step=-1"):
    convert_tree(bad)


def test_row_12_trailing_hole_comes_back(tmp_path):
  tree = linen()
  tree["opt_state"] = [tree["opt_state"][0], {"count": np.int32(1)}, None]
  save(tmp_path / "a", tree)
  convert(tmp_path / "a", tmp_path / "b", say=silent)
  convert(tmp_path / "b", tmp_path / "c", say=silent)
  same_bytes(orbax_leaves(tmp_path / "a"), orbax_leaves(tmp_path / "c"))
  assert ("opt_state", 2) in orbax_leaves(tmp_path / "c")


@pytest.mark.parametrize("level", [True, False])
def test_row_13_any_moment_name_with_or_without_params_level(level, tmp_path):
  """SGD momentum: MaxText's Linen runs write trace/params/..., its NNX runs trace/... ."""
  tree = linen()
  trace = tree["opt_state"][0]["mu"]
  tree["opt_state"] = [{"trace": trace if level else trace["params"]}, {"count": np.int32(2), "params": np.float32(3)}]
  out = convert_tree(tree)
  assert "token_embedder" in out["optimizer"]["opt_state"]["0"]["trace"]
  assert out["optimizer"]["opt_state"]["1"]["params"] == 3  # a key of that name elsewhere is left alone
  assert set(convert_tree(out)["opt_state"][0]["trace"]) == {"params"}
  flat = linen() | {"opt_state": linen()["opt_state"][0]}  # an optimizer that is no chain
  back = convert_tree(convert_tree(flat))
  assert set(back["opt_state"]) == {"count", "mu", "nu"} and set(back["opt_state"]["mu"]) == {"params"}


def test_row_14_parameter_called_value(tmp_path):
  source = nnx("unscanned")
  source["optimizer"].pop("opt_state")
  source["model"]["gate"] = {"value": np.ones(3, np.float32), "bias": np.ones(2, np.float32)}
  assert set(convert_tree(source)["params"]["params"]["gate"]) == {"value", "bias"}
  assert set(convert_tree(wrap(source))["params"]["params"]["gate"]) == {"value", "bias"}
  mixed = {"model": {"decoder": {"a": {"kernel": {"value": np.ones(3)}}, "b": {"kernel": np.ones(2)}}}}
  save(tmp_path / "mixed", mixed)
  refuses(tmp_path / "mixed", "some leaves wrapped, some not: decoder/a/kernel/value .* decoder/b/kernel")
  convert(tmp_path / "mixed", tmp_path / "bare", read=ReadOptions(wrapped=False), say=silent)
  # The optimizer tells: its trees have the same paths, so `value` is a name.
  lonely = nnx("unscanned")
  for tree in (lonely["model"], *(lonely["optimizer"]["opt_state"]["0"][m] for m in ("mu", "nu"))):
    tree["gate"] = {"value": np.ones(3, np.float32)}
  assert convert_tree(lonely)["params"]["params"]["gate"]["value"].shape == (3,)


def test_row_15_other_layouts_and_unknown_ones(tmp_path):
  params = model(Numbers(), form="unscanned")
  wanted = convert_tree({"model": params})["params"]["params"]
  for tree in (params, wrap(params), {"base": params}, {"base": wrap(params)}, {"model_params": params}):
    got = convert_tree(tree)
    assert set(got) == {"params"}
    found = got["params"]["params"]["decoder"]["layers_1"]["norm"]["scale"]
    np.testing.assert_array_equal(found, wanted["decoder"]["layers_1"]["norm"]["scale"])
  diloco = {"inner_state": {"x": np.ones(2)}, "params": params, "outer_opt_state": {"y": np.ones(2)}}
  save(tmp_path / "diloco", diloco)
  refuses(tmp_path / "diloco", "unknown top-level key 'inner_state'")
  read = ReadOptions(drop=("inner_state", "outer_opt_state"))
  convert(tmp_path / "diloco", tmp_path / "ok", read=read, say=silent)
  save(tmp_path / "odd", {"body": {"kernel": np.ones(3)}, "head": {"kernel": np.ones(2)}})
  refuses(tmp_path / "odd", "cannot tell the layout; keys: body, head; pass --from")
  convert(tmp_path / "odd", tmp_path / "odd_ok", read=ReadOptions(layout="params"), say=silent)


def test_row_16_targets_that_are_refused(tmp_path):
  source = unpack("linen_scanned", tmp_path)
  before = orbax_leaves(source)
  for target, text in (
    (source, "equals source"),
    (source / "items", "equals source"),
    (source.parent, "holds the source"),
    (source / "items" / "new", "lies inside the source"),
    (tmp_path / "there", "exists; name a new folder"),
  ):
    (tmp_path / "there").mkdir(exist_ok=True)
    with pytest.raises(LayoutError, match=text):
      convert(source, target, say=silent)
  link = tmp_path / "link"
  link.symlink_to(source)
  with pytest.raises(LayoutError, match="equals source"):
    convert(source, link, say=silent)
  same_bytes(before, orbax_leaves(source))
  assert list((tmp_path / "there").iterdir()) == []


def test_row_16_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
  save(tmp_path / "a", linen())
  calls = []
  read = convert_module.read_block

  def interrupted(*arguments):
    calls.append(1)
    if len(calls) == 20:
      raise KeyboardInterrupt
    return read(*arguments)

  monkeypatch.setattr(convert_module, "read_block", interrupted)
  with pytest.raises(KeyboardInterrupt):
    convert(tmp_path / "a", tmp_path / "new" / "deep" / "out", say=silent)
  assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_row_17_exit_codes(tmp_path, monkeypatch, capsys):
  save(tmp_path / "a", linen())
  arguments = ["--source_path", str(tmp_path / "a"), "--target_path", str(tmp_path / "b")]
  assert main([*arguments, "--direction", "nnx_to_linen"]) == 2
  assert capsys.readouterr().err == "convert_checkpoint: source is Linen layout; nnx_to_linen refused\n"
  assert main(arguments) == 0 and "verified byte by byte" in capsys.readouterr().out
  monkeypatch.setattr(convert_module.compare, "compare", _one_difference)
  assert main([*arguments[:3], str(tmp_path / "c")]) == 1
  assert "verification failed" in capsys.readouterr().err and not (tmp_path / "c").exists()


def _one_difference(*_, **__):
  from maxghost.checkpoint.compare import Comparison, Row

  return Comparison([Row("params/x", "shape", "(1,)", "(2,)")])


def test_disk_full_leaves_no_target(tmp_path):
  """Every write beyond 20 kB fails, as on a full disk."""
  source = unpack("linen_scanned", tmp_path)
  tool = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"
  code = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); del sys.argv[0]; "
  code += "runpy.run_path(sys.argv[0], run_name='__main__')"
  paths = ["--source_path", str(source), "--target_path", str(tmp_path / "out")]
  command = [sys.executable, "-c", code, str(tool), *paths]
  limited = subprocess.run(command, capture_output=True, text=True, check=False)
  assert limited.returncode == 2 and "Traceback" not in limited.stderr, limited.stderr
  assert "nothing is left" in limited.stderr and len(limited.stderr.splitlines()) == 1
  assert [p.name for p in tmp_path.iterdir()] == ["linen_scanned"]


def test_too_little_space_is_seen_before_writing(tmp_path, monkeypatch):
  save(tmp_path / "a", linen())
  usage = shutil.disk_usage(tmp_path)
  monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: usage._replace(free=100))
  refuses(tmp_path / "a", "GB free, the checkpoint needs about")


def test_half_copied_and_damaged_checkpoints(tmp_path):
  source = unpack("linen_scanned", tmp_path)

  def damaged(name, change):
    copy = tmp_path / name / "2"
    shutil.copytree(source, copy)
    change(copy / "items")
    return copy

  def biggest(items):
    return max((p for p in items.rglob("*") if p.is_file() and p.parent.name == "d"), key=lambda p: p.stat().st_size)

  def shorten(file, keep=0.5):
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])

  cases = {
    "no_tree": (lambda items: (items / "_METADATA").unlink(), "half copied: it has no _METADATA"),
    "no_manifest": (lambda items: (items / "manifest.ocdbt").unlink(), "half copied: it has no manifest.ocdbt"),
    "cut_tree": (lambda items: shorten(items / "_METADATA"), "_METADATA is damaged or half copied"),
    "cut_keys": (lambda items: shorten(items / "array_metadatas" / "process_0"), "process_0 is damaged"),
    "no_data": (lambda items: biggest(items).unlink(), "leaf .* cannot be read"),
    "cut_data": (lambda items: shorten(biggest(items), 0.9), "leaf .* cannot be read"),
    "no_index": (lambda items: shutil.rmtree(items / "d"), "leaf .* cannot be read"),
  }
  gone = damaged("gone", lambda items: None)
  opened = open_tree(gone)
  shutil.rmtree(gone)
  with pytest.raises(LayoutError, match="gone/2/items is gone: a run in training removes old ones; name newer ones"):
    next(iter(opened.arrays().values())).read(None)
  for name, (change, text) in cases.items():
    copy = damaged(name, change)
    with pytest.raises(LayoutError, match=text):
      convert(copy, tmp_path / "out", say=silent)
    assert not (tmp_path / "out").exists()
  entry = json.loads((source / "items" / "_METADATA").read_text())
  entry["tree_metadata"]["('ghost',)"] = {
    "key_metadata": [{"key": "ghost", "key_type": 2}],
    "value_metadata": {"value_type": "jax.Array"},
  }
  copy = damaged("lost_leaf", lambda items: (items / "_METADATA").write_text(json.dumps(entry)))
  with pytest.raises(LayoutError, match="leaf ghost cannot be read"):
    convert(copy, tmp_path / "out", say=silent)


def test_a_missing_chunk_is_damage_not_zeros(tmp_path):
  import orbax.checkpoint as ocp

  with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:
    checkpointer.save(tmp_path / "a", linen("unscanned"))
  chunks = [p for p in (tmp_path / "a" / "params.params.token_embedder.embedding").iterdir() if p.name != ".zarray"]
  chunks[0].unlink()
  refuses(tmp_path / "a", "leaf params/params/token_embedder/embedding cannot be read")


def test_paths_that_are_no_checkpoint(tmp_path):
  run, new = tmp_path / "run" / "checkpoints", tmp_path / "new"
  new.mkdir()
  (new / "config.yml").touch()
  shutil.copytree(unpack("linen_scanned", tmp_path), run / "12")
  for path, text in (
    (tmp_path / "nothing", "there is no checkpoint folder"),
    (run, "holds the steps 12; name one"),
    (tmp_path / "run", "holds the steps 12; name one"),
    (tmp_path, "is no Orbax checkpoint"),
    (new, "has a configuration, but no checkpoint; a run saves some with checkpoint_period above 0"),
    ("gs://bucket/ckpt", "only local folders are read"),
  ):
    with pytest.raises(LayoutError, match=text):
      convert(path, tmp_path / "out", say=silent)
  unfinished = run / "13.orbax-checkpoint-tmp-1"
  shutil.copytree(run / "12", unfinished)
  with pytest.raises(LayoutError, match="was never finished"):
    convert(unfinished, tmp_path / "out", say=silent)
  os.rename(run / "12" / "items", run / "12" / "weights")
  convert(run / "12", tmp_path / "out", say=silent)  # another item name is no obstacle
  assert (tmp_path / "out" / "items" / "_METADATA").is_file()


def test_trainer_state_of_this_program_is_left_out_of_other_layouts(tmp_path):
  tree = nnx("scanned", axis=0) | {"clip_factor": np.float32(1)}
  save(tmp_path / "run" / "9" / "items", tree)
  (tmp_path / "run" / "9" / "positions").mkdir()
  (tmp_path / "run" / "9" / "_CHECKPOINT_METADATA").write_text("{}")
  lines = []
  convert(tmp_path / "run" / "9", tmp_path / "out", say=lines.append)
  assert "left out, as only a maxghost run knows it: clip_factor" in lines
  assert "not part of the tree, left behind: positions" in lines
  leaves = orbax_leaves(tmp_path / "out")
  assert leaves[("params", "params", "decoder", "layers", "MoeBlock_0", "wo")].shape == (6, L, M, E)


def test_factored_second_moments_move_whole_or_not_at_all(tmp_path):
  """Adafactor's rows and columns have a parameter's path but no layer axis that anyone could name."""
  import jax
  import optax

  params = {"params": model(Numbers(), form="scanned")}
  tx = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
  tree = {"params": params, "opt_state": [tx.init(params), {"trace": params}], "step": np.int32(1)}
  save(tmp_path / "a", jax.tree.map(np.asarray, tree))
  convert(tmp_path / "a", tmp_path / "b", say=silent)
  rows = ("optimizer", "opt_state", "0", "v_row", "decoder", "layers", "MoeBlock_0", "wo")
  assert rows in orbax_leaves(tmp_path / "b")
  convert(tmp_path / "b", tmp_path / "c", say=silent)
  same_bytes(orbax_leaves(tmp_path / "a"), orbax_leaves(tmp_path / "c"))
  refuses(tmp_path / "a", "has no layer axis of its own and cannot be restacked", layers="unscanned")
  convert(tmp_path / "a", tmp_path / "d", layers="unscanned", params_only=True, say=silent)
  # A moment that is merely called `v` has the parameters' shapes and is restacked like them.
  plain = convert_tree(tree | {"opt_state": {"v": params}}, layers="unscanned")["optimizer"]["opt_state"]["v"]
  assert plain["decoder"]["layers_2"]["norm"]["scale"].shape == (E,)
