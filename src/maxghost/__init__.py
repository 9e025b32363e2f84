"""maxghost: train language models and learn what every training example was worth."""
