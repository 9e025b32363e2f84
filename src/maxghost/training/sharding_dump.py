"""The sharding of every array of a train step as compact JSON, to inspect and to compare with golden files.

The step is traced for an abstract mesh of the topology's size, without devices. One line for each entry:
  state         path: [dtype, shape, logical axes, mesh axes of each dimension]
  constraints   label of an activation, a direction, scores or an output: the same, and its number of occurrences;
                gradients are split as their parameters.
"""

import collections
import difflib
import json
import math
from collections.abc import Mapping

import jax
from flax import nnx

from maxghost.config import Config
from maxghost.config.validate import MESH_AXES
from maxghost.parallel import Layout, topologies, use
from maxghost.parallel import mesh as meshes
from maxghost.parallel.axis_rules import make_rules
from maxghost.parallel.shardings import AXES, slash_path
from maxghost.training import aot


def dump(cfg: Config, topology: str, num_slices: int = 1) -> dict:
  """The contents of a file. Raises ConfigError for an unknown topology or a mesh that does not fit."""
  constraints: collections.Counter = collections.Counter()

  def record(label, axes, shape, dtype, spec):
    constraints[label, _entry(dtype, shape, axes, spec)] += 1

  layout = _abstract_layout(cfg, topology, num_slices, record)
  planned = aot.plan(cfg, layout)
  with use(layout):
    jax.eval_shape(aot.step_function(planned), *planned.arguments)
  state = {}
  for path, variable in nnx.to_flat_state(planned.arguments[0]):
    leaf = variable.get_value()
    axes = variable.get_metadata().get(AXES)
    if leaf.shape:
      state[slash_path(path)] = json.loads(_entry(str(leaf.dtype), leaf.shape, axes or (), leaf.sharding.spec))
  occurring = [[label, *json.loads(entry), count] for (label, entry), count in sorted(constraints.items())]
  own = [[name, list(axes)] for name, axes in cfg.parallel.logical_axis_rules]
  return {
    "model": cfg.model.model_name, "topology": topology, "slices": num_slices,
    "mesh": {axis: size for axis, size in layout.mesh.shape.items() if size > 1}, "own_rules": own,
    "rows": planned.rows, "state": state, "constraints": occurring,
  }  # fmt: skip


def to_text(found: Mapping) -> str:
  """JSON with an entry on each line."""
  lines = ["{"]
  for name in ("model", "topology", "slices", "mesh", "own_rules", "rows"):
    lines.append(f"{json.dumps(name)}: {json.dumps(found[name])},")
  entries = [f"{json.dumps(path)}: {json.dumps(entry)}" for path, entry in found["state"].items()]
  lines += ['"state": {', ",\n".join(entries), "},"]
  lines += ['"constraints": [', ",\n".join(json.dumps(entry) for entry in found["constraints"]), "]", "}"]
  return "\n".join(lines) + "\n"


def file_name(cfg: Config, topology: str, num_slices: int = 1) -> str:
  """File name for a model, topology and set of rules."""
  rules = "default" if not cfg.parallel.logical_axis_rules else "own"
  slices = f"_{num_slices}_slices" if num_slices > 1 else ""
  return f"{cfg.model.model_name}_{topology}{slices}_{rules}.json"


def difference(golden: str, found: str) -> str:
  """A readable difference of two dumps, empty if they are equal."""
  lines = difflib.unified_diff(golden.splitlines(), found.splitlines(), "golden", "now", lineterm="", n=0)
  return "\n".join(lines)


def _abstract_layout(cfg: Config, topology: str, num_slices: int, record) -> Layout:
  family, count = topologies.parse(topology)
  if family != "cpu":
    known = topologies.FAMILIES[family]
    count = math.prod(known.slices[count]) * known.devices_per_chip
  ici, dcn = meshes.mesh_shape(cfg.parallel, count * num_slices, num_slices)
  sizes = {axis: ici[axis] * dcn[axis] for axis in MESH_AXES}
  mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=meshes.auto(tuple(sizes)))
  rules = make_rules(cfg.parallel.logical_axis_rules, cfg.parallel.override_logical_axis_rules, sizes)
  platform = "cpu" if family == "cpu" else "tpu"
  return Layout(mesh, rules, cfg.parallel.shard_optimizer_over_data, record, platform)


def _entry(dtype: str, shape, axes, spec) -> str:
  names = [axis or "-" for axis in axes]
  split = [" ".join(part) if isinstance(part, tuple) else (part or "-") for part in spec]
  split += ["-"] * (len(shape) - len(split))
  return json.dumps([dtype, list(shape), " ".join(names), split])
