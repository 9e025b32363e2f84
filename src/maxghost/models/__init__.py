"""Models: plain flax.nnx modules with MaxText's parameter names, built by `create` or `create_abstract`."""

from maxghost.models.segments import remat_scan
from maxghost.models.transformer import Transformer, create, create_abstract

__all__ = ["Transformer", "create", "create_abstract", "remat_scan"]
