"""The HTTP server: OpenAI's completions and chat completions, sources of an answer, metrics, and a page. Starlette.

The pieces of a request reach the event loop through one queue, as do the client's disconnect and the time limit. When a
request ends, for whatever reason, its jobs are cancelled, so that they free their slots.
"""

import asyncio
import codecs
import contextlib
import dataclasses
import functools
import hmac
import json
import time
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from maxghost.config import ConfigError, did_you_mean
from maxghost.serving import requests
from maxghost.serving.batcher import TAIL, Closed, Job, Piece, QueueFull
from maxghost.serving.requests import Refused, Served

BODY_BYTES = 1 << 20
BODY_SECONDS = 30  # for a body to arrive
MOST_ASKED = 8  # questions for sources at once; they are answered in turn
_PAGE = Path(__file__).parent / "page"
_FILES = {"/": "index.html", "/page.js": "page.js", "/shared.css": "shared.css", "/style.css": "style.css"}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'"
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_HEADERS["Content-Security-Policy"] = f"{_POLICY}; form-action 'none'; frame-ancestors 'none'"


class Server:
  """The ASGI application `app` for one model. api_key: what clients must send; "" = none, and then only programs and
  pages of this machine are answered. seconds: most time of a request."""

  def __init__(self, served: Served, *, api_key: str = "", seconds: float = 600.0):
    self._served, self._key, self._seconds, self._since = served, api_key, seconds, int(time.time())
    self._finder, self._asked = ThreadPoolExecutor(1), 0
    complete, chat = (functools.partial(self._generate, fields) for fields in (requests.COMPLETION, requests.CHAT))
    posts = {"/v1/completions": complete, "/v1/chat/completions": chat, "/v1/sources": self._ask}
    routes = [self._route(path, answer, "POST") for path, answer in posts.items()]
    routes += [self._route("/v1/models", self._models), self._route("/metrics", self._metrics)]
    opened = {"/health": self._health} | dict.fromkeys(_FILES, self._file)
    routes += [self._route(path, answer, is_open=True) for path, answer in opened.items()]
    self._paths, named = [one.path for one in routes], self._route("/v1/models/{name:path}", self._models)
    handlers: dict[Any, Any] = {HTTPException: self._no_route, Exception: self._failed}
    self.app = Starlette(routes=[*routes, named], exception_handlers=handlers)
    self.app.router.redirect_slashes = False  # it would redirect to any Host, before `_admit`

  def _route(self, path: str, answer: Callable[..., Awaitable[Response]], method: str = "GET", is_open: bool = False):
    async def endpoint(request: HTTPRequest) -> Response:
      try:
        self._admit(request, is_open)
        return await answer(request)
      except Refused as refused:
        return _refusal(refused)
      except ClientDisconnect:
        return Response(status_code=499)  # to nobody
      except asyncio.CancelledError:  # a body that is still on its way when the server ends
        return _refusal(Refused("the server is stopping", code="unavailable", status=503))

    return Route(path, endpoint, methods=[method])

  def _admit(self, request: HTTPRequest, is_open: bool) -> None:
    """Raises Refused for a wrong key; without keys, for a foreign page that calls this machine from a browser."""
    headers = request.headers
    if self._key:
      scheme, _, given = headers.get("authorization", "").partition(" ")
      given = given if scheme.lower() == "bearer" else scheme
      if not is_open and not hmac.compare_digest(given.encode(), self._key.encode()):
        said = "wrong API key" if given else "no API key; send the header Authorization: Bearer KEY"
        raise Refused(said, code="invalid_api_key", status=401, **{"WWW-Authenticate": "Bearer"})
      return
    with contextlib.suppress(ValueError):  # of what is no address
      own = urllib.parse.urlsplit(f"//{headers.get('host', '')}")
      origin = urllib.parse.urlsplit(headers.get("origin", f"//{own.netloc}"))
      if own.hostname in ("127.0.0.1", "localhost", "::1") and origin.netloc == own.netloc:
        return
    raise Refused("without an API key, only programs and pages of this machine are answered", status=403)

  async def _no_route(self, request: HTTPRequest, error: HTTPException) -> Response:
    path = request.url.path[:200]
    said = f"there is no {path}{did_you_mean(path, self._paths, 'there are')}"
    said = said if error.status_code == 404 else f"{path} does not take {request.method}"
    return _refusal(Refused(said, status=error.status_code, **dict(error.headers or {})))

  async def _failed(self, request: HTTPRequest, error: Exception) -> Response:
    return _refusal(Refused("the server failed at this request; its log says how", status=500))

  async def _file(self, request: HTTPRequest) -> Response:
    return FileResponse(_PAGE / _FILES[request.url.path], headers=_HEADERS)

  async def _health(self, request: HTTPRequest) -> Response:
    if failure := self._served.batcher.failure:
      raise Refused(failure, code="unavailable", status=503)
    return JSONResponse({"status": "ok"})

  async def _models(self, request: HTTPRequest) -> Response:
    served, name = self._served, request.path_params.get("name")
    about = {"id": served.name, "object": "model", "created": self._since, "owned_by": "maxghost"}
    about |= {"max_model_len": served.size, "chat": served.chats}
    about |= {"sources": served.sources is not None, "no_sources": served.no_sources}
    requests.check_model(name, served.name)
    return JSONResponse(about if name else {"object": "list", "data": [about]})

  async def _metrics(self, request: HTTPRequest) -> Response:
    """Prometheus' text format."""
    lines = []
    for name, value in dataclasses.asdict(self._served.batcher.counters).items():
      kind, end = ("gauge", "") if name in ("running", "waiting") else ("counter", "_total")
      full = f"maxghost_{'' if '_' in name else 'requests_'}{name}{end}"
      lines.append(f"# TYPE {full} {kind}\n{full} {value}\n")
    return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")

  async def _generate(self, fields: dict[str, tuple], request: HTTPRequest) -> Response:
    body, served = await _body(request), self._served
    loop, events = asyncio.get_running_loop(), asyncio.Queue()

    def put(number: int, piece: Piece) -> None:  # in the batcher's thread
      with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(events.put_nowait, (number, piece))

    def begin() -> tuple[Answer, list[Job]]:
      values = requests.read(body, fields, served.name)
      prompts = requests.prompts_of(values, served)
      asked = requests.requests_of(values, prompts, served)
      return Answer(served, values, [one.prompt for one in asked], sum(map(len, prompts))), self._submit(asked, put)

    answer, jobs = await asyncio.to_thread(begin)  # long texts take their time
    pieces = self._pieces(request, jobs, events)
    if answer.streams:
      return _Stream(answer.events(pieces), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
    return JSONResponse(await answer.whole(pieces))

  def _submit(self, asked: Sequence[requests.Request], put: Callable[[int, Piece], None]) -> list[Job]:
    jobs: list[Job] = []
    try:
      for number, one in enumerate(asked):
        jobs.append(self._served.batcher.submit(one, functools.partial(put, number)))
      return jobs
    except (QueueFull, Closed, ValueError) as error:
      for job in jobs:
        job.cancel()
      code, status = {QueueFull: ("queue_full", 429), Closed: ("unavailable", 503)}.get(type(error), (None, 400))
      raise Refused(str(error), code=code, status=status, **({"Retry-After": "1"} if code else {})) from error

  async def _pieces(self, request: HTTPRequest, jobs: Sequence[Job], events: asyncio.Queue) -> AsyncIterator:
    """(number of a job, its next piece), as they come. Raises Refused and ClientDisconnect."""

    async def leave() -> None:
      while (await request.receive())["type"] != "http.disconnect":
        pass
      events.put_nowait(ClientDisconnect())

    timer = asyncio.get_running_loop().call_later(self._seconds, events.put_nowait, self._late("ask for fewer tokens"))
    left, running = asyncio.create_task(leave()), len(jobs)
    try:
      while running:
        event = await events.get()
        if isinstance(event, Exception):
          raise event
        if event[1].finish == "error":
          raise Refused(f"generation failed: {event[1].error}", code="generation_failed", status=500)
        if event[1].finish == "cancelled":
          raise Refused("the server is stopping", code="unavailable", status=503)
        running -= bool(event[1].finish)
        yield event
    finally:
      timer.cancel()
      left.cancel()
      for job in jobs:
        job.cancel()

  def _late(self, fix: str) -> Refused:
    said = f"not finished within the {self._seconds:g} s of a request; {fix}"
    return Refused(said, code="timeout", status=504, **{"X-Should-Retry": "false"})

  async def _ask(self, request: HTTPRequest) -> Response:
    served = self._served
    values = requests.read(await _body(request), requests.SOURCES, served.name)
    if served.sources is None:
      raise Refused(served.no_sources, code="no_index", status=404)
    if (values["prompt"] is None) == (values["messages"] is None):
      raise Refused("give prompt or messages", "prompt")
    (prompt, *others), answer = requests.prompts_of(values, served), requests.ids_of(values["answer"], "answer", served)
    if others or not prompt or not answer or len(prompt) + len(answer) > served.size:
      raise Refused(f"give one prompt and its answer, of at most {served.size} tokens together", "answer")
    if self._asked >= MOST_ASKED:
      raise Refused(f"{self._asked} questions wait", code="queue_full", status=429, **{"Retry-After": "1"})
    self._asked += 1
    try:
      work = asyncio.get_running_loop().run_in_executor(self._finder, served.sources, prompt, answer, values["top"])
      found = json.dumps(await asyncio.wait_for(work, self._seconds), ensure_ascii=False, allow_nan=False)
      return Response(found.encode(errors="replace"), media_type="application/json")  # names of files may be no UTF-8
    except ConfigError as error:
      raise Refused(str(error)) from error
    except TimeoutError as error:
      raise self._late("start the server with a larger --timeout") from error
    finally:
      self._asked -= 1


class Answer:
  """The answer to one request in OpenAI's form, a text behind each of `prompts`. streams: whether it is sent as events.
  prompt_tokens: of the request's different prompts."""

  def __init__(self, served: Served, values: dict[str, Any], prompts: Sequence[Sequence[int]], prompt_tokens: int):
    self._values, self._chat, self._tokenizer = values, "messages" in values, served.tokenizer
    self.streams, self._counts, count = values["stream"], [prompt_tokens, 0], len(prompts)
    self._lengths, self._before = [0] * count, [[*prompt[-TAIL:]] for prompt in prompts]
    self._roles: list[dict[str, str]] = [{"role": "assistant"}] * count
    self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(count)]
    chat = "chat.completion.chunk" if self.streams else "chat.completion"
    self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": chat if self._chat else "text_completion"}
    self._head |= {"created": int(time.time()), "model": served.name}

  async def whole(self, pieces) -> dict:
    found: list[list[Piece]] = [[] for _ in self._lengths]
    async with contextlib.aclosing(pieces):
      async for number, piece in pieces:
        found[number].append(piece)
    choices = []
    for number, own in enumerate(found):
      ids, logps, top = (tuple(one for p in own for one in getattr(p, name)) for name in ("ids", "logps", "top"))
      choices.append(self._choice(number, Piece("".join(p.text for p in own), ids, logps, top, own[-1].finish)))
    return self._head | {"choices": choices, "usage": self._usage()}

  async def events(self, pieces) -> AsyncIterator[str]:
    """Server-sent events."""
    usage = {"usage": None} if self._values["stream_options"].get("include_usage") else {}
    event = lambda body: f"data: {json.dumps(body, ensure_ascii=False)}\n\n"  # noqa: E731
    with contextlib.suppress(ClientDisconnect):
      try:
        async with contextlib.aclosing(pieces):
          async for number, piece in pieces:
            yield event(self._head | {"choices": [self._choice(number, piece)]} | usage)
      except Refused as refused:
        yield event(refused.body)
        return
      if usage:
        yield event(self._head | {"choices": [], "usage": self._usage()})
      yield "data: [DONE]\n\n"

  def _usage(self) -> dict:
    prompt, new = self._counts
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

  def _choice(self, number: int, piece: Piece) -> dict:
    said: dict[str, Any] = {"text": piece.text}
    if self._chat:
      role, self._roles[number] = self._roles[number], {}  # clients join the texts of all deltas, the role's too
      said = {"delta" if self.streams else "message": role | {"content": piece.text}}
    asked = self._values["logprobs"]  # 0 asks for those of the tokens alone
    logprobs = None if asked is None or asked is False else self._logprobs(number, piece)
    ids = {"token_ids": piece.ids} if self._values["return_token_ids"] else {}
    self._counts[1] += len(piece.ids)
    return {"index": number, **said, "logprobs": logprobs, "finish_reason": piece.finish or None, **ids}

  def _logprobs(self, number: int, piece: Piece) -> dict:
    tokens = [self._token(*one) for one in zip(piece.ids, piece.logps, strict=True)]
    tops = [[self._token(*one) for one in top.items()] for top in piece.top] or [[] for _ in tokens]
    if self._chat:
      return {"content": [one | {"top_logprobs": top} for one, top in zip(tokens, tops, strict=True)], "refusal": None}
    offsets = []  # in the text; a token that continues a character begins after it
    for one, token in zip(piece.ids, tokens, strict=True):
      offsets.append(self._lengths[number])
      raw = bytes(token["bytes"])[self._drops_space(number, one) :]
      self._lengths[number] += len(self._decoders[number].decode(raw))
    columns = {"tokens": "token", "token_logprobs": "logprob", "bytes": "bytes"}
    own = {column: [token[name] for token in tokens] for column, name in columns.items()}
    alternatives: list[dict[str, float]] = [{} for _ in tops]
    for found, one in ((found, one) for found, top in zip(alternatives, tops, strict=True) for one in top):
      found.setdefault(one["token"], one["logprob"])  # parts of characters share a text: the likeliest counts
    return own | {"top_logprobs": alternatives, "text_offset": offsets}

  def _drops_space(self, number: int, token: int) -> bool:
    """Whether the text lacks the space with which a token begins: some tokenizers drop it where no text is before."""
    if self._tokenizer.decode(before := self._before[number]):
      return False
    before.append(token)
    return self._tokenizer.piece(token)[:1] == b" " != self._tokenizer.decode(before)[:1]

  def _token(self, number: int, logp: float) -> dict:
    raw = self._tokenizer.piece(number)
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(float(logp), -9999.0), "bytes": [*raw]}


class _Stream(StreamingResponse):
  """Ends its events with itself, and both with the server; they notice themselves when the client leaves."""

  async def __call__(self, scope, receive, send) -> None:
    with contextlib.suppress(asyncio.CancelledError):  # the client does not read, and the server ends
      async with contextlib.aclosing(self.body_iterator):  # pyright: ignore
        await self.stream_response(send)


async def _body(request: HTTPRequest) -> bytes:
  """A body. A large one is read to its end, so that the client reads the answer, but not kept. Raises Refused."""
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
