"""Puts adapters on the layers of a model whose path matches, and takes them off.

The base keeps its Params at their paths (`.../query/kernel`), so that importers and base checkpoints stay as they are;
an adapter's are `.../query/lora/a` and `.../query/lora/b`. Those of experts `.../wi_0` [E, d, p] are `.../wi_0_lora_a`
[E, d, r] and `.../wi_0_lora_b` [E, r, p].
"""

import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxghost import models
from maxghost.adapters import lora, quantized
from maxghost.config.schema import AdapterConfig, Config
from maxghost.config.values import ConfigError
from maxghost.models import dense
from maxghost.models.moe import RoutedMoe

_DENSE = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)


def create(cfg: Config) -> models.Transformer:
  """A model with fresh weights from init_weights_seed, and with the adapters of the configuration."""
  model = models.create(cfg, rngs=nnx.Rngs(cfg.run.init_weights_seed))
  if cfg.model.quantization in quantized.WEIGHTS:
    quantized.narrow(model, cfg.model.quantization)
  return attach(model, cfg.adapter, cfg.run.init_weights_seed) if cfg.adapter.lora_rank else model


def create_abstract(cfg: Config) -> models.Transformer:
  """The same model with `jax.ShapeDtypeStruct` leaves: nothing is allocated."""
  return nnx.eval_shape(lambda: create(cfg))


def attach(model: Any, cfg: AdapterConfig, seed: int = 0) -> Any:
  """Puts adapters on any nnx model, in place, and returns it; layers may be stacked. seed: of the initial values.

  lora_module_path is matched with the whole path of a layer, such as decoder/layers/self_attention/query, and of
  experts that of a matrix, such as decoder/layers/moe/wi_0. Dense layers no longer form weight gradients. Raises
  ConfigError for a pattern without a match, and for layers that can have no adapter, or not this lora_weight_qtype.
  """
  if not cfg.lora_rank:
    raise ConfigError("lora_rank=0 means no adapters; give their rank, such as lora_rank=8")
  layers, found = places(model), []
  wanted = re.compile(cfg.lora_module_path) if cfg.lora_module_path else None
  for label, (module, name, by_default) in layers.items():
    if by_default if wanted is None else wanted.fullmatch(label):
      found.append(label)
      key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(label.encode()))
      (_adapt_experts if name else _adapt)(module, name, label, cfg, key)
  if not found:
    known = ", ".join(layers) or "none"
    raise ConfigError(f"lora_module_path='{cfg.lora_module_path}' matches no layer that can have an adapter: {known}")
  for label, (module, name, by_default) in layers.items():
    if cfg.lora_weight_qtype == "bfloat16" and (by_default or name):
      kernel = getattr(module, name or "kernel")
      setattr(module, name or "kernel", kernel.replace(kernel[...].astype(jnp.bfloat16)))
    elif cfg.lora_weight_qtype and (by_default or name):
      quantized.quantize_layer(module, name, label, cfg.lora_weight_qtype)
  for _, node in nnx.iter_graph(model):
    if isinstance(node, nnx.LinearGeneral) and node.dot_general is dense.dot_general:
      node.dot_general = dense.frozen_dot_general
  return model


def disabled(model: Any) -> Any:
  """The model without its adapters. It shares the arrays of `model`, which stays as it is."""
  plain = nnx.merge(*nnx.split(model))
  for _, node in nnx.iter_graph(plain):
    if isinstance(node, nnx.Module) and isinstance(getattr(node, "lora", None), lora.Lora):
      delattr(node, "lora")
      object.__setattr__(node, "__class__", type(node).__base__)
    elif isinstance(node, RoutedMoe):
      for name in [name for name in vars(node) if name.endswith(("_lora_a", "_lora_b"))]:
        delattr(node, name)
  return plain


def places(model: Any) -> dict[str, tuple[Any, str, bool]]:
  """{path: (module, matrix of experts or '', whether an empty pattern means it)} of what can have an adapter."""
  found = {}
  for label, node, is_router in quantized.modules(model):
    if type(node) in _DENSE:
      found[label] = (node, "", not is_router)
    elif isinstance(node, RoutedMoe):
      found |= {f"{label}/{name}": (node, name, False) for name in (*node.branches, "wo")}
  return found


def _adapt(layer: Any, _: str, label: str, cfg: AdapterConfig, key) -> None:
  (in_axes, out_axes), order = quantized.matrix_axes(layer), ((), ())
  if isinstance(layer, nnx.LinearGeneral):
    if tuple(layer.axis) != tuple(range(-in_axes, 0)) or layer.batch_axis:
      raise ConfigError(f"{label} takes no adapter: it contracts other axes than the last ones ({layer.axis})")
  elif isinstance(layer, nnx.Einsum):
    try:
      *order, in_axes = lora.einsum_order(layer.einsum_str)
    except ValueError as error:
      raise ConfigError(f"{label}: {error}; leave it out of lora_module_path") from error
    out_axes = len(layer.kernel_shape) - in_axes
  layer.lora = lora.Lora(cfg, in_axes, out_axes, tuple(order), layer, key)  # pyright: ignore[reportAttributeAccessIssue]
  object.__setattr__(layer, "__class__", lora.adapted(type(layer)))


def _adapt_experts(module: RoutedMoe, name: str, label: str, cfg: AdapterConfig, key) -> None:
  if cfg.lora_dropout or not module.sparse:
    given = f"lora_dropout={cfg.lora_dropout}" if cfg.lora_dropout else "sparse_matmul=false"
    way = "use lora_dropout=0.0 and sparse_matmul=true, or leave it out of lora_module_path"
    raise ConfigError(f"{given} does not go with an adapter of experts ({label}); {way}")
  for part, param in zip("ab", lora.params(cfg, key, getattr(module, name), 1, 1), strict=True):
    setattr(module, f"{name}_lora_{part}", param)
  module.lora_scale = cfg.scale
