"""Checkpoints: saved, restored, compared and listed. Names that need JAX are imported on first use."""

from typing import TYPE_CHECKING, Any

from maxghost.checkpoint.compare import Comparison, compare_checkpoints
from maxghost.checkpoint.inspect_checkpoint import inspect
from maxghost.checkpoint.layouts_store import open_tree

if TYPE_CHECKING:
  from maxghost.checkpoint.manager import CheckpointError, CheckpointManager, Restored

__all__ = ["CheckpointError", "CheckpointManager", "Comparison", "Restored", "compare_checkpoints", "inspect",
           "open_tree"]  # fmt: skip


def __getattr__(name: str) -> Any:
  if name not in __all__:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from maxghost.checkpoint import manager

  return getattr(manager, name)
