"""Records in an abstract trace which methods of which probed layers a loss calls."""

import contextlib
import contextvars
import dataclasses
from typing import Any

_recorder: contextvars.ContextVar[list | None] = contextvars.ContextVar("ghost_usage", default=None)


@dataclasses.dataclass(frozen=True)
class Use:
  """One call of a probed layer. layer: the object; each trace of a scan or remat body has its own."""

  layer: Any
  path: str
  method: str
  argument_shapes: tuple
  shape: tuple
  static: tuple  # arguments that are not arrays
  is_second: bool  # the use of a table after its lookup


@contextlib.contextmanager
def record():
  """Collects a `Use` for every probed call traced inside, in their order."""
  used: list[Use] = []
  token = _recorder.set(used)
  try:
    yield used
  finally:
    _recorder.reset(token)


def note(*use) -> None:
  used = _recorder.get()
  if used is not None:
    used.append(Use(*use))


def called_often(used: list[Use]) -> dict[str, int]:
  """{path: calls} of layers called more than once in a trace, except tables with one lookup and one other use."""
  calls: dict[int, list[Use]] = {}
  for use in used:
    calls.setdefault(id(use.layer), []).append(use)
  return {
    uses[0].path: len(uses)
    for uses in calls.values()
    if len(uses) > 1 and sorted(use.is_second for use in uses) != [False, True]
  }
