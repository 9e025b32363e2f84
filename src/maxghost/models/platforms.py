"""Which kind of device a computation is traced for."""

import contextlib
import contextvars

import jax

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
  """'cpu', 'gpu' or 'tpu'."""
  return _target.get() or jax.default_backend()
