"""A tiny train step on a mesh of the eight virtual devices, and everything around its steps as numpy arrays.

B=8 rows, T=16 positions, D=24 embed dim, H=8 query heads, K=4 key/value heads, h=6 head width, F=40, L=2, V=272:
what a mesh splits divides by 8, or by 4 (key/value heads).
"""

import dataclasses

import jax
import numpy as np
import tiny
from flax import nnx

from maxghost import config
from maxghost.parallel.shardings import Layout, use
from maxghost.training import compiled_steps, devices, scoring, state
from maxghost.training.step import make_train_step

POSITIONS, VOCAB, SEGMENTS = 16, 272, 5
SIZES = {
  "base_emb_dim": 24, "base_num_query_heads": 8, "base_num_kv_heads": 4, "head_dim": 6, "base_mlp_dim": 40,
  "base_num_decoder_layers": 2, "vocab_size": VOCAB, "max_target_length": POSITIONS, "attention": "dot_product",
  "steps": 20, "learning_rate": 3e-3, "warmup_steps_fraction": 0.0, "adam_b1": 0.8, "adam_eps": 1e-6,
  "adam_weight_decay": 0.3, "sharding_tolerance": 1.0, "ghost_val_batch_size": 4,
  "remat_policy": "minimal",
}  # fmt: skip
MESHES = {
  "data 8": {"ici_data_parallelism": 8},
  "fsdp 8": {"ici_fsdp_parallelism": 8},
  "tensor 4 x data 2": {"ici_tensor_parallelism": 4, "ici_data_parallelism": 2},
  "fsdp 4 x tensor 2": {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
  "context 4 x data 2": {"ici_context_parallelism": 4, "ici_data_parallelism": 2},
}
# Documents of each row; a row without any, documents across the cuts between devices, and one that fills a row.
ROWS = ((4, 5, 6), (16,), (2, 9), (1, 1, 7, 2, 5), (), (8, 5), (3, 11), (5, 10))
VALIDATION = ((6, 9), (16,), (4,), (1, 12))
BATCHES = [tiny.make_batch(ROWS, seed=100 + i, num_positions=POSITIONS) for i in range(2)]
VAL_BATCH = tiny.make_batch(VALIDATION, seed=200, num_positions=POSITIONS)


def make_config(mesh: dict, **changes) -> config.Config:
  """per_device_batch_size is such that the batch has 8 rows."""
  count = 8 if mesh else 1
  micro = changes.get("gradient_accumulation_steps", 1)
  sizes = {"per_device_batch_size": 8 // count // micro} if count == 1 else {"per_device_batch_size": 1}
  if mesh and "ici_fsdp_parallelism" not in mesh:
    mesh = mesh | {"ici_fsdp_parallelism": 1}
  return config.replace(config.load(), **(SIZES | sizes | mesh | changes))


def make_layout(cfg: config.Config, count: int) -> Layout:
  layout = Layout.of(cfg.parallel, jax.devices()[:count])
  devices.check_layout(cfg, layout)
  return layout


@dataclasses.dataclass
class Result:
  """outs: host copies of the outputs of each step. moments: Adam's first moments after the first step, that is the
  clipped gradient times 1 - b1. params: after the last. compiled: the executable. state: after the last, on devices."""

  outs: list
  moments: dict
  params: dict
  compiled: object
  layout: Layout
  state: nnx.State


def run(mesh: dict, batches=None, val_batch=VAL_BATCH, cheap: bool = True, **changes) -> Result:
  """Two steps from the same weights on every mesh; {} = one device."""
  batches = BATCHES if batches is None else batches
  cfg = make_config(mesh, **changes)
  layout = make_layout(cfg, 8 if mesh else 1)
  graphdef, abstract = state.abstract_split(cfg)
  abstract = layout.abstract(abstract)
  num_rows = len(batches[0]["inputs"])
  val_rows = len(val_batch["inputs"])
  arguments = (
    abstract,
    devices.batch_shapes(cfg, num_rows, layout),
    (devices.batch_shapes(cfg, val_rows, layout),) if cfg.ghost.ghost_enabled else (),
  )
  function, _ = make_train_step(cfg, graphdef, *arguments[:2], num_segments=SEGMENTS)
  lowered = compiled_steps.lower("train_step", function, layout, *arguments)
  if cheap:
    with tiny.cheap_compilation():
      compiled = lowered.compile()
  else:
    compiled = lowered.compile()
  train_state = place(cfg, graphdef, abstract, layout)
  val_batches = (layout.put(val_batch),) if cfg.ghost.ghost_enabled else ()
  outs, moments = [], {}
  for i, batch in enumerate(batches):
    train_state, out = compiled(train_state, layout.put(batch, num_rows), val_batches)
    outs.append(scoring.to_host(out))
    if i == 0:
      moments = labelled(nnx.filter_state(train_state, nnx.OptState), "mu")
  return Result(
    outs, moments, labelled(nnx.filter_state(train_state, nnx.Param), "model"), compiled, layout, train_state
  )


def place(cfg, graphdef, abstract, layout):
  """A state with tiny's random weights, and second moments as if it had trained before: from zero, Adam's first step
  divides each gradient by itself, and rounding would be as large as the scores."""
  with use(None):
    model = tiny.make_model(cfg)
  values = {f"model/{label}": v for label, v in tiny.by_label(model).items()}
  flat = []
  with tiny.cheap_compilation():
    fresh = jax.jit(lambda: nnx.state(state.create(cfg), nnx.Not(nnx.Param)))()
  values |= {"/".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(fresh)}
  rng = np.random.default_rng(7)
  for path, variable in nnx.to_flat_state(abstract):
    value = values["/".join(map(str, path))]
    if "nu" in path:
      value = (1e-4 * rng.random(value.shape) ** 2 + 1e-6).astype(value.dtype)
    flat.append((path, variable.replace(jax.device_put(value, variable.get_value().sharding))))
  return nnx.from_flat_state(flat)


def labelled(train_state, part: str) -> dict:
  """{path behind `part`: array} of the leaves whose path holds it."""
  out = {}
  for path, variable in nnx.to_flat_state(train_state):
    names = [str(name) for name in path]
    if part in names:
      out["/".join(names[names.index(part) + 1 :])] = np.asarray(variable.get_value())
  return out


def relative_error(actual, expected) -> float:
  """Largest difference by the largest size. NaN, a validation loss that a step does not know, is only equal to NaN."""
  actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
  assert actual.shape == expected.shape
  unknown = np.isnan(actual) & np.isnan(expected)
  actual, expected = (np.where(unknown, 0, x) for x in (actual, expected))
  return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


def assert_same(actual: Result, expected: Result, tolerance: float = 1e-5) -> None:
  """Losses, gradients and scores, by document and by parameter."""
  for ours, theirs in zip(actual.outs, expected.outs, strict=True):
    for name in ("loss", "grad_norm", "val_loss", "contribution_BSK", "score_dot_BSK", "loss_BS"):
      if name in theirs:
        assert relative_error(ours[name], theirs[name]) < tolerance, name
    for name in ("tokens_BS", "tokens"):
      if name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])
    for label, value in theirs.get("param_contribution", {}).items():
      assert relative_error(ours["param_contribution"][label], value) < tolerance, label
  for label, value in expected.moments.items():
    assert relative_error(actual.moments[label], value) < tolerance, label
