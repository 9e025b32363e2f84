"""Continuous batching: requests share the slots of an `Engine`, in a thread; each sees only its own text."""

import dataclasses
from collections.abc import Iterator, Sequence

from maxghost.serving.sampling import Sampling


class QueueFull(Exception):
  """More requests wait than `queue_limit`; one may be submitted again later."""


class Closed(Exception):
  """The Batcher takes no more requests: it was closed, or its thread has failed with the error in the message."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
  """prompt: token ids. max_tokens: most new ones. seed: of the draws; the same request has the same text. stop: the
  text ends before the first of these. logprobs: how many alternatives `Piece.top` has, at most TOP. ignore_stop_ids:
  go on behind a stop token."""

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


class Job:
  """A submitted request: iterate over its pieces, once; the last has `finish`. Every method is thread-safe."""

  prompt_tokens: int

  def __iter__(self) -> Iterator[Piece]:
    """Blocks until the next piece."""
    raise NotImplementedError

  def get(self, timeout: float | None = None) -> Piece:
    """The next piece. Raises TimeoutError."""
    raise NotImplementedError

  def cancel(self) -> None:
    """Ends it with finish "cancelled" and frees its slot, within a decode step; nothing if it has ended."""
    raise NotImplementedError


@dataclasses.dataclass(slots=True)
class Counters:
  """Requests and tokens so far; running and waiting are of now. seconds: that the device worked, in reading prompts and
  in decoding."""

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
  """Runs requests on an Engine, in a thread of its own. params: the model's state. stop_ids: tokens that end a text.
  queue_limit: most requests that wait for a slot. counters: a `Counters`."""

  counters: Counters

  def __init__(self, engine, params, tokenizer, *, stop_ids: Sequence[int] = (), queue_limit: int = 256):
    raise NotImplementedError

  def warm_up(self) -> None:
    """Compiles all that requests can need; optional, but before the first `submit`."""
    raise NotImplementedError

  def submit(self, request: Request) -> Job:
    """Queues a request. Raises QueueFull, Closed, and ValueError for what cannot be served (an empty prompt, one longer
    than the cache, an id outside the vocabulary, logprobs above TOP): a line for the client, with the limit."""
    raise NotImplementedError

  def close(self, timeout: float = 0.0) -> None:
    """No more requests; those that run or wait finish within `timeout` seconds, then are cancelled. Ends the thread."""
    raise NotImplementedError
