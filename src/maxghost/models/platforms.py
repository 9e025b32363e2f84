"""Which kind of device a computation is traced for."""

import contextlib
import contextvars

from maxghost.parallel import shardings

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("maxghost_target_platform", default=None)


@contextlib.contextmanager
def tracing_for(platform: str):
  """Inside, kernels are chosen for 'cpu', 'gpu' or 'tpu' whatever the default backend is: for compiling ahead of time
  on a machine without the device."""
  token = _target.set(platform)
  try:
    yield
  finally:
    _target.reset(token)


def target() -> str:
  """'cpu', 'gpu' or 'tpu': what is being traced for, by default the devices of the layout in use, or JAX's own."""
  return _target.get() or shardings.platform()
