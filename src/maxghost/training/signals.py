"""SIGTERM, SIGHUP and Ctrl-C: finish the running step, save, stop. A second Ctrl-C stops at once."""

import os
import signal
import stat
import threading
import time

from maxghost.parallel import rendezvous

# A handled SIGTERM is a success; other signals give the shell's conventional code, 128 + their number.
EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGHUP: 129}
_GRACE = 2.0  # seconds in which Python calls a handler, unless the main thread is inside XLA


class StopSignals:
  """While active, the first signal only sets `requested`, which the loop checks between steps.

  A second SIGINT raises KeyboardInterrupt in the main thread; further SIGTERMs are ignored, because schedulers repeat
  them, and so is a SIGHUP that was ignored before (`nohup`). Where the main thread is inside XLA, which compiles for
  minutes, Python calls no handler: another thread says so, and ends the process at a second SIGINT. Outside the main
  thread, where Python cannot install handlers, the object does nothing.
  """

  def __init__(self):
    self.requested: signal.Signals | None = None
    self._previous: dict = {}
    self._is_ending = False  # as a second SIGINT was handled

  def __enter__(self) -> "StopSignals":
    if threading.current_thread() is threading.main_thread():
      for number in EXIT_CODES:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
          self._previous[number] = signal.signal(number, self._handle)
      reader, self._writer = os.pipe()
      os.set_blocking(self._writer, False)
      self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
      threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
    return self

  def __exit__(self, *exception) -> None:
    if self._previous:
      signal.set_wakeup_fd(self._wakeup)
      os.close(self._writer)
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  @property
  def exit_code(self) -> int:
    return 0 if self.requested is None else EXIT_CODES[self.requested]

  @property
  def name(self) -> str:
    return "another process" if self.requested is None else _name(self.requested)

  def _handle(self, number: int, frame) -> None:
    if self.requested is not None:
      if number == signal.SIGINT:
        self._is_ending = True
        raise KeyboardInterrupt
      return
    self.requested = signal.Signals(number)
    if number == signal.SIGHUP:  # the terminal is gone: what is still printed must not fail
      for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
          os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    if rendezvous.waits.is_set():  # nothing is to be saved, and the others may never come
      raise KeyboardInterrupt
    _say(number, "received, finishing the step and saving, unless checkpoint_period=0")

  def _watch(self, reader: int) -> None:
    """Reads the numbers of signals, a byte each, until the other end is closed. reader: a file descriptor."""
    interrupts = 0
    with open(reader, "rb", buffering=0) as file:
      while number := file.read(1):
        interrupts += number[0] == signal.SIGINT
        time.sleep(_GRACE)
        if interrupts > 1 and not self._is_ending:
          os.write(2, b"\nmaxghost: stopped by the second Ctrl-C, without saving\n")
          os._exit(EXIT_CODES[signal.SIGINT])
        if self.requested is None and number[0] in (signal.SIGINT, signal.SIGTERM):  # SIGHUP: the terminal is gone
          _say(number[0], "received; XLA ends its work first")


def _say(number: int, what: str) -> None:
  """Writes a line on a signal to stderr; not by print, of the same stream, in the middle of which a handler may run."""
  more = "; Ctrl-C again stops at once, without saving" if number == signal.SIGINT else ""
  os.write(2, f"\nmaxghost: {_name(number)} {what}{more}\n".encode())


def _name(number: int) -> str:
  return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
