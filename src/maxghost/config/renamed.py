"""Keys that the schema does not have, from configs/renamed.yml.

MaxText's names for what maxghost calls otherwise (`OTHER`) may be given anywhere and are folded into the keys of the
schema. Former names of keys and those of other trainers (`FORMER`) are errors that name the key.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxghost.config.files import read_table
from maxghost.config.values import HOST_MEMORY, WORDS, did_you_mean

Values = Mapping[str, Any]

# How a value of such a key changes the keys of the schema: functions of the value, the values of the other keys, and
# what configs/renamed.yml says behind the name of the function.


def when(value: Any, values: Values, asked: Any, changed: dict[str, Any]) -> dict[str, Any]:
  return {key: tuple(new) if isinstance(new, list) else new for key, new in changed.items()} if value == asked else {}


def named(value: Any, values: Values, key: str, other: str = "", among: Sequence = ()) -> dict[str, Any]:
  """Another name of a key, or one only where a further key has one of some values."""
  return {key: SYNONYMS.get(key, {}).get(value, value)} if not other or (value != () and values[other] in among) else {}


def offload(value: Any, values: Values, what: str) -> dict[str, Any]:
  held = (*values["offload_to_host"], what) if value else values["offload_to_host"]
  return {"offload_to_host": tuple(name for name in HOST_MEMORY if name in held)}


def item(value: Any, values: Values, key: str, place: int) -> dict[str, Any]:
  """One number of a list; 0 leaves the list as it is."""
  held = values[key]
  return {key: (*held[:place], value, *held[place + 1 :])} if value else {}


_FOLDS: dict[str, Callable[..., dict[str, Any]]] = {
  **{fold.__name__: fold for fold in (when, named, offload, item)},
  "alike": lambda value, values, key: {key: value} if value == values[key] else {},
  # A switch beside a number: off is 0; on without a number is the usual one.
  "switched": lambda value, values, key, usual: {key: values[key] or usual} if value else {key: 0},
  # rsLoRA's scale, alpha over the root of the rank.
  "stabilized": lambda value, values: (
    {"lora_alpha": values["lora_alpha"] * values["lora_rank"] ** 0.5} if value and values["lora_rank"] else {}
  ),
  "slices": lambda value, values: (
    {"compile_topology": f"{value}x{values['compile_topology']}"} if value > 1 and values["compile_topology"] else {}
  ),
}


class OtherKey(NamedTuple):
  """A key of MaxText that the schema calls otherwise, of type `kind`.

  answer: what follows the name in an error, such as "is packing". change: name and arguments of a function above.
  """

  answer: str
  kind: Any
  change: Sequence

  def fold(self, value: Any, values: Values) -> dict[str, Any]:
    """The keys of the schema that the value changes. values: of the other keys."""
    return _FOLDS[self.change[0]](value, values, *self.change[1:])

  def unread(self, value: Any, values: Values) -> str:
    """The key whose value leaves this one without a reader; empty if it has one."""
    how, key, other, *_ = (*self.change, "", "")
    return (other or key) if how in ("named", "alike") and value != () and not self.fold(value, values) else ""


# MaxText's groups of keys, `lora: {lora_rank: 8}` in a YAML or `lora.lora_rank=8`; here the keys stand alone.
GROUPS = ("lora", "dpo")

_TYPES = {"str": str, "int": int, "float": float, "bool": bool, "texts": tuple[str, ...]}
_table = read_table("renamed.yml")
FORMER: dict[str, str] = {name: said for said, names in _table["former"].items() for name in names.split()}
OTHER = {name: OtherKey(answer, _TYPES[kind], change) for name, (kind, answer, *change) in _table["maxtext"].items()}

# Values that are read as others: {key: {text: text}}.
SYNONYMS: dict[str, dict[str, str]] = _table["synonyms"]
SYNONYMS["packing"] = {text: "first_fit" if on else "none" for text, on in WORDS.items()}

_MOST_LINES = 10  # of errors about keys that only MaxText has
_FOREIGN = " is a MaxText key that maxghost does not have"


@functools.cache
def _maxtext() -> dict[str, Any]:
  """MaxText's keys that the schema lacks, and what to say of some of them."""
  return read_table("maxtext/keys.yml")


def asks_for_nothing(key: str, text: Any) -> bool:
  """Whether a key of MaxText has a value that would change nothing here, such as the default of a missing feature."""
  if not isinstance(text, str):
    return False
  plain = text.strip().lower().removesuffix(".0")
  return any(key in _maxtext()["same"].get(value, "").split() for value in ("*", "" if plain == "none" else plain))


def unknown(key: str, known: Mapping[str, Any], origin: str = "") -> str:
  """The error for a key that the schema does not have: its present name, MaxText's, or the nearest valid ones."""
  where = f" ({origin})" if origin else ""
  if key in OTHER or key in FORMER:
    return f"key '{key}'{where} {FORMER.get(key) or OTHER[key].answer}"
  if key in _maxtext()["lacking"].split():
    instead = next((f"; {what}" for what, keys in _maxtext()["instead"].items() if key in keys.split()), "")
    return f"'{key}'{where}{_FOREIGN}{instead}"
  return f"unknown key '{key}'{where}{did_you_mean(key, known)}"


def shortened(problems: list[str]) -> list[str]:
  """The problems, with many keys that only MaxText has on one line: a base.yml of MaxText holds hundreds."""
  foreign = [text for text in problems if _FOREIGN in text]
  if len(foreign) <= _MOST_LINES:
    return problems
  names = ", ".join(text.split("'")[1] for text in foreign[:_MOST_LINES])
  line = f"{len(foreign)} keys are MaxText keys that maxghost does not have: {names}, ...; "
  line += "a file needs only the keys that it changes (docs/from-maxtext.md)"
  return [line, *(text for text in problems if _FOREIGN not in text)]
