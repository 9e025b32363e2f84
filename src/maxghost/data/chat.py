"""Chat templates: a conversation as text, and the places in the text where the assistant speaks.

A template is a Jinja text as transformers reads it. It is untrusted code and runs in Jinja's sandbox, on JSON values.
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

from maxghost.config.files import with_end
from maxghost.config.values import ConfigError, naming, reading
from maxghost.data.tokenizer_files import TEMPLATE, TOOLS_TEMPLATE
from maxghost.data.tokenizers import SPECIAL_WORDS, Tokenizer, read_settings

SETTINGS = "tokenizer_config.json"
MARKS = "\ud800", "\udc00"  # around what a `{% generation %}` block gives; halves of a surrogate pair, in no text
_MARKS = f"[{''.join(MARKS)}]"
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names under which messages hold it
_MARK_IT = "; give one with {% generation %} around what the assistant says, by chat_template_path"
Spans = list[tuple[int, int]]  # begin and end of parts of a text


@dataclasses.dataclass(frozen=True)
class Template:
  """A chat template. Its methods raise ValueError with the reason in one line."""

  name: str  # where the text `source` is from
  source: str
  words: tuple[tuple[str, str], ...] = ()  # the special tokens that templates know by name, (name, token)
  with_tools: str = ""  # in place of `source` for conversations that have tools, where there is one

  def render(self, messages: Sequence[dict], tools: Any = None, *, prompt: bool = False) -> str:
    """The text of a conversation. prompt: with the beginning of the assistant's answer."""
    return re.sub(_MARKS, "", self._render(messages, tools, prompt))

  def spans(self, messages: Sequence[dict], tools: Any, first: int) -> tuple[str, Spans, list[str]]:
    """(the text, where the assistant speaks in it, the prompts that begin it). first: the message from which on the
    assistant's turns count."""
    marked = "endgeneration" in self.source  # the template says itself what the assistant says
    text, spans, prompts = (self._by_marks if marked else self._by_prefixes)(messages, tools, first)
    said = "".join(text[start:stop] for start, stop in spans)
    for turn, message in enumerate(messages if spans else ()):
      content, role = (message.get("content") or "").rpartition("</think>")[2].strip(), message["role"]
      counts = role == "assistant" and turn >= first
      if (counts and content not in said) or (role == "user" and content not in text):
        raise self._error(f"does not show what the {role} says in turn {turn + 1}")
    return text, spans, prompts

  def _by_marks(self, messages, tools, first: int) -> tuple[str, Spans, list[str]]:
    pieces = re.split(_MARKS, self._render(messages, tools, False))  # outside and inside, in turns
    text, ends = "".join(pieces), [*itertools.accumulate(map(len, pieces))]
    prompt = self.render(messages[:first], tools) if first else ""
    if not text.startswith(prompt):
      raise self._error("does not begin the text with the prompt")
    spans = [(ends[n - 1], ends[n]) for n in range(1, len(pieces), 2)]
    return text, [(start, stop) for start, stop in spans if start >= len(prompt)], [prompt] if first else []

  def _by_prefixes(self, messages, tools, first: int) -> tuple[str, Spans, list[str]]:
    """From the conversation up to each turn of the assistant, before and with it."""
    text, spans, prompts = self.render(messages, tools), [], []
    for turn in (turn for turn in range(first, len(messages)) if messages[turn]["role"] == "assistant"):
      prompt, answered = self.render(messages[:turn], tools, prompt=True), self.render(messages[: turn + 1], tools)
      if not answered.startswith(prompt):
        raise self._error(f"does not begin turn {turn + 1} with its prompt{_MARK_IT}")
      if not text.startswith(answered):
        raise self._error(f"renders turn {turn + 1} otherwise where others follow{_MARK_IT}")
      spans.append((len(prompt), len(answered)))
      prompts.append(prompt)
    return text, spans, prompts

  def _render(self, messages: Sequence[dict], tools: Any, prompt: bool) -> str:
    given = {"messages": [_with_reasoning(message) for message in messages], "tools": tools, "documents": None}
    json.dumps([given, self.words], ensure_ascii=False).encode()  # raises UnicodeEncodeError for what MARKS could be
    try:
      return _compiled(self.name, self.source).render(**given, add_generation_prompt=prompt, **dict(self.words))
    except Exception as error:  # a template may raise anything
      raise self._error(f"fails: {' '.join(str(error).split())[:200] or type(error).__name__}") from error

  def _error(self, what: str) -> ValueError:
    return ValueError(f"chat template {self.name} {what}")


def _with_reasoning(message: dict) -> dict:
  """A message whose reasoning has all names that templates read, as transformers gives it."""
  found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
  return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def load(path: str, tokenizer: Tokenizer) -> Template | None:
  """The template in the file `path`, else the tokenizer's; None where there is none. Raises ConfigError."""
  folder, key = tokenizer.path.parent if tokenizer.path else Path(), "chat_template_path" if path else ""
  settings, said = folder / SETTINGS, read_settings(folder / SETTINGS) if tokenizer.path else {}
  words = tuple((name, said[name]) for name in SPECIAL_WORDS if said.get(name))
  own, with_tools = said.get("chat_template") or "", ""
  if isinstance(own, list):  # several, by name
    named = {str(one.get("name")): one.get("template") for one in own if isinstance(one, dict)}
    own, with_tools = named.get("default", ""), named.get("tool_use", "")
  if not isinstance(own, str) or not isinstance(with_tools, str):
    raise ConfigError(f"{settings} is damaged: its chat_template is no text")
  files = [Path(path)] if path else []
  if not path and tokenizer.path and (folder / TEMPLATE).is_file():
    files = [folder / TEMPLATE, *([folder / TOOLS_TEMPLATE] if (folder / TOOLS_TEMPLATE).is_file() else [])]
  if not files and not own:
    return None
  name = str(files[0] if files else settings)
  with naming(key, name), reading(name, "chat template "):
    read = [with_end(file.expanduser()).read_text(encoding="utf-8") for file in files] or [own, with_tools]
    _compiled(name, read[0])
  return Template(name, read[0], words, read[1] if len(read) > 1 else "")


@functools.lru_cache(8)
def _compiled(name: str, source: str) -> Any:
  """The template, with what transformers gives templates beyond Jinja. Raises ConfigError naming the line."""
  import jinja2.ext
  import jinja2.nodes
  import jinja2.sandbox

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

  def strftime_now(form):
    fixed = os.environ.get("SOURCE_DATE_EPOCH")  # for a run that is continued on another day
    return (datetime.datetime.fromtimestamp(int(fixed)) if fixed else datetime.datetime.now()).strftime(form)

  more = [Generation, jinja2.ext.loopcontrols]
  made = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=more)
  made.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
  made.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
  try:
    return made.from_string(source)
  except jinja2.TemplateSyntaxError as error:
    raise ConfigError(f"chat template {name}, line {error.lineno}: {error.message}") from error
