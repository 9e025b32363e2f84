"""SIGTERM, SIGHUP and Ctrl-C: finish the running step, save, stop. A second Ctrl-C stops at once."""

import os
import signal
import stat
import threading

from maxghost.parallel import rendezvous

# A handled SIGTERM is a success; other signals give the shell's conventional code, 128 + their number.
EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGHUP: 129}


class StopSignals:
  """While active, the first signal only sets `requested`, which the loop checks between steps.

  A second SIGINT raises KeyboardInterrupt in the main thread; further SIGTERMs are ignored, because schedulers repeat
  them, and so is a SIGHUP that was ignored before (`nohup`). Outside the main thread, where Python cannot install
  handlers, the object does nothing.
  """

  def __init__(self):
    self.requested: signal.Signals | None = None
    self._previous: dict = {}

  def __enter__(self) -> "StopSignals":
    if threading.current_thread() is threading.main_thread():
      for number in EXIT_CODES:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
          self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *exception) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  @property
  def exit_code(self) -> int:
    return 0 if self.requested is None else EXIT_CODES[self.requested]

  @property
  def name(self) -> str:
    if self.requested is None:
      return "another process"
    return "Ctrl-C" if self.requested == signal.SIGINT else self.requested.name

  def _handle(self, number: int, frame) -> None:
    if self.requested is not None:
      if number == signal.SIGINT:
        raise KeyboardInterrupt
      return
    self.requested = signal.Signals(number)
    more = "; Ctrl-C again stops at once, without saving" if number == signal.SIGINT else ""
    if number == signal.SIGHUP:  # the terminal is gone: what is still printed must not fail
      for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
          os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    if rendezvous.waits.is_set():  # nothing is to be saved, and the others may never come
      raise KeyboardInterrupt
    # os.write, not print: a handler may run in the middle of a print of the same stream.
    os.write(2, f"\nmaxghost: {self.name} received, ends the step, saves unless checkpoint_period=0{more}\n".encode())
