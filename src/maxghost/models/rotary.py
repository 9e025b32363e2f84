"""Rotary position embedding, plain or with stretched wavelengths (Su et al., arXiv:2104.09864).

B batch, T positions, H heads, h head width, i index of a pair (of h / 2): the i-th entries of a head's two halves.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from maxghost.config.schema import ModelConfig
from maxghost.parallel import shardings

_MANY = 1 << 14  # angles for which a loop is worth its start


@dataclasses.dataclass(frozen=True)
class Rotary:
  """The rotation that a configuration asks for."""

  cfg: ModelConfig

  def __call__(self, x_BTHh, positions_BT):
    """Position p turns pair i of a head by p * `frequencies`[i] radians, formed in float32 or wider; h is even."""
    if self.cfg.rope_type == "none":
      return x_BTHh
    half, wide = x_BTHh.shape[-1] // 2, jnp.promote_types(x_BTHh.dtype, jnp.float32)
    angle_BT1i = positions_BT[:, :, None, None].astype(wide) * self.frequencies(half, wide)[None, None, None, :]
    sin, cos = _sines(angle_BT1i)
    if self.cfg.rope_type == "yarn" and self.cfg.rope_attention_scaling:
      scale = 0.1 * math.log(self.cfg.rope_factor) + 1.0  # Peng et al., arXiv:2309.00071, section 3.4
      sin, cos = sin * scale, cos * scale
    first, second = x_BTHh[..., :half].astype(wide), x_BTHh[..., half:].astype(wide)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHh.dtype)

  def frequencies(self, half: int, dtype):
    """Radians per position of each of the `half` pairs: of a stretched one, a mean of the plain and the longest."""
    cfg = self.cfg
    frequency_i = jnp.asarray(cfg.rope_max_timescale, dtype) ** -(jnp.arange(half, dtype=dtype) / half)
    if cfg.rope_type == "llama3.1":  # the plain one's share falls from 1 to 0 with its turns in the original length
      turns_i = cfg.original_max_position_embeddings * frequency_i / (2 * math.pi)
      low, high = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
      plain_i = jnp.clip((turns_i - low) / (high - low), 0, 1)
    elif cfg.rope_type == "yarn":
      plain_i = self._plain_share(half, dtype)
    else:
      return frequency_i
    return frequency_i * (plain_i + (1 - plain_i) / cfg.rope_factor)

  def _plain_share(self, half: int, dtype):
    """YaRN: the share of the plain frequency falls linearly in the index, from 1 at the pair that turns beta_fast times
    in the original length to 0 at the pair that turns beta_slow times. Source: arXiv:2309.00071, section 3.2."""

    def index_of(turns: float) -> float:
      length = self.cfg.original_max_position_embeddings / (turns * 2 * math.pi)
      return half * math.log(length) / math.log(self.cfg.rope_max_timescale)

    first, last = index_of(self.cfg.beta_fast), index_of(self.cfg.beta_slow)
    if self.cfg.rope_truncate:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    return 1 - jnp.clip((jnp.arange(half, dtype=dtype) - first) / (last - first or 0.001), 0, 1)


def _sines(angle):
  """(sin, cos) of the angles. Many, on a CPU: in a loop, or XLA forms them again for every half of every head that they
  turn, forward and backward, which costs more than attention's softmax."""
  if angle.size < _MANY or shardings.platform() != "cpu":
    return jnp.sin(angle), jnp.cos(angle)
  return tuple(jax.lax.map(lambda i: jax.lax.switch(i, (jnp.sin, jnp.cos), angle), jnp.arange(2)))
