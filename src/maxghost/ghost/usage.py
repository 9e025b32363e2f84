"""Which methods of which probed layers a loss really calls: learnt from one abstract trace."""

import contextlib
import contextvars

_recorder: contextvars.ContextVar[dict | None] = contextvars.ContextVar("ghost_usage", default=None)


@contextlib.contextmanager
def record():
  """Collects {(path, method): (shapes of its arrays, shape of its value)} of every probed call traced inside."""
  used: dict[tuple[str, str], tuple] = {}
  token = _recorder.set(used)
  try:
    yield used
  finally:
    _recorder.reset(token)


def note(path: str, method: str, argument_shapes: tuple, shape: tuple) -> None:
  used = _recorder.get()
  if used is not None:
    used[path, method] = (argument_shapes, shape)
