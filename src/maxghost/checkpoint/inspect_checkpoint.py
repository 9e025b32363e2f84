"""`maxghost checkpoint inspect`: path, shape, dtype and bytes of every leaf of a checkpoint, and its layout."""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from maxghost.checkpoint.layouts import read_checkpoint
from maxghost.checkpoint.layouts_store import Empty, LayoutError, Opener, StoredArray, open_tree
from maxghost.config.arguments import Parser
from maxghost.config.values import guarded, slash_path


def inspect(path: str | os.PathLike, opener: Opener = open_tree) -> dict[str, Any]:
  """{"layout", "leaves": [{"path", "shape", "dtype", "bytes"}], "bytes", "parameters", ...}; only headers are read.

  Raises LayoutError if the folder cannot be read. A tree of unknown layout is listed too, with the `problem`.
  """
  raw = opener(path)
  leaves = []
  for node_path, node in raw.nodes.items():
    kind = node.kind if isinstance(node, Empty) else "text"
    leaf: dict[str, Any] = {"path": slash_path(node_path), "shape": None, "dtype": kind, "bytes": 0}
    if isinstance(node, StoredArray):
      dtype = f"key<{node.key_impl}>" if node.key_impl else node.dtype.name
      leaf |= {"shape": list(node.shape), "dtype": dtype, "bytes": node.nbytes}
    leaves.append(leaf)
  content: dict[str, Any] = {"path": str(path), "leaves": leaves, "bytes": sum(leaf["bytes"] for leaf in leaves)}
  try:
    checkpoint = read_checkpoint(raw)
    containers = checkpoint.params.containers.values()
    content |= {
      "layout": checkpoint.layout, "wrapped": checkpoint.wrapped, "scan_axis": checkpoint.scan_axis,
      "containers": {slash_path(c.path): {"form": c.form, "layers": c.num_layers} for c in containers},
      "parameters": checkpoint.num_params(),
      "moments": ["opt_state/" + slash_path(place) for place in checkpoint.moments],
      "step": None if checkpoint.step is None else int(checkpoint.step.read(None)),
      "loop_state": sorted({path[0] for path in checkpoint.loop_state}),
      "unknown_keys": sorted({path[0] for path in checkpoint.kept}),
    }  # fmt: skip
  except LayoutError as error:
    content |= {"layout": "", "problem": str(error)}
  return content | {"custom_metadata": raw.custom_metadata, "other_items": raw.location.siblings()}


def _listing(content: dict[str, Any]) -> Iterator[str]:
  of = lambda shape: "-" if shape is None else f"[{','.join(map(str, shape))}]"  # noqa: E731
  rows = [(x["path"], of(x["shape"]), x["dtype"], f"{x['bytes']:>12,}") for x in content["leaves"]]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
  yield f"{len(rows)} leaves, {content['bytes']:,} bytes"
  if not content["layout"]:
    yield f"layout: unknown ({content['problem']})"
    return
  forms = []
  for name, about in content["containers"].items():
    axis = f" on dimension {content['scan_axis']}" if about["form"] == "scanned" else ""
    forms.append(f"{name}: {about['layers']} layers {about['form']}{axis}")
  yield f"layout: {content['layout']}{', leaves under value' if content['wrapped'] else ''}; {'; '.join(forms)}"
  step = "" if content["step"] is None else f"; step {content['step']}"
  yield f"{content['parameters']:,} parameters; moments: {', '.join(content['moments']) or 'none'}{step}"
  more = {"loop_state": "state of the training loop", "unknown_keys": "keys of no layout"}
  for key, what in (more | {"other_items": "other items beside the tree"}).items():
    if content[key]:
      yield f"{what}: {', '.join(content[key])}"


@guarded("inspect")
def main(argv: Sequence[str] | None = None, opener: Opener = open_tree) -> int:
  parser = Parser(prog="maxghost checkpoint inspect", description="Lists what a checkpoint holds.")
  parser.add_argument("path", metavar="CHECKPOINT")
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  args = parser.parse(argv)
  content = inspect(args.path, opener)
  print(*([json.dumps(content)] if args.json else _listing(content)), sep="\n")
  return 0
