"""Attention kernels: causal, within a document, grouped-query.

B batch, T query positions, S key positions, H query heads, K key/value heads, G = H / K, h head width.
"""

import itertools

import jax
import jax.numpy as jnp

from maxghost.parallel import shardings

_BLOCKS = 4


def attend(q_BTHh, k_BSKh, v_BSKh, segment_ids_BT=None, *, kernel: str):
  """Softmax attention of each position over the earlier positions of its own document.

  Returns [B, T, H, h] in q's dtype; scores are scaled by h**-0.5 and the softmax runs in float32 or wider.
  segment_ids_BT: int32, equal ids may attend to each other; None = one document per row.
  kernel: 'dot_product' (one product over all keys) or 'blockwise' (query blocks that see only the keys up to their end:
  the same values, about half the work). Raises ValueError for another name.
  """
  kernel = resolve_kernel(kernel)
  num_positions = q_BTHh.shape[1]
  if kernel == "dot_product":
    bounds = [0, num_positions]
  elif kernel == "blockwise":
    step = -(-num_positions // _BLOCKS)
    bounds = [*range(0, num_positions, step), num_positions]
  else:
    raise ValueError(f"attention={kernel}: use dot_product or blockwise")
  q_BKGTh = _group_heads(q_BTHh, k_BSKh.shape[2])
  k_BKSh, v_BKSh = k_BSKh.swapaxes(1, 2), v_BSKh.swapaxes(1, 2)
  blocks = [
    _causal_block(q_BKGTh[:, :, :, start:end], k_BKSh[:, :, :end], v_BKSh[:, :, :end], segment_ids_BT, start)
    for start, end in itertools.pairwise(bounds)
  ]
  out_BKGTh = blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=3)
  return out_BKGTh.transpose(0, 3, 1, 2, 4).reshape(q_BTHh.shape)


def resolve_kernel(kernel: str) -> str:
  """The kernel that 'autoselected' stands for on the devices that are compiled for.

  Blocks of queries would all lie on a few devices where the positions of a row are split over the mesh.
  """
  if kernel != "autoselected":
    return kernel
  blocks = shardings.platform() == "cpu" and shardings.num_parts("activation_length") == 1
  return "blockwise" if blocks else "dot_product"


def _group_heads(q_BTHh, num_kv_heads: int):
  batch, positions, heads, width = q_BTHh.shape
  return q_BTHh.reshape(batch, positions, num_kv_heads, heads // num_kv_heads, width).transpose(0, 2, 3, 1, 4)


def _causal_block(q_BKGTh, k_BKSh, v_BKSh, segment_ids_BT, start: int):
  """Attention of the query positions start..start+T over keys 0..S; keys after a query are masked."""
  dtype, wide = q_BKGTh.dtype, jnp.promote_types(q_BKGTh.dtype, jnp.float32)
  num_queries, num_keys = q_BKGTh.shape[3], k_BKSh.shape[2]
  scores = jnp.einsum("bkgth,bksh->bkgts", q_BKGTh, k_BKSh, preferred_element_type=wide)
  scores = scores * jnp.asarray(q_BKGTh.shape[-1] ** -0.5, wide)
  mask = jnp.arange(start, start + num_queries)[:, None] >= jnp.arange(num_keys)[None, :]
  mask = mask[None]
  if segment_ids_BT is not None:
    queries, keys = segment_ids_BT[:, start : start + num_queries], segment_ids_BT[:, :num_keys]
    mask = mask & (queries[:, :, None] == keys[:, None, :])
  # A finite floor keeps a fully masked row at a harmless uniform average instead of NaN; its loss weight is zero.
  scores = jnp.where(mask[:, None, None], scores, jnp.asarray(-0.7 * jnp.finfo(wide).max, wide))
  weights = jax.nn.softmax(scores, axis=-1).astype(dtype)
  return jnp.einsum("bkgts,bksh->bkgth", weights, v_BKSh)
