"""Conversations as documents: records read and checked, rendered, tokenized, and weighted where the assistant speaks.

The text of such a document is a JSON object: `messages` with roles, or `prompt` and `completion` (texts or messages),
and `tools` for a template that shows them.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from maxghost.config import ConfigError, did_you_mean
from maxghost.config.schema import DataConfig
from maxghost.data import chat, packing
from maxghost.data.chat import Template, TemplateError
from maxghost.data.packing import Encoded
from maxghost.data.tokenizers import BYTE, Tokenizer, check_specials
from maxghost.data.windows import Units, concatenated

ROLES = ("system", "developer", "user", "assistant", "tool")
_SYNONYMS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
_EXAMINED = 10_000  # documents read before the training starts, so that what is wrong with them is said then
Pieces = list[tuple[str | int, bool]]  # texts or ids of tokens, and whether they are trained


@dataclass(frozen=True)
class Conversation:
  """messages: with roles; empty for plain texts. first: the message from which on the assistant is trained.

  plain: prompt and completion as texts, which no template changes. tools: as the record has them.
  """

  messages: tuple[dict, ...] = ()
  first: int = 0
  plain: tuple[str, str] | None = None
  tools: Any = None


def read(text: bytes) -> Conversation:
  """The conversation of a document. Raises ValueError with the reason in one line."""
  record = json.loads(text)
  if any(mark in text.decode("utf-8") for mark in chat.MARKS):
    raise ValueError("it holds one of the private characters U+F0000 and U+F0001")
  tools = record.get("tools")
  tools = json.loads(tools) if isinstance(tools, str) else tools or None
  if "messages" in record:
    return _checked(Conversation(_messages(record["messages"], "messages"), 0, None, tools))
  prompt, completion = (record.get(name) for name in ("prompt", "completion"))
  if isinstance(prompt, str) and isinstance(completion, str):
    if not completion:
      raise ValueError("the completion is empty; there is nothing to train on")
    return Conversation(plain=(prompt, completion))
  if isinstance(prompt, str) or isinstance(completion, str):
    raise ValueError("prompt and completion must both be texts, or both lists of messages")
  before = _messages(prompt, "prompt")
  return _checked(Conversation(before + _messages(completion, "completion"), len(before), None, tools))


def _messages(given: Any, name: str) -> tuple[dict, ...]:
  if not isinstance(given, list) or not given:
    raise ValueError(f"{name} is no list of messages")
  return tuple(_message(one, f"{name}[{number}]") for number, one in enumerate(given))


def _message(given: Any, name: str) -> dict:
  """A message without its empty fields, its content one text."""
  if not isinstance(given, dict):
    raise ValueError(f"{name} is no object with role and content")
  message = {key: value for key, value in given.items() if value is not None}
  role, content = message.get("role"), message.get("content")
  if role not in ROLES:
    hint = f"; use {_SYNONYMS[role]}" if role in _SYNONYMS else did_you_mean(str(role), ROLES)
    raise ValueError(f"{name} has the role {role!r}; roles are {', '.join(ROLES)}{hint}")
  if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
    message["content"] = content = "".join(part["text"] for part in content)
  if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
    raise ValueError(f"{name} ({role}) has no text as its content")
  return message


def _checked(found: Conversation) -> Conversation:
  if not any(message["role"] == "assistant" for message in found.messages[found.first :]):
    raise ValueError("it has no turn of the assistant; there is nothing to train on")
  return found


def readable(text: bytes) -> bytes:
  """The text of a document as a reader wants it: a line `role: content` for each message, or the plain texts."""
  try:
    found = read(text)
  except ValueError:
    return text
  if found.plain:
    return "".join(found.plain).encode()
  lines = (f"{m['role']}: {m.get('content') or json.dumps(m.get('tool_calls'))}" for m in found.messages)
  return "\n".join(lines).encode()


@dataclass(frozen=True)
class Rendering:
  """How a conversation becomes tokens. template: None = `role: content` by lines, for tokenizers of bytes."""

  tokenizer: Tokenizer
  template: Template | None
  completion_only: bool
  add_bos: bool
  add_eos: bool

  @classmethod
  def of(cls, cfg: DataConfig, tokenizer: Tokenizer) -> "Rendering":
    """Raises ConfigError: an unreadable template."""
    template = chat.load(cfg, tokenizer)
    return cls(tokenizer, template, cfg.sft_train_on_completion_only, cfg.add_bos, cfg.add_eos)

  @functools.cached_property
  def settings(self) -> tuple[str, ...]:
    """What the tokens depend on besides the tokenizer."""
    template = self.template
    return (str(self.completion_only), *((template.source, repr(template.words)) if template else ()))

  def encode(self, text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Ids (int32[n]) and weights (float32[n]) of a document. Raises ValueError with the reason in one line."""
    found = read(text)
    if found.plain or self.template is None:
      ids, weights = self._joined(self._pieces(found))
    else:
      ids, weights = self._templated(self.template, found)
    if not weights[1:].any():
      name = self.template.name if self.template else "of the tokenizer"
      raise ValueError(f"chat template {name} gives no token to train on")
    return ids, weights if self.completion_only else np.ones_like(weights)

  def prompt(self, messages: Sequence[dict]) -> list[int]:
    """Ids up to where the assistant answers. Raises ValueError."""
    if self.template is None:
      answer = {"role": "assistant", "content": ""}
      return self._joined(self._turns([*messages, answer])[:-2])[0].tolist()  # without its text and end
    return self.tokenizer.encode_template(self.template.render(messages, prompt=True))[0].tolist()

  def _templated(self, template: Template, found: Conversation) -> tuple[np.ndarray, np.ndarray]:
    text, spans, prompts = template.spans(found.messages, found.tools, found.first)
    ids, places = self.tokenizer.encode_template(text)
    for prompt in prompts:
      own, _ = self.tokenizer.encode_template(prompt)
      if not np.array_equal(own, ids[: len(own)]):
        raise TemplateError(f"chat template {template.name}: the tokens of the prompt do not begin those of the whole")
    weights = np.zeros(len(ids), np.float32)
    for start, stop in spans:
      weights[(places[:, 0] < stop) & (places[:, 1] > start)] = 1
    return ids, weights

  def _pieces(self, found: Conversation) -> Pieces:
    """A prompt and its completion as they are, or turns by lines."""
    if found.plain is None:
      if found.tools:
        raise ValueError("it has tools, which need a chat template; give chat_template_path")
      return self._turns(found.messages, found.first)
    end = self.tokenizer.eos_id
    pieces: Pieces = [(found.plain[0], False), (found.plain[1], True)]
    return [*pieces, (end, True)] if self.add_eos and end is not None else pieces

  def _turns(self, messages: Sequence[dict], first: int = 0) -> Pieces:
    """Lines `role: content`; an answer ends with the end token. Raises ConfigError without a tokenizer of bytes."""
    if self.tokenizer.name != BYTE:
      raise ConfigError(f"the tokenizer {self.tokenizer.name} has no chat template; give chat_template_path")
    pieces: Pieces = []
    for number, message in enumerate(messages):
      role, content, before = message["role"], message.get("content"), "\n" if number else ""
      if content is None:
        raise ValueError(f"turn {number + 1} has tool_calls, which need a chat template; give chat_template_path")
      if role == "assistant":
        trained = number >= first
        pieces += [(f"{before}assistant:", False), (f" {content}", trained), (self.tokenizer.eos_id or 0, trained)]
      else:
        pieces.append((f"{before}{role}: {content}", False))
    return pieces

  def _joined(self, pieces: Pieces) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights of the pieces, each tokenized alone, behind the begin token."""
    check_specials(self.tokenizer, self.add_bos, self.add_eos)
    found = [np.array([self.tokenizer.bos_id], np.int32)] if self.add_bos else []
    trained = [False] * len(found)
    for piece, is_trained in pieces:
      found.append(np.array([piece]) if isinstance(piece, int) else self.tokenizer.encode([piece.encode("utf-8")])[0])
      trained.append(is_trained)
    return concatenated(found).astype(np.int32), np.repeat(np.array(trained, np.float32), [len(ids) for ids in found])


@dataclass(frozen=True, eq=False, kw_only=True)
class ConversationUnits(Units):
  """The conversations of a source; one that is longer than a row keeps its beginning."""

  rendering: Rendering

  def sides(self, text: bytes) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, weights) of what a document consists of. Raises ValueError with the reason in one line."""
    return [self.rendering.encode(text)]

  @property
  def settings(self) -> tuple[str, ...]:
    return self.rendering.settings

  def tokenized(self, documents: np.ndarray, texts: list[bytes], counts: dict[str, int]) -> Encoded:
    """As `Units.tokenized`; counts those that lose a part of what is trained as `cut`, and the others left out."""
    most, kept, found = self.layout.row_length + 1, [], []
    for index, text in zip(documents.tolist(), texts, strict=True):
      try:
        sides = self.sides(text)
        for _, weight in sides:
          if not weight[1:most].any():
            raise ValueError(
              f"its first answer begins at token {np.flatnonzero(weight)[0]}, behind max_target_length={most - 1}; use "
              "a longer row"
            )
      except ConfigError:
        raise
      except ValueError as error:
        if self.on_corrupt == "error":
          raise ConfigError(f"{self.source.place(index)}: {error}; or use on_corrupt=skip") from error
        counts["corrupt"] += 1
        counts["documents"] -= 1
        counts["bytes"] -= len(text)
        continue
      counts["cut"] += any(weight[most:].any() for _, weight in sides)
      kept.append(index)
      found.append([(ids[:most], weight[:most]) for ids, weight in sides])
    return self.joined(np.array(kept, np.int64), found)

  def joined(self, documents: np.ndarray, found: list[list[tuple[np.ndarray, np.ndarray]]], side: int = 0) -> Encoded:
    """One side of the documents, as `sides` gave them, end to end."""
    ids, weights = ([one[side][part] for one in found] for part in (0, 1))
    tokens = concatenated(ids).astype(packing.token_dtype(self.tokenizer.vocab_size))
    ends = np.cumsum([len(own) for own in ids], dtype=np.int64)
    return Encoded(tokens, ends, documents, None, weights=concatenated(weights).astype(np.float32))

  @functools.cached_property
  def examined(self) -> dict[str, int]:
    """The counts of the first documents to train on, so that what is wrong with them is said before the training."""
    return self.encode(np.arange(min(len(self.source), _EXAMINED)))[1]
