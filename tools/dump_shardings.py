"""Writes the sharding of every array of a train step as compact JSON, to inspect and to compare with golden files.

`python tools/dump_shardings.py [config.yml] compile_topology=v5p-256 [key=value ...] --output DIR`

The step is traced for an abstract mesh of the topology's size, without devices. One line for each entry:
  state         path: [dtype, shape, logical axes, mesh axes of each dimension]
  constraints   label of an activation, a direction, scores or an output: the same, and its number of occurrences;
                gradients are split as their parameters.
`--goldens` writes the files that the tests compare with, all of them.
"""

import collections
import difflib
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import AxisType

from maxghost import cli, config
from maxghost.config import Config, ConfigError
from maxghost.config.validate import MESH_AXES
from maxghost.parallel import mesh as meshes
from maxghost.parallel import topologies
from maxghost.parallel.axis_rules import make_rules
from maxghost.parallel.shardings import AXES, Layout, slash_path, use
from maxghost.training import compiled_steps
from maxghost.training.plan import Plan

GOLDENS = Path(__file__).resolve().parents[1] / "tests" / "goldens" / "shardings"
MODELS = ("llama3-8b", "qwen3-30b-a3b", "gpt-oss-20b")
TOPOLOGIES = {
  "v5p-128": (),
  "v5e-32": ("ici_tensor_parallelism=4",),
  "cpu-8": ("ici_context_parallelism=2", "ici_data_parallelism=2", "shard_optimizer_over_data=true"),
}
COMMON = ("dtype=bfloat16", "max_target_length=4096", "remat_policy=full", "per_device_batch_size=1", "ghost_rank=32",
          "ghost_direction=sgd", "ghost_val_batch_size=4")  # fmt: skip


def golden_keys(model: str, topology: str) -> tuple[str, ...]:
  """The configuration of a golden."""
  return (f"model_name={model}", f"compile_topology={topology}", *COMMON, *TOPOLOGIES[topology])


def dump(cfg: Config, topology: str, num_slices: int = 1) -> dict:
  """The contents of a file. Raises ConfigError for an unknown topology or a mesh that does not fit."""
  constraints: collections.Counter = collections.Counter()

  def record(label, axes, shape, dtype, spec):
    constraints[label, _entry(dtype, shape, axes, spec)] += 1

  layout = _abstract_layout(cfg, topology, num_slices, record)
  plan = Plan.of(cfg, layout)
  with use(layout):
    step, _ = compiled_steps.train_step(plan)
    jax.eval_shape(step, *plan.arguments)
  state = {}
  for path, variable in nnx.to_flat_state(plan.state):
    leaf = variable.get_value()
    axes = variable.get_metadata().get(AXES)
    if leaf.shape:
      state[slash_path(path)] = json.loads(_entry(str(leaf.dtype), leaf.shape, axes or (), leaf.sharding.spec))
  occurring = [[label, *json.loads(entry), count] for (label, entry), count in sorted(constraints.items())]
  own = [[name, list(axes)] for name, axes in cfg.parallel.logical_axis_rules]
  return {
    "model": cfg.model.model_name, "topology": topology, "slices": num_slices,
    "mesh": {axis: size for axis, size in layout.mesh.shape.items() if size > 1}, "own_rules": own,
    "rows": plan.rows, "state": state, "constraints": occurring,
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
  mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
  rules = make_rules(cfg.parallel.logical_axis_rules, cfg.parallel.override_logical_axis_rules, sizes)
  platform = "cpu" if family == "cpu" else "tpu"
  return Layout(mesh, rules, cfg.parallel.shard_optimizer_over_data, record, platform)


def _entry(dtype: str, shape, axes, spec) -> str:
  names = [axis or "-" for axis in axes]
  split = [" ".join(part) if isinstance(part, tuple) else (part or "-") for part in spec]
  split += ["-"] * (len(shape) - len(split))
  return json.dumps([dtype, list(shape), " ".join(names), split])


def write(cfg: Config, folder: Path) -> Path:
  topology, slices = cfg.parallel.topology
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / file_name(cfg, topology, slices)
  path.write_text(to_text(dump(cfg, topology, slices)), encoding="utf-8")
  return path


def main(argv: list[str] | None = None) -> int:
  arguments = list(sys.argv[1:] if argv is None else argv)
  if arguments == ["--goldens"]:
    for model in MODELS:
      for topology in TOPOLOGIES:
        print(write(config.load(*golden_keys(model, topology)), GOLDENS))
    return 0
  output = None
  if "--output" in arguments and arguments.index("--output") + 1 < len(arguments):
    place = arguments.index("--output")
    output = Path(arguments[place + 1])
    del arguments[place : place + 2]

  def run(cfg: Config) -> int:
    if output is None:
      raise ConfigError("--output DIR is missing: the folder for the file")
    print(write(cfg, output))
    return 0

  return cli.run_command(run, arguments, "dump_shardings")


if __name__ == "__main__":
  sys.exit(main())
