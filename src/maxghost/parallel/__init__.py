"""Several devices: the mesh, logical axis rules, shardings, several processes. Models call only `constrain`.

`topologies` and `mesh` can be imported without JAX, so the names of `shardings` are imported on first use.
"""

from typing import Any

_OF_SHARDINGS = ("Layout", "constrain", "constrain_factor", "constrain_state", "use")


def __getattr__(name: str) -> Any:
  if name not in _OF_SHARDINGS:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from importlib import import_module

  return getattr(import_module(f"{__name__}.shardings"), name)
