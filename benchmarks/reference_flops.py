"""What the frozen reference of DPO costs on validation rows, which stay the same for many steps: FLOPs by XLA.

  python benchmarks/reference_flops.py [--layers 4]

Counts the operations of a scored step before XLA's optimizations, as it is and with validation rows that have the
reference's log-probabilities already. Compiles nothing.
"""

import itertools
import sys

import _measure
import jax
from flax import nnx

from maxghost import config
from maxghost.objectives import of_validation
from maxghost.parallel.shardings import Layout, use
from maxghost.training import devices, state
from maxghost.training.step import make_train_step

TRAINING_ROWS = 8
MODEL = {
  "base_emb_dim": 576, "base_num_query_heads": 9, "base_num_kv_heads": 3, "head_dim": 64, "base_mlp_dim": 1536,
  "vocab_size": 4096, "max_target_length": 256, "scan_layers": False, "remat_policy": "none",
  "attention": "dot_product", "per_device_batch_size": TRAINING_ROWS,
}  # fmt: skip
PAIRS = {"objective": "dpo", "dataset_type": "text", "dataset_files": ("pairs=x.jsonl",), "ghost_val_sets": ("pairs",)}


def flops(cfg: config.Config, is_known: bool) -> float:
  """Of a train step. is_known: the validation rows have the reference's log-probabilities."""
  layout = Layout.of(cfg.parallel, jax.devices()[:1])
  graphdef, abstract = state.abstract_split(cfg)
  batch, val = devices.batch_shapes(cfg, TRAINING_ROWS, layout), devices.validation_shapes(cfg, layout)

  def referenced(train_state, *rows):
    return state.referenced(of_validation(cfg), nnx.merge(graphdef, train_state), *rows)

  val = jax.eval_shape(referenced, abstract, *val) if is_known else val
  step, _ = make_train_step(cfg, graphdef, abstract, batch, num_segments=8, num_sets=len(val))
  with use(layout):
    return jax.jit(step).lower(abstract, batch, val).cost_analysis()["flops"]


def main() -> None:
  given = _measure.arguments(__doc__, False, layers=4)
  lora = {"lora_rank": 8, "adam_weight_decay": 0.0}
  for (name, keys), rows in itertools.product({"DPO": {}, "DPO with LoRA": lora}.items(), (2, 8)):
    changes = MODEL | PAIRS | keys | {"base_num_decoder_layers": given.layers, "ghost_val_batch_size": rows}
    cfg = config.replace(config.load(), **changes)
    whole, known = (flops(cfg, is_known) for is_known in (False, True))
    share = f"{1 - known / whole:.1%} for the reference on validation rows"
    print(f"{name}, {rows} validation rows for {TRAINING_ROWS}: {whole / 1e12:.3f} TFLOP, {share}")


if __name__ == "__main__":
  sys.exit(_measure.run(main))
