"""Where documents come from: one module per `dataset_type`."""

from maxghost.config.schema import DataConfig
from maxghost.data.sources.base import Source

_STDLIB_CAP = 2_000_000  # bytes per domain of the built-in sources, unless dataset_domain_bytes says otherwise


def open_source(cfg: DataConfig, seed: int) -> Source:
  """The documents of a configuration. Raises ConfigError."""
  cap = cfg.dataset_domain_bytes
  if cfg.dataset_type == "stdlib":
    from maxghost.data.sources import stdlib

    return stdlib.load(cfg.dataset_domains, _STDLIB_CAP if cap < 0 else cap)
  from maxghost.data.sources import synthetic

  return synthetic.load(cfg.dataset_domains, _STDLIB_CAP if cap < 0 else cap, seed)
