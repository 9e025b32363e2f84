"""maxghost: train language models and learn what every training example was worth."""

__version__ = "0.2.0"
