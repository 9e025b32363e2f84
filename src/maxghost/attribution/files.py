"""Output files that are there whole or not at all."""

import os
from pathlib import Path

from maxghost.config import ConfigError


def write_whole(path: Path, text: str):
  """Writes a text file through a temporary one. Raises ConfigError where the place cannot be written."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    temporary.write_text(text, "utf-8", errors="replace")
    os.replace(temporary, path)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    raise ConfigError(f"cannot write {path} ({error.strerror}); name another place with --output") from error
