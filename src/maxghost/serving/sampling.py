"""The next token from logits: the likeliest, or drawn from a cut distribution.

B rows, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from maxghost.config import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
  """temperature: logits are divided by it; 0 = the likeliest token. top_k: only the k likeliest; 0 = all.
  top_p: of these, only the likeliest ones that together reach this probability; 1 = all. Raises ConfigError.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    temperature, top_k, top_p = self.temperature, self.top_k, self.top_p
    unused = f"top_k={top_k} and top_p={top_p} have no meaning at temperature=0; set temperature=1"
    problems = {
      f"temperature={temperature}: 0 (the likeliest token) or more": not 0.0 <= temperature < float("inf"),
      f"top_k={top_k}: 0 (all tokens) or more": top_k < 0,
      f"top_p={top_p}: above 0, at most 1 (all tokens)": not 0.0 < top_p <= 1.0,
      unused: temperature == 0.0 and (top_k or top_p < 1.0),
    }
    if found := [text for text, is_wrong in problems.items() if is_wrong]:
      raise ConfigError(*found)


def choose(logits_BV, keys_B, sampling: Sampling):
  """(token int32 [B], its log-probability float32 [B]: 0 at temperature 0).

  keys_B: one random key per row, so that a row's text does not depend on the others.
  """
  if sampling.temperature == 0.0:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), jnp.zeros(len(logits_BV), jnp.float32)
  logits_BV = cut(logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32)) / sampling.temperature, sampling)
  token_B = jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
  logp_BV = jax.nn.log_softmax(logits_BV, axis=-1)
  return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], axis=1)[:, 0].astype(jnp.float32)


def cut(logits_BV, sampling: Sampling):
  """The logits with -inf at the tokens that top_k and top_p leave out; of equal logits at the edge all stay."""
  if sampling.top_k:
    least_B1 = jax.lax.top_k(logits_BV, min(sampling.top_k, logits_BV.shape[-1]))[0][:, -1:]
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
  if sampling.top_p < 1.0:
    sorted_BV = -jnp.sort(-logits_BV, axis=-1)
    probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
    before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
    least_B1 = jnp.min(jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
  return logits_BV
