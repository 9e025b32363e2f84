"""MaxText's checkpoints in this program's own model: loaded, rescaled, run; and the way back."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
from checkpoint_convert_trees import FIXTURES, orbax_leaves, same_bytes, save, unpack
from flax import nnx

from maxghost import config, load_model, models, scorelog, train
from maxghost.checkpoint.compare import compare_checkpoints
from maxghost.checkpoint.layouts import read_checkpoint
from maxghost.checkpoint.layouts_store import LayoutError, open_tree
from maxghost.interop import load_tree as load_tree_module
from maxghost.interop.convert import convert
from maxghost.interop.linen_scaling import main, rescale_checkpoint, rescale_leaf, unscaled
from maxghost.interop.load_tree import load_tree, open_load
from maxghost.optimizers import make_optimizer
from maxghost.training.state import TrainStateNNX, abstract_split, from_tree, to_tree

SIZES = {
  "base_emb_dim": 12,
  "base_num_query_heads": 6,
  "base_num_kv_heads": 2,
  "head_dim": 4,
  "base_mlp_dim": 18,
  "base_num_decoder_layers": 3,
  "vocab_size": 29,
  "normalization_layer_epsilon": 3e-4,
  "rope_max_timescale": 700.0,
  "matmul_precision": "highest",
}


def silent(_):
  pass


def train_state(**changes):
  """(graphdef, state with shapes in place of arrays) of a maxghost train state of the fixtures' sizes."""
  cfg = config.load()
  model_cfg = dataclasses.replace(cfg.model, **(SIZES | changes))

  def make():
    return TrainStateNNX(models.create(model_cfg, rngs=nnx.Rngs(0)), make_optimizer(cfg.optimizer, 10))

  return nnx.split(nnx.eval_shape(make))


def on_device(tree):
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


MIXTRAL = {
  "decoder_block": "mixtral", "num_experts": 5, "num_experts_per_tok": 2, "base_mlp_dim": 14, "base_moe_mlp_dim": 14,
}  # fmt: skip


def given(path, **changes):
  keys = SIZES | {"tokenizer_type": "huggingface", "load_parameters_path": str(path)} | changes
  return config.replace(config.load(), **keys)


def test_load_parameters_path_takes_a_maxtext_checkpoint(tmp_path):
  """Rescaled as `load_tree` does when told the head width; through a conversion as well."""
  source = unpack("linen_scanned", tmp_path)
  model_only = {"model": to_tree(train_state()[1])["model"]}
  expected = load_tree(source, model_only, head_dim=4, say=silent)["model"]
  convert(source, tmp_path / "nnx", to="nnx", say=silent)
  for path in (source, tmp_path / "nnx"):
    cfg = given(path)
    found = load_model.open_parameters(load_model.check_config(cfg), cfg, model_only, silent)()
    jax.tree.map(np.testing.assert_array_equal, found["model"], expected)
  with pytest.raises(LayoutError, match="how MaxText scales query weights is not known for decoder_block=gpt2"):
    cfg = config.replace(config.load("model_name=gpt2-small"), load_parameters_path=str(source))
    load_model.open_parameters(load_model.check_config(cfg), cfg, model_only, silent)
  with pytest.raises(LayoutError, match="misses decoder/layers/self_attention/key_norm/scale"):
    cfg = given(source, use_qk_norm=True)
    wanted = {"model": to_tree(train_state(use_qk_norm=True)[1])["model"]}
    load_model.open_parameters(load_model.check_config(cfg), cfg, wanted, silent)
  with pytest.raises(LayoutError, match=rf"^load_parameters_path={tmp_path}/nowhere: there is no model folder"):
    load_model.check_config(given(tmp_path / "nowhere"))
  with pytest.raises(LayoutError, match=rf"^load_parameters_path={source}: .* misses decoder/layers/self_attention"):
    load_model.open_given(load_model.check_config(cfg), cfg, wanted)


def test_a_process_reads_the_part_of_its_devices(tmp_path, monkeypatch):
  """Of MaxText's layout, with heads to reorder, and of its own; from devices that lie together, and that do not."""
  source = unpack("linen_scanned", tmp_path)
  own = tmp_path / "own"
  convert(source, own, to="maxghost", params_only=True, say=silent)
  mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 2, 2)), ("a", "b", "c"))
  model, read, sizes = {"model": to_tree(train_state()[1])["model"]}, load_tree_module.read_block, []

  def placed(x, devices):
    axes = iter("cab")  # the last dimension of a head among them
    spec = [next(axes, None) if size % 2 == 0 else None for size in x.shape[::-1]][::-1]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    indices = lambda shape: {d: i for d, i in sharding.devices_indices_map(shape).items() if d.id in devices}  # noqa: E731
    about = {"is_fully_addressable": False, "is_fully_replicated": sharding.is_fully_replicated}
    where = types.SimpleNamespace(addressable_devices_indices_map=indices, **about)
    return types.SimpleNamespace(shape=x.shape, dtype=x.dtype, sharding=where)

  def parts(shape, where, part):
    indices = where.addressable_devices_indices_map(shape)
    return types.SimpleNamespace(on={device: part(index) for device, index in indices.items()})

  def counted(reader, leaf, index=None):
    sizes.append(read(reader, leaf, index).size)
    return read(reader, leaf, index)

  monkeypatch.setattr(jax, "make_array_from_callback", parts)
  monkeypatch.setattr(load_tree_module, "read_block", counted)
  monkeypatch.setattr(load_tree_module, "_samples", lambda shape: [])
  for path, options in ((source, {"head_dim": 4, "rope_pairs": True}), (own, {})):
    whole = load_tree(path, model, **options, say=silent)
    for devices in ({0, 1, 2, 3}, {3, 7}, {1, 6}):
      wanted = jax.tree.map(lambda x, devices=devices: placed(x, devices), model)
      sizes.clear()
      found = load_tree(path, wanted, **options, say=silent)
      for x, value, like in zip(*map(jax.tree.leaves, (whole, found, wanted)), strict=True):
        for device, index in like.sharding.addressable_devices_indices_map(x.shape).items():
          np.testing.assert_array_equal(value.on[device], x[index])
      assert devices == {1, 6} or sum(sizes) < 0.9 * sum(x.size for x in jax.tree.leaves(whole)), devices


def test_a_maxtext_checkpoint_of_a_family_without_scaling_is_taken_as_it_is(tmp_path):
  """MaxText's Qwen3 and gpt-oss divide by sqrt(head_dim) in attention, as maxghost does."""
  _, abstract = train_state(decoder_block="qwen3", use_qk_norm=True)
  numbers = np.random.default_rng(3)
  values = jax.tree.map(lambda x: numbers.normal(size=x.shape).astype(x.dtype), to_tree(abstract)["model"])
  stacked = jax.tree.map_with_path(
    lambda path, x: np.moveaxis(x, 0, 1) if "layers" in jax.tree_util.keystr(path) else x, values
  )
  source = save(tmp_path / "qwen3", {"params": {"params": stacked}, "step": np.int32(3)})
  cfg = given(source, decoder_block="qwen3", use_qk_norm=True)
  wanted = {"model": to_tree(abstract)["model"]}
  found = load_model.open_parameters(load_model.check_config(cfg), cfg, wanted, silent)()
  jax.tree.map(np.testing.assert_array_equal, found["model"], values)


def test_heads_of_llama31_are_reordered(tmp_path):
  """MaxText rotates neighbouring numbers there: its heads hold the i-th numbers of our two halves side by side."""
  llama31 = {"rope_type": "llama3.1", "rope_factor": 8.0, "use_qk_norm": True}
  wanted = {"model": to_tree(train_state(**llama31)[1])["model"]}
  numbers = np.random.default_rng(3)
  ours = jax.tree.map(lambda x: numbers.normal(size=x.shape).astype(x.dtype), wanted["model"])

  def of_maxtext(path, x):
    name = jax.tree_util.keystr(path)
    if "query" in name or "key" in name:
      x = np.stack([x[..., 0], x[..., 2], x[..., 1], x[..., 3]], axis=-1) / (2 if "query'" in name else 1)
    return np.moveaxis(x, 0, 1) if "layers" in name else x

  theirs = jax.tree.map_with_path(of_maxtext, ours)
  moments = {"count": np.int32(3), "mu": {"params": theirs}, "nu": {"params": theirs}}
  tree = {"params": {"params": theirs}, "opt_state": [moments], "step": np.int32(3)}
  source = save(tmp_path / "maxtext", tree)
  cfg = given(source, **llama31)
  command = ["--head_dim", "4", "--rope_pairs", "--source_path"]
  assert main([*command, str(source), "--target_path", str(tmp_path / "ours"), "--to", "maxghost"]) == 0
  for path in (source, tmp_path / "ours"):
    found = load_model.open_parameters(load_model.check_config(given(path, **llama31)), cfg, wanted, silent)()
    jax.tree.map(np.testing.assert_array_equal, found["model"], ours)
  changed = {row.path.rpartition("self_attention/")[2] for row in compare_checkpoints(source, tmp_path / "ours").rows}
  assert changed == {"query/kernel", "key/kernel", "query_norm/scale", "key_norm/scale"}
  assert main([*command, str(tmp_path / "ours"), "--target_path", str(tmp_path / "back"), "--to", "maxtext"]) == 0
  assert compare_checkpoints(source, tmp_path / "back").equal
  for family, factor in (("llama2", 1), ("qwen3", 2)):  # MaxText's Qwen3 does not scale queries
    read = unscaled(read_checkpoint(open_tree(source)), dataclasses.replace(cfg.model, decoder_block=family))
    found = open_load(read, wanted, say=silent)()["model"]["decoder"]["layers"]["self_attention"]
    for name, factor_of in (("query", factor), ("key", 1), ("value", 1)):
      expected = ours["decoder"]["layers"]["self_attention"][name]["kernel"]
      np.testing.assert_array_equal(found[name]["kernel"] * factor_of, expected)
    norms = [tree["query_norm"]["scale"] for tree in (found, ours["decoder"]["layers"]["self_attention"])]
    np.testing.assert_array_equal(*norms)


def test_moments_that_the_optimizer_does_not_keep_are_named(tmp_path):
  source = unpack("linen_scanned", tmp_path)
  for opt_type, lost in (("adamw", []), ("muon", ["opt_state/0/nu"])):  # Muon keeps first moments of matrices alone
    said = []
    load_tree(source, to_tree(abstract_split(given("", opt_type=opt_type))[1]), head_dim=4, say=said.append)
    assert [line.rpartition(": ")[2] for line in said if line.startswith(f"not read from {source}")] == lost


def records(run):
  return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_command_continues_a_converted_checkpoint_with_its_moments(tmp_path, capsys):
  """The first step has the weights, the learning rate and the momentum of the run that was converted."""
  keys = [
    f"base_output_directory={tmp_path}", "dataset_type=synthetic", "dataset_domain_bytes=20000", "steps=6",
    "checkpoint_period=3", "max_num_checkpoints_to_keep=0", "base_num_decoder_layers=2", "base_emb_dim=12",
    "base_mlp_dim=20", "head_dim=4", "base_num_query_heads=2", "base_num_kv_heads=2", "max_target_length=32",
    "per_device_batch_size=1", "ghost_val_batch_size=8", "eval_interval=-1", "enable_tensorboard=false",
    "ici_fsdp_parallelism=4", "ici_data_parallelism=2", "sharding_tolerance=1.0",
  ]  # fmt: skip
  assert train.main([*keys, "run_name=whole"]) == 0
  convert(tmp_path / "whole" / "checkpoints" / "3", tmp_path / "maxtext", to="linen", say=silent)
  convert(tmp_path / "maxtext", tmp_path / "back", to="maxghost", say=silent)
  again = [*keys, "run_name=again", f"load_full_state_path={tmp_path / 'back'}"]
  capsys.readouterr()
  assert train.main([*again, "steps=3"]) == 2
  assert f"load_full_state_path={tmp_path / 'back'} has taken 3 steps; use steps=6" in capsys.readouterr().err
  assert train.main([*again, f"load_parameters_path={tmp_path / 'back'}"]) == 2
  assert "leave load_parameters_path empty" in capsys.readouterr().err
  assert not (tmp_path / "again").exists()
  assert train.main([*again, "compiled_trainstep_file=step.pkl"]) == 0
  out = capsys.readouterr().out
  assert "compiled_trainstep_file=step.pkl is for train_compile" in out
  assert f"Continuing after the 3 steps of {tmp_path / 'back'}, on data read from the start" in out
  before, after = records(tmp_path / "whole")[3:], records(tmp_path / "again")
  assert [record["step"] for record in after] == [3, 4, 5]
  name = "learning/current_learning_rate"
  assert [record[name] for record in after] == [record[name] for record in before]
  for name in ("learning/param_norm", "ghost/val_loss/words"):
    assert after[0][name] == before[0][name]
  assert after[0]["ghost/momentum/words"] != 0 and all(np.isfinite(one["ghost/actual_drop/words"]) for one in after)
  log = scorelog.load(tmp_path / "again")
  assert sorted(set(log["step"].tolist())) == [3, 4, 5]
  assert train.main([*keys, "run_name=ours", f"load_full_state_path={tmp_path / 'whole/checkpoints/3'}"]) == 0
  assert records(tmp_path / "ours")[0]["ghost/momentum/words"] == after[0]["ghost/momentum/words"]


@pytest.mark.parametrize(
  ("name", "changes"),
  [
    ("linen_scanned", {"scan_layers": False}), ("nnx_unscanned", {"scan_layers": True}), ("linen_moe_scanned", MIXTRAL),
  ],
)  # fmt: skip
def test_a_maxtext_run_in_a_maxghost_model_gives_maxtexts_logits(name, changes, tmp_path):
  graphdef, abstract = train_state(**changes)
  source, said = unpack(name, tmp_path), []
  tree = load_tree(source, on_device(to_tree(abstract)), head_dim=4, say=said.append)
  assert said == [f"not in {source}, kept at its initial value: clip_factor"]
  assert tree["clip_factor"] == 1
  state = nnx.merge(graphdef, from_tree(tree, abstract))
  assert state.step == 3 and state.step.dtype == np.uint32
  batch = np.load(FIXTURES / f"{name}.npz")
  run = jax.jit(lambda model, *arrays: model(*arrays))
  logits = np.asarray(run(state.model, batch["tokens"], batch["positions"], batch["segment_ids"]))
  counted = batch["segment_ids"] > 0
  np.testing.assert_allclose(logits[counted], batch["logits"][counted], atol=2e-5, rtol=0)
  # Every moment is the stored one: unscaled but for the queries.
  before = orbax_leaves(source)
  mu = tree["optimizer"]["opt_state"]["0"]["mu"]["decoder"]["decoder_norm"]["scale"]
  np.testing.assert_array_equal(mu, before[("opt_state", 0, "mu", "params", "decoder", "decoder_norm", "scale")])


def test_query_leaves_are_rescaled_by_the_power_of_the_gradient(tmp_path):
  """Weights times sqrt(h), so gradients and first moments divided by sqrt(h), second moments by h."""
  _, abstract = train_state()
  model_only = {"model": on_device(to_tree(abstract)["model"])}
  source = unpack("linen_scanned", tmp_path)
  plain = load_tree(source, model_only, say=silent)["model"]
  scaled = load_tree(source, model_only, head_dim=4, say=silent)["model"]
  query = ("decoder", "layers", "self_attention", "query", "kernel")

  def at(tree, path):
    for key in path:
      tree = tree[key]
    return np.asarray(tree)

  np.testing.assert_array_equal(at(scaled, query), 2 * at(plain, query))
  moments = [(("optimizer", "opt_state", "0", m, *query), np.float32([8.0])) for m in ("mu", "nu", "trace")]
  got = [float(rescale_leaf(*moment, 4, "maxghost")[0]) for moment in moments]
  assert got == [8 / 2, 8 / 4, 8 / 2]
  assert [float(rescale_leaf(*moment, 4, "maxtext")[0]) for moment in moments] == [16, 32, 16]


def test_load_names_what_does_not_fit(tmp_path):
  source = unpack("linen_scanned", tmp_path)
  for changes, text in (
    ({"base_mlp_dim": 19}, r"mlp/wi_0/kernel of layer 0 is float32\[12, 18\] there and float32\[12, 19\] in the model"),
    ({"base_num_decoder_layers": 4}, "misses decoder/layers/.* of layer 3"),
    ({"base_num_decoder_layers": 2}, "has decoder/layers/.* of layer 2.*unknown to the model"),
    ({"weight_dtype": "bfloat16"}, r"token_embedder/embedding is float32\[29, 12\] there and bfloat16"),
    ({"logits_via_embedding": True}, "has decoder/logits_dense/kernel, unknown to the model"),
  ):
    _, abstract = train_state(**changes)
    with pytest.raises(LayoutError, match=text):
      load_tree(source, to_tree(abstract), say=silent)
  convert(source, tmp_path / "params", to="params", say=silent)
  with pytest.raises(LayoutError, match="misses opt_state/0/mu"):
    load_tree(tmp_path / "params", to_tree(train_state()[1]), say=silent)


def test_rescaling_a_checkpoint_and_back(tmp_path, capsys):
  source = unpack("linen_scanned", tmp_path)
  convert(source, tmp_path / "ours", to="maxghost", say=silent)
  command = ["--source_path", str(tmp_path / "ours"), "--target_path", str(tmp_path / "run"), "--head_dim"]
  assert main([*command, "5", "--to", "maxghost"]) == 2
  printed = capsys.readouterr().err
  assert "head_dim=5, but the last dimension of decoder/layers/self_attention/query/kernel is 4" in printed
  assert main([*command, "4", "--to", "maxtext"]) == 2  # it is MaxText's already
  assert main([*command, "4", "--to", "maxghost"]) == 0
  rows = compare_checkpoints(tmp_path / "ours", tmp_path / "run").rows
  query = "decoder/layers/self_attention/query/kernel"
  assert [row.path for row in rows] == [f"params/{query}", f"opt_state/0/mu/{query}", f"opt_state/0/nu/{query}"]
  # The rescaled one loads without another rescaling, although its layout alone would not tell.
  model_only = {"model": to_tree(train_state()[1])["model"]}
  a = load_tree(tmp_path / "run", model_only, head_dim=4, say=silent)
  b = load_tree(source, model_only, head_dim=4, say=silent)
  jax.tree.map(np.testing.assert_array_equal, a, b)
  with pytest.raises(LayoutError, match="already holds query weights as maxghost"):
    rescale_checkpoint(tmp_path / "run", tmp_path / "x", 4, "maxghost")
  rescale_checkpoint(tmp_path / "run", tmp_path / "back", 4, "maxtext", say=silent)
  convert(tmp_path / "back", tmp_path / "linen", say=silent)
  same_bytes(orbax_leaves(source), orbax_leaves(tmp_path / "linen"))


def test_rescaling_refuses_state_of_unknown_meaning():
  path = ("optimizer", "opt_state", "0", "wobble", "decoder", "layers_0", "self_attention", "query", "kernel")
  with pytest.raises(LayoutError, match=r"wobble.*not known how this state scales"):
    rescale_leaf(path, np.ones(2), 16, "maxghost")
