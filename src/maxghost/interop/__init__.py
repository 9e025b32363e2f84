"""Checkpoints and models of other programs: MaxText layouts, Hugging Face folders, GGUF files.

The names below are imported when they are asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from maxghost.interop.hf_checkpoint import export_model, import_model

__all__ = ["export_model", "import_model"]

_HOME = {"export_model": "hf_checkpoint", "import_model": "hf_checkpoint"}


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
