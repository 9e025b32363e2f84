"""A compiled train step of a tiny model, and everything around one step as numpy arrays."""

import dataclasses
import functools
import os
import platform

import jax
import numpy as np
import tiny
from flax import nnx

from maxghost import config, optimizers
from maxghost.training import host_memory, step
from maxghost.training.devices import compiler_options
from maxghost.training.state import TrainStateNNX, trainable

# No warm-up, so that the first step already moves; clipping is at work in some steps and not in others.
TRAINING = {
  "steps": 20,
  "learning_rate": 3e-3,
  "warmup_steps_fraction": 0.0,
  "gradient_clipping_threshold": 1.0,
  "adam_b1": 0.8,
  "adam_weight_decay": 0.3,
  "adam_eps": 1e-6,
}
# Compiler options by which two programs that compute the same have the same bits on a CPU. Without fusion emitters, as
# conftest.py has it, what else is computed in a loop decides whether a product and its sum are rounded once or twice.
# NO_FMA rounds twice everywhere, and compiles in a quarter of the time of FUSED.
FUSED = {"xla_cpu_use_fusion_emitters": True} if "fusion_emitters" in os.environ["XLA_FLAGS"] else {}
NO_FMA = {"xla_cpu_max_isa": "AVX"} if platform.machine() in ("x86_64", "AMD64") else FUSED
REFERENCE_SEED, TEACHER = 77, {"base_emb_dim": 28, "base_num_decoder_layers": 2}
TRAIN = [tiny.make_batch(tiny.PACKED, seed=100 + i) for i in range(4)]
VALIDATION = tiny.make_batch(tiny.VALIDATION, seed=200)


@dataclasses.dataclass
class Snapshot:
  """Parameters and Adam's state as {label: float64 array}, steps taken, the last clipping factor."""

  params: dict
  first: dict | None
  second: dict | None
  count: int
  clip_factor: float


class Run:
  """`step(batch, val_batches) -> out` of a compiled train step.

  cheap: compiled without XLA's optimizations. exact: so that its bits can be compared with those of another program.
  """

  def __init__(self, *, cheap: bool = True, exact: bool = False, num_sets: int = 1, batch=TRAIN[0], **changes):
    self.cfg = tiny.make_config(**(TRAINING | changes))
    self.wide = self.cfg.model.dtype == "float64"
    self.num_sets = num_sets
    with jax.enable_x64(self.wide):
      stored, model = num_sets * self.cfg.ghost.num_stored, tiny.make_model(self.cfg)
      trained = trainable(self.cfg, model)
      tx = optimizers.make_optimizer(self.cfg.optimizer, self.cfg.run.steps, nnx.state(model, trained))
      carries = self.cfg.ghost.ghost_enabled and self.cfg.ghost.carries_curvature
      frozen = tiny.make_model(self.cfg, seed=REFERENCE_SEED) if self.cfg.reference == "start" else None
      if self.cfg.reference == "teacher":
        frozen = tiny.make_model(config.replace(self.cfg, **TEACHER), seed=REFERENCE_SEED)
      sizes = {"num_stored": stored, "carries": carries, "reference_model": frozen}
      train_state = TrainStateNNX(model, tx, trainable=trained, **sizes)
      self.graphdef, arrays = nnx.split(train_state)
      self.state = host_memory.put(self.cfg, arrays)
      self.function, self.twin = step.make_train_step(
        self.cfg, self.graphdef, self.state, batch, num_segments=tiny.SEGMENTS, num_sets=num_sets
      )
    self.compilation = functools.partial(tiny.cheap_compilation, cheap)
    with self.compilation():
      options = compiler_options()
    if exact and jax.default_backend() == "cpu":
      options |= NO_FMA if cheap else FUSED
    self._run = jax.jit(self.function, compiler_options=options)

  def step(self, batch, val_batches=(VALIDATION,)) -> dict:
    if not self.cfg.ghost.ghost_enabled:
      val_batches = ()
    with jax.enable_x64(self.wide), self.compilation():
      self.state, out = self._run(self.state, batch, val_batches)
    return jax.tree.map(np.asarray, out)

  def snapshot(self) -> Snapshot:
    with jax.enable_x64(self.wide):
      train_state = nnx.merge(self.graphdef, self.state)
      arrays = optimizers.create(self.cfg.optimizer).read(train_state.optimizer).arrays

    def wide(values):
      return None if values is None else {k: np.asarray(v, np.float64) for k, v in values.items()}

    return Snapshot(
      wide(tiny.by_label(train_state.model)),
      wide(arrays.get("first_moment")),
      wide(arrays.get("second_moment")),
      int(train_state.step),
      float(train_state.clip_factor[...]),
    )
