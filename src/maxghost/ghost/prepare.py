"""Builds the probed twin of a model for a batch shape."""

import functools
from collections.abc import Callable

import jax

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
  """Builds the twin for batches of this shape.

  A direction may need the whole gradient of a parameter (AdamW's, or a schedule other than two_pass). Then an abstract
  trace finds tables that are used twice, and these are linked (`tied`).

  Args:
    batch: arrays or shapes with the example axis first.
    num_val: validation rows that schedule 'concat' appends to the batch.

  Raises: ValueError as `attach`; for a layer that does not keep the example axis first, or is called several times
    where its direction needs the whole gradient; and for unscored parameters with schedule 'concat'.
  """
  num_examples = jax.tree.leaves(batch)[0].shape[0]
  num_val = num_val if schedule == "concat" else 0
  attached = functools.partial(
    attach, model, num_examples=num_examples, num_positions=num_positions, num_sets=num_sets, spec=spec,
    exclude=exclude, num_val=num_val,
  )  # fmt: skip
  twin = attached()
  if schedule == "concat" and twin.excluded:
    raise ValueError(
      f"ghost_schedule=concat cannot leave {', '.join(twin.excluded)} unscored: only a scored layer keeps the "
      f"validation rows out of its training gradient. Use two_pass or reverse_scan, or an empty ghost_exclude"
    )
  params, rest = split(model)
  rows = num_examples + num_val
  used = _trace(twin, params, rest, loss_fn, _shapes(batch, rows))
  try:  # twice the rows, which a mesh divides if it divides the rows
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
  return attached(linked=linked) if linked else twin


def _shapes(batch, rows: int):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)


def _trace(twin: Twin, params, rest, loss_fn, shapes) -> list[usage.Use]:
  """The probed calls in one abstract evaluation of the loss."""

  def loss(params, rest, batch):
    return loss_fn(twin.merge(params, twin.zero_probes(), twin.blank_directions(), rest), batch)

  with usage.record() as used:
    jax.eval_shape(loss, params, rest, shapes)
  return used
