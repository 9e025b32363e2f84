"""Bodies of requests to the server, checked: OpenAI's names and error format, and a few names of other servers."""

import dataclasses
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxghost.config.arguments import SEEDS
from maxghost.config.values import ConfigError, did_you_mean, printable
from maxghost.data.conversations import Rendering, messages_of
from maxghost.data.tokenizers import Tokenizer
from maxghost.serving.batcher import Batcher, Request
from maxghost.serving.samples import utf8
from maxghost.serving.sampling import COLDEST, Sampling


class Refused(Exception):
  """An answer in OpenAI's error format. param: what is wrong in the body. headers: of the answer."""

  def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400, **headers):
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    param = printable(param) if param else None  # a client's own name may hold what UTF-8 cannot
    self.body = {"error": {"message": printable(message), "type": kind, "param": param, "code": code}}
    self.status, self.headers = status, headers


@dataclasses.dataclass(frozen=True)
class Served:
  """A model and what it can do. encode: ids of a text as a prompt; raises ConfigError. size: most positions of a prompt
  and its answer. rendering: of conversations; None = no chat, because of `no_chat`. sources: (ids of a prompt, ids of
  its answer, how many) -> JSON object; None = none, because of `no_sources`. chats: the page asks questions; otherwise
  for the beginning of a text."""

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


# name: (kind, value where none is given, least, most)
_SAMPLING = {"temperature": (float, 1.0, 0, 100), "top_p": (float, 1.0, 0, 1), "top_k": (int, 0),
             "min_p": (float, 0.0, 0, 1), "repetition_penalty": (float, 1.0, 0.01, 100)}  # fmt: skip
_COMMON = _SAMPLING | {"model": (str, None), "n": (int, 1, 1, 128), "max_tokens": (int, None, 1), "stop": (object, ""),
                       "seed": (int, None, *SEEDS), "stream": (bool, False), "stream_options": (dict, {}),
                       "user": (str, None), "ignore_eos": (bool, False), "return_token_ids": (bool, False)}  # fmt: skip
COMPLETION = _COMMON | {"prompt": (object, None), "logprobs": (int, None, 0, 5)}
CHAT = _COMMON | {"messages": (list, None), "logprobs": (bool, None), "top_logprobs": (int, 0, 0, 20)}
CHAT |= {"max_completion_tokens": (int, None, 1)}
SOURCES = {"model": (str, None), "prompt": (object, None), "messages": (list, None), "answer": (object, None)}
SOURCES |= {"top": (int, 10, 1, 100)}
# parameters of OpenAI's API that this server does not offer, with the value that has no effect
_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "echo": False, "audio": None,
            "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "metadata": {},
            "suffix": "", "functions": [], "function_call": "none", "parallel_tool_calls": True, "service_tier": "auto",
            "modalities": ["text"], "prediction": None, "reasoning_effort": None, "verbosity": None,
            "web_search_options": None, "moderation": None, "safety_identifier": None, "prompt_cache_key": None,
            "prompt_cache_retention": None, "prompt_cache_options": None}  # fmt: skip
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list",
          dict: "an object"}  # fmt: skip


def read(body: bytes, fields: Mapping[str, tuple], model: str) -> dict[str, Any]:
  """The values of all `fields` in a body for `model`. Raises Refused."""
  try:
    given = json.loads(body)
  except (ValueError, RecursionError) as error:
    raise Refused(f"the body is no JSON: {error}") from error
  if not isinstance(given, dict):
    raise Refused("the body is no JSON object")
  values = {name: field[1] for name, field in fields.items()}
  for name, value in given.items():
    if name in fields:
      values[name] = values[name] if value is None else _checked(name, value, *fields[name])
    elif name not in _NEUTRAL:
      hint = did_you_mean(name, fields, "there are")
      raise Refused(f"unknown parameter {_short(name)}{hint}", name[:64], "unknown_parameter")
    elif value not in (None, _NEUTRAL[name]):
      raise Refused(f"{name}={_short(value)} is not offered; leave {name} out", name, "unsupported_parameter")
  check_model(values["model"], model)
  return values


def check_model(name: str | None, model: str) -> None:
  """Raises Refused if a client names another model than `model`."""
  if name not in (None, model):
    hint = did_you_mean(name, [model]) or f"; this server has '{model}'"
    raise Refused(f"the model {_short(name)} does not exist{hint}", "model", "model_not_found", 404)


def _checked(name: str, value: Any, kind: type, _, least: float = -math.inf, most: float = math.inf) -> Any:
  number = kind in (int, float)
  is_other = number and (isinstance(value, bool) or value != value)  # NaN is no number
  if is_other or not isinstance(value, (int, float) if kind is float else kind):
    raise Refused(f"{name}={_short(value)} is not {_KINDS[kind]}", name)
  if number and not least <= value <= most:
    limits = f"at least {least}" if most == math.inf else f"at least {least}, at most {most}"
    raise Refused(f"{name}={_short(value)}: {limits}", name)
  return value


def _short(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=False)
  return text if len(text) <= 80 else f"{text[:80]}..."


def prompts_of(values: dict[str, Any], served: Served) -> list[list[int]]:
  """The ids of each prompt of a body. Raises Refused, also for more texts than can ever wait at once."""
  given, n, most = values.get("prompt"), values.get("n", 1), served.batcher.queue_limit
  texts = given if isinstance(given, list) and given and type(given[0]) is not int else [given]
  if (count := len(texts)) * n > most:
    prompts = f"{count} prompts" if count > 1 else "1 prompt"
    said = f"{prompts}, n={n}: at most {most} texts in all; send them in several requests"
    raise Refused(f"{said}, or start the server with a larger --queue", "prompt" if count > 1 else "n")
  if values.get("messages") is not None:
    if served.rendering is None:
      raise Refused(f"{served.no_chat}; /v1/completions continues texts", "messages", "no_chat_template")
    try:
      return [served.rendering.prompt(messages_of(values["messages"], "messages"))]
    except ValueError as error:
      raise Refused("half a surrogate pair" if isinstance(error, UnicodeError) else str(error), "messages") from error
  if given is None:
    name = "prompt" if "prompt" in values else "messages"
    raise Refused(f"{name} is missing", name, "missing_required_parameter")
  return [ids_of(one, "prompt", served) for one in texts]


def ids_of(given: Any, name: str, served: Served) -> list[int]:
  """The ids of a text, or those given. Raises Refused."""
  if isinstance(given, str):
    try:
      return served.encode(given) if name == "prompt" else served.tokenizer.encode_behind(utf8(given, name)).tolist()
    except ConfigError as error:
      raise Refused(str(error), name) from error
  if not isinstance(given, list) or not all(type(one) is int and 0 <= one < served.vocab_size for one in given):
    raise Refused(f"{name}={_short(given)} is neither text nor a list of ids from 0 to {served.vocab_size - 1}", name)
  return given


def requests_of(values: dict[str, Any], prompts: Sequence[Sequence[int]], served: Served) -> list[Request]:
  """`n` requests for each prompt. Raises Refused."""
  chat, longest, most = "messages" in values, max(map(len, prompts)), values["max_tokens"]
  if chat and None not in (most, other := values["max_completion_tokens"]) and most != other:
    raise Refused(f"max_tokens={_short(most)}, max_completion_tokens={_short(other)} differ; give one", "max_tokens")
  most = values.get("max_completion_tokens") or most
  if longest + (most or 1) > served.size:
    said = f"{longest} tokens of the prompt and {_short(most or 1)} of the answer are more than the {served.size} "
    said += "positions of the cache; ask for less, or start the server with a larger --cache"
    raise Refused(said, "messages" if chat else "prompt", "context_length_exceeded")
  stop = values["stop"] if isinstance(values["stop"], list) else [values["stop"]]
  if not all(isinstance(x, str) and x.encode(errors="ignore").decode() == x for x in stop) or len(stop) > 16:
    raise Refused(f"stop={_short(values['stop'])} is neither text nor a list of at most 16", "stop")
  options = values["stream_options"]
  if options.keys() - {"include_usage"} or not all(isinstance(value, bool) for value in options.values()):
    raise Refused(f"stream_options={_short(options)}: it takes include_usage, true or false", "stream_options")
  if options and not values["stream"]:
    raise Refused("stream_options needs stream=true", "stream_options")
  if chat and values["top_logprobs"] and not values["logprobs"]:
    raise Refused("top_logprobs needs logprobs=true", "top_logprobs")
  if is_greedy := values["temperature"] < COLDEST:
    values = values | {"temperature": 1.0}
  try:
    sampling = Sampling(**{name: values[name] for name in _SAMPLING})
  except ConfigError as error:
    raise Refused(str(error), str(error).partition("=")[0]) from error
  if is_greedy:  # the likeliest token, which survives every cut
    sampling = Sampling(repetition_penalty=sampling.repetition_penalty)
  seeds = [random.getrandbits(30) if values["seed"] is None else values["seed"] for _ in prompts]
  stop, tops = tuple(filter(None, stop)), values["top_logprobs"] if chat else values["logprobs"] or 0
  lengths = [most or min(served.size - len(prompt), served.size if chat else 16) for prompt in prompts]
  return [
    Request(tuple(ids), new, sampling, seed + i, stop, tops, values["ignore_eos"])
    for ids, new, seed in zip(prompts, lengths, seeds, strict=True)
    for i in range(values["n"])
  ]
