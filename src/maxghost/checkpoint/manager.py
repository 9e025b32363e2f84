"""Saving and restoring a run: Orbax, in the background, newest good checkpoint first.

A checkpoint `<run>/checkpoints/<step>/` holds the state after <step> completed steps:
  items/      the state as a plain nested dict of arrays, {"model": {...}, "optimizer": {...}}, paths as in the model
  positions/  JSON: where data, metrics and scores stood after that step, the config, one checksum per array, and the
              versions that wrote it
A folder gets its name when all of it is on disk. A checkpoint that cannot be read, or does not match its checksums, is
skipped with a message and renamed to <step>.unusable. One that can be read but has other leaves than the model is an
error: a weight never keeps its initial value without notice.
"""

import importlib.metadata
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from maxghost.checkpoint.checksum import checksums
from maxghost.checkpoint.layouts_store import full_path, is_typed_key, key_impl, key_words, misfit
from maxghost.parallel import distributed

FORMAT_VERSION = 1
UNUSABLE_SUFFIX = ".unusable"


class CheckpointError(RuntimeError):
  """A checkpoint does not fit the model, or none of the checkpoints can be used."""


class Restored(NamedTuple):
  """`tree`: the arrays, laid out as the abstract tree asked; `positions`: what `save` was given."""

  step: int
  tree: dict
  positions: dict


class CheckpointManager:
  """The checkpoints of one run.

  Each process makes a manager of the same folder and calls it in the same order; each writes and reads its part of the
  arrays. max_to_keep: older checkpoints are removed in the background; 0 keeps all. say: receives each message
  for the user.
  """

  def __init__(
    self, directory: str | Path, *, max_to_keep: int = 2, asynchronous: bool = True, say: Callable[[str], None] = print
  ):
    self._directory, self._say = full_path(directory), say
    # Orbax reports every phase of a save as a warning or info; what matters to the user is said here.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if distributed.is_first():
      self._remove_half_written()
    distributed.gather(None)  # the others look at the folder afterwards
    options = ocp.CheckpointManagerOptions(
      max_to_keep=max_to_keep or None,
      enable_async_checkpointing=asynchronous,
      # Made in the foreground, a folder that cannot be made raises at once; in the background it takes five minutes.
      async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    # Named here, so that what lies in a checkpoint is known before anything has been saved or restored.
    handlers = {"items": ocp.StandardCheckpointHandler(), "positions": ocp.JsonCheckpointHandler()}
    self._manager = ocp.CheckpointManager(self._directory, item_handlers=handlers, options=options)

  def steps(self) -> list[int]:
    """Completed steps of the checkpoints that lie there whole, oldest first."""
    return sorted(self._manager.all_steps())

  def path(self, step: int) -> Path:
    return self._directory / str(step)

  def save(self, step: int, tree: Mapping, positions: Mapping[str, Any]) -> None:
    """Copies the arrays and writes them in the background; `tree` may be donated as soon as this returns.

    Waits for an earlier save first. Raises CheckpointError where that one, or this one, could not be written.
    """
    tree = _with_raw_keys(tree)
    record = {**positions, "format": FORMAT_VERSION, "checksums": _checksums(tree), "made_with": made_with()}
    items = ocp.args.Composite(items=ocp.args.StandardSave(tree), positions=ocp.args.JsonSave(record))
    self._guard(f"checkpoint {self.path(step)}", lambda: self._manager.save(step, args=items, force=True))

  def wait(self) -> None:
    """Waits until all saves are on disk. Raises CheckpointError where one failed."""
    self._guard(f"a checkpoint in {self._directory}", self._manager.wait_until_finished)

  def close(self) -> None:
    self._manager.close()

  def restore_latest(self, abstract_tree: Mapping) -> Restored | None:
    """The newest checkpoint that can be used, or None where there are none.

    abstract_tree: ShapeDtypeStructs (with shardings) where the arrays shall be. Raises CheckpointError where a
    readable checkpoint has missing, extra or unlike leaves, or where checkpoints exist and none can be used.
    """
    unusable = []
    for step in reversed(self.steps()):
      reason, restored = "", None
      try:
        restored = self._restore(step, abstract_tree)
      except CheckpointError:
        raise
      except Exception as error:  # Orbax and TensorStore raise what they like for a damaged file
        if "RESOURCE_EXHAUSTED" in str(error):
          raise
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
      if reason := next(filter(None, distributed.gather(reason)), ""):  # what one process cannot read, none uses
        unusable.append(step)
        self._say(f"maxghost: checkpoint {self.path(step)} cannot be used ({reason}); trying the one before")
        continue
      assert restored is not None, "without a reason against it, it was read"
      self._set_aside(unusable)
      self._say_what_changed(restored)
      return restored._replace(tree=_with_typed_keys(restored.tree, abstract_tree))
    if unusable:
      raise CheckpointError(
        f"none of the checkpoints in {self._directory} can be used: {', '.join(map(str, sorted(unusable)))}; "
        "put a good one there, or remove them all to start again at step 0"
      )
    return None

  def _restore(self, step: int, abstract_tree: Mapping) -> Restored:
    wanted = _with_raw_keys(abstract_tree)
    positions = self._manager.restore(step, args=ocp.args.Composite(positions=ocp.args.JsonRestore()))["positions"]
    if positions.get("format", 0) > FORMAT_VERSION:
      raise CheckpointError(
        f"checkpoint {self.path(step)} has format {positions['format']}, this maxghost reads up to {FORMAT_VERSION}; "
        "update maxghost"
      )
    stored = _flatten(self._manager.item_metadata(step)["items"].tree)
    _check_leaves(self.path(step), stored, _flatten(wanted))
    tree = self._manager.restore(step, args=ocp.args.Composite(items=ocp.args.StandardRestore(wanted)))["items"]
    for name, found in _checksums(tree).items():
      if positions["checksums"].get(name) != found:
        raise ValueError(f"the bytes of {name} changed since they were saved")
    return Restored(step, tree, positions)

  def _say_what_changed(self, restored: Restored) -> None:
    """Says which versions are others than those that wrote the checkpoint, where it has a record of them."""
    then, now = restored.positions.get("made_with", {}), made_with()
    if other := [f"{name} {then[name]}, now {value}" for name, value in now.items() if then.get(name, value) != value]:
      self._say(
        f"maxghost: note: checkpoint {self.path(restored.step)} was made with {'; '.join(other)}: the run goes on, but "
        "its numbers may differ in the last bits from those of a run without a change"
      )

  def _guard(self, which: str, work: Callable[[], Any]) -> None:
    try:
      work()
      self._manager.check_for_errors()
    except Exception as error:
      raise CheckpointError(f"{which} could not be written ({type(error).__name__}: {error})") from error

  def _remove_half_written(self) -> None:
    for path in sorted(self._directory.glob("*.orbax-checkpoint-tmp*")):
      self._say(f"maxghost: checkpoint {path} was only half written and is removed")
      shutil.rmtree(path, ignore_errors=True)

  def _set_aside(self, steps: list[int]) -> None:
    """Renames unusable checkpoints, so that the run can save at their steps again and someone can look at them."""
    for step in steps:
      target = self._directory / f"{step}{UNUSABLE_SUFFIX}"
      if distributed.is_first():
        shutil.rmtree(target, ignore_errors=True)
        self.path(step).rename(target)
      self._say(f"maxghost: checkpoint {self.path(step)} is now called {target.name}")
    if steps:
      distributed.gather(None)
    self._manager.reload()


def made_with() -> dict[str, str]:
  """What the bits of a run depend on besides its configuration: versions, and the kind of device."""
  versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
  device = jax.devices()[0]
  return versions | {"device": f"{device.device_kind} ({device.platform})"}


def _check_leaves(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
  """Raises CheckpointError that names leaves which are missing, extra, or of another shape or dtype.

  stored, wanted: leaf path -> anything with `shape` and `dtype`.
  """
  unlike = []
  for name in sorted(wanted.keys() & stored.keys()):
    have, want = stored[name], wanted[name]
    if tuple(have.shape) != tuple(want.shape) or have.dtype != want.dtype:
      unlike.append(f"{name} is {have.dtype}{list(have.shape)} there and {want.dtype}{list(want.shape)} in the model")
  missing, extra = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
  if text := misfit(path, sorted(missing), sorted(extra), unlike):
    raise CheckpointError(text)


def _flatten(tree: Any) -> dict[str, Any]:
  """Leaves by slash path, in a fixed order; integer keys count as text."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _checksums(tree: Any) -> dict[str, int]:
  flat = _flatten(tree)
  return dict(zip(flat, checksums(list(flat.values())), strict=True))


def _with_raw_keys(tree: Any) -> Any:
  """Typed random keys become their uint32 words (Orbax stores numbers); abstract keys likewise."""
  return jax.tree.map(lambda leaf: key_words(leaf) if is_typed_key(leaf) else leaf, tree)


def _with_typed_keys(tree: Any, like: Any) -> Any:
  """Words become typed keys again where `like` has one."""

  def typed(leaf, model):
    return jax.random.wrap_key_data(leaf, impl=key_impl(model)) if is_typed_key(model) else leaf

  return jax.tree.map(typed, tree, like)
