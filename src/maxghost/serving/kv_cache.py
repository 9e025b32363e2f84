"""Keys and values of earlier positions, kept while text is generated.

B rows, T positions of a call, S slots of a cache, H query heads, K key/value heads, G = H / K, h head width, L layers.
An attention layer with a cache calls `cache.attend` in place of `attention.attend`, with the same arguments. The
token at position p is stored in slot p modulo S. So a layer with a sliding window needs only its window of slots, and
the position that a slot holds follows from the row's number of tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.models import attention
from maxghost.models.rounding import Rounded
from maxghost.parallel import shardings


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
    self.entries.append(tuple(_slots(x.swapaxes(1, 2), self._lengths_B, size) for x in held))
    k_BTKh, v_BTKh = _restored(held, q_BTHh.dtype)
    return attention.attend(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, **options)


class Continuation:
  """The cache of a layer while T tokens are added to each row. `entries`: keys and values of these, [B, K, T, h].

  kept: (keys, values) [B, K, S, h] of each of the layer's attentions. counts_B: tokens kept in each row. visible: at
  most so many are in any row, and only their slots are read; None: all.
  """

  quantized = False

  def __init__(self, kept, counts_B, visible: int | None = None):
    self._kept, self._counts_B, self._visible = list(kept), counts_B, visible
    self.entries: list[tuple] = []

  def attend(self, q_BTHh, k_BTKh, v_BTKh, segment_ids_BT=None, *, kernel="", sinks_H=None, scale=None, **settings):
    """Attention of the new tokens over their row, which is one document, so that segment ids are not read. settings:
    further ones of `attention.Shape`."""
    shape = attention.Shape(q_BTHh.shape[-1] ** -0.5 if scale is None else scale, **settings)
    kept = [x[:, :, : self._visible] for x in self._kept[len(self.entries)]]
    kept = k_BKSh, _ = _restored(kept, q_BTHh.dtype)
    self.entries.append(held := _held(self, k_BTKh.swapaxes(1, 2), v_BTKh.swapaxes(1, 2)))
    held_B1S = held_positions(self._counts_B, k_BKSh.shape[2])[:, None]
    index_T = jnp.arange(q_BTHh.shape[1])
    seen_BTS = jnp.broadcast_to(held_B1S >= 0, (*q_BTHh.shape[:2], k_BKSh.shape[2]))
    if shape.window:
      seen_BTS &= held_B1S > (self._counts_B[:, None] + index_T[None] - shape.window)[..., None]
    new = _restored(held, q_BTHh.dtype)
    return _attend(q_BTHh, kept, new, (seen_BTS, shape.mask(index_T, index_T)), sinks_H, shape)


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


def append(kept, new, counts_B, lengths_B=None):
  """`kept` with more tokens per row: leaves [..., B, K, S, h] and [..., B, K, T, h]; the dots are stacked layers.

  lengths_B: how many of the T new tokens are real; None: T = 1. One token each is put in a loop over the rows, which
  XLA does in place; a scatter over all rows makes it rearrange the whole cache on one device, but a mesh needs it.
  """
  in_loop = not shardings.split_over(("activation_batch",), 0)

  def put(kept, new):
    if lengths_B is not None:
      return _slots(new, counts_B + lengths_B, kept.shape[-2], kept, counts_B)
    slots_B, row_axis = counts_B % kept.shape[-2], kept.ndim - 4

    def put_row(row, kept):
      token = jax.lax.dynamic_slice_in_dim(new, row, 1, row_axis)
      slot = slots_B[row].astype(row.dtype)  # all indices of one type, also in a process with 64-bit numbers
      return jax.lax.dynamic_update_slice(kept, token, [0] * row_axis + [row, 0, slot, 0])

    if in_loop:
      return jax.lax.fori_loop(0, kept.shape[row_axis], put_row, kept)
    put_one = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
    return jax.vmap(put_one, (row_axis, row_axis, 0), row_axis)(kept, new, slots_B)

  return jax.tree.map(put, kept, new)


def run_decoder(decoder: Any, hidden: Any, layer_inputs: tuple, open_cache: Callable, kept=None) -> tuple[Any, Any]:
  """Runs hidden (the first layer's input) through the layers of a `transformer.Decoder`, each with its cache.

  layer_inputs: (positions_BT, segment_ids_BT). open_cache: maps a layer's part of `kept` (None at the first call) to
  its cache. Returns (output of the last layer, entries of each layer's cache, or of stacked layers with their axis).
  """

  def run(layer, hidden, kept):
    cache = open_cache(kept)
    cache.quantized = decoder.quantize_kvcache
    return layer(hidden, *layer_inputs, cache=cache), cache.entries

  if decoder.scan_layers:
    graphdef, state = nnx.split(decoder.layers)
    return jax.lax.scan(lambda hidden, one: run(nnx.merge(graphdef, one[0]), hidden, one[1]), hidden, (state, kept))
  entries = []
  for i in range(decoder.num_layers):
    hidden, new = run(getattr(decoder, f"layers_{i}"), hidden, None if kept is None else kept[i])
    entries.append(new)
  return hidden, entries


def _slots(x, counts_B, size: int, kept=0, first_B=None):
  """The last `size` positions of rows of counts_B tokens in their slots, [..., B, K, S, h]: those from first_B (0) on
  are the tokens of x [..., B, K, T, h], the ones before are `kept`'s."""
  index_BS = held_positions(counts_B, size) - (0 if first_B is None else first_B[:, None])
  index = index_BS.reshape((1,) * (x.ndim - 4) + (len(index_BS), 1, size, 1))
  return jnp.where(index >= 0, jnp.take_along_axis(x, jnp.clip(index, 0, x.shape[-2] - 1), axis=-2), kept)


def _attend(q_BTHh, kept, new, seen, sinks_H, shape: attention.Shape):
  """softmax([q k_S | q k_T | sink]) applied to kept and new values; the sink has no value. seen: bool [B or 1, T, S]
  and [B or 1, T, T]."""
  (k_BKSh, v_BKSh), (k_BKTh, v_BKTh) = kept, new
  q_BKGTh = attention.group_heads(q_BTHh, k_BKSh.shape[1])
  scores = [
    jnp.where(mask[:, None, None], shape.scores(q_BKGTh, k), -jnp.inf)
    for k, mask in zip((k_BKSh, k_BKTh), seen, strict=True)
  ]
  if sinks_H is not None:
    sinks_KG11 = sinks_H.astype(scores[0].dtype).reshape(*q_BKGTh.shape[1:3], 1, 1)
    scores.append(jnp.broadcast_to(sinks_KG11, (*scores[0].shape[:-1], 1)))
  weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_BTHh.dtype)
  slots, total = k_BKSh.shape[2], k_BKSh.shape[2] + k_BKTh.shape[2]
  out_BKGTh = shape.product("bkgts,bksh->bkgth", weights[..., :slots], v_BKSh)
  out_BKGTh += shape.product("bkgts,bksh->bkgth", weights[..., slots:total], v_BKTh)
  return out_BKGTh.transpose(0, 3, 1, 2, 4).reshape(*q_BTHh.shape[:3], v_BKTh.shape[-1])
