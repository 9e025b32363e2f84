"""maxghost: train language models and score every training example."""

import importlib
import os
import signal
import sys
import threading

__version__ = "0.2.0"

if sys.platform == "win32":
  raise ImportError("maxghost runs on Linux and macOS; on Windows, install it in WSL (`wsl --install`)")


def import_module(name: str):
  """Imports a module; Ctrl-C ends the process at once, as libraries in C lose or replace a KeyboardInterrupt."""
  usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
  if usual and (usual := threading.current_thread() is threading.main_thread()):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    return importlib.import_module(name)
  finally:
    if usual:
      signal.signal(signal.SIGINT, signal.default_int_handler)


def left_with(code: int) -> int:
  """The exit code of a command; 130 (Ctrl-C) and a server end the process at once: threads would crash or keep it."""
  signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C would be a traceback of Python's own end
  trains = "train" in sys.argv[1:2] or sys.argv[0].endswith("/train.py")  # which ends between two steps
  serves = "serve" in sys.argv[1:2] or sys.argv[0].endswith("/serve.py")  # and may still look for sources of an answer
  if (code == 130 or serves) and "jax" in sys.modules and not trains:
    sys.stdout.flush()
    os._exit(code)
  return code
