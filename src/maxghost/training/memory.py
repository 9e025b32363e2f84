"""The memory of a train step on one device, estimated before anything is compiled.

The estimate is the maximum over the backward pass of one layer, that of the output head, and the update. Sizes of the
state, the batches and the twin are those of the run's abstract objects. Arrays that exist only in the compiled step
have closed forms, calibrated against the TPU compiler (benchmarks/memory.py), which fuses elementwise operations.

B rows, T positions, N = B T tokens on one device; D embed dim, F feed-forward width, H query and K key/value heads (of
factors: validation sets), h head width, L layers, V vocabulary.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost import config
from maxghost.config.validate import ROUNDED
from maxghost.ghost.attach import ScoredParam, Twin, attach
from maxghost.models import stack
from maxghost.parallel.shardings import AXES, HOST, Layout, slash_path, use
from maxghost.training import devices, state
from maxghost.training.diloco import INNER, Diloco
from maxghost.training.memory_report import MemoryEstimate, Rows, Tensor, num_bytes
from maxghost.training.scoring import excluded, scoring_spec

# Keys that change neither the shapes nor the shardings of the train state.
_OF_THE_STEP = {"attention", "num_vocab_tiling", "remat_policy", "segment_lengths", "ghost_schedule", "ghost_rank",
                "per_device_batch_size", "gradient_accumulation_steps", "max_target_length"}  # fmt: skip
# Numbers of arrays that exist at once while a layer's backward pass runs.
LIVE_HIDDEN = 2  # of [N, D]: the layer's input and a cotangent
LIVE_HEADS = 4  # of [N, H h], and of [N, K h] for keys and values
LINEAR_FROM = 1024  # positions from which blockwise attention forms no scores of a whole row

CARRIES, WITHIN = "boundary carries", "within-segment activations"
EXPERTS, LAYERS = "exp", "layers"  # the logical axes that number experts and stacked layers
PARAMETERS, OTHER, OUTER = "parameters", "other state", "state of the outer step"


def estimate(cfg: config.Config, layout: Layout | None = None, split: state.Split | None = None,
             build=state.abstract_split) -> MemoryEstimate:  # fmt: skip
  """Bytes per device of a train step. layout: by default one device. split: a result of `build`. Raises ConfigError."""
  layout = layout or Layout.of(config.ParallelConfig(), jax.devices()[:1])
  states: dict[str, PlacedState] = {}

  def of(cfg: config.Config, split: state.Split | None = None) -> MemoryEstimate:
    keys = repr([item for item in cfg.flat().items() if item[0] not in _OF_THE_STEP])
    try:
      if keys not in states:
        states[keys] = PlacedState(cfg, layout, split or build(cfg))
      device = Device(cfg, states[keys])
    except ValueError as error:  # a parameter without a rule, a pattern that matches nothing, a rank that saves nothing
      raise config.ConfigError(str(error)) from error
    step, resident = Step(device), device.resident()
    moments = {name: resident | rows for name, rows in step.moments().items()}
    name = max(moments, key=lambda name: sum(map(num_bytes, moments[name].values())))

    def change(**keys) -> MemoryEstimate | None:
      try:
        changed = config.replace(cfg, **keys)
        devices.check_layout(changed, layout)
        return of(changed)
      except config.ConfigError:
        return None

    return MemoryEstimate(moments[name], name, resident, device.host_bytes, step.tokens, cfg, change, step.walk)

  return of(cfg, split)


class Held(NamedTuple):
  """One Variable of the train state. row: of the table. whole, shape: its whole shape, and that of the part on this
  device. gathered: number of elements when a layer uses it, gathered along the mesh axes that split the batch. frozen:
  a parameter that is not trained, and has no gradient."""

  row: str
  label: str
  axes: tuple[str | None, ...]
  whole: tuple[int, ...]
  shape: tuple[int, ...]
  dtype: str
  on_host: bool
  gathered: int
  frozen: bool

  @property
  def stacked(self) -> bool:
    """Whether the Variable has a leading layer axis."""
    return self.axes[:1] == (LAYERS,)

  @property
  def elements(self) -> int:
    return math.prod(self.shape)


class PlacedState:
  """A train state, of one slice with DiLoCo, on the devices of a layout. split: its (graphdef, abstract state)."""

  def __init__(self, cfg: config.Config, layout: Layout, split: state.Split):
    self.layout, self._graphdef, self._abstract = layout, split[0], layout.abstract(split[1])
    batch_axes = {*layout.rules.batch_axes, *layout.rules.active(layout.rules.first("activation_length"))}
    held = nnx.merge(self._graphdef, self._abstract)
    trained = {path for path, _ in nnx.to_flat_state(nnx.state(held.model, state.trainable(cfg, held.model)))}
    self.variables = [self._held(path, v, batch_axes, trained) for path, v in nnx.to_flat_state(self._abstract)]
    apart = Diloco.of(cfg, layout, self._graphdef, self._abstract).state if layout.apart > 1 else nnx.State({})
    common = [(path, v) for path, v in nnx.to_flat_state(apart) if path[0] != INNER]
    self.variables += [self._held(path, v, batch_axes, trained)._replace(row=OUTER) for path, v in common]
    self._twins: dict[tuple, Twin] = {}

  def _held(self, path: tuple, variable: nnx.Variable, batch_axes: set[str], trained: set[tuple]) -> Held:
    leaf, axes = variable.get_value(), tuple(variable.get_metadata().get(AXES) or ())
    shape, rules = leaf.sharding.shard_shape(leaf.shape), self.layout.rules
    split: tuple[tuple[str, ...], ...] = rules.assign(axes, leaf.shape, slash_path(path)) if axes else ()
    over = [axis for name, found in zip(axes, split, strict=True) if name not in (EXPERTS, LAYERS) for axis in found]
    gathered = math.prod(shape) * rules.parts([axis for axis in over if axis in batch_axes])
    host = getattr(leaf.sharding, "memory_kind", None) == HOST
    row = {"model": PARAMETERS, "optimizer": "optimizer"}.get(path[0], OTHER) if shape else OTHER
    frozen = row == PARAMETERS and path[1:] not in trained
    return Held(row, slash_path(path[1:]), axes, leaf.shape, shape, str(leaf.dtype), host, gathered, frozen)

  def twin(self, cfg: config.Config) -> Twin:
    """The probed twin for one example. Raises ValueError as `attach`."""
    model, spec = nnx.merge(self._graphdef, self._abstract).model, scoring_spec(cfg)
    key = (spec, excluded(cfg, model), len(cfg.data.validation_sets))
    if key not in self._twins:
      self._twins[key] = attach(model, num_examples=1, num_sets=key[2], spec=spec, exclude=key[1])
    return self._twins[key]


class Device:
  """Sizes on one device of a run with this train state."""

  def __init__(self, cfg: config.Config, placed: PlacedState):
    self.cfg, self.layout, self.variables = cfg, placed.layout, placed.variables
    self.params = {v.label: v for v in self.variables if v.row == PARAMETERS}
    layered = any(v.stacked for v in self.params.values()) or not cfg.model.scan_layers
    self.num_layers = cfg.model.base_num_decoder_layers if layered else 0
    self.num_sets = len(cfg.val_sets)
    self.rows = self._local_rows(cfg.data.per_device_batch_size * self.layout.num_devices // self.layout.apart)
    self.val_rows = self._local_rows(cfg.ghost.ghost_val_batch_size) if self.num_sets else 0
    self.length = self.part(cfg.data.max_target_length, "activation_length")
    self.scored = placed.twin(cfg).scored if self.num_sets else ()

  def part(self, size: int, axis: str) -> int:
    """Size of an activation's dimension on this device. axis: its logical name."""
    return -(-size // self.layout.rules.parts(self.layout.rules.first(axis)))

  def _local_rows(self, num_rows: int) -> int:
    return self.layout.rows(num_rows).shard_shape((num_rows,))[0]

  def elements(self, stacked: bool | None = None) -> int:
    """Elements of the trained parameters in the layer stack (True), outside it (False), or in all (None)."""
    return sum(v.elements for v in self.params.values() if not v.frozen and stacked in (None, v.stacked))

  @property
  def layer(self) -> int:
    """Elements of the trained parameters of one layer."""
    return self.elements(True) // self.own_layers

  @property
  def own_layers(self) -> int:
    """Number of layers of which this device holds parameters, whole or in part."""
    return self.cfg.model.base_num_decoder_layers // (self.layout.stages.num if self.layout.stages else 1)

  @property
  def tables(self) -> list[Held]:
    """The weight of the logits, and the embedding if that is another one."""
    tables = [v for v in self.params.values() if "vocab" in v.axes and len(v.axes) == 2]
    return sorted(tables, key=lambda v: v.axes[-1] != "vocab")

  def narrowed(self, stacked: bool) -> int:
    """Elements of the stacked weights wider than the products, if asked for, and of a tied table that is scored."""
    tied = self.tables if self.num_sets and len(self.tables) == 1 else []
    wide = [v for v in self.params.values() if jnp.promote_types(v.dtype, self.cfg.model.dtype) != self.cfg.model.dtype]
    return sum(v.elements for v in wide if ((v.stacked and stacked) or v in tied) and not v.on_host)

  def resident(self) -> Rows:
    """In device memory between steps."""
    kinds, held = (PARAMETERS, "optimizer", OUTER, OTHER), [v for v in self.variables if not v.on_host]
    rows = {kind: [Tensor(v.shape, v.dtype, v.label) for v in held if v.row == kind] for kind in kinds}
    num_rows = devices.rows_per_step(self.cfg, self.layout.num_devices)
    batch = devices.batch_shapes(self.cfg, num_rows, self.layout, apart=True)
    named = [item for one in (batch, *devices.validation_shapes(self.cfg, self.layout)) for item in one.items()]
    local = [Tensor(x.sharding.shard_shape(x.shape), str(x.dtype), name) for name, x in named]
    return rows | {"batch and validation rows": local}

  @property
  def host_bytes(self) -> int:
    """Bytes of the state and of gradients in host memory."""
    held = [v for v in self.variables if v.on_host]
    with_gradient = [v for v in held if v.row == PARAMETERS and not v.frozen]
    waiting = self.val_gradients[0].bytes if "val_gradient" in self.cfg.model.offload_to_host else 0
    return waiting + sum(v.elements * jnp.dtype(v.dtype).itemsize for v in [*held, *with_gradient])

  @property
  def val_gradients(self) -> list[Tensor]:
    """The whole gradients of all validation sets, and what is formed of them."""
    whole = sum(self.params[p.label].elements for p in self.scored)
    early, sets = any(p.spec.early and not p.low_rank for p in self.scored), self.num_sets
    kinds = {"validation gradients, the directions of the scores": sets,
             "validation gradients without curvature": sets * (self.cfg.ghost.curvature != "none"),
             "directions of the whole gradient": (sets + self.cfg.counts_clipping) * early}  # fmt: skip
    return [Tensor((count, whole), self.weight, why) for why, count in kinds.items() if count]

  @property
  def gradients_by_use(self) -> list[Tensor]:
    """Validation gradients of the tables by their uses, which the ledger reads beside the directions made of them."""
    model, why = self.cfg.model, "validation gradient of a table, by one of its uses"
    whole = {p.label for p in self.scored if not p.low_rank and self.cfg.ghost.ghost_direction != "sgd"}
    summed = model.num_vocab_tiling > 1 and model.vocab_tiling_axis == "tokens"
    uses = zip((*self.tables[:1], *self.tables[-1:]), ("float32" if summed else model.dtype, model.dtype), strict=False)
    return [Tensor((self.num_sets, v.elements), dtype, why) for v, dtype in uses if v.label in whole]

  @property
  def weight(self) -> str:
    """The dtype of what is trained."""
    dtype = self.cfg.model.weight_dtype
    return str(jnp.promote_types(dtype, "float32")) if self.cfg.adapter.lora_rank else dtype

  def factors(self, param: ScoredParam) -> int:
    """Elements of a parameter's factors on this device; 0 for a whole direction."""
    shapes, size, specs = param.part_shapes(self.num_sets), 0, []
    with use(dataclasses.replace(self.layout, record=lambda *entry: specs.append(entry[-1]))):
      for name in set(shapes).intersection(("left", "right")):
        param.placed_factor(name, jax.ShapeDtypeStruct(shapes[name], jnp.float32))
        size += math.prod(self.layout.sharding(specs.pop()).shard_shape(shapes[name]) if specs else shapes[name])
    return size


class Step:
  """Arrays that exist only inside a step. in_turn: whether a segment's validation rows are finished first."""

  def __init__(self, device: Device):
    self.device, self.ghost, self.model = device, device.cfg.ghost, device.cfg.model
    m = self.model
    self.compute, self.weight, self.embed = m.dtype, device.weight, m.base_emb_dim
    self.streams = "weights" in m.offload_to_host and not device.cfg.adapter.lora_rank  # what is trained
    self.rows = device.rows + (device.val_rows if self.ghost.ghost_schedule == "concat" else 0)
    self.tokens, self.val_tokens = self.rows * device.length, device.val_rows * device.length
    self.inner_rows, self.num_inputs, self.chunk = self.rows, device.num_layers, 0  # chunk: layers of an iteration
    # Layers that are differentiated without recomputing their inputs.
    self.layers_at_once = m.segment_lengths[-1] if m.segment_lengths else m.base_num_decoder_layers
    # Layers on stages take a micro-batch, or all rows of their stage where a direction needs the whole gradient.
    known = self.ghost.ghost_schedule == "two_pass" and not any(p.spec.in_backward for p in device.scored)
    self.whole_stage = device.num_sets > 0 and not known
    if (stages := device.layout.stages) is not None and device.num_layers:
      repeats = stages.rounds(device.num_layers // m.inhomogeneous_layer_cycle_interval)
      own, iterations = device.num_layers // stages.num, stages.num_micro * repeats + stages.num - 1
      self.inner_rows = self.rows * stages.num // (1 if self.whole_stage else stages.num_micro)
      self.num_inputs = own + repeats if self.whole_stage else iterations * own // repeats
      self.layers_at_once, self.chunk = (1, 0) if self.whole_stage else (self.num_inputs, own // repeats)
    self.inner_tokens = self.inner_rows * device.length
    self.num_heads = device.part(m.base_num_query_heads, "activation_heads")
    self.heads = self.num_heads * m.head_dim
    self.kv = device.part(m.base_num_kv_heads, "activation_kv_heads") * m.head_dim
    self.num_chosen = m.num_experts_per_tok if m.num_experts > 1 else 0
    self.feed_forward = device.part(m.feed_forward_width * max(self.num_chosen, 1), "activation_mlp")
    self.whole_length = device.cfg.data.max_target_length
    in_blocks = m.attention in ("blockwise", "autoselected") and self.whole_length > LINEAR_FROM
    self.ring = device.length < self.whole_length and (in_blocks or m.attention == "blockwise")
    self.linear_attention = m.attention == "flash" or in_blocks or self.ring
    self.walks_back = device.num_sets > 0 and self.ghost.ghost_schedule == "reverse_scan"
    with use(device.layout):
      layers, alone = device.num_layers // m.inhomogeneous_layer_cycle_interval, self.walks_back or not m.scan_layers
      self.remat_policy = stack.resolve(m.remat_policy, layers, alone or bool(m.segment_lengths))
    # Validation and training rows take turns if a layer's validation gradients are smaller than its inputs.
    stacked = [v for v in device.params.values() if v.stacked and not v.frozen]
    layer = sum(math.prod(v.whole[1:]) * jnp.dtype(v.dtype).itemsize for v in stacked)
    inputs = self.ghost.ghost_val_batch_size * self.whole_length * self.embed * jnp.dtype(self.compute).itemsize
    self.in_turn = self.walks_back and bool(m.segment_lengths) and layer < inputs

  @property
  def walk(self) -> str:
    """One line on the order of schedule reverse_scan; empty for other schedules."""
    unit = f"by segments of {self.layers_at_once} layers" if self.in_turn else "layer by layer"
    return f"validation and training rows take turns {unit}" if self.walks_back else ""

  def moments(self) -> dict[str, Rows]:
    """{moment of the step: memory at that moment}."""
    device, also, segments = self.device, self._scores(), self._segments()
    stacked, cycle = [v for v in device.params.values() if v.stacked], self.model.inhomogeneous_layer_cycle_interval
    gathered = sum(v.gathered - v.elements for v in stacked) // device.own_layers * cycle
    updates_parts = device.layout.split_moments and device.layout.rules.sizes.get("data", 1) > 1
    own = sum(v.elements for v in device.params.values() if updates_parts and not (v.frozen or v.on_host))
    narrower = min((self.weight, self.compute), key=lambda dtype: jnp.dtype(dtype).itemsize)
    kinds = ((gathered, 2, narrower, "weights of one layer or cycle, gathered, and their gradient"),
             (own, 1, self.weight, "weights, copied because the new ones are gathered in their place"))  # fmt: skip
    also["collectives' buffers"] = [Tensor((n,), dtype, why, count) for n, count, dtype, why in kinds if n]
    update = self._gradients(segments if "weights" in self.model.offload_to_host else [])
    out = {"the update": update | also | self._scores(in_pass=False)}
    if device.layout.platform == "tpu":  # the ledger of reverse_scan reads the stacked weights themselves
      why = "weights in the dtype of the products, copied before the loops over layers"
      also["weights of the products"] = [Tensor((device.narrowed(not self.walks_back),), self.compute, why)]
    if device.num_layers:
      out["the backward pass of a layer"] = self._after_head(segments) | self._in_layers() | also
    if device.tables:
      out["the backward pass of the head"] = self._in_head(device.tables[0]) | also
    return out

  def _gradients(self, segments: list[Tensor], late: int = 0) -> Rows:
    """late: elements without a gradient yet."""
    accumulates = self.device.cfg.optimizer.gradient_accumulation_steps > 1
    held = self.device.elements(False if self.streams else None)
    here = Tensor((held - late,), self.weight, f"gradient of {'one micro-batch' if accumulates else 'the step'}")
    summed = [Tensor((held,), "float32", "sum of the micro-batches' gradients")] if accumulates else []
    return {"gradients": [*summed, here, *segments]}

  def _after_head(self, segments: list[Tensor]) -> Rows:
    """Gradients while layers are differentiated. The embedding's comes last, and XLA may keep the cotangent of whole
    logits to form the output table's after the layers. Further modules use both tables before."""
    tables = [v for v in self.device.tables if not (v.frozen or self.model.mtp_num_layers)]
    late, logits = sum(v.elements for v in tables[1:]), self._logits()
    if not tables or self.model.num_vocab_tiling > 1 or logits.bytes <= Tensor(tables[0].shape, self.weight, "").bytes:
      return self._gradients(segments, late)
    return self._gradients(segments, late + tables[0].elements) | {"logits": [logits]}

  def _segments(self) -> list[Tensor]:
    """Weights and gradients of the current segments or stage, separate arrays in a loop over their layers."""
    layer, lengths = self.device.layer, self.model.segment_lengths
    why = "weights of a segment of {} layers, and their gradient"
    tensors = [Tensor((2, n * layer), self.weight, why.format(n)) for n in lengths]
    below = [v for v in self.device.params.values() if v.stacked and v.frozen]
    frozen = sum(v.elements * jnp.dtype(v.dtype).itemsize for v in below) // self.model.base_num_decoder_layers
    tensors += [Tensor((n * frozen,), "int8", f"frozen weights of a segment of {n} layers") for n in lengths]
    if self.chunk:
      tensors.append(Tensor((self.chunk * layer,), self.weight, "gradients of one iteration of the pipeline"))
    if "weights" in self.model.offload_to_host:
      why = "weights of the next segment, on their way from the host"
      kinds = ((layer, self.weight, why), (frozen, "int8", f"frozen {why}"))
      tensors += [Tensor((lengths[0] * size,), dtype, why) for size, dtype, why in kinds]
    return tensors

  def _layer_runs(self) -> list[tuple[int, str]]:
    """(number of layer inputs kept, why) level by level."""
    runs, outer = [], self.num_inputs
    for length in self.model.segment_lengths:
      runs.append((outer // length, f"inputs of the segments of {length} layers"))
      outer = length
    return [*runs, (outer, f"inputs of the {outer} layers of one segment" if runs else f"inputs of all {outer} layers")]

  def _in_layers(self) -> Rows:
    """Boundary carries, and the arrays of the backward pass of one layer or segment."""
    n, layers = self.inner_tokens, self.layers_at_once
    *outer, (inner, within) = self._layer_runs()
    widest = max(n, self.device.num_sets * self.val_tokens) if self.in_turn else n
    inputs = [*((count, n, why) for count, why in outer), (inner, widest, within)]
    carries = [Tensor((k, t, self.embed), self.compute, f"{why}, kept for the backward pass") for k, t, why in inputs]
    why = f"of {layers} layers, kept because remat_policy={self.remat_policy}"
    kept = [Tensor((layers, n, width), dtype, f"{name} {why}") for name, width, dtype in self._kept_per_token()]
    if self.device.cfg.adapter.lora_weight_qtype in ("int8", "nf4"):
      whole = self.embed * self.device.part(self.model.base_mlp_dim, "activation_mlp")
      kept.append(Tensor((2, whole), self.compute, "matrices of one layer, from their codes"))
    if self.model.quantization in ROUNDED:
      operands = (n, self.embed + self.feed_forward)
      kept += [Tensor((n, self.feed_forward), "float32", "sum of a product of codes, before its scales"),
               Tensor(operands, self.compute, "rounded operands of a weight gradient")]  # fmt: skip
    return {CARRIES: carries, WITHIN: [*kept, *self._working()]}

  def _kept_per_token(self) -> list[tuple[str, int, str]]:
    """(name, width, dtype) of the arrays that the remat policy keeps of every layer."""
    m, c, heads, kv, f, d = self.model, self.compute, self.heads, self.kv, self.feed_forward, self.embed
    if self.remat_policy == "full":
      return []
    kept = [("attention queries", heads, c), ("attention keys", kv, c), ("attention values", kv, c)]
    kept += [("attention projection", d, c), *((f"mlp wi_{i} output", f, c) for i in range(len(m.mlp_activations)))]
    if self.remat_policy == "minimal":
      return kept
    kept += [("rotated queries and keys", heads + kv, c), ("attention output", heads, c), ("norm inputs", 2 * d, c)]
    weights = ("attention weights", self.whole_length * self.num_heads, "float32")
    return [*kept, ("mlp activations", 2 * f, c), *(() if self.linear_attention else (weights,))]

  def _working(self) -> list[Tensor]:
    """Arrays that exist while one layer is recomputed and differentiated.

    By default the compiler defers weight gradients, and keeps their inputs, to the end of the layer. Schedule
    reverse_scan computes them in order where it recomputes layers (`models.autodiff.gradients_in_order`): attention is
    differentiated after the feed-forward arrays are freed.
    """
    n, c, branches = self.inner_tokens, self.compute, len(self.model.mlp_activations)
    rows = n * (1 + self.num_chosen)  # and a copy for each expert that a token chooses
    hidden = Tensor((rows, self.embed), c, "hidden states and their cotangents in one layer", LIVE_HIDDEN)
    live = branches + (branches > 1)  # the output of each branch, and the cotangent of their product
    feed_forward = Tensor((n, self.feed_forward), c, "mlp activations and their cotangents in one layer", live)
    if not any("heads" in v.axes for v in self.device.params.values()):  # a stack without attention
      return [hidden, feed_forward]
    differentiated = self._attention(LIVE_HEADS, " and their cotangents")
    if not (self.walks_back and self.model.segment_lengths):
      return [hidden, feed_forward, *differentiated]
    return max([hidden, feed_forward, *self._attention(LIVE_HEADS // 2, "")], [hidden, *differentiated], key=num_bytes)

  def _attention(self, count: int, and_cotangents: str) -> list[Tensor]:
    n = self.inner_tokens
    tensors = [
      Tensor((n, self.heads), self.compute, f"queries, attention output{and_cotangents} in one layer", count),
      Tensor((n, self.kv), self.compute, f"keys, values{and_cotangents} in one layer", count),
    ]
    if self.ring:
      going = "that go around the ring"
      tensors += [
        Tensor((n, self.heads), self.compute, "queries, output and its cotangent in the order of the ring", 3),
        Tensor((n, self.heads), "float32", "gradient of the queries"),
        Tensor((n, 2 * self.kv), self.compute, f"keys and values {going}, and the next ones", 2),
        Tensor((n, 2 * self.kv), "float32", f"their gradients {going}, and the next ones", 2),
      ]
    if not self.linear_attention:
      scores, why = (self.inner_rows, self.num_heads, self.device.length, self.whole_length), "of one layer"
      tensors += [Tensor(scores, "float32", f"attention scores {why} (attention={self.model.attention})"),
                  Tensor(scores, self.compute, f"their cotangent {why}")]  # fmt: skip
    return tensors

  def _in_head(self, table: Held) -> Rows:
    """Carries, logits and the head's gradient."""
    m, d, c, further = self.model, self.embed, self.compute, self.model.mtp_num_layers
    n, modules = self.tokens * (1 + further), f"of the {further} modules of multi-token prediction"
    (carries, why), tiles = self._layer_runs()[0], m.num_vocab_tiling
    wide = "float64" if c == "float64" else "float32"
    head = [] if table.frozen else [Tensor(table.shape, table.dtype, "gradient of the output table")]
    hidden = [Tensor((n, d), c, "last hidden states", 2)]
    if tiles > 1 and m.vocab_tiling_axis == "vocab":
      # The blocks are interleaved, so the table is transposed to cut them, and their gradients to join them.
      head += [Tensor(table.shape, c, f"blocks of the output table (num_vocab_tiling={tiles})"),
               Tensor(table.shape, table.dtype, "their gradients"),
               Tensor(table.shape, table.dtype, "a table half turned around")]  # fmt: skip
      hidden = [Tensor((n, d), c, "last hidden states"), Tensor((n, d), wide, "sum of their gradient over the blocks")]
    elif tiles > 1 and table.dtype != wide:
      head.append(Tensor(table.shape, wide, "sum of the output table's gradient over the tiles"))
    if further:
      hidden += [Tensor((further, self.tokens, w), t, f"{what} {modules}") for what, w, t in self._kept_per_token()]
      hidden += [Tensor((further, self.tokens, 3 * d), c, f"inputs {modules}"), *self._working()]
    carried = [Tensor((carries, self.inner_tokens, d), c, why)]
    return {"gradients": head, CARRIES: carried, WITHIN: hidden, "logits": [self._logits()]}

  def _logits(self) -> Tensor:
    m, n = self.model, self.tokens * (1 + self.model.mtp_num_layers)
    vocab, tiles = self.device.part(m.vocab_size, "activation_vocab"), m.num_vocab_tiling
    return Tensor((-(-n // tiles), vocab), m.dtype, f"logits, or their cotangent (num_vocab_tiling={tiles})")

  def _scores(self, in_pass: bool = True) -> Rows:
    """Scores per token, validation gradients or factors, validation rows. in_pass: in the training pass, not after."""
    if not self.device.num_sets:
      return {}
    count = sum(math.prod(param.stack_shape) for param in self.device.scored)
    shape = (count, self.device.num_sets + self.device.cfg.counts_clipping, self.device.rows, self.device.length)
    tensors = [Tensor(shape, "float32", "scores per token of every parameter")]
    if self.ghost.passes == "reverse_scan":
      tensors += self._walked_back()
    elif self.ghost.passes == "two_pass":  # keeps the gradients for the ledger, even if scores use their factors
      away = in_pass and "val_gradient" in self.model.offload_to_host
      tensors += self.device.val_gradients[away:]
      if factors := sum(self.device.factors(p) for p in self.device.scored):
        tensors.append(Tensor((factors,), "float32", f"directions of rank {self.ghost.ghost_rank}"))
      tensors += self.device.gradients_by_use
    return {"ghost directions and probes": tensors}

  def _walked_back(self) -> list[Tensor]:
    """Memory of the validation rows while schedule reverse_scan processes the training rows of a layer."""
    device, sets, embed, c = self.device, self.device.num_sets, self.embed, self.compute
    *outer, inner = (count for count, _ in self._layer_runs())
    on_host = "carries" in self.model.offload_to_host
    kept = sum(outer[1:] if on_host else outer) + (0 if self.in_turn else inner)
    # In turn, the training gradients replace the first set's gradients of a segment, and are counted elsewhere.
    gradients = (sets - 1) * inner if self.in_turn else 2 * sets
    waiting = Tensor((sets, self.val_tokens, embed), c, "cotangent of the validation rows")
    if self.in_turn and on_host:  # where the cotangent of the validation rows goes
      waiting = Tensor((1, self.tokens, embed), c, "cotangent of the training rows in the validation rows' turn")
    why = "validation gradients of layers, until their training rows are done"
    tensors = [Tensor((sets * device.elements(False),), self.weight, "validation gradients outside the stack"), waiting,
               Tensor((gradients, device.layer), self.weight, why),
               Tensor((sets * kept, self.val_tokens, embed), c, "layer inputs of the validation rows")]  # fmt: skip
    if self.ghost.curvature == "secant":
      held = device.elements(False if self.streams else None)
      tensors.append(Tensor((sets, held), self.weight, "validation gradients for the next step"))
    if not self.model.segment_lengths:
      kept = [(name, (sets * inner, self.val_tokens, width), dtype) for name, width, dtype in self._kept_per_token()]
      tensors += [Tensor(shape, dtype, f"{name} of the validation rows") for name, shape, dtype in kept]
    return tensors
