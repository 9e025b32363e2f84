"""Stacked layers over the stages of a pipeline: which stage runs which layers, in how many rounds, and when.

S stages, R repeats, M micro-batches, L layers. Layers are cut into S R chunks of equal length; stage s runs the chunks
s, s + S, s + 2 S, ... (R = 1: GPipe, Huang et al., arXiv:1811.06965; R > 1: circular, as in Narayanan et al.,
arXiv:2104.04473). The state stays in the order of the layers, so that stage s stores the layers s L / S, ...
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.config import ConfigError, ParallelConfig
from maxghost.config.pipeline import split

AXIS = "stage"  # the mesh axis


@dataclasses.dataclass(frozen=True)
class Stages:
  """num: S. num_micro: M that is asked for. per_stage, repeats: as configured, -1 for what the other leaves."""

  num: int
  num_micro: int
  per_stage: int = -1
  repeats: int = -1

  @classmethod
  def of(cls, cfg: ParallelConfig, num: int) -> "Stages | None":
    """None without a pipeline. num: devices along mesh axis stage."""
    micro = cfg.num_pipeline_microbatches
    given = cfg.num_layers_per_pipeline_stage, cfg.num_pipeline_repeats
    return None if num == 1 else cls(num, num if micro == -1 else micro, *given)

  def rounds(self, num_layers: int) -> int:
    """R for so many stacked layers. Raises ConfigError where they do not divide."""
    repeats, problem = split(num_layers, self.num, self.per_stage, self.repeats)
    if problem:
      raise ConfigError(problem)
    return repeats

  def micro_batches(self, num_rows: int, parts: int) -> int:
    """M for a batch of so many rows: at most `num_micro`, so that the `parts` devices of a stage share each one out."""
    share = parts if num_rows % parts == 0 else 1
    return max(m for m in range(1, self.num_micro + 1) if num_rows % m == 0 and num_rows // m % share == 0)

  def describe(self, num_layers: int, num_rows: int, row_bytes: int) -> str:
    """One line on the way of a batch through the stages. num_rows: on the devices of a stage that share none.

    row_bytes: of the hidden states of one row on a device.
    """
    repeats, waits = self.rounds(num_layers), self.num - 1
    iterations, passed = self.num_micro * repeats + waits, row_bytes * num_rows // self.num_micro
    cut = f"{self.num} stages x {num_layers // self.num // repeats} layers"
    cut += f" x {repeats} repeats" if repeats > 1 else ""
    sent = f"each passes on {passed / 1e6:.1f} MB, {passed * iterations / 1e9:.3g} GB forward and as much back"
    bubble = f"bubble {waits / iterations:.1%} ({waits} of {iterations})"
    return f"pipeline: {cut}, {self.num_micro} micro-batches in {iterations} iterations; {sent}; {bubble}"


def _exchanges(num_stages: int, repeats: int) -> list[list[tuple[int, int, int]]]:
  """R permutations that together bring each chunk from where it is stored to where it runs.

  Entry s of one: (which of its chunks stage s sends, to which stage, as which of that stage's chunks). The chunks that
  a stage sends are neighbours, those that it receives are S apart: each takes part in another permutation.
  """
  found: list[list[tuple[int, int, int]]] = [[] for _ in range(repeats)]
  for chunk in range(num_stages * repeats):
    number = (chunk + chunk // math.lcm(num_stages, repeats)) % repeats
    found[number].append((chunk % repeats, chunk % num_stages, chunk // num_stages))
  return found


def to_run(tree: Any, num_stages: int, repeats: int) -> Any:
  """[L / S, ...] as stored -> [R, L / (S R), ...] as run, in every leaf; inside a shard_map over the stages."""
  tree = jax.tree.map(lambda x: x.reshape(repeats, x.shape[0] // repeats, *x.shape[1:]), tree)
  return _moved(tree, num_stages, repeats, back=False)


def to_store(tree: Any, num_stages: int, repeats: int) -> Any:
  """The inverse of `to_run`."""
  tree = _moved(tree, num_stages, repeats, back=True)
  return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def _moved(tree: Any, num_stages: int, repeats: int, back: bool) -> Any:
  if repeats == 1:
    return tree
  own = jax.lax.axis_index(AXIS)

  def move(x):
    out = jnp.zeros_like(x)
    for one in _exchanges(num_stages, repeats):
      arrives: dict[int, int] = {to: slot for _, to, slot in one}
      slots = [k for k, _, _ in one], [arrives[s] for s in range(num_stages)]
      pairs = [(s, to) for s, (_, to, _) in enumerate(one)]
      sends, takes = (jnp.asarray(table)[own] for table in (reversed(slots) if back else slots))
      held = jax.lax.dynamic_index_in_dim(x, sends, keepdims=False)
      moved = jax.lax.ppermute(held, AXIS, [p[::-1] for p in pairs] if back else pairs)
      out = jax.lax.dynamic_update_index_in_dim(out, moved, takes, 0)
    return out

  return jax.tree.map(move, tree)


def ring(num_stages: int, step: int) -> Sequence[tuple[int, int]]:
  """Pairs of `ppermute` to the next stage (step 1) or to the one before (-1)."""
  return [(s, (s + step) % num_stages) for s in range(num_stages)]
