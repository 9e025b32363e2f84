"""Architecture families: one record holds all that is particular to a `decoder_block`.

To add a dense family, write its record in configs/families.yml or `register` it from your own code, and add a file to
configs/models. Layers, the configuration's checks, and `interop` read the record.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maxghost.config.files import config_dir, read_table
from maxghost.config.values import shown

REQUIRED = object()  # default of an entry that config.json must have


@dataclass(frozen=True, slots=True)
class Entry:
  """A model key and its name in config.json.

  names: the first one present is read, all are written; none for a key that follows from others. default: the value
  where config.json has none, or a function of the content of config.json.
  """

  key: str
  names: tuple[str, ...]
  default: Any = REQUIRED


@dataclass(frozen=True, slots=True)
class TensorRule:
  """Which parameters, of shape lead + inputs + outputs, a tensor of Hugging Face holds; it has two axes, of in and out.

  name: of the tensor, with {layer} and {expert}; {expert} means one tensor for each entry of `lead`. paths: the
  parameters without their layer index; several lie side by side along the outputs, or in turn (`interleaved`).
  transpose: stored as [out, in], as torch's linear layers are. when: a key of the model that must be true (`key`) or
  false (`!key`) for the tensor to exist.
  """

  name: str
  paths: tuple[str, ...]
  outputs: str
  inputs: str = ""
  lead: str = ""
  transpose: bool = False
  interleaved: bool = False
  when: str = ""


def table(theirs: str, ours: str, lines: str) -> tuple[TensorRule, ...]:
  """Rules from lines as in configs/tensors.txt. theirs, ours: what tensors' names and parameters' paths begin with."""
  rules = []
  for line in map(str.split, lines.splitlines()):
    if not line or line[0] == "#":
      continue
    name, paths, shape, *when = line
    lead, _, rest = shape.rpartition(":")
    inputs, _, outputs = rest.replace("<", ">").rpartition(">")
    every = tuple(ours + path for path in paths.replace("|", "+").split("+"))
    rules.append(TensorRule(theirs + name, every, outputs, inputs, lead, "<" in rest, "|" in paths, "".join(when)))
  return tuple(rules)


@dataclass(frozen=True, slots=True)
class HuggingFace:
  """A family as `transformers` has it. model_type, model_class: in config.json. entries: model keys that it holds.

  demands: entries of config.json without a key here, and the values that make the function known here; the first is
    the default and is written.
  stated: further entries that config.json must have, since without them transformers takes the value of one model: `a`,
    `a or b`, or `a if c`, where c is true.
  sliding: which layers slide where `layer_types` does not say: none (""), "all", "late" (from max_window_layers on) or
    "alternate". layer_types: whether that entry is written.
  prefix: a level that some files leave out of the tensors' names. ignored: pattern of tensors without a parameter.
  """

  model_type: str
  model_class: str
  entries: tuple[Entry, ...]
  tensors: tuple[TensorRule, ...]
  demands: Mapping[str, Sequence] = field(default_factory=lambda: {"hidden_act": ("silu",)})
  stated: Sequence[str] = ()
  sliding: str = ""
  layer_types: bool = False
  prefix: str = "model."
  ignored: str = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


@dataclass(frozen=True, slots=True)
class Family:
  """What `decoder_block=name` stands for.

  needs: values that all published models of the family have. example: a file of configs/models. routed: whether it has
  experts; None = with and without. layer_norm: LayerNorm with bias in place of RMSNorm. attention, mlp, experts, norms:
  names of a layer's modules; of the norms before attention and before the feed-forward layer. maxtext_scales_queries:
  whether MaxText keeps 1/sqrt(head_dim) in the query weights instead of in attention; None where MaxText has no such
  family. gguf: the architecture in GGUF files; "" = not read. gguf_pairs: whether neighbouring pairs are rotated there.
  """

  name: str
  huggingface: HuggingFace
  example: str = ""
  needs: Mapping[str, Any] = field(default_factory=dict)
  routed: bool | None = False
  learned_positions: bool = False
  layer_norm: bool = False
  attention: str = "self_attention"
  mlp: str = "mlp"
  experts: str = "MoeBlock_0"
  norms: tuple[str, str] = ("pre_self_attention_layer_norm", "post_self_attention_layer_norm")
  maxtext_scales_queries: bool | None = None
  gguf: str = ""
  gguf_pairs: bool = False

  def tensors(self) -> tuple[TensorRule, ...]:
    """The table of Hugging Face tensors with the family's own names in it."""
    names = {"attention": self.attention, "mlp": self.mlp, "experts": self.experts}
    names |= {"norm_0": self.norms[0], "norm_1": self.norms[1]}
    own = lambda rule: tuple(path.format_map(names) for path in rule.paths)  # noqa: E731
    return tuple(dataclasses.replace(rule, paths=own(rule)) for rule in self.huggingface.tensors)


FAMILIES: dict[str, Family] = {}


def register(*families: Family) -> None:
  """Makes each family a choice of `decoder_block`. Raises ValueError where its name is taken."""
  for family in families:
    if family.name in FAMILIES:
      raise ValueError(f"decoder_block={family.name} is registered already")
    FAMILIES[family.name] = family


# Sizes that follow from others where config.json has none; `size` gives those that it has.
_FOLLOWS: dict[str, Callable[[Callable[[str], int]], int]] = {
  "base_num_kv_heads": lambda size: size("base_num_query_heads"),
  "head_dim": lambda size: size("base_emb_dim") // size("base_num_query_heads"),
  "base_mlp_dim": lambda size: 4 * size("base_emb_dim"),
}


def check(v: Any) -> Iterator[str]:
  """What the model keys lack of their family, or have beside it. v: `validate.Values`."""
  record = FAMILIES[v.decoder_block]
  block, example = v["decoder_block"], f"model_name={record.example}"
  for key, needed in record.needs.items():
    if (value := getattr(v, key)) != needed:
      own = next(other.name for other in FAMILIES.values() if not other.needs)
      use = f"set it ({example} sets all of the family), or decoder_block={own} for a model of your own"
      yield f"{block} has {key}={shown(needed)}, not {shown(value)}; {use}"
  if record.routed and v.num_experts == 1:
    yield f"{block} has experts, but num_experts=1; set it, or {example}"
  if record.routed is False and v.num_experts > 1:
    routed = next(other.name for other in FAMILIES.values() if other.routed)
    yield f"{block} has no experts, but {v['num_experts']}; use decoder_block={routed}"
  if record.learned_positions and v.trainable_position_size < 1:
    yield f"{block} learns its positions; set trainable_position_size, such as 1024"


def _entries(groups: Iterable[Mapping[str, Mapping]]) -> tuple[Entry, ...]:
  read: dict[str, dict[str, Any]]
  read = {key: dict(entry, names=tuple(entry["names"].split())) for group in groups for key, entry in group.items()}
  for key, entry in read.items():
    if entry.get("default") == "follows":
      follow = _FOLLOWS[key]
      entry["default"] = lambda content, follow=follow: follow(lambda other: content[read[other]["names"][0]])
  return tuple(Entry(key, **entry) for key, entry in read.items())


def _shipped() -> Iterator[Family]:
  rules = {}
  for group in (config_dir() / "tensors.txt").read_text("utf-8").split("\n[")[1:]:
    head, _, lines = group.partition("\n")
    name, _, begins = head.partition("]")
    theirs, ours, *_ = (*begins.split(), "", "")
    rules[name] = table(theirs, ours, lines)
  shipped = read_table("families.yml")
  for name, record in shipped["families"].items():
    theirs = record["huggingface"]
    theirs["entries"] = _entries(shipped["entries"][group] for group in theirs["entries"])
    theirs["tensors"] = tuple(rule for group in theirs["tensors"] for rule in rules[group])
    needs = {key: tuple(value) if isinstance(value, list) else value for key, value in record.get("needs", {}).items()}
    yield Family(name, **record | {"huggingface": HuggingFace(**theirs), "needs": needs})


register(*_shipped())
