"""Where documents come from: text and ArrayRecord files, tables of other libraries, and built-in text."""

from maxghost.config import ConfigError, DataConfig
from maxghost.data.sources import arrayrecord, stdlib, synthetic, tables, text
from maxghost.data.sources.base import Kept, Source
from maxghost.data.sources.files import expand

_BUILT_IN_CAP = 2_000_000  # bytes per domain of stdlib and synthetic, unless dataset_domain_bytes says otherwise
# Keys that only some types read. A key set for another type is refused, not ignored.
_OF_FILES = ("text", "grain", "hf", "tfds")
_READ_BY = {"dataset_files": _OF_FILES, "dataset_path": ("tfds",), "document_fields": _OF_FILES,
            "train_data_columns": _OF_FILES, "train_split": ("hf", "tfds")}  # fmt: skip


def check_keys(cfg: DataConfig) -> None:
  """Raises ConfigError for a key that the type of the data does not read, and for a domain that is named twice."""
  kind, cap, usual = cfg.dataset_type, cfg.dataset_domain_bytes, DataConfig()
  for key, kinds in _READ_BY.items():
    if kind not in kinds and getattr(cfg, key) != getattr(usual, key):
      said = f"{key} is set, but dataset_type={kind} does not read it"
      raise ConfigError(f"{said}; use dataset_type={' or '.join(kinds)}, or leave it out")
  if cap > 0 and kind in ("grain", "tfds"):
    said = f"dataset_domain_bytes={cap} works with dataset_type stdlib, synthetic, text and hf, not with {kind}"
    raise ConfigError(f"{said}; use -1")
  if twice := [name for name in cfg.dataset_domains if cfg.dataset_domains.count(name) > 1]:
    raise ConfigError(f"dataset_domains names '{twice[0]}' twice; name it once")


def open_source(cfg: DataConfig, seed: int, *, whole: bool = True) -> Source:
  """The documents of a configuration. seed: of synthetic data. whole: see `text.load`. Raises ConfigError."""
  kind, cap, kept = cfg.dataset_type, cfg.dataset_domain_bytes, isinstance(cfg.train_data_columns, Kept)
  if kept and kind in ("stdlib", "synthetic"):
    raise ConfigError(f"dataset_type={kind} is plain text, but the objective reads records; use dataset_type=text")
  check_keys(cfg)
  built_in_cap, cap = (_BUILT_IN_CAP, 0) if cap < 0 else (cap, cap)
  if kind == "stdlib":
    return stdlib.load(cfg.dataset_domains, built_in_cap)
  if kind == "synthetic":
    return synthetic.load(cfg.dataset_domains, built_in_cap, seed)
  if kind in ("hf", "tfds"):
    return tables.load(cfg)
  own = kept and kind == "text"  # records may name their own domains
  files = expand("dataset_files", cfg.dataset_files, () if own else cfg.dataset_domains, kind)
  parquet = [file.path.endswith(".parquet") for file in files]
  if kind == "text" or all(parquet):
    return text.load(files, cfg, cap=cap, whole=whole, own=own)
  if any(parquet):
    raise ConfigError("dataset_files matches Parquet and ArrayRecord files; use one kind in a run")
  return arrayrecord.load(files, cfg)
