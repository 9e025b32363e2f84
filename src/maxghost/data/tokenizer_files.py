"""A tokenizer's files saved beside the model: in <run>/tokenizer, and likewise for an imported model.

The byte tokenizer has a file only in exports.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from maxghost.config import ConfigError
from maxghost.config.files import write_text, write_whole
from maxghost.config.values import import_package
from maxghost.data import tokenizers

FOLDER, TEMPLATE, TOOLS_TEMPLATE = "tokenizer", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
# What transformers saves beside a model for its tokenizer, and the tokens that end a text.
HUGGINGFACE_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                     "tokenizer.model", "vocab.json", "merges.txt", TEMPLATE, "generation_config.json")  # fmt: skip
_PATTERNS = {tokenizers.HUGGINGFACE: "tokenizer.json", tokenizers.SENTENCEPIECE: "*.model",
             tokenizers.TIKTOKEN: "*.encoding.json"}  # fmt: skip


def save(tokenizer: tokenizers.Tokenizer, kind: str, folder: Path, template: str = "") -> None:
  """Writes the tokenizer into `folder`, unless one is there; last the file that shows it. template: to keep with it."""
  file, kept = tokenizer.path, folder / TEMPLATE
  if _files(kind, folder) or (file is None and (kept.exists() or not template)):
    return
  folder.mkdir(exist_ok=True)
  if file and kind == tokenizers.HUGGINGFACE:
    copy(file.parent, folder, HUGGINGFACE_FILES[1:])
  if template:
    (folder / TOOLS_TEMPLATE).unlink(missing_ok=True)  # it is for conversations with tools too
    _copy_file(Path(template).expanduser(), kept)
  if isinstance(tokenizer, tokenizers.TiktokenTokenizer):
    tokenizer.save(folder)
  elif file:
    _copy_file(file, folder / ("tokenizer.json" if kind == tokenizers.HUGGINGFACE else f"{file.stem}.model"))


def copy(source: Path, target: Path, files: Sequence[str] = HUGGINGFACE_FILES) -> None:
  """Copies those files of a Hugging Face tokenizer that there are, and its chat templates beside the usual one. Creates
  `target` if there are any."""
  for file in (*(source / name for name in files), *source.glob(f"{Path(TOOLS_TEMPLATE).parent}/*.jinja")):
    if file.is_file():
      (kept := target / file.relative_to(source)).parent.mkdir(exist_ok=True, parents=True)
      _copy_file(file, kept)


def export(kind: str, path: Path, target: Path) -> None:
  """Copies the files of the tokenizer in a folder or file under the names that transformers reads; none of tiktoken."""
  if kind != tokenizers.TIKTOKEN:
    copy(path if path.is_dir() else path.parent, target)
    if path.is_file():
      _copy_file(path, target / ("tokenizer.json" if kind == tokenizers.HUGGINGFACE else "tokenizer.model"))


def _copy_file(source: Path, target: Path) -> None:
  with write_whole(target) as file:
    file.write(source.read_bytes())


def write_bytes(folder: Path, add_bos: bool, template: str = "") -> None:
  """The byte tokenizer as files of Hugging Face, with the same ids. add_bos: before texts. template: as in `save`."""
  library, own = import_package("tokenizers", f"the tokenizer in {folder}", "hf"), tokenizers.ByteTokenizer()
  words = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
  ids = dict(zip(words.values(), (own.bos_id, own.eos_id, own.pad_id), strict=True))
  made = library.Tokenizer(library.models.BPE(tokenizers.byte_level_alphabet() | ids, []))
  made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  made.decoder = library.decoders.ByteLevel()
  made.add_special_tokens([*ids])
  if add_bos:
    made.post_processor = library.processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", own.bos_id)])
  made.save(str(folder / "tokenizer.json"))
  write_text(folder / "tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | words))
  save(own, tokenizers.BYTE, folder, template)


def saved_path(kind: str, folder: Path) -> str | None:
  """The `tokenizer_path` of a tokenizer saved in `folder`; None if there is none of this kind."""
  files = _files(kind, folder)
  if len(files) > 1:
    raise ConfigError(f"{folder} holds several tokenizers: {', '.join(file.name for file in files)}; leave one")
  return str(folder if kind == tokenizers.HUGGINGFACE else files[0]) if files else None


def _files(kind: str, folder: Path) -> list[Path]:
  return sorted(folder.glob(_PATTERNS[kind])) if kind in _PATTERNS else []
