"""Text from a model: prompts are read once, then tokens are added one at a time through a cache."""

from maxghost.serving.batcher import Batcher, Closed, Job, Piece, QueueFull, Request
from maxghost.serving.engine import Engine
from maxghost.serving.generator import Generator, Progress
from maxghost.serving.sampling import Sampling

__all__ = ["Batcher", "Closed", "Engine", "Generator", "Job", "Piece", "Progress", "QueueFull", "Request", "Sampling"]
