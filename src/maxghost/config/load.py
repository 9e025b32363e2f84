"""Reads a configuration: schema defaults, then a YAML, then a model file, then `key=value` texts."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from maxghost.config import files, renamed, values
from maxghost.config.schema import SECTIONS, Config, fields
from maxghost.config.validate import cross_problems, value_problems

COMMAND_LINE = "command line"
# This key marks the saved configuration of a run, whose values include those of the model file: reading it does not lay
# the model file over them again.
RESOLVED = "config_is_resolved"
_DEEPEST = 20  # levels of nested lists


class Given(NamedTuple):
  """One value as it was given: its origin and its YAML node, None where the text is not YAML (see `problem`)."""

  origin: str
  node: yaml.Node | None
  problem: str = ""


class Loaded(NamedTuple):
  """A configuration, each value's origin ("configs/base.yml:12", "command line"), notes on what was overridden."""

  config: Config
  origins: dict[str, str]
  notes: tuple[str, ...] = ()


class _Loader(yaml.SafeLoader):
  """Refuses lists nested deeper than any value is; the recursion limit would take seconds to reach."""

  depth = 0

  def compose_node(self, parent, index):
    self.depth += 1
    if self.depth > _DEEPEST:
      raise yaml.MarkedYAMLError(problem="it is nested too deeply", problem_mark=self.peek_event().start_mark)
    node = super().compose_node(parent, index)
    self.depth -= 1
    return node


def load(path: str | os.PathLike | None = None, *overrides: str, base_dir: str | os.PathLike | None = None) -> Config:
  """The validated configuration of a YAML file and `key=value` texts; without any, the defaults (= configs/base.yml).

  Precedence: defaults < the YAML < the model file of `model_name` < `overrides` (a later one wins). The YAML may hold
  any subset of the keys. The model file is `models/<model_name>.yml`, searched in `base_dir` (default: the YAML's
  folder), then among the shipped configurations. A `path` of the form `key=value` counts as an override.
  Raises ConfigError with one line per problem.
  """
  return load_with_origins(path, *overrides, base_dir=base_dir).config


def load_with_origins(path=None, *overrides: str, base_dir=None) -> Loaded:
  """As `load`, with the origin of each value."""
  if path is not None and "=" in os.fspath(path) and not os.path.exists(path):
    path, overrides = None, (os.fspath(path), *overrides)
  problems, notes, stems = [], [], [Path(path or "").stem]
  base = _read_yaml(Path(path), problems) if path is not None else {}
  command = _read_overrides(overrides, problems, notes)
  problem, resolved = _convert(RESOLVED, bool, base.pop(RESOLVED)) if RESOLVED in base else ("", False)
  problems += [problem] if problem else []
  model = {}
  model_name = command.get("model_name") or (None if resolved else base.get("model_name"))
  if model_name and isinstance(model_name.node, yaml.ScalarNode) and model_name.node.tag != values.NULL_TAG:
    folders = [Path(base_dir)] if base_dir is not None else [Path(path).parent] if path is not None else []
    model = _read_model_file(model_name, [*folders, files.config_dir()], problems)
    stems += [model_name.node.value] if model else []
  named = [stem for stem in stems if stem.startswith("llama3.1")]
  if named and not any("rope_type" in layer for layer in (base, model, command)):
    said = f"MaxText rotates as rope_type=llama3.1 rope_factor=8 says because the model is called {named[0]}"
    problems.append(f"{said}; set both keys, or rope_type=default")
  loaded = _resolve((base, model, command), problems, notes)
  own = (COMMAND_LINE,) if resolved or path is None else (COMMAND_LINE, f"{path}:")
  return loaded._replace(notes=(*loaded.notes, *_unread(loaded, own)))


def _unread(loaded: Loaded, own: tuple[str, ...]) -> Iterator[str]:
  """A note for each value of these origins, other than the default, that no run of the configuration reads."""
  flat, of_sets = loaded.config.flat(), filter(None, loaded.config.data.validation_objectives)
  in_use = {key: {values.shown(value)} for key, value in flat.items()}
  in_use["objective"].update(of_sets)
  for name, field in fields().items():
    marks = (text.partition("=") for text in field.metadata["unread"].split(";") if text)
    other = next((key for key, _, without in marks if in_use[key] <= set(without.split("|"))), "")
    if other and flat[name] != field.default and (origin := loaded.origins[name]).startswith(own):
      yield f"{name}={values.shown(flat[name])} ({origin}) is not read with {other}={values.shown(flat[other])}"


def _has_keys(path: Path) -> bool:
  """Whether a file has a key of the configuration: not all YAML files are one."""
  lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() and os.access(path, os.R_OK) else ()
  return any(line.partition(":")[0] in fields() for line in lines)


def _read_yaml(path: Path, problems: list[str]) -> dict[str, Given]:
  """The keys of a flat YAML file, with duplicates, syntax errors and a missing file reported in `problems`."""
  try:
    root = yaml.compose(files.with_end(path).read_bytes(), Loader=_Loader)
  except OSError as error:
    reasons = {FileNotFoundError: "does not exist", IsADirectoryError: "is a folder"}
    reason = reasons.get(type(error), f"cannot be read ({error.strerror})")
    near = (values.nearest_beside(at / path.name, "*.y*ml", _has_keys) for at in (path.parent, files.config_dir()))
    hint = f"; for the key, write {path}=VALUE" if str(path) in fields() else next(filter(None, near), "")
    hint = f"; give {path / 'config.yml'}" if (path / "config.yml").is_file() else hint
    problems.append(f"config file {path} {reason}{hint}")
    return {}
  except yaml.YAMLError as error:
    mark = getattr(error, "problem_mark", None)
    where = f"{path}:{mark.line + 1}" if mark else str(path)
    problems.append(f"{where} is not YAML: {getattr(error, 'problem', None) or values.first_line(error)}")
    return {}
  if not isinstance(root, yaml.MappingNode):
    problems += [] if root is None else [f"{path} does not hold `key: value` lines"]
    return {}
  given: dict[str, Given] = {}
  for pair in root.value:
    in_group = pair[0].value in renamed.GROUPS and isinstance(pair[1], yaml.MappingNode)
    for key_node, node in pair[1].value if in_group else (pair,):
      key = key_node.value if isinstance(key_node, yaml.ScalarNode) else _node_text(key_node)
      line = key_node.start_mark.line + 1
      if key in given:
        first = given[key].origin.rpartition(":")[2]
        problems.append(f"{key} is given twice in {path}, in lines {first} and {line}; remove one")
      else:
        given[key] = Given(f"{path}:{line}", node)
  return given


def _read_overrides(texts: tuple[str, ...], problems: list[str], notes: list[str]) -> dict[str, Given]:
  """The keys of `key=value` texts. A value is YAML, except that plain text needs no quotes."""
  given: dict[str, str] = {}
  kinds = {name: other.kind for name, other in renamed.OTHER.items()} | {n: f.type for n, f in fields().items()}
  for text in texts:
    key, equals, value = text.partition("=")
    key = key.strip()
    group, dot, inner = key.partition(".")
    key = inner if dot and group in renamed.GROUPS else key
    if not equals or not key:
      problems.append(f"'{text}' ({COMMAND_LINE}) is not of the form key=value")
      continue
    if given.get(key, value) != value:
      notes.append(f"{key}={given[key]} ({COMMAND_LINE}) is overridden by the later {key}={value}")
    given[key] = value
  return {key: _read_override(value, kinds.get(key)) for key, value in given.items()}


def _read_override(text: str, kind: Any) -> Given:
  plain = yaml.ScalarNode("tag:yaml.org,2002:str", text, style=None)
  looks_yaml = text[:1] in ("'", '"') or (kind is not str and text[:1] in ("[", "{")) or text in ("null", "~")
  try:
    node = yaml.compose(text, Loader=_Loader) if looks_yaml else plain
    return Given(COMMAND_LINE, plain if kind is str and isinstance(node, yaml.MappingNode) else node)
  except yaml.YAMLError:
    if not values.is_tuple(kind):  # also a text that merely starts with a quote, such as '"Yes," he said'
      return Given(COMMAND_LINE, plain)
    start = text if len(text) <= 80 else f"{text[:80]}..."
    return Given(COMMAND_LINE, None, f"'{start}' is not a YAML list; write a,b or quote the items")


def _read_model_file(name: Given, folders: list[Path], problems: list[str]) -> dict[str, Given]:
  assert isinstance(name.node, yaml.ScalarNode)
  if (model_name := name.node.value) == "default":
    return {}
  available = {path.stem: path for folder in reversed(folders) for path in sorted((folder / "models").glob("*.yml"))}
  if model_name not in available:
    names = ", ".join(["default", *sorted(available)])
    hint = values.did_you_mean(model_name.removesuffix(".yml"), available) or f"; there are {names}"
    problems.append(f"model_name={values.shown(model_name)} ({name.origin}) has no file models/{model_name}.yml{hint}")
    return {}
  given = _read_yaml(available[model_name], problems)
  own = given.pop("model_name", None)
  if own is not None and getattr(own.node, "value", None) != model_name:
    problems.append(f"model_name in {own.origin} must be {model_name}, the name of the file; remove it")
  return given


def _resolve(layers: tuple[dict[str, Given], ...], problems: list[str], notes: list[str]) -> Loaded:
  """Lays the layers over the defaults, then MaxText's names over both. Raises ConfigError."""
  known, base = fields(), layers[0]
  flat, origins = {name: field.default for name, field in known.items()}, dict.fromkeys(known, "default")
  broken: set[str] = set()
  level_of: dict[str, int] = {}
  others: dict[str, tuple[int, Any, str]] = {}
  for level, layer in enumerate(layers):
    for key, given in layer.items():
      if not (other := renamed.OTHER.get(key)) and key not in known:
        if not renamed.asks_for_nothing(key, getattr(given.node, "value", None)):
          problems.append(renamed.unknown(key, known, given.origin))
        continue
      kind, field = (other.kind, None) if other else (known[key].type, known[key])
      problem, value = _convert(key, kind, given, field)
      if problem:
        problems.append(problem)
        broken.add(key)
        continue
      if other:
        others[key] = level, value, given.origin
        continue
      if layer is layers[1] and key in base and key not in broken and value != flat[key] != known[key].default:
        said = f"{key}={values.shown(flat[key])} ({origins[key]}) is overridden by {values.shown(value)} of the model"
        notes.append(f"{said} file ({given.origin}); give {key}= on the command line to keep it")
      flat[key], origins[key], level_of[key] = value, given.origin, level
  for key, (level, value, origin) in sorted(others.items(), key=lambda one: (one[0] == "lora_use_rslora", one[1][0])):
    if other := renamed.OTHER[key].unread(value, flat):
      said = f"{key}={values.shown(value)} ({origin}) is not read with {other}={values.shown(flat[other])}"
      if value is True:  # asks for what is off
        problems.append(f"{said}; it {renamed.OTHER[key].answer}")
      else:
        notes.append(said)
    for target, changed in renamed.OTHER[key].fold(value, flat).items():
      if level_of.get(target, level) > level and key != "lora_use_rslora":  # which is a factor of the last value
        notes.append(f"{key} ({origin}) is overridden by {target}={values.shown(flat[target])} ({origins[target]})")
        continue
      if target == "objective" and level_of.get(target) == level and changed != flat[target]:
        problems.append(f"{key} ({origin}) is {target}={changed}, not {target}={flat[target]} beside it; leave one out")
        broken.add(target)
      if wrong := values.limit_problems(known[target], changed):
        problems.append(f"{key} ({origin}) is {target}={values.shown(changed)}{wrong[0]}")
        broken.add(target)
      flat[target], origins[target], level_of[target] = changed, origin, level
  problems.extend(cross_problems({key: value for key, value in flat.items() if key not in broken}))
  if problems:
    raise values.ConfigError(*renamed.shortened(problems))
  return Loaded(_build(flat), origins, tuple(notes))


def _convert(name: str, kind: Any, given: Given, field: dataclasses.Field | None = None) -> tuple[str, Any]:
  """("", value) or (problem, None) for one given value, within the limits of the `field` if there is one."""
  if (node := given.node) is None:
    return f"{name} ({given.origin}): {given.problem}", None
  text, synonyms = _node_text(node), renamed.SYNONYMS.get(name, {})
  if isinstance(node, yaml.ScalarNode) and node.value.lower() in synonyms:
    node = yaml.ScalarNode("tag:yaml.org,2002:str", synonyms[node.value.lower()])
  try:
    value = values.from_node(node, kind)
  except values.WrongTypeError as error:
    expected = values.type_name(kind) if values.is_tuple(kind) else error
    quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"')
    hint = "; remove the quotes" if quoted and kind in (bool, int, float) else ""
    return f"{name}={text} ({given.origin}) is not of type {expected}{hint}", None
  wrong = values.limit_problems(field, value) if field else []
  return (f"{name}={values.shown(value)} ({given.origin}){wrong[0]}", None) if wrong else ("", value)


def _node_text(node: yaml.Node | None, depth: int = 0) -> str:
  """The node as text for a message. Nested lists are cut: a YAML alias can make a list that holds itself."""
  if isinstance(node, yaml.ScalarNode):
    return f"'{node.value}'" if node.tag != values.NULL_TAG or node.value else "nothing"
  if isinstance(node, yaml.SequenceNode):
    return "[" + ", ".join(_node_text(item, depth + 1) for item in node.value) + "]" if depth < 2 else "[...]"
  return "{...}"


def _build(flat: dict[str, Any]) -> Config:
  parts = {name: {item.name: flat[item.name] for item in dataclasses.fields(cls)} for name, cls in SECTIONS.items()}
  return Config(**{name: SECTIONS[name](**part) for name, part in parts.items()})


def replace(cfg: Config, **changes: Any) -> Config:
  """A copy with some keys changed, validated as `load` does. Lists become tuples, ints become floats where due.

  `model_name` cannot be changed here, because its file is laid by `load`. Raises ConfigError.
  """
  known, flat, problems = fields(), cfg.flat(), []
  for key, value in changes.items():
    if key not in known:
      problems.append(renamed.unknown(key, known))
    elif key == "model_name" and value != cfg.model.model_name:
      problems.append(f"model_name={values.shown(value)} cannot be set by replace; use load with model_name={value}")
    else:
      # A value of the wrong type stays as it is: value_problems names it.
      with contextlib.suppress(values.WrongTypeError):
        value = values.from_python(value, known[key].type)
      flat[key] = value
  if problems:
    raise values.ConfigError(*problems, *value_problems(flat, known))
  return _build(flat)


def differing_keys(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
  """The keys whose values differ: key -> (value in `a`, value in `b`), in the order of the schema."""
  other = b.flat()
  return {key: (value, other[key]) for key, value in a.flat().items() if value != other[key]}


def save(cfg: Config, path: str | os.PathLike) -> None:
  """Writes every key as a flat YAML, whole or not at all; `load` of it gives an equal Config. Raises OSError."""
  head = "# Every value of a run, as it was used: the model file and the command line are already in it.\n"
  lines = (values.to_yaml(key, value) for key, value in cfg.flat().items())
  files.write_text(path, "".join((head, f"{RESOLVED}: true\n", *lines)))
