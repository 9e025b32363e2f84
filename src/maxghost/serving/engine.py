"""The engine: slots with one request each, which are decoded together; prompts are read apart, a chunk at a time.

B slots of requests, C tokens of a chunk, V vocabulary, N = TOP alternatives. A cache is as in `kv_cache`. Every
function is compiled once for each bucket of shapes: chunks have one of two widths, and a decode step reads as much of
the cache as the longest request needs, rounded up to a power of two. What requests differ in is an argument.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost.config import ConfigError
from maxghost.parallel import shardings
from maxghost.serving import kv_cache
from maxghost.serving.generator import add_token, add_tokens, read_prompts
from maxghost.serving.prefixes import Prefixes
from maxghost.serving.sampling import Sampling, draw

_NARROW, _VISIBLE = 4, 128  # a short chunk is a quarter of a long one; least bucket of a decode step
# What a step needs to know of each row: (dtype, value of a free slot). length: tokens in the cache; 0 in a free slot.
_ROW = {"temperature": (np.float32, 0), "top_k": (np.int32, 0), "top_p": (np.float32, 1), "min_p": (np.float32, 0),
        "repetition_penalty": (np.float32, 1), "top": (np.int32, 0), "key": (np.uint32, (0, 0)), "step": (np.int32, 0),
        "token": (np.int32, 0), "length": (np.int32, 0)}  # fmt: skip
_LOGITS = ("activation_batch", "activation_vocab")
Rows = dict[str, np.ndarray]


class Result(NamedTuple):
  """New tokens on the host. ids_B int32; logps_B, their log-probabilities by the model, without temperature, penalty
  and cuts, float32; the likeliest N tokens with theirs, likeliest first: they mean nothing unless a request asks."""

  ids_B: np.ndarray
  logps_B: np.ndarray
  top_ids_BN: np.ndarray
  top_logps_BN: np.ndarray


@dataclasses.dataclass(slots=True)
class Prefix:
  """A prompt that is being read, and is done with `result`, its first new token. count: tokens read so far; reused: of
  these, tokens of kept prefixes."""

  prompt: np.ndarray
  rows: Rows
  kept: Any = None
  count: int = 0
  reused: int = 0
  result: Result | None = None


@dataclasses.dataclass(slots=True)
class DecodeState:
  """All slots: their caches and the tokens of their texts, bool [B, V], on the device; the rest on the host."""

  kept: Any
  seen_BV: Any
  rows: Rows


class Engine:
  """Serves one model, of `nnx.split`. slots: requests that are decoded together. cache_size: most positions of a
  request, prompt and answer. prefill_chunk: tokens of a prompt that one call reads. prefix_bytes: most memory of the
  beginnings of prompts that are kept; 0 = none. layout: as the trainer's; None = one device.

  `open` may be called from any thread, the others from one. A state that was given to `insert`, `generate`
  or `free` is used up: go on with the one returned.
  """

  def __init__(self, graphdef: nnx.GraphDef, *, slots: int = 8, cache_size: int = 2048, prefill_chunk: int = 128,
               prefix_bytes: int = 1 << 28, layout: shardings.Layout | None = None):  # fmt: skip
    for name, value in {"slots": slots, "cache_size": cache_size, "prefill_chunk": prefill_chunk}.items():
      if value < 1:
        raise ConfigError(f"{name}={value}: at least 1")
    self._graphdef, self._layout, self._loaded = graphdef, layout, None
    self.slots, self.cache_size, self.vocab_size = slots, cache_size, 0
    chunk = min(prefill_chunk, cache_size)
    self._widths = sorted({max(chunk // _NARROW, 1), chunk})
    self._visible = sorted({cache_size, *(_VISIBLE << i for i in range(32) if _VISIBLE << i < cache_size)})
    self._prefixes, self._row_shapes = Prefixes(prefix_bytes), None
    self._compiled: dict[tuple, Callable] = {}

  def load_params(self, state: nnx.State) -> nnx.State:
    """The state on the devices as the layout places it: what the other calls take as `params`. Raises ConfigError."""
    decoder = nnx.merge(self._graphdef, state).decoder
    if decoder.has_positions and (most := decoder.position_embedder.num_embeddings) < self.cache_size:
      raise ConfigError(f"cache_size={self.cache_size}: the model has {most} positions; use at most {most}")
    self._loaded = jax.device_put(state, self._layout.shardings(state) if self._layout else None)
    one = np.ones((1, 1), np.int32)
    logits, self._row_shapes = jax.eval_shape(
      lambda state: read_prompts(nnx.merge(self._graphdef, state), one, one[0], self.cache_size), state
    )
    self.vocab_size = logits.shape[-1]
    self._prefixes = Prefixes(self._prefixes.limit)
    return self._loaded

  def init_decode_state(self) -> DecodeState:
    """Free slots; after `load_params`."""
    kept, seen_BV = self._call(("slots",), functools.partial(self._empty, self.slots))
    return DecodeState(kept, seen_BV, _free_rows(self.slots))

  def warm_up(self, params: nnx.State) -> None:
    """Compiles every function for every bucket, so that no request waits for it."""
    state = self.init_decode_state()
    narrow, wide = self._widths[0], self._widths[-1]
    for length in (1, narrow + 1, wide + 1, wide + 1, wide + narrow + 1):  # the third begins as the one before
      if length < self.cache_size:
        state = self.insert(self.prefill(params, [0] * length), state, 0)
    for visible in self._visible:
      state, _ = self._decode(params, state, visible)
    self._prefixes = Prefixes(self._prefixes.limit)

  def prefill(self, params: nnx.State, prompt: Sequence[int], sampling: Sampling | None = None, **options) -> Prefix:
    """Reads a whole prompt; arguments as of `open`."""
    prefix = self.open(prompt, sampling, **options)
    while self.read(params, prefix) is None:
      pass
    return prefix

  def open(self, prompt: Sequence[int], sampling: Sampling | None = None, *, seed: int = 0, top: int = 0) -> Prefix:
    """A prompt to `read`. seed: of the draws, which do not depend on other requests. top: above 0, results have the
    likeliest tokens. Raises ValueError for a prompt that is empty, as long as the cache, or has a wrong id."""
    ids, rows, most = np.asarray(prompt), _free_rows(1), self.cache_size - 1
    if not ids.size:
      raise ValueError("the prompt has no token")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
      raise ValueError("the prompt is no list of token ids")
    if len(ids) > most:
      raise ValueError(f"a prompt of {len(ids)} tokens: cache_size={self.cache_size} leaves room for {most} at most")
    if len(wrong := ids[(ids < 0) | (ids >= self.vocab_size)]):
      raise ValueError(f"token id {wrong[0]}: the vocabulary of the model has the ids 0 to {self.vocab_size - 1}")
    for name, value in dataclasses.asdict(sampling or Sampling()).items():
      rows[name][0] = min(value, self.vocab_size) if name == "top_k" else value
    rows["top"][0], rows["key"][0] = top, (seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF)
    return Prefix(ids.astype(np.int32), rows)

  def read(self, params: nnx.State, prefix: Prefix) -> Result | None:
    """Reads the next chunk; the last one gives the first new token. The first call takes what is kept of such a
    beginning."""
    if params is not self._loaded:
      raise ValueError("these are not the params that load_params gave last, of which beginnings of prompts are kept")
    wide = self._widths[-1]
    if prefix.kept is None:
      prefix.kept, _ = self._call(("row",), functools.partial(self._empty, 1))
      for chunk in self._prefixes.find(prefix.prompt, wide):
        arguments = prefix.kept, chunk, np.full(1, prefix.count, np.int32), np.full(1, wide, np.int32)
        prefix.kept = self._call(("append",), _append, *arguments, donate=(0,))
        prefix.count = prefix.reused = prefix.count + wide
    new = prefix.prompt[prefix.count : prefix.count + wide]
    width = next(width for width in self._widths if width >= len(new))
    tokens_1C, prefix.rows["length"][0] = np.zeros((1, width), np.int32), prefix.count
    tokens_1C[0, : len(new)] = new
    visible = self.cache_size if prefix.count else 0
    arguments = params, prefix.kept, tokens_1C, prefix.rows["length"], np.full(1, len(new), np.int32)
    function = functools.partial(self._read, visible=visible)
    prefix.kept, chunk, logits_1V = self._call(("read", width, visible), function, *arguments, donate=(1,))
    prefix.count += len(new)
    if len(new) == wide:
      self._prefixes.add(prefix.prompt[: prefix.count], chunk)
    jax.block_until_ready(logits_1V)  # for the times that are measured around this
    if prefix.count == len(prefix.prompt):
      seen_1V = np.bincount(prefix.prompt, minlength=self.vocab_size)[None] > 0
      prefix.result, _ = self._draw(logits_1V, seen_1V, prefix.rows)
    return prefix.result

  def insert(self, prefix: Prefix, state: DecodeState, slot: int) -> DecodeState:
    """Puts a prompt that is read, and its first new token, into a slot."""
    if prefix.result is None:
      raise ValueError(f"{prefix.count} of the {len(prefix.prompt)} tokens of this prompt are read: read all first")
    token = prefix.result.ids_B[0]
    seen_V = np.bincount([*prefix.prompt, token], minlength=self.vocab_size) > 0
    arguments = state.kept, state.seen_BV, prefix.kept, seen_V, np.int32(slot)
    state.kept, state.seen_BV = self._call(("insert",), self._insert, *arguments, donate=(0, 1))
    for name, values in (prefix.rows | {"token": [token], "step": [1], "length": [prefix.count]}).items():
      state.rows[name][slot] = values[0]
    return state

  def generate(self, params: nnx.State, state: DecodeState) -> tuple[DecodeState, Result]:
    """Adds a token to every slot in use; rows of free ones mean nothing. Raises ValueError if a slot is full."""
    longest = int(state.rows["length"].max())
    if longest >= self.cache_size:
      slot = int(state.rows["length"].argmax())
      raise ValueError(f"slot {slot} has {longest} tokens: cache_size={self.cache_size} has room for no more; free it")
    return self._decode(params, state, next(visible for visible in self._visible if visible >= longest))

  def free(self, state: DecodeState, slot: int) -> DecodeState:
    """Empties a slot."""
    for name, values in _free_rows(1).items():
      state.rows[name][slot] = values[0]
    return state

  def _decode(self, params, state: DecodeState, visible: int) -> tuple[DecodeState, Result]:
    rows, function = state.rows, functools.partial(self._add, visible=visible)
    arguments = params, state.kept, rows["token"], rows["length"]
    state.kept, logits_BV = self._call(("decode", visible), function, *arguments, donate=(1,))
    result, state.seen_BV = self._draw(logits_BV, state.seen_BV, rows)
    used_B = rows["length"] > 0
    rows["token"], rows["step"] = np.where(used_B, result.ids_B, 0), rows["step"] + used_B
    rows["length"] = rows["length"] + used_B
    return state, result

  def _draw(self, logits_BV, seen_BV, rows: Rows) -> tuple[Result, Any]:
    """The new tokens, and seen_BV with them."""
    seen_BV, drawn = self._call(("draw", len(seen_BV)), _draw, logits_BV, seen_BV, rows, donate=(1,))
    return Result(*jax.device_get(drawn)), seen_BV

  def _call(self, name: tuple, function: Callable, *arguments, donate: tuple[int, ...] = ()) -> Any:
    """Compiles ahead of the first call of this name, and never again."""
    if name not in self._compiled:
      with shardings.use(self._layout):
        lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
      options = shardings.ordered_collectives(jax.tree.leaves((self._loaded, arguments)))
      self._compiled[name] = lowered.compile(compiler_options=options)
    return self._compiled[name](*arguments)

  # What is compiled.

  def _empty(self, num_rows: int):
    kept = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-4], num_rows, *x.shape[-3:]), x.dtype), self._row_shapes)
    seen_BV = jnp.zeros((num_rows, self.vocab_size), bool)
    return _split(kept), shardings.constrain(seen_BV, ("activation_batch", None))

  def _read(self, params, kept, tokens_1C, counts_1, lengths_1, *, visible: int):
    logits_1V, new = add_tokens(nnx.merge(self._graphdef, params), tokens_1C, counts_1, lengths_1, kept, visible)
    return _append(kept, new, counts_1, lengths_1), _split(new), shardings.constrain(logits_1V, _LOGITS)

  def _insert(self, kept, seen_BV, row, seen_V, slot):
    update = jax.lax.dynamic_update_slice_in_dim
    kept = jax.tree.map(lambda slots, one: update(slots, one, slot, slots.ndim - 4), kept, row)
    return _split(kept), seen_BV.at[slot].set(seen_V)

  def _add(self, params, kept, tokens_B, counts_B, *, visible: int):
    logits_BV, kept = add_token(nnx.merge(self._graphdef, params), tokens_B, counts_B, kept, visible)
    return _split(kept), shardings.constrain(logits_BV, _LOGITS)


def _append(kept, new, counts_1, lengths_1):
  return _split(kv_cache.append(kept, new, counts_1, lengths_1))


def _split(kept):
  """The cache, split over the mesh by rows and heads."""
  axes = ("activation_batch", "activation_kv_heads", None, None)
  return jax.tree.map(lambda x: shardings.constrain(x, (*[None] * (x.ndim - 4), *axes), "the cache"), kept)


def _free_rows(num_rows: int) -> Rows:
  return {name: np.full((num_rows, *np.shape(value)), value, dtype) for name, (dtype, value) in _ROW.items()}


def _draw(logits_BV, seen_BV, rows):
  drawn = draw(logits_BV, seen_BV, rows)
  seen_BV = seen_BV.at[jnp.arange(len(seen_BV)), drawn[0]].set(True)
  return shardings.constrain(seen_BV, ("activation_batch", None)), drawn
