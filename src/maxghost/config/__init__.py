"""The configuration: `load` reads and validates it, `Config` holds it. No module in here imports JAX."""

from maxghost.config.files import config_dir
from maxghost.config.load import differing_keys, fields, load, load_with_origins, replace, save
from maxghost.config.schema import Config, DataConfig, GhostConfig, ModelConfig, OptimizerConfig, ParallelConfig
from maxghost.config.values import ConfigError, did_you_mean, nearest

__all__ = [
  "Config", "ConfigError", "DataConfig", "GhostConfig", "ModelConfig", "OptimizerConfig",
  "ParallelConfig", "config_dir", "did_you_mean", "differing_keys", "fields", "load", "load_with_origins", "nearest",
  "replace", "save",
]  # fmt: skip
