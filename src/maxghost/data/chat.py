"""Chat templates: a conversation as text, and the places in the text where the assistant speaks.

A template is a Jinja text as transformers reads it. It is untrusted code: it runs in Jinja's sandbox and sees plain
JSON values only.
"""

import dataclasses
import datetime
import functools
import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxghost.config import ConfigError
from maxghost.config.schema import DataConfig
from maxghost.data.sources.base import import_package
from maxghost.data.tokenizers import Tokenizer

FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
MARKS = "\U000f0000", "\U000f0001"  # around what a `{% generation %}` block gives; private characters
_WORDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which messages hold it
Spans = list[tuple[int, int]]  # begin and end of parts of a text
_OWN_SPANS = "give one with {% generation %} around what the assistant says, by chat_template_path"


class TemplateError(ValueError):
  """A template that does not render a conversation, or not so that the assistant's part can be told; one line."""


@dataclasses.dataclass(frozen=True)
class Template:
  """name: where the text `source` is from. words: the special tokens that templates know by name, {name: token}."""

  name: str
  source: str
  words: tuple[tuple[str, str], ...] = ()

  @property
  def is_marked(self) -> bool:
    """Whether the template says itself what the assistant says."""
    return "endgeneration" in self.source

  def render(self, messages: Sequence[dict], tools: Any = None, *, prompt: bool = False) -> str:
    """The text of a conversation. prompt: with the beginning of the assistant's answer. Raises TemplateError."""
    return re.sub(f"[{''.join(MARKS)}]", "", self._render(messages, tools, prompt))

  def spans(self, messages: Sequence[dict], tools: Any, first: int) -> tuple[str, Spans, list[str]]:
    """(the text, where the assistant speaks in it, the prompts that begin it and end where it speaks).

    first: the message from which on the assistant's turns count. Raises TemplateError.
    """
    text, spans, prompts = (self._by_marks if self.is_marked else self._by_prefixes)(messages, tools, first)
    said = "".join(text[start:stop] for start, stop in spans)
    for turn, message in enumerate(messages):
      content = (message.get("content") or "").rpartition("</think>")[2].strip()
      if spans and turn >= first and message["role"] == "assistant" and content not in said:
        raise TemplateError(f"chat template {self.name} does not show what the assistant says in turn {turn + 1}")
    return text, spans, prompts

  def _by_marks(self, messages, tools, first: int) -> tuple[str, Spans, list[str]]:
    """`spans` as the template marks them."""
    pieces = re.split(f"[{''.join(MARKS)}]", self._render(messages, tools, False))  # outside and inside, in turns
    text, ends = "".join(pieces), [*itertools.accumulate(map(len, pieces))]
    spans = [(ends[n - 1], ends[n]) for n in range(1, len(pieces), 2)]
    if not first:
      return text, spans, []
    prompt = self.render(messages[:first], tools)
    if not text.startswith(prompt):
      raise TemplateError(f"chat template {self.name} does not begin the text with the prompt")
    return text, [(start, stop) for start, stop in spans if start >= len(prompt)], [prompt]

  def _by_prefixes(self, messages, tools, first: int) -> tuple[str, Spans, list[str]]:
    """`spans` from the conversation up to each turn of the assistant, before and with it."""
    text, spans, prompts = self.render(messages, tools), [], []
    for turn in range(first, len(messages)):
      if messages[turn]["role"] != "assistant":
        continue
      prompt = self.render(messages[:turn], tools, prompt=True)
      answered = self.render(messages[: turn + 1], tools)
      if not answered.startswith(prompt):
        raise TemplateError(f"chat template {self.name} does not begin turn {turn + 1} with its prompt; {_OWN_SPANS}")
      if not text.startswith(answered):
        raise TemplateError(f"chat template {self.name} renders turn {turn + 1} otherwise before others; {_OWN_SPANS}")
      spans.append((len(prompt), len(answered)))
      prompts.append(prompt)
    return text, spans, prompts

  def _render(self, messages: Sequence[dict], tools: Any, prompt: bool) -> str:
    try:
      return _compiled(self.name, self.source).render(
        messages=[_with_reasoning(message) for message in messages], tools=tools, documents=None,
        add_generation_prompt=prompt, **dict(self.words),
      )  # fmt: skip
    except Exception as error:  # a template may raise anything
      said = " ".join(str(error).split())[:200] or type(error).__name__
      raise TemplateError(f"chat template {self.name} fails: {said}") from error


def _with_reasoning(message: dict) -> dict:
  """A message whose reasoning has all names that templates read, as transformers gives it."""
  found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
  return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def load(cfg: DataConfig, tokenizer: Tokenizer) -> Template | None:
  """The template of `chat_template_path`, else the tokenizer's; None where there is none. Raises ConfigError."""
  folder = tokenizer.path.parent if tokenizer.path else None
  settings = _read(folder / SETTINGS) if folder and (folder / SETTINGS).is_file() else "{}"
  try:
    said = json.loads(settings)
  except ValueError as error:
    raise ConfigError(f"{folder}/{SETTINGS} is not JSON: {error}") from error
  words = {name: value["content"] if isinstance(value, dict) else value for name in _WORDS if (value := said.get(name))}
  given = said.get("chat_template")
  if isinstance(given, list):  # several, by name
    given = next((one["template"] for one in given if one.get("name") == "default"), None)
  path = cfg.chat_template_path or (str(folder / FILE) if folder and (folder / FILE).is_file() else "")
  if path:
    name, source = path, _read(Path(path))
  elif given:
    name, source = f"{folder}/{SETTINGS}", given
  else:
    return None
  template = Template(name, source, tuple((words or tokenizer.words).items()))
  _compiled(name, source)  # raises ConfigError
  return template


def _read(path: Path) -> str:
  try:
    return path.expanduser().read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"chat template {path} cannot be read: {error}") from error


@functools.lru_cache(8)
def _compiled(name: str, source: str) -> Any:
  """The template, with what transformers gives templates beyond Jinja. Raises ConfigError naming the line."""
  jinja2, sandbox = import_package("jinja2", "a chat template"), import_package("jinja2.sandbox", "a chat template")
  import_package("jinja2.ext", "a chat template")

  class Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller) -> str:
      return f"{MARKS[0]}{caller()}{MARKS[1]}"

  def raise_exception(message):
    raise jinja2.TemplateError(message)

  def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

  def strftime_now(form):
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    return (datetime.datetime.fromtimestamp(int(fixed), datetime.UTC) if fixed else datetime.datetime.now()).strftime(
      form
    )

  made = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
  )
  made.filters["tojson"] = tojson
  made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
  try:
    return made.from_string(source)
  except jinja2.TemplateSyntaxError as error:
    raise ConfigError(f"chat template {name}, line {error.lineno}: {error.message}") from error
