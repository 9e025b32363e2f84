"""One value of the configuration: converted from YAML to the type of its key and back, within its limits, or refused.

The key's type decides, not YAML's guess: `learning_rate: 1e-3` is a float although YAML 1.1 reads a string there, and
`run_name: 7` is the text "7". A quoted value is always text.
"""

import codecs
import contextlib
import difflib
import errno
import functools
import importlib
import io
import math
import numbers
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

import yaml

NULL_TAG = "tag:yaml.org,2002:null"
WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# 1e5 is a whole number and a common way to write one; 1.5e3 and 5.0 are not accepted for an int.
INT = re.compile(r"[-+]?[0-9](?:_?[0-9]){0,40}|([-+]?[0-9]+)[eE]\+?([0-9]{1,2})")

HOST_MEMORY = ("weights", "optimizer", "carries", "val_gradient")  # values of offload_to_host
MOST = 10**9  # of a whole number, where its key names no smaller bound
_LONGEST = 2000  # characters of a line that is printed
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LINE_ENDS = frozenset("\n\r\x85\u2028\u2029")


class ConfigError(ValueError):
  """A mistake of the user: `problems` are clear lines, which commands print before they exit with `exit_code`."""

  exit_code = 2

  def __init__(self, *problems: str):
    self.problems = tuple(problems)
    super().__init__("\n".join(problems))


def print_problem(problem: str | BaseException, name: str = "maxghost") -> None:
  """Prints a line on stderr, in which control characters are escaped. A closed output (`| head`) is no problem."""
  if isinstance(problem, BrokenPipeError):
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed there at exit
    return
  text = str(problem)
  if isinstance(problem, OSError) and problem.strerror:
    text = f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
  text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
  shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
  print(f"{name}: {shown}", file=sys.stderr)


def printable(text: str) -> str:
  """Text whose control characters, marks of writing direction and lone surrogates are replacement signs."""
  return _UNPRINTABLE.sub("\ufffd", text)


def first_line(error: BaseException) -> str:
  """At most 200 characters of an error's first line, or its type where it says nothing."""
  return str(error).partition("\n")[0][:200] or type(error).__name__


@contextlib.contextmanager
def naming(key: str, path: object) -> Iterator[None]:
  """Puts `key=path` before what is wrong with a path that a key gave. An empty key puts `path` into an OSError that
  names no file, such as that of a full disk, and nothing else."""
  setting = f"{key}={path}" if key else ""
  try:
    yield
  except ConfigError as error:
    problems = (one if setting in one else f"{setting}: {one.removeprefix(f'{path}: ')}" for one in error.problems)
    raise type(error)(*problems) from error
  except OSError as error:
    if error.strerror and (key or not error.filename):
      error.filename = ": ".join(str(part) for part in (setting or path, error.filename) if part)
    raise


@contextlib.contextmanager
def reading(path: object, said: str = "") -> Iterator[None]:
  """Raises ConfigError, with `said` before the path, for a file that cannot be read or is no UTF-8."""
  try:
    yield
  except (OSError, UnicodeDecodeError) as error:
    near = nearest_beside(Path(str(path)), "*") if isinstance(error, FileNotFoundError) else ""
    raise ConfigError(f"{said}{path} cannot be read: {getattr(error, 'strerror', '') or error}{near}") from error


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
  """Replaces what an output without UTF-8 lacks: a number keeps its sign and digits, other characters become "?"."""
  assert isinstance(error, UnicodeEncodeError)
  known = str.maketrans({"\u2212": "-", "\u202f": " ", "±": "+-", "…": "."})
  return error.object[error.start : error.end].translate(known).encode("ascii", "replace").decode(), error.end


codecs.register_error("maxghost", _in_ascii)


def guard(work: Callable[[], int | None], name: str = "maxghost", stopped: str = "interrupted") -> int:
  """Runs a command and returns its exit code. Errors that are no defect of the program are shown as one line on stderr.

  0 if the output was closed early (`| head`); 1 for a file, disk or device memory that fails; 2 for wrong input, where
  nothing was written; 130 for Ctrl-C. A stream that is closed from the start is replaced by /dev/null. name: what lines
  begin with. stopped: the line for Ctrl-C.
  """
  sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="maxghost")
  if os.environ.get("COLUMNS") == "0":  # of a terminal of unknown width; rich would show nothing
    del os.environ["COLUMNS"]
  code = 0
  try:
    code = work() or 0
    sys.stdout.flush()
  except ConfigError as error:
    for problem in error.problems or (str(error),):
      print_problem(problem.replace("\n", "\\n"), name)
    return error.exit_code
  except KeyboardInterrupt:
    print_problem(stopped, name)
    return 130
  except OSError as error:
    print_problem(error, name)
    if not isinstance(error, BrokenPipeError):
      code = ConfigError.exit_code if error.errno == errno.ENAMETOOLONG else 1
  except Exception as error:
    if (found := _no_defect(error)) is None:
      raise
    line, code = found
    print_problem(line, name)
  return code


def _no_defect(error: Exception) -> tuple[str, int] | None:
  """(line, exit code) for what is wrong outside of the program, where this is what the error of a library means."""
  (said, *_), asked = str(error).splitlines() or [""], os.environ.get("JAX_PLATFORMS")
  if "RESOURCE_EXHAUSTED" in str(error):  # of XLA
    return f"out of device memory: {said}", 1
  if isinstance(error, RuntimeError) and said.startswith(("open() failed: ", "write() failed: ")):  # of ArrayRecord
    return said, 1
  if isinstance(error, ValueError) and "embedded null" in said:
    return "a path holds a NUL character", ConfigError.exit_code
  place = traceback.extract_tb(error.__traceback__)[-1].filename
  if isinstance(error, ValueError) and place.endswith("jax/_src/config.py"):
    return f"an environment variable of JAX is wrong: {said}", ConfigError.exit_code
  if asked and place.endswith("xla_bridge.py"):
    fix = "unset it, or install what this device needs: pip install '.[gpu]' or '.[tpu]'"
    return f"JAX_PLATFORMS={asked}: JAX finds no such device here{said and f' ({said})'}; {fix}", ConfigError.exit_code
  return None


def guarded(name: str) -> Callable[[Callable[..., int | None]], Callable[..., int]]:
  """Decorates a tool's `main` with `guard`."""
  return lambda main: functools.wraps(main)(lambda *args, **options: guard(lambda: main(*args, **options), name))


def import_package(name: str, user: object, extra: str = "data") -> Any:
  """An optional package, or a module of it. Raises ConfigError that says what needs it and how to install it."""
  try:
    return importlib.import_module(name)
  except ImportError:
    package = name.partition(".")[0]
    raise ConfigError(f"{user} needs the package {package}; install it with: pip install 'maxghost[{extra}]'") from None


def nearest(name: str, valid: Iterable[str], limit: int = 3) -> list[str]:
  """The valid names most like `name`, best first: spelt alike, then sharing a word, else with it anywhere."""
  plain = {candidate.lower().replace("-", "_"): candidate for candidate in valid}
  if (wanted := name.lower().replace("-", "_")) in plain:
    return [plain[wanted]]
  alike = difflib.get_close_matches(wanted, plain, n=len(plain) or 1)
  likeness = [difflib.SequenceMatcher(a=candidate, b=wanted).ratio() for candidate in alike]
  found = sorted(candidate for candidate, ratio in zip(alike, likeness, strict=True) if ratio == likeness[0])
  words = lambda part, whole: f"_{part}_" in f"_{whole}_"  # noqa: E731
  found += [name for name in plain if name not in found and (words(wanted, name) or (name and words(name, wanted)))]
  if not found and len(wanted) >= 2:
    found = [candidate for candidate in plain if wanted in candidate]
  return [plain[candidate] for candidate in found[:limit]]


def did_you_mean(name: str, valid: Iterable[str], otherwise: str = "") -> str:
  """`; did you mean 'steps'?`, or where no valid name is near, nothing, or with `otherwise` all: `; there are a, b`."""
  if not (names := [f"'{found}'" for found in nearest(name, valid)]):
    return otherwise and f"; {otherwise} {', '.join(valid) or 'none'}"
  return "; did you mean " + " or ".join(filter(None, [", ".join(names[:-1]), names[-1]])) + "?"


def listed(names: Sequence[str], most: int = 6) -> str:
  return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def nearest_beside(path: Path, pattern: str = "*/", fits: Callable[[Path], bool] = Path.exists) -> str:
  """The end of "does not exist": `; nearest is runs/base` for `base`, or what is spelt alike; for a file its folder."""
  if path.is_file() and pattern == "*/":
    return f" but a file; use {path.parent}"
  near = sorted(at / path.name for at in path.parent.glob("*/") if not path.exists() and os.path.isdir(at / path.name))
  spelt = lambda at: at.stem if "." in pattern else at.name  # noqa: E731  the same ending makes no names alike
  there = {spelt(at): at for at in sorted(path.parent.glob(pattern)) if fits(at)}
  near += [there[name] for name in nearest(spelt(path), there, 1)]
  return f"; nearest is {near[0]}" if near else ""


class WrongTypeError(Exception):
  """The value does not have the type of its key; the text says what is expected."""


def is_tuple(kind: Any) -> bool:
  return typing.get_origin(kind) is tuple


def type_name(kind: Any) -> str:
  """The type in words: `int`, `list of str`."""
  if not is_tuple(kind):
    return kind.__name__
  parts = typing.get_args(kind)
  if parts[-1] is Ellipsis:
    return f"list of {type_name(parts[0])}"
  return "list of (" + ", ".join(map(type_name, parts)) + ")"


def _each(read: Callable[[Any, Any], Any], items: Sequence, kind: Any) -> tuple:
  """The items, each read as its part of a tuple type. Raises WrongTypeError, also where their count does not fit."""
  parts = typing.get_args(kind)
  if parts[-1] is Ellipsis:
    parts = (parts[0],) * len(items)
  if len(parts) != len(items):
    raise WrongTypeError(type_name(kind))
  return tuple(read(item, part) for item, part in zip(items, parts, strict=True))


def from_node(node: yaml.Node, kind: Any) -> Any:
  """The value of a YAML node as `kind`; an empty or null list of texts is (). Raises WrongTypeError."""
  texts = kind == tuple[str, ...]
  if isinstance(node, yaml.MappingNode) and texts and all(isinstance(x, yaml.ScalarNode) for x in sum(node.value, ())):
    return tuple(f"{key.value}={value.value}" for key, value in node.value)
  if isinstance(node, yaml.SequenceNode) and is_tuple(kind):
    return _each(from_node, node.value, kind)
  if not isinstance(node, yaml.ScalarNode):
    raise WrongTypeError(type_name(kind))
  text, quoted, null = node.value, node.style is not None, node.tag == NULL_TAG
  if is_tuple(kind) and not null and not quoted:  # a,b
    return _each(from_scalar, [item.strip() for item in text.split(",")] if text.strip() else [], kind)
  if texts:
    return () if null or not text else (text,)  # quoted: one text
  if (quoted and kind is not str) or null:
    raise WrongTypeError(type_name(kind))
  return from_scalar(text, kind)


def from_scalar(text: str, kind: Any) -> Any:
  """A plain value from its text. Raises WrongTypeError."""
  if kind is str:
    return text
  text = text.strip()
  if kind is bool and text.lower() in WORDS:
    return WORDS[text.lower()]
  if kind is int and (found := INT.fullmatch(text)):
    return int(found[1]) * 10 ** int(found[2]) if found[1] else int(text)
  if kind is float:
    return finite_float(text)
  raise WrongTypeError(type_name(kind))


def finite_float(number: str | numbers.Real) -> float:
  try:
    value = float(number)
  except (ValueError, OverflowError):
    raise WrongTypeError("float") from None
  if not math.isfinite(value):
    raise WrongTypeError("finite float")
  return value


def from_python(value: Any, kind: Any) -> Any:
  """A value given in Python as `kind`: a list becomes a tuple, an int a float. Raises WrongTypeError."""
  if is_tuple(kind) and isinstance(value, (list, tuple)):
    return _each(from_python, value, kind)
  if kind in (str, bool) and type(value) is kind:
    return value
  if kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
    return int(value)
  if kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
    return finite_float(value)
  raise WrongTypeError(type_name(kind))


def shown(value: Any) -> str:
  """The value as a user writes it after `key=`: text quoted only where it must be, tuples as `[a, b]`."""
  if isinstance(value, (list, tuple)):
    return "[" + ", ".join(shown(item) for item in value) + "]"
  if isinstance(value, bool) or value is None:
    return {True: "true", False: "false", None: "null"}[value]
  if isinstance(value, str):
    return value if re.fullmatch(r"[\w./:@%+*-]+", value) else "'" + value.replace("'", "''") + "'"
  return repr(value)


def to_yaml(key: str, value: Any) -> str:
  """One `key: value` entry of a YAML file, with its line end; reading it gives the value back exactly."""
  flow = isinstance(value, tuple)  # a list stays on its line; a top-level `{key: value}` never does
  # Outside of double quotes YAML folds line ends into spaces.
  quotes = None if LINE_ENDS.isdisjoint(shown(value)) else '"'
  text = yaml.safe_dump(value, default_style=quotes, default_flow_style=flow, width=2**30, allow_unicode=True)
  return f"{key}: {text.removesuffix('...' + chr(10))}"


def slash_path(path: Iterable[Any]) -> str:
  """A path of the model as one text, such as `decoder/layers/mlp/wo/kernel`."""
  return "/".join(map(str, path))


def divisors(number: int) -> list[int]:
  small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
  return sorted({*small, *(number // d for d in small)})


def limits(field: Field) -> tuple[tuple, Any, Any]:
  """(choices, minimum, maximum) of a key, with the choices as they are now."""
  given: Any = field.metadata["choices"]
  choices: Any = given() if callable(given) else given
  return tuple(choices), field.metadata["minimum"], field.metadata["maximum"]


def limit_problems(field: Field, value: Any) -> list[str]:
  """An unknown choice or a number out of bounds, in a list too; each text follows `key=value (origin)`."""
  problems, (choices, minimum, maximum) = [], limits(field)
  for item in value if isinstance(value, tuple) else (value,):
    who = f" holds {shown(item)}, which" if isinstance(value, tuple) else ""
    if isinstance(item, tuple):
      continue
    if choices and item not in choices:
      hint = did_you_mean(item, choices) if isinstance(item, str) else ""
      problems.append(f"{who} is not one of {', '.join(shown(choice) for choice in choices)}{hint}")
    elif minimum is not None and item < minimum:
      problems.append(f"{who} is below the least allowed value {shown(minimum)}")
    elif maximum is not None and item > maximum:
      problems.append(f"{who} is above the greatest allowed value {shown(maximum)}")
  return problems
