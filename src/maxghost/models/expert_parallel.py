"""The routed layer on a mesh: experts stay on their devices, and tokens are gathered to them.

Rows are split over the batch's mesh axes, experts over theirs, the experts' width over tensor's. Devices that differ in
their experts gather each other's tokens, each applies its own experts, and the sum over experts returns to the device
of the token. No token is dropped.

B rows, T positions, D embed dim, F width of an expert, E experts, k experts of a token, R rows of tokens and choices.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from maxghost.models.layers import HIDDEN
from maxghost.parallel import shardings


@dataclasses.dataclass(frozen=True)
class Split:
  """Mesh axes of the tokens' rows and positions, of the experts, and of their width."""

  mesh: Mesh
  rows: tuple[str, ...]
  length: tuple[str, ...]
  experts: tuple[str, ...]
  width: tuple[str, ...]

  @property
  def tokens(self) -> PartitionSpec:
    """Spec of arrays [B, T, ...]."""
    return PartitionSpec(self.rows or None, self.length or None)

  @property
  def sorted_rows(self) -> tuple[str, ...]:
    """Mesh axes over which arrays [R, ...] are split; devices that differ in them hold different rows."""
    return (*self.rows, *self.length, *(axis for axis in self.experts if axis not in self.rows))

  def param(self, name: str, leading: int = 0) -> PartitionSpec:
    """Spec of the layer's Param `name`, with `leading` more axes in front."""
    experts, width = self.experts or None, self.width or None
    parts = {"wo": (experts, width), "wo_bias": (experts,)}.get(name)
    if parts is None:
      parts = (experts, width) if name.endswith("_bias") else (experts, None, width)
    return PartitionSpec(*[None] * leading, *parts)

  def map(self, function: Callable, in_specs, out_specs) -> Callable:
    return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

  def run(self, experts: Callable, params: dict, x_BTD, index_BTk, weight_BTk):
    """Runs `experts(params, x, index, weight, first_expert)` on every device; whole arrays in and out."""

    def local(params, x, index, weight):
      return self.sum(experts(self.once(params), *self.gather(x, index, weight), self.first_expert(params)))

    specs = {name: self.param(name) for name in params}
    return self.map(local, (specs, *[self.tokens] * 3), self.tokens)(params, x_BTD, index_BTk, weight_BTk)

  # For use inside `map`.

  def gather(self, *tokens):
    """Gathers arrays [B, T, ...] from the devices that differ only in their experts."""
    shared = self._gathered
    return [jax.lax.all_gather(x, shared, axis=0, tiled=True) for x in tokens] if shared else list(tokens)

  def sum(self, y_BT):
    """Sums the parts [B, T, ...] of gathered tokens and returns each token to its device."""
    if self._gathered:
      y_BT = jax.lax.psum_scatter(y_BT, self._gathered, scatter_dimension=0, tiled=True)
    others = (*self.width, *(axis for axis in self.experts if axis not in self._gathered))
    return jax.lax.psum(y_BT, others) if others else y_BT

  def first_expert(self, params: dict):
    """Index of the first expert of this device."""
    return self._index(self.experts) * params["wo"].shape[0]

  def once(self, params: dict) -> dict:
    """The params, with the output's bias on only one of the devices whose outputs are summed."""
    if "wo_bias" not in params or not self.width:
      return params
    bias = params["wo_bias"]
    return params | {"wo_bias": jnp.where(self.is_first, bias, jnp.zeros_like(bias))}

  @property
  def is_first(self):
    """Whether this device has the first part of the experts' width."""
    return self._index(self.width) == 0

  @property
  def _gathered(self) -> tuple[str, ...]:
    return tuple(axis for axis in self.experts if axis in self.rows)

  def _index(self, axes: tuple[str, ...]):
    return functools.reduce(lambda index, axis: index * self.mesh.shape[axis] + jax.lax.axis_index(axis), axes, 0)


def find(layer, x_shape: tuple[int, ...]) -> Split | None:
  """How the layer's tokens [B, T, D] and Params lie on the mesh of the layout in use; None on one device."""
  layout = shardings.current()
  if layout is None or layout.num_devices == 1:
    return None
  rows, length, _ = layout.rules.assign(HIDDEN, x_shape, "an activation")
  experts, width, _ = layout.rules.assign(("exp", "mlp", None), layer.wo.shape[-3:], "experts")
  return Split(layout.mesh, rows, length, experts, width)
