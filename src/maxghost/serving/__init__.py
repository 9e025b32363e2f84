"""Text from a model: prompts are read once, then tokens are added one at a time through a cache."""

from maxghost.serving.generator import Generator, Progress
from maxghost.serving.sampling import Sampling

__all__ = ["Generator", "Progress", "Sampling"]
