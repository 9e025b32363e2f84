"""Names a process that is silent, and a step that hangs, instead of waiting for them without end.

Every process writes to the key-value store of jax.distributed, from a thread of its own, what its main thread does and
for how long. All processes do the same things in the same order, so that the one that has done the fewest is the one
that the others wait for.
"""

import atexit
import contextlib
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxghost.config.values import print_problem
from maxghost.parallel import distributed

_ALIVE, _LEFT = "maxghost/alive", "maxghost/left"  # in the key-value store
LEAVE_SECONDS = 6.0  # between a failure and the end of its process
LOOK_SECONDS = 3.9  # at most between two looks at the store: all see a failure before LEAVE_SECONDS are over
ASK_SECONDS = 20.0  # for a part of a message, which may have to read what hangs too
FIRST_SECONDS = 1800.0  # for the first of a kind of phase, of which no other shows how long it takes

_leaving = threading.Event()  # set once this process ends by itself


class Phase(NamedTuple):
  """What a main thread does: the `number`-th of its phases, since a monotonic time, with a limit of seconds.

  kind: what it does, in a step or another. program: the one whose result it waits for; empty: none.
  """

  number: int
  kind: str
  doing: str
  program: str
  since: float
  limit: float


class Watch:
  """Of one process. patience: seconds of `jax_distributed_timeouts` without a heartbeat.

  A bounded phase may take `patience`, and ten times as long as the longest one of its kind before. explain: maps the
  name of a program to what is known of its collectives. advice: the end of a message.
  """

  def __init__(self, patience: float):
    # JAX counts from its last heartbeat, one in every half of this time, so that it may end the run after that half.
    self._patience, self._silent_seconds = patience, 0.3 * patience
    self._longest: dict[str, float] = {}
    self._phase = Phase(0, "", "prepares the run", "", time.monotonic(), math.inf)
    self._heard: dict[int, tuple[dict, float]] = {}  # by process: its last sign of life and when it came
    self._told: set[int] = set()
    self._ended = threading.Event()
    self.explain: Callable[[str], str] = lambda program: ""
    self.advice: Callable[[], str] = lambda: "start all processes again"

  def __call__(self, step: int | None, doing: str, program: str = "", bounded: bool = False) -> None:
    """Notes that the main thread begins something. step: to which it belongs, None: of none. The phases of all
    processes must be the same, but for what `doing` says."""
    before, now = self._phase, time.monotonic()
    if before.limit < math.inf:
      self._longest[before.kind] = max(self._longest.get(before.kind, 0.0), now - before.since)
    longest = self._longest.get(doing)
    limit = FIRST_SECONDS if longest is None else self._patience + 10 * longest
    where = doing if step is None else f"step {step}: {doing}"
    self._phase = Phase(before.number + 1, doing, where, program, now, limit if bounded else math.inf)

  def start(self) -> None:
    """Begins to watch, if there are other processes."""
    if distributed.count() > 1:
      thread = threading.Thread(target=self._run, daemon=True, name="watch")
      thread.start()
      atexit.register(self._end, thread)

  def _end(self, thread: threading.Thread) -> None:
    """Stops the thread: Python would abort with it if it ended while the thread is inside the runtime."""
    self._ended.set()
    thread.join(ASK_SECONDS)

  def _run(self) -> None:
    store, interval = distributed.store(), min(self._silent_seconds / 8, LOOK_SECONDS)
    for beat in itertools.count():
      # The store may answer next time. Where process 0, which has it, is gone, JAX ends this process.
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        self._look(store, beat, interval)
      if self._ended.wait(interval):
        return

  def _look(self, store: Any, beat: int, interval: float) -> None:
    """Gives a sign of life and reads those of the others. Ends the process where one hangs."""
    store.key_value_set(f"{_ALIVE}/{distributed.index()}", json.dumps(self._sign(beat)), allow_overwrite=True)
    signs, now = store.key_value_dir_get(_ALIVE), time.monotonic()
    for key, text in signs:
      process, sign = int(key.rpartition("/")[2]), json.loads(text)
      if process not in self._heard or self._heard[process][0]["beat"] != sign["beat"]:
        self._heard[process] = sign, now
        self._told.discard(process)
    self._name_silent(now)
    if left := dict(store.key_value_dir_get(_LEFT)):
      self._end_after(left)
    if problem := self._hang(now):
      self.report(problem)
      time.sleep(3 * interval)  # until the others have seen it too
      distributed.exit_at_once(1)

  def _end_after(self, left: dict[str, str]) -> None:
    """Ends this process after others that failed, unless it fails too. left: {key: exit code}."""
    codes = {int(key.rpartition("/")[2]): code for key, code in left.items()}
    # JAX aborts a process as soon as process 0, which holds the store, has ended. So process 0 waits until the failed
    # process has ended, and the others end before process 0 does.
    time.sleep(1.0 if 0 in codes else LEAVE_SECONDS)
    if not _leaving.is_set():
      process = min(codes)
      ended = f"process {process} of {distributed.count()} has ended with code {codes[process]}"
      self.report(f"{ended}; its output says why")
      distributed.exit_at_once(1)

  def report(self, problem: str) -> None:
    """Prints a problem of the run on stderr, with this process and the advice."""
    advice = _within(ASK_SECONDS, self.advice) or "start all processes again"
    print_problem(f"process {distributed.index()} of {distributed.count()}: {problem}; {advice}")

  def _sign(self, beat: int) -> dict[str, Any]:
    phase, frame = self._phase, sys._current_frames().get(threading.main_thread().ident or 0)
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else ""
    return phase._asdict() | {"beat": beat, "seconds": time.monotonic() - phase.since, "line": line}

  def _name_silent(self, now: float) -> None:
    """In process 0: names each process without a sign of life, before JAX ends the run with a stack of its own."""
    for process, (sign, came) in self._heard.items() if distributed.is_first() else ():
      if now - came > self._silent_seconds and process not in self._told:
        self._told.add(process)
        last = f"process {process} has given no sign of life for {now - came:.0f} s (its last: {sign['doing']})"
        print_problem(f"{last}; without one, the run ends soon")

  def _hang(self, now: float) -> str:
    """What hangs, if anything does: the process that is behind all others is in a bounded phase beyond its limit, or
    silent although JAX, whose heartbeats have a thread of their own, still hears it."""
    if len(self._heard) < distributed.count():
      return ""
    last = min(sign["number"] for sign, _ in self._heard.values())
    late = {process: pair for process, pair in self._heard.items() if pair[0]["number"] == last}
    sign, came = max(late.values(), key=lambda pair: pair[0]["seconds"] - pair[0]["limit"])
    seconds = sign["seconds"] + (now - came if now - came > self._silent_seconds else 0)
    if seconds <= sign["limit"]:
      return ""
    waiting = [sign for process, (sign, _) in self._heard.items() if process not in late]
    program = next((other["program"] for other in waiting if other["program"]), sign["program"])
    explained = (program and _within(ASK_SECONDS, self.explain, program)) or ""
    if not waiting:
      return f"{sign['doing']} hangs in all processes for {seconds:.0f} s{explained and f' ({explained})'}"
    names, does = ", ".join(map(str, sorted(late))), f"{sign['doing']}, at {sign['line']}"
    waits = f"the others wait for {'it' if len(late) == 1 else 'them'}"
    where = f" in {program}{explained and f', {explained}'}" if program else ""
    return f"process {names} of {distributed.count()} hangs for {seconds:.0f} s ({does}); {waits}{where}"


def leave(code: int) -> None:
  """Ends this process, which failed, with `code`, and tells the others, which may wait for it or may have failed too.

  At the exit JAX would wait minutes for them, then abort; this waits for LEAVE_SECONDS.
  """

  def shut_down() -> None:
    distributed.store().key_value_set(f"{_LEFT}/{distributed.index()}", str(code), allow_overwrite=True)
    jax.distributed.shutdown()

  _leaving.set()
  _within(LEAVE_SECONDS, shut_down)  # what went wrong has been printed
  distributed.exit_at_once(code)


def _within(seconds: float, function: Callable, *arguments: str) -> Any:
  """What a function returns; None if it fails or takes longer."""
  found = []

  def run() -> None:
    with contextlib.suppress(Exception):
      found.append(function(*arguments))

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  thread.join(seconds)
  return found[0] if found else None
