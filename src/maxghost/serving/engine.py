"""The engine: slots that hold one request each, and the compiled functions that fill and advance them."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

TOP = 20  # alternatives whose log-probabilities every step gives


class Engine:
  """Serves one model. slots: requests that are decoded together. cache_size: most positions of a request, prompt and
  answer. prefill_chunk: tokens of a prompt that one call reads. prefix_bytes: most memory of kept prefixes, 0 = none.
  layout: of a mesh, or None for one device."""

  def __init__(
    self, graphdef: nnx.GraphDef, *, slots: int = 8, cache_size: int = 2048, prefill_chunk: int = 256,
    prefix_bytes: int = 0, layout: Any = None,
  ):  # fmt: skip
    raise NotImplementedError

  def load_params(self, state: nnx.State) -> nnx.State:
    """The state placed for the engine's calls; each of them takes it as `params`."""
    raise NotImplementedError

  def prefill(self, params, prompt: Sequence[int], **options) -> Any:
    """Reads a prompt, whole; gives what `insert` puts into a slot."""
    raise NotImplementedError
