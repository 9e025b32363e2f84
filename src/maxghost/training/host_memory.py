"""Stacked weights and optimizer moments in pinned host memory, and their update segment by segment.

All values are computed on the device by the formulas of the unstreamed step, one segment after the other.

L layers, k layers in a segment, n = L / k segments.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxghost.config import Config, ConfigError
from maxghost.models import segments, streaming
from maxghost.optimizers import global_norm
from maxghost.parallel.shardings import AXES, HOST, map_state


def updates(cfg: Config) -> bool:
  """Whether an update of the parameters reads or writes host memory; adapters are trained on the device."""
  held = cfg.model.offload_to_host
  return "optimizer" in held or ("weights" in held and not cfg.adapter.lora_rank)


def put(cfg: Config, state: nnx.State) -> nnx.State:
  """The train state with the Variables that `offload_to_host` names in host memory."""
  return _moved(cfg, state, lambda x: jax.device_put(x, jax.memory.Space.Host))


def abstract(cfg: Config, state: nnx.State) -> nnx.State:
  """The abstract state with the first device's host memory in its shardings."""

  def placed(x):
    mesh = Mesh(np.array(jax.devices()[:1]), ("device",))  # without a mesh, JAX ignores an abstract array's memory
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(), memory_kind=HOST))

  return _moved(cfg, state, placed)


def _moved(cfg: Config, state: nnx.State, move: Callable) -> nnx.State:
  held = cfg.model.offload_to_host
  streamed: Any = {"model": "weights" in held, "optimizer": "optimizer" in held,
                   "stored_gradients": "weights" in held and not cfg.adapter.lora_rank}  # fmt: skip

  def leaf(path, v):
    streams = streamed.get(path[0]) and is_stacked(v) and not isinstance(v, nnx.LoRAParam)
    return move(v.get_value()) if streams else v.get_value()

  return map_state(state, leaf) if any(streamed.values()) else state


def check(cfg: Config, device: Any) -> None:
  """Raises ConfigError for a device that cannot reach pinned host memory."""
  kinds = [memory.kind for memory in device.addressable_memories()]
  if cfg.model.offload_to_host and HOST not in kinds:
    said = f"offload_to_host needs pinned host memory, but {device.device_kind} has only"
    raise ConfigError(f"{said} {', '.join(kinds) or 'memory of no named kind'}; leave offload_to_host empty")


def is_stacked(variable: nnx.Variable) -> bool:
  """Whether a parameter, or a moment of one, has a leading layer axis."""
  return (variable.get_metadata().get(AXES) or ("",))[0] == "layers"


def norm(state: nnx.State, segment_lengths: tuple[int, ...]):
  """Global norm in float32 or wider. With segments, squares are summed by these in any memory, for the same bits."""
  if not segment_lengths:
    return global_norm(state)
  values = [(v.get_value(), is_stacked(v)) for _, v in nnx.to_flat_state(state)]
  stacked = [x for x, flag in values if flag]
  total = sum((_squares(x) for x, flag in values if not flag), jnp.zeros((), float))
  step = lambda total, _, segment: (total + sum(map(_squares, segment)), None)  # noqa: E731
  for size in sorted({x.shape[0] for x in stacked}):
    group = [x for x in stacked if x.shape[0] == size]
    total, _ = streaming.loop(step, total, None, segments.split(group, segment_lengths[0]))
  return jnp.sqrt(total)


def _squares(x):
  # The barrier makes the sum's order, and with it the last bit, independent of the computation of x.
  x = jax.lax.optimization_barrier(x)
  return jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))))


def apply_gradients(optimizer: nnx.Optimizer, model: nnx.Module, grads, scale: Callable, segment_length: int) -> None:
  """As `optimizer.update(model, scaled grads)`, but stacked leaves are updated one segment at a time: its weights,
  gradients and moments are fetched to the device and returned to their memory. The optimizer must be `by_segment`.
  grads: State with the paths of the optimizer's Params. scale(array) -> array: clips a gradient leaf."""
  variables = nnx.state(model, optimizer.wrt)
  layers = {path: v.get_value().shape[0] if is_stacked(v) else 0 for path, v in nnx.to_flat_state(variables)}
  trees = nnx.as_pure(variables), nnx.as_pure(grads), nnx.as_pure(optimizer.opt_state)

  def of_depth(num_layers: int) -> tuple[Any, Any, Any]:
    """The entries of `trees` for parameters of a stack with this many layers; 0: outside the stacks."""
    return _map_states(lambda state: nnx.filter_state(state, lambda path, _: layers.get(path) == num_layers), trees)

  def update(params, grads, opt_state):
    updates, opt_state = optimizer.tx.update(jax.tree.map(scale, grads), opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  outer = of_depth(0)
  new = update(*outer)
  for num_layers in sorted(set(layers.values()) - {0}):
    own = _update_segments(update, *of_depth(num_layers), streaming.after(0, outer[1]), num_layers, segment_length)
    new = _map_states(nnx.merge_state, new, own)
  nnx.update(model, new[0])
  nnx.update(optimizer.opt_state, nnx.state(new[1]))
  optimizer.step[...] += 1


def _update_segments(update: Callable, params, grads, opt_state, first, num_layers: int, segment_length: int):
  """Applies `update` to stacked trees in place by segments, which share counts. first: 0, once fetching may begin."""
  held, tree = jax.tree.flatten((params, opt_state))
  layered = [x.ndim > 0 and x.shape[0] == num_layers for x in held]
  # Split beforehand: a TPU cannot cut an odd number of rows out of a packed matrix in host memory.
  held = [segments.split(x, segment_length) if flag else x for x, flag in zip(held, layered, strict=True)]
  grads = segments.split(grads, segment_length)

  def fetch(held, index):
    here = [streaming.fetch(x, index) if flag else x for x, flag in zip(held, layered, strict=True)]
    return here, streaming.fetch(grads, index)

  def body(index, state):
    held, (here, gradient) = state
    ahead = fetch(held, jnp.minimum(index + 1, num_layers // segment_length - 1))
    params, opt_state = jax.tree.unflatten(tree, here)
    new = jax.tree.leaves(update(params, gradient, opt_state))
    # Finish reading `held` before writing it; otherwise the compiler copies it on the host.
    new, ahead = jax.lax.optimization_barrier((new, ahead))
    put = lambda x, part: jax.lax.dynamic_update_index_in_dim(x, streaming.like(part, x), index, 0)  # noqa: E731
    return [put(x, part) if flag else x for x, part, flag in zip(held, new, layered, strict=True)], ahead

  held, _ = jax.lax.fori_loop(0, num_layers // segment_length, body, (held, fetch(held, first)))
  return jax.tree.unflatten(tree, [segments.join(x) if flag else x for x, flag in zip(held, layered, strict=True)])


def _map_states(function: Callable, *trees) -> Any:
  """Applies function(State, ...) to each State in the trees; other leaves are the first tree's."""
  is_state = lambda x: isinstance(x, nnx.State)  # noqa: E731
  return jax.tree.map(lambda x, *others: function(x, *others) if is_state(x) else x, *trees, is_leaf=is_state)
