"""The HTTP server: OpenAI's client, wrong requests, limits, clients that leave; then the command on a tiny model."""

import dataclasses
import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import tiny
from flax import nnx
from serving_fakes import EchoBatcher, call, served, serving, until

from maxghost import cli, config, load_model, serve
from maxghost.checkpoint.manager import CheckpointManager
from maxghost.config import ConfigError
from maxghost.data import tokenizers
from maxghost.serving import Generator
from maxghost.serving import http as server
from maxghost.serving.batcher import Piece
from maxghost.serving.http import Answer
from maxghost.training.state import to_tree

ROOT = Path(__file__).resolve().parents[2] / "src" / "maxghost"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def batcher():
  return EchoBatcher()


@pytest.fixture(scope="module")
def port(batcher):
  with serving(served(batcher), seconds=20.0) as found:
    yield found


def connected(port, **options) -> openai.OpenAI:
  return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", **options)


@pytest.fixture(scope="module")
def client(port):
  with connected(port, max_retries=0) as made:
    yield made


def test_the_official_client_completes(client):
  assert [model.id for model in client.models.list()] == [client.models.retrieve("echo").id] == ["echo"]
  got = client.completions.create(model="echo", prompt=["ab", "xyz"], n=2, logprobs=2, max_tokens=3)
  assert [(c.index, c.text, c.finish_reason) for c in got.choices] == [
    (0, "ab", "stop"), (1, "ab", "stop"), (2, "xyz", "length"), (3, "xyz", "length"),
  ]  # fmt: skip
  assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (7, 12, 19)
  said = got.choices[0].logprobs
  assert said.tokens == ["a", "b", ""] and said.token_logprobs == [-0.5] * 3 and said.text_offset == [0, 1, 2]
  assert said.top_logprobs[0] == {"a": -0.5, "x": -1.5, "y": -9999.0}


def test_offsets_count_characters_of_the_text(client):
  said = client.completions.create(model="echo", prompt="aé漢b", logprobs=0).choices[0].logprobs
  assert said.text_offset == [0, 1, 1, 2, 2, 2, 3, 4] and said.top_logprobs == [{}] * 8
  assert b"".join(map(bytes, said.bytes)) == "aé漢b".encode()
  answer = Answer(served(EchoBatcher()), {"logprobs": 0, "stream": False}, [[1]], 1)
  ids = (97, 255, 98, 234, 99, 195, 169, 100)  # not UTF-8: such bytes are a character of the text, too
  assert answer._logprobs(0, Piece("a\ufffdb\ufffdcéd", ids, (-0.5,) * 8))["text_offset"] == [0, 1, 2, 3, 3, 5, 5, 6]


def test_of_alternatives_with_one_text_the_likeliest_is_told():
  answer = Answer(served(EchoBatcher()), {"logprobs": 3, "stream": False}, [[1]], 1)
  piece = Piece("\ufffd", (203,), (-0.5,), ({203: -0.5, 97: -0.7, 204: -1.5, 256: -2.5, 257: -3.5},), "length")
  assert answer._logprobs(0, piece)["top_logprobs"] == [{"\ufffd": -0.5, "a": -0.7, "": -2.5}]


def test_the_official_client_chats_and_streams(client):
  messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]
  expected = "system: s\nuser: 1+1?\nassistant: "
  got = client.chat.completions.create(
    model="echo", messages=messages, logprobs=True, top_logprobs=3, max_completion_tokens=99, temperature=0, top_p=0.5
  )
  assert (got.choices[0].message.content, got.choices[0].message.role) == (expected, "assistant")
  tokens = got.choices[0].logprobs.content
  assert (tokens[1].token, tokens[1].bytes, tokens[1].top_logprobs[1].logprob) == ("y", [121], -1.5)
  stream = client.chat.completions.create(
    model="echo", messages=messages, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 3}
  )
  *chunks, last = list(stream)
  assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected and len(chunks) > 20
  assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
  assert chunks[-1].choices[0].finish_reason == "stop" and {chunk.usage for chunk in chunks} == {None}
  assert not last.choices and last.usage.completion_tokens == len(expected) + 1
  stream = client.completions.create(
    model="echo", prompt="abc", stream=True, n=2, extra_body={"return_token_ids": True}
  )
  found = {0: [], 1: []}
  for chunk in stream:
    assert chunk.object == "text_completion" and chunk.usage is None
    found[chunk.choices[0].index] += chunk.choices[0].token_ids
  assert found == {0: [97, 98, 99, 257], 1: [97, 98, 99, 257]}


def test_what_is_asked_reaches_the_batcher(client, batcher):
  more = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "ignore_eos": True}
  given = {"temperature": 0.7, "top_p": 0.9, "seed": 7, "stop": ["x", "yz"], "presence_penalty": 0, "user": "me"}
  client.completions.create(model="echo", prompt=[256, 65], max_tokens=9, n=2, **given, extra_body=more)
  one, two = (job.request for job in batcher.jobs[-2:])
  sampling = one.sampling
  assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 5, 0.9)
  assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.5)
  assert (one.prompt, one.max_tokens, one.stop, one.ignore_stop_ids) == ((256, 65), 9, ("x", "yz"), True)
  assert (one.seed, two.seed, one.logprobs) == (7, 8, 0)
  neutral = {"parallel_tool_calls": True, "service_tier": "auto", "modalities": ["text"], "audio": None}
  neutral |= {"prompt_cache_key": None}
  client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "a"}], **neutral)
  chat = batcher.jobs[-1].request
  assert chat.max_tokens == 400 - len(chat.prompt) and chat.sampling.temperature == 1.0  # OpenAI's defaults
  client.completions.create(model="echo", prompt="a" * 390)
  assert batcher.jobs[-1].request.max_tokens == 9  # 16, or what the cache leaves
  client.completions.create(model="echo", prompt=["ab"] * 3)
  assert len({job.request.seed for job in batcher.jobs[-3:]}) == 3, "equal prompts would have equal texts"


def test_errors_are_of_the_right_class(client):
  with pytest.raises(openai.NotFoundError, match=r"ehco.* does not exist; did you mean ..?echo") as found:
    client.completions.create(model="ehco", prompt="a")
  assert found.value.code == "model_not_found" and found.value.param == "model"
  with pytest.raises(openai.NotFoundError):
    client.models.retrieve("other/model")
  with pytest.raises(openai.BadRequestError, match=r"did you mean ..?temperature") as wrong:
    client.completions.create(model="echo", prompt="a", extra_body={"temprature": 1})
  assert (wrong.value.type, wrong.value.param) == ("invalid_request_error", "temprature")
  with pytest.raises(openai.InternalServerError, match="the model broke"):
    client.completions.create(model="echo", prompt="fail")
  with pytest.raises(openai.APIError, match="the model broke"):
    list(client.completions.create(model="echo", prompt="fail", stream=True))
  assert client.completions.create(model="echo", prompt="on").choices[0].text == "on"


MESSAGES = [{"role": "user", "content": "a"}]
WRONG = [
  (COMPLETIONS, {}, "prompt is missing"),
  (CHATS, {}, "messages is missing"),
  (CHATS, {"prompt": "a"}, "unknown parameter"),
  (CHATS, {"messages": "a"}, "is not a list"),
  (CHATS, {"messages": [{"role": "usr", "content": "a"}]}, "did you mean 'user'"),
  (CHATS, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "is not offered; leave tools out"),
  (CHATS, {"messages": MESSAGES, "reasoning_effort": "low"}, "is not offered; leave reasoning_effort out"),
  (CHATS, {"messages": MESSAGES, "top_logprobs": 2}, "needs logprobs=true"),
  (CHATS, {"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 3}, "differ; give one"),
  (CHATS, {"messages": MESSAGES, "stream_options": {"usage": True}, "stream": True}, "it takes include_usage, true or"),
  (CHATS, {"messages": MESSAGES, "stream_options": {"include_usage": 1}, "stream": True}, "it takes include_usage"),
  (CHATS, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
  (COMPLETIONS, {"prompt": "a", "n": 0}, "n=0: at least 1, at most 128"),
  (COMPLETIONS, {"prompt": "a", "n": True}, "n=true is not a whole number"),
  (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "is not a number"),
  (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature=-1"),
  (COMPLETIONS, {"prompt": "a", "top_p": 1.5}, "top_p=1.5"),
  (COMPLETIONS, {"prompt": "a", "top_k": -1, "temperature": 0}, "top_k=-1: 0 (all tokens) or more"),
  *((COMPLETIONS, {"prompt": "a", name: 10**4000}, f"{name}=1000") for name in ("top_p", "min_p")),
  (COMPLETIONS, {"prompt": "a", "max_tokens": 10**4000}, "00... of the answer are more than"),
  (CHATS, {"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 10**4000}, "00... differ; give one"),
  (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', "temperature=NaN is not a number"),
  (COMPLETIONS, b'{"prompt": "a", "top_p": NaN}', "top_p=NaN is not a number"),
  (COMPLETIONS, b'{"prompt": "a", "x\\ud800": 1}', "unknown parameter"),
  (COMPLETIONS, {"prompt": "a", "seed": 1 << 70}, "seed="),
  (COMPLETIONS, {"prompt": "a", "stop": [1]}, "stop=[1] is neither"),
  (COMPLETIONS, b'{"prompt": "a", "stop": ["b", "\\ud800"]}', "is neither text"),
  (CHATS, {"messages": [{"role": "user" * 9999, "content": "a"}]}, "; roles are system"),
  (COMPLETIONS, {"prompt": "a", "echo": True}, "echo=true is not offered"),
  (COMPLETIONS, {"prompt": "a", "model": 3}, "is not text"),
  (COMPLETIONS, {"prompt": ["a", 3]}, "neither text nor a list of ids"),
  (COMPLETIONS, {"prompt": [3, 263]}, "ids from 0 to 262"),
  (COMPLETIONS, {"prompt": []}, "prompt"),
  (COMPLETIONS, b'{"prompt": "\\ud800"}', "surrogates not allowed"),
  (CHATS, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "half a surrogate pair"),
  (COMPLETIONS, {"prompt": "a" * 400}, "401 tokens of the prompt and 1 of the answer are more than the 400 positions"),
  (COMPLETIONS, {"prompt": "a", "max_tokens": 399}, "more than the 400 positions of the cache"),
  (COMPLETIONS, {"prompt": ""} | {"x" * 99: 1}, "there are temperature"),
  (COMPLETIONS, {"prompt": ["a"] * 200, "n": 6}, "200 prompts, n=6: at most 100 texts"),
  (COMPLETIONS, {"prompt": "a", "n": 101}, "1 prompt, n=101: at most 100 texts in all; send them in several requests"),
  (CHATS, {"messages": MESSAGES, "n": 101}, "or start the server with a larger --queue"),
  (COMPLETIONS, b"{", "is no JSON"),
  (COMPLETIONS, b"[]", "no JSON object"),
  (COMPLETIONS, b"[" * 100_000, "is no JSON"),
  (COMPLETIONS, b"\xff", "is no JSON"),
]


@pytest.mark.parametrize(("path", "body", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_bodies(port, path, body, message):
  status, answer = call(port, path, body)
  assert (status, answer["error"]["type"], {*answer["error"]}) == (
    400,
    "invalid_request_error",
    {"message", "type", "param", "code"},
  )
  assert message in json.dumps(answer, ensure_ascii=False) and len(answer["error"]["message"]) < 1000


def test_other_addresses_and_methods(port):
  status, answer = call(port, "/v1/completion", {})
  assert status == 404 and "did you mean '/v1/completions'" in answer["error"]["message"]
  status, answer = call(port, "/%ff%00")
  assert status == 404 and "{name" not in answer["error"]["message"], "clients cannot use a route's pattern"
  assert call(port, COMPLETIONS)[0] == 405
  assert call(port, "/health") == (200, {"status": "ok"})
  status, text = call(port, "/metrics")
  assert status == 200 and "# TYPE maxghost_requests_running gauge\nmaxghost_requests_running 0\n" in text
  assert "# TYPE maxghost_prompt_tokens_total counter\n" in text


def test_a_large_body_is_refused_and_the_server_goes_on(port, client):
  with pytest.raises(openai.APIStatusError, match="at most 1048576 are read") as large:
    client.completions.create(model="echo", prompt="a" * 10_000_000)
  assert large.value.status_code == 413
  assert client.completions.create(model="echo", prompt="on").choices[0].text == "on"


def test_a_body_that_does_not_arrive(port, monkeypatch):
  monkeypatch.setattr(server, "BODY_SECONDS", 0.1)
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
  connection.putrequest("POST", COMPLETIONS)
  connection.putheader("Content-Length", "99")
  connection.endheaders(b"{")
  assert connection.getresponse().status == 408


@pytest.fixture(scope="module")
def slow():
  """(batcher, port) with 4 slots, where an answer takes long."""
  made = EchoBatcher(pause=0.02, slots=4)
  with serving(served(made), seconds=20.0) as found:
    yield made, found


def send(port, body) -> socket.socket:
  raw = json.dumps(body).encode()
  connection = socket.create_connection(("127.0.0.1", port), 20)
  connection.sendall(
    f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
  )
  return connection


LONG = {"prompt": "a" * 190, "max_tokens": 200, "n": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(slow, stream):
  batcher, port = slow
  before = batcher.counters.cancelled
  connection = send(port, LONG | {"stream": stream})
  until(lambda: batcher.counters.running == 2)
  if stream:
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
  connection.close()
  until(lambda: batcher.counters.running == 0)
  assert batcher.counters.cancelled == before + 2


def test_a_client_that_sends_half_a_body_and_leaves(slow):
  batcher, port = slow
  connection = socket.create_connection(("127.0.0.1", port), 20)
  connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{".encode())
  connection.close()
  assert call(port, "/health")[0] == 200 and batcher.counters.running == 0


@pytest.mark.parametrize("reads", [True, False])
def test_a_server_that_ends_before_a_client_does_tells_it_and_logs_no_traceback(reads, monkeypatch):
  """One sends half a body, the other does not read its answer."""
  model, logged = served(EchoBatcher(slots=100)), []
  monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", lambda *_, **options: logged.append(options))
  many = LONG | {"n": 1, "prompt": ["a" * 190] * 90, "logprobs": 3, "stream": True}
  body = "{" if reads else json.dumps(many)
  with socket.socket() as connection:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    with serving(model, grace=0.5) as port:
      connection.connect(("127.0.0.1", port))
      head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) + reads}\r\n\r\n"
      connection.sendall((head + body).encode())
      until(lambda: reads or model.batcher.counters.done == 90)
    assert not reads or (b"503" in (said := connection.recv(999)) and b"the server is stopping" in said)
  assert logged and not [options for options in logged if options.get("exc_info")]


def test_a_full_queue_says_when_to_come_again(slow):
  batcher, port = slow
  connections = [send(port, LONG) for _ in range(2)]
  until(lambda: batcher.counters.running == 4)
  with connected(port, max_retries=0) as client, pytest.raises(openai.RateLimitError) as full:
    client.completions.create(model="echo", prompt="a")
  assert full.value.response.headers["Retry-After"] == "1" and full.value.code == "queue_full"
  connections[0].close()
  until(lambda: batcher.counters.running == 2)
  jobs = len(batcher.jobs)
  status, _ = call(port, COMPLETIONS, LONG | {"n": 3})  # the third is refused, which cancels the two before it
  assert status == 429 and [job.cancelled.is_set() for job in batcher.jobs[jobs:]] == [True, True]
  connections[1].close()
  until(lambda: batcher.counters.running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(stream):
  batcher = EchoBatcher(pause=0.02)
  late = pytest.raises(openai.APIError, match=r"within the 0\.3 s")
  with serving(served(batcher), seconds=0.3) as port, connected(port) as client, late:  # which does not try again
    list(client.completions.create(model="echo", prompt="a" * 99, max_tokens=99, stream=stream))
  assert (batcher.counters.running, batcher.counters.cancelled, len(batcher.jobs)) == (0, 1, 1)


def test_a_key_is_asked_for():
  with serving(served(EchoBatcher()), api_key="gehéim") as port:
    assert call(port, COMPLETIONS, {"prompt": "a"})[0] == 401
    assert call(port, COMPLETIONS, {"prompt": "a"}, Authorization="Bearer gehé".encode())[0] == 401
    status, answer = call(port, COMPLETIONS, {"prompt": "a"}, Authorization="Bearer gehéim".encode("latin-1"))
    assert status == 200 and answer["choices"][0]["text"] == "a"
    assert call(port, "/v1/models", None, Authorization="bearer gehéim".encode("latin-1"))[0] == 200
    assert call(port, "/health/", None)[0] == 404  # it was sent to the Host that the client had named
    for path in ("/v1/models", "/metrics", "/v1/sources"):
      assert call(port, path, {} if path == "/v1/sources" else None)[0] == 401
    for path in ("/", "/page.js", "/shared.css", "/style.css", "/health"):
      assert call(port, path)[0] == 200
    with connected(port) as client, pytest.raises(openai.AuthenticationError):
      client.models.list()


def test_without_a_key_foreign_pages_are_not_answered(port):
  for headers in (
    {"Host": "evil.example"},
    {"Host": ""},
    {"Host": "[1"},
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
  ):
    assert call(port, COMPLETIONS, {"prompt": "a"}, **headers)[0] == 403, headers
  for name in ("localhost", "127.0.0.1", "[::1]"):
    own = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
    assert call(port, COMPLETIONS, {"prompt": "a"}, **own)[0] == 200


def test_a_model_without_template_and_index_says_so(port):
  status, answer = call(port, "/v1/sources", {"prompt": "a", "answer": "b"})
  assert (status, answer["error"]["message"]) == (404, "no index: write one")
  with serving(served(EchoBatcher(), rendering=None, no_chat="no chat template")) as other:
    status, answer = call(other, CHATS, {"messages": MESSAGES})
  assert status == 400 and answer["error"]["message"] == "no chat template; /v1/completions continues texts"


def test_sources_of_an_answer():
  asked, wait = [], threading.Event()

  def find(prompt, answer, top):
    asked.append((prompt, answer, top))
    if top == 100:
      wait.wait(20)
    if top == 99:
      raise ConfigError("the index has other weights")
    return {"documents": [{"path": "a\udcff.txt"}] * (top == 98), "seconds": 0.5}

  with serving(served(EchoBatcher(), sources=find), seconds=20.0) as port:
    ask = lambda **body: call(port, "/v1/sources", body)  # noqa: E731
    assert ask(prompt="ab", answer="cd") == (200, {"documents": [], "seconds": 0.5})
    assert ask(messages=MESSAGES, answer=[99, 262, 257], top=3)[0] == 200
    rendered = [256, *b"user: a\nassistant: "]
    assert asked == [([256, 97, 98], [99, 100], 10), (rendered, [99, 262, 257], 3)]
    assert ask(prompt="a", answer="b", top=99)[1]["error"]["message"] == "the index has other weights"
    assert ask(prompt="a", answer="b", top=98)[1]["documents"] == [{"path": "a?.txt"}]  # a name that is no UTF-8
    wrong = (
      {},
      {"prompt": "a"},
      {"prompt": "a", "messages": MESSAGES, "answer": "a"},
      {"prompt": ["a", "b"], "answer": "c"},
    )
    wrong += ({"prompt": "a", "answer": ""}, {"prompt": "a", "answer": [263]}, {"prompt": "a", "answer": "b" * 399})
    for body in wrong:
      assert ask(**body)[0] == 400, body
    threads = [threading.Thread(target=ask, kwargs={"prompt": "a", "answer": "b", "top": 100}) for _ in range(8)]
    for thread in threads:
      thread.start()
    until(lambda: ask(prompt="a", answer="b", top=101)[0] == 400 and ask_full(port))
    wait.set()
    for thread in threads:
      thread.join()


def test_a_question_for_sources_has_the_time_of_a_request():
  """Those that wait for it too; the server answers again when it is over."""
  running, wait, begun = threading.Event(), threading.Event(), []

  def find(prompt, answer, top):
    begun.append(top)
    running.set()
    return wait.wait(20 * (top == 1))

  with serving(served(EchoBatcher(), sources=find), seconds=1.0) as port, ThreadPoolExecutor(2) as threads:
    ask = lambda top: call(port, "/v1/sources", {"prompt": "a", "answer": "b", "top": top})  # noqa: E731
    first = threads.submit(ask, 1)
    assert running.wait(20)  # the second one waits behind it
    for status, answer in (ask(2), first.result()):
      assert (status, answer["error"]["code"]) == (504, "timeout") and "within the 1 s" in str(answer)
    wait.set()
    assert ask(3)[0] == 200 and begun[-1] == 3 and len(begun) == 2  # the one that waited was not begun


def ask_full(port):
  time.sleep(0.2)
  return call(port, "/v1/sources", {"prompt": "a", "answer": "b"})[0] == 429


def test_a_failure_of_the_server_is_told_in_words():
  broken = served(EchoBatcher(), sources=lambda *_: 1 / 0)
  with serving(broken) as port:
    status, answer = call(port, "/v1/sources", {"prompt": "a", "answer": "b"})
    assert (status, answer["error"]["type"]) == (500, "server_error") and "Zero" not in json.dumps(answer)
    assert call(port, "/health")[0] == 200
    broken.batcher.failure = "the server has failed: it broke"
    status, answer = call(port, "/health")
    assert (status, answer["error"]["message"]) == (503, "the server has failed: it broke")


def test_the_page_loads_nothing_from_elsewhere(port):
  for path in ("/", "/page.js", "/shared.css", "/style.css"):
    status, text = call(port, path)
    assert status == 200 and "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    assert "innerHTML" not in text and "style=" not in text  # texts are put in as texts; the policy forbids the other


def test_the_example_of_the_docs_runs(capsys):
  page = (ROOT.parents[1] / "docs" / "serving.md").read_text("utf-8")
  (code,) = re.findall(r"```py\n(.*?)```", page, re.S)
  with serving(dataclasses.replace(served(EchoBatcher()), name="base")) as port:
    exec(code.replace(":8000", f":{port}"), {})
    asked = re.search(r"-d '(.*?)'", page)[1]
    assert call(port, COMPLETIONS, asked.encode())[1]["choices"][0]["text"] == "def main("
  assert capsys.readouterr().out == "def main( 10\nuser: What is a generator?\nassistant: "


def test_wrong_arguments(tmp_path, capsys, monkeypatch):
  monkeypatch.delenv(serve.KEY, raising=False)
  taken = socket.create_server(("127.0.0.1", 0))
  (tmp_path / "empty").mkdir()
  empty, port = str(tmp_path / "empty"), str(taken.getsockname()[1])
  for arguments, message in (
    ([empty, "--port", "0"], "is no Orbax checkpoint"),
    ([f"{tmp_path}/nowhere", "--port", "0"], "there is no model folder"),
    ([empty, "--host", "0.0.0.0"], f"set {serve.KEY} to a key"),
    ([empty, "--slots", "0"], "--slots 0: at least 1"),
    ([empty, "--timeout", "nan"], "--timeout nan: at least 1"),
    ([empty, "--port", "70000"], "--port 70000"),
    ([empty, "--cache", "4"], "--cache 4: at least 32"),
    ([empty, "--api-key", "schlüssel"], "use a key of ASCII characters"),
    ([empty, "--prot", "1"], "did you mean '--port'"),
  ):
    assert cli.main(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err
  assert cli.main(["serve", empty, "--port", port]) == 2
  assert f"--port {port}: cannot be used" in capsys.readouterr().err
  taken.close()
  monkeypatch.setenv(serve.KEY, "secret\n")
  assert serve.parse(["x", "--host", "::"]).api_key == "secret"
  assert serve.parse(["x", "--api-key", "shown"]).api_key == "shown"


BOUND_TWICE = """
import socket, sys
from serving_fakes import EchoBatcher, served
from maxghost import serve

with socket.socket() as other:
  other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  other.bind(("127.0.0.1", 0))
  serve._open = lambda args: (other.listen(), served(EchoBatcher()))[1]
  sys.exit(serve.main(["model", "--port", str(other.getsockname()[1])]))
"""


def test_of_two_servers_that_start_on_one_port_the_later_says_so():
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT.parent, Path(__file__).parent)))}
  ended = subprocess.run([sys.executable, "-c", BOUND_TWICE], capture_output=True, text=True, env=environment)
  assert ended.returncode == 2 and re.fullmatch(r"maxghost: --host 127.0.0.1 --port \d+: cannot .*\n", ended.stderr)


def test_a_model_whose_tokenizer_drops_spaces_is_served(tmp_path, monkeypatch):
  """As SentencePiece does: a space alone has no token, and without add_bos such a prompt has none."""

  class Words(tokenizers.ByteTokenizer):
    def encode(self, texts):
      return super().encode([text.strip() for text in texts])

  def loaded(*_):
    raise LookupError("it goes on to the weights")

  found = load_model.ModelPlace(tmp_path, None, None), tiny.make_config(add_bos=False)
  monkeypatch.setattr(load_model, "find", lambda *_: found)
  monkeypatch.setattr(load_model, "load", loaded)
  monkeypatch.setattr(tokenizers, "load_tokenizer", lambda *_: Words())
  with pytest.raises(LookupError):
    serve._open(serve.parse(["model"]))


def test_a_name_that_is_no_unicode_is_told_in_answers(tmp_path, monkeypatch):
  found = load_model.ModelPlace(tmp_path, None, None), tiny.make_config()
  engine = SimpleNamespace(load_params=list, warm_up=list, vocab_size=263)
  stubs = {"load_model.find": found, "load_model.load": ((), ()), "serve._sources": (None, "")}
  for name, stub in (stubs | {"serving.Engine": engine, "serving.Batcher": EchoBatcher()}).items():
    monkeypatch.setattr(f"maxghost.{name}", lambda *_, stub=stub, **__: stub)
  given = b"mod\xe8le".decode(errors="surrogateescape")  # of another encoding
  for arguments in ([f"{tmp_path}/{given}"], ["model", "--name", given]):
    assert serve._open(serve.parse(arguments)).name == "mod\ufffdle"


def test_an_adapter_is_served_without_the_index_of_its_base(tmp_path):
  (tmp_path / "index").mkdir()
  given = [str(tmp_path), "--adapter", "folder"]
  assert serve._sources(serve.parse(given)) == (None, "an index belongs to weights without --adapter")
  with pytest.raises(ConfigError, match="without --adapter"):
    serve._sources(serve.parse([*given, "--index", str(tmp_path / "index")]))


def test_a_second_signal_ends_requests_and_tells_their_clients(monkeypatch, capfd):
  """None waits for the grace of the first one."""
  batcher, over = EchoBatcher(pause=0.05), threading.Event()
  cancel, before = batcher.close, {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
  monkeypatch.setattr(batcher, "close", lambda timeout=0.0: (over.wait(timeout), cancel()))
  with socket.socket() as listener, ThreadPoolExecutor(1) as threads:
    listener.bind(("127.0.0.1", 0))

    def press_twice(port: int) -> int:
      until(lambda: "serving echo" in capfd.readouterr().out)
      with connected(port, max_retries=0) as client, pytest.raises(openai.APIError, match="the server is stopping"):
        stream = client.completions.create(model="echo", prompt="a" * 300, max_tokens=99, stream=True)
        for count, _ in enumerate(stream):
          if count < 2:
            os.kill(os.getpid(), signal.SIGINT)
      return count

    told = threads.submit(press_twice, listener.getsockname()[1])
    try:
      assert serve._run(serve.parse(["model"]), listener, served(batcher)) == 0
      assert told.result(5) < 90 and capfd.readouterr().err == "stopped\n"
    finally:
      over.set()
      for number, handler in before.items():
        signal.signal(number, handler)


def test_the_command_serves_a_run_and_stops_gracefully(tmp_path):
  """One process: greedy texts are those of the generator, and SIGTERM lets an answer end. A request of the model that
  does not end within the grace is told so."""
  cfg, run = tiny.make_config(), tmp_path / "run"
  run.mkdir()
  config.save(cfg, run / "config.yml")
  manager = CheckpointManager(run / "checkpoints", asynchronous=False)
  manager.save(3, {"model": to_tree(nnx.state(tiny.make_model(cfg)))}, {})
  manager.close()
  command = [sys.executable, "-m", "maxghost.serve", str(run), "--port", "0", "--slots", "2", "--cache", "200"]
  environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_NUM_CPU_DEVICES": "1"}
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
    try:
      line = process.stdout.readline()
      assert line.startswith("serving run: http://127.0.0.1:"), process.stderr.read()
      base = line.split()[2]
      with openai.OpenAI(base_url=f"{base}v1", api_key="none", max_retries=0) as client:
        about = client.models.retrieve("run")
        assert (about.max_model_len, about.sources, about.chat) == (200, False, False)
        assert f"--data NAME=GLOB --index {run / 'index'}" in about.no_sources
        asked = {"model": "run", "temperature": 0, "extra_body": {"return_token_ids": True}}
        got = client.completions.create(prompt=["ab", "xyz"], max_tokens=20, logprobs=1, **asked)
        graphdef, state = load_model.load(*load_model.find(run))
        with tiny.cheap_compilation():
          progress = Generator(graphdef, 64, stop_ids=[257]).generate(state, [[256, *b"ab"], [256, *b"xyz"]], 20)
        assert [choice.token_ids for choice in got.choices] == [progress.row(i).tolist() for i in range(2)]
        says = got.choices[0].logprobs
        assert [max(top.values()) for top in says.top_logprobs] == pytest.approx(says.token_logprobs)
        asked["extra_body"] |= {"ignore_eos": True}
        chunks = iter(client.completions.create(prompt="ab", max_tokens=190, stream=True, **asked))
        ids = next(chunks).choices[0].token_ids
        process.send_signal(signal.SIGTERM)
        ids += [one for chunk in chunks for one in chunk.choices[0].token_ids]
        assert len(ids) == 190
        assert process.wait(20) == 0
        with pytest.raises(openai.APIConnectionError):
          client.models.list()
      assert process.stderr.read().endswith("\nstopped\n")
    finally:
      process.kill()
