"""`python -m maxghost.train_compile configs/base.yml compile_topology=v5e-16 [key=value ...]`: checks that a step fits.

Compiles the train step of `maxghost train` for a topology, on any machine: TPU slices need the extra `tpu` (libtpu),
cpu-N needs nothing. Exit codes: 0 the step compiles and fits, 1 it does not fit, 2 wrong input.
"""

import sys
import tempfile
import time
from pathlib import Path

from maxghost import cli, config, left_with
from maxghost.config import Config, ConfigError
from maxghost.config.values import naming
from maxghost.parallel import topologies


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns the exit code."""
  return cli.run_command(_run, argv, "train_compile")


def _run(cfg: Config) -> int:
  topology, slices = cfg.parallel.topology
  topologies.prepare_environment(topology)
  from maxghost import load_model
  from maxghost.parallel import mesh, shardings
  from maxghost.training import aot, devices
  from maxghost.training.plan import Plan

  begin = time.perf_counter()
  devices.configure_jax(cfg)
  teacher, _ = load_model.teacher(cfg) or (None, None)
  if slices > 1:  # virtual devices do not say which slice they are in
    sizes = mesh.fill("dcn", mesh.group_sizes(cfg.parallel, "dcn"), slices, "slices", cfg.parallel.enable_diloco)
    cfg = config.replace(cfg, **{f"dcn_{axis}_parallelism": size for axis, size in sizes.items()})
  plan = Plan.of(cfg, shardings.Layout.of(cfg.parallel, topologies.open_devices(topology, slices)), teacher)
  print(f"compiling for {slices} x {topology}" if slices > 1 else f"compiling for {topology}")
  print(*plan.lines(), *plan.memory.table(), sep="\n", flush=True)
  if file := cfg.parallel.compiled_trainstep_file:
    try:
      (folder := Path(file).parent).mkdir(parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
      raise ConfigError(f"compiled_trainstep_file={file} cannot be written: {error.strerror}; use another") from error
  compiled = aot.compile_step(plan)
  lines, fits = aot.report_lines(compiled, topology)
  print(*lines, sep="\n", flush=True)
  if file and compiled.executable is not None:
    with naming("compiled_trainstep_file", file):
      print(f"saved {file}: {compiled.save(Path(file)) / 1e6:.1f} MB")
  print(f"done in {time.perf_counter() - begin:.1f} s")
  return 0 if fits else 1


if __name__ == "__main__":
  sys.exit(left_with(main()))
