"""Writes how every array of a train step is split.

`python tools/dump_shardings.py [config.yml] compile_topology=v5p-256 [key=value ...] --output DIR`

One JSON file for the model, topology and rules (`maxghost.training.sharding_dump`). `--goldens` writes the files that
the tests compare with, all of them.
"""

import sys
from pathlib import Path

from maxghost import cli
from maxghost.config import Config, ConfigError

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


def write(cfg: Config, folder: Path) -> Path:
  from maxghost.training import sharding_dump

  topology, slices = cfg.parallel.topology
  text = sharding_dump.to_text(sharding_dump.dump(cfg, topology, slices))
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / sharding_dump.file_name(cfg, topology, slices)
  path.write_text(text, encoding="utf-8")
  return path


def main(argv: list[str] | None = None) -> int:
  arguments = list(sys.argv[1:] if argv is None else argv)
  if arguments == ["--goldens"]:
    from maxghost import config

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

  return cli.run_door(run, arguments, "dump_shardings")


if __name__ == "__main__":
  sys.exit(main())
