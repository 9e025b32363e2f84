"""LoRA adapters in the folders of PEFT: adapter_config.json and adapter_model.safetensors.

Of a dense matrix [I, O], PEFT stores `lora_A.weight` [r, I] and `lora_B.weight` [O, r] under its module's name; the
table of Hugging Face tensors (configs/tensors.txt) says which matrix that is here. Two kinds hold several matrices:

- A module with parts side by side (`c_attn` of GPT-2, `gate_up_proj` of experts). One A for all parts is read as a copy
  of it for each part. Parts with an own A each are written as one adapter of n times the rank: A below A, and B block-
  diagonal, so that each part meets its own A alone; `rank_pattern` and `alpha_pattern` keep the scale.
- All experts in one parameter (`target_parameters`): A [E r, I] holds them one after the other, B [O, r E] in turn.

r rank, E experts, I inputs, O outputs of a matrix; here `a` is [layers, (E,) I, r] and `b` is [layers, (E,) r, *O].
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.checkpoint.layouts_store import LayoutError, StoredArray, full_path, read_json, write_json
from maxghost.config import ModelConfig
from maxghost.config.values import listed
from maxghost.interop.convert import new_folder
from maxghost.interop.huggingface import Rule, table
from maxghost.interop.safetensors_files import open_file, write_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _PARTS, _PATTERNS = "base_model.model.", ("lora_A.weight", "lora_B.weight"), ("rank_pattern", "alpha_pattern")
_LAYERS = "decoder/layers/"
# Entries of adapter_config.json that are read, or leave the meaning of the tensors as it is. Others must be empty.
_KNOWN = frozenset({"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out", "target_modules",
                    "target_parameters", "rank_pattern", "alpha_pattern", "init_lora_weights", "bias",
                    "exclude_modules", "layers_to_transform", "layers_pattern", "auto_mapping",
                    "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
                    "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config",
                    "lora_ga_config", "runtime_config", "ensure_weight_tying"})  # fmt: skip
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")  # the others change the base weights too

Arrays = Mapping[str, np.ndarray]
Leaf = tuple[str, int | None]  # path without layer, and the layer


@dataclasses.dataclass(frozen=True)
class Settings:
  """What an adapter is besides its arrays."""

  rank: int
  alpha: float
  dropout: float = 0.0
  use_rslora: bool = False
  base_qtype: str = ""  # lora_weight_qtype of the base that it was trained on, where that is known
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the adapter_config.json that it came from

  @property
  def scale(self) -> float:
    return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclasses.dataclass(frozen=True)
class Place:
  """An adapted matrix of Hugging Face: rule, layer, expert, its module or parameter, and how its tensors begin."""

  rule: Rule
  layer: int | None
  expert: int | None
  module: str
  stem: str

  @property
  def tensors(self) -> list[str]:
    return [f"{_PREFIX}{self.stem}.{part}" for part in _PARTS]

  @property
  def num_stacked(self) -> int:
    """Number of experts that are in it; 0 for a plain matrix."""
    return self.rule.sizes[self.rule.lead] if self.rule.lead and self.expert is None else 0

  @property
  def leaves(self) -> list[tuple[Leaf, Leaf]]:
    """Those of a and b, for each of its parts."""
    return [((adapter_path(x, "a"), self.layer), (adapter_path(x, "b"), self.layer)) for x in self.rule.paths]

  def shapes(self, rank: int) -> list[tuple[int, int]]:
    inputs, outputs = (math.prod(self.rule.sizes[x] for x in y) for y in (self.rule.inputs, self.rule.outputs))
    rows = rank * (self.num_stacked or 1)
    return [(rows, inputs), (outputs * len(self.rule.paths), rows)]

  def split(self, tensor_a: np.ndarray, tensor_b: np.ndarray, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(a, b) of each part, of rank `rank`. Raises ValueError for a larger A whose B is not block-diagonal."""
    a, b = tensor_a.T, tensor_b.T
    if self.num_stacked:
      a = tensor_a.reshape(self.num_stacked, -1, tensor_a.shape[-1]).swapaxes(-1, -2)
      b = tensor_b.reshape(tensor_b.shape[0], -1, self.num_stacked).transpose(2, 1, 0)
    columns, axis, parts = self._columns(b.shape[-2]), b.ndim - 2, range(len(self.rule.paths))
    if a.shape[-1] == rank:
      return [(a, columns.to_param(b, i)) for i in parts]
    rows = [range(i * rank, (i + 1) * rank) for i in parts]
    if any(np.delete(columns.to_param(b, i), rows[i], axis).any() for i in parts):
      raise ValueError("its B is not block-diagonal")
    return [(np.take(a, rows[i], -1), np.take(columns.to_param(b, i), rows[i], axis)) for i in parts]

  def join(self, parts: list[tuple[np.ndarray, np.ndarray]], blocks: bool) -> tuple[np.ndarray, np.ndarray]:
    """A and B of the (a, b) of each part. blocks: with an own A for each, else with that of the first."""
    a, b = parts[0][0], [b for _, b in parts]
    if blocks:
      axis = a.ndim - 2  # of the rank in b
      a, count = np.concatenate([a for a, _ in parts], axis=-1), range(len(b))
      b = [np.concatenate([x if i == own else np.zeros_like(x) for i in count], axis) for own, x in enumerate(b)]
    b = self._columns(a.shape[-1]).to_tensor(b)
    if self.num_stacked:
      a, b = a.transpose(1, 0, 2).reshape(a.shape[1], -1), b.transpose(1, 0, 2).reshape(-1, b.shape[-1])
    return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)

  def _columns(self, rank: int) -> Rule:
    """The rule of b [*lead, rank, *O], with the parts beside each other along the last axis."""
    return dataclasses.replace(self.rule, inputs="r", transpose=False, sizes={**self.rule.sizes, "r": rank})


def adapter_path(path: str, part: str) -> str:
  """`.../query/lora/a` of the parameter `.../query/kernel`, and `.../wi_0_lora_a` of the experts' `.../wi_0`."""
  dense = path.removesuffix("/kernel")
  return f"{path}_lora_{part}" if dense == path else f"{dense}/lora/{part}"


def places(model: ModelConfig, parameters: tuple[str, ...] | None = None) -> Iterator[Place]:
  """Every matrix of the model that an adapter may have. parameters: names of the adapted `target_parameters`, for
  experts in one parameter; None: an adapter of each expert, where Hugging Face publishes them one by one."""
  fused: dict[int, dict[str, Rule]] = {}  # gate_up_proj and down_proj of each layer's experts
  for rule, layer, expert, name in table(model):
    module = name.removesuffix(".weight")
    if rule.inputs and (rule.paths[0].endswith("/kernel") or (rule.per_expert and parameters is None)):
      yield Place(rule, layer, expert, module, module)
    elif rule.inputs and rule.lead and not expert:
      held, kind = fused.setdefault(layer or 0, {}), "down_proj" if rule.paths[0].endswith("/wo") else "gate_up_proj"
      paths = (*(held[kind].paths if kind in held else ()), *rule.paths)
      held[kind] = dataclasses.replace(rule, name=kind, paths=paths)
  for layer, held in fused.items():
    name, adapted = f"model.layers.{layer}.mlp.experts", [k for k in held if parameters is None or k in parameters]
    for kind in adapted:  # PEFT wraps the second parameter of a module around the first
      stem = name if kind == adapted[-1] else f"{name}.base_layer"
      yield Place(held[kind], layer, None, f"{name}.{kind}", stem)


def load_adapter(folder: str | Path, model: ModelConfig) -> tuple[Settings, dict[str, np.ndarray]]:
  """Reads an adapter folder for this model.

  Returns (settings, {label: array}), with the dtypes of the file; `decoder/layers/self_attention/query/lora/a` is
  [L, D, r] (with scan_layers). Raises LayoutError, naming the entry or the tensors, for adapters of another model.
  """
  folder = full_path(folder)
  config, file = read_json(folder / CONFIG), folder / TENSORS
  settings = _settings(config, folder / CONFIG)
  if not file.is_file():
    raise LayoutError(f"{folder} has no {TENSORS}; adapters in other files are not read")
  tensors = open_file(file)
  parameters = tuple(name.rpartition(".")[2] for name in config.get("target_parameters") or ())
  found: dict[Leaf, dict[int | None, np.ndarray]] = {}  # of each expert
  adapted, missing, wrong, used = set(), [], [], set()
  for place in places(model, parameters or None):
    if tensors.keys().isdisjoint(place.tensors):  # the router of Mixtral is called mlp.gate since transformers 5
      module, stem = (name.replace(".block_sparse_moe.", ".mlp.") for name in (place.module, place.stem))
      place = dataclasses.replace(place, module=module, stem=stem)
    used.update(names := place.tensors)
    absent = [name for name in names if name not in tensors]
    if not absent or _among(config.get("exclude_modules"), place.module):
      adapted.add(place.module)
    if absent:
      missing += absent if len(absent) == 1 else []
      continue
    rank, unlike = _rank(place, settings, folder / CONFIG), len(wrong)
    for name, shape in zip(names, place.shapes(rank), strict=True):
      if (there := tensors[name].shape) != shape:
        wrong.append(f"{file}: {name} is {[*there]}, rank {rank} and the model make it {[*shape]}")
    try:
      a, b = (tensors[name].read(None) for name in names)
      parts = place.split(a, b, settings.rank) if len(wrong) == unlike else []
    except ValueError as error:
      raise LayoutError(f"{file}: {names[1]} has rank {rank} for {len(place.rule.paths)} parts, but {error}") from None
    for leaves, part in zip(place.leaves, parts, strict=False):  # no parts where a shape is wrong
      for leaf, values in zip(leaves, part, strict=True):
        found.setdefault(leaf, {})[place.expert] = values
  problems = [f"{file} lacks {listed(missing)}"] if missing else []
  if unknown := [name for name in tensors if name not in used]:
    problems.append(f"{file} has {listed(unknown)}, which the model has no matrix for")
  problems += wrong[:8] or ([] if problems else _untargeted(config, adapted, folder / CONFIG))
  if problems or not found:
    raise LayoutError(*problems or [f"{file} holds no adapter of this model"])
  return settings, stack(found, model, file)


def _settings(config: Mapping[str, Any], origin: Path) -> Settings:
  """Refuses by name what has no counterpart here."""
  kind, bias, init = config.get("peft_type"), config.get("bias", "none"), config.get("init_lora_weights", True)
  rank, alpha = config.get("r"), config.get("lora_alpha")
  problems = [f"{name}={value} is not known here" for name, value in config.items() if value and name not in _KNOWN]
  if kind != "LORA":
    problems.append(f"peft_type={kind} is not read; only LORA is")
  if bias != "none":
    problems.append(f"bias={bias}: trained biases are not read; only bias=none is")
  if init not in _PLAIN_INITS:
    problems.append(f"init_lora_weights={init} changes the base weights, which are not here")
  if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
    problems.append(f"r={rank}, lora_alpha={alpha}: no rank and number")
  if problems:
    raise LayoutError(*(f"{origin}: {text}" for text in problems))
  dropout, use_rslora = float(config.get("lora_dropout") or 0), bool(config.get("use_rslora"))
  return Settings(config["r"], float(config["lora_alpha"]), dropout, use_rslora, config=config)


def _rank(place: Place, settings: Settings, origin: Path) -> int:
  """The rank of a module by the patterns. Raises LayoutError unless it is that of all, or of parts with own A each."""
  own, key = {"rank": settings.rank, "alpha": settings.alpha}, place.module
  key += ".weight" * _among(settings.config.get("target_parameters"), f"{key}.weight")
  for name in own:  # as PEFT looks a module or a target parameter up: by the first pattern that ends its name
    patterns = settings.config.get(f"{name}_pattern") or {}
    own[name] = next((x for p, x in patterns.items() if re.match(rf"(.*\.)?({p})$", key)), own[name])
  scale, ranks = dataclasses.replace(settings, **own).scale, (settings.rank, settings.rank * len(place.rule.paths))
  if own["rank"] not in ranks or not math.isclose(scale, settings.scale, rel_tol=1e-6):
    said = f"{origin}: rank_pattern and alpha_pattern give {place.module} rank {own['rank']} and alpha {own['alpha']}"
    raise LayoutError(f"{said}; one rank ({settings.rank}) and scale ({settings.scale:g}) for all modules is read")
  return int(own["rank"])


def _untargeted(config: Mapping[str, Any], adapted: set[str], origin: Path) -> list[str]:
  """A line for the listed targets that no tensor belongs to."""
  modules = config.get("target_modules") or ()  # a text is a pattern
  targets = [*(() if isinstance(modules, str) else modules), *(config.get("target_parameters") or ())]
  lost = [x for x in targets if not any(_among([x.removesuffix(".weight")], module) for module in adapted)]
  return lost and [f"{origin} targets {listed(sorted(lost))}, but {TENSORS} holds no tensors of it for this model"]


def _among(names: Iterable[str] | str | None, module: str) -> bool:
  """Whether one of the names is the module's or its end from a dot on, or the pattern is that of its whole name."""
  if isinstance(names, str):
    return re.fullmatch(names, module) is not None
  return any(f".{module}".endswith(f".{name}") for name in names or ())


def stack(found: Mapping[Leaf, Mapping[Any, np.ndarray]], model: ModelConfig, origin: Path) -> dict[str, np.ndarray]:
  """{label in this model: array} of arrays by leaf and expert. Raises LayoutError where some of a stack are missing."""
  held: dict[str, list[np.ndarray]] = {}
  cycle, depth = model.inhomogeneous_layer_cycle_interval, model.base_num_decoder_layers
  for (path, layer), experts in sorted(found.items(), key=lambda item: item[0][1] or 0):
    if None not in experts and len(experts) < model.num_experts:
      raise LayoutError(f"{origin}: an expert of layer {layer} has no {path}; adapt all experts or none")
    whole = experts[None] if None in experts else np.stack([*experts.values()])
    block = f"{_LAYERS}layers_{(layer or 0) % cycle}/" if cycle > 1 else _LAYERS
    block = block if model.scan_layers else f"decoder/layers_{layer}/"
    held.setdefault(path.replace(_LAYERS, block), []).append(whole)
  for label, layers in held.items():
    if label.startswith(_LAYERS) and len(layers) != depth // cycle:
      raise LayoutError(f"{origin}: {len(layers)} of {depth // cycle} layers have {label}; adapt all layers or none")
  return {label: np.stack(x) if label.startswith(_LAYERS) else x[0] for label, x in held.items()}


def unstack(arrays: Arrays, model: ModelConfig) -> dict[Leaf, np.ndarray]:
  """The reverse of `stack`, with all experts in an array."""
  out: dict[Leaf, np.ndarray] = {}
  for label, values in arrays.items():
    path, cycle = re.sub(r"^decoder/layers(/layers)?_\d+/", _LAYERS, label), model.inhomogeneous_layer_cycle_interval
    first = 0 if path == label else int(re.findall(r"_(\d+)/", label)[0])
    layers = values if label.startswith(_LAYERS) else [values]
    out |= {(path, first + i * cycle if path.startswith(_LAYERS) else None): x for i, x in enumerate(layers)}
  return out


def save_adapter(folder: str | Path, model: ModelConfig, settings: Settings, arrays: Arrays, base: str = "") -> None:
  """Writes a new adapter folder that PEFT loads, of arrays as `load_adapter` returns them.

  base: name or path of the base model, for whoever loads the adapter. Raises LayoutError for arrays that do not fit.
  """
  folder, found = full_path(folder), unstack(arrays, model)
  matrices = {path for rule, *_ in table(model) if rule.per_expert for path in rule.paths}
  experts = {path.removesuffix("_lora_a") for path, _ in found if path.endswith("_lora_a")}
  kinds = tuple({"down_proj" if path.endswith("/wo") else "gate_up_proj" for path in experts})
  # PEFT reads adapters of single experts only where all their matrices have one.
  parameters = kinds if settings.config.get("target_parameters") or experts != matrices else None
  held, used, problems, own = [], set(), [], set()
  for place in places(model, parameters):
    leaves = [leaf for pair in place.leaves for leaf in pair]
    lost = [leaf for leaf in leaves if leaf not in found]
    one = slice(None) if place.expert is None else place.expert
    used.update(leaves)
    if 0 < len(lost) < len(leaves):
      problems.append(f"{place.module} holds {', '.join(place.rule.paths)}; adapt all, {lost[0][0]} is missing")
    if lost:
      continue
    held.append((place, [tuple(found[leaf][one] for leaf in pair) for pair in place.leaves]))
    if len({a.tobytes() for a, _ in held[-1][1]}) > 1 or _rank(place, settings, folder) > settings.rank:
      own.add(place.rule.name)
  problems += [f"{path} is no adapter of a matrix of this model" for path, layer in found if (path, layer) not in used]
  if problems or not held:
    raise LayoutError(*[*dict.fromkeys(problems)][:8] or ["there is no adapter to write"])
  joined = [(place.tensors, place.join(parts, place.rule.name in own)) for place, parts in held]
  tensors = {name: x for names, arrays in joined for name, x in zip(names, arrays, strict=True)}
  config = _config(model, settings, [place for place, _ in held], own, base)
  with new_folder(folder) as temporary:
    stored = [StoredArray((name,), x.shape, x.dtype, lambda _, x=x: x) for name, x in sorted(tensors.items())]
    write_tensors(temporary, stored, sum(x.nbytes for x in stored), TENSORS)
    write_json(temporary / CONFIG, config, indent=2, sort_keys=True)


def _config(model: ModelConfig, settings: Settings, held: list[Place], own: set[str], base: str) -> dict[str, Any]:
  """adapter_config.json. own: names of the rules whose parts have an own A each."""
  linear = [place for place in held if not place.num_stacked]
  others = {place.module for place in places(model) if not place.num_stacked} - {place.module for place in linear}
  targets = set()  # the shortest end of each name that ends the name of no other module
  for names in (place.module.split(".") for place in linear):
    ends = [".".join(names[i:]) for i in reversed(range(len(names)))]
    targets.add(next(end for end in ends if not any(_among([end], other) for other in others)))
  counts = {x.module.rpartition(".")[2]: len(x.rule.paths) for x in held if x.rule.name in own}
  made = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "base_model_name_or_path": base,
    "r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "bias": "none",
    "use_rslora": settings.use_rslora, "target_modules": sorted(targets),
    "fan_in_fan_out": any(not place.rule.transpose for place in linear),
    "target_parameters": sorted({".".join(x.module.split(".")[-2:]) for x in held if x.num_stacked}) or None,
    "rank_pattern": {leaf: settings.rank * n for leaf, n in counts.items()},
    "alpha_pattern": {leaf: settings.alpha * (n**0.5 if settings.use_rslora else n) for leaf, n in counts.items()},
  }  # fmt: skip
  # An adapter that came from PEFT keeps its own words; beside parts with an own A each, other patterns say nothing new.
  return made | {k: v for k, v in settings.config.items() if k not in _PATTERNS or (v and not own)}
