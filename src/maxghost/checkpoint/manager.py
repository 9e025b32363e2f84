"""Saving and restoring a run: Orbax, in the background, newest good checkpoint first.

A checkpoint `<run>/checkpoints/<step>/` holds the state after <step> completed steps:
  items/      the state as a plain nested dict of arrays, {"model": {...}, "optimizer": {...}}, paths as in the model;
              of a model with adapters, only the adapters
  positions/  JSON: the positions of data, metrics and scores after that step, the config, one checksum per array, the
              versions that wrote it, and a checksum of the JSON itself
A folder is renamed to its step once it is complete, and older ones are removed once it is durable. A checkpoint that
cannot be read, or does not match its checksums, is skipped with a message and renamed to <step>.unusable. One that can
be read but has other leaves than the model is an error, since a weight would keep its initial value unnoticed.
"""

import contextlib
import importlib.metadata
import json
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from maxghost.checkpoint import local as local_files
from maxghost.checkpoint.checksum import checksums
from maxghost.checkpoint.layouts_store import full_path, is_typed_key, key_impl, key_words, misfit, read_json
from maxghost.config import ConfigError
from maxghost.config.files import check_seal, sealed, sync, write_text
from maxghost.config.values import first_line
from maxghost.optimizers import by_label
from maxghost.parallel import distributed

FORMAT_VERSION = 1
SEEN_SECONDS = 60  # until every process sees a file that process 0 has written
WRITE_SECONDS = 3600  # for a checkpoint; an error, or the loss of a process, is noticed at once
_FAILURES = "maxghost/failures"  # in the key-value store
_WAITED = "it waited in vain for another process"
UNUSABLE_SUFFIX = ".unusable"


class CheckpointError(RuntimeError):
  """A checkpoint does not fit the model, or none of the checkpoints can be used."""


class PeerFailure(RuntimeError):
  """Another process could not write its part; the message is its reason."""


class Restored(NamedTuple):
  """tree: the arrays, with the shardings of the abstract tree. positions: those that `save` was given."""

  step: int
  tree: dict
  positions: dict
  path: Path


class _DurablePath(ocp.path.atomicity.AtomicRenameTemporaryPath):
  """The folder of an unfinished checkpoint. Syncs the renamed folder to disk, which Orbax leaves to the system."""

  async def finalize(self):
    await super().finalize()
    final = Path(self.get_final())
    for path in [*final.rglob("*"), final, final.parent]:
      sync(path)


class CheckpointManager:
  """The checkpoints of one run. Each process makes a manager of the same folder and calls it in the same order.

  max_to_keep: older checkpoints are removed in the background; 0 keeps all. local: a folder of each machine for local
  checkpoints; empty: none. say: receives each message for the user.
  """

  def __init__(self, directory: str | Path, *, max_to_keep: int = 2, asynchronous: bool = True, local: str = "",
               say: Callable = print):  # fmt: skip
    self._directory, self._say = full_path(directory), say
    self._attempts_path = self._directory / ".local"  # the run's word, and [word, step before] of its attempts
    # Orbax logs every phase of a save, and an error in each of its threads; this class reports what matters.
    for name in ("absl", "asyncio"):
      logging.getLogger(name).setLevel(logging.CRITICAL)
    self._saving: int | None = None  # the step being written
    self._has_failed = False
    self.only_local = False  # whether the newest checkpoint is a local one, and no durable one is of its step
    self._frozen: dict[str, int] = {}  # checksums of arrays that no step changes
    if distributed.is_first():
      for path in sorted(self._directory.glob("*.orbax-checkpoint-tmp*")):
        self._say(f"maxghost: checkpoint {path} was only half written and is removed")
        shutil.rmtree(path, ignore_errors=True)
    self._check_shared()  # the other processes read the folder afterwards
    # A folder that cannot be created raises at once in the foreground, but after five minutes in the background.
    writing = {"timeout_secs": WRITE_SECONDS, "create_directories_asynchronously": False}
    options = ocp.CheckpointManagerOptions(
      max_to_keep=max_to_keep or None, enable_async_checkpointing=asynchronous, temporary_path_class=_DurablePath,
      async_options=ocp.AsyncOptions(**writing, barrier_sync_fn=_barrier if distributed.count() > 1 else None),
    )  # fmt: skip
    # With handlers given here, `item_metadata` works before anything has been saved or restored.
    handlers = {"items": ocp.StandardCheckpointHandler(), "positions": ocp.JsonCheckpointHandler()}
    self._manager = ocp.CheckpointManager(self._directory, item_handlers=handlers, options=options)
    self._local = self._open_local(Path(local)) if local else None

  def steps(self) -> list[int]:
    """Completed steps of the complete checkpoints, oldest first."""
    return sorted(step for step in self._manager.all_steps() if self.path(step).is_dir())

  def path(self, step: int) -> Path:
    return self._directory / str(step)

  def newest(self) -> str:
    """Names of the newest durable and local checkpoints that this process sees, for a message; empty for none."""
    steps = self.steps()
    told = [str(self.path(steps[-1]))] if steps else []
    local = self._local.newest() if self._local else -1
    if local > max(steps, default=-1):
      told.append(f"the local one of step {local}")
    return ", ".join(told)

  def save(self, step: int, tree: Mapping, positions: Mapping[str, Any], frozen: Mapping | None = None,
           local: bool = False) -> None:  # fmt: skip
    """Copies the arrays and writes them in the background; `tree` may be donated as soon as this returns.

    frozen: arrays that never change, of which only the checksums are written (`check_frozen`). local: writes a local
    checkpoint, also while a durable one is being written. Waits for the previous save of the same kind first. Raises
    CheckpointError (OSError for a local checkpoint) if the previous save or this one failed.
    """
    if not local:
      self.wait()
    elif self._saving is not None:
      self._guard(lambda: None)  # raises an error of the durable save so far
    tree = _with_raw_keys(tree)
    if frozen and not self._frozen:
      self._frozen = _checksums(frozen)
    content = {**positions, **({"frozen": self._frozen} if frozen else {}), "format": FORMAT_VERSION}
    record = sealed(content | {"checksums": _checksums(tree), "made_with": made_with()})
    if local:
      assert self._local is not None, "a manager without a local folder was asked for a local checkpoint"
      self._local.save(step, by_label(tree), record)
      return
    self._saving, self.only_local = step, False
    items = ocp.args.Composite(items=ocp.args.StandardSave(tree), positions=ocp.args.JsonSave(record))
    if distributed.count() > 1:  # a process that cannot write would leave the others waiting inside a save
      self._guard(lambda: _try_to_write(self._directory))
    self._guard(lambda: self._manager.save(step, args=items, force=True))

  def wait(self) -> None:
    """Waits until the last save is on disk. Raises CheckpointError if it failed."""
    if self._saving is not None:
      self._guard(self._manager.wait_until_finished)
      if self._local:
        self._local.drop(self._saving)
      self._saving = None

  def close(self) -> None:
    """Ends the background work. Raises CheckpointError if a save of this process failed, unless raised before."""
    with contextlib.suppress(CheckpointError) if self._has_failed else contextlib.nullcontext():
      self._guard(self._manager.close, alone=True)
    if self._local:
      self._local.close()

  def restore_latest(self, abstract_tree: Mapping) -> Restored | None:
    """The newest checkpoint that can be used, or None if there are no checkpoints.

    abstract_tree: ShapeDtypeStructs with the shardings of the arrays. Raises CheckpointError if a readable checkpoint
    has missing, extra or unlike leaves, or if checkpoints exist and none can be used.
    """
    unusable, wanted = [], _with_raw_keys(abstract_tree)
    found = [(step, "") for step in self.steps()]
    if self._local:
      found += [(local_files.step_of(name), name) for name in self._local.usable()]
    for step, name in sorted(found, reverse=True):  # at the same step, the local one first: it is faster
      reason, restored = "", None
      path = self._local.folder / name if self._local and name else self.path(step)
      try:
        restored = self._read(step, name, wanted)
      except Exception as error:  # Orbax and TensorStore raise many types for a damaged file
        if isinstance(error, CheckpointError) or "RESOURCE_EXHAUSTED" in str(error):
          raise
        reason = f"{type(error).__name__}: {first_line(error)}"
      reason = next(filter(None, distributed.gather(reason)), "")  # all use what all can read
      # Checksums are computed by all processes together, so only after each has read its part.
      if restored is None or reason or (reason := _changed(restored)):
        unusable += [] if name else [step]
        self._say(f"maxghost: checkpoint {path} cannot be used ({reason}); trying the one before")
        continue
      self._set_aside(unusable)
      self._begin(step, name)
      self.only_local = bool(name) and (step, "") not in found
      then, now = restored.positions.get("made_with", {}), made_with()
      if other := [f"{name} {then[name]}, now {x}" for name, x in now.items() if then.get(name, x) != x]:
        but = "the run goes on, but its numbers may differ in the last bits from those of a run without a change"
        self._say(f"maxghost: note: checkpoint {path} was made with {'; '.join(other)}: {but}")
      return restored._replace(tree=jax.tree.map(_typed, restored.tree, abstract_tree))
    if unusable:
      steps = ", ".join(map(str, sorted(unusable)))
      way = "put a good one there, or remove them all to start again at step 0"
      raise CheckpointError(f"none of the checkpoints in {self._directory} can be used: {steps}; {way}")
    self._begin(0, "")
    return None

  def _begin(self, step: int, local: str) -> None:
    """Records that this attempt continues after `step`. Later local checkpoints of earlier attempts are not used any
    more, not even those of machines that are absent now."""
    if distributed.is_first() and self._attempts_path.exists():
      found = self._attempts()
      found["attempts"].append([self._local.attempt if self._local else "", step])
      write_text(self._attempts_path, json.dumps(sealed(found)))
    if self._local:
      self._local.keep(local)

  def _attempts(self) -> dict[str, Any]:
    """The run's word and its attempts. Raises ConfigError where their file was changed."""
    try:
      found = read_json(self._attempts_path)
      return {"run": str(found["run"]), "attempts": [[str(word), int(step)] for word, step in found["attempts"]]}
    except (KeyError, TypeError, ValueError) as error:
      raise ConfigError(f"{self._attempts_path} is damaged or half copied: {error!r}") from error

  def check_frozen(self, restored: Restored, frozen: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raises CheckpointError if the arrays, read from `origins`, are not those that `save` was given as frozen."""
    found, saved = _checksums(frozen), restored.positions.get("frozen", {})
    if changed := [name for name in found.keys() | saved.keys() if found.get(name) != saved.get(name)]:
      origin = origins[min(changed).partition("/")[0]] or "init_weights_seed"
      said = f"{origin} gives other frozen arrays than the run in {self._directory} began with"
      fix = "put them back, or start a new run_name"
      raise CheckpointError(f"{said} ({len(changed)} arrays differ, such as {min(changed)}); {fix}")

  def _read(self, step: int, name: str, wanted: Mapping) -> Restored:
    """Reads a checkpoint without checking its arrays' checksums. name: of a local one; empty: the durable one."""
    path, flat, local = self.path(step), by_label(wanted), self._local if name else None
    if local is not None:
      path, positions = local.folder / name, local.record(name)
    else:
      positions = self._manager.restore(step, args=ocp.args.Composite(positions=ocp.args.JsonRestore()))["positions"]
    positions = check_seal(positions)
    if positions.get("format", 0) > FORMAT_VERSION:
      reads = f"this maxghost reads up to {FORMAT_VERSION}; update maxghost"
      raise CheckpointError(f"checkpoint {path} has format {positions['format']}, {reads}")
    if local is not None:
      _check_leaves(path, local.leaves(name), flat)
      tree = jax.tree.unflatten(jax.tree.structure(wanted), local.restore(name, flat).values())
    else:
      _check_leaves(path, by_label(self._manager.item_metadata(step)["items"].tree), flat)
      tree = self._manager.restore(step, args=ocp.args.Composite(items=ocp.args.StandardRestore(wanted)))["items"]
    return Restored(step, tree, positions, path)

  def _guard(self, work: Callable[[], Any], alone: bool = False) -> None:
    """Runs a part of a save in every process, or `alone`. Raises CheckpointError in all processes if one fails."""
    reason = ""
    try:
      work()
      self._manager.check_for_errors()
    except PeerFailure:
      pass  # the failed process gives the reason below
    except Exception as error:
      if distributed.is_lost_peer(error):
        raise
      reason = _reason(error)
      if distributed.count() > 1:  # ends the others' waiting in `_barrier`
        distributed.store().key_value_set(f"{_FAILURES}/{distributed.index()}", reason, allow_overwrite=True)
    found = [reason] if alone else distributed.gather(reason)
    if any(found):
      self._has_failed = True
      process = min((reason == _WAITED, number) for number, reason in enumerate(found) if reason)[1]
      where = f" by process {process}" if len(found) > 1 else ""
      raise CheckpointError(f"checkpoint {self.path(self._saving or 0)} could not be written{where} ({found[process]})")

  def _check_shared(self) -> None:
    """Raises ConfigError in every process if any of them does not see what process 0 writes."""
    if distributed.count() == 1:
      return
    path, name = self._directory / ".shared", secrets.token_hex(8)
    if distributed.is_first():
      self._directory.mkdir(parents=True, exist_ok=True)
      write_text(path, name)
    sees = distributed.gather(_sees(path, distributed.gather(name)[0]))
    if distributed.is_first():
      path.unlink()
    if not all(sees):
      blind = f"process {sees.index(False)} does not see what process 0 writes to {self._directory}"
      raise ConfigError(f"base_output_directory: {blind}; name a folder of a file system that all processes share")

  def _open_local(self, folder: Path) -> local_files.LocalCheckpoints:
    """Raises ConfigError in every process if any of them cannot write to `folder`."""
    words = []
    if distributed.is_first():  # a random word tells the run from an earlier one of its name
      for lent in self._directory.glob(f"{local_files.LENT}*"):
        shutil.rmtree(lent, ignore_errors=True)
      if not self._attempts_path.exists():
        write_text(self._attempts_path, json.dumps(sealed({"run": secrets.token_hex(4), "attempts": []})))
      found = self._attempts()
      words = [found["run"], secrets.token_hex(4), found["attempts"]]
    run, attempt, attempts = distributed.gather(words)[0]
    own = full_path(folder) / f"{self._directory.parent.name}-{run}"
    try:
      local_files.together(lambda: _try_to_write(own), f"local_checkpoint_directory={folder} cannot be written")
    except OSError as error:
      raise ConfigError(f"{error}; name a folder on a disk of each machine, or in its memory (/dev/shm)") from error
    return local_files.LocalCheckpoints(own, self._directory, attempt, attempts, self._say)

  def _set_aside(self, steps: list[int]) -> None:
    """Renames unusable checkpoints, so that the run can save at their steps again and they can be examined."""
    for step in steps:
      target = self._directory / f"{step}{UNUSABLE_SUFFIX}"
      if distributed.is_first():
        shutil.rmtree(target, ignore_errors=True)
        self.path(step).rename(target)
      self._say(f"maxghost: checkpoint {self.path(step)} is now called {target.name}")
    if steps:
      distributed.gather(None)
    self._manager.reload()


def _try_to_write(folder: Path) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f".writable_{distributed.index()}"
  write_text(path, "1")
  path.unlink()


def _sees(path: Path, text: str) -> bool:
  """Whether a file holds this text; waits, because network file systems remember for a while that it was missing."""
  end = time.monotonic() + SEEN_SECONDS
  while True:
    with contextlib.suppress(OSError):
      if path.read_text() == text:
        return True
    if time.monotonic() > end:
      return False
    time.sleep(0.2)


def _reason(error: Exception) -> str:
  if isinstance(error, TimeoutError):
    hangs = f"it was not written in {WRITE_SECONDS:,} s: the storage hangs, or is too slow for this model"
    return _WAITED if "barrier" in str(error) else hangs
  return f"{type(error).__name__}: {first_line(error)}"


def _barrier(*, key: str, timeout_ms: int) -> None:
  """Waits until every process has called this with `key`. Raises PeerFailure as soon as one could not write."""
  store, end = distributed.store(), time.monotonic() + timeout_ms / 1000
  if store.key_value_increment(key, 1) == distributed.count():
    store.key_value_set(f"{key}/all", "")
  while True:
    try:
      store.blocking_key_value_get(f"{key}/all", 1000)
      return
    except jax.errors.JaxRuntimeError as error:
      if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > end:
        raise
    if failures := store.key_value_dir_get(_FAILURES):
      raise PeerFailure(failures[0][1])


def made_with() -> dict[str, str]:
  """Versions and the kind of device, on which the bits of a run depend besides its configuration."""
  versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
  device = jax.devices()[0]
  return versions | {"device": f"{device.device_kind} ({device.platform})"}


def _check_leaves(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
  """Raises CheckpointError that names leaves which are missing, extra, or of another shape or dtype."""
  both = {name: (stored[name], wanted[name]) for name in sorted(wanted.keys() & stored.keys())}
  kinds = {name: [f"{leaf.dtype}{list(leaf.shape)}" for leaf in pair] for name, pair in both.items()}
  unlike = [f"{name} is {have} there and {want} in the model" for name, (have, want) in kinds.items() if have != want]
  missing, extra = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
  if text := misfit(path, sorted(missing), sorted(extra), unlike):
    raise CheckpointError(text)


def _changed(restored: Restored) -> str:
  """A text that names an array whose checksum has changed since the checkpoint was saved; '' for none."""
  saved = restored.positions.get("checksums", {})
  changed = (name for name, found in _checksums(restored.tree).items() if saved.get(name) != found)
  return next((f"the bytes of {name} changed since they were saved" for name in changed), "")


def _checksums(tree: Any) -> dict[str, int]:
  flat = by_label(tree)
  return dict(zip(flat, checksums(list(flat.values())), strict=True))


def _with_raw_keys(tree: Any) -> Any:
  """Typed random keys become their uint32 words (Orbax stores numbers); abstract keys likewise."""
  return jax.tree.map(lambda leaf: key_words(leaf) if is_typed_key(leaf) else leaf, tree)


def _typed(leaf: jax.Array, like: Any) -> jax.Array:
  """The reverse for one leaf, as `like` is typed."""
  return jax.random.wrap_key_data(leaf, impl=key_impl(like)) if is_typed_key(like) else leaf
