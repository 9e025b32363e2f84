"""Converting real MaxText checkpoints and synthetic ones: every leaf, bit by bit, read back by Orbax itself."""

import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_convert_trees import (
  FIXTURES,
  REAL,
  L,
  convert_tree,
  linen,
  nnx,
  orbax_leaves,
  same_bytes,
  save,
  unpack,
  wrap,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from maxghost.checkpoint import compare_checkpoints, inspect
from maxghost.checkpoint.layouts import ReadOptions
from maxghost.checkpoint.layouts_store import nested, open_tree
from maxghost.interop import convert as convert_module
from maxghost.interop.convert import convert
from maxghost.interop.linen_scaling import rescale_checkpoint
from maxghost.interop.load_tree import load_tree


def silent(_):
  pass


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("through", ["nnx", "maxghost"])
def test_real_checkpoints_come_back_bit_identical(name, through, tmp_path):
  source = unpack(name, tmp_path)
  convert(source, tmp_path / "there", to=through, say=silent)
  back = "maxtext_nnx" if name.startswith("nnx") else "linen"
  convert(tmp_path / "there", tmp_path / "back", to=back, say=silent)
  before, after = orbax_leaves(source), orbax_leaves(tmp_path / "back")
  assert len(before) > 39 and after[("step",)] == 3 and after[("step",)].dtype == np.int32
  same_bytes(before, after)
  assert open_tree(source).custom_metadata["scan_layers"] == open_tree(tmp_path / "back").custom_metadata["scan_layers"]
  keys = {path: a.key_impl for path, a in open_tree(source).arrays().items()}
  assert keys == {path: a.key_impl for path, a in open_tree(tmp_path / "back").arrays().items()}


@pytest.mark.parametrize("name", ["linen_scanned", "linen_moe_scanned"])
def test_unstacking_takes_dimension_1_of_parameters_and_moments(name, tmp_path):
  source = unpack(name, tmp_path)
  convert(source, tmp_path / "out", to="linen", layers="unscanned", say=silent)
  before, after = orbax_leaves(source), orbax_leaves(tmp_path / "out")
  stacked = {path: x for path, x in before.items() if "layers" in path}
  assert {path[0] for path in stacked} == {"params", "opt_state"} and len(stacked) % 3 == 0
  for path, x in stacked.items():
    k = path.index("layers")
    for i in range(3):
      y = after.pop((*path[:k], f"layers_{i}", *path[k + 1 :]))
      np.testing.assert_array_equal(y, np.take(x, i, axis=1), strict=True)
  same_bytes({path: x for path, x in before.items() if path not in stacked}, after)
  assert open_tree(tmp_path / "out").custom_metadata["scan_layers"] is False


def test_stacking_puts_layers_on_dimension_1_or_0(tmp_path):
  source = unpack("linen_unscanned", tmp_path)
  convert(source, tmp_path / "linen", to="linen", layers="scanned", say=silent)
  convert(source, tmp_path / "maxghost", to="maxghost", layers="scanned", say=silent)
  before, maxtext, ours = (orbax_leaves(p) for p in (source, tmp_path / "linen", tmp_path / "maxghost"))
  mu, name = ("opt_state", 0, "mu", "params"), ("mlp", "wo", "kernel")
  parts = [before[(*mu, "decoder", f"layers_{i}", *name)] for i in range(3)]
  np.testing.assert_array_equal(maxtext[(*mu, "decoder", "layers", *name)], np.stack(parts, axis=1), strict=True)
  ours_path = ("optimizer", "opt_state", "0", "mu", "decoder", "layers", *name)
  np.testing.assert_array_equal(ours[ours_path], np.stack(parts, axis=0), strict=True)
  assert ours[("optimizer", "step")].dtype == np.uint32
  convert(tmp_path / "maxghost", tmp_path / "back", to="linen", layers="unscanned", say=silent)
  same_bytes(before, orbax_leaves(tmp_path / "back"))


def test_orbax_restores_typed_keys_and_arrays_of_a_converted_checkpoint(tmp_path):
  source = unpack("nnx_scanned", tmp_path)
  convert(source, tmp_path / "run" / "2", to="nnx", say=silent)
  manager = ocp.CheckpointManager(tmp_path / "run", item_names=("items",))
  assert manager.all_steps() == [2] and manager.metadata(2).custom_metadata["scan_layers"] is True
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  key_path = ("model", "decoder", "layers", "dropout", "rngs", "params", "key")
  words = orbax_leaves(tmp_path / "run" / "2")[key_path]
  assert words.shape == (3, 4)
  key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl="unsafe_rbg"), 3))
  wanted = jax.ShapeDtypeStruct((3,), key.dtype, sharding=device)
  for name in reversed(key_path):
    wanted = {name: wanted}
  with ocp.PyTreeCheckpointer() as checkpointer:
    args = ocp.args.PyTreeRestore(
      wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    got = checkpointer.restore(tmp_path / "run" / "2" / "items", args=args)
  for name in key_path:
    got = got[name]
  np.testing.assert_array_equal(jax.random.key_data(got), words)


def logits_from(leaves: dict, *, stacked_at: int | None, eps: float, timescale: float, batch, scale: float = 1.0):
  """MaxText's llama2 function in numpy float64, from maxghost- or NNX-layout leaves; `scale` multiplies q k."""

  def p(*path, layer=None):
    if layer is not None and stacked_at is not None:
      x = leaves[("model", "decoder", "layers", *path)]
      return np.take(x, layer, axis=min(stacked_at, x.ndim - 1)).astype(float)
    path = path if layer is None else ("decoder", f"layers_{layer}", *path)
    return leaves[("model", *path)].astype(float)

  def norm(x, gain):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * gain

  positions, segments = batch["positions"], batch["segment_ids"]
  x = p("token_embedder", "embedding")[batch["tokens"]]
  num_layers = 3
  for i in range(num_layers):
    y = norm(x, p("pre_self_attention_layer_norm", "scale", layer=i))
    kernels = (p("self_attention", name, "kernel", layer=i) for name in ("query", "key", "value"))
    q, k, v = (np.einsum("btd,dhw->bthw", y, kernel) for kernel in kernels)
    half = q.shape[-1] // 2
    angle = positions[..., None] / timescale ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
    q, k = (
      np.concatenate([z[..., :half] * cos - z[..., half:] * sin, z[..., half:] * cos + z[..., :half] * sin], -1)
      for z in (q, k)
    )
    k, v = (np.repeat(z, q.shape[2] // k.shape[2], axis=2) for z in (k, v))
    scores = np.einsum("bqhw,bkhw->bhqk", q, k) * scale
    mask = (segments[:, :, None] == segments[:, None, :]) & np.tri(scores.shape[-1], dtype=bool)
    scores = np.where(mask[:, None], scores, -1e30)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("bhqk,bkhw->bqhw", weights / weights.sum(-1, keepdims=True), v)
    x = x + np.einsum("bqhw,hwd->bqd", out, p("self_attention", "out", "kernel", layer=i))
    y = norm(x, p("post_self_attention_layer_norm", "scale", layer=i))
    gate, up = (y @ p("mlp", n, "kernel", layer=i) for n in ("wi_0", "wi_1"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ p("mlp", "wo", "kernel", layer=i)
  return norm(x, p("decoder", "decoder_norm", "scale")) @ p("decoder", "logits_dense", "kernel")


@pytest.mark.parametrize(
  ("name", "layers", "stacked_at"),
  [
    ("linen_scanned", "keep", 1),
    ("linen_unscanned", "keep", None),
    ("nnx_unscanned", "scanned", 1),
    ("nnx_scanned", "unscanned", None),
  ],
)
def test_logits_of_converted_parameters_are_maxtexts(name, layers, stacked_at, tmp_path):
  convert(unpack(name, tmp_path), tmp_path / "nnx", to="nnx", layers=layers, say=silent)
  batch = np.load(FIXTURES / f"{name}.npz")
  logits = logits_from(orbax_leaves(tmp_path / "nnx"), stacked_at=stacked_at, eps=3e-4, timescale=700.0, batch=batch)
  counted = batch["segment_ids"] > 0
  assert 0 < counted.sum() < counted.size
  np.testing.assert_allclose(logits[counted], batch["logits"][counted], atol=2e-5, rtol=0)


def test_item_folder_in_item_folder_out(tmp_path):
  source = unpack("linen_scanned", tmp_path)
  convert(source / "items", tmp_path / "nnx", say=silent)
  assert (tmp_path / "nnx" / "_METADATA").is_file() and (tmp_path / "nnx" / "_CHECKPOINT_METADATA").is_file()
  convert(tmp_path / "nnx", tmp_path / "back", say=silent)
  same_bytes(orbax_leaves(source), orbax_leaves(tmp_path / "back"))


def test_parameters_alone(tmp_path):
  source = unpack("linen_scanned", tmp_path)
  lines = []
  convert(source, tmp_path / "linen", to="linen", params_only=True, layers="unscanned", say=lines.append)
  assert any("left out: opt_state/0/mu" in line for line in lines)
  before, linen_only = orbax_leaves(source), orbax_leaves(tmp_path / "linen")
  assert {path[:2] for path in linen_only} == {("params", "params")} and len(linen_only) == 3 + 3 * 9
  convert(source, tmp_path / "serving", to="params", say=silent)
  serving = orbax_leaves(tmp_path / "serving")
  wanted = {(*path[2:], "value"): x for path, x in before.items() if path[0] == "params"}
  same_bytes(wanted, serving)
  convert(tmp_path / "serving", tmp_path / "back", to="linen", say=silent)
  same_bytes({path: x for path, x in before.items() if path[0] == "params"}, orbax_leaves(tmp_path / "back"))


@pytest.mark.parametrize("form", ["scanned", "unscanned"])
def test_synthetic_mixture_of_experts_both_ways(form, tmp_path):
  """Scalars and vectors per layer, experts, moments; the NNX side is built by hand, not by the converter."""
  save(tmp_path / "linen", linen(form), scan_layers=form == "scanned")
  convert(tmp_path / "linen", tmp_path / "nnx", say=silent)
  same_bytes(orbax_leaves(save(tmp_path / "by_hand", nnx(form))), orbax_leaves(tmp_path / "nnx"))
  convert(tmp_path / "by_hand", tmp_path / "back", direction="nnx_to_linen", say=silent)
  same_bytes(orbax_leaves(tmp_path / "linen"), orbax_leaves(tmp_path / "back"))


@pytest.mark.parametrize("target", ["scanned", "unscanned", "integer"])
def test_layer_forms_are_one_transform_of_parameters_and_moments(target, tmp_path):
  source = save(tmp_path / "nnx", nnx("integer"))
  convert(source, tmp_path / "out", to="nnx", layers=target, say=silent)
  leaves = orbax_leaves(tmp_path / "out")

  def below(*root):
    return {p[len(root) :]: x.shape for p, x in leaves.items() if p[: len(root)] == root}

  params = below("model")
  assert params == below("optimizer", "opt_state", "0", "mu") == below("optimizer", "opt_state", "0", "nu")
  scalar = {"scanned": ("layers", "temperature"), "unscanned": ("layers_1", "temperature")}.get(
    target, ("layers", "1", "temperature")
  )
  assert params[("decoder", *scalar)] == ((L,) if target == "scanned" else ())
  convert(tmp_path / "out", tmp_path / "back", to="nnx", layers="integer", say=silent)
  same_bytes(orbax_leaves(source), orbax_leaves(tmp_path / "back"))


def test_any_scan_axis(tmp_path):
  """Axis 2: leaves of lower rank have L behind their last dimension."""
  save(tmp_path / "linen", linen("scanned", axis=2))
  read = ReadOptions(scan_axis=2)
  convert(tmp_path / "linen", tmp_path / "un", to="linen", layers="unscanned", read=read, say=silent)
  leaves = orbax_leaves(tmp_path / "linen")
  un = orbax_leaves(tmp_path / "un")
  wo = ("MoeBlock_0", "wo")
  whole = leaves[("params", "params", "decoder", "layers", *wo)]
  assert whole.shape[2] == L
  np.testing.assert_array_equal(un[("params", "params", "decoder", "layers_2", *wo)], whole[:, :, 2])
  convert(tmp_path / "linen", tmp_path / "nnx", read=read, say=silent)  # the axis is recorded ...
  convert(tmp_path / "nnx", tmp_path / "back", say=silent)  # ... and known here
  same_bytes(leaves, orbax_leaves(tmp_path / "back"))
  convert(tmp_path / "nnx", tmp_path / "axis1", to="linen", scan_axis=1, say=silent)
  moved = orbax_leaves(tmp_path / "axis1")[("params", "params", "decoder", "layers", *wo)]
  np.testing.assert_array_equal(moved, np.moveaxis(whole, 2, 1))


def test_small_blocks_give_the_same_bytes_and_bound_what_is_held(tmp_path, monkeypatch):
  save(tmp_path / "linen", linen("scanned"))
  limit, sizes = 100, []  # bytes of a block; a twelfth of the memory allowed
  part = convert_module.LayerReader.part

  def watched(self, ref, index):
    block = part(self, ref, index)
    sizes.append(block.nbytes)
    return block

  monkeypatch.setattr(convert_module.LayerReader, "part", watched)
  whole = max(x.nbytes for x in orbax_leaves(tmp_path / "linen").values() if x is not None)
  assert whole > 5 * limit
  options = {"to": "linen", "ram_bytes": 12 * limit, "verify": False, "say": silent}
  convert(tmp_path / "linen", tmp_path / "un", layers="unscanned", **options)
  convert(tmp_path / "un", tmp_path / "back", layers="scanned", **options)
  assert max(sizes) <= limit and len(sizes) > 500
  monkeypatch.undo()
  same_bytes(orbax_leaves(tmp_path / "linen"), orbax_leaves(tmp_path / "back"))


def test_bfloat16_and_other_dtypes_keep_their_bits(tmp_path):
  import ml_dtypes

  rng = np.random.default_rng(1)
  layers = {
    "kernel": rng.normal(size=(5, L, 7)).astype(ml_dtypes.bfloat16),
    "table": rng.integers(-5, 5, size=(4, L)).astype(np.int8),
    "flag": np.array([True, False, True]),
    "wide": np.array([np.nan, -0.0, np.inf]),
  }
  tree = {"params": {"params": {"decoder": {"layers": layers}}}, "step": np.int32(1)}
  save(tmp_path / "linen", tree)
  convert(tmp_path / "linen", tmp_path / "ours", to="maxghost", layers="unscanned", say=silent)
  convert(tmp_path / "ours", tmp_path / "back", to="linen", layers="scanned", say=silent)
  same_bytes(orbax_leaves(tmp_path / "linen"), orbax_leaves(tmp_path / "back"))


def test_trees_in_memory_with_optax_states(tmp_path):
  """Row 15: NamedTuples, tuples, EmptyStates; momentum in `trace`."""
  import optax

  params = linen()["params"]["params"]
  params["decoder"].pop("layers")
  params["decoder"]["layers_0"] = {"mlp": {"kernel": np.ones((3, 4), np.float32)}}
  tx = optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale_by_schedule(lambda _: 1.0))
  state = {"params": {"params": params}, "opt_state": tx.init({"params": params}), "step": np.int32(4)}
  out = convert_tree(state)
  assert set(out["optimizer"]["opt_state"]) == {"1", "2"}
  assert out["optimizer"]["opt_state"]["1"]["trace"]["decoder"]["layers_0"]["mlp"]["kernel"].shape == (3, 4)
  assert out["optimizer"]["step"].dtype == np.uint32
  back = convert_tree(out)
  assert back["opt_state"][0] is None and back["opt_state"][1]["trace"]["params"]["token_embedder"]
  assert isinstance(back["opt_state"], list) and back["step"].dtype == np.int32


def test_a_train_state_of_this_program_round_trips(tmp_path):
  """The tree the trainer saves: model, optimizer and what only the trainer knows."""
  import optax
  from flax import nnx as flax_nnx

  class Model(flax_nnx.Module):
    def __init__(self, rngs):
      self.layers_0 = flax_nnx.Linear(3, 5, rngs=rngs)
      self.layers_1 = flax_nnx.Linear(3, 5, rngs=rngs)
      self.dropout = flax_nnx.Dropout(0.1, rngs=rngs)

  net = Model(flax_nnx.Rngs(0))
  state = {"model": net, "optimizer": flax_nnx.Optimizer(net, optax.adamw(lambda step: 1e-3), wrt=flax_nnx.Param)}
  tree = flax_nnx.to_pure_dict(flax_nnx.state(state))
  out = convert_tree(tree, "linen", layers="scanned")
  np.testing.assert_array_equal(
    out["params"]["params"]["layers"]["kernel"],
    np.stack([tree["model"]["layers_0"]["kernel"], tree["model"]["layers_1"]["kernel"]], axis=1),
  )
  assert out["opt_state"][1] is None and out["opt_state"][2]["count"] == 0
  assert out["nnx_aux"]["model"]["dropout"]["rngs"]["key"].dtype == jax.random.key(0).dtype
  back = convert_tree(out, layers="unscanned")
  assert jax.tree.structure(back["model"]) == jax.tree.structure(tree["model"])
  np.testing.assert_array_equal(back["model"]["layers_1"]["kernel"], tree["model"]["layers_1"]["kernel"])


def test_wrapped_leaves_of_both_generations(tmp_path):
  source = nnx("unscanned")
  bare = orbax_leaves(save(tmp_path / "bare", source))
  old = {"params": wrap(source["model"]), **source["optimizer"]}
  half = {"model": wrap(source["model"]), "optimizer": source["optimizer"] | {"step": {"value": np.uint32(9)}}}
  for name, tree in (("old", old), ("half", half), ("all", wrap(source))):
    save(tmp_path / name, tree)
    convert(tmp_path / name, tmp_path / f"{name}_out", to="nnx", say=silent)
    same_bytes(bare, orbax_leaves(tmp_path / f"{name}_out"))
  convert(tmp_path / "bare", tmp_path / "wrapped", to="nnx", wrapped=True, say=silent)
  same_bytes(orbax_leaves(tmp_path / "all"), orbax_leaves(tmp_path / "wrapped"))


@pytest.mark.parametrize(("ocdbt", "zarr3"), [(True, False), (False, True), (False, False)])
def test_older_storage_formats_of_orbax(ocdbt, zarr3, tmp_path):
  with ocp.PyTreeCheckpointer(use_ocdbt=ocdbt, use_zarr3=zarr3) as checkpointer:
    checkpointer.save(tmp_path / "a", linen("unscanned"))
  convert(tmp_path / "a", tmp_path / "b", to="linen", say=silent)
  same_bytes(orbax_leaves(tmp_path / "a"), orbax_leaves(tmp_path / "b"))


def test_verification_finds_what_was_written_wrong(tmp_path, monkeypatch):
  save(tmp_path / "linen", linen())
  write = convert_module.read_block

  def one_bit(reader, leaf, index=None):
    block = write(reader, leaf, index)
    if leaf.path[-1] == "wo" and "nu" in leaf.path:
      block = block.copy()
      block.view(np.uint8).flat[3] ^= 1
    return block

  monkeypatch.setattr(convert_module, "read_block", one_bit)
  with pytest.raises(convert_module.VerificationError, match="opt_state/0/nu/decoder/layers/MoeBlock_0/wo"):
    convert(tmp_path / "linen", tmp_path / "out", say=silent)
  assert [p.name for p in tmp_path.iterdir()] == ["linen"]


def test_dry_run_prints_the_mapping_and_writes_nothing(tmp_path, capsys):
  save(tmp_path / "linen", linen())
  arguments = ["--source_path", str(tmp_path / "linen"), "--target_path", str(tmp_path / "out"), "--dry_run"]
  assert convert_module.main([*arguments, "--no-scan_layers"]) == 0
  printed = capsys.readouterr().out
  assert "params/params/decoder/layers/norm/scale[layer 2] -> model/decoder/layers_2/norm/scale  float32[5]" in printed
  assert "opt_state/0/count -> optimizer/opt_state/0/count  int32[]" in printed
  assert not (tmp_path / "out").exists()


def test_metadata_is_carried_over(tmp_path):
  save(tmp_path / "linen", linen(), scan_layers=True, lora={"lora_rank": 4})
  convert(tmp_path / "linen", tmp_path / "nnx", layers="unscanned", say=silent)
  content = json.loads((tmp_path / "nnx" / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
  assert content["lora"] == {"lora_rank": 4} and content["scan_layers"] is False


def test_masked_moments_and_inner_chains(tmp_path):
  """Muon as MaxText's Linen runs would write it: None where an optimizer leaves a parameter to the other."""
  source = unpack("nnx_muon_scanned", tmp_path)
  convert(source, tmp_path / "linen", to="linen", say=silent)
  leaves = orbax_leaves(tmp_path / "linen")
  inner = ("opt_state", "inner_states", "adam", "inner_state")
  assert leaves[(*inner, 0, "mu", "params", "decoder", "layers", "mlp", "wo", "kernel")] is None
  assert leaves[(*inner, 0, "mu", "params", "decoder", "decoder_norm", "scale")].shape == (12,)
  assert leaves[(*inner, 1)] is None and leaves[(*inner, 2, "count")] == 3
  convert(tmp_path / "linen", tmp_path / "back", to="maxtext_nnx", say=silent)
  same_bytes(orbax_leaves(source), orbax_leaves(tmp_path / "back"))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_tree_through_any_form_comes_back(data):
  """Random models: every layer form, scan axis, container name, leaf rank and number of layers."""
  num_layers = data.draw(st.integers(1, 4))
  axis = data.draw(st.integers(0, 3))
  container = data.draw(st.sampled_from(["layers", "dense_layers", "moe_layers", "scanned_blocks"]))
  shapes = data.draw(st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=4))
  names = [("mlp", f"wi_{i}", "kernel") if i % 2 else (f"norm{i}", "scale") for i in range(len(shapes))]
  rng = np.random.default_rng(data.draw(st.integers(0, 99)))

  def layers():
    return {name: rng.normal(size=(num_layers, *shape)) for name, shape in zip(names, shapes, strict=True)}

  def put(tree, path, leaf):
    for key in path[:-1]:
      tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf

  def params(form, leaves):
    tree = {"token_embedder": {"embedding": np.arange(6.0).reshape(2, 3)}, "decoder": {}}
    for name, x in leaves.items():
      if form == "scanned":
        put(tree["decoder"], (container, *name), np.moveaxis(x, 0, min(axis, x.ndim - 1)))
      for i in range(num_layers if form != "scanned" else 0):
        place = (f"{container}_{i}",) if form == "unscanned" else (container, str(i))
        put(tree["decoder"], (*place, *name), x[i])
    return tree

  values, mu = layers(), layers()
  forms = ("scanned", "unscanned", "integer")

  def checkpoint(form):
    return {
      "model": params(form, values),
      "optimizer": {"opt_state": {"1": {"mu": params(form, mu), "count": np.int32(4)}}, "step": np.uint32(5)},
    }

  read = ReadOptions(scan_axis=axis)
  first, second = data.draw(st.sampled_from(forms)), data.draw(st.sampled_from(forms))
  there = convert_tree(checkpoint(first), "nnx", layers=second, read=read, scan_axis=axis)
  jax.tree.map(np.testing.assert_array_equal, there, checkpoint(second))
  through = "unscanned" if second == "integer" else second
  linen_tree = convert_tree(there, "linen", layers=through, read=read, scan_axis=axis)
  jax.tree.map(np.testing.assert_array_equal, linen_tree["params"]["params"], params(through, values))
  jax.tree.map(np.testing.assert_array_equal, linen_tree["opt_state"][1]["mu"]["params"], params(through, mu))
  back = convert_tree(linen_tree, "nnx", layers=first, read=read, scan_axis=axis)
  jax.tree.map(np.testing.assert_array_equal, back, checkpoint(first))


def test_paths_may_lead_through_the_folder_above(tmp_path, monkeypatch):
  """TensorStore takes no `..`."""
  source = unpack("linen_scanned", tmp_path / "a")
  (tmp_path / "b").mkdir()
  monkeypatch.chdir(tmp_path / "b")
  upward = Path("..") / source.relative_to(tmp_path)
  convert(upward, "../b/../ours", to="maxghost", say=silent)
  rescale_checkpoint("../ours", "../rescaled", 4, "maxghost", say=silent)
  assert compare_checkpoints(upward, "../ours").equal and inspect("../rescaled")["parameters"] == 5028
  before = orbax_leaves(tmp_path / "ours")
  path = ("model", "token_embedder", "embedding")
  wanted = {"model": nested({key[1:]: value for key, value in before.items() if key[0] == "model"})}
  found = load_tree("../ours", wanted, say=silent)["model"]
  np.testing.assert_array_equal(found[path[1]][path[2]], before[path])
