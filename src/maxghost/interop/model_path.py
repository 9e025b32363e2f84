"""Finds the model at a path: a run, one of its steps, an imported folder, or a Hugging Face folder. Imports no JAX."""

import dataclasses
from pathlib import Path
from typing import Any

from maxghost import config
from maxghost.checkpoint.layouts_store import LayoutError, full_path, locate
from maxghost.config import Config
from maxghost.config.files import write_text
from maxghost.config.schema import WEIGHTS_ONLY
from maxghost.config.values import naming, nearest_beside
from maxghost.data import tokenizer_files
from maxghost.data.tokenizers import load_tokenizer, read_settings
from maxghost.interop import huggingface
from maxghost.interop.huggingface_config import differing
from maxghost.interop.safetensors_files import open_tensors

CONFIG_FILE = "config.yml"
HUGGINGFACE_FILE = "huggingface.json"  # config.json of the model that a run or an import began with


@dataclasses.dataclass(frozen=True, slots=True)
class ModelPlace:
  """Where a model is, and its configuration with the tokenizer beside it; None for a checkpoint of another program."""

  tree: Path  # the folder that `open_tree` reads
  config: Config | None
  config_file: Path | None


def find(path: str | Path, key: str = "") -> ModelPlace:
  """The model at `path`, which `key` gave. Raises ConfigError if there is none, or its config.yml cannot be read."""
  with naming(key, path):
    folder = full_path(path)
    if not folder.is_dir():
      raise LayoutError(f"there is no model folder {path}{nearest_beside(Path(path))}")
    if huggingface.is_huggingface(folder):
      cfg = huggingface.model_config(folder, open_tensors(folder))
      cfg = config.replace(cfg, **tokenizer_keys(folder, cfg.model.vocab_size))
      return ModelPlace(folder, cfg, folder / huggingface.CONFIG_JSON)
    if (folder / "checkpoints").is_dir():
      steps = [entry for entry in (folder / "checkpoints").iterdir() if entry.name.isdecimal() and entry.is_dir()]
      if not steps:
        raise LayoutError(f"{folder} has no checkpoint in {folder / 'checkpoints'}")
      folder = max(steps, key=lambda entry: int(entry.name))
    locate(folder)
    # <run>/checkpoints/<step>[/items] and <imported>[/items].
    for candidate in (folder, *list(folder.parents)[:3]):
      if (file := candidate / CONFIG_FILE).is_file():
        return ModelPlace(folder, with_own_tokenizer(config.load(file), candidate), file)
    return ModelPlace(folder, None, None)


def configured(place: ModelPlace, path: str | Path, given: Config | None = None, name: str = "--config") -> Config:
  """`given`, which `name` gave, or the configuration beside the model at `path`. Raises ConfigError where there is
  none, and where they are of different models."""
  if given is None and place.config is None:
    raise LayoutError(f"{path}: no {CONFIG_FILE} beside it says what model it is; name one with --config")
  if given and place.config and (unlike := differing(place.config.model, given.model)):
    raise LayoutError(f"{name} is another model than {path}: they differ in {', '.join(unlike)}")
  return given or place.config  # pyright: ignore[reportReturnType]


def plain(cfg: Config) -> Config:
  """The configuration of the base of a model with adapters."""
  return config.replace(cfg, lora_rank=0, lora_weight_qtype="", lora_restore_path="", offload_to_host=())


def with_base(place: ModelPlace, cfg: Config, adapter: str = "") -> tuple[ModelPlace, Config, str]:
  """(base, its configuration, path of the adapter to merge) of a model with `adapter`, or of a run with adapters."""
  if not cfg.adapter.lora_rank:
    return place, cfg, adapter
  if not (given := cfg.checkpoint.load_parameters_path):
    raise LayoutError(f"{place.tree} holds adapters without a base; train them with load_parameters_path")
  if adapter:
    raise LayoutError(f"{place.tree} holds adapters of its own; give its base, {given}, to merge {adapter} into")
  return find(given, "load_parameters_path"), plain(cfg), str(place.tree)


def check_whole(place: ModelPlace, what: str) -> None:
  """Raises ConfigError where the model's weights are in few bits."""
  if place.config and (held := place.config.model.quantization) in WEIGHTS_ONLY:
    said = f"{place.tree} holds weights in {held}, which are for maxghost generate"
    raise LayoutError(f"{said}; {what} needs the checkpoint that they were made of")


def huggingface_file(place: ModelPlace, cfg: Config) -> Path | None:
  """The config.json of the Hugging Face model that `place` came from; None where there is none any more."""
  folders = [place.config_file.parent] if place.config_file else []
  folders += [full_path(cfg.checkpoint.given)] if cfg.checkpoint.given else []
  files = [folder / name for folder in folders for name in (HUGGINGFACE_FILE, huggingface.CONFIG_JSON)]
  return next((file for file in files if file.is_file()), None)


def keep_huggingface(place: ModelPlace, cfg: Config, folder: Path) -> None:
  """Copies the config.json of the original model into a run's folder, so that an export needs only the run."""
  if (file := huggingface_file(place, cfg)) and not (folder / HUGGINGFACE_FILE).exists():
    write_text(folder / HUGGINGFACE_FILE, file.read_text("utf-8"))


def tokenizer_keys(folder: Path, vocab_size: int) -> dict[str, Any]:
  """The keys for the tokenizer in a folder, {} without one. Raises ConfigError if it has more ids than vocab_size."""
  has_json, sentences = (folder / "tokenizer.json").is_file(), folder / "tokenizer.model"
  if not has_json and not sentences.is_file():
    return {}
  kind, path = ("huggingface", str(folder)) if has_json else ("sentencepiece", str(sentences))
  tokenizer = load_tokenizer(kind, path)
  if tokenizer.vocab_size > vocab_size:
    said = f"the tokenizer in {folder} has ids up to {tokenizer.vocab_size - 1}"
    raise LayoutError(f"{said}, but the model's vocabulary ends at {vocab_size - 1}: they do not belong together")
  ends = {"add_bos": _begins_with_bos(folder, tokenizer), "add_eos": tokenizer.eos_id is not None}
  return {"tokenizer_type": kind, "tokenizer_path": path, **ends}


def _begins_with_bos(folder: Path, tokenizer) -> bool:
  """Whether the tokenizer itself puts its begin token before a text."""
  if tokenizer.bos_id is None:
    return False
  if (said := read_settings(folder / "tokenizer_config.json").get("add_bos_token")) is not None:
    return bool(said)
  if not (folder / "tokenizer.json").is_file():
    return True
  import tokenizers

  ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a", add_special_tokens=True).ids
  return ids[:1] == [tokenizer.bos_id]


def with_own_tokenizer(cfg: Config, folder: Path) -> Config:
  """The configuration with the path of the tokenizer saved beside it, as the folder may have been moved."""
  saved = tokenizer_files.saved_path(cfg.data.tokenizer_type, folder / tokenizer_files.FOLDER)
  template = folder / tokenizer_files.FOLDER / tokenizer_files.TEMPLATE
  own = {"chat_template_path": str(template)} if cfg.data.chat_template_path and template.is_file() else {}
  return config.replace(cfg, tokenizer_path=saved or cfg.data.tokenizer_path, **own)
