"""The configuration: `load` reads and validates it, `Config` holds it. No module in here imports JAX."""

from maxghost.config.errors import ConfigError, did_you_mean, nearest
from maxghost.config.files import config_dir
from maxghost.config.load import Loaded, differing_keys, fields, load, load_with_origins, replace, save, to_text
from maxghost.config.schema import (
  CheckpointConfig,
  Config,
  DataConfig,
  GhostConfig,
  ModelConfig,
  OptimizerConfig,
  RunConfig,
)

__all__ = [
  "CheckpointConfig", "Config", "ConfigError", "DataConfig", "GhostConfig", "Loaded", "ModelConfig", "OptimizerConfig",
  "RunConfig", "config_dir", "did_you_mean", "differing_keys", "fields", "load", "load_with_origins", "nearest",
  "replace", "save", "to_text",
]  # fmt: skip
