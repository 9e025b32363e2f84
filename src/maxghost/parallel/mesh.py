"""The mesh of all devices: sizes from the configuration, device order from the hardware.

A slice is a set of devices with a fast network (a TPU slice); a slower network joins the slices. Each mesh axis has
dcn_<axis>_parallelism slices times ici_<axis>_parallelism devices of a slice. With DiLoCo the slices of axis data have
an axis of their own, `APART`.
"""

import math
from collections.abc import Sequence

import numpy as np

from maxghost.config import ConfigError, ParallelConfig
from maxghost.config.validate import MESH_AXES
from maxghost.config.values import divisors
from maxghost.parallel.axis_rules import APART


def group_sizes(cfg: ParallelConfig, group: str) -> dict[str, int]:
  """{mesh axis: size as configured} of group 'ici' or 'dcn'; at most one is -1."""
  return {axis: getattr(cfg, f"{group}_{axis}_parallelism") for axis in MESH_AXES}


def fill(group: str, sizes: dict[str, int], total: int, what: str, apart: bool = False) -> dict[str, int]:
  """The sizes with -1 replaced so that their product is the `total` of `what`. Raises ConfigError with what works."""
  open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
  given = {axis: size for axis, size in sizes.items() if size != -1}
  product = math.prod(given.values())
  if open_axis is not None and total % product == 0:
    return sizes | {open_axis: total // product}
  if product == total:
    return sizes
  raise _misfit(group, given, total, what, open_axis is not None, apart)


def _misfit(group: str, given: dict[str, int], total: int, what: str, filled: bool, apart: bool) -> ConfigError:
  """The error for sizes with another product than the total, with up to three changes of one key that correct it.
  apart: with DiLoCo, which takes no single slice along axis data. Stages, and slices apart, need a number, not -1."""
  product, large = math.prod(given.values()), {axis: size for axis, size in given.items() if size > 1}
  shown = " x ".join(f"{group}_{axis}_parallelism={size}" for axis, size in large.items())
  relation = "does not divide" if filled else "is not"
  named = f"{shown} = {product}" if large else f"all {group}_*_parallelism are 1, which"
  ways = []
  for axis, size in sorted(large.items(), key=lambda item: -item[1]):
    rest, left = divmod(total, product // size)
    fits = [n for n in (divisors(rest) if filled else [rest]) if n > (apart and axis == "data")]
    if not left and fits:
      ways.append(f"{group}_{axis}_parallelism={min(fits, key=lambda n: (abs(n - size), n))}")
  largest = max((a for a in given if a != "stage" and not (apart and a == "data")), key=lambda a: given[a])
  if not filled and total % (product // given[largest]) == 0:
    ways.append(f"{group}_{largest}_parallelism=-1, which takes what is left")
  if not ways:  # no single key corrects it
    alone = dict.fromkeys(large, 1) | ({} if filled else {largest: -1})
    ways = [" ".join([*["enable_diloco=false"] * apart, *(f"{group}_{a}_parallelism={n}" for a, n in alone.items())])]
  return ConfigError(f"{named} {relation} the {total} {what}; use {', or '.join(ways[:3])}")


def num_slices(cfg: ParallelConfig, devices: Sequence) -> int:
  """Number of slices: on TPU reported by the hardware, elsewhere the product of the dcn keys."""
  if devices[0].platform == "tpu":
    return len({getattr(device, "slice_index", 0) for device in devices})
  return math.prod(size for size in group_sizes(cfg, "dcn").values() if size != -1)


def mesh_shape(cfg: ParallelConfig, num_devices: int, slices: int = 1) -> tuple[dict[str, int], dict[str, int]]:
  """(ici sizes, dcn sizes) by mesh axis, in its order. Raises ConfigError for a wrong product."""
  dcn = fill("dcn", group_sizes(cfg, "dcn"), slices, f"slice{'s' if slices > 1 else ''}", cfg.enable_diloco)
  if num_devices % slices:
    raise _misfit("dcn", dcn, num_devices, "devices", filled=True, apart=cfg.enable_diloco)
  per_slice = num_devices // slices
  where = f"device{'s' if per_slice > 1 else ''}{' of each slice' if slices > 1 else ''}"
  ici = fill("ici", group_sizes(cfg, "ici"), per_slice, where)
  if cfg.enable_diloco:  # outermost, so that a process holds whole slices, or a part of one
    return {APART: 1, **ici}, {APART: dcn["data"], **dcn, "data": 1}
  return ici, dcn


def make_mesh(cfg: ParallelConfig, devices: Sequence):
  """A `jax.sharding.Mesh` with the axes of `mesh_shape` over all the devices. Raises ConfigError."""
  import jax

  ici, dcn = mesh_shape(cfg, len(devices), num_slices(cfg, devices))
  types = (jax.sharding.AxisType.Auto,) * len(ici)  # XLA decides how results are sharded; newer JAX has another default
  return jax.sharding.Mesh(_arranged(devices, tuple(ici.values()), tuple(dcn.values())), tuple(ici), axis_types=types)


def _arranged(devices: Sequence, ici: tuple[int, ...], dcn: tuple[int, ...]) -> np.ndarray:
  """Devices as an array of shape dcn * ici: on TPU, neighbours along an axis are neighbours in the torus; elsewhere
  they are in the order of processes, slices outermost."""
  from jax.experimental import mesh_utils

  if devices[0].platform == "tpu":
    if math.prod(dcn) > 1:
      return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
    return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
  order = [axis for i in range(len(ici)) for axis in (i, len(ici) + i)]
  array = np.asarray(devices, dtype=object).reshape(*dcn, *ici).transpose(order)
  return array.reshape([a * b for a, b in zip(dcn, ici, strict=True)])


def describe(mesh) -> str:
  """`fsdp 4 x tensor 2 (8 devices)`."""
  named = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "1 device"
  return named if mesh.size == 1 else f"{named} ({mesh.size} devices)"
