"""Many devices: the mesh, logical axis rules, shardings, several processes. Models call `constrain`, nothing else.

`topologies` and `mesh` can be imported without JAX; the names below are made when they are asked for.
"""

from typing import Any

_HOME = dict.fromkeys(("Layout", "constrain", "constrain_factor", "constrain_state", "use"), "shardings")


def __getattr__(name: str) -> Any:
  if name not in _HOME:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from importlib import import_module

  return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
