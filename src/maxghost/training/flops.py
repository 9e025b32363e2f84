"""The arithmetic of one training step, from the shapes of the model, and the peak rate of known devices.

XLA's own count is useless here: it counts the body of a scan once, whatever its trip count. Ghost's extra work is not
counted, so that TFLOP/s with and without it are comparable. Training counts as 3 forward passes.
"""

import dataclasses
from typing import Any

from maxghost.config.schema import ModelConfig

# Dense bf16 TFLOP/s of one device by JAX's device_kind, from the vendors' data sheets.
PEAK_TFLOPS = {
  "TPU v4": 275.0,
  "TPU v5 lite": 197.0,
  "TPU v5": 459.0,
  "TPU v6 lite": 918.0,
  "NVIDIA A100-SXM4-80GB": 312.0,
  "NVIDIA H100 80GB HBM3": 989.0,
  "NVIDIA H200": 989.0,
}


@dataclasses.dataclass(frozen=True, slots=True)
class StepFlops:
  """FLOPs of one step over all devices: products with weights, and causal attention (half the square)."""

  weights: float
  attention: float

  @property
  def total(self) -> float:
    return self.weights + self.attention

  def describe(self) -> str:
    """MaxText's line."""
    share = self.weights / self.total
    return (
      f"Per train step: Total TFLOPs: {self.total / 1e12:.4f}, split as {share:.2%} learnable weight flops and "
      f"{1 - share:.2%} attention flops"
    )


def step_flops(model: ModelConfig, num_rows: int, row_length: int) -> StepFlops:
  """FLOPs of forward and backward over `num_rows` rows of `row_length` tokens, padding included.

  Experts count where a token is sent to them; a sliding window counts its area.
  """
  d, heads, kv_heads, h = model.base_emb_dim, model.base_num_query_heads, model.base_num_kv_heads, model.head_dim
  attention_weights = d * (heads + 2 * kv_heads) * h + heads * h * d
  width = model.base_mlp_dim
  if model.num_experts > 1 and model.base_moe_mlp_dim > 0:
    width = model.base_moe_mlp_dim
  mlp_weights = (len(model.mlp_activations) + 1) * d * width * model.num_experts_per_tok
  mlp_weights += d * model.num_experts if model.num_experts > 1 else 0
  per_token = model.base_num_decoder_layers * (attention_weights + mlp_weights) + d * model.vocab_size
  tokens = num_rows * row_length
  keys = {"global": row_length / 2, "local_sliding": min(model.sliding_window_size, row_length)}
  keys["local_sliding"] -= keys["local_sliding"] ** 2 / (2 * row_length)
  seen = sum(keys[kind] for kind in model.attention_type) / len(model.attention_type)
  scores_and_values = 2 * 2 * seen * heads * h
  return StepFlops(
    weights=3.0 * 2 * per_token * tokens,
    attention=3.0 * model.base_num_decoder_layers * scores_and_values * tokens,
  )


def peak_flops(device: Any) -> float | None:
  """Dense bf16 FLOP/s of one device; None for unknown devices, such as CPUs."""
  peak = PEAK_TFLOPS.get(device.device_kind)
  return None if peak is None else peak * 1e12
