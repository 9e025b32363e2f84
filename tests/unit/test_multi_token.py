"""Multi-token prediction: losses by numpy, scores by one gradient per document, and what goes along with it.

Each oracle takes a document alone, and applies the modules and the head in turn: it rolls, packs and stacks nothing.
T positions of a document, D embed dim, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracles
import pytest
import routed
import tiny
from checkpoint_convert_trees import orbax_leaves, save
from flax import nnx
from train_steps import TRAIN, VALIDATION, Run

from maxghost import config, models, objectives
from maxghost.checkpoint.layouts_store import LayoutError
from maxghost.interop.convert import convert
from maxghost.interop.hf_checkpoint import export_model
from maxghost.interop.load_tree import load_tree
from maxghost.models.layers import Hidden
from maxghost.training import plan
from maxghost.training.state import to_tree

DEPTHS, WEIGHT = 2, 0.7
KEYS = {"mtp_num_layers": DEPTHS, "mtp_loss_scaling_factor": WEIGHT}
WIDE = {"dtype": "float64", "weight_dtype": "float64"}
TIED = {"logits_via_embedding": True}
BATCH = TRAIN[0]


def documents(batch) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
  """(row, segment, inputs, targets) of each document; the last target of one without it is -1."""
  found = []
  for row, segments in enumerate(batch["inputs_segmentation"]):
    for segment in np.unique(segments[segments > 0]):
      at = np.flatnonzero(segments == segment)
      counts = batch["targets_segmentation"][row, at] != 0
      found.append((row, int(segment), batch["inputs"][row, at], np.where(counts, batch["targets"][row, at], -1)))
  return found


def by_numpy(values: dict, cfg, tokens, targets) -> tuple[float, float]:
  """(sum of the losses of the next token, sum over tokens and modules of theirs), float64."""
  positions, values = np.arange(len(tokens)), {label: np.asarray(v, np.float64) for label, v in values.items()}
  hidden_TD, sums = oracles.document_hidden(values, cfg, tokens, positions), [0.0, 0.0]
  for depth in range(DEPTHS + 1):
    if depth:
      prefix = f"mtp_block/mtp_layer_{depth}/mtp_{depth}_"
      embedded_TD = values["token_embedder/embedding"][tokens[depth:]]
      normed = [
        oracles.rms(x_TD, values[f"{prefix}{name}_norm/scale"], cfg)
        for name, x_TD in (("embedding", embedded_TD), ("hidden_state", hidden_TD[: len(embedded_TD)]))
      ]
      x_TD = np.concatenate(normed, 1) @ values[f"{prefix}projection/kernel"]
      hidden_TD = oracles.layer_output(x_TD, values, f"{prefix}transformer_layer/", positions[: len(x_TD)], cfg)
    logits_TV = oracles.head_logits(hidden_TD, values, cfg)
    for logits_V, target in zip(logits_TV, targets[depth:], strict=True):
      sums[depth > 0] += 0 if target < 0 else np.log(np.exp(logits_V).sum()) - logits_V[target]
  return sums[0], sums[1]


@pytest.mark.parametrize("keys", [{}, TIED], ids=["untied", "tied"])
def test_loss_and_metrics_equal_the_formula(keys):
  cfg = tiny.make_config(**KEYS, **keys, **WIDE)
  with jax.enable_x64(True), tiny.cheap_compilation():
    graphdef, state = nnx.split(tiny.make_model(cfg))
    measured = jax.jit(lambda state: objectives.create(cfg).measured(nnx.merge(graphdef, state), BATCH))
    losses_BT, weights_BT, metrics = jax.tree.map(np.asarray, measured(state))
    values = tiny.by_label(state)
  main, further = np.sum([by_numpy(values, cfg.model, *pair) for _, _, *pair in documents(BATCH)], 0)
  wanted = (main + WEIGHT / DEPTHS * further) / weights_BT.sum()
  assert (losses_BT * weights_BT).sum() / weights_BT.sum() == pytest.approx(wanted, rel=1e-12)
  assert metrics["mtp_loss"] == pytest.approx(further / DEPTHS / weights_BT.sum(), rel=1e-12)
  with jax.enable_x64(True), tiny.cheap_compilation():
    validation = objectives.create(cfg).validation()
    losses_BT, _ = jax.jit(lambda state: validation(nnx.merge(graphdef, state), BATCH))(state)
  assert (np.asarray(losses_BT) * weights_BT).sum() == pytest.approx(main, rel=1e-12)


def document_losses(model, tokens_T, targets_T, length, further: float):
  """The summed loss of one padded document of `length` tokens, module after module. further: weight of the modules."""
  positions, inside = jnp.arange(tokens_T.size)[None], (jnp.arange(tokens_T.size) < length).astype(int)[None]
  hidden = model.hidden(tokens_T[None], positions, inside)
  embedded_TD, total = model.token_embedder(tokens_T[None]), 0.0
  for depth in range(DEPTHS + 1):
    if depth:
      module = getattr(model.mtp_block, f"mtp_layer_{depth}")
      norms = [getattr(module, f"mtp_{depth}_{name}_norm") for name in ("embedding", "hidden_state")]
      pair = norms[0](embedded_TD[:, depth:]), norms[1](hidden.x_BTD[:, : tokens_T.size - depth])
      x_BTD = getattr(module, f"mtp_{depth}_projection")(jnp.concatenate(pair, -1))
      layer = getattr(module, f"mtp_{depth}_transformer_layer")
      rest = slice(0, x_BTD.shape[1])
      hidden = layer(Hidden(x_BTD), positions[:, rest], inside[:, depth:])
    logits_TV = model.logits(Hidden(hidden.x_BTD))[0].astype(float)
    targets = targets_T[depth:]
    losses_T = jnp.where(targets >= 0, oracles.softmax_losses(logits_TV, jnp.maximum(targets, 0)), 0)
    total = total + (losses_T.sum() if not depth else further / DEPTHS * losses_T.sum())
  return total


@functools.cache
def by_document(keys: tuple):
  """({(row, segment): gradient of its summed loss by label}, G of the validation rows), float64, without packing."""
  cfg = tiny.make_config(**KEYS, **dict(keys), **WIDE)
  with jax.enable_x64(True), tiny.cheap_compilation():
    graphdef, params = nnx.split(tiny.make_model(cfg))
    total = lambda params, *row: document_losses(nnx.merge(graphdef, params), *row)  # noqa: E731
    gradients = jax.jit(jax.vmap(jax.grad(total), (None, 0, 0, 0, None)))

    def of(batch, further):
      rows = documents(batch)
      tokens = [np.pad(x, (0, tiny.POSITIONS - x.size)) for *_, x, _ in rows]
      targets = [np.pad(x, (0, tiny.POSITIONS - x.size), constant_values=-1) for *_, x in rows]
      lengths = np.array([x.size for *_, x in rows])
      found = gradients(params, np.stack(tokens), np.stack(targets), lengths, further)
      return [(row, segment) for row, segment, *_ in rows], tiny.by_label(found)

    places, own = of(BATCH, WEIGHT)
    _, theirs = of(VALIDATION, 0.0)
  count = (VALIDATION["targets_segmentation"] != 0).sum()
  return places, own, {label: g.sum(0) / count for label, g in theirs.items()}


SLOW = pytest.mark.slow
CASES = [
  ("two_pass", "float32", {}), ("reverse_scan", "float32", TIED),
  ("reverse_scan", "float64", {"num_vocab_tiling": 4, "segment_lengths": (1,)}),
  pytest.param("two_pass", "float64", {"num_vocab_tiling": 4, "vocab_tiling_axis": "vocab"}, marks=SLOW),
  pytest.param("reverse_scan", "float64", {"num_vocab_tiling": 4} | TIED, marks=SLOW),
  pytest.param("two_pass", "float64", {"scan_layers": False}, marks=SLOW),
  pytest.param("forward_mode", "float64", TIED, marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "dtype", "keys"), CASES)
def test_scores_are_exact(schedule, dtype, keys):
  """A document's contribution through both losses, along the gradient of the validation rows' next token alone."""
  extra = {name: value for name, value in keys.items() if name in TIED}
  places, own, along = by_document(tuple(extra.items()))
  run = Run(ghost_schedule=schedule, opt_type="sgd", dtype=dtype, weight_dtype=dtype, **KEYS, **keys)
  out = run.step(BATCH)
  total = (BATCH["targets_segmentation"] != 0).sum()
  wanted = sum(g.reshape(len(places), -1) @ along[label].ravel() for label, g in own.items()) / total
  found = [out["share_BS"][b, s - 1].astype(np.float64) * out["score_dot_BSK"][b, s - 1, 0] for b, s in places]
  assert oracles.relative_error(np.array(found), wanted) < {"float32": 1e-5, "float64": 1e-12}[dtype]
  assert out["lm_loss"] + WEIGHT * out["mtp_loss"] == pytest.approx(out["loss"], rel=1e-6)
  assert all(not g.any() for label, g in along.items() if label.startswith("mtp_block"))


@pytest.mark.parametrize(
  ("schedule", "keys"),
  [
    ("reverse_scan", TIED), ("two_pass", {"num_vocab_tiling": 4, "ghost_rank": 2}),
    pytest.param("two_pass", TIED, marks=SLOW),
    pytest.param("reverse_scan", {"num_vocab_tiling": 4, "ghost_rank": 2} | TIED, marks=SLOW),
    pytest.param("reverse_scan", routed.MIXTRAL | {"load_balance_loss_weight": 0.3}, marks=SLOW),
    pytest.param("two_pass", {"opt_type": "muon"}, marks=SLOW),
  ],
)  # fmt: skip
def test_path_credit_adds_up(schedule, keys):
  """Under AdamW, whose direction needs the whole gradient of each parameter: table and head have one use each."""
  run = Run(ghost_schedule=schedule, ghost_direction="path", **WIDE, **KEYS, **keys)
  for batch in TRAIN[:2]:
    out = run.step(batch)
    assert abs(out["check_rel_err"][0]) < 1e-11
    assert out["predicted_examples"][0] != 0


def test_the_loss_of_the_next_token_stands_apart():
  """Also with experts, whose load-balancing loss counts the modules' routers."""
  cfg = tiny.make_config(**routed.MIXTRAL, load_balance_loss_weight=0.3, **KEYS, **WIDE)
  objective = objectives.create(cfg)
  with jax.enable_x64(True), tiny.cheap_compilation():
    graphdef, state = nnx.split(tiny.make_model(cfg))
    both = lambda state: [f(nnx.merge(graphdef, state), BATCH) for f in (objective.measured, objective.validation())]  # noqa: E731
    (losses_BT, weights_BT, metrics), (next_BT, _) = jax.tree.map(np.asarray, jax.jit(both)(state))
  loss, wanted = ((x_BT * weights_BT).sum() / weights_BT.sum() for x_BT in (losses_BT, next_BT))
  assert objective.reported(loss, metrics)["lm_loss"] == pytest.approx(wanted, rel=1e-12)


def test_the_balance_of_experts_is_a_mean_over_all_layers_with_a_router():
  """Routers of zeros give each of E experts the probability 1 / E: E sum_e f_e / E is k = 3 in every layer."""
  cfg = tiny.make_config(**routed.MIXTRAL, load_balance_loss_weight=0.3, **KEYS)
  model = tiny.make_model(cfg)
  for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
    if "gate" in path:
      variable[...] = jnp.zeros_like(variable[...])
  graphdef, state = nnx.split(model)
  measured = jax.jit(lambda state: objectives.create(cfg).measured(nnx.merge(graphdef, state), BATCH)[2])
  with tiny.cheap_compilation():
    metrics = measured(state)
  assert metrics["moe_lb_loss"] == pytest.approx(3, rel=1e-6)
  assert metrics["router_entropy"] == pytest.approx(np.log(5), rel=1e-6)


def test_micro_batches_add_up_to_the_whole():
  whole, parts = (Run(**WIDE, **KEYS, gradient_accumulation_steps=m, per_device_batch_size=7 // m) for m in (1, 7))
  first, second = whole.step(BATCH), parts.step(BATCH)
  for name in ("loss", "mtp_loss", "lm_loss", "grad_norm"):
    assert first[name] == pytest.approx(second[name], rel=1e-12)


def test_flops_count_every_matrix_as_often_as_it_is_used():
  cfg = tiny.make_config(**KEYS)
  shapes = tiny.abstract_by_label(nnx.merge(*tiny.abstract_split(cfg)))
  uses = {label: 1 for label in shapes if label.endswith("kernel")} | {"decoder/logits_dense/kernel": 1 + DEPTHS}
  elements = sum(count * shapes[label].size for label, count in uses.items())
  assert plan.step_flops(cfg.model, 7, 13).weights == 6 * 7 * 13 * elements


def test_modules_come_after_the_weights_of_the_model():
  """The rest of the model begins as it does without them, and validation has no gradient for them."""
  values = [tiny.by_label(models.create(tiny.make_config(**keys), rngs=nnx.Rngs(3))) for keys in ({}, KEYS)]
  assert {*values[0]} < {*values[1]}
  assert all((values[0][label] == values[1][label]).all() for label in values[0])


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"objective": "dpo"}, "mtp_num_layers=2 predicts text, which objective=dpo does not"),
    ({"use_qk_clip": True}, "adds layers that use_qk_clip=true would not clip"),
    ({"lora_rank": 4}, "adds modules that lora_rank=4 would not train"),
    ({"ghost_schedule": "concat"}, "mtp_num_layers=2 does not go with ghost_schedule=concat"),
    ({"max_target_length": 2}, "mtp_num_layers=2 looks further than a row of max_target_length=2"),
  ],
)
def test_refusals(changes, said):
  with pytest.raises(config.ConfigError, match=said):
    config.load("mtp_num_layers=2", *(f"{name}={str(value).lower()}" for name, value in changes.items()))


def test_checkpoints_convert_and_a_missing_module_is_named(tmp_path):
  """To MaxText's layout, where the modules have its names, and from there into a model with and without them."""
  cfg = tiny.make_config(**KEYS)
  wanted = {keys is KEYS: to_tree(nnx.state(tiny.make_model(tiny.make_config(**keys)))) for keys in ({}, KEYS)}
  trees = {has: {"model": tree} for has, tree in wanted.items()}
  save(tmp_path / "nnx", trees[True])
  convert(tmp_path / "nnx", tmp_path / "linen", to="linen", say=lambda _: None)
  projection = ("params", "params", "mtp_block", "mtp_layer_2", "mtp_2_projection", "kernel")
  assert orbax_leaves(tmp_path / "linen")[projection].shape == (2 * cfg.model.base_emb_dim, cfg.model.base_emb_dim)
  found = load_tree(tmp_path / "linen", trees[True], say=lambda _: None)
  jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(np.asarray, trees[True]))
  said = []
  export_model(tmp_path / "nnx", tmp_path / "hf", cfg=cfg, say=said.append)
  assert said[0].startswith(f"left out: {len(jax.tree.leaves(wanted[True]['mtp_block']))} arrays of multi-token")
  whole = {name: part for name, part in trees[True]["model"].items() if name != "mtp_block"}
  found = load_tree(tmp_path / "hf", trees[False], say=lambda _: None)
  jax.tree.map(np.testing.assert_array_equal, found["model"], jax.tree.map(np.asarray, whole))
  save(tmp_path / "plain", trees[False])
  with pytest.raises(LayoutError, match="misses mtp_block/mtp_layer_1/mtp_1_embedding_norm/scale"):
    load_tree(tmp_path / "plain", trees[True], say=lambda _: None)
  with pytest.raises(LayoutError, match=r"has mtp_block/mtp_layer_1/.*unknown to the model"):
    load_tree(tmp_path / "linen", trees[False], say=lambda _: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["context 4 x data 2", "fsdp 4 x tensor 2"])
@pytest.mark.parametrize(
  "keys", [{}, {"ghost_schedule": "reverse_scan", "num_vocab_tiling": 2} | TIED], ids=["", "walk"]
)
def test_a_mesh_gives_the_numbers_of_one_device(name, keys):
  """Further tokens may lie on the next device of the context axis."""
  changes = {"remat_policy": "none"} | KEYS | keys
  meshes.assert_same(meshes.run(meshes.MESHES[name], **changes), meshes.run({}, **changes))
