"""How exact the scores are: the trainer's own step against per-example gradients computed one document at a time.

  python benchmarks/exactness.py [--steps 20]

1. Scores. A small model of pairwise different sizes takes a few training steps; then every document's score, per
   parameter and per layer, is compared with <grad of that document's loss, direction>, from `vmap(grad)` over the whole
   model with a loss and a direction written here, without the ghost engine. Tied and untied output, packed and unpacked
   rows, three directions, float32 and float64. The error of one parameter in one layer is the norm of the difference
   over all documents divided by the norm of the oracle's scores; the table shows the largest over parameters and
   layers. Both sides compute in the stated precision.
2. Bits. The default model trains on the default data with scores on and off: after 20 steps every byte of every
   parameter and of both Adam moments must be the same.

d documents (those with at least one target), K = 1 validation set, L layers.
"""

import functools
import sys

import _measure
import _steps
import jax
import jax.numpy as jnp
import numpy as np
from _measure import Figure
from flax import nnx

from maxghost import config as configuration
from maxghost import data
from maxghost.parallel.shardings import slash_path
from maxghost.training import state

SMALL = (
  "base_emb_dim=20", "base_num_query_heads=6", "base_num_kv_heads=2", "head_dim=8", "base_mlp_dim=36",
  "base_num_decoder_layers=3", "vocab_size=263", "max_target_length=26", "per_device_batch_size=7",
  "ghost_val_batch_size=5", "dataset_type=synthetic", "ghost_detail=layer", "steps=40", "matmul_precision=highest",
)  # fmt: skip
WARM_STEPS = 8  # on other batches: at step 1 v is this step's gradient squared, and P g no more than its sign
LIMITS = {"float32": 1e-5, "float64": 1e-12}


def main() -> int:
  args = _measure.arguments(__doc__, steps=20)
  configuration.load(str(_measure.BASE), *args.overrides)  # a wrong key ends it here, not after all scores
  rows, figures = [], []
  for dtype in LIMITS:  # float64 comes last: it switches JAX to 64 bits for good
    for direction in ("sgd", "adam", "path"):
      for tied in (False, True):
        for documents in (1, 4):
          worst = score_errors(dtype, direction, tied, documents)
          where, error = max(worst.items(), key=lambda item: item[1])
          rows.append({
            "precision": dtype, "direction": direction, "output": "tied" if tied else "untied",
            "rows": "packed" if documents > 1 else "unpacked", "parameters x layers": len(worst),
            "largest error": error, "where": where,
          })  # fmt: skip
  for dtype, limit in LIMITS.items():
    worst = max(row["largest error"] for row in rows if row["precision"] == dtype)
    figures.append(Figure(f"largest relative error of a score, {dtype}", worst, limit, form="{:.1e}"))
  jax.config.update("jax_enable_x64", False)
  differing, total = differing_bytes(args.steps, args.overrides)
  note = f"{total:,} bytes of parameters and moments compared after {args.steps} steps"
  figures.append(Figure(f"bytes that differ after {args.steps} steps, scores on and off", differing, 0, form="{:.0f}"))
  for row in rows:
    row["largest error"] = f"{row['largest error']:.1e}"
  return _measure.publish("exactness", rows, figures, [note], args.json)


def score_errors(dtype: str, direction: str, tied: bool, num_documents: int) -> dict[str, float]:
  """{"path[layer]": relative error} of the scores of one step of the small model."""
  keys = (f"dtype={dtype}", f"weight_dtype={dtype}", f"ghost_direction={direction}", f"logits_via_embedding={tied}")
  cfg = configuration.load(str(_measure.BASE), *SMALL, *keys)
  step = _steps.make_step(cfg, num_documents)
  graphdef, _ = state.abstract_split(cfg)
  batch = step.batch
  for seed in range(WARM_STEPS):
    step.batch = jax.device_put(_steps.packed_batch(cfg, cfg.data.per_device_batch_size, 100 + seed, num_documents))
    step()
  step.batch = batch
  before = jax.tree.map(jnp.copy, step.state)  # the step donates its state
  step()
  out, batch = jax.device_get(step.outputs), jax.device_get(batch)
  expected = oracle(cfg, graphdef, before, batch, jax.device_get(step.val_batches[0]), out, num_documents)
  errors = {}
  for path, score_LBSK in out["param_contribution"].items():
    got_Ld = score_LBSK[..., 0][:, out["tokens_BS"] > 0]
    for layer, (got_d, want_d) in enumerate(zip(got_Ld, expected[path], strict=True)):
      errors[f"{path}[{layer}]"] = float(np.linalg.norm(got_d - want_d) / np.linalg.norm(want_d))
  total_d = out["contribution_BSK"][..., 0][out["tokens_BS"] > 0]
  want_d = sum(value.sum(0) for value in expected.values())
  errors["total"] = float(np.linalg.norm(total_d - want_d) / np.linalg.norm(want_d))
  return errors


def oracle(cfg, graphdef, train_state, batch, val_batch, out, num_documents: int) -> dict[str, np.ndarray]:
  """{path: [L, d]} contributions in nats, from one gradient per document."""
  before = nnx.merge(graphdef, train_state)
  model_graphdef, params, rest = nnx.split(before.model, nnx.Param, ...)

  def token_losses(params, rows):
    model = nnx.merge(model_graphdef, params, rest)
    logits_BTV = model(rows["inputs"], rows["inputs_position"], rows["inputs_segmentation"])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), rows["targets"][..., None], -1)
    return -picked[..., 0]

  def validation_loss(params):
    counts = val_batch["targets_segmentation"] != 0
    return (token_losses(params, val_batch) * counts).sum() / counts.sum()

  def document_loss(params, row, segment):
    rows = {name: value[None] for name, value in row.items()}
    counts = rows["targets_segmentation"] == segment
    return (token_losses(params, rows) * counts).sum() / out["tokens"]

  segments_BS = np.broadcast_to(np.arange(1, num_documents + 1), out["tokens_BS"].shape)
  row_d, segment_d = np.nonzero(out["tokens_BS"])[0], segments_BS[out["tokens_BS"] > 0]
  rows_d = {name: value[row_d] for name, value in batch.items()}
  grads_d = jax.jit(jax.vmap(jax.grad(document_loss), in_axes=(None, 0, 0)))(params, rows_d, segment_d)
  gradient = jax.jit(jax.grad(validation_loss))(params)
  scale = out["learning_rate"] * out["clip_factor"]
  expected = {}
  moments = dict(nnx.to_flat_state(nnx.state(before.optimizer)))
  for (path, grad_d), (_, val) in zip(nnx.to_flat_state(grads_d), nnx.to_flat_state(gradient), strict=True):
    direction = np.asarray(val[...])
    grad_d = np.asarray(grad_d[...])
    if cfg.ghost.ghost_direction != "sgd":
      first, second = (
        np.asarray(next(v[...] for key, v in moments.items() if name in key and key[-len(path) :] == path))
        for name in ("mu", "nu")
      )
      response = preconditioner if cfg.ghost.ghost_direction == "adam" else functools.partial(secant, first=first)
      direction = direction * response(cfg, second, grad_d.sum(0), float(before.clip_factor[...]))
    product = grad_d * direction
    stacked = path[:2] == ("decoder", "layers")
    axes = tuple(range(2 if stacked else 1, product.ndim))
    score = scale * product.sum(axes)
    expected[slash_path(path)] = score.T if stacked else score[None]
  return expected


def preconditioner(cfg, second, gradient, clip_factor: float) -> np.ndarray:
  """Adam's step per unit of gradient, its second moment updated by this batch's gradient (step WARM_STEPS + 1)."""
  opt, count = cfg.optimizer, WARM_STEPS + 1
  second = opt.adam_b2 * second + (1 - opt.adam_b2) * (clip_factor * gradient) ** 2
  root = np.sqrt(second / (1 - opt.adam_b2**count))
  return (1 - opt.adam_b1) / ((1 - opt.adam_b1**count) * (root + opt.adam_eps))


def secant(cfg, second, gradient, clip_factor: float, first) -> np.ndarray:
  """What the batch gradient changes of Adam's step, both moments updated by it, per unit of gradient. In float64,
  because it is a difference of two steps."""
  opt, count = cfg.optimizer, WARM_STEPS + 1
  g, m, v = (np.asarray(x, np.float64) for x in (clip_factor * gradient, first, second))

  def moved(g):
    root = np.sqrt((opt.adam_b2 * v + (1 - opt.adam_b2) * g**2) / (1 - opt.adam_b2**count))
    return (opt.adam_b1 * m + (1 - opt.adam_b1) * g) / ((1 - opt.adam_b1**count) * (root + opt.adam_eps))

  return (moved(g) - moved(0 * g)) / np.where(g == 0, 1, g)


def differing_bytes(steps: int, overrides) -> tuple[int, int]:
  """(bytes that differ, bytes compared) between a run with scores and one without."""
  ends = []
  for enabled in ("true", "false"):
    cfg = configuration.load(str(_measure.BASE), *overrides, f"ghost_enabled={enabled}", "eval_interval=-1")
    ends.append(train(cfg, steps))
  pairs = [(a.tobytes(), b.tobytes()) for a, b in zip(*ends, strict=True)]
  differing = sum(int(np.count_nonzero(np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8))) for a, b in pairs)
  return differing, sum(len(a) for a, _ in pairs)


def train(cfg, steps: int) -> list[np.ndarray]:
  """Parameters and Adam moments after `steps` steps on the configured data, compiled as in a run."""
  dataset = data.load_dataset(cfg.data, cfg.run.data_shuffle_seed, vocab_size=cfg.model.vocab_size)
  graphdef, train_state = state.create_split(cfg)
  val_batches = ()
  if cfg.ghost.ghost_enabled:
    val_batches = (
      dataset.validation_batch(0, cfg.ghost.ghost_val_batch_size, next(iter(cfg.data.validation_sets.values()))).arrays,
    )
  first = next(dataset.train).arrays
  compiled = _steps.compile_step(cfg, graphdef, train_state, first, val_batches, dataset.layout.max_segments)
  batches = [first, *(next(dataset.train).arrays for _ in range(steps - 1))]
  for batch in batches:
    train_state, _ = compiled(train_state, jax.device_put(batch), jax.device_put(val_batches))
  kept = nnx.merge(graphdef, train_state)
  parts = nnx.state(kept.model), nnx.state(kept.optimizer.opt_state)
  return [np.asarray(leaf) for leaf in jax.tree.leaves(parts) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


if __name__ == "__main__":
  sys.exit(_measure.run(main))
