"""Checkpoints: saved, restored, compared and listed. The names below are imported when they are asked for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from maxghost.checkpoint.compare import Comparison, compare_checkpoints
  from maxghost.checkpoint.inspect_checkpoint import inspect
  from maxghost.checkpoint.layouts_store import open_tree
  from maxghost.checkpoint.manager import CheckpointError, CheckpointManager, Restored

__all__ = [
  "CheckpointError",
  "CheckpointManager",
  "Comparison",
  "Restored",
  "compare_checkpoints",
  "inspect",
  "open_tree",
]

_HOME = {"Comparison": "compare", "compare_checkpoints": "compare", "inspect": "inspect_checkpoint"}
_HOME |= {"open_tree": "layouts_store"} | dict.fromkeys(("CheckpointError", "CheckpointManager", "Restored"), "manager")


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
