"""Local checkpoints: saved often on the disks (or in the memory) of the machines themselves, each with a peer's copy.

Every process keeps `<folder>/<step>-<attempt>/`, where attempt is a random word for this start of the run:
  <process>.bin, .json        the bytes of its pieces of the arrays; their names and shapes, and the positions
  <process>.peer.bin, .json   pieces of a process on another machine that no third machine holds
A piece is what the sharding gives to one device. A checkpoint can be used when the processes that start again hold all
pieces between them, whatever their number, order and mesh: each reads its own files, and gets missing pieces through
the shared folder.
"""

import collections
import contextlib
import functools
import json
import math
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from maxghost.config.files import check_seal, sealed, write_text, write_whole
from maxghost.parallel import distributed

CHUNK = 1 << 24  # bytes that a process sends to its peer at a time
LENT = ".lent-"  # prefix of the shared folders through which processes exchange pieces
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine


class Piece(NamedTuple):
  """The part of an array, named by its slash path, that begins at `start` and has this shape."""

  name: str
  start: tuple[int, ...]
  shape: tuple[int, ...]

  @classmethod
  def at(cls, name: str, index: Any, shape: tuple[int, ...]) -> "Piece":
    bounds = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
    return cls(name, tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))

  def overlap(self, other: "Piece") -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The intersection, as indices into this piece and into the other; None if it is empty."""
    low = np.maximum(self.start, other.start)
    high = np.minimum(np.add(self.start, self.shape), np.add(other.start, other.shape))
    if (low >= high).any():
      return None
    ours, theirs = (tuple(map(slice, low - one.start, high - one.start)) for one in (self, other))
    return ours, theirs


Place = tuple[Path, int]  # a file, and the offset in it


class LocalCheckpoints:
  """The local checkpoints of one run. Every process calls the methods in the same order.

  folder: on this machine. shared: a folder that all processes see. attempt: the same word in all processes. attempts:
  (word, step it continued after) of each earlier attempt, in order. say: receives each message for the user.
  """

  def __init__(self, folder: Path, shared: Path, attempt: str, attempts: Sequence[tuple[str, int]] = (),
               say: Callable[[str], None] = print):  # fmt: skip
    self.folder, self.attempt, self._say = folder, attempt, say
    self._shared, self._attempts = shared, [*attempts, (attempt, sys.maxsize)]  # it has not continued after a step yet
    self._machines = machines()
    self._shift = peer_shift(self._machines) or distributed.count() // 2
    if distributed.count() > 1 and not peer_shift(self._machines):
      uneven = "machines have unlike numbers of processes, so that some copies stay on the machine of the original"
      self._say(f"maxghost: note: local checkpoints: {uneven}; start as many processes on each machine")
    self._pool = ThreadPoolExecutor(1, "local-checkpoint")
    self._writing: tuple[str, Future] | None = None
    self._places: dict[str, dict[Piece, Place]] = {}  # {name of a checkpoint: its pieces here}
    self._of_all: dict[str, list[set[Piece]]] = {}  # {name: its pieces by process}
    self._headers: dict[str, dict] = {}

  def save(self, step: int, flat: Mapping[str, jax.Array], record: Mapping[str, Any]) -> None:
    """Copies the pieces of this process, sends those that no other machine has to its peer, and writes in the
    background. flat: the arrays by slash path. record: only that of process 0 is kept. Raises OSError if the previous
    save could not be written."""
    self.wait()
    held, alone = {}, []
    for name, x in flat.items():
      holders = collections.defaultdict(set)
      for device, index in x.sharding.devices_indices_map(x.shape).items():
        holders[Piece.at(name, index, x.shape)].add(device.process_index)
      for shard in x.addressable_shards:
        piece = Piece.at(name, shard.index, x.shape)
        if piece not in held:
          held[piece] = _bytes(np.array(shard.data))  # a copy, since the next step takes the memory of the array
          alone += [piece] if self._sends(holders[piece]) else []
    record = distributed.gather(record if distributed.is_first() else None)[0]  # the metrics are process 0's alone
    header = {"leaves": {name: [str(x.dtype), x.shape] for name, x in flat.items()}, "record": record}
    parts = {str(distributed.index()): ([*held], [*held.values()])}
    if distributed.count() > 1:
      parts[f"{distributed.index()}.peer"] = _exchange(alone, [held[piece] for piece in alone], self._shift)
    folder = self.folder / f"{step}-{self.attempt}"
    self._writing = folder.name, self._pool.submit(_write, folder, parts, header)

  def wait(self) -> None:
    """Waits until the last save is on disk, then removes earlier ones. Raises OSError if the save failed."""
    if self._writing is not None:
      (name, written), self._writing = self._writing, None
      fix = "make room there for two checkpoints at a time, or name another local_checkpoint_directory"
      together(written.result, f"local checkpoint {self.folder / name} could not be written", fix)
      self.keep(name)  # only now: until all have written it, the one before is needed

  def drop(self, step: int) -> None:
    """Removes the local checkpoints up to a step that has a durable checkpoint."""
    self.wait()
    for name in self.names():
      if step_of(name) <= step:
        shutil.rmtree(self.folder / name, ignore_errors=True)  # another process of this machine may remove it too
    with contextlib.suppress(OSError):  # it holds others, or another process of this machine has removed it
      self.folder.rmdir()

  def keep(self, kept: str) -> None:
    """Removes all local checkpoints but `kept`: they are older, or of steps that the run repeats."""
    for name in self.names():
      if name != kept:
        shutil.rmtree(self.folder / name, ignore_errors=True)

  def usable(self) -> list[str]:
    """Names of the checkpoints of which the processes have all pieces between them, oldest first."""
    headers, names = {}, self.names()
    if others := ", ".join(sorted({path.name for path in self.folder.glob("[0-9]*-*")} - {*names})):
      self._say(f"maxghost: local checkpoints {others} in {self.folder} are left out: another copy of the run has them")
    for name in names:
      self._places[name] = {}
      for path in sorted((self.folder / name).glob("*.json")):
        if header := self._read_header(path):
          headers[name] = header
          self._places[name] |= _places(path, header)
    said = distributed.gather({name: [*places] for name, places in self._places.items()})
    names = sorted({name for one in said for name in one}, key=step_of)
    self._of_all = {name: [{_piece(*piece) for piece in one.get(name, ())} for one in said] for name in names}
    first = {name: min((i for i, pieces in enumerate(self._of_all[name]) if pieces), default=-1) for name in names}
    own = {name: header for name, header in headers.items() if first[name] == distributed.index()}
    self._headers = {name: header for one in distributed.gather(own) for name, header in one.items()}
    return [name for name in names if name in self._headers and self._is_current(name) and self._is_whole(name)]

  def leaves(self, name: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {leaf: jax.ShapeDtypeStruct(shape, dtype) for leaf, (dtype, shape) in self._headers[name]["leaves"].items()}

  def record(self, name: str) -> dict[str, Any]:
    """The record that `save` was given."""
    return self._headers[name]["record"]

  def restore(self, name: str, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays of a usable checkpoint, placed as `wanted` asks. Bytes in no file of this machine come through the
    shared folder. If one process fails, no other waits for it."""
    pieces, places = collections.defaultdict(set), dict(self._places.get(name, {}))
    for piece in set[Piece]().union(*self._of_all[name]):
      pieces[piece.name].add(piece)
    lacking = set()
    for leaf, x in wanted.items():
      own = {Piece.at(leaf, at, x.shape) for at in x.sharding.addressable_devices_indices_map(x.shape).values()}
      lacking |= {piece for piece in pieces[leaf] - places.keys() if any(map(piece.overlap, own))}
    asked = {_piece(*piece) for one in distributed.gather(sorted(lacking)) for piece in one}
    lenders = {piece: next(i for i, held in enumerate(self._of_all[name]) if piece in held) for piece in sorted(asked)}
    shared = self._shared / f"{LENT}{self.attempt}-{name}"
    if asked:
      lend = functools.partial(self._lend, shared, name, lenders, places)
      together(lend, f"{shared}, through which processes read pieces of each other, could not be written")
    try:
      for lender in sorted(set(lenders.values())):  # by name: network file systems list new files late
        path = shared / f"{lender}.json"
        places = _places(path, json.loads(path.read_text())) | places
      return {leaf: _array(leaf, x, pieces[leaf], places) for leaf, x in wanted.items()}
    finally:
      distributed.gather(None)
      if asked and distributed.is_first():
        shutil.rmtree(shared, ignore_errors=True)

  def close(self) -> None:
    self._pool.shutdown()

  def _sends(self, holders: set[int]) -> bool:
    """Whether this process sends a piece to its peer: all holders are on one machine, and this is the first of them."""
    return len({self._machines[process] for process in holders}) == 1 and min(holders) == distributed.index()

  def _lend(self, shared: Path, name: str, lenders: Mapping[Piece, int], places: Mapping[Piece, Place]) -> None:
    """Writes those pieces that other processes asked for and this process lends."""
    lent = [piece for piece, lender in lenders.items() if lender == distributed.index()]
    leaves = self._headers[name]["leaves"]
    if lent:
      blobs = (_bytes(_stored(piece, places[piece], leaves[piece.name][0])) for piece in lent)
      _write(shared, {str(distributed.index()): (lent, blobs)}, {"leaves": leaves})

  def names(self) -> list[str]:
    """Names of the run's checkpoints of which this machine has a part. A copy of the run has attempts of its own."""
    return [path.name for path in self.folder.glob("[0-9]*-*") if path.name.partition("-")[2] in dict(self._attempts)]

  def newest(self) -> int:
    """The step of the newest checkpoint that a process of this machine has written completely; -1 for none."""
    return max((step_of(name) for name in self.names() if any((self.folder / name).glob("*.json"))), default=-1)

  def _is_current(self, name: str) -> bool:
    """Whether no later attempt continued from an earlier step, and so wrote records and scores anew."""
    step, words = step_of(name), [word for word, _ in self._attempts]
    gone_on = min(begun for _, begun in self._attempts[words.index(name.partition("-")[2]) + 1 :] or [("", step)])
    if gone_on < step:
      self._say(f"maxghost: local checkpoint {self.folder / name} is left out: the run went on from step {gone_on}")
    return gone_on >= step

  def _is_whole(self, name: str) -> bool:
    found = collections.Counter()
    for piece in set[Piece]().union(*self._of_all[name]):
      found[piece.name] += math.prod(piece.shape)
    lacking = [leaf for leaf, (_, shape) in self._headers[name]["leaves"].items() if found[leaf] != math.prod(shape)]
    if lacking:
      said = f"parts of {len(lacking)} of its arrays are on none of the machines (such as {lacking[0]})"
      self._say(f"maxghost: local checkpoint {self.folder / name} cannot be used: {said}")
    return not lacking

  def _read_header(self, path: Path) -> dict | None:
    try:
      header = check_seal(json.loads(path.read_text()))
      if (size := path.with_suffix(".bin").stat().st_size) != header["bytes"]:
        raise ValueError(f"{path.with_suffix('.bin').name} has {size:,} bytes, not {header['bytes']:,}")
      return header
    except (OSError, ValueError) as error:
      self._say(f"maxghost: local checkpoint {path} is left out: {error}")
      return None


def together(work: Callable[[], Any], said: str, fix: str = "") -> None:
  """Runs `work` in every process. If it fails in one, raises OSError in all of them: `said`, the process, the reason
  and the `fix`."""
  reason = ""
  try:
    work()
  except OSError as error:
    reason = error.strerror or str(error)
  except Exception as error:  # of any kind: the other processes must not wait for this one
    reason = f"{type(error).__name__}: {error}"
  reasons = distributed.gather(reason)
  if found := next((f"process {number}: {reason}" for number, reason in enumerate(reasons) if reason), ""):
    raise OSError(f"{said} ({found}){fix and f'; {fix}'}")


def machines() -> list[int]:
  """The number of the machine of each process. If all are on one machine, each counts as a machine of its own."""
  said = distributed.gather(BOOT.read_text().strip() if BOOT.exists() else platform.node())
  return list(map(said.index, said)) if len(set(said)) > 1 else list(range(len(said)))


def peer_shift(machines: Sequence[int]) -> int:
  """The number to add to a process for its peer, such that no process has its peer on its own machine. Of these, the
  number nearest to half of all processes; 0 if there is none."""
  count = len(machines)
  nearest_first = sorted(range(1, count), key=lambda shift: abs(shift - count // 2))
  return next((n for n in nearest_first if all(machines[i] != machines[i - n] for i in range(count))), 0)


def _exchange(pieces: Sequence[Piece], blobs: Sequence[np.ndarray], shift: int) -> tuple[list[Piece], list[np.ndarray]]:
  """Sends pieces to the process `shift` after this one; returns those of the one `shift` before, and their bytes."""
  said = distributed.gather([[*pieces], sum(map(len, blobs))])
  (received, left), most = said[(distributed.index() - shift) % len(said)], max(size for _, size in said)
  size, chunks = min(CHUNK, -(-most // 4) * 4), []
  if most:
    send, flow = _sender(size // 4, shift), _chunks(blobs, size)
    chunks = [send(next(flow)) for _ in range(-(-most // size))]
  parts = [chunk[: max(left - size * number, 0)] for number, chunk in enumerate(chunks)]
  return [_piece(*piece) for piece in received], parts


@functools.lru_cache(1)
def _sender(num_words: int, shift: int) -> Callable[[np.ndarray], np.ndarray]:
  """A function that sends bytes to the process `shift` after this one and returns the bytes received."""
  count, first = distributed.count(), {}
  for device in jax.devices():
    first.setdefault(device.process_index, device)
  mesh = jax.sharding.Mesh(np.array([first[process] for process in range(count)]), ("process",))
  rows = NamedSharding(mesh, PartitionSpec("process"))
  pairs = [(process, (process + shift) % count) for process in range(count)]
  permute = functools.partial(lax.ppermute, axis_name="process", perm=pairs)
  program = jax.shard_map(permute, mesh=mesh, in_specs=rows.spec, out_specs=rows.spec)
  shape = jax.ShapeDtypeStruct((count, num_words), np.uint32, sharding=rows)
  compiled = jax.jit(program).lower(shape).compile()
  distributed.gather(None)  # devices do not wait long for those of another process

  def send(chunk: np.ndarray) -> np.ndarray:
    sent = jax.make_array_from_process_local_data(rows, chunk.view(np.uint32)[None], shape.shape)
    return np.asarray(compiled(sent).addressable_data(0)).reshape(-1).view(np.uint8)

  return send


def _chunks(blobs: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
  """The bytes of all blobs, `size` at a time, then zeros without end."""
  chunk, filled = np.zeros(size, np.uint8), 0
  for blob in blobs:
    while len(blob):
      part, blob = blob[: size - filled], blob[size - filled :]
      chunk[filled : filled + len(part)] = part
      filled += len(part)
      if filled == size:
        yield chunk
        chunk, filled = np.zeros(size, np.uint8), 0
  while True:
    yield chunk
    chunk = np.zeros(size, np.uint8)


def _write(folder: Path, parts: Mapping[str, tuple[Sequence[Piece], Iterable[np.ndarray]]], header: Mapping) -> None:
  """Writes NAME.bin, then NAME.json for each of `parts`, {name: (pieces, their bytes)}."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, (pieces, blobs) in parts.items():
    with write_whole(folder / f"{name}.bin") as file:
      size = sum(file.write(blob.data) for blob in blobs)
    write_text(folder / f"{name}.json", json.dumps(sealed({**header, "pieces": pieces, "bytes": size})))


def _places(path: Path, header: Mapping) -> dict[Piece, Place]:
  """Where each piece lies in its file: one after the other."""
  offset, places = 0, {}
  for piece in (_piece(*piece) for piece in header["pieces"]):
    places[piece] = path.with_suffix(".bin"), offset
    offset += math.prod(piece.shape) * np.dtype(header["leaves"][piece.name][0]).itemsize
  return places


def _stored(piece: Piece, place: Place, dtype: Any) -> np.ndarray:
  num_bytes = math.prod(piece.shape) * np.dtype(dtype).itemsize
  # Not mapped into memory, where a disk that cannot be read would end the process without a message.
  return np.fromfile(place[0], np.uint8, num_bytes, offset=place[1]).view(dtype).reshape(piece.shape)


def _array(leaf: str, x: jax.ShapeDtypeStruct, pieces: Iterable[Piece], places: Mapping[Piece, Place]) -> jax.Array:
  def of_device(index: Any) -> np.ndarray:
    own = Piece.at(leaf, index, x.shape)
    out = np.empty(own.shape, x.dtype)
    for piece in pieces:
      if both := own.overlap(piece):
        out[both[0]] = _stored(piece, places[piece], x.dtype)[both[1]]
    return out

  return jax.make_array_from_callback(x.shape, x.sharding, of_device)


def _bytes(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def _piece(name: str, start: Iterable[int], shape: Iterable[int]) -> Piece:
  return Piece(name, tuple(start), tuple(shape))


def step_of(name: str) -> int:
  return int(name.partition("-")[0])
