"""Keys and values of earlier positions, kept while text is generated.

B rows, T positions of a call, S slots of a cache, H query heads, K key/value heads, G = H / K, h head width, L layers.
An attention layer with a cache calls `cache.attend` in place of `attention.attend`, with the same arguments. The
token at position p is stored in slot p modulo S. So a layer with a sliding window needs only its window of slots, and
the position that a slot holds follows from the row's number of tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.models import attention
from maxghost.models.rounding import Rounded


class Prompt:
  """The cache of a layer while the prompts are read. `entries`: keys and values that the attention layers keep.

  lengths_B: tokens of each row; later positions are padding. size: S of a layer without a window.
  """

  quantized = False  # as the model says, see `_held`

  def __init__(self, lengths_B, size: int):
    self._lengths_B, self._size = lengths_B, size
    self.entries: list[tuple] = []

  def attend(self, q_BTHh, k_BTKh, v_BTKh, segment_ids_BT=None, **options):
    size, held = min(self._size, options.get("window") or self._size), _held(self, k_BTKh, v_BTKh)
    self.entries.append(tuple(_slots(x, self._lengths_B, size) for x in held))
    k_BTKh, v_BTKh = _restored(held, q_BTHh.dtype)
    return attention.attend(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, **options)


class Continuation:
  """The cache of a layer while one token is added to each row. `entries`: keys and values of these tokens.

  kept: (keys, values) [B, K, S, h] of each of the layer's attentions. counts_B: tokens kept in each row.
  """

  quantized = False

  def __init__(self, kept, counts_B):
    self._kept, self._counts_B = list(kept), counts_B
    self.entries: list[tuple] = []

  def attend(
    self, q_B1Hh, k_B1Kh, v_B1Kh, segment_ids_BT=None, *, kernel=None, window=None, sinks_H=None, soft_cap=None,
    scale=None,
  ):  # fmt: skip
    """Attention of the new token over its row, which is one document, so that segment ids are not read."""
    k_BKSh, v_BKSh = _restored(self._kept[len(self.entries)], q_B1Hh.dtype)
    held = _held(self, k_B1Kh, v_B1Kh)
    k_B1Kh, v_B1Kh = _restored(held, q_B1Hh.dtype)
    self.entries.append(tuple(x[:, 0] for x in held))
    held_BS = held_positions(self._counts_B, k_BKSh.shape[2])
    seen_BS = held_BS >= 0
    if window:
      seen_BS &= held_BS > (self._counts_B - window)[:, None]
    shape = attention.Shape(q_B1Hh.shape[-1] ** -0.5 if scale is None else scale, None, soft_cap)
    return _attend_one(q_B1Hh, k_B1Kh, v_B1Kh, k_BKSh, v_BKSh, seen_BS, sinks_H, shape)


def _held(cache: Any, *keys_and_values) -> tuple:
  """What is kept of keys and values: themselves, or with `quantize_kvcache` int8 codes and a scale for each head."""
  if not cache.quantized:
    return keys_and_values
  return tuple(part for x in keys_and_values for part in Rounded("int8").codes(x, (x.ndim - 1,)))


def _restored(held, dtype):
  """The keys and values of `_held`. Attention reads these alone, so that no value depends on when it was kept."""
  if len(held) == 2:
    return held
  return [(codes.astype(scale.dtype) * scale).astype(dtype) for codes, scale in zip(held[::2], held[1::2], strict=True)]


def held_positions(counts_B, num_slots: int):
  """The position each slot holds when a row has counts_B tokens: int32 [B, S], negative where it holds none."""
  last_B1 = counts_B[:, None] - 1
  return last_B1 - (last_B1 - jnp.arange(num_slots, dtype=counts_B.dtype)[None]) % num_slots


def append(kept, new, counts_B):
  """`kept` with one more token per row: leaves [..., B, K, S, h] and [..., B, K, h]; the dots are stacked layers.

  Rows are updated in a loop, which XLA does in place; a scatter over all rows makes it rearrange the whole cache.
  """

  def put(kept, new):
    slots_B, row_axis = counts_B % kept.shape[-2], kept.ndim - 4

    def put_row(row, kept):
      token = jnp.expand_dims(jax.lax.dynamic_slice_in_dim(new, row, 1, row_axis), -2)
      return jax.lax.dynamic_update_slice(kept, token, [0] * row_axis + [row, 0, slots_B[row], 0])

    return jax.lax.fori_loop(0, kept.shape[row_axis], put_row, kept)

  return jax.tree.map(put, kept, new)


def run_decoder(decoder: Any, hidden: Any, layer_inputs: tuple, open_cache: Callable, kept=None) -> tuple[Any, Any]:
  """Runs hidden (the first layer's input) through the layers of a `transformer.Decoder`, each with its cache.

  layer_inputs: (positions_BT, segment_ids_BT). open_cache: maps a layer's part of `kept` (None at the first call) to
  its cache. Returns (output of the last layer, entries of each layer's cache, or of stacked layers with their axis).
  """
  if not decoder.scan_layers:
    entries = []
    for i in range(decoder.num_layers):
      cache = open_cache(None if kept is None else kept[i])
      cache.quantized = decoder.quantize_kvcache
      hidden = getattr(decoder, f"layers_{i}")(hidden, *layer_inputs, cache=cache)
      entries.append(cache.entries)
    return hidden, entries
  graphdef, state = nnx.split(decoder.layers)

  def body(hidden, scanned):
    state, kept = scanned
    cache = open_cache(kept)
    cache.quantized = decoder.quantize_kvcache
    hidden = nnx.merge(graphdef, state)(hidden, *layer_inputs, cache=cache)
    return hidden, cache.entries

  return jax.lax.scan(body, hidden, (state, kept))


def _slots(x_BTKh, lengths_B, size: int):
  """The last `size` positions of each row in their slots: [B, K, S, h]; zeros in empty slots."""
  position_BS = held_positions(lengths_B, size)
  found = jnp.take_along_axis(x_BTKh, jnp.clip(position_BS, 0, x_BTKh.shape[1] - 1)[:, :, None, None], axis=1)
  return jnp.where((position_BS >= 0)[:, :, None, None], found, 0).swapaxes(1, 2)


def _attend_one(q_B1Hh, k_B1Kh, v_B1Kh, k_BKSh, v_BKSh, seen_BS, sinks_H, shape: attention.Shape):
  """softmax([q k_S | q k_new | sink]) applied to the kept and new values; the sink has no value."""
  q_BKG1h = attention.group_heads(q_B1Hh, k_BKSh.shape[1])
  k_BK1h, v_BK1h = k_B1Kh.swapaxes(1, 2), v_B1Kh.swapaxes(1, 2)
  kept_BKG1S = jnp.where(seen_BS[:, None, None, None], shape.scores(q_BKG1h, k_BKSh), -jnp.inf)
  scores = [kept_BKG1S, shape.scores(q_BKG1h, k_BK1h)]
  if sinks_H is not None:
    sinks_KG11 = sinks_H.astype(kept_BKG1S.dtype).reshape(*q_BKG1h.shape[1:3], 1, 1)
    scores.append(jnp.broadcast_to(sinks_KG11, scores[1].shape))
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_B1Hh.dtype)
  slots = k_BKSh.shape[2]
  kept_BKG1h = jnp.einsum("bkgts,bksh->bkgth", weights[..., :slots], v_BKSh)
  out_BKG1h = kept_BKG1h + weights[..., slots : slots + 1] * v_BK1h[:, :, None]
  return out_BKG1h.reshape(q_B1Hh.shape[:3] + v_B1Kh.shape[3:])
