"""Conversations as documents: checked, rendered, tokenized, and weighted where the assistant speaks.

The text of such a document is a JSON object: `messages` with roles, ShareGPT's `conversations`, or `prompt` and
`completion` (texts or messages), and `tools` and `chat_template_kwargs` for the template. A pair of responses has
`chosen` and `rejected` (texts or messages) with the `prompt` of both; without one, it is the messages that both begin
with, else the tokens.
"""

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from maxghost.config import ConfigError, DataConfig, did_you_mean
from maxghost.config.plugins import REFERENCE_COLUMNS
from maxghost.data import chat
from maxghost.data.packing import Encoded, token_dtype
from maxghost.data.rewards import LARGEST
from maxghost.data.sources.base import refusal
from maxghost.data.tokenizers import BYTE, Tokenizer, check_specials, num_shared
from maxghost.data.windows import Units, concatenated

ROLES = ("system", "developer", "user", "assistant", "tool")
_SYNONYMS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
SIDES = ("chosen", "rejected")
_EXAMINED = 10_000  # documents read before the training starts, so that what is wrong with them is said then
Pieces = list[tuple[str | list[int] | np.ndarray, bool]]  # texts or ids of tokens, and whether they are trained


@dataclass(frozen=True)
class Conversation:
  """What a document of the kind `conversations` says."""

  messages: tuple[dict, ...] = ()
  first: int = 0  # the message from which on the assistant is trained
  tools: Any = None
  words: tuple[tuple[str, Any], ...] = ()  # names that the template knows besides its own
  plain: tuple[str, str] | None = None  # prompt and completion, in place of messages; no template is applied


def read(text: bytes) -> Conversation:
  """The conversation of a document. Raises ValueError with the reason in one line."""
  record = json.loads(text)
  tools, prompt, completion = (record.get(name) for name in ("tools", "prompt", "completion"))
  if not isinstance(words := record.get("chat_template_kwargs") or {}, dict):
    raise ValueError("its chat_template_kwargs are no object")
  turns = next((name for name in ("messages", "conversations") if name in record), "")
  if isinstance(prompt, str) and isinstance(completion, str) and not turns:
    if not completion:
      raise ValueError("the completion is empty; there is nothing to train on")
    return Conversation(plain=(prompt, completion))
  if turns or not {"prompt", "completion"} & record.keys():
    before, messages = (), messages_of(record.get(turns), turns or "messages")
  elif isinstance(completion, str):
    raise ValueError("its completion is a text, but its prompt is none; write both as texts or as lists of messages")
  else:
    messages, before = messages_of(completion, "completion"), messages_of(prompt, "prompt")
  if not any(message["role"] == "assistant" for message in messages):
    raise ValueError("it has no turn of the assistant; there is nothing to train on")
  tools = json.loads(tools) if isinstance(tools, str) else tools
  return Conversation(before + messages, len(before), tools, tuple(words.items()))


def messages_of(given: Any, name: str) -> tuple[dict, ...]:
  """Messages without their empty fields, the content of each one text. Raises ValueError naming the wrong one."""
  if not isinstance(given, list) or not given:
    raise ValueError(f"{name} is no list of messages" if given is not None else f"it has no {name}")
  return tuple(_message(one, f"{name}[{number}]") for number, one in enumerate(given))


def _message(given: Any, name: str) -> dict:
  if not isinstance(given, dict):
    raise ValueError(f"{name} is no object with role and content")
  message = {key: value for key, value in given.items() if value is not None}
  if "from" in message and "role" not in message:  # ShareGPT's form
    role = message.pop("from")
    message |= {"role": _SYNONYMS.get(str(role), role), "content": message.pop("value", None)}
  role, content = message.get("role"), message.get("content")
  if role not in ROLES:
    hint = f"; use {_SYNONYMS[str(role)]}" if str(role) in _SYNONYMS else did_you_mean(str(role), ROLES)
    raise ValueError(f"{name} has the role {role!r:.60}; roles are {', '.join(ROLES)}{hint}")
  if isinstance(content, list):
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
      message["content"] = content = "".join(map(str, texts))
  if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
    raise ValueError(f"{name} ({role}) has no text as its content")
  return message


@dataclass(frozen=True)
class Rendering:
  """How conversations become tokens. template: None = lines `role: content`, for the tokenizer of bytes."""

  tokenizer: Tokenizer
  template: chat.Template | None
  completion_only: bool
  add_bos: bool
  add_eos: bool

  @classmethod
  def of(cls, cfg: DataConfig, tokenizer: Tokenizer) -> "Rendering":
    template = chat.load(cfg.chat_template_path, tokenizer)
    return cls(tokenizer, template, cfg.sft_train_on_completion_only, cfg.add_bos, cfg.add_eos)

  def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Ids (int32[n]) and weights (float32[n]) of a document. Raises ValueError with the reason in one line."""
    found = read(text)
    if found.plain:
      ids, weights = self._joined(self._plain(*found.plain))
    elif template := self.template:
      source = template.source if found.tools is None else template.with_tools or template.source
      ids, weights = self._templated(replace(template, source=source, words=template.words + found.words), found)
    elif found.tools or found.words:
      name = "tools" if found.tools else "chat_template_kwargs"
      raise ValueError(f"it has {name}, which need a chat template; give chat_template_path")
    else:
      ids, weights = self._joined(self._turns(found.messages, found.first))
    if not weights[1:].any():
      what = f"chat template {self.template.name}" if self.template else f"the tokenizer {self.tokenizer.name}"
      raise ValueError(f"{what} gives no token to train on")
    return ids, weights if self.completion_only else np.ones_like(weights)

  def prompt(self, question: str | Sequence[dict]) -> list[int]:
    """Ids of a question or of messages, up to where the assistant answers. Raises ValueError if the template fails."""
    asked = [{"role": "user", "content": question}] if isinstance(question, str) else [*question]
    if self.template is None:  # up to the space before the answer, without its end
      return self._joined(self._turns([*asked, {"role": "assistant", "content": ""}])[:-1])[0].tolist()
    return self.tokenizer.encode_template(self.template.render(asked, prompt=True))[0].tolist()

  def end_ids(self) -> set[int]:
    """The special tokens behind the text of an answer; those before it are no end. Raises ValueError."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "maxghost"}]
    if self.template is None:
      return {*map(int, self._turns(turns)[-1][0])}
    ids, places = self.tokenizer.encode_template(text := self.template.render(turns))
    if (start := text.rfind("maxghost")) < 0:
      raise ValueError(f"chat template {self.template.name} leaves out what the assistant says")
    return {n for n in ids[places[:, 0] >= start].tolist() if not self.tokenizer.piece(n)}

  def _templated(self, template: chat.Template, found: Conversation) -> tuple[np.ndarray, np.ndarray]:
    text, spans, prompts = template.spans(found.messages, found.tools, found.first)
    ids, places = self.tokenizer.encode_template(text)
    for own in (self.tokenizer.encode_template(prompt)[0] for prompt in prompts):
      if not np.array_equal(own, ids[: len(own)]):
        raise ValueError(f"chat template {template.name}: the tokens of the prompt do not begin those of the whole")
    weights = np.zeros(len(ids), np.float32)
    for start, stop in spans:
      weights[(places[:, 0] < stop) & (places[:, 1] > start)] = 1
    return ids, weights

  def _plain(self, prompt: str, completion: str) -> Pieces:
    """A prompt and its completion; where both are tokenized together, they are split as in TRL."""
    own, rest = self.tokenizer.encode_pair(prompt.encode(), completion.encode())
    pieces: Pieces = [(own, False), (rest, True)]
    if self.add_eos:
      pieces.append(([self.tokenizer.eos_id or 0], True))
    return pieces

  def _turns(self, messages: Sequence[dict], first: int = 0) -> Pieces:
    """Lines `role: content`; an answer ends with the end token. Raises ConfigError for a tokenizer of words."""
    if self.tokenizer.name != BYTE:
      raise ConfigError(f"the tokenizer {self.tokenizer.name} has no chat template; give chat_template_path")
    pieces: Pieces = []
    for number, message in enumerate(messages):
      role, content, trained = message["role"], message.get("content"), number >= first
      if content is None:
        raise ValueError(f"turn {number + 1} has tool_calls, which need a chat template; give chat_template_path")
      begin = f"\n{role}:" if number else f"{role}:"
      if role == "assistant":
        pieces += [(begin, False), (f" {content}", trained), ([self.tokenizer.eos_id or 0], trained)]
      else:
        pieces.append((f"{begin} {content}", False))
    return pieces

  def _joined(self, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of the pieces, each tokenized alone, behind the begin token."""
    check_specials(self.tokenizer, self.add_bos, self.add_eos)
    if self.add_bos:
      pieces = [([self.tokenizer.bos_id or 0], False), *pieces]
    ids = [self.tokenizer.encode([p.encode()])[0] if isinstance(p, str) else np.asarray(p) for p, _ in pieces]
    weights = np.repeat(np.array([trained for _, trained in pieces], np.float32), list(map(len, ids)))
    return np.concatenate(ids).astype(np.int32), weights


@dataclass(frozen=True, eq=False, kw_only=True)
class ConversationUnits(Units):
  """The conversations of a source; one that is longer than a row keeps its beginning. answer_length: tokens that the
  row of a prompt must have left for the model's own answer."""

  rendering: Rendering
  answer_length: int = 0

  def shown(self, text: bytes) -> bytes:
    """A line `role: content` for each message, or the plain texts."""
    try:
      found = read(text)
    except (ValueError, RecursionError):
      return text
    calls = [json.dumps(m["tool_calls"]) if m.get("tool_calls") else "" for m in found.messages]
    lines = [f"{m['role']}: {m.get('content') or call}" for m, call in zip(found.messages, calls, strict=True)]
    return "".join(found.plain or "\n".join(lines)).encode()

  def sides(self, text: bytes) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, weights) of what a document consists of. Raises ValueError with the reason in one line."""
    ids, weights = self.rendering.encode(text)
    if self.answer_length:
      size, most = int(weights.argmax()), self.layout.row_length + 1 - self.answer_length
      if not size:
        raise ValueError("its prompt has no token to continue; write something, or use add_bos=true")
      if size > most:
        raise ValueError(f"its prompt has {size} tokens, max_target_length less max_completion_length leaves it {most}")
    return [(ids, weights)]

  @property
  def settings(self) -> tuple[str, ...]:
    made = self.rendering.template
    own = (made.source, repr(made.words), made.with_tools) if made else ()
    return (str(self.rendering.completion_only), *filter(None, own))

  def tokenized(self, documents: np.ndarray, texts: list[bytes], counts: dict[str, int]) -> Encoded:
    """As `Units.tokenized`; cut: those that lose a part of what is trained, spelled: plain ones with special tokens."""
    most, indices, found = self.layout.row_length + 1, [], []
    specials = re.compile(b"|".join(re.escape(name.encode()) for name in self.tokenizer.specials) or b"(?!)")
    for index, text in zip(documents.tolist(), texts, strict=True):
      try:
        sides = self.sides(text)
        if not all(weight[1:most].any() for _, weight in sides):
          raise ValueError(f"its first answer begins behind max_target_length={most - 1}; use a longer row")
      except ConfigError:
        raise
      except (ValueError, RecursionError) as error:
        if self.on_corrupt != "skip":
          raise refusal(f"{self.source.place(index)}: {error}", self.on_corrupt) from error
        for name, change in (("corrupt", 1), ("documents", -1), ("bytes", -len(text))):
          counts[name] += change
        continue
      counts["cut"] += any(weight[most:].any() for _, weight in sides)
      counts["spelled"] += not re.search(rb'"(role|from)": ', text) and bool(specials.search(text))
      indices.append(index)
      found.append([(ids[:most], weight[:most]) for ids, weight in sides])
    return self.joined(np.array(indices, np.int64), found)

  def joined(self, documents: np.ndarray, found: list[list[tuple[np.ndarray, np.ndarray]]], side: int = 0) -> Encoded:
    """One side of the documents, as `sides` gave them, end to end."""
    ids, weights = ([one[side][part] for one in found] for part in (0, 1))
    tokens = concatenated(ids).astype(token_dtype(self.tokenizer.vocab_size))
    ends = np.cumsum(list(map(len, ids)), dtype=np.int64)
    return Encoded(tokens, ends, documents, None, weights=concatenated(weights).astype(np.float32))

  @functools.cached_property
  def examined(self) -> dict[str, int]:
    return self.encode(np.arange(min(len(self.source), _EXAMINED)))[1]


@dataclass(frozen=True, eq=False, kw_only=True)
class PairUnits(ConversationUnits):
  """The pairs of a source. has_reference: whether records have the log-probabilities of the reference too."""

  has_reference: bool = False

  def sides(self, text: bytes) -> list[tuple[np.ndarray, np.ndarray]]:
    record = json.loads(text)
    prompt, most = record.get("prompt"), self.layout.row_length + 1
    responses = [record.get(name) for name in SIDES]
    for name, response in zip(SIDES, responses, strict=True):
      if not response or not isinstance(response, str | list):
        raise ValueError(f"it has no {name} response, a text or a list of messages")
    if len({type(given) for given in (*responses, prompt) if given is not None}) > 1:
      raise ValueError("its prompt, chosen and rejected are not all texts or all lists of messages")
    has_turns = prompt is None and not isinstance(responses[0], str)
    if has_turns and 0 < (first := num_shared(*responses)) < min(map(len, responses)):
      prompt, responses = responses[0][:first], [response[first:] for response in responses]
    name = "messages" if has_turns and prompt is None else "completion"
    wholes = [record | {"prompt": prompt or "", name: response} for response in responses]
    found = [self.rendering.encode(json.dumps(whole, ensure_ascii=False).encode()) for whole in wholes]
    (chosen, _), (rejected, _) = found
    if np.array_equal(chosen[:most], rejected[:most]):
      where = "" if np.array_equal(chosen, rejected) else f" up to max_target_length={most - 1}"
      raise ValueError(f"its chosen and rejected responses are the same{where}")
    if prompt is None:
      shared = num_shared(chosen, rejected)
      found = [(ids, np.where(np.arange(len(ids)) < shared, 0, weight)) for ids, weight in found]
    elif isinstance(prompt, str):  # a response whose first token holds the prompt's end begins before the other one
      first = min(int(weight.argmax()) for _, weight in found)
      found = [(ids, (np.arange(len(ids)) >= first).astype(np.float32)) for ids, _ in found]
    for name, (ids, _) in zip(REFERENCE_COLUMNS, found, strict=True) if self.has_reference else ():
      if not isinstance(value := record.get(name), int | float) or not abs(value) <= LARGEST:
        raise ValueError(f"its {name} is {value!r:.60}, no finite number")
      if len(ids) > most:
        raise ValueError(f"its {name} is of the whole response, which max_target_length={most - 1} cuts")
    for name, (_, weight) in zip(SIDES, found, strict=True):
      if not weight[1:].any():
        raise ValueError(f"its {name} response is only how the other one begins; end responses with add_eos=true")
    return found

  def joined(self, documents, found, side: int = 0) -> Encoded:
    chosen, rejected = (super(PairUnits, self).joined(documents, found, number) for number in (0, 1))
    if self.has_reference:
      records = [json.loads(text or b"{}") for text in self.read(documents)]
      known = [np.array([record[name] for record in records], np.float32) for name in REFERENCE_COLUMNS]
      chosen, rejected = replace(chosen, reference=known[0]), replace(rejected, reference=known[1])
    return replace(chosen, partner=rejected)
