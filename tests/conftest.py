"""Tests run on CPU with eight virtual devices; marked tests are left out, with the reason, unless asked for."""

import gc
import importlib.metadata
import os
import re
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA compiles for the CPU in little more than half the time without its fusion emitters, and in 8 % less where it does
# not part a program for its threads; `.ci/nightly` does without these. Later versions of XLA end the process at a flag
# that they no longer know.
os.environ.setdefault(
  "XLA_FLAGS",
  "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
  if importlib.metadata.version("jaxlib").startswith("0.10.")
  else "",
)
# LLVM compiles without optimizations, here and in the commands that tests start, in a third of the time.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Programs do not carry the lines of Python that made each operation: a sixth of the compilation.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import hypothesis
import jax
import pytest

# A busy machine is no failure of the code: the suite has time limits of its own.
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("suite")

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tracing makes many objects that stay: looking through them as often as Python does takes a tenth of the suite's time.
gc.set_threshold(200_000, 20, 100)

OPTIONS = {
  "slow": ("--run-slow", "long, or has a lighter twin that runs"),
  "tpu_aot": ("--run-tpu-aot", "needs libtpu (extra `tpu`)"),
  "network": ("--run-network", "needs a package registry"),
  "hf": ("--run-hf", "needs the `hf` extra"),
  "gpu": ("--run-gpu", "needs a GPU"),
  "matrix": ("--run-matrix", "another case of what the suite tests, see tests/matrix.txt"),
}


def matrix() -> list[str]:
  """The lines of matrix.txt."""
  lines = (Path(__file__).parent / "matrix.txt").read_text(encoding="utf-8").splitlines()
  return [line for line in lines if line and not line.startswith("#")]


def pytest_configure(config):
  """One cache of compiled programs for a run of the suite: its processes and the commands they start share it."""
  if not hasattr(config, "workerinput") and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.TemporaryDirectory(prefix="maxghost-programs-")
    config.add_cleanup(folder.cleanup)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    jax.config.update("jax_compilation_cache_dir", folder.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_addoption(parser):
  for mark, (option, reason) in OPTIONS.items():
    parser.addoption(option, action="store_true", help=f"run the tests marked {mark}: {reason}")


def pytest_report_header(config):
  left_out = [f"{mark} ({why}): {option}" for mark, (option, why) in OPTIONS.items() if not config.getoption(option)]
  return "left out unless asked for: " + "; ".join(left_out) if left_out else None


def pytest_collection_modifyitems(config, items):
  pattern = lambda line: re.escape(line).replace(r"\*", ".*")  # noqa: E731
  in_matrix, names = re.compile("|".join(map(pattern, matrix()))), []
  for item in items:
    others = any(item.get_closest_marker(mark) for mark in OPTIONS)
    path, _, name = item.nodeid.partition("::")  # a case may have a slash in its name
    names.append(f"{path.rpartition('/')[2]}::{name}")
    if not others and in_matrix.fullmatch(names[-1]):
      item.add_marker(pytest.mark.matrix)
    for mark, (option, reason) in OPTIONS.items():
      if item.get_closest_marker(mark) and not config.getoption(option):
        item.add_marker(pytest.mark.skip(reason=f"{reason}; run with {option}"))
  # A long file that begins among the last ones would leave the other processes without work.
  items.sort(key=lambda item: item.path.name != "test_train_step.py")
  if config.args == config.getini("testpaths"):
    unused = [line for line in matrix() if not any(map(re.compile(pattern(line)).fullmatch, names))]
    assert not unused, f"lines of matrix.txt that name no test: {unused}"
