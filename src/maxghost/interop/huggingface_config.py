"""Translates config.json of a Hugging Face model into configuration keys, and back; compares such keys.

A value that stands for a function which no key can express is an error. Entries without effect here (dropout of
pretraining, token ids, caches) are kept for an export of the same model.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from maxghost.checkpoint.layouts_store import LayoutError
from maxghost.config import ModelConfig, did_you_mean
from maxghost.config.families import FAMILIES, REQUIRED, Entry, Family, HuggingFace
from maxghost.config.values import WrongTypeError, from_python, limit_problems, shown, type_name

_FIELDS = {field.name: field for field in dataclasses.fields(ModelConfig)}
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32", "float64": "float64"}
_LAYER_TYPES = {"full_attention": "global", "sliding_attention": "local_sliding"}
_YARN = {"rope_factor": "factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow", "rope_truncate": "truncate"}
_LLAMA3 = {"rope_factor": "factor", "rope_low_freq_factor": "low_freq_factor",
           "rope_high_freq_factor": "high_freq_factor"}  # fmt: skip
_WINDOW = ("sliding_window", "layer_types", "use_sliding_window", "max_window_layers")
_ROTARY = ("rope_theta", "rope_parameters", "rope_scaling")
_MOST_PARTS = 1_000_000
# How the folder's own tensors were packed; they are written in full.
_PACKING = ("quantization_config", "compression_config")
# Keys that change memory, time, rounding or training, and leave the meaning of the parameters as it is.
_HOW_COMPUTED = frozenset({"model_name", "decoder_block", "dropout_rate", "dtype", "weight_dtype", "matmul_precision",
                           "quantization", "quantize_kvcache", "attention", "scan_layers", "remat_policy",
                           "segment_lengths", "offload_to_host", "z_loss_multiplier", "num_vocab_tiling",
                           "vocab_tiling_axis", "mtp_loss_scaling_factor", "load_balance_loss_weight", "sparse_matmul",
                           "use_qk_clip", "qk_clip_threshold"})  # fmt: skip
_SCALING = {
  "llama3.1": {*_LLAMA3, "original_max_position_embeddings"},
  "yarn": {*_YARN, "original_max_position_embeddings", "rope_attention_scaling"},
}


@dataclasses.dataclass
class _Reader:
  """A config.json, and the problems found in it, which are raised together."""

  content: Mapping[str, Any]
  origin: str
  problems: list[str] = dataclasses.field(default_factory=list)

  def get(self, *names: str, default: Any = None) -> Any:
    """The first of `names` that is there and is not null."""
    return next((self.content[name] for name in names if self.content.get(name) is not None), default)

  def typed(self, name: str, value: Any, kind: Any) -> Any:
    try:
      return from_python(value, kind)
    except WrongTypeError:
      self.problem(f"{name}={shown(value)} must be {type_name(kind)}")
      return None

  def entry(self, entry: Entry) -> Any:
    if (value := self.get(*entry.names)) is None:
      if not callable(entry.default):
        return entry.default
      return None if self.problems else entry.default(self.content)  # what it is made from may be at fault
    name, field = " or ".join(entry.names), _FIELDS[entry.key]
    value = self.typed(name, value, field.type)
    for text in () if value is None else limit_problems(field, value):
      self.problem(f"{name}={shown(value)}{text}")
    return value

  def problem(self, text: str) -> dict[str, Any]:
    """Notes a problem; gives no keys."""
    self.problems.append(f"{self.origin}: {text}")
    return {}


def keys_of(content: Mapping[str, Any], origin: str) -> dict[str, Any]:
  """The model keys that make the function of a config.json. Raises LayoutError for what no key can express."""
  kind, known = content.get("model_type"), {family.huggingface.model_type: family for family in FAMILIES.values()}
  if not isinstance(kind, str) or kind not in known:
    raise LayoutError(f"{origin}: model_type={kind} is not known{did_you_mean(str(kind), sorted(known), 'known are')}")
  family, read = known[kind], _Reader(content, origin)
  entries = family.huggingface.entries
  missing = [x.names[0] for x in entries if x.default is REQUIRED and read.get(*x.names) is None]
  if not isinstance(rope := read.get("rope_scaling") or read.get("rope_parameters", default={}), dict):
    raise LayoutError(f"{origin}: rope_parameters={shown(rope)} must be an object")
  there = {name for name, x in {**rope, **content}.items() if x is not None or not name.startswith("rope")}
  for names, _, when in (stated.partition(" if ") for stated in family.huggingface.stated):
    missing += [names] if (not when or read.get(when)) and there.isdisjoint(names.split(" or ")) else []
  if missing:
    raise LayoutError(f"{origin} has no {', '.join(dict.fromkeys(missing))}")
  keys = {**family.needs, "decoder_block": family.name} | {entry.key: read.entry(entry) for entry in entries}
  for name, allowed in family.huggingface.demands.items():
    if (value := read.get(name, default=allowed[0])) not in allowed:
      read.problem(f"{name}={shown(value)} is not known here; known is {' or '.join(map(shown, allowed))}")
  if (limit := keys.get("mlp_activations_limit")) is not None and limit <= 0:
    read.problem(f"swiglu_limit={shown(limit)} must be above 0: transformers clamps to it, which is no clamp here")
  if family.learned_positions:
    keys["max_target_length"] = min(256, keys["trainable_position_size"] or 1)
  keys |= _rotary(read, rope) if keys.get("rope_type") != "none" else {}
  if read.problems:
    raise LayoutError(*read.problems)
  if keys["base_num_decoder_layers"] * keys.get("num_experts", 1) > _MOST_PARTS:
    raise LayoutError(f"{origin} asks for more than {_MOST_PARTS:,} layers and experts, which no model has")
  keys |= _attention_types(read, family, keys["base_num_decoder_layers"])
  if read.problems:
    raise LayoutError(*read.problems)
  return keys


def other_entries(content: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
  """The entries of a config.json that no model key stands for, such as token ids; none of another family's."""
  theirs = FAMILIES[model.decoder_block].huggingface
  if content.get("model_type") != theirs.model_type:
    return {}
  read = {name for entry in theirs.entries for name in entry.names} | set(theirs.demands)
  return {name: value for name, value in content.items() if name not in (*read, *_WINDOW, *_ROTARY, *_PACKING)}


def _attention_types(read: _Reader, family: Family, num_layers: int) -> dict[str, Any]:
  """Which layers slide: by `layer_types` where the family has it, else by the family's own pattern."""
  theirs, window, types = family.huggingface, read.get("sliding_window"), read.get("layer_types")
  if types is None or not theirs.layer_types:
    slides = _slides(read, theirs, num_layers) if window or theirs.sliding == "alternate" else [False]
    pattern = [("full_attention", "sliding_attention")[slides[i % len(slides)]] for i in range(num_layers)]
    if types not in (None, pattern):
      said = f"{theirs.model_class} of transformers does not read it, all its layers have {pattern[0]}; remove it"
      return read.problem(f"layer_types={shown(types)}: {said}")
    types = pattern
  if not isinstance(types, list) or len(types) < num_layers or any(t not in (*_LAYER_TYPES,) for t in types):
    names = " or ".join(_LAYER_TYPES)
    return read.problem(f"layer_types={shown(types)} must name {names} for each of {num_layers} layers")
  ours = [_LAYER_TYPES[name] for name in types[:num_layers]]
  cycle = next(c for c in range(1, num_layers + 1) if num_layers % c == 0 and ours == ours[:c] * (num_layers // c))
  return {
    "attention_type": tuple(ours[:cycle]),
    "inhomogeneous_layer_cycle_interval": cycle,
    "sliding_window_size": read.typed("sliding_window", window, int) if "local_sliding" in ours else 0,
  }


def _slides(read: _Reader, theirs: HuggingFace, num_layers: int) -> list[bool]:
  """Which layers of a cycle slide if there is a window."""
  if theirs.sliding != "late" or not read.get("use_sliding_window"):
    return {"all": [True], "alternate": [True, False]}.get(theirs.sliding, [False])
  first = read.typed("max_window_layers", read.get("max_window_layers", default=None if theirs.layer_types else 0), int)
  if first and not theirs.layer_types:
    read.problem(f"max_window_layers={first}: some releases of transformers do not read it here; known is 0")
  return [i >= (first or 0) for i in range(num_layers)]


def _rotary(read: _Reader, parameters: Mapping[str, Any]) -> dict[str, Any]:
  """parameters: transformers 5 writes them as rope_parameters; 4 writes rope_theta and, if they scale, rope_scaling."""
  theta = parameters.get("rope_theta", read.get("rope_theta", default=10000.0))
  kind = parameters.get("rope_type", parameters.get("type", "default"))
  names = {"default": {}, "llama3": _LLAMA3, "yarn": _YARN}
  if not isinstance(kind, str) or kind not in names:
    return read.problem(f"rope_type={kind} is not known here; known are default, llama3, yarn")
  keys: dict[str, Any] = {"rope_type": "llama3.1" if kind == "llama3" else kind}
  keys["rope_max_timescale"] = read.typed("rope_theta", theta, float)
  for ours, name in names[kind].items():
    if parameters.get(name) is not None:
      keys[ours] = read.typed(name, parameters[name], _FIELDS[ours].type)
    elif kind == "llama3" or name == "factor":
      read.problem(f"rope_type={kind} needs {name} in rope_parameters or rope_scaling")
  if kind != "default":
    name = "original_max_position_embeddings"
    keys[name] = read.typed(name, parameters.get(name) or read.get("max_position_embeddings"), int)
    if (own := read.get(name, default=keys[name])) != keys[name]:
      said = f"{name}={shown(own)}, beside {shown(keys[name])} for the rotation"
      read.problem(f"{said}: transformers 4 and 5 differ here")
  if kind == "yarn" and not read.problems:
    keys["rope_attention_scaling"] = _scales_attention(read, parameters)
  return keys


def _scales_attention(read: _Reader, parameters: Mapping[str, Any]) -> bool:
  """Whether YaRN scales the heads by its usual factor; a factor of another size is refused."""
  usual = 0.1 * math.log(parameters["factor"]) + 1.0 if parameters["factor"] > 1.0 else 1.0
  if (factor := parameters.get("attention_factor")) is not None:
    factor = read.typed("attention_factor", factor, float)
  if parameters.get("mscale") or parameters.get("mscale_all_dim"):
    read.problem("rope_parameters with mscale are not known here")
  is_usual = factor is None or math.isclose(factor, usual, rel_tol=1e-6)
  if not is_usual and factor != 1.0:
    read.problem(f"attention_factor={factor} is not known here; known are 1.0 and the usual {usual:.6g}")
  return is_usual


def weight_dtype(dtypes: set[str], origin: str) -> str:
  """The key weight_dtype for tensors of these dtypes: the narrowest that holds all of them exactly."""
  if unknown := dtypes - set(_DTYPES):
    raise LayoutError(f"{origin}: parameters of dtype {', '.join(sorted(unknown))} are not known")
  kept = {_DTYPES[name] for name in dtypes}
  return kept.pop() if len(kept) == 1 else "float64" if "float64" in kept else "float32"


def config_json(model: ModelConfig, dtype: str, max_positions: int, special_ids: Mapping[str, int],
                others: Mapping[str, Any] | None = None) -> dict[str, Any]:  # fmt: skip
  """A config.json that transformers reads as this model, with parameters of `dtype`.

  max_positions: `max_position_embeddings`, where `others` lacks it. special_ids: bos_token_id and the like. others:
  `other_entries` of the model's original config.json. Raises LayoutError where reading the result gives other keys,
  since transformers has no such model.
  """
  family = FAMILIES[model.decoder_block]
  theirs = family.huggingface
  content: dict[str, Any] = {"use_cache": True}
  if family.routed:
    content["output_router_logits"] = False
  content |= dict(others or {}) | {"architectures": [theirs.model_class], "model_type": theirs.model_type}
  content |= {"dtype": dtype, "torch_dtype": dtype, **{name: known[0] for name, known in theirs.demands.items()}}
  for entry in theirs.entries:
    value = model.feed_forward_width if entry.key == "base_moe_mlp_dim" else getattr(model, entry.key)
    content |= dict.fromkeys(entry.names, value)
  if model.rope_type != "none":
    content.setdefault("max_position_embeddings", max_positions)
    content |= _write_rotary(model)
  if theirs.sliding:
    content |= _write_window(model, theirs)
  for name, number in special_ids.items():  # a model may end a text with one of several tokens
    said = content.get(name)
    if number not in (said if isinstance(said, list) else [said]):
      content[name] = number
  again = keys_of(content, "config.json")
  again.pop("max_target_length", None)
  if lost := differing(ModelConfig(**again), model):
    has = f"{theirs.model_class} of transformers has"
    raise LayoutError(*(f"{key}={shown(value)}: {has} {shown(other)}" for key, (other, value) in lost.items()))
  return content


def _write_window(model: ModelConfig, theirs: HuggingFace) -> dict[str, Any]:
  num_layers, cycle, own = model.base_num_decoder_layers, model.inhomogeneous_layer_cycle_interval, model.attention_type
  names = {ours: name for name, ours in _LAYER_TYPES.items()}
  types = [names[own[i % cycle % len(own)]] for i in range(num_layers)]
  first = next((i for i, name in enumerate(types) if name == "sliding_attention"), num_layers)
  content: dict[str, Any] = {"sliding_window": model.sliding_window_size if first < num_layers else None}
  if first == num_layers and theirs.sliding == "alternate":
    content["sliding_window"] = 128  # gpt-oss of transformers forms a mask with a window in any case
  if theirs.sliding == "late":  # the first releases of transformers with Qwen3 read no layer_types
    content |= {"use_sliding_window": first < num_layers, "max_window_layers": first}
  return content | ({"layer_types": types} if theirs.layer_types else {})


def _write_rotary(model: ModelConfig) -> dict[str, Any]:
  """In the words of transformers 5 and of 4."""
  scaling: dict[str, Any] = {}
  if model.rope_type != "default":
    kind, names = ("yarn", _YARN) if model.rope_type == "yarn" else ("llama3", _LLAMA3)
    scaling = {"rope_type": kind} | {theirs: getattr(model, ours) for ours, theirs in names.items()}
    scaling["original_max_position_embeddings"] = model.original_max_position_embeddings
    if kind == "yarn" and not model.rope_attention_scaling:
      scaling["attention_factor"] = 1.0
  parameters = {"rope_theta": model.rope_max_timescale, "rope_type": "default"} | scaling
  # Without rope_scaling transformers 4 scales gpt-oss.
  return {"rope_theta": model.rope_max_timescale, "rope_parameters": parameters, "rope_scaling": scaling or None}


def _function_keys(model: ModelConfig) -> dict[str, Any]:
  """The keys that make the model's function; what its other keys leave without effect is not among them."""
  keys = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
  unread = _HOW_COMPUTED | (set().union(*_SCALING.values()) - _SCALING.get(model.rope_type, set()))
  if model.rope_type == "none":
    unread |= {"rope_max_timescale"}
  if model.num_experts > 1:
    keys["base_moe_mlp_dim"] = model.feed_forward_width
    unread |= {"base_mlp_dim"}
  else:
    unread |= {"num_experts_per_tok", "norm_topk_prob", "base_moe_mlp_dim"}
  return {key: value for key, value in keys.items() if key not in unread}


def differing(found: ModelConfig, wanted: ModelConfig) -> Mapping[str, tuple[Any, Any]]:
  """Keys of the function that differ: {key: (found, wanted)}."""
  a, b = _function_keys(found), _function_keys(wanted)
  pairs = {key: (a.get(key, getattr(found, key)), b.get(key, getattr(wanted, key))) for key in a | b}
  return {key: (there, here) for key, (there, here) in pairs.items() if there != here}
