"""Where documents come from: one module per `dataset_type`."""

from maxghost.config import ConfigError
from maxghost.config.schema import DataConfig
from maxghost.data.sources.base import Source

_BUILT_IN_CAP = 2_000_000  # bytes per domain of stdlib and synthetic, unless dataset_domain_bytes says otherwise
# Keys that only some types read. A key set for another type is refused, not ignored.
_READ_BY = {"dataset_files": ("text", "grain", "hf", "tfds"), "dataset_path": ("tfds",)}


def open_source(cfg: DataConfig, seed: int, *, whole: bool = True) -> Source:
  """The documents of a configuration. seed: of the synthetic data. whole: see `TextSource`. Raises ConfigError."""
  _check_keys(cfg)
  cap = cfg.dataset_domain_bytes
  built_in_cap, cap = (_BUILT_IN_CAP, 0) if cap < 0 else (cap, cap)
  kind, columns, domains = cfg.dataset_type, cfg.train_data_columns, cfg.dataset_domains
  if kind == "stdlib":
    from maxghost.data.sources import stdlib

    return stdlib.load(domains, built_in_cap)
  if kind == "synthetic":
    from maxghost.data.sources import synthetic

    return synthetic.load(domains, built_in_cap, seed)
  if kind == "text":
    from maxghost.data.sources import text

    return text.load(cfg.dataset_files, columns, domains, domain_bytes=cap, on_corrupt=cfg.on_corrupt, whole=whole)
  if cap:
    raise ConfigError(
      f"dataset_domain_bytes={cap} works with dataset_type stdlib, synthetic and text, not with {kind}; use -1"
    )
  if kind == "grain":
    return _open_grain(cfg, whole)
  if kind == "tfds":
    from maxghost.data.sources import tfds_source

    return tfds_source.load(cfg.dataset_files, cfg.dataset_path, cfg.train_split, columns, domains)
  from maxghost.data.sources import hf

  return hf.load(cfg.dataset_files, cfg.train_split, columns, domains)


def _open_grain(cfg: DataConfig, whole: bool) -> Source:
  from maxghost.data.sources import arrayrecord, text
  from maxghost.data.sources import files as corpus_files

  files = corpus_files.expand("dataset_files", cfg.dataset_files, cfg.dataset_domains, "text", kind="grain")
  parquet = [file.path.endswith(".parquet") for file in files]
  if all(parquet):
    return text.TextSource(files, cfg.train_data_columns, on_corrupt=cfg.on_corrupt, whole=whole)
  if any(parquet):
    raise ConfigError("dataset_files matches Parquet and ArrayRecord files; use one kind in a run")
  return arrayrecord.load(files, cfg.train_data_columns, on_corrupt=cfg.on_corrupt)


def _check_keys(cfg: DataConfig) -> None:
  for key, kinds in _READ_BY.items():
    if getattr(cfg, key) and cfg.dataset_type not in kinds:
      raise ConfigError(
        f"{key} is set, but dataset_type={cfg.dataset_type} does not read it; use dataset_type="
        f"{' or '.join(kinds)}, or leave it empty"
      )
