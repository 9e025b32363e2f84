"""Continues prompts: one compiled call reads them, another adds tokens in a while loop until all rows are done.

B rows, T positions of the prompts, N tokens to add, V vocabulary. The cache has a slot for every position that can be
reached, whatever the prompt's length, so that each token costs the same.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.models.layers import Hidden
from maxghost.parallel.shardings import ordered_collectives
from maxghost.serving import kv_cache
from maxghost.serving.sampling import Sampling, choose

_PROMPT_MULTIPLE = 32  # prompts are padded to a multiple of it, so that similar lengths share a compilation
_at = jax.vmap(jax.random.fold_in, in_axes=(0, None))  # (keys of the rows, step) -> keys


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
  """ids_BN: int32 host array of all new tokens, padded; counts_B: how many of them are real, the stop token included.
  done_B: rows that met a stop token. logps_BN: log-probability with which each token was drawn, float32."""

  ids_BN: np.ndarray
  counts_B: np.ndarray
  done_B: np.ndarray
  logps_BN: np.ndarray

  def row(self, i: int) -> np.ndarray:
    return self.ids_BN[i, : self.counts_B[i]]


@dataclasses.dataclass(slots=True)
class Seconds:
  """Where the time of the last call went. tokens: those that the loop added, of all rows."""

  compiling: float = 0.0
  prompt: float = 0.0
  loop: float = 0.0
  tokens: int = 0


class Generator:
  """Compiled generation with one model. stop_ids: tokens that end a row. cache_size: most positions of a row, prompt
  and continuation together. sharding: of the rows, over devices that hold parts of them; None: each holds all.

  The model's state is an argument of every call, so a run can use one Generator. seconds: of the last call.
  """

  def __init__(self, graphdef: nnx.GraphDef, cache_size: int, *, sampling: Sampling | None = None,
               stop_ids: Sequence[int] = (), sharding: jax.sharding.Sharding | None = None):  # fmt: skip
    self._graphdef, self._cache_size, self._sharding = graphdef, cache_size, sharding
    self._sampling, self._stop_ids = sampling or Sampling(), np.unique(np.array(stop_ids, np.int32))
    self._compiled: dict[tuple, Callable] = {}
    self.seconds = Seconds()

  def generate(self, state: nnx.State, prompts: Sequence[Sequence[int]], num_new: int, *, seed: int = 0,
               keys_B: Any = None) -> Progress:  # fmt: skip
    """Adds up to num_new tokens to each prompt (ids, at least one each). Raises ValueError as `stream` does."""
    return list(self.stream(state, prompts, num_new, every=num_new, seed=seed, keys_B=keys_B))[-1]

  def stream(self, state: nnx.State, prompts: Sequence[Sequence[int]], num_new: int, *, every: int = 8, seed: int = 0,
             keys_B: Any = None) -> Iterator[Progress]:  # fmt: skip
    """As `generate`, with a Progress after the first token and after every `every` tokens.

    state: of `nnx.split`. keys_B: of the rows, not `seed`. Raises ValueError for an empty or long prompt, a wrong id.
    """
    vocab_size = nnx.merge(self._graphdef, state).token_embedder.num_embeddings
    tokens_BT, lengths_B = jax.device_put(self._pad(prompts, num_new, vocab_size), self._sharding)
    self.seconds, key = Seconds(), (tokens_BT.shape, num_new)
    keys_B = jax.random.split(jax.random.key(seed), len(prompts)) if keys_B is None else keys_B
    arguments = (state, tokens_BT, lengths_B, keys_B)
    start = self._compile(("start", *key), jax.jit(self._read_prompts, static_argnums=4), *arguments, num_new)
    begin = time.perf_counter()
    progress = _progress(loop := start(*arguments))
    self.seconds.prompt = time.perf_counter() - begin
    yield progress
    again = jax.tree.map(lambda x: x.sharding, loop)  # else XLA chooses, and the next call is refused
    function = jax.jit(self._add_tokens, donate_argnums=1, out_shardings=again)
    count = 1
    while count < num_new and not progress.done_B.all():
      until = jnp.int32(min(count + every, num_new))
      advance = self._compile(("advance", *key), function, state, loop, until)
      begin = time.perf_counter()
      progress = _progress(loop := advance(state, loop, until))
      self.seconds.loop += time.perf_counter() - begin
      self.seconds.tokens = int(progress.counts_B.sum()) - len(prompts)
      count = int(until)
      yield progress

  def _compile(self, name: tuple, function: Callable, *arguments) -> Callable:
    """Ahead of the call, so that its time is no part of the tokens'."""
    if name not in self._compiled:
      begin = time.perf_counter()
      options = ordered_collectives(jax.tree.leaves(arguments))
      self._compiled[name] = function.lower(*arguments).compile(compiler_options=options)
      self.seconds.compiling += time.perf_counter() - begin
    return self._compiled[name]

  def _pad(self, prompts: Sequence[Sequence[int]], num_new: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    if not len(lengths_B) or lengths_B.min() < 1 or num_new < 1:
      raise ValueError("each prompt needs at least one token, and at least one is to be added")
    if lengths_B.max() + num_new > self._cache_size:
      said = f"a prompt of {lengths_B.max()} tokens and {num_new} new ones are more than the"
      raise ValueError(f"{said} {self._cache_size} positions of the cache")
    width = min(-(-int(lengths_B.max()) // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE, self._cache_size)
    tokens_BT = np.zeros((len(lengths_B), width), np.int64)  # holds wrong ids too
    for row, prompt in zip(tokens_BT, prompts, strict=True):
      row[: len(prompt)] = prompt
    if len(wrong := tokens_BT[(tokens_BT < 0) | (tokens_BT >= vocab_size)]):  # the lookup would give NaN
      raise ValueError(f"token id {wrong[0]}: the vocabulary of the model has the ids 0 to {vocab_size - 1}")
    return tokens_BT.astype(np.int32), lengths_B

  def _read_prompts(self, state, tokens_BT, lengths_B, keys_B, num_new: int) -> dict[str, Any]:
    logits_BV, kept = read_prompts(nnx.merge(self._graphdef, state), tokens_BT, lengths_B, self._cache_size)
    batch, seen_BV = len(lengths_B), None
    if self._sampling.repetition_penalty != 1.0:
      real_BT = jnp.where(jnp.arange(tokens_BT.shape[1])[None] < lengths_B[:, None], tokens_BT, logits_BV.shape[1])
      seen_BV = jnp.zeros_like(logits_BV, bool).at[jnp.arange(batch)[:, None], real_BT].set(True, mode="drop")
    token_B, logp_B = choose(logits_BV, _at(keys_B, 0), self._sampling, seen_BV)
    return {
      "seen_BV": _with(seen_BV, token_B),
      "kept": kept,
      "keys_B": keys_B,
      "length_B": lengths_B,  # tokens in the cache
      "token_B": token_B,  # chosen, not in the cache yet
      "ids_BN": jnp.zeros((batch, num_new), jnp.int32).at[:, 0].set(token_B),
      "logps_BN": jnp.zeros((batch, num_new), jnp.float32).at[:, 0].set(logp_B),
      "counts_B": jnp.ones(batch, jnp.int32),
      "done_B": jnp.isin(token_B, self._stop_ids),
      "num_B": jnp.int32(1),
    }

  def _add_tokens(self, state, loop: dict[str, Any], until) -> dict[str, Any]:
    return jax.lax.while_loop(
      lambda loop: (loop["num_B"] < until) & ~loop["done_B"].all(), functools.partial(self._add_token, state), loop
    )

  def _add_token(self, state, loop: dict[str, Any]) -> dict[str, Any]:
    logits_BV, kept = add_token(nnx.merge(self._graphdef, state), loop["token_B"], loop["length_B"], loop["kept"])
    token_B, logp_B = choose(logits_BV, _at(loop["keys_B"], loop["num_B"]), self._sampling, loop["seen_BV"])
    running_B = ~loop["done_B"]
    token_B, logp_B = jnp.where(running_B, token_B, 0), jnp.where(running_B, logp_B, 0)
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=loop["num_B"], axis=1)
    return loop | {
      "seen_BV": _with(loop["seen_BV"], token_B), "kept": kept, "length_B": loop["length_B"] + running_B,
      "token_B": token_B, "ids_BN": put(loop["ids_BN"], token_B), "logps_BN": put(loop["logps_BN"], logp_B),
      "counts_B": loop["counts_B"] + running_B, "done_B": loop["done_B"] | jnp.isin(token_B, self._stop_ids),
      "num_B": loop["num_B"] + 1,
    }  # fmt: skip


def read_prompts(model, tokens_BT, lengths_B, cache_size: int) -> tuple[jax.Array, Any]:
  """(logits of each row's last token [B, V], what the caches keep) of prompts that begin at the left."""
  positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
  inputs = (positions_BT, (positions_BT < lengths_B[:, None]).astype(jnp.int32))
  x = model.embed(tokens_BT, positions_BT)
  hidden, kept = kv_cache.run_decoder(model.decoder, x, inputs, lambda _: kv_cache.Prompt(lengths_B, cache_size))
  return model.logits(_last(hidden, lengths_B))[:, 0], kept


def add_token(model, token_B, counts_B, kept, visible: int | None = None) -> tuple[jax.Array, Any]:
  """(logits after the new token [B, V], `kept` with it). counts_B: tokens of each row before it."""
  logits_BV, new = add_tokens(model, token_B[:, None], counts_B, jnp.ones_like(counts_B), kept, visible)
  return logits_BV, kv_cache.append(kept, new, counts_B)


def add_tokens(model, tokens_BT, counts_B, lengths_B, kept, visible: int | None = None) -> tuple[jax.Array, Any]:
  """(logits after the last of lengths_B new tokens [B, V], their keys and values for `kv_cache.append`)."""
  index_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
  # Padding has the last position: one that the model does not have would give NaN.
  positions_BT = counts_B[:, None] + jnp.minimum(index_1T, lengths_B[:, None] - 1)
  inputs = (positions_BT, (index_1T < lengths_B[:, None]).astype(jnp.int32))
  x = model.embed(tokens_BT, positions_BT)
  open_cache = functools.partial(kv_cache.Continuation, counts_B=counts_B, visible=visible)
  hidden, new = kv_cache.run_decoder(model.decoder, x, inputs, open_cache, kept)
  return model.logits(_last(hidden, lengths_B))[:, 0], new


def _last(hidden: Hidden, lengths_B) -> Hidden:
  """Of each row's last token."""
  return Hidden(jnp.take_along_axis(hidden.x_BTD, (lengths_B - 1)[:, None, None], axis=1))


def _with(seen_BV, token_B):
  return None if seen_BV is None else seen_BV.at[jnp.arange(len(token_B)), token_B].set(True)


def _progress(loop: dict[str, Any]) -> Progress:
  return Progress(*jax.device_get((loop["ids_BN"], loop["counts_B"], loop["done_B"], loop["logps_BN"])))
