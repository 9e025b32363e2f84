"""The next token from logits: the likeliest, or drawn from a cut distribution.

B rows, V vocabulary. One Sampling for all rows is part of the program (`choose`); one for each row is an argument of it
(`draw`), so that a compiled program serves all requests.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from maxghost.config import ConfigError

TOP = 20  # most alternatives of a token whose log-probabilities are given
COLDEST = 1e-6  # least temperature above 0; float32 has no logits divided by much less


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
  """temperature: logits are divided by it; 0 = the likeliest token. top_k: only the k likeliest; 0 = all.
  top_p: of these, only the likeliest ones that together reach this probability; 1 = all. min_p: only those at least
  min_p times as likely as the likeliest; 0 = all. repetition_penalty: before all that, positive logits of tokens of the
  prompt and of the answer are divided by it, negative ones multiplied; 1 = none. Raises ConfigError."""

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0

  def __post_init__(self):
    temperature, top_k, top_p, min_p, penalty = dataclasses.astuple(self)
    cuts = {"top_k": top_k, "top_p": 0 if top_p == 1.0 else top_p, "min_p": min_p}
    unused = " and ".join(f"{name}={value}" for name, value in cuts.items() if value and temperature == 0.0)
    is_temperature = temperature == 0.0 or COLDEST <= temperature < float("inf")
    problems = {
      f"temperature={temperature}: 0 (the likeliest token), or {COLDEST} or more": not is_temperature,
      f"top_k={top_k}: 0 (all tokens) or more": top_k < 0,
      f"top_p={top_p}: above 0, at most 1 (all tokens)": not 0.0 < top_p <= 1.0,
      f"min_p={min_p}: 0 (all tokens) or more, below 1": not 0.0 <= min_p < 1.0,
      f"repetition_penalty={penalty}: above 0; 1 = no penalty": not 0.0 < penalty < float("inf"),
    }
    problems[f"{unused}: no meaning at temperature=0; set temperature=1"] = bool(unused) and not any(problems.values())
    if found := [text for text, is_wrong in problems.items() if is_wrong]:
      raise ConfigError(*found)


def choose(logits_BV, keys_B, sampling: Sampling, seen_BV=None):
  """(token int32 [B], its log-probability float32 [B]: 0 at temperature 0, NaN where logits are).

  keys_B: one random key per row, so that a row's text does not depend on the others. seen_BV: tokens of each row, for a
  repetition_penalty.
  """
  if sampling.repetition_penalty != 1.0:
    logits_BV = penalized(logits_BV, seen_BV, sampling.repetition_penalty)
  if sampling.temperature == 0.0:
    token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    return token_B, jnp.where(jnp.isnan(logits_BV).any(-1), jnp.nan, 0).astype(jnp.float32)
  logits_BV = cut(logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32)) / sampling.temperature, sampling)
  token_B = jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)
  logp_BV = jax.nn.log_softmax(logits_BV, axis=-1)
  return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], axis=1)[:, 0].astype(jnp.float32)


def cut(logits_BV, sampling: Sampling):
  """The logits with -inf at the tokens that are left out; of equal logits at the edge all stay."""
  if sampling.top_k:
    logits_BV = _from(logits_BV, jax.lax.top_k(logits_BV, min(sampling.top_k, logits_BV.shape[-1]))[0][:, -1:])
  if sampling.top_p < 1.0:
    logits_BV = _from(logits_BV, _least_of_share(-jnp.sort(-logits_BV, axis=-1), sampling.top_p))
  return _from_min_p(logits_BV, sampling.min_p) if sampling.min_p else logits_BV


def penalized(logits_BV, seen_BV, penalty):
  """The logits with those of seen tokens made less likely; penalty: one, or of each row, [B, 1]."""
  return jnp.where(seen_BV, jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV)


def draw(logits_BV, seen_BV, rows: dict[str, Any]) -> tuple[jax.Array, ...]:
  """(token int32 [B], its log-probability, the TOP likeliest tokens, theirs [B, TOP]) by the sampling of each row.

  rows: the fields of Sampling as arrays [B]; key [B, 2] uint32 and step [B]: a row's draw depends on these two and its
  logits alone; top [B]: 0 where the alternatives are not wanted; they are 0 if no row wants them. Log-probabilities are
  the model's, without penalty, temperature and cuts, float32. What no row needs is not computed.
  """
  raw_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
  column = {name: rows[name][:, None] for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
  penalty_B1, temperature_B1 = column["repetition_penalty"], column["temperature"]
  logits_BV = jax.lax.cond((penalty_B1 != 1).any(), penalized, lambda x, *_: x, raw_BV, seen_BV, penalty_B1)

  def sample(logits_BV):
    logits_BV = logits_BV / jnp.where(temperature_B1 > 0, temperature_B1, 1).astype(logits_BV.dtype)
    is_cut = ((column["top_k"] > 0) | (column["top_p"] < 1)).any()
    logits_BV = jax.lax.cond(is_cut, _cut_rows, lambda x, *_: x, logits_BV, column["top_k"], column["top_p"])
    keys_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(rows["key"], impl="threefry2x32"), rows["step"])
    return jax.vmap(jax.random.categorical)(keys_B, _from_min_p(logits_BV, column["min_p"])).astype(jnp.int32)

  likeliest_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
  drawn_B = jax.lax.cond((temperature_B1 > 0).any(), sample, lambda _: likeliest_B, logits_BV)
  token_B = jnp.where(temperature_B1[:, 0] > 0, drawn_B, likeliest_B)
  log_sum_B1 = jax.nn.logsumexp(raw_BV, axis=-1, keepdims=True)
  most = min(TOP, raw_BV.shape[-1])
  none = lambda x: (jnp.zeros((len(x), most), x.dtype), jnp.zeros((len(x), most), jnp.int32))  # noqa: E731
  top_BN, ids_BN = jax.lax.cond((rows["top"] > 0).any(), lambda x: tuple(jax.lax.top_k(x, most)), none, raw_BV)
  logp_B = (jnp.take_along_axis(raw_BV, token_B[:, None], axis=1) - log_sum_B1)[:, 0]
  return token_B, logp_B.astype(jnp.float32), ids_BN, (top_BN - log_sum_B1).astype(jnp.float32)


def _cut_rows(logits_BV, top_k_B1, top_p_B1):
  """`cut` by top_k and top_p, arrays [B, 1]."""
  sorted_BV = -jnp.sort(-logits_BV, axis=-1)
  place_B1 = jnp.where(top_k_B1 > 0, jnp.minimum(top_k_B1, logits_BV.shape[-1]), logits_BV.shape[-1]) - 1
  least_B1 = jnp.take_along_axis(sorted_BV, place_B1, axis=1)
  of_share_B1 = _least_of_share(_from(sorted_BV, least_B1), top_p_B1)
  return _from(logits_BV, jnp.where(top_p_B1 < 1, jnp.maximum(least_B1, of_share_B1), least_B1))


def _least_of_share(sorted_BV, share):
  """The least of the likeliest logits that together have this share (0: the likeliest) of the probability, [B, 1]."""
  probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
  before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
  return jnp.min(jnp.where((before_BV < share) | (before_BV == 0), sorted_BV, jnp.inf), axis=-1, keepdims=True)


def _from_min_p(logits_BV, min_p):
  return _from(logits_BV, jnp.max(logits_BV, axis=-1, keepdims=True) + jnp.log(min_p).astype(logits_BV.dtype))


def _from(logits_BV, least_B1):
  return jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
