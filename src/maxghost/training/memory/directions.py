"""Memory of the scores of a step: validation gradients or their factors, validation rows, scores per token.

The parts of each direction come from the twin; the memory of reverse_scan's validation rows is a closed form.
"""

import functools
import math

import jax.numpy as jnp

from maxghost.training.memory.activations import Activations
from maxghost.training.memory.device import Device
from maxghost.training.memory.table import Row, Tensor


class Directions:
  """Memory of the directions for the configured schedule."""

  def __init__(self, device: Device):
    self.device, self.cfg, self.ghost, self.model = device, device.cfg, device.cfg.ghost, device.cfg.model
    self.weight, self.compute = self.model.weight_dtype, self.model.dtype
    self.val_tokens = device.val_rows * device.length
    self.walks_back = device.num_sets > 0 and self.ghost.ghost_schedule == "reverse_scan"

  @functools.cached_property
  def in_turn(self) -> bool:
    """Whether schedule reverse_scan finishes the validation rows of a segment before its training rows.

    It does if the validation gradients of a layer are smaller than its validation inputs, over all devices.
    """
    if not self.walks_back or not self.model.segment_lengths:
      return False
    stacked = [v for v in self.device.params.values() if v.stacked]
    layer = sum(math.prod(v.whole[1:]) * jnp.dtype(v.dtype).itemsize for v in stacked)
    tokens = self.ghost.ghost_val_batch_size * self.cfg.data.max_target_length
    return layer < tokens * self.model.base_emb_dim * jnp.dtype(self.compute).itemsize

  def walk(self, layers_at_once: int) -> str:
    """One line on the order of schedule reverse_scan; empty for other schedules."""
    unit = f"by segments of {layers_at_once} layers" if self.in_turn else "layer by layer"
    return f"validation and training rows take turns {unit}" if self.walks_back else ""

  def rows(self, activations: Activations) -> list[Row]:
    """Rows of the table; empty without scores."""
    if not self.device.num_sets:
      return []
    tensors = {"two_pass": self._two_pass, "reverse_scan": lambda: self._walked_back(activations)}
    found = tensors.get(self.ghost.passes, list)()  # concat holds no validation gradient
    return [Row("ghost directions and probes", (*found, self.device.probes))]

  def _two_pass(self) -> list[Tensor]:
    """The validation gradients are kept for the ledger, even if scores use their factors."""
    scored, sets = self.device.scored, self.device.num_sets
    whole = sum(self.device.params[p.label].elements for p in scored)
    tensors = [Tensor((sets, whole), self.weight, "validation gradients, the directions of the scores")]
    if factors := sum(self.device.factors(p) for p in scored):
      tensors.append(Tensor((factors,), "float32", f"directions of rank {self.ghost.ghost_rank}"))
    return tensors

  def _walked_back(self, activations: Activations) -> list[Tensor]:
    """Memory of the validation rows while schedule reverse_scan processes the training rows of a layer."""
    device, sets, embed = self.device, self.device.num_sets, self.model.base_emb_dim
    layer = device.elements(True) // self.model.base_num_decoder_layers
    *outer, inner = (count for count, _ in activations.layer_runs())
    on_host = "carries" in self.model.offload_to_host
    kept = sum(outer[1:] if on_host else outer) + (0 if self.in_turn else inner)
    # In turn, the training gradients replace the first set's gradients of a segment, and are counted elsewhere.
    gradients = (sets - 1) * inner if self.in_turn else 2 * sets
    tensors = [
      Tensor((sets * device.elements(False),), self.weight, "validation gradients outside the stack"),
      Tensor((gradients, layer), self.weight, "validation gradients of layers, until their training rows are done"),
      Tensor((sets * kept, self.val_tokens, embed), self.compute, "layer inputs of the validation rows"),
    ]
    if self.in_turn and on_host:  # where the cotangent of the validation rows goes
      why = "cotangent of the training rows in the validation rows' turn"
      tensors.append(Tensor((1, activations.tokens, embed), self.compute, why))
    else:
      tensors.append(Tensor((sets, self.val_tokens, embed), self.compute, "cotangent of the validation rows"))
    if not self.model.segment_lengths:
      tensors += [
        Tensor((sets * inner, self.val_tokens, width), dtype, f"{name} of the validation rows")
        for name, width, dtype in activations.kept_per_token()
      ]
    return tensors
