"""A run on its devices before anything is traced: the shapes, shardings, sizes and arithmetic of its train step.

FLOPs are counted from the shapes of the model: XLA counts the body of a scan once, whatever its trip count. Training
counts as 3 forward passes; ghost's extra work is not counted, so that TFLOP/s with and without it are comparable.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from maxghost.config import Config, ModelConfig
from maxghost.parallel import distributed
from maxghost.parallel.mesh import describe
from maxghost.parallel.shardings import Layout, OwnRows, check_rules, check_spread, own_rows, parameters
from maxghost.training import devices, state
from maxghost.training.diloco import Diloco
from maxghost.training.memory import estimate
from maxghost.training.memory_report import MemoryEstimate
from maxghost.training.outer import Outer

# Dense bf16 FLOP/s of one device by JAX's device_kind, from the vendors' data sheets.
PEAK_FLOPS = {"TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v6 lite": 918e12,
              "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}  # fmt: skip


class StepFlops(NamedTuple):
  """FLOPs of one step over all devices: products with weights, and causal attention (half the square)."""

  weights: float
  attention: float

  @property
  def total(self) -> float:
    return self.weights + self.attention


def step_flops(model: ModelConfig, num_rows: int, row_length: int) -> StepFlops:
  """FLOPs of forward and backward, with padding; only the experts that tokens reach and pairs inside a window count."""
  d, heads, kv_heads, h = model.base_emb_dim, model.base_num_query_heads, model.base_num_kv_heads, model.head_dim
  attention_weights = d * (heads + 2 * kv_heads) * h + heads * h * d
  mlp_weights = (len(model.mlp_activations) + 1) * d * model.feed_forward_width * model.num_experts_per_tok
  if model.num_experts > 1:
    mlp_weights += d * model.num_experts  # the router
  layers = model.base_num_decoder_layers
  further = model.mtp_num_layers  # each a layer, a projection and the output head
  per_token = (layers + further) * (attention_weights + mlp_weights) + (1 + further) * d * model.vocab_size
  per_token += further * 2 * d * d
  tokens = num_rows * row_length
  keys = {"global": row_length / 2, "local_sliding": min(model.sliding_window_size, row_length)}
  keys["local_sliding"] -= keys["local_sliding"] ** 2 / (2 * row_length)
  seen = sum(keys[kind] for kind in model.attention_type) / len(model.attention_type)
  scores_and_values = 2 * 2 * seen * heads * h
  return StepFlops(3.0 * 2 * per_token * tokens, 3.0 * (layers + further) * scores_and_values * tokens)


@dataclasses.dataclass(frozen=True)
class Plan:
  """state: the abstract train state, with shardings. spread: a line on a device's share of the parameters. teacher: a
  frozen second model, if it differs from the run's. apart: the slices of a DiLoCo run; `state` is then that of all."""

  cfg: Config
  layout: Layout
  graphdef: nnx.GraphDef
  state: nnx.State
  spread: str
  teacher: ModelConfig | None = None
  apart: Diloco | None = None

  @classmethod
  def of(cls, cfg: Config, layout: Layout, teacher: ModelConfig | None = None) -> "Plan":
    """Plans without allocating. Raises ConfigError for a mesh or axis rules that do not fit the run."""
    devices.check_layout(cfg, layout)
    graphdef, abstract = state.abstract_split(cfg, teacher)
    abstract = layout.abstract(abstract)
    apart = Diloco.of(cfg, layout, graphdef, abstract) if cfg.parallel.enable_diloco else None
    check_rules(apart.state if apart else abstract, layout)
    spread = check_spread(abstract, layout, cfg.parallel.sharding_tolerance)
    return cls(cfg, layout, graphdef, apart.state if apart else abstract, spread, teacher, apart)

  @property
  def inner(self) -> nnx.State:
    """The abstract train state of one slice; without DiLoCo the whole state."""
    return self.apart.inner if self.apart else self.state

  @property
  def rows(self) -> int:
    """Rows of a step over all devices and micro-batches."""
    return devices.rows_per_step(self.cfg, self.layout.num_devices)

  @property
  def own(self) -> OwnRows:
    """The part of the batch that this process reads and records."""
    return own_rows(self.layout.rows(self.rows, apart=True), self.rows, distributed.index())

  @property
  def slices(self) -> np.ndarray | None:
    """The slice of each row that this process reads; None without DiLoCo."""
    if self.apart is None:
      return None
    own, count = self.own, self.rows // self.own.num_shards
    return (own.shard * count + np.arange(count)) // (self.rows // self.layout.apart)

  @property
  def arguments(self) -> tuple:
    """(state, batch, validation batches): the abstract arguments of the train step."""
    batch = devices.batch_shapes(self.cfg, self.rows, self.layout, apart=True)
    return self.state, batch, devices.validation_shapes(self.cfg, self.layout)

  @functools.cached_property
  def num_params(self) -> int:
    """Parameters of the model and its adapters, however few bits hold a frozen one."""
    return sum(size for *_, size in parameters(self.state["model"]))

  @functools.cached_property
  def flops(self) -> StepFlops:
    """FLOPs of a step over all devices."""
    return step_flops(self.cfg.model, self.rows, self.cfg.data.max_target_length)

  def rates(self, seconds: float) -> dict[str, float]:
    """perf/* of one device, with MaxText's names, for a step of these seconds. Tokens include padding."""
    count, peak = self.layout.num_devices, PEAK_FLOPS.get(jax.devices()[0].device_kind)
    tokens, flops = self.rows * self.cfg.data.max_target_length // count, self.flops.total / count
    mfu = {"perf/mfu": flops / seconds / peak} if peak else {}
    return {"perf/step_time_seconds": seconds, "perf/per_device_tflops": flops / 1e12,
            "perf/per_device_tflops_per_sec": flops / 1e12 / seconds, "perf/per_device_tokens": tokens,
            "perf/per_device_tokens_per_sec": tokens / seconds, **mfu}  # fmt: skip

  @functools.cached_property
  def memory(self) -> MemoryEstimate:
    """The estimate per device. Raises ConfigError for a model that cannot be scored."""
    build = functools.partial(state.abstract_split, teacher=self.teacher)
    return estimate(self.cfg, self.layout, (self.graphdef, self.inner), build)

  @property
  def mesh(self) -> str:
    return describe(self.layout.mesh) + (f" of {distributed.count()} processes" if distributed.count() > 1 else "")

  def lines(self) -> list[str]:
    """Lines on mesh, pipeline stages, batch, validation rows, model and FLOPs."""
    cfg, layout, rows = self.cfg, self.layout, self.rows
    lines = [f"mesh: {self.mesh}; {self.spread}"] if layout.num_devices > 1 else []
    lines += Outer(self.apart).lines() if self.apart else []
    accumulated, length, steps = cfg.optimizer.gradient_accumulation_steps, cfg.data.max_target_length, cfg.run.steps
    if layout.stages is not None:
      width = length // layout.rules.sizes["context"] * cfg.model.base_emb_dim * np.dtype(cfg.model.dtype).itemsize
      layers = cfg.model.base_num_decoder_layers // cfg.model.inhomogeneous_layer_cycle_interval
      lines.append(layout.stages.describe(layers, rows // accumulated * layout.stages.num // layout.row_parts, width))
    micro = f" in {accumulated} micro-batches" if accumulated > 1 else ""
    factors = [f"per_device_batch_size {cfg.data.per_device_batch_size}"]
    factors += [f"{layout.num_devices} devices"] if layout.num_devices > 1 else []
    factors += [f"gradient_accumulation_steps {accumulated}"] if accumulated > 1 else []
    made, tokens = f" ({' x '.join(factors)})" if len(factors) > 1 else "", rows * length
    in_all = f"{steps} steps = {tokens * steps:,} tokens"
    lines.append(f"batch: {rows} rows{micro}{made} of {length} tokens = {tokens:,} tokens per step; {in_all}")
    if cfg.val_sets and layout.row_parts > 1:
      val_rows = cfg.ghost.ghost_val_batch_size
      parts, all_parts = layout.rules.parts(layout.rules.leading(layout.rules.batch_axes, val_rows)), layout.row_parts
      placed = f" over {parts} devices"
      if parts < all_parts:
        placed = f", each computed by {all_parts // parts} groups of devices alike; a ghost_val_batch_size that "
        placed += f"{all_parts} divides would be spread over all"
      lines.append(f"validation: {val_rows} rows{placed}")
    billions = f"{self.num_params / 1e9:.3f} billion ({self.num_params:,})"
    lines.append(f"number parameters: {billions if self.num_params >= 1e8 else f'{self.num_params:,}'}")
    decay = {"adamw": "adam_weight_decay", "muon": "muon_weight_decay"}.get(cfg.optimizer.opt_type, "")
    if cfg.adapter.lora_rank and decay and (value := getattr(cfg.optimizer, decay)):
      lines.append(f"adapters: {decay}={value:g} draws them to 0, the base model; 0 is usual (Hugging Face's default)")
    if cfg.model.num_experts > 1:
      weight = cfg.model.load_balance_loss_weight
      added = f"is added, times {weight:g}" if weight else "is left out"
      lines.append(f"training loss: the load-balancing loss of the experts {added} (load_balance_loss_weight)")
    share = self.flops.weights / self.flops.total
    split = f"{share:.2%} learnable weight flops and {1 - share:.2%} attention flops"
    return [*lines, f"Per train step: Total TFLOPs: {self.flops.total / 1e12:.4g}, split as {split}"]
