"""Devices to compile for without having them: TPU slices by name through libtpu, and N virtual CPU devices.

A name is FAMILY-N. N counts as in the cloud's names: TensorCores for v4 and v5p (two per chip), chips for v5e and v6e,
devices for tpu7x (two per chip). Importing this module does not import JAX.
"""

import dataclasses
import difflib
import importlib.util
import math
import os

from maxghost.config import ConfigError
from maxghost.config.files import read_table
from maxghost.config.values import first_line


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
  """One generation of TPUs. smallest: the cloud's name of one host. per_chip: what a chip adds to N."""

  name: str
  smallest: str
  config: str
  shapes: str
  per_chip: int
  devices_per_chip: int
  hbm_gib: float

  @property
  def slices(self) -> dict[int, tuple[int, ...]]:
    """{N: chips along each axis}."""
    dims = [tuple(map(int, text.split("x"))) for text in self.shapes.split()]
    return {math.prod(shape) * self.per_chip: shape for shape in dims}


FAMILIES = {name: Family(**row) for name, row in read_table("topologies.yml").items()}


def parse(topology: str) -> tuple[str, int]:
  """(family, N) of a name; ('cpu', N) for virtual devices. Raises ConfigError with the nearest valid names."""
  if not topology:
    raise ConfigError("compile_topology is missing: what to compile for, such as v5e-16, v5p-256 or cpu-8")
  family, _, count = topology.partition("-")
  number, slices = int(count) if count.isdecimal() else 0, FAMILIES[family].slices if family in FAMILIES else {}
  if number in slices or (family == "cpu" and number > 0):
    return family, number
  names = [f"{name}-{count}" for name, known in FAMILIES.items() for count in known.slices]
  near = difflib.get_close_matches(topology, names, n=4, cutoff=0.3) or ["v5e-16", "v5p-256", "v6e-16"]
  if slices:
    near = [f"{family}-{n}" for n in sorted(slices, key=lambda n: (abs(n - number), n))[:4]]
  said = f"compile_topology={topology} is no topology; nearest are {', '.join(near)}"
  raise ConfigError(f"{said}; families are {', '.join(FAMILIES)}, and cpu-N")


def prepare_environment(topology: str) -> None:
  """Sets the environment before JAX is imported, so that it neither looks for hardware nor asks a cloud's server."""
  family, _ = parse(topology)
  os.environ["JAX_PLATFORMS"] = "cpu"
  if family != "cpu":
    own = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    for name, value in (own | {"TPU_ACCELERATOR_TYPE": FAMILIES[family].smallest}).items():
      os.environ.setdefault(name, value)


def open_devices(topology: str, num_slices: int = 1) -> list:
  """The devices of a topology. Raises ConfigError for an unknown name, and if libtpu is missing or refuses it."""
  family, count = parse(topology)
  if family == "cpu":
    import jax

    try:
      jax.config.update("jax_num_cpu_devices", count := count * num_slices)
    except RuntimeError:  # JAX has started already, with a number of its own
      if (have := len(jax.devices("cpu"))) < count:
        said = f"JAX has started with {have} CPU devices; use a process of its own"
        raise ConfigError(f"compile_topology=cpu-{count}: {said}") from None
    return jax.devices("cpu")[:count]
  if importlib.util.find_spec("libtpu") is None:
    said = f"compile_topology={topology} needs the TPU compiler: pip install 'maxghost[tpu]'"
    raise ConfigError(f"{said}; compile_topology=cpu-8 compiles for virtual CPU devices without it")
  from jax.experimental import topologies

  known, shape = FAMILIES[family], FAMILIES[family].slices[count]
  try:
    described = topologies.get_topology_desc(
      platform="tpu", topology_name=f"{known.name}:{'x'.join(map(str, shape))}", chip_config_name=known.config,
      chips_per_host_bounds=(1, 1, 1) if math.prod(shape) == 1 else (2, 2, 1), num_slices=num_slices,
      wrap=(*(size == 16 for size in shape), False) if len(shape) == 2 else tuple(size % 4 == 0 for size in shape),
    )  # fmt: skip
  except Exception as error:  # whatever libtpu says
    said = f"libtpu refuses it ({first_line(error)}); try another topology"
    raise ConfigError(f"compile_topology={topology}: {said}") from error
  return list(described.devices)


def hbm_bytes(topology: str) -> int | None:
  """Usable memory of one device; None for CPUs."""
  family, _ = parse(topology)
  return int(FAMILIES[family].hbm_gib * 2**30) if family in FAMILIES else None
