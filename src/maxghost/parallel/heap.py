"""The heap of the GNU C library, from which XLA takes its buffers on the CPU."""

import contextlib
import ctypes

ARENA_MAX = -8  # mallopt's M_ARENA_MAX: how many heaps the threads share that start from here on


def keep() -> None:
  """Freed memory stays with the process. Else the temporaries of each step, one block, would be mapped anew."""
  call("mallopt", -1, 2**31 - 1)  # M_TRIM_THRESHOLD, bytes
  call("mallopt", -4, 0)  # M_MMAP_MAX: blocks with a mapping of their own


def call(function: str, *arguments: int) -> None:
  """Calls a function of the GNU C library; without effect where the process has another C library."""
  with contextlib.suppress(OSError, AttributeError):
    getattr(ctypes.CDLL(None), function)(*arguments)
