"""The kind of device that a computation is traced for."""

import contextlib
import contextvars

from maxghost.parallel import shardings

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("maxghost_target_platform", default=None)


@contextlib.contextmanager
def tracing_for(platform: str):
  """Chooses kernels for 'cpu', 'gpu' or 'tpu', to compile ahead of time on a machine without the device."""
  token = _target.set(platform)
  try:
    yield
  finally:
    _target.reset(token)


def target() -> str:
  """'cpu', 'gpu' or 'tpu': the platform traced for, by default that of the layout in use, or JAX's default."""
  return _target.get() or shardings.platform()
