"""FLOPs of the matrix products a train step computes, loops counted as often as they run.

XLA's own counter takes the body of a loop once, so it cannot compare a scan over layers with one over segments.
"""

import math

import jax
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr  # what is traced but not used is not computed

from maxghost.config import Config
from maxghost.training import state
from maxghost.training.step import make_train_step


def of_step(cfg: Config) -> float:
  """Of one plain train step of a configuration, from its jaxpr without dead code."""
  shape = jax.ShapeDtypeStruct((cfg.data.per_device_batch_size, cfg.data.max_target_length), np.int32)
  batch = {f"{n}{suffix}": shape for n in ("inputs", "targets") for suffix in ("", "_position", "_segmentation")}
  graphdef, abstract = state.abstract_split(cfg)
  step, _ = make_train_step(cfg, graphdef, abstract, batch, num_segments=1)
  jaxpr = jax.make_jaxpr(step)(abstract, batch, ()).jaxpr
  live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  return of_jaxpr(live)


def of_jaxpr(jaxpr) -> float:
  """2 M N K of every dot product; a scan's as often as it steps. Loops of unknown length count once."""
  total = 0.0
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      (contract, _), _ = equation.params["dimension_numbers"]
      lhs = equation.invars[0].aval.shape
      total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(lhs[i] for i in contract)
    times = equation.params["length"] if equation.primitive.name == "scan" else 1
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
    total += times * sum(of_jaxpr(getattr(inner, "jaxpr", inner)) for inner in leaves if hasattr(inner, "eqns"))
  return total
