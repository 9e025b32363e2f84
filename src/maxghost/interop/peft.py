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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.checkpoint.layouts_store import LayoutError, StoredArray, full_path, listed, read_json, write_json
from maxghost.config import ModelConfig
from maxghost.interop.convert import new_folder
from maxghost.interop.huggingface import Rule, table
from maxghost.interop.safetensors_files import open_file, write_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", "lora_A.weight", "lora_B.weight"
_LAYERS = "decoder/layers/"
# Entries of adapter_config.json that are read, or leave the meaning of the tensors as it is. Others must be empty.
_KNOWN = frozenset({
  "peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out", "target_modules", "target_parameters",
  "rank_pattern", "alpha_pattern", "init_lora_weights", "bias", "exclude_modules", "layers_to_transform",
  "layers_pattern", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
  "peft_version", "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
  "runtime_config", "ensure_weight_tying",
})  # fmt: skip
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")  # the others change the base weights too

Arrays = Mapping[str, np.ndarray]
Leaf = tuple[str, int | None]  # path without layer, and the layer


@dataclasses.dataclass(frozen=True)
class Settings:
  """What an adapter is besides its arrays. config: the adapter_config.json it came from; {} for a new one."""

  rank: int
  alpha: float
  dropout: float = 0.0
  use_rslora: bool = False
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def scale(self) -> float:
    return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

  def keys(self, arrays: Arrays) -> dict[str, Any]:
    """The keys of a model with this adapter."""
    names = sorted(
      {re.sub(r"(/lora/|_lora_)[ab]$", "", re.sub(r"^decoder/layers/(layers_\d+/)?", "*", x)) for x in arrays}
    )
    path = "|".join(name.replace("*", "decoder/layers.*/") for name in names)
    keys = {"lora_rank": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout}
    return keys | {"lora_use_rslora": self.use_rslora, "lora_module_path": path}


@dataclasses.dataclass(frozen=True)
class Place:
  """An adapted matrix of Hugging Face: rule, layer and expert, its module or parameter, and the names of A and B."""

  rule: Rule
  layer: int | None
  expert: int | None
  module: str
  tensors: tuple[str, str]

  @property
  def stacked(self) -> bool:
    """Whether all experts are in it."""
    return bool(self.rule.lead) and self.expert is None

  @property
  def leaves(self) -> list[tuple[Leaf, Leaf]]:
    """Those of a and b, for each of its parts."""
    return [((adapter_path(x, "a"), self.layer), (adapter_path(x, "b"), self.layer)) for x in self.rule.paths]

  def part_shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a and b of one part."""
    lead, inputs, outputs = (
      [self.rule.sizes[x] for x in y] for y in (self.rule.lead, self.rule.inputs, self.rule.outputs)
    )
    lead = lead if self.stacked else []
    return (*lead, math.prod(inputs), rank), (*lead, rank, *outputs)

  def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of A and B."""
    (*lead, inputs, _), b = self.part_shapes(rank)
    columns = math.prod([rank, *lead])
    return (columns, inputs), (math.prod(b) // columns * len(self.rule.paths), columns)

  def split(self, tensor_a: np.ndarray, tensor_b: np.ndarray, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(a, b) of each part, of rank `rank`. Raises ValueError for a larger A whose B is not block-diagonal."""
    a, b = tensor_a.T, tensor_b.T
    if self.stacked:
      experts = self.rule.sizes[self.rule.lead]
      a = tensor_a.reshape(experts, -1, tensor_a.shape[-1]).swapaxes(-1, -2)
      b = tensor_b.reshape(tensor_b.shape[0], -1, experts).transpose(2, 1, 0)
    whole, axis = self._columns(b.shape[-2]), b.ndim - 2
    parts = [whole.to_param(b, i) for i in range(len(self.rule.paths))]
    if a.shape[-1] == rank:
      return [(a, own) for own in parts]
    rows = [range(i * rank, (i + 1) * rank) for i in range(len(parts))]
    if any(np.delete(own, row, axis).any() for own, row in zip(parts, rows, strict=True)):
      raise ValueError("its B is not block-diagonal")
    return [(np.take(a, row, -1), np.take(own, row, axis)) for own, row in zip(parts, rows, strict=True)]

  def join(self, parts: list[tuple[np.ndarray, np.ndarray]], blocks: bool) -> tuple[np.ndarray, np.ndarray]:
    """A and B of the (a, b) of each part. blocks: with an own A for each, else with that of the first."""
    (a, _), rank, own = parts[0], parts[0][0].shape[-1], [b for _, b in parts]
    if blocks:
      a, axis = np.concatenate([x for x, _ in parts], axis=-1), a.ndim - 2
      widths = [(i * rank, (len(parts) - 1 - i) * rank) for i in range(len(parts))]
      own = [
        np.pad(b, [width if i == axis else (0, 0) for i in range(b.ndim)]) for b, width in zip(own, widths, strict=True)
      ]
    b = self._columns(a.shape[-1]).to_tensor(own)
    if not self.stacked:
      return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    tensor_a = np.ascontiguousarray(a.swapaxes(-1, -2)).reshape(-1, a.shape[-2])
    return tensor_a, np.ascontiguousarray(b.transpose(2, 1, 0)).reshape(b.shape[-1], -1)

  def _columns(self, rank: int) -> Rule:
    """The rule of b [*lead, rank, *O], with the parts beside each other along the last axis."""
    return dataclasses.replace(self.rule, inputs="r", transpose=False, sizes={**self.rule.sizes, "r": rank})


def adapter_path(path: str, part: str) -> str:
  """`.../query/lora/a` of the parameter `.../query/kernel`, and `.../wi_0_lora_a` of the experts' `.../wi_0`."""
  dense = path.removesuffix("/kernel")
  return f"{path}_lora_{part}" if dense == path else f"{dense}/lora/{part}"


def places(model: ModelConfig, parameters: tuple[str, ...] | None = None) -> Iterator[Place]:
  """Every matrix of the model that an adapter may have.

  parameters: names of the adapted `target_parameters`, for experts in one parameter. None: an adapter of each expert,
  where Hugging Face publishes them one by one.
  """
  fused: dict[int, dict[str, Rule]] = {}  # gate_up_proj and down_proj of each layer's experts
  for rule, layer, expert, name in table(model):
    module = name.removesuffix(".weight")
    if rule.inputs and (rule.paths[0].endswith("/kernel") or (rule.per_expert and parameters is None)):
      yield Place(rule, layer, expert, module, (f"{_PREFIX}{module}.{_A}", f"{_PREFIX}{module}.{_B}"))
    elif rule.inputs and rule.lead and not expert:
      held, kind = fused.setdefault(layer or 0, {}), "down_proj" if rule.paths[0].endswith("/wo") else "gate_up_proj"
      held[kind] = dataclasses.replace(
        rule, name=kind, paths=(*(held[kind].paths if kind in held else ()), *rule.paths)
      )
  for layer, held in fused.items():
    name = f"model.layers.{layer}.mlp.experts"
    adapted = [kind for kind in held if parameters is None or kind in parameters]
    for kind in adapted:  # PEFT wraps the second parameter of a module around the first
      stem = f"{_PREFIX}{name}{'.base_layer' * (kind != adapted[-1])}"
      yield Place(held[kind], layer, None, f"{name}.{kind}", (f"{stem}.{_A}", f"{stem}.{_B}"))


def load_adapter(folder: str | Path, model: ModelConfig) -> tuple[Settings, dict[str, np.ndarray]]:
  """Reads an adapter folder for this model.

  Returns:
    (settings, {label: array}), with the dtypes of the file; `decoder/layers/self_attention/query/lora/a` is [L, D, r].

  Raises:
    LayoutError: The folder holds something else than such adapters, or does not fit the model; it names the entry or
      the tensors.
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
    # The router of Mixtral is called mlp.gate since transformers 5.
    names = [name if name in tensors else name.replace(".block_sparse_moe.", ".mlp.") for name in place.tensors]
    used.update(names)
    absent = [name for name in names if name not in tensors]
    if len(absent) == 2:
      continue
    adapted.add(place.module)
    rank, missing = _rank(place, settings, folder / CONFIG), missing + absent
    unlike = [
      pair
      for pair in zip(names, place.shapes(rank), strict=True)
      if pair[0] in tensors and tensors[pair[0]].shape != pair[1]
    ]
    wrong += [
      f"{file}: {name} is {[*tensors[name].shape]}, rank {rank} and the model make it {[*shape]}"
      for name, shape in unlike
    ]
    if absent or unlike:
      continue
    try:
      parts = place.split(tensors[names[0]].read(None), tensors[names[1]].read(None), settings.rank)
    except ValueError as error:
      raise LayoutError(f"{file}: {names[1]} has rank {rank} for {len(place.rule.paths)} parts, but {error}") from None
    for leaves, part in zip(place.leaves, parts, strict=True):
      for leaf, values in zip(leaves, part, strict=True):
        found.setdefault(leaf, {})[place.expert] = values
  unknown = [name for name in tensors if name not in used]
  problems = [f"{file} lacks {listed(missing)}"] * bool(missing)
  problems += [f"{file} has {listed(unknown)}, which the model has no matrix for"] * bool(unknown)
  problems += wrong[:8] or ([] if problems else _untargeted(config, adapted, folder / CONFIG))
  if problems or not found:
    raise LayoutError(*problems or [f"{file} holds no adapter of this model"])
  return settings, stack(found, model, file)


def _settings(config: Mapping[str, Any], origin: Path) -> Settings:
  """Refuses by name what has no counterpart here."""
  rank, alpha, init = config.get("r"), config.get("lora_alpha"), config.get("init_lora_weights", True)
  problems = [f"{name}={value} is not known here" for name, value in config.items() if value and name not in _KNOWN]
  for wrong, text in (
    (config.get("peft_type") != "LORA", f"peft_type={config.get('peft_type')} is not read; only LORA is"),
    (
      config.get("bias", "none") != "none",
      f"bias={config.get('bias')}: trained biases are not read; only bias=none is",
    ),
    (init not in _PLAIN_INITS, f"init_lora_weights={init} changes the base weights, which are not in the folder"),
    (not isinstance(rank, int) or rank < 1, f"r={rank} is no rank"),
    (not isinstance(alpha, int | float), f"lora_alpha={alpha} is no number"),
  ):
    problems += [text] * wrong
  if problems:
    raise LayoutError(*(f"{origin}: {text}" for text in problems))
  return Settings(
    int(rank or 0), float(alpha or 0), float(config.get("lora_dropout") or 0), bool(config.get("use_rslora")), config
  )


def _rank(place: Place, settings: Settings, origin: Path) -> int:
  """The rank of a module by the patterns. Raises LayoutError unless it is that of all, or of parts with own A each."""
  rank, alpha = (
    # As PEFT looks a module up: the first pattern that ends its name.
    next(
      (value for p, value in (settings.config.get(name) or {}).items() if re.match(rf"(.*\.)?({p})$", place.module)),
      own,
    )
    for name, own in (("rank_pattern", settings.rank), ("alpha_pattern", settings.alpha))
  )
  scale = dataclasses.replace(settings, rank=rank, alpha=alpha).scale
  ranks = (settings.rank, settings.rank * len(place.rule.paths))
  if rank not in ranks or not math.isclose(scale, settings.scale, rel_tol=1e-6):
    raise LayoutError(
      f"{origin}: rank_pattern and alpha_pattern give {place.module} rank {rank} and alpha {alpha}; one rank "
      f"({settings.rank}) and scale ({settings.scale:g}) for all modules is read"
    )
  return rank


def _untargeted(config: Mapping[str, Any], adapted: set[str], origin: Path) -> list[str]:
  """A line for the listed targets that no tensor belongs to."""
  modules = config.get("target_modules") or []
  targets = [*([] if isinstance(modules, str) else modules), *(config.get("target_parameters") or ())]
  lost = [x for x in targets if not any(f".{module}".endswith(f".{x.removesuffix('.weight')}") for module in adapted)]
  return [f"{origin} targets {listed(sorted(lost))}, but {TENSORS} holds no tensors of it for this model"] * bool(lost)


def stack(
  found: Mapping[Leaf, Mapping[int | None, np.ndarray]], model: ModelConfig, origin: Path
) -> dict[str, np.ndarray]:
  """{label: array} of arrays by leaf and expert. Raises LayoutError where a layer or expert has no adapter."""
  by_path: dict[str, dict[int | None, np.ndarray]] = {}
  for (path, layer), experts in found.items():
    if None not in experts and len(experts) < model.num_experts:
      raise LayoutError(f"{origin}: an expert of layer {layer} has no {path}; adapt all experts or none")
    by_path.setdefault(path, {})[layer] = experts[None] if None in experts else np.stack([*experts.values()])
  out, cycle, depth = {}, model.inhomogeneous_layer_cycle_interval, model.base_num_decoder_layers
  for path, layers in by_path.items():
    if None in layers:
      out[path] = layers[None]
      continue
    if lost := [layer for layer in range(depth) if layer not in layers]:
      raise LayoutError(f"{origin}: layer {lost[0]} has no {path}; adapt all layers or none")
    for first in range(cycle):
      label = path.replace(_LAYERS, f"{_LAYERS}layers_{first}/") if cycle > 1 else path
      out[label] = np.stack([layers[layer] for layer in range(first, depth, cycle)])
  return out


def unstack(arrays: Arrays, model: ModelConfig) -> dict[Leaf, np.ndarray]:
  """The reverse of `stack`, with all experts in an array."""
  out: dict[Leaf, np.ndarray] = {}
  cycle = model.inhomogeneous_layer_cycle_interval
  for label, values in arrays.items():
    path = re.sub(r"^decoder/layers/layers_\d+/", _LAYERS, label)
    first = 0 if path == label else int(label.split("/")[2].removeprefix("layers_"))
    if path.startswith(_LAYERS):
      out |= {(path, first + i * cycle): one for i, one in enumerate(values)}
    else:
      out[label, None] = values
  return out


def save_adapter(folder: str | Path, model: ModelConfig, settings: Settings, arrays: Arrays, base: str = "") -> None:
  """Writes a new adapter folder that PEFT loads, of arrays as `load_adapter` returns them.

  base: name or path of the base model, for whoever loads the adapter. Raises LayoutError for arrays that do not fit the
  model, and where only some parts of a module are adapted.
  """
  folder, found = full_path(folder), unstack(arrays, model)
  matrices = {path for rule, *_ in table(model) if rule.per_expert for path in rule.paths}
  experts = {path.removesuffix("_lora_a") for path, _ in found if path.endswith("_lora_a")}
  parameters = None  # PEFT reads adapters of single experts only where all their matrices have one
  if settings.config.get("target_parameters") or experts != matrices:
    parameters = tuple({"down_proj" if path.endswith("/wo") else "gate_up_proj" for path in experts})
  held: list[tuple[Place, list]] = []
  used, problems = set(), []
  for place in places(model, parameters):
    lost = [leaf for pair in place.leaves for leaf in pair if leaf not in found]
    used.update(leaf for pair in place.leaves for leaf in pair)
    if not lost:
      one = slice(None) if place.expert is None else place.expert
      held.append((place, [tuple(found[leaf][one] for leaf in pair) for pair in place.leaves]))
    elif len(lost) < 2 * len(place.leaves):
      problems.append(f"{place.module} holds {', '.join(place.rule.paths)}; adapt all, {lost[0][0]} is missing")
  problems += [f"{path} is no adapter of a matrix of this model" for path, layer in found if (path, layer) not in used]
  several = [(place, parts) for place, parts in held if len(parts) > 1]
  own = {place.rule.name for place, parts in several if len({a.tobytes() for a, _ in parts}) > 1}
  own |= {place.rule.name for place, _ in several if _rank(place, settings, folder) > settings.rank}
  for place, parts in held:
    for leaves, part in zip(place.leaves, parts, strict=True):
      for (path, _), values, shape in zip(leaves, part, place.part_shapes(settings.rank), strict=True):
        problems += [f"{path} is {[*values.shape]}, rank {settings.rank} makes it {[*shape]}"] * (values.shape != shape)
  if problems or not held:
    raise LayoutError(*[*dict.fromkeys(problems)][:8] or ["there is no adapter to write"])
  tensors: dict[str, np.ndarray] = {}
  for place, parts in held:
    tensors |= zip(place.tensors, place.join(parts, place.rule.name in own), strict=True)
  config = _config(model, settings, [place for place, _ in held], own, base)
  with new_folder(folder) as temporary:
    stored = [StoredArray((name,), x.shape, x.dtype, lambda _, x=x: x) for name, x in sorted(tensors.items())]
    write_tensors(temporary, stored, sum(x.nbytes for x in stored), TENSORS)
    write_json(temporary / CONFIG, config, indent=2, sort_keys=True)


def _config(model: ModelConfig, settings: Settings, held: list[Place], own: set[str], base: str) -> dict[str, Any]:
  """adapter_config.json. own: names of the rules whose parts have an own A each."""
  linear = [place for place in held if not place.stacked]
  others = {place.module for place in places(model) if not place.stacked} - {place.module for place in linear}
  targets, patterns = set(), {}
  for place in held:
    *_, above, leaf = f".{place.module}".split(".")
    if place in linear:
      targets.add(f"{above}.{leaf}" if any(name.endswith(f".{leaf}") for name in others) else leaf)
    if place.rule.name in own:
      patterns[leaf] = len(place.rule.paths)
  made = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "base_model_name_or_path": base,
    "r": settings.rank, "lora_alpha": settings.alpha, "lora_dropout": settings.dropout, "bias": "none",
    "use_rslora": settings.use_rslora, "use_dora": False, "init_lora_weights": True, "modules_to_save": None,
    "fan_in_fan_out": any(not place.rule.transpose for place in linear), "target_modules": sorted(targets),
    "target_parameters": sorted({".".join(x.module.split(".")[-2:]) for x in held if x.stacked}) or None,
    "rank_pattern": {leaf: settings.rank * n for leaf, n in patterns.items()},
    "alpha_pattern": {leaf: settings.alpha * (n**0.5 if settings.use_rslora else n) for leaf, n in patterns.items()},
  }  # fmt: skip
  # An adapter that came from PEFT keeps its own words, unless its parts have got an own A each since then.
  return made | {k: v for k, v in settings.config.items() if v or k not in ("rank_pattern", "alpha_pattern")}
