"""Train steps to measure: the trainer's own, compiled as the trainer compiles it, on one batch held on the device.

B rows, T positions, S documents a row can hold.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxghost.config import Config
from maxghost.parallel import heap
from maxghost.training import state
from maxghost.training.devices import compiler_options, configure_jax
from maxghost.training.step import make_train_step

LLAMA_1B = (  # keys of one of its layers, and of its batch
  "base_emb_dim=2048", "base_num_query_heads=32", "base_num_kv_heads=8", "head_dim=64", "base_mlp_dim=8192",
  "vocab_size=128256", "logits_via_embedding=true", "max_target_length=2048", "per_device_batch_size=8",
)  # fmt: skip


def packed_batch(cfg: Config, num_rows: int, seed: int = 0, num_documents: int = 3) -> dict[str, np.ndarray]:
  """Rows of random tokens, each `num_documents` documents long, in the trainer's format: int32[B, T] by name."""
  rng = np.random.default_rng(seed)
  length = cfg.data.max_target_length
  inputs, segments, positions = (np.zeros((num_rows, length), np.int32) for _ in range(3))
  for row in range(num_rows):
    cuts = np.sort(rng.choice(np.arange(2, length - 1), num_documents - 1, replace=False))
    bounds = [0, *cuts.tolist(), length]
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
      segments[row, start:end] = number + 1
      positions[row, start:end] = np.arange(end - start)
    inputs[row] = rng.integers(0, cfg.model.vocab_size, length)
  targets = np.roll(inputs, -1, axis=1)
  within = np.roll(segments, -1, axis=1) == segments
  within[:, -1] = False
  return {
    "inputs": inputs,
    "inputs_position": positions,
    "inputs_segmentation": segments,
    "targets": targets,
    "targets_position": positions,
    "targets_segmentation": np.where(within, segments, 0).astype(np.int32),
  }


@dataclasses.dataclass
class Step:
  """A compiled train step and the state it advances. Calling it runs one step to its end."""

  compiled: Any
  state: Any
  batch: dict
  val_batches: tuple
  outputs: dict | None = None

  def __call__(self) -> None:
    self.state, outputs = self.compiled(self.state, self.batch, self.val_batches)
    self.outputs = jax.block_until_ready(outputs)
    jax.block_until_ready(self.state)

  @property
  def temporary_bytes(self) -> int:
    return self.compiled.memory_analysis().temp_size_in_bytes

  @property
  def flops(self) -> float:
    """XLA's count for one step; a loop's body counts once, so compare configurations with scan_layers=false."""
    return self.compiled.cost_analysis()["flops"]


def make_step(cfg: Config, num_documents: int = 3) -> Step:
  """The step of `cfg` on a batch of one device's rows and, with ghost on, a batch per validation set."""
  heap.call("mallopt", heap.ARENA_MAX, 1)  # as the trainer, which does it before XLA starts its threads
  configure_jax(cfg)
  if jax.default_backend() == "cpu":
    heap.keep()
  rows = cfg.data.per_device_batch_size * cfg.optimizer.gradient_accumulation_steps
  batch = jax.device_put(packed_batch(cfg, rows, 0, num_documents))
  sets = cfg.val_sets
  val_batches = tuple(
    jax.device_put(packed_batch(cfg, cfg.ghost.ghost_val_batch_size, 1 + i, num_documents)) for i in range(len(sets))
  )
  graphdef, train_state = state.create_split(cfg)
  compiled = compile_step(cfg, graphdef, train_state, batch, val_batches, num_documents)
  return Step(compiled, train_state, batch, val_batches)


def compile_step(cfg: Config, graphdef, train_state, batch, val_batches: tuple, num_segments: int):
  """The executable `step(state, batch, val_batches) -> (state, outputs)`, compiled with the trainer's options."""
  step, _ = make_train_step(
    cfg, graphdef, train_state, batch, num_segments=num_segments, num_sets=max(len(val_batches), 1)
  )
  lowered = jax.jit(step, donate_argnums=0).lower(train_state, batch, val_batches)
  return lowered.compile(compiler_options=compiler_options())


def matmul_rate(size: tuple[int, int, int], dtype="float32", repeats: int = 4):
  """(a contender for `take_turns`, its FLOPs): `repeats` products [m, k] x [k, n], one after the other."""
  m, k, n = size
  x_MK = jax.random.normal(jax.random.key(0), (m, k), dtype)
  w_KN = jax.random.normal(jax.random.key(1), (k, n), dtype)
  product = jax.jit(jnp.matmul)

  def run() -> None:
    for _ in range(repeats):
      product(x_MK, w_KN).block_until_ready()

  return run, 2.0 * m * k * n * repeats
