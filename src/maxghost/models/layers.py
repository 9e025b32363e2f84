"""The building blocks of layers: what flows through them, dense layers, norms and activations, chosen by the config.

B batch, T positions, D embed dim, F feed-forward width.
"""

import contextvars
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost.config.families import FAMILIES
from maxghost.config.schema import ModelConfig
from maxghost.config.validate import ROUNDED
from maxghost.models import dense
from maxghost.models.rounding import Rounded
from maxghost.parallel.shardings import setting

# Logical axes of activations: hidden states, the heads of queries, of keys and values, and the feed-forward width.
HIDDEN = ("activation_batch", "activation_length", "activation_embed")
QUERIES = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
KEYS = ("activation_batch", "activation_kv_length", "activation_kv_heads", "activation_kv")
RING_KEYS = ("activation_batch", "activation_length", "activation_kv_heads", "activation_kv")
FEED_FORWARD = ("activation_batch", "activation_length", "activation_mlp")

# Dropout keys of adapters in the layer that runs, taken in the order of their calls; None: no dropout.
adapter_keys: contextvars.ContextVar[Iterator | None] = contextvars.ContextVar("maxghost_adapter_keys", default=None)

ACTIVATIONS = {
  "silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu, "linear": lambda x: x,
  "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x), "one_plus": lambda x: 1 + x,
}  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hidden:
  """Hidden states, and what the layers so far have measured.

  routing: in a model with experts (`moe.no_routing`). peaks_BLH: with use_qk_clip, the largest attention logit of each
  row, layer and query head; layers write from the end, so that after L layers it holds them in order.
  embedded_BTD: after the last layer of a model with further predictions (`multi_token`), the input of the first.
  """

  x_BTD: Any
  routing: dict[str, Any] | None = None
  peaks_BLH: Any = None
  embedded_BTD: Any = None


def linear(cfg: ModelConfig, in_features, out_features, axes, *, rngs: nnx.Rngs, std: float, in_axes=1, use_bias=False,
           layer_type: type[nnx.LinearGeneral] = nnx.LinearGeneral,
           matrix: tuple[int, ...] | None = None) -> nnx.Module:  # fmt: skip
  """A dense layer over the trailing `in_axes` axes, of normal weights with this `std`.

  axes: logical axes of its kernel. matrix: (axes of rows, axes of columns) of its kernel, or () for none.
  """
  return layer_type(
    in_features, out_features, axis=tuple(range(-in_axes, 0)), use_bias=use_bias,
    kernel_init=nnx.initializers.normal(std), precision=precision(cfg), dot_general=dense.dot_general, rngs=rngs,
    kernel_metadata={"axes": axes, "matrix": (in_axes, len(axes) - in_axes) if matrix is None else matrix},
    bias_metadata={"axes": tuple(axes[in_axes:]), "matrix": ()}, **dtypes(cfg),
  )  # fmt: skip


def dtypes(cfg: ModelConfig) -> dict:
  """The arguments of a layer for its computation's and its weights' types."""
  return {"dtype": jnp.dtype(cfg.dtype), "param_dtype": jnp.dtype(cfg.weight_dtype)}


def keys_for_adapters(dropout_key):
  """Sets `adapter_keys` inside a `with` block."""
  keys = None if dropout_key is None else (jax.random.fold_in(dropout_key, i) for i in itertools.count(2))
  return setting(adapter_keys, keys)


def precision(cfg: ModelConfig) -> Any:
  plain = None if cfg.matmul_precision == "default" else cfg.matmul_precision
  kind, _, how = cfg.quantization.partition("_")
  return Rounded(kind, plain, stochastic=bool(how)) if cfg.quantization in ROUNDED else plain


def norm(cfg: ModelConfig, num_features: int | None = None, *, rngs: nnx.Rngs) -> nnx.Module:
  """The norm of a residual branch: RMSNorm, or LayerNorm with bias. With num_features, RMSNorm over that many."""
  kind, metadata = nnx.RMSNorm, {"axes": ("norm",), "matrix": ()}
  options = dtypes(cfg) | {"epsilon": cfg.normalization_layer_epsilon, "scale_metadata": metadata}
  if num_features is None and FAMILIES[cfg.decoder_block].layer_norm:
    # The fast variance, E[x^2] - E[x]^2, loses digits where the mean is large.
    kind, options = nnx.LayerNorm, options | {"use_fast_variance": False, "bias_metadata": metadata}
  return kind(num_features or cfg.base_emb_dim, rngs=rngs, **options)


def gated(branches: list, activations: tuple[str, ...], limit: float):
  """act_0(branch_0) * act_1(branch_1) ...; limit > 0 first clamps the gate from above, the others on both sides."""
  product: Any = None
  for i, (branch, name) in enumerate(zip(branches, activations, strict=True)):
    if limit > 0:
      branch = jnp.minimum(branch, limit) if i == 0 else jnp.clip(branch, -limit, limit)
    branch = ACTIVATIONS[name](branch)
    product = branch if product is None else product * branch
  return product
