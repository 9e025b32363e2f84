"""Puts adapters on the layers of a model whose path matches, and takes them off.

The base keeps its Params at their paths (`.../query/kernel`), so that importers and base checkpoints stay as they are;
an adapter's are `.../query/lora/a` and `.../query/lora/b`. Those of experts `.../wi_0` [E, d, p] are `.../wi_0_lora_a`
[E, d, r] and `.../wi_0_lora_b` [E, r, p].
"""

import re
from typing import Any

import jax.numpy as jnp
from flax import nnx

from maxghost import models
from maxghost.adapters import lora
from maxghost.adapters.lora import AdaptedEinsum, AdaptedLinear, AdaptedLinearGeneral, Lora
from maxghost.adapters.quantized import QUANTIZED, AdaptedQuantized, QuantizedLinearGeneral, quantize_layer
from maxghost.config.schema import AdapterConfig, Config
from maxghost.config.values import ConfigError
from maxghost.models import dense
from maxghost.models.moe import RoutedMoe
from maxghost.parallel.shardings import slash_path

ADAPTED: dict[type, type] = {
  nnx.Linear: AdaptedLinear,
  nnx.LinearGeneral: AdaptedLinearGeneral,
  nnx.Einsum: AdaptedEinsum,
}
PLAIN = {adapted: layer for layer, adapted in ADAPTED.items()} | {AdaptedQuantized: QuantizedLinearGeneral}


def create(cfg: Config) -> models.Transformer:
  """A model with fresh weights from init_weights_seed, and with the adapters of the configuration."""
  model = models.create(cfg, rngs=nnx.Rngs(cfg.run.init_weights_seed))
  return attach(model, cfg.adapter, cfg.run.init_weights_seed) if cfg.adapter.lora_rank else model


def create_abstract(cfg: Config) -> models.Transformer:
  """The same model with `jax.ShapeDtypeStruct` leaves: nothing is allocated."""
  return nnx.eval_shape(lambda: create(cfg))


def attach(model: Any, cfg: AdapterConfig, seed: int = 0) -> Any:
  """Puts adapters on a model, in place, and returns it.

  Args:
    model: Any nnx model; layers may be stacked. It may be abstract inside `nnx.eval_shape`.
    cfg: lora_module_path is matched against the whole path of a layer (`re.fullmatch`), such as
      decoder/layers/self_attention/query, and for experts that of a matrix, such as decoder/layers/moe/wi_0.
    seed: Of the initial values.

  Raises:
    ConfigError: For a pattern that matches no layer, or one that can have no adapter, and for lora_weight_qtype with
      layers that it cannot hold.
  """
  layers, found = _places(model), []
  wanted = re.compile(cfg.lora_module_path) if cfg.lora_module_path else None
  for label, (module, name, by_default) in layers.items():
    if by_default if wanted is None else wanted.fullmatch(label):
      found.append(label)
      _adapt(module, name, label, cfg, lora.key_of(seed, label))
  if not found:
    known = ", ".join(layers) or "none"
    raise ConfigError(f"lora_module_path='{cfg.lora_module_path}' matches no layer that can have an adapter: {known}")
  if cfg.lora_weight_qtype:
    for label, (module, name, by_default) in layers.items():
      if by_default or name:
        _quantize(module, name, label, cfg)
  _freeze(model)
  return model


def disabled(model: Any) -> Any:
  """The model without its adapters. It shares the arrays of `model`, which stays as it is."""
  plain = nnx.merge(*nnx.split(model))
  for _, node in nnx.iter_graph(plain):
    if type(node) in PLAIN:
      for name in ("lora", "lora_dropout", "lora_order")[: 3 if isinstance(node, AdaptedEinsum) else 2]:
        delattr(node, name)
      object.__setattr__(node, "__class__", PLAIN[type(node)])
    elif isinstance(node, RoutedMoe):
      for name in [name for name in vars(node) if name.endswith(("_lora_a", "_lora_b"))]:
        delattr(node, name)
  return plain


def _places(model: Any) -> dict[str, tuple[Any, str, bool]]:
  """{path: (module, matrix of experts or '', whether an empty pattern means it)} of what can have an adapter."""
  modules = [(slash_path(path), node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)]
  routers = {id(node.gate) for _, node in modules if isinstance(node, RoutedMoe)}
  found = {}
  for label, node in modules:
    if type(node) in ADAPTED:
      found[label] = (node, "", id(node) not in routers)
    elif isinstance(node, RoutedMoe):
      found |= {f"{label}/{name}": (node, name, False) for name in (*node.branches, "wo")}
  return found


def _adapt(module: Any, name: str, label: str, cfg: AdapterConfig, key) -> None:
  """Puts an adapter on one layer, or on the experts' matrix `name`."""
  if name:
    _adapt_experts(module, name, label, cfg, key)
    return
  layer, in_axes, out_axes = module, 1, 1
  if isinstance(module, nnx.LinearGeneral):
    in_axes, out_axes = len(module.in_features), len(module.out_features)
    if tuple(module.axis) != tuple(range(-in_axes, 0)) or module.batch_axis:
      raise ConfigError(f"{label} takes no adapter: it contracts other axes than the last ones ({module.axis})")
  elif isinstance(module, nnx.Einsum):
    try:
      before, after, in_axes = lora.einsum_order(module.einsum_str)
    except ValueError as error:
      raise ConfigError(f"{label}: {error}; leave it out of lora_module_path") from error
    layer.lora_order, out_axes = (before, after), len(module.kernel_shape) - in_axes
  layer.lora = Lora(cfg, layer.kernel, in_axes, out_axes, layer, key)
  layer.lora_dropout = cfg.lora_dropout
  object.__setattr__(layer, "__class__", ADAPTED[type(layer)])


def _adapt_experts(module: RoutedMoe, name: str, label: str, cfg: AdapterConfig, key) -> None:
  if cfg.lora_dropout or not module.sparse:
    given = f"lora_dropout={cfg.lora_dropout}" if cfg.lora_dropout else "sparse_matmul=false"
    way = "use lora_dropout=0.0 and sparse_matmul=true, or leave it out of lora_module_path"
    raise ConfigError(f"{given} does not go with an adapter of experts ({label}); {way}")
  a, b = lora.params(cfg, key, getattr(module, name), 1, 1)
  setattr(module, f"{name}_lora_a", a)
  setattr(module, f"{name}_lora_b", b)
  module.lora_scale = lora.scale(cfg)


def _quantize(module: Any, name: str, label: str, cfg: AdapterConfig) -> None:
  """Keeps the weights of one layer, or the experts' matrix `name`, as lora_weight_qtype says."""
  if cfg.lora_weight_qtype == "bfloat16":
    kernel = getattr(module, name or "kernel")
    setattr(module, name or "kernel", kernel.replace(kernel[...].astype(jnp.bfloat16)))
  elif type(module) in QUANTIZED:
    quantize_layer(module, label, cfg.lora_weight_qtype, cfg.lora_tile_size)
  else:
    raise ConfigError(f"lora_weight_qtype={cfg.lora_weight_qtype} holds nnx.LinearGeneral layers, not {label}")


def _freeze(model: Any) -> None:
  """Lets the dense layers of the base form no weight gradients."""
  for _, node in nnx.iter_graph(model):
    if isinstance(node, nnx.LinearGeneral) and node.dot_general is dense.dot_general:
      node.dot_general = dense.frozen_dot_general
