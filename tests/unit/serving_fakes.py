"""A batcher without a model, for tests of the HTTP server: it says the prompt again, one byte at a time."""

import contextlib
import http.client
import json
import threading
import time

import uvicorn

from maxghost.data.conversations import Rendering
from maxghost.data.tokenizers import ByteTokenizer
from maxghost.serving.batcher import Counters, Piece, QueueFull
from maxghost.serving.http import Server
from maxghost.serving.requests import Served
from maxghost.serving.samples import utf8

BYTES = ByteTokenizer()


class EchoJob:
  def __init__(self, request, batcher, put):
    self.request, self._batcher = request, batcher
    self.cancelled, self._put = threading.Event(), put

  def cancel(self):
    self.cancelled.set()

  def run(self):
    """The bytes of the prompt, behind its begin token, then the end token; each is followed by a pause."""
    ids = [*self.request.prompt[1:], BYTES.eos_id]
    for count, number in enumerate(ids[: self.request.max_tokens], 1):
      if self.cancelled.wait(self._batcher.pause):
        return self._end("cancelled")
      if b"fail" in BYTES.decode(ids[:count]):
        return self._end("error")
      top = ({number: -0.5, 120: -1.5, 121: -float("inf")},) if self.request.logprobs else ()
      text = "" if number > 255 else chr(number)
      self._batcher.counters.generated_tokens += 1
      last = "stop" if number == BYTES.eos_id else "length" if count == self.request.max_tokens else ""
      if last:
        self._end(last, text, (number,), (-0.5,), top)
      else:
        self._put(Piece(text, (number,), (-0.5,), top))

  def _end(self, finish, text="", ids=(), logps=(), top=()):
    self._batcher.end(finish)
    self._put(Piece(text, ids, logps, top, finish, "the model broke" if finish == "error" else ""))


class EchoBatcher:
  """pause: seconds of a token. slots: most jobs at once; more are refused."""

  failure, queue_limit = "", 100

  def __init__(self, pause=0.0, slots=8):
    self.pause, self.slots, self.counters, self.jobs, self._lock = pause, slots, Counters(), [], threading.Lock()

  def submit(self, request, put):
    if not request.prompt:
      raise ValueError("the prompt is empty")
    job = EchoJob(request, self, put)
    with self._lock:
      if self.counters.running >= self.slots:
        raise QueueFull("0 requests wait already")
      self.counters.running += 1
      self.counters.prompt_tokens += len(request.prompt)
      self.jobs.append(job)
    threading.Thread(target=job.run, daemon=True).start()
    return job

  def end(self, finish):
    name = {"cancelled": "cancelled", "error": "failed"}.get(finish, "done")
    with self._lock:
      self.counters.running -= 1
      setattr(self.counters, name, getattr(self.counters, name) + 1)

  def close(self, timeout=0.0):
    for job in self.jobs:
      job.cancel()


def served(batcher, tokenizer=BYTES, **changes):
  begin = lambda text: [256, *utf8(text)]  # noqa: E731
  given = {"rendering": Rendering(BYTES, None, True, True, True), "no_sources": "no index: write one", **changes}
  return Served("echo", batcher, tokenizer, begin, 400, 263, **given)


@contextlib.contextmanager
def serving(model, grace=3, **options):
  """The port of a server in a thread. grace: seconds of requests after its end."""
  config = uvicorn.Config(Server(model, **options).app, port=0, log_level="critical", lifespan="off", ws="none")
  config.timeout_graceful_shutdown = grace
  server = uvicorn.Server(config)
  thread = threading.Thread(target=server.run, daemon=True)
  thread.start()
  until(lambda: server.started)
  try:
    yield server.servers[0].sockets[0].getsockname()[1]
  finally:
    model.batcher.close()
    server.should_exit = True
    thread.join(20)


def until(condition, seconds=10.0):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it does not happen"
    time.sleep(0.005)


def call(port, path, body=None, **headers):
  """(status, JSON or text) of a request by hand."""
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
  raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
  connection.request("POST" if body is not None else "GET", path, raw, headers)
  reply = connection.getresponse()
  text = reply.read().decode()
  connection.close()
  return reply.status, json.loads(text) if "json" in reply.headers["Content-Type"] else text
