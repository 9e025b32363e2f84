"""Bytes of one train step on one device, from the configuration alone, before anything is compiled.

The estimate is of the fullest moment of the step: the backward pass of one layer, of the output head, or of the
validation rows, whichever needs most. Nothing here runs or imports JAX.

B rows, T positions, N = B T tokens on one device; D embed dim, F feed-forward width, H query and K key/value heads,
h head width, L layers, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

from maxghost.config import Config

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int32": 4, "int64": 8, "uint32": 4, "bool": 1}
SHORT_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int32": "s32"}
# Mesh axes that a logical axis of a weight is split over by the default rules.
SPLIT = {
  "embed": ("fsdp", "context", "expert"),
  "mlp": ("tensor",),
  "vocab": ("tensor",),
  "q_heads": ("tensor",),
  "kv_heads": ("tensor",),
  "heads": ("tensor",),
  "exp": ("expert",),
}
# Arrays that live at once while a layer's backward pass runs. Calibrated against the TPU compiler
# (benchmarks/memory.py), which fuses what is elementwise.
LIVE_HIDDEN = 2  # of [N, D]: the layer's input and a cotangent
LIVE_FEED_FORWARD = 1  # of [N, F] beyond the output of each branch, if there are several: their product's cotangent
LIVE_HEADS = 4  # of [N, H h], and of [N, K h] for keys and values


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One array on one device. why: what it is and what it is kept for."""

  shape: tuple[int, ...]
  dtype: str
  why: str
  count: int = 1

  @property
  def bytes(self) -> int:
    return math.prod(self.shape) * BYTES[self.dtype] * self.count

  def describe(self) -> str:
    many = f"{self.count} x " if self.count > 1 else ""
    return f"{many}{SHORT_NAMES[self.dtype]}[{','.join(map(str, self.shape))}] {shown(self.bytes)}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Row:
  """A line of the table: what the tensors of one kind take at the fullest moment."""

  name: str
  tensors: tuple[Tensor, ...]

  @property
  def bytes(self) -> int:
    return sum(tensor.bytes for tensor in self.tensors)


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
  """Rows of the fullest moment. arguments: bytes that live between steps; moment: which moment it is.

  host: bytes in the host's pinned memory. walk: how validation and training rows share the backward pass, if they do.
  change(**keys) -> the estimate with other settings, or None where they contradict each other.
  """

  rows: tuple[Row, ...]
  moment: str
  arguments: int
  host: int
  tokens: int
  cfg: Config
  mesh_shape: Mapping[str, int]
  change: Callable
  walk: str = ""

  @property
  def total(self) -> int:
    return sum(row.bytes for row in self.rows)

  @property
  def temporaries(self) -> int:
    """What XLA calls temporaries: all but the arguments."""
    return self.total - self.arguments

  def table(self, compiled: Mapping[str, int] | None = None) -> list[str]:
    """Lines to print. compiled: {"arguments": bytes, "temporaries": bytes} of the executable (`compiled_sizes`)."""
    lines = [f"memory per device, closed form, fullest during {self.moment} ({self.tokens:,} tokens per device):"]
    rows = [(row.name, row.bytes) for row in self.rows if row.bytes]
    rows += [("total", self.total)] + ([("in host memory", self.host)] if self.host else [])
    lines += [f"  {name:<28}{shown(size):>12}" for name, size in rows]
    lines += [f"  {self.walk}"] if self.walk else []
    if compiled is not None:
      lines.append(self.beside(compiled))
    return lines

  def beside(self, compiled: Mapping[str, int]) -> str:
    """The closed form against an executable's `compiled_sizes`."""
    total = compiled["arguments"] + compiled["temporaries"]
    parts = [("arguments", self.arguments), ("temporaries", self.temporaries)]
    each = ", ".join(f"{name} {shown(compiled[name])} against {shown(mine)}" for name, mine in parts)
    off = self.total / max(total, 1) - 1
    return f"memory per device: XLA {shown(total)}, closed form {shown(self.total)} ({off:+.1%}); {each}"


def compiled_sizes(analysis) -> dict[str, int]:
  """{"arguments", "temporaries"} of XLA's `memory_analysis()`; outputs that take no argument's place count as
  temporaries."""
  fresh = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
  return {"arguments": analysis.argument_size_in_bytes, "temporaries": analysis.temp_size_in_bytes + max(fresh, 0)}


def shown(size: float) -> str:
  """A size in the unit that fits it."""
  for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
    if size >= factor:
      return f"{size / factor:.2f} {unit}"
  return f"{size:.0f} B"


def estimate(
  cfg: Config, mesh_shape: Mapping[str, int] | None = None, parameters: Mapping[str, tuple] | None = None
) -> MemoryEstimate:
  """Bytes per device of one train step.

  mesh_shape: {mesh axis: devices}; None or {} = one device. parameters: {path: (shape, logical axes)} of the model;
  None = those of the plain decoder that the config describes. Paths with "/layers/" are stacked.
  """
  mesh = {axis: size for axis, size in (mesh_shape or {}).items()}
  device = _Device(cfg, mesh, decoder_parameters(cfg) if parameters is None else parameters)
  moments = device.moments()
  name, rows = max(moments.items(), key=lambda item: sum(row.bytes for row in item[1]))

  def change(**keys):
    from maxghost import config

    try:
      return estimate(config.replace(cfg, **keys), mesh_shape, parameters)
    except config.ConfigError:
      return None

  arguments = sum(row.bytes for row in device.resident())
  host, walk = device.host_bytes(), device.walk()
  return MemoryEstimate(tuple(rows), name, arguments, host, device.tokens, cfg, mesh, change, walk)


def decoder_parameters(cfg: Config) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
  """{path: (shape, logical axes)} of the plain decoder with stacked layers."""
  m = cfg.model
  d, heads, kv_heads, h, f = (
    m.base_emb_dim, m.base_num_query_heads, m.base_num_kv_heads, m.head_dim, m.base_mlp_dim
  )  # fmt: skip
  layer = {
    "self_attention/query/kernel": ((d, heads, h), ("embed", "q_heads", "kv")),
    "self_attention/key/kernel": ((d, kv_heads, h), ("embed", "kv_heads", "kv")),
    "self_attention/value/kernel": ((d, kv_heads, h), ("embed", "kv_heads", "kv")),
    "self_attention/out/kernel": ((heads, h, d), ("heads", "kv", "embed")),
    "mlp/wo/kernel": ((f, d), ("mlp", "embed")),
    "pre_self_attention_layer_norm/scale": ((d,), ("norm",)),
    "post_self_attention_layer_norm/scale": ((d,), ("norm",)),
  }
  branches = ["wi"] if len(m.mlp_activations) == 1 else [f"wi_{i}" for i in range(len(m.mlp_activations))]
  layer |= {f"mlp/{name}/kernel": ((d, f), ("embed", "mlp")) for name in branches}
  layers = m.base_num_decoder_layers
  out = {f"decoder/layers/{k}": ((layers, *shape), ("layers", *axes)) for k, (shape, axes) in layer.items()}
  out["token_embedder/embedding"] = ((m.vocab_size, d), ("vocab", "embed"))
  out["decoder/decoder_norm/scale"] = ((d,), ("norm",))
  if not m.logits_via_embedding:
    out["decoder/logits_dense/kernel"] = ((d, m.vocab_size), ("embed", "vocab"))
  return out


class _Device:
  """The arithmetic of one device."""

  def __init__(self, cfg: Config, mesh: Mapping[str, int], parameters: Mapping[str, tuple]):
    self.cfg, self.model, self.mesh = cfg, cfg.model, mesh
    self.params = {k: (self.local(shape, axes), "/layers/" in k) for k, (shape, axes) in parameters.items()}
    self.whole = {k: shape for k, (shape, _) in parameters.items()}
    self.of_experts = {k for k, (_, axes) in parameters.items() if "exp" in axes}
    rows = cfg.data.per_device_batch_size * self.size("tensor", "context", "stage")
    self.rows, self.length = rows, -(-cfg.data.max_target_length // self.size("context"))
    self.tokens = self.rows * self.length
    self.weight, self.compute = cfg.model.weight_dtype, cfg.model.dtype
    self.tensor = self.size("tensor")
    m, width = cfg.model, cfg.model.base_mlp_dim
    if m.num_experts > 1:  # each token passes through several experts
      width = (m.base_moe_mlp_dim if m.base_moe_mlp_dim > 0 else width) * m.num_experts_per_tok
    self.feed_forward = width // self.tensor
    self.num_layers = cfg.model.base_num_decoder_layers if any(stacked for _, stacked in self.params.values()) else 0
    tables = ("decoder/logits_dense/kernel", "token_embedder/embedding")
    self.table = next((self.params[label][0] for label in tables if label in self.params), None)

  def size(self, *axes: str) -> int:
    return math.prod(self.mesh.get(axis, 1) for axis in axes)

  def local(self, shape, axes) -> tuple[int, ...]:
    return tuple(-(-n // self.size(*SPLIT.get(axis, ()))) for n, axis in zip(shape, axes, strict=True))

  def elements(self, stacked: bool | None = None) -> int:
    """Of the parameters on this device: in the stack, outside it, or all."""
    return sum(math.prod(s) for s, in_stack in self.params.values() if stacked is None or stacked == in_stack)

  # What lives between steps.

  def resident(self) -> list[Row]:
    m, o = self.model, self.cfg.optimizer
    streams = {"weights": "weights" in m.offload_to_host, "moments": "optimizer" in m.offload_to_host}
    stacked, outer = self.elements(True), self.elements(False)
    params = [Tensor((outer if streams["weights"] else outer + stacked,), self.weight, "all weights")]
    moments = []
    if o.opt_type == "adamw":
      held = (outer if streams["moments"] else outer + stacked) // (
        self.size("data") if self.cfg_flag("shard_optimizer_over_data") else 1
      )
      moments = [
        Tensor((held,), o.mu_dtype, "Adam's first moments"),
        Tensor((held,), self.weight, "Adam's second moments"),
      ]
    return [Row("parameters", tuple(params)), Row("optimizer", tuple(moments)), Row("batch", (self.batch(),))]

  def cfg_flag(self, name: str) -> bool:
    return bool(self.cfg.flat().get(name, False))

  def batch(self) -> Tensor:
    rows = self.rows * self.cfg.optimizer.gradient_accumulation_steps
    if self.cfg.ghost.ghost_enabled:
      rows += self.cfg.ghost.ghost_val_batch_size * len(self.cfg.data.validation_sets)
    return Tensor((6, rows, self.length), "int32", "token arrays")

  def host_bytes(self) -> int:
    m, o = self.model, self.cfg.optimizer
    stacked = self.elements(True)
    total = stacked * BYTES[self.weight] * (2 if "weights" in m.offload_to_host else 0)  # and their gradients
    if "optimizer" in m.offload_to_host and o.opt_type == "adamw":
      total += stacked * (BYTES[o.mu_dtype] + BYTES[self.weight])
    return total

  # Moments of the step.

  def moments(self) -> dict[str, list[Row]]:
    resident, also = self.resident(), [*self.ghost(), *self.buffers()]
    streamed = self.of_segments() if "weights" in self.model.offload_to_host else []
    out = {"the update": [*resident, *self.gradients(streamed), *also]}
    if self.num_layers:
      gradients = self.gradients(self.of_segments())
      out["the backward pass of a layer"] = [*resident, *gradients, *self.in_layers(), *also]
    if self.table is not None:
      out["the backward pass of the head"] = [*resident, *self.in_head(), *also]
    return out

  def of_segments(self) -> list[Tensor]:
    """Weights and gradients of the segments at work. A loop over the layers of a segment takes the weights as an array
    of their own, cut out of the stack or brought in from the host, and returns the gradients as one."""
    layer = self.elements(True) // self.model.base_num_decoder_layers
    tensors = [
      Tensor((2, length * layer), self.weight, f"weights of a segment of {length} layers, and their gradient")
      for length in self.model.segment_lengths
    ]
    if "weights" in self.model.offload_to_host:
      ahead = self.model.segment_lengths[0] * layer
      tensors.append(Tensor((ahead,), self.weight, "weights of the next segment, on their way from the host"))
    return tensors

  def gradients(self, of_segments: list[Tensor]) -> list[Row]:
    streams = "weights" in self.model.offload_to_host
    held = self.elements(False) if streams else self.elements()
    dtype = "float32" if self.cfg.optimizer.gradient_accumulation_steps > 1 else self.weight
    tensors = [Tensor((held,), dtype, "gradient of the step")]
    if self.cfg.optimizer.gradient_accumulation_steps > 1:
      tensors.append(Tensor((held,), self.weight, "gradient of one micro-batch"))
    return [Row("gradients", (*tensors, *of_segments))]

  def layer_runs(self) -> list[tuple[int, str]]:
    """(number of layer inputs kept, why) level by level."""
    m = self.model
    layers, runs, outer = self.num_layers, [], self.num_layers
    for length in m.segment_lengths:
      runs.append((outer // length, f"inputs of the segments of {length} layers"))
      outer = length
    what = "layers" if not m.segment_lengths else f"{outer} layers of one segment"
    runs.append((outer, f"inputs of all {layers} {what}" if not m.segment_lengths else f"inputs of the {what}"))
    return runs

  def inner_layers(self) -> int:
    return self.model.segment_lengths[-1] if self.model.segment_lengths else self.model.base_num_decoder_layers

  def in_layers(self) -> list[Row]:
    """Boundary carries and what one layer's, or one segment's, backward pass holds."""
    m, n, d = self.model, self.tokens, self.model.base_emb_dim
    *outer, (inner, within) = self.layer_runs()
    widest = max(n, len(self.cfg.data.validation_sets) * self.val_tokens()) if self.in_turn() else n
    carries = [Tensor((count, n, d), self.compute, f"{why}, kept for the backward pass") for count, why in outer]
    carries.append(Tensor((inner, widest, d), self.compute, f"{within}, kept for the backward pass"))
    kept = [
      Tensor((self.inner_layers(), n, width), dtype, f"{name} of {self.inner_layers()} layers, kept because "
             f"remat_policy={m.remat_policy}")
      for name, width, dtype in self.kept_per_token()
    ]  # fmt: skip
    return [
      Row("boundary carries", tuple(carries)),
      Row("within-segment activations", (*kept, *self.working())),
    ]

  def kept_per_token(self) -> list[tuple[str, int, str]]:
    """(name, width, dtype) of the arrays that the remat policy keeps of every layer."""
    m, c = self.model, self.compute
    if m.remat_policy == "full":
      return []
    heads, kv = m.base_num_query_heads * m.head_dim // self.tensor, m.base_num_kv_heads * m.head_dim // self.tensor
    f, d = self.feed_forward, m.base_emb_dim
    products = [("attention queries", heads, c), ("attention keys", kv, c), ("attention values", kv, c)]
    products += [("attention output projection", d, c)]
    products += [(f"mlp wi_{i} output", f, c) for i in range(len(m.mlp_activations))]
    if m.remat_policy == "minimal":
      return products
    extra = [("rotated queries and keys", heads + kv, c), ("attention output", heads, c), ("norm inputs", 2 * d, c)]
    extra += [("mlp activations", 2 * f, c)]
    if not self.linear_attention():
      extra.append(("attention weights", self.length * m.base_num_query_heads // self.tensor, "float32"))
    return products + extra

  def linear_attention(self) -> bool:
    attention = self.model.attention
    return attention == "flash" or (attention in ("blockwise", "autoselected") and self.length > 1024)

  def working(self) -> list[Tensor]:
    """What lives while one layer is computed again and differentiated.

    Left to itself the compiler puts off weight gradients, and what they are taken from, to the end of the layer.
    Schedule reverse_scan takes them in order where it computes layers again (`models.autodiff.gradients_in_order`):
    attention is differentiated when the feed-forward arrays are gone.
    """
    m, n, c = self.model, self.tokens, self.compute
    heads, kv = m.base_num_query_heads * m.head_dim // self.tensor, m.base_num_kv_heads * m.head_dim // self.tensor
    branches = len(m.mlp_activations)
    hidden = Tensor((n, m.base_emb_dim), c, "hidden states and their cotangents in one layer", LIVE_HIDDEN)
    feed_forward = Tensor((n, self.feed_forward), c, "mlp activations and their cotangents in one layer",
                          branches + (LIVE_FEED_FORWARD if branches > 1 else 0))  # fmt: skip
    if not any("/self_attention/" in label for label in self.params):
      return [hidden, feed_forward]

    def attention(count: int, and_cotangents: str) -> list[Tensor]:
      tensors = [
        Tensor((n, heads), c, f"queries, attention output{and_cotangents} in one layer", count),
        Tensor((n, kv), c, f"keys, values{and_cotangents} in one layer", count),
      ]
      if not self.linear_attention():
        scores = (self.rows, m.base_num_query_heads // self.tensor, self.length, self.length)
        tensors.append(Tensor(scores, "float32", f"attention scores of one layer (attention={m.attention})", 2))
      return tensors

    differentiated = attention(LIVE_HEADS, " and their cotangents")
    if not (self.walks_back() and m.segment_lengths):
      return [hidden, feed_forward, *differentiated]
    turns = [hidden, feed_forward, *attention(LIVE_HEADS // 2, "")], [hidden, *differentiated]
    return max(turns, key=lambda tensors: sum(tensor.bytes for tensor in tensors))

  def in_head(self) -> list[Row]:
    """Carries, the logits and the head's gradient."""
    m, n, v = self.model, self.tokens, -(-self.model.vocab_size // self.tensor)
    outer_carries, why = self.layer_runs()[0]
    tiles = m.num_vocab_tiling
    tile = "logits" if tiles == 1 else f"one of {tiles} tiles of the logits"
    wide = "float64" if self.compute == "float64" else "float32"
    logits = [Tensor((-(-n // tiles), v), self.compute, f"{tile}, or their cotangent (num_vocab_tiling={tiles})")]
    head = [Tensor(self.table, self.weight, "gradient of the output table")]
    hidden = [Tensor((n, m.base_emb_dim), self.compute, "last hidden states", 2)]
    if tiles > 1 and m.vocab_tiling_axis == "vocab":
      # The blocks are interleaved, so the table is turned around to cut them, and their gradients to join them.
      head += [
        Tensor(self.table, self.compute, f"blocks of the output table (num_vocab_tiling={tiles})"),
        Tensor(self.table, self.weight, "their gradients"),
        Tensor(self.table, self.weight, "a table half turned around"),
      ]
      hidden = [
        Tensor((n, m.base_emb_dim), self.compute, "last hidden states"),
        Tensor((n, m.base_emb_dim), wide, "sum of their gradient over the blocks"),
      ]
    elif tiles > 1 and self.weight != wide:
      head.append(Tensor(self.table, wide, "sum of the output table's gradient over the tiles"))
    return [
      Row("gradients", tuple(head)),
      Row("boundary carries", (Tensor((outer_carries, n, m.base_emb_dim), self.compute, why),)),
      Row("within-segment activations", tuple(hidden)),
      Row("logits", tuple(logits)),
    ]

  def ghost(self) -> list[Row]:
    g = self.cfg.ghost
    if not g.ghost_enabled:
      return []
    sets = len(self.cfg.data.validation_sets)
    tensors = []
    if g.ghost_schedule == "two_pass":
      exact = factors = 0
      for label, (shape, stacked) in self.params.items():
        layers = shape[0] if stacked else 1
        rows = self.factor_elements(label, stacked)
        if rows is None:
          exact += math.prod(shape)
        else:
          factors += layers * rows
      tensors.append(Tensor((sets * exact,), self.weight, "validation gradients, the directions of the scores"))
      if factors:
        tensors.append(Tensor((sets * factors,), "float32", f"directions of rank {g.ghost_rank}"))
    else:
      tensors += self.walked_back(sets)
    probes = sum(shape[0] if stacked else 1 for shape, stacked in self.params.values())
    tensors.append(Tensor((probes, sets, self.rows, self.length), "float32", "scores per token of every parameter"))
    return [Row("ghost directions and probes", tuple(tensors))]

  def walks_back(self) -> bool:
    """Whether scores come from schedule reverse_scan."""
    return self.cfg.ghost.ghost_enabled and self.cfg.ghost.ghost_schedule == "reverse_scan"

  def in_turn(self) -> bool:
    """Whether schedule reverse_scan finishes the validation rows of a segment before it turns to the training rows: it
    does where the validation gradients of a segment are smaller than the validation inputs of its layers."""
    if not self.walks_back() or not self.model.segment_lengths:
      return False
    stacked = sum(math.prod(shape) for label, shape in self.whole.items() if self.params[label][1])
    layer = stacked // self.model.base_num_decoder_layers * BYTES[self.weight]
    rows = self.cfg.ghost.ghost_val_batch_size * self.cfg.data.max_target_length
    return layer < rows * self.model.base_emb_dim * BYTES[self.compute]

  def walk(self) -> str:
    """How schedule reverse_scan goes back through the layers; empty for the others."""
    if not self.walks_back():
      return ""
    unit = f"by segments of {self.inner_layers()} layers" if self.in_turn() else "layer by layer"
    return f"validation and training rows take turns {unit}"

  def val_tokens(self) -> int:
    """Of one validation set."""
    return self.cfg.ghost.ghost_val_batch_size * self.length

  def walked_back(self, sets: int) -> list[Tensor]:
    """What schedule reverse_scan holds of the validation rows while it is at the training rows of a layer."""
    d, in_turn = self.model.base_emb_dim, self.in_turn()
    layer = self.elements(True) // self.model.base_num_decoder_layers
    *outer, inner = (count for count, _ in self.layer_runs())
    kept = sum(outer[1:] if "carries" in self.model.offload_to_host else outer) + (0 if in_turn else inner)
    # In turn, the first set's gradients of a segment make room for the training gradients, which are counted there.
    gradients = (sets - 1) * inner if in_turn else 2 * sets
    rows = [
      Tensor((sets * self.elements(False),), self.weight, "validation gradients outside the stack"),
      Tensor((gradients, layer), self.weight, "validation gradients of layers, until their training rows are done"),
      Tensor((sets * kept, self.val_tokens(), d), self.compute, "layer inputs of the validation rows"),
      self.waiting(sets),
    ]  # fmt: skip
    if not self.model.segment_lengths:
      rows += [
        Tensor((sets * inner, self.val_tokens(), width), dtype, f"{name} of the validation rows")
        for name, width, dtype in self.kept_per_token()
      ]
    return rows

  def waiting(self, sets: int) -> Tensor:
    """The cotangent of the rows whose turn it is not."""
    d = self.model.base_emb_dim
    if self.in_turn() and "carries" in self.model.offload_to_host:  # where that of the validation rows goes
      return Tensor((1, self.tokens, d), self.compute, "cotangent of the training rows in the validation rows' turn")
    return Tensor((sets, self.val_tokens(), d), self.compute, "cotangent of the validation rows")

  def factor_elements(self, label: str, stacked: bool) -> int | None:
    """Elements of one layer's factors on this device; None where the direction is exact."""
    g = self.cfg.ghost
    shape = self.whole[label][1:] if stacked else self.whole[label]
    direction = g.ghost_direction
    adam = direction == "adam" or (direction == "auto" and self.cfg.optimizer.opt_type == "adamw")
    groups, shape = (shape[0], shape[1:]) if label in self.of_experts else (1, shape)
    if not g.ghost_rank or adam or len(shape) < 2:
      return None
    split = len(shape) - 1 if label.endswith("out/kernel") else 1
    inputs, outputs = math.prod(shape[:split]), math.prod(shape[split:])
    small = g.ghost_rank * (inputs + outputs)
    if 2 * small > inputs * outputs:
      return None
    # The rule of `direction` splits a side over these, experts over theirs.
    return -(-groups * small // self.size("fsdp", "context", "expert"))

  def buffers(self) -> list[Row]:
    """Weights gathered for one layer, and its gradient before it is scattered."""
    if self.size("fsdp", "context", "expert") == 1:
      return []
    layers = self.model.base_num_decoder_layers
    gathered = 0
    for label, (shape, stacked) in self.params.items():
      if stacked:
        full = math.prod(self.whole[label]) // layers // self.tensor
        gathered += full - math.prod(shape) // layers
    buffer = Tensor((gathered,), self.weight, "weights of one layer, gathered, and their gradient", 2)
    return [Row("collectives' buffers", (buffer,))]
