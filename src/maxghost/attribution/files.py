"""Output files of the commands."""

from pathlib import Path

from maxghost.config import ConfigError
from maxghost.config.files import write_text


def write_output(path: Path, text: str) -> None:
  """Writes a text file whole or not at all. Raises ConfigError where the place cannot be written."""
  try:
    write_text(path, text)
  except OSError as error:
    raise ConfigError(f"cannot write {path} ({error.strerror}); name another place with --output") from error
