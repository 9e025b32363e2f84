"""QK-Clip: keeps attention logits below a threshold by scaling the weights of queries and keys after a step.

Source: Kimi K2, arXiv:2507.20534. L layers, H query heads, K key/value heads, G = H / K.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from maxghost.parallel.shardings import slash_path


def factors(peaks_LH, num_kv_heads: int, threshold: float) -> tuple[Any, Any]:
  """Factors of the weights of query heads [..., H] and of key heads [..., K]; 1 where nothing is clipped.

  Together they scale the logits of head h by gamma_h = min(1, threshold / its largest logit). Query heads that share a
  key cannot all scale it: the key takes the root of the smallest gamma of its group, each query the rest of its own.
  With as many key as query heads both take the root.
  """
  gamma_LH = jnp.where(peaks_LH > threshold, threshold / jnp.maximum(peaks_LH, threshold), 1)
  gamma_LKG = gamma_LH.reshape(*gamma_LH.shape[:-1], num_kv_heads, -1)
  key_LK = jnp.sqrt(gamma_LKG.min(-1))
  return (gamma_LKG / key_LK[..., None]).reshape(gamma_LH.shape), key_LK


def clip(model: Any, peaks_LH, threshold: float) -> dict[str, Any]:
  """Scales queries and keys of a `Transformer` in place; returns {label: kernel or bias as it was before}.

  peaks_LH: the largest logit of each layer and query head, in the order in which layers run.
  """
  params, before = {path: v for path, v in nnx.iter_graph(model.decoder) if isinstance(v, nnx.Param)}, {}
  for path, variable in params.items():
    if path[-2] not in ("query", "key"):
      continue
    value = variable[...]
    names = [name for name in map(str, path[:2]) if name.startswith("layers_")]
    index: Any = int(names[0].removeprefix("layers_")) if names else 0
    if path[0] == "layers":  # stacked, perhaps in a cycle
      index = slice(index, None, peaks_LH.shape[0] // value.shape[0])
    mine = peaks_LH[index]
    factor = factors(mine, params[(*path[:-2], "key", "kernel")].shape[-2], threshold)[path[-2] == "key"]
    between = value.ndim - 1 - mine.ndim  # axes between those of the layers and the heads
    factor = factor.reshape(*factor.shape[:-1], *(1,) * between, factor.shape[-1], 1)
    before[slash_path(("decoder", *path))] = value
    variable[...] = (value * factor).astype(value.dtype)
  return before
