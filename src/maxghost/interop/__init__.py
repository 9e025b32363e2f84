"""Checkpoints and models of other programs: MaxText layouts, Hugging Face folders, GGUF files."""
