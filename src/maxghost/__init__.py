"""maxghost: train language models and score every training example."""

__version__ = "0.2.0"
