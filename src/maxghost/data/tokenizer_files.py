"""A tokenizer's files saved beside the model: in <run>/tokenizer, and likewise for an imported model.

The byte tokenizer has no file.
"""

import shutil
from pathlib import Path

from maxghost.config import ConfigError
from maxghost.data.tokenizers import HUGGINGFACE, SENTENCEPIECE, TIKTOKEN, TiktokenTokenizer, Tokenizer

FOLDER, TEMPLATE = "tokenizer", "chat_template.jinja"
# What transformers saves beside a model for its tokenizer, and the tokens that end a text.
HUGGINGFACE_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                     "tokenizer.model", "vocab.json", "merges.txt", TEMPLATE, "generation_config.json")  # fmt: skip


def save(tokenizer: Tokenizer, kind: str, folder: Path, template: str = "") -> None:
  """Writes the tokenizer into `folder`, unless one is there. template: a file of a chat template to keep with it."""
  if tokenizer.path is None or _files(kind, folder):
    return
  folder.mkdir(exist_ok=True)
  if isinstance(tokenizer, TiktokenTokenizer):
    tokenizer.save(folder)
  elif kind == SENTENCEPIECE:
    shutil.copyfile(tokenizer.path, folder / f"{tokenizer.path.stem}.model")
  else:
    copy(tokenizer.path.parent, folder)
    shutil.copyfile(tokenizer.path, folder / "tokenizer.json")
  if template:
    shutil.copyfile(Path(template).expanduser(), folder / TEMPLATE)


def copy(source: Path, target: Path) -> list[str]:
  """Copies the files of a Hugging Face tokenizer; returns their names. Creates `target` if there are any."""
  if names := [name for name in HUGGINGFACE_FILES if (source / name).is_file()]:
    target.mkdir(exist_ok=True)
  for name in names:
    shutil.copyfile(source / name, target / name)
  return names


def saved_path(kind: str, folder: Path) -> str | None:
  """The `tokenizer_path` of a tokenizer saved in `folder`; None if there is none of this kind."""
  files = _files(kind, folder)
  if len(files) > 1:
    raise ConfigError(f"{folder} holds several tokenizers: {', '.join(file.name for file in files)}; leave one")
  return str(folder if kind == HUGGINGFACE else files[0]) if files else None


def _files(kind: str, folder: Path) -> list[Path]:
  patterns = {HUGGINGFACE: "tokenizer.json", SENTENCEPIECE: "*.model", TIKTOKEN: "*.encoding.json"}
  return sorted(folder.glob(patterns[kind])) if kind in patterns else []
