"""The folder of the shipped configurations, files that are written whole or not at all, and JSON with a checksum."""

import contextlib
import errno
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from maxghost.config.values import ConfigError, naming, print_problem


def config_dir() -> Path:
  """The folder of the shipped configurations: inside the wheel, or in the repository of an editable install."""
  package = Path(__file__).resolve().parents[1]
  inside = package / "configs"
  return inside if inside.is_dir() else package.parents[1] / "configs"


def read_table(name: str) -> Any:
  """The content of a YAML file of the shipped configurations."""
  return yaml.load((config_dir() / name).read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@contextlib.contextmanager
def write_whole(path: str | os.PathLike, durable: bool = True) -> Iterator[BinaryIO]:
  """Yields a binary file, open for writing and reading, that becomes `path` at the end of the `with` block.

  A reader sees the old file or all of the new one, with `durable` also after a power cut. Nothing is left where the
  block raises. A pipe or a device, such as /dev/stdout, is written into, not replaced. Raises OSError.
  """
  path = Path(path)
  if path.exists() and not path.is_dir() and (not path.is_file() or path.absolute().parent == Path("/dev")):
    with naming("", path), open(path, "wb") as file:
      yield file
    return
  temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
  try:
    with naming("", path), open(temporary, "w+b") as file:
      yield file
      file.flush()
      if durable:
        os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    temporary.unlink(missing_ok=True)
    raise
  if durable:
    sync(path.parent)


@contextlib.contextmanager
def locked(folder: Path, option: str = "--output") -> Iterator[None]:
  """Makes the folder, which `option` named, and locks it. Raises ConfigError if another command has the lock."""
  with contextlib.ExitStack() as stack:
    try:
      folder.mkdir(parents=True, exist_ok=True)
      stack.callback(os.close, handle := os.open(folder, os.O_RDONLY))  # the folder itself: a lock leaves no file
    except OSError as error:
      raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      raise ConfigError(f"another command writes {folder}; wait for its end, or give another {option}") from error
    except OSError as error:  # some network file systems have no locks
      print_problem(f"note: {folder} cannot be locked ({error.strerror}); start no second command that writes it")
    yield


def with_end(path: Path) -> Path:
  """The path of what is to be read. Raises OSError for a pipe or a device, which may have no end."""
  if path.exists() and not (path.is_file() or path.is_dir()):
    raise OSError(errno.EINVAL, "it is no regular file", str(path))
  return path


def write_text(path: str | os.PathLike, text: str) -> None:
  """Writes a UTF-8 text file whole or not at all; what UTF-8 cannot hold becomes `?`. Raises OSError."""
  with write_whole(path) as file:
    file.write(text.encode("utf-8", errors="replace"))


def sync(path: Path) -> None:
  """Makes a file, or renames and removals in a folder, durable."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
  """A JSON object with the CRC-32 of its content, for `check_seal`."""
  content = json.loads(json.dumps(record))  # keys become text, as they are read
  return {**content, "crc32": _content_crc(content)}


def check_seal(record: Any) -> dict[str, Any]:
  """The object that `sealed` was given, or one of an earlier version without a seal. Raises ValueError if changed."""
  if not isinstance(record, dict):
    raise ValueError("not a JSON object")
  content = {name: value for name, value in record.items() if name != "crc32"}
  if "crc32" in record and record["crc32"] != _content_crc(content):
    raise ValueError("its content does not match its checksum")
  return content


def _content_crc(record: Mapping[str, Any]) -> int:
  return zlib.crc32(json.dumps(record, sort_keys=True).encode())
