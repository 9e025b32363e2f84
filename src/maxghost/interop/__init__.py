"""Checkpoints and models of other programs: MaxText layouts, Hugging Face folders, GGUF files."""

from maxghost.interop.hf_checkpoint import export_model, import_model

__all__ = ["export_model", "import_model"]
