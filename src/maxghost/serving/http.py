"""The HTTP server: OpenAI's completions and chat completions, sources of an answer, metrics, and a page. Starlette.

A request's pieces reach the event loop through one queue, as do its client's leaving and its time limit; whatever
comes first, all its jobs are cancelled behind it, so that no slot is held for nobody.
"""

import asyncio
import codecs
import collections
import contextlib
import dataclasses
import hmac
import json
import time
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from maxghost.config import ConfigError, did_you_mean
from maxghost.serving import requests
from maxghost.serving.batcher import Closed, Job, Piece, QueueFull
from maxghost.serving.requests import Refused, Served

BODY_BYTES = 1 << 20
BODY_SECONDS = 30  # for a body to arrive
WAITING_SOURCES = 8  # questions for sources that wait for the one that is computed
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PAGE = Path(__file__).parent / "page"
_FILES = {"/": "index.html", "/page.js": "page.js", "/style.css": "style.css"}
_POLICY = (
  "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
  "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class Server:
  """The application `app` for one model. api_key: what clients must send; "" = none, and then only pages and programs
  that call this machine by a name of itself are answered. seconds: most time of a request. threads: most jobs at once,
  running and waiting."""

  def __init__(self, served: Served, *, api_key: str = "", seconds: float = 600.0, threads: int = 512):
    self._served, self._key, self._seconds = served, api_key, seconds
    self._threads = ThreadPoolExecutor(threads, "job")
    self._sources, self._asked = asyncio.Lock(), 0
    self._answers: collections.Counter[tuple[str, int]] = collections.Counter()
    self._created = int(time.time())
    routes = [
      self._route("/v1/completions", self._complete, "POST"), self._route("/v1/chat/completions", self._chat, "POST"),
      self._route("/v1/sources", self._ask, "POST"), self._route("/v1/models", self._models, "GET"),
      self._route("/v1/models/{name:path}", self._model, "GET"), self._route("/metrics", self._metrics, "GET"),
      self._route("/health", self._health, "GET", is_open=True),
      *(self._route(path, self._file, "GET", is_open=True) for path in _FILES),
    ]  # fmt: skip
    self._paths = [route.path for route in routes]
    handlers: dict[Any, Any] = {HTTPException: self._no_route, Exception: self._failed}
    self.app = Starlette(routes=routes, exception_handlers=handlers)

  def _route(self, path: str, answer: Callable[[HTTPRequest], Awaitable[Response]], method: str, is_open: bool = False):
    async def endpoint(request: HTTPRequest) -> Response:
      try:
        self._admit(request, is_open)
        response = await answer(request)
      except Refused as refused:
        response = _refusal(refused)
      except ClientDisconnect:
        response = Response(status_code=499)  # nobody reads it; the metrics count it
      self._answers[path, response.status_code] += 1
      return response

    return Route(path, endpoint, methods=[method])

  def _admit(self, request: HTTPRequest, is_open: bool) -> None:
    """Raises Refused for a wrong key; without keys, for a foreign page that calls this machine."""
    if self._key:
      given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
      if not is_open and not hmac.compare_digest(given.encode(), self._key.encode()):
        said = "wrong API key" if given else "no API key: send the header Authorization: Bearer KEY"
        raise Refused(said, code="invalid_api_key", status=401, **{"WWW-Authenticate": "Bearer"})
      return
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    try:
      name, foreign = urllib.parse.urlsplit(f"//{host}").hostname, urllib.parse.urlsplit(origin or "").netloc != host
    except ValueError:
      name, foreign = None, True
    if name not in LOOPBACK or (origin is not None and foreign):
      raise Refused("only pages and programs of this machine are answered without an API key", status=403)

  async def _no_route(self, request: HTTPRequest, error: HTTPException) -> Response:
    path = request.url.path[:200]
    self._answers["other", error.status_code] += 1
    hint = did_you_mean(path, self._paths) or f"; there are {', '.join(self._paths)}"
    said = f"there is no {path}{hint}" if error.status_code == 404 else f"{path} does not take {request.method}"
    return _refusal(Refused(said, status=error.status_code, **dict(error.headers or {})))

  async def _failed(self, request: HTTPRequest, error: Exception) -> Response:
    self._answers["other", 500] += 1
    return _refusal(Refused("the server failed at this request; its log says how", status=500))

  async def _file(self, request: HTTPRequest) -> Response:
    return FileResponse(_PAGE / _FILES[request.url.path], headers=_HEADERS | {"Cache-Control": "no-cache"})

  async def _health(self, request: HTTPRequest) -> Response:
    failed = self._served.batcher.failure
    if failed:
      raise Refused(f"the engine has stopped: {failed}", code="unavailable", status=503)
    return JSONResponse({"status": "ok"})

  def _about(self) -> dict:
    served = self._served
    about = {"id": served.name, "object": "model", "created": self._created, "owned_by": "maxghost"}
    about |= {"max_model_len": served.size, "chat": served.chats, "sources": served.sources is not None}
    return about | {"no_sources": served.no_sources}

  async def _models(self, request: HTTPRequest) -> Response:
    return JSONResponse({"object": "list", "data": [self._about()]})

  async def _model(self, request: HTTPRequest) -> Response:
    requests.read(json.dumps({"model": request.path_params["name"]}).encode(), requests.SOURCES, self._served.name)
    return JSONResponse(self._about())

  async def _metrics(self, request: HTTPRequest) -> Response:
    """Prometheus' text format."""
    lines = []
    for name, value in dataclasses.asdict(self._served.batcher.counters).items():
      now, prefix = name in ("running", "waiting"), "" if "_" in name else "requests_"
      full = f"maxghost_{prefix}{name}{'' if now else '_total'}"
      lines += [f"# TYPE {full} {'gauge' if now else 'counter'}", f"{full} {value}"]
    lines.append("# TYPE maxghost_http_responses_total counter")
    for (path, status), count in sorted(self._answers.items()):
      lines.append(f'maxghost_http_responses_total{{path="{path}",status="{status}"}} {count}')
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

  async def _complete(self, request: HTTPRequest) -> Response:
    return await self._generate(request, requests.COMPLETION)

  async def _chat(self, request: HTTPRequest) -> Response:
    return await self._generate(request, requests.CHAT)

  async def _generate(self, request: HTTPRequest, fields) -> Response:
    values, body = {}, await _body(request)

    def begin() -> tuple["Answer", list[Job]]:
      values.update(requests.read(body, fields, self._served.name))
      prompts = requests.prompts_of(values, self._served)
      asked = requests.requests_of(values, prompts, self._served)
      return Answer(self._served, values, len(asked), sum(map(len, prompts))), self._submit(asked)

    answer, jobs = await asyncio.to_thread(begin)  # long texts take their time
    pieces = self._pieces(request, jobs)
    if values["stream"]:
      return _Stream(_events(answer, pieces), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    async with contextlib.aclosing(pieces):
      async for number, piece in pieces:
        answer.take(number, piece)
    return JSONResponse(answer.whole())

  def _submit(self, asked: Sequence[requests.Request]) -> list[Job]:
    jobs: list[Job] = []
    try:
      for one in asked:
        jobs.append(self._served.batcher.submit(one))
      return jobs
    except (QueueFull, Closed, ValueError) as error:
      for job in jobs:
        job.cancel()
      if isinstance(error, QueueFull):
        raise Refused(str(error), code="queue_full", status=429, **{"Retry-After": "1"}) from error
      if isinstance(error, Closed):
        raise Refused(str(error), code="unavailable", status=503, **{"Retry-After": "5"}) from error
      raise Refused(str(error)) from error

  async def _pieces(self, request: HTTPRequest, jobs: Sequence[Job]) -> AsyncIterator[tuple[int, Piece]]:
    """(number of a job, its next piece), as they come. Raises Refused, and ClientDisconnect. Cancels what still runs."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()

    def read(number: int, job: Job) -> None:
      for piece in job:
        with contextlib.suppress(RuntimeError):  # the loop has ended
          loop.call_soon_threadsafe(queue.put_nowait, (number, piece))

    async def leave() -> None:
      while (await request.receive())["type"] != "http.disconnect":
        pass
      queue.put_nowait(ClientDisconnect())

    said = f"not finished within the {self._seconds:g} s of a request; ask for fewer tokens, or raise --timeout"
    late = Refused(said, code="timeout", status=504, **{"X-Should-Retry": "false"})
    timer, left, running = loop.call_later(self._seconds, queue.put_nowait, late), asyncio.create_task(leave()), len(jobs)
    try:
      for number, job in enumerate(jobs):
        self._threads.submit(read, number, job)
      while running:
        event = await queue.get()
        if isinstance(event, Exception):
          raise event
        piece = event[1]
        if piece.finish == "error":
          raise Refused(f"generation failed: {piece.error}", code="generation_failed", status=500)
        if piece.finish == "cancelled":
          raise Refused("the server is stopping", code="unavailable", status=503)
        yield event
        running -= bool(piece.finish)
    finally:
      timer.cancel()
      left.cancel()
      for job in jobs:
        job.cancel()

  async def _ask(self, request: HTTPRequest) -> Response:
    served, body = self._served, await _body(request)
    values = requests.read(body, requests.SOURCES, served.name)
    if (find := served.sources) is None:
      raise Refused(served.no_sources, code="no_index", status=404)
    if values["answer"] is None or (values["prompt"] is None) == (values["messages"] is None):
      raise Refused("give answer, and prompt or messages", "answer" if values["answer"] is None else "prompt")
    prompts, answer = requests.prompts_of(values, served), requests.ids_of(values["answer"], "answer", served)
    if len(prompts) != 1 or not answer or len(prompts[0]) + len(answer) > served.size:
      raise Refused(f"one prompt, and an answer; together at most {served.size} tokens", "answer")
    if self._asked > WAITING_SOURCES:
      raise Refused(f"{WAITING_SOURCES} questions wait already", code="queue_full", status=429, **{"Retry-After": "1"})
    self._asked += 1
    try:
      async with asyncio.timeout(self._seconds), self._sources:
        return JSONResponse(await asyncio.to_thread(find, prompts[0], answer, values["top"]))
    except TimeoutError as error:
      raise Refused(f"not found within {self._seconds:g} s", code="timeout", status=504) from error
    except ConfigError as error:
      raise Refused(str(error)) from error
    finally:
      self._asked -= 1


class Answer:
  """Grows from pieces, and gives them in OpenAI's form: chunks of a stream, or the whole."""

  def __init__(self, served: Served, values: dict[str, Any], count: int, prompt_tokens: int):
    self._decode, self._values, self._chat = served.tokenizer.decode, values, "messages" in values
    kind = "chat.completion" if self._chat else "text_completion"
    self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": served.name}
    self._pieces: list[list[Piece]] = [[] for _ in range(count)]
    self._prompt_tokens, self._offsets = prompt_tokens, [_Offsets() for _ in range(count)]

  def take(self, number: int, piece: Piece) -> None:
    self._pieces[number].append(piece)

  def whole(self) -> dict:
    choices = []
    for number, pieces in enumerate(self._pieces):
      merged = [tuple(one for piece in pieces for one in getattr(piece, name)) for name in ("ids", "logps", "top")]
      choices.append(self._choice(number, Piece("".join(piece.text for piece in pieces), *merged, pieces[-1].finish)))
    return self._head | {"choices": choices, "usage": self._usage()}

  def chunks(self, number: int, piece: Piece) -> Iterator[dict]:
    """What a stream sends for a piece."""
    first = not self._pieces[number]
    self.take(number, piece)
    more = {"usage": None} if self._shows_usage else {}
    head = self._head | {"object": f"{self._head['object']}.chunk"} if self._chat else self._head
    if first and self._chat:
      begin = {"index": number, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
      yield head | {"choices": [begin]} | more
    if piece.text or piece.ids or piece.finish:
      yield head | {"choices": [self._choice(number, piece, "delta")]} | more

  def last(self) -> Iterator[dict]:
    if self._shows_usage:
      head = self._head | {"object": f"{self._head['object']}.chunk"} if self._chat else self._head
      yield head | {"choices": [], "usage": self._usage()}

  @property
  def _shows_usage(self) -> bool:
    return bool((self._values["stream_options"] or {}).get("include_usage"))

  def _usage(self) -> dict:
    new = sum(len(piece.ids) for pieces in self._pieces for piece in pieces)
    counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": new}
    return counts | {"total_tokens": self._prompt_tokens + new}

  def _choice(self, number: int, piece: Piece, name: str = "message") -> dict:
    said: dict[str, Any] = {"text": piece.text}
    if self._chat:
      said = {name: {"content": piece.text} | ({"role": "assistant", "refusal": None} if name == "message" else {})}
    asked = self._values["logprobs"]
    asked = self._logprobs(number, piece) if asked is not None and asked is not False else None
    ids = {"token_ids": piece.ids} if self._values["return_token_ids"] else {}
    return {"index": number, **said, "logprobs": asked, "finish_reason": piece.finish or None, **ids}

  def _logprobs(self, number: int, piece: Piece) -> dict:
    tops = [[self._token(*one) for one in top.items()] for top in piece.top] or [[] for _ in piece.ids]
    tokens = [self._token(*one) for one in zip(piece.ids, piece.logps, strict=True)]
    if self._chat:
      rows = [token | {"top_logprobs": top} for token, top in zip(tokens, tops, strict=True)]
      return {"content": rows, "refusal": None}
    return {
      "tokens": [token["token"] for token in tokens], "token_logprobs": [token["logprob"] for token in tokens],
      "top_logprobs": [{one["token"]: one["logprob"] for one in top} for top in tops],
      "text_offset": [self._offsets[number](token["bytes"]) for token in tokens],
      "bytes": [token["bytes"] for token in tokens],
    }  # fmt: skip

  def _token(self, number: int, logp: float) -> dict:
    raw = self._decode(np.array([number]))
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(float(logp), -9999.0), "bytes": [*raw]}


class _Offsets:
  """Where each next token begins in the text, in characters; one that continues a character begins behind it."""

  def __init__(self):
    self._count, self._decoder = 0, codecs.getincrementaldecoder("utf-8")("replace")

  def __call__(self, raw: Sequence[int]) -> int:
    begin = self._count
    self._count += len(self._decoder.decode(bytes(raw)))
    return begin


class _Stream(StreamingResponse):
  """Ends its events with itself; they notice by themselves when the client leaves."""

  async def __call__(self, scope, receive, send) -> None:
    async with contextlib.aclosing(self.body_iterator):  # pyright: ignore
      await self.stream_response(send)


async def _events(answer: Answer, pieces) -> AsyncIterator[str]:
  """Server-sent events of an answer."""
  line = lambda chunk: f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"  # noqa: E731
  async with contextlib.aclosing(pieces):
    try:
      async for number, piece in pieces:
        for chunk in answer.chunks(number, piece):
          yield line(chunk)
    except ClientDisconnect:
      return
    except Refused as refused:
      yield line(refused.body)
      return
  for chunk in answer.last():
    yield line(chunk)
  yield "data: [DONE]\n\n"


async def _body(request: HTTPRequest) -> bytes:
  """A body; a large one is read to its end, so that the client reads the answer, but not kept. Raises Refused."""
  kept, size = bytearray(), 0
  try:
    async with asyncio.timeout(BODY_SECONDS):
      async for chunk in request.stream():
        size += len(chunk)
        kept += chunk if size <= BODY_BYTES else b""
  except TimeoutError as error:
    raise Refused(f"the body did not arrive within {BODY_SECONDS} s", status=408, Connection="close") from error
  if size > BODY_BYTES:
    raise Refused(f"the body has {size} bytes; at most {BODY_BYTES} are read", code="body_too_large", status=413)
  return bytes(kept)


def _refusal(refused: Refused) -> Response:
  return JSONResponse(refused.body, refused.status, refused.headers)
