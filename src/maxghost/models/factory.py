"""Builds models from a config."""

from flax import nnx

from maxghost.config.schema import Config, ModelConfig
from maxghost.models.transformer import Transformer


def create(cfg: Config | ModelConfig, *, rngs: nnx.Rngs) -> Transformer:
  """A model with fresh weights. Its `nnx.Param` paths are MaxText's; each carries `axes`, its logical axis names."""
  return Transformer(cfg.model if isinstance(cfg, Config) else cfg, rngs=rngs)


def create_abstract(cfg: Config | ModelConfig) -> Transformer:
  """The same model with `jax.ShapeDtypeStruct` leaves: nothing is allocated."""
  return nnx.eval_shape(lambda: create(cfg, rngs=nnx.Rngs(0)))
