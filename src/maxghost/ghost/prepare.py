"""From a model and the shape of a batch to its probed twin."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxghost.ghost import usage
from maxghost.ghost.attach import Twin, attach, split
from maxghost.ghost.directions import DirectionSpec
from maxghost.ghost.probed import SecondUse


def prepare_twin(
  model,
  batch,
  loss_fn: Callable,
  *,
  num_sets: int,
  num_positions: int | None,
  spec: DirectionSpec,
  exclude: tuple[str, ...] = (),
  schedule: str = "two_pass",
  num_val: int = 0,
) -> Twin:
  """The twin for batches of this shape. batch: arrays or shapes with the example axis first; num_val: validation rows
  appended to it by schedule 'concat'.

  Where a direction needs the whole gradient of a parameter (as AdamW's, or under a schedule other than two_pass), one
  abstract trace tells which tables are used twice, and those are linked (`tied`).
  Raises what `attach` raises, and ValueError for a layer that does not keep the example axis first, or that is called
  several times where its direction needs the whole gradient, and for unscored parameters under schedule 'concat'.
  """
  num_examples = jax.tree.leaves(batch)[0].shape[0]
  num_val = num_val if schedule == "concat" else 0
  arguments = {
    "num_examples": num_examples,
    "num_positions": num_positions,
    "num_sets": num_sets,
    "spec": spec,
    "exclude": exclude,
    "num_val": num_val,
  }
  twin = attach(model, **arguments)
  if schedule == "concat" and twin.excluded:
    raise ValueError(
      f"ghost_schedule=concat cannot leave {', '.join(twin.excluded)} unscored: only a scored layer keeps the "
      f"validation rows out of its training gradient. Use two_pass or reverse_scan, or an empty ghost_exclude"
    )
  params, rest = split(model)
  rows = num_examples + num_val
  used = _trace(twin, params, rest, loss_fn, _shapes(batch, rows))
  try:  # twice the rows: a number that any mesh divides which divides the rows
    used_doubled = _trace(twin, params, rest, loss_fn, _shapes(batch, 2 * rows))
  except Exception as error:
    raise ValueError(
      f"the loss works for {rows} rows, but not for {2 * rows}, which is how layers are checked for a leading batch "
      f"axis: let model and loss take any number of rows ({error})"
    ) from error
  shapes, doubled = ({(use.path, use.method): use.shape for use in uses} for uses in (used, used_doubled))
  for (path, method), shape in shapes.items():
    if not shape or doubled[path, method][:1] != (2 * shape[0],):
      raise ValueError(
        f"{path}.{method} returns {shape} for a batch of {rows}: its leading axis is not the batch. Broadcast its "
        f"input to the batch, or name its parameters in ghost_exclude"
      )
  if not spec.in_backward and schedule == "two_pass":
    return twin
  often = usage.called_often(used)
  if often:
    where = ", ".join(f"{path} ({calls} calls)" for path, calls in often.items())
    raise ValueError(
      f"{where}: ghost_direction={spec.rule.direction} with ghost_schedule={schedule} needs the whole gradient of a "
      f"parameter at one call. Use ghost_direction=sgd with two_pass, or name the paths in ghost_exclude"
    )
  looked_up = {use.path for use in used if not use.is_second}
  linked = tuple(
    (use.path, SecondUse(use.method, use.argument_shapes[0], use.static))
    for use in used
    if use.is_second and use.path in looked_up
  )
  return attach(model, **arguments, linked=linked) if linked else twin


def _shapes(batch, rows: int):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)


def _trace(twin: Twin, params, rest, loss_fn, shapes) -> list[usage.Use]:
  """The probed calls in one abstract evaluation of the loss."""
  abstract = {}
  for param in twin.scored:
    part_shapes = param.spec.part_shapes(param.stack_shape, twin.num_sets, param.shape)
    abstract[param.label] = tuple(part_shapes[name] for name in param.spec.parts)

  def loss(params, rest, batch):
    parts = {label: tuple(jnp.zeros(s) for s in shapes) for label, shapes in abstract.items()}
    return loss_fn(twin.merge(params, twin.zero_probes(), twin.direction_state(parts), rest), batch)

  with usage.record() as used:
    jax.eval_shape(loss, params, rest, shapes)
  return used
