"""Continuous batching: requests share the slots of an `Engine`, in a thread; each sees only its own text."""

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from maxghost.config.values import print_problem
from maxghost.serving.engine import DecodeState, Engine, Prefix, Result
from maxghost.serving.sampling import TOP, Sampling

TAIL = 8  # last ids of a prompt, behind which an answer is decoded


class QueueFull(Exception):
  """More requests wait than `queue_limit`; one may be submitted again later."""


class Closed(Exception):
  """The Batcher takes no more requests: it was closed, or its thread has failed with the error in the message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
  """prompt: token ids. max_tokens: most new ones. seed: of the draws; the same request has the same text. stop: the
  text ends before the first of these. logprobs: how many alternatives `Piece.top` has, at most TOP. ignore_stop_ids:
  continue after a stop token."""

  prompt: tuple[int, ...]
  max_tokens: int = 16
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  seed: int = 0
  stop: tuple[str, ...] = ()
  logprobs: int = 0
  ignore_stop_ids: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
  """What came since the piece before it. ids: new tokens, a stop token that ends the text included. logps: their
  log-probabilities, nats. top: the `logprobs` likeliest tokens in place of each with theirs, likeliest first. text: new
  text; a token's text may come in a later piece (incomplete characters, a possible beginning of a stop text).
  finish: "" while it goes on, then stop | length | cancelled | error. error: message of finish "error"."""

  text: str
  ids: tuple[int, ...] = ()
  logps: tuple[float, ...] = ()
  top: tuple[dict[int, float], ...] = ()
  finish: str = ""
  error: str = ""


class Row:
  """The growing text of a row behind the ids of its prompt; it ends at stop_ids or before the first whole stop text."""

  def __init__(self, tokenizer, stop_ids: Collection[int], stop_texts: Sequence[str], prompt: Sequence[int] = ()):
    self._tokenizer, self._stop_texts = tokenizer, tuple(stop_texts)
    self.stop_ids = {*stop_ids, *(tokenizer.specials[text] for text in stop_texts if text in tokenizer.specials)}
    self.text, self.num_tokens, self.ended = "", 0, False
    self._before, self._whole, self._places = prompt[-TAIL:], "", (0, 0)  # ids; whole characters; ids of their end

  def take(self, ids: Sequence[int], last: bool) -> str:
    """The new text after all `ids` so far; incomplete characters are held back."""
    if self.ended:
      return ""
    self.num_tokens = len(ids)
    text = self._decode(ids[:-1] if len(ids) and int(ids[-1]) in self.stop_ids else ids)
    text = text if last else text.rstrip("\ufffd")
    if found := [(place + len(stop), place) for stop in self._stop_texts if (place := text.find(stop)) >= 0]:
      text, self.ended = text[: min(found)[1]], True
    elif not last:
      held = max(map(len, self._stop_texts), default=1) - 1  # may be the beginning of a stop text
      text = text[: max(len(text) - held, 0)]
    new, self.text = text[len(self.text) :], max(text, self.text, key=len)
    return new

  def _decode(self, ids: Sequence[int]) -> str:
    """Decodes the last ids only, after some whose text is known, as tokenizers may drop the first space of a text."""
    (first, end), decode = self._places, self._tokenizer.decode
    tails = [()] if end else [self._before[-n:] for n in range(TAIL, TAIL - 4, -1)]  # half characters spoil others
    texts = [[decode([*t, *x]).decode(errors="replace") for x in (ids[first:end], ids[first:])] for t in tails]
    known, tail = min(texts, key=lambda pair: pair[0].count("\ufffd"))
    text = self._whole + tail[len(known) :]
    if len(tail) > len(known) and not tail.endswith("\ufffd"):
      self._whole, self._places = text, (end, len(ids))
    return text


class Job:
  """A submitted request: iterate over its pieces, once; the last has `finish`. Every method is thread-safe."""

  def __init__(self, request: Request, prefix: Prefix, row: Row, put: Callable[[Piece], None] | None = None):
    self.request, self.prefix, self.cancelled = request, prefix, False
    self._row, self._ids, self._over = row, [], False
    self._pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    self.put = put or self._pieces.put

  def __iter__(self) -> Iterator[Piece]:
    """Blocks until the next piece."""
    while not self._over:
      piece = self._pieces.get()
      self._over = bool(piece.finish)
      yield piece

  def cancel(self) -> None:
    """Ends it with finish "cancelled" and frees its slot, within a decode step; nothing if it has ended."""
    self.cancelled = True

  def take(self, result: Result, row: int) -> Piece:
    """For the Batcher: the piece of a new token."""
    self._ids.append(token := int(result.ids_B[row]))
    if (logp := float(result.logps_B[row])) != logp:
      raise ValueError("the log-probability of a token is NaN: the weights of the model may have diverged")
    is_stop = token in self._row.stop_ids
    is_full = len(self._ids) == self.request.max_tokens
    text = self._row.take(self._ids, last=is_stop or is_full)
    finish = "stop" if is_stop or self._row.ended else "length" if is_full else ""
    top = (x[row, : self.request.logprobs].tolist() for x in (result.top_ids_BN, result.top_logps_BN))
    return Piece(text, (token,), (logp,), (dict(zip(*top, strict=True)),), finish)


@dataclasses.dataclass(slots=True)
class Counters:
  """Numbers of requests and tokens so far; running and waiting: at this moment. prefill_seconds, decode_seconds: device
  time of reading prompts and of decoding."""

  running: int = 0
  waiting: int = 0
  done: int = 0
  cancelled: int = 0
  failed: int = 0
  prompt_tokens: int = 0
  generated_tokens: int = 0
  prefix_hits: int = 0
  prefix_tokens: int = 0
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0


class Batcher:
  """Runs requests on an Engine, in a thread of its own. params: of `load_params`. stop_ids: tokens that end a text.
  queue_limit: most requests that wait for a slot. failure: why the thread has ended, if it has failed.

  A prompt is read a chunk at a time, with a decode step of the others between, in the order of arrival. An error of one
  request ends it; an error of the thread ends all, and later ones are refused with its message.
  """

  def __init__(self, engine: Engine, params, tokenizer, *, stop_ids: Sequence[int] = (), queue_limit: int = 256):
    self._engine, self._params, self._tokenizer = engine, params, tokenizer
    self._stop_ids, self.queue_limit = frozenset(stop_ids), queue_limit
    self._counters, self.failure = Counters(), ""
    self._changed, self._closing, self._aborted = threading.Condition(), False, False
    self._waiting: collections.deque[Job] = collections.deque()
    self._reading: Job | None = None
    self._running: dict[int, Job] = {}
    self._thread = threading.Thread(target=self._run, name="maxghost-batcher", daemon=True)
    self._thread.start()

  @property
  def counters(self) -> Counters:
    with self._changed:
      running = len(self._running) + (self._reading is not None)
      return dataclasses.replace(self._counters, running=running, waiting=len(self._waiting))

  def submit(self, request: Request, put: Callable[[Piece], None] | None = None) -> Job:
    """Queues a request. put: takes the pieces, at once and in the Batcher's thread; None: the Job keeps them. Raises
    QueueFull, Closed, and ValueError for what cannot be served (an empty prompt, one longer than the cache, an id
    outside the vocabulary, logprobs above TOP): a line for the client, with the limit."""
    prefix = self._engine.open(request.prompt, request.sampling, seed=request.seed, top=request.logprobs)
    num, size = len(request.prompt), self._engine.cache_size
    if not 1 <= request.max_tokens <= size - num:
      why = f"the prompt has {num} tokens, and cache_size={size} is for both"
      raise ValueError(f"max_tokens={request.max_tokens}: 1 to {size - num}: {why}")
    if not 0 <= request.logprobs <= TOP:
      raise ValueError(f"logprobs={request.logprobs}: 0 to {TOP}")
    stop_ids = () if request.ignore_stop_ids else self._stop_ids
    job = Job(request, prefix, Row(self._tokenizer, stop_ids, request.stop, request.prompt), put)
    with self._changed:
      if self._closing or self.failure:
        raise Closed(self.failure or "no more requests are taken: the server is stopping")
      if len(self._waiting) >= self.queue_limit:
        raise QueueFull(f"{len(self._waiting)} requests wait already (queue_limit={self.queue_limit}); try again later")
      self._waiting.append(job)
      self._changed.notify()
    return job

  def close(self, timeout: float = 0.0) -> None:
    """No more requests; those that run or wait finish within `timeout` seconds, then are cancelled. Ends the thread."""
    with self._changed:
      self._closing = True
      self._changed.notify()
    self._thread.join(timeout)
    self._aborted = True
    self._thread.join()

  # The thread.

  def _run(self) -> None:
    try:
      self._serve()
    except Exception as error:  # told to every request, now and later
      with self._changed:
        self.failure = f"the server has failed: {type(error).__name__}: {error}"
        jobs = [*self._running.values(), *([self._reading] if self._reading else ()), *self._waiting]
        self._waiting, self._running, self._reading = collections.deque(), {}, None
      for job in jobs:
        self._give(job, Piece("", finish="error", error=self.failure))

  def _serve(self) -> None:
    state = None
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._waiting or self._running or self._reading or self._closing)
        gone = [job for job in self._waiting if job.cancelled or self._aborted]
        self._waiting = collections.deque(job for job in self._waiting if job not in gone)
        if self._reading is None and self._waiting and len(self._running) < self._engine.slots:
          self._reading = self._waiting.popleft()
      for job in gone:
        self._give(job, Piece("", finish="cancelled"))
      if self._waiting or self._running or self._reading:
        state = self._engine.init_decode_state() if state is None else state
        state = self._decode(self._read(state))
      elif self._closing:
        return

  def _read(self, state: DecodeState) -> DecodeState:
    """Reads a chunk of the prompt that is being read; the last chunk puts it into a slot."""
    if self._reading is None:
      return state
    job, begin, piece = self._reading, time.perf_counter(), None
    prefix, counters = job.prefix, self._counters
    try:
      if job.cancelled or self._aborted:
        piece = Piece("", finish="cancelled")
      elif result := self._engine.read(self._params, prefix):
        piece = job.take(result, 0)
    except Exception as error:  # of this request alone
      piece = _failed(error)
    counters.prefill_seconds += time.perf_counter() - begin
    if piece is None:
      return state
    if piece.ids:
      counters.prompt_tokens += len(prefix.prompt)
      counters.prefix_tokens += prefix.reused
      counters.prefix_hits += prefix.reused > 0
    if not piece.finish:
      slot = next(slot for slot in range(self._engine.slots) if slot not in self._running)
      state = self._engine.insert(prefix, state, slot)
      self._running[slot] = job
    self._reading, prefix.kept = None, None
    self._give(job, piece)
    return state

  def _decode(self, state: DecodeState) -> DecodeState:
    """Adds a token to every running request."""
    gone = [slot for slot, job in self._running.items() if job.cancelled or self._aborted]
    pieces = dict.fromkeys(gone, Piece("", finish="cancelled"))
    if len(pieces) < len(self._running):
      begin = time.perf_counter()
      state, result = self._engine.generate(self._params, state)
      self._counters.decode_seconds += time.perf_counter() - begin
      for slot in self._running.keys() - pieces.keys():
        try:
          pieces[slot] = self._running[slot].take(result, slot)
        except Exception as error:  # of this request alone
          pieces[slot] = _failed(error)
    for slot, piece in pieces.items():
      job = self._running[slot]
      if piece.finish:
        del self._running[slot]
        state = self._engine.free(state, slot)
      self._give(job, piece)
    return state

  def _give(self, job: Job, piece: Piece) -> None:
    self._counters.generated_tokens += len(piece.ids)
    self._counters.done += piece.finish in ("stop", "length")
    self._counters.cancelled += piece.finish == "cancelled"
    self._counters.failed += piece.finish == "error"
    try:
      job.put(piece)
    except Exception as error:  # of this request alone, whose pieces nobody takes any more
      print_problem(f"a request was ended: its function for pieces raised {type(error).__name__}: {error}")
      job.cancel()


def _failed(error: Exception) -> Piece:
  return Piece("", finish="error", error=f"{type(error).__name__}: {error}")
