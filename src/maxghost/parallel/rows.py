"""Which rows of a global batch each process holds."""

import dataclasses

import jax

from maxghost.config import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class OwnRows:
  """The rows of this process: part `shard` of `num_shards` equal parts of the batch.

  writes: whether this process records the results of these rows; other processes may hold the same rows.
  """

  num_shards: int = 1
  shard: int = 0
  writes: bool = True


def own_rows(sharding: jax.sharding.Sharding, num_rows: int, process: int) -> OwnRows:
  """The part of a process under the sharding of batch arrays [B, ...]. Raises ConfigError for partial overlaps."""
  held: dict[int, set[tuple[int, int]]] = {}
  for device, index in sharding.devices_indices_map((num_rows,)).items():
    start, stop, _ = index[0].indices(num_rows)
    held.setdefault(device.process_index, set()).add((start, stop))
  parts = sorted({frozenset(blocks) for blocks in held.values()}, key=min)
  sizes = {sum(stop - start for start, stop in blocks) for blocks in parts}
  if len(sizes) > 1 or sizes.pop() * len(parts) != num_rows:
    raise ConfigError(
      f"{len(held)} processes hold parts of the {num_rows} rows that overlap: give each process whole copies of rows, "
      "with a product of data, fsdp and expert parallelism that is a multiple of the processes or divides them"
    )
  mine = frozenset(held[process])
  return OwnRows(len(parts), parts.index(mine), min(p for p, blocks in held.items() if blocks == mine) == process)
