"""Bodies of requests to the server, checked: OpenAI's names and error format, and a few names of other servers."""

import dataclasses
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxghost.config import ConfigError, did_you_mean
from maxghost.data.conversations import Rendering, messages_of
from maxghost.data.tokenizers import Tokenizer
from maxghost.serving.batcher import Batcher, Request
from maxghost.serving.sampling import Sampling


class Refused(Exception):
  """An answer in OpenAI's error format. param: what is wrong in the body. headers: of the answer."""

  def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400, **headers):
    super().__init__(message)
    self.status, self.headers = status, headers
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass(frozen=True)
class Served:
  """A model and what it can do. encode: ids of a text as a prompt; it raises ConfigError. size: most positions of
  prompt and answer together. vocab_size: of the model. rendering: of conversations; None where there is no template, as `no_chat` says.
  sources: (ids of a prompt, ids of its answer, how many) -> JSON object; None where there are none, as `no_sources`
  says. chats: whether the page asks questions, rather than for the beginning of a text."""

  name: str
  batcher: Batcher
  tokenizer: Tokenizer
  encode: Callable[[str], list[int]]
  size: int
  vocab_size: int
  rendering: Rendering | None = None
  no_chat: str = ""
  sources: Callable[[Sequence[int], Sequence[int], int], dict] | None = None
  no_sources: str = ""
  chats: bool = False


class _Field(NamedTuple):
  kind: type
  default: Any = None
  least: float = -math.inf
  most: float = math.inf


_COMMON = {
  "model": _Field(str), "n": _Field(int, 1, 1, 128), "stream": _Field(bool, False), "stream_options": _Field(dict),
  "max_tokens": _Field(int, None, 1), "stop": _Field(object), "seed": _Field(int, None, -(2**63), 2**63 - 1),
  "temperature": _Field(float, 1.0), "top_p": _Field(float, 1.0), "top_k": _Field(int, 0), "min_p": _Field(float, 0.0),
  "repetition_penalty": _Field(float, 1.0), "ignore_eos": _Field(bool, False),
  "return_token_ids": _Field(bool, False), "user": _Field(str),
}  # fmt: skip
COMPLETION = _COMMON | {"prompt": _Field(object), "logprobs": _Field(int, None, 0, 5)}
CHAT = _COMMON | {
  "messages": _Field(list), "logprobs": _Field(bool, False), "top_logprobs": _Field(int, 0, 0, 20),
  "max_completion_tokens": _Field(int, None, 1),
}  # fmt: skip
SOURCES = {"model": _Field(str), "prompt": _Field(object), "messages": _Field(list), "answer": _Field(object)}
SOURCES |= {"top": _Field(int, 10, 1, 100)}
# what OpenAI's API has and this server has not: the value that asks for nothing
_NEUTRAL = {
  "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "echo": False, "suffix": "",
  "tools": [], "tool_choice": "none", "functions": [], "response_format": {"type": "text"}, "modalities": ["text"],
  "store": False, "metadata": {}, "service_tier": "auto", "parallel_tool_calls": True,
}  # fmt: skip
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list", dict: "an object"}


def read(body: bytes, fields: Mapping[str, _Field], name: str) -> dict[str, Any]:
  """The values of all `fields` in a body for the model `name`. Raises Refused."""
  try:
    given = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise Refused(f"the body is no JSON: {error}") from error
  if not isinstance(given, dict):
    raise Refused("the body is no JSON object")
  values = {name: field.default for name, field in fields.items()}
  for key, value in given.items():
    field = fields.get(key)
    if field is None and key in _NEUTRAL:
      if value is not None and value != _NEUTRAL[key]:
        raise Refused(f"{key}={_short(value)} is not offered; leave {key} out", key, "unsupported_parameter")
    elif field is None:
      hint = did_you_mean(key, fields) or f"; there are {', '.join(fields)}"
      raise Refused(f"unknown parameter {_short(key)}{hint}", key[:64], "unknown_parameter")
    elif value is not None:
      values[key] = _checked(key, value, field)
  if values["model"] not in (None, name):
    wanted = _short(values["model"])
    hint = did_you_mean(values["model"], [name]) or f"; this server has '{name}'"
    raise Refused(f"the model {wanted} does not exist{hint}", "model", "model_not_found", 404)
  return values


def _checked(key: str, value: Any, field: _Field) -> Any:
  kinds = (int, float) if field.kind is float else field.kind
  if not isinstance(value, kinds) or (isinstance(value, bool) and field.kind in (int, float)):
    raise Refused(f"{key}={_short(value)} is not {_WORDS[field.kind]}", key)
  if field.kind in (int, float) and not field.least <= value <= field.most:
    limits = [f"{word} {limit}" for word, limit in (("at least", field.least), ("at most", field.most)) if abs(limit) < 2**62]
    raise Refused(f"{key}={_short(value)}: {', '.join(limits) or 'within 64 bits'}", key)
  return value


def _short(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=False)
  return text if len(text) <= 80 else f"{text[:80]}..."


def prompts_of(values: dict[str, Any], served: Served) -> list[list[int]]:
  """The ids of each prompt of a body. Raises Refused."""
  if values.get("messages") is not None:
    if served.rendering is None:
      raise Refused(f"{served.no_chat}; /v1/completions continues texts", "messages", "no_chat_template")
    try:
      return [served.rendering.prompt(messages_of(values["messages"], "messages"))]
    except ValueError as error:
      raise Refused(str(error), "messages") from error
  given = values.get("prompt")
  if given is None:
    missing = "messages" if "prompt" not in values else "prompt"
    raise Refused(f"{missing} is missing", missing, "missing_required_parameter")
  several = isinstance(given, list) and (not given or not isinstance(given[0], int))
  return [ids_of(one, "prompt", served) for one in (given if several else [given])]


def ids_of(given: Any, name: str, served: Served) -> list[int]:
  """The ids of a text, or those given. Raises Refused."""
  if isinstance(given, str):
    try:
      return served.encode(given) if name == "prompt" else served.tokenizer.encode([given.encode()])[0].tolist()
    except (ConfigError, UnicodeEncodeError) as error:
      raise Refused(str(error), name) from error
  if isinstance(given, list) and given and all(type(one) is int for one in given):
    if not 0 <= min(given) <= max(given) < served.vocab_size:
      raise Refused(f"{name} has ids outside of 0 to {served.vocab_size - 1}", name)
    return given
  raise Refused(f"{name}={_short(given)} is neither a text nor a list of token ids", name)


def requests_of(values: dict[str, Any], prompts: Sequence[Sequence[int]], served: Served) -> list[Request]:
  """`n` requests for each prompt. Raises Refused."""
  chat, longest = "messages" in values, max(map(len, prompts), default=0)
  most = values["max_tokens"]
  if chat and None not in (most, other := values["max_completion_tokens"]) and most != other:
    raise Refused(f"max_tokens={most} and max_completion_tokens={other} differ; give one", "max_tokens")
  most = values.get("max_completion_tokens") or most
  if longest + (most or 1) > served.size:
    asked = f"{longest} tokens of the prompt and {most or 1} of the answer are more than the {served.size} positions"
    way = "shorten them, or start the server with a larger --cache"
    raise Refused(f"{asked} of the cache; {way}", "messages" if chat else "prompt", "context_length_exceeded")
  stop = values["stop"] if isinstance(values["stop"], list) else [values["stop"] or ""]
  if not all(isinstance(text, str) for text in stop) or len(stop) > 16:
    raise Refused(f"stop={_short(values['stop'])} is neither a text nor a list of at most 16", "stop")
  names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
  chosen = {name: values[name] for name in names}
  if chosen["temperature"] == 0:  # the likeliest token survives every cut
    chosen |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
  try:
    sampling = Sampling(**chosen)
  except ConfigError as error:
    raise Refused(str(error), next((name for name in names if str(error).startswith(name)), None)) from error
  seed = random.getrandbits(30) if values["seed"] is None else values["seed"]
  shared = {
    "sampling": sampling, "stop": tuple(filter(None, stop)), "ignore_stop_ids": values["ignore_eos"],
    "logprobs": values["top_logprobs"] if chat else values["logprobs"] or 0,
  }  # fmt: skip
  if chat and values["top_logprobs"] and not values["logprobs"]:
    raise Refused("top_logprobs needs logprobs=true", "top_logprobs")
  return [
    Request(tuple(prompt), most or (served.size - len(prompt) if chat else min(16, served.size - len(prompt))),
            seed=seed + i, **shared)
    for prompt in prompts for i in range(values["n"])
  ]  # fmt: skip
