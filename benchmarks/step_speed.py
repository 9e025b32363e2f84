"""Speed of the plain training step (scores off), in turns with PyTorch and, in whole commands, with MaxText.

  python benchmarks/step_speed.py [--rounds 15] [--maxtext-python PYTHON] [key=value ...]

1. Tokens per second, and arithmetic per second as a fraction of the rate of a plain matrix product measured in the
   same rounds. The arithmetic is the model's own (forward and backward, recomputation not counted).
2. The same step in eager PyTorch (_torch_step.py): same weights, batch, loss and optimizer; the losses of both sides
   are compared. Skipped where torch is not installed.
3. MaxText's own small configuration, trained by `python -m maxghost.train` and by MaxText's trainer in turns, as whole
   commands; the steps' seconds are those each program logs. MaxText 0.2.4 needs Python 3.12: give the interpreter of an
   environment that has it by --maxtext-python. Without it the figures of another machine are printed, for orientation.
key=value arguments change the shapes of parts 1 and 2 only.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _measure
import _steps
import jax
import numpy as np
from _measure import Figure
from flax import nnx

from maxghost import config as configuration
from maxghost.parallel.shardings import slash_path
from maxghost.training.plan import step_flops

COMMON = ("ghost_enabled=false", "lr_schedule_type=constant", "warmup_steps_fraction=0", "learning_rate=1e-3")
SHAPES = {
  "configs/base.yml": (),
  "width 512": (
    "base_emb_dim=512", "base_num_query_heads=8", "base_num_kv_heads=8", "base_mlp_dim=2048", "vocab_size=4096",
    "per_device_batch_size=16",
  ),
}  # fmt: skip
REMAT = ("auto", "minimal")  # base.yml's, which recomputes nothing on a CPU, as PyTorch does; and what it is elsewhere

# MaxText's configuration "small": 8.4 M parameters, 1,024 tokens a step. Keys that both programs have.
SMALL = {
  "base_emb_dim": 256, "base_num_query_heads": 4, "base_num_kv_heads": 4, "base_mlp_dim": 1024,
  "base_num_decoder_layers": 4, "head_dim": 64, "vocab_size": 8192, "max_target_length": 256,
  "per_device_batch_size": 4, "dtype": "float32", "dataset_type": "synthetic", "remat_policy": "full",
  "enable_checkpointing": "false", "jax_cache_dir": "",
}  # fmt: skip
MAXTEXT_KEYS = ("attention=dot_product", "hardware=cpu", "skip_jax_distributed_system=true")
MAXGHOST_KEYS = ("ghost_enabled=false", "ghost_val_sets=words", "eval_interval=-1")
MAXTEXT_ELSEWHERE = (
  "MaxText 0.2.4, not run here (no --maxtext-python): 0.349 s a step, 2,937 tokens/s on another two-core machine when "
  "idle (JAX 0.10.2). Figures of different machines do not compare."
)


def main() -> int:
  args = _measure.arguments(__doc__, rounds=15, maxtext_python=None, maxtext_rounds=3, maxtext_steps=20)
  rows, figures, notes = [], [], []
  for shape, keys in SHAPES.items():
    measure_shape(shape, (*COMMON, *keys, *args.overrides), args.rounds, rows, figures, notes)
  beside_maxtext(args, rows, figures, notes)
  return _measure.publish("step_speed", rows, figures, notes, args.json)


def measure_shape(shape: str, keys, rounds: int, rows: list, figures: list, notes: list) -> None:
  """One shape: maxghost with both remat policies, PyTorch, and the matrix product in turns."""
  configs = {remat: configuration.load(str(_measure.BASE), *keys, f"remat_policy={remat}") for remat in REMAT}
  cfg = configs[REMAT[0]]
  names = {f"maxghost, remat {remat}": _steps.make_step(configs[remat]) for remat in REMAT}
  weights = host_weights(next(iter(names.values())).state)
  model, tokens = cfg.model, cfg.data.per_device_batch_size * cfg.data.max_target_length
  product, product_flops = _steps.matmul_rate((tokens, model.base_emb_dim, model.base_mlp_dim))
  contenders = {"matrix product": product, **names}
  with tempfile.TemporaryDirectory() as folder:
    torch = start_torch(cfg, weights, Path(folder) / "weights.npz")
    losses = []
    if torch:
      contenders["PyTorch eager"] = lambda: torch_step(torch, losses)
    first = next(iter(names.values()))
    own = []
    contenders[next(iter(names))] = lambda: (first(), own.append(float(first.outputs["loss"])))[0]
    seconds = _measure.take_turns(contenders, rounds, warmup=2)
    if torch:
      torch.stdin.close()
      torch.wait()
  flops = step_flops(model, cfg.data.per_device_batch_size, cfg.data.max_target_length).total
  for name in contenders:
    if name == "matrix product":
      continue
    middle = statistics.median(seconds[name])
    share = flops / product_flops * _measure.ratio(seconds, "matrix product", name)
    rows.append(
      {"shape": shape, "step": name, "seconds": middle, "tokens/s": tokens / middle, "of the matmul rate": share}
    )
    if name.startswith("maxghost"):
      figures.append(Figure(f"{shape}: {name}, tokens/s", tokens / middle, form="{:,.0f}"))
      figures.append(Figure(f"{shape}: {name}, arithmetic per second over a matrix product's", share, form="{:.2f}"))
  rate = product_flops / statistics.median(seconds["matrix product"])
  notes.append(f"{shape}: the matrix product runs at {rate / 1e9:.0f} GFLOP/s; a step is {flops / 1e9:.1f} GFLOP")
  if not torch:
    notes.append(f"{shape}: PyTorch skipped: torch not installed")
    return
  gap = max(abs(a - b) for a, b in zip(own[:4], losses[:4], strict=True))
  notes.append(f"{shape}: losses of the first 4 steps, maxghost and PyTorch, differ by at most {gap:.1e} nats")
  for name in names:
    speedup = 1 / _measure.ratio(seconds, name, "PyTorch eager")
    figures.append(Figure(f"{shape}: {name}, tokens/s over PyTorch eager's", speedup, 1.0, above=True, form="{:.2f}"))


def host_weights(state) -> dict[str, np.ndarray]:
  """{slash path: array} of the model's parameters."""
  params = nnx.to_flat_state(nnx.filter_state(state, nnx.Param))
  return {slash_path(path[1:]): np.asarray(v[...]) for path, v in params if path[0] == "model"}


def start_torch(cfg, weights: dict, path: Path) -> subprocess.Popen | None:
  """The PyTorch contender in a process of its own, ready for its first step; None where torch is not installed."""
  if _measure.version("torch") is None:
    return None
  model, opt = cfg.model, cfg.optimizer
  sizes = {
    "vocab": model.vocab_size, "dim": model.base_emb_dim, "heads": model.base_num_query_heads,
    "kv_heads": model.base_num_kv_heads, "width": model.head_dim, "hidden": model.base_mlp_dim,
    "layers": model.base_num_decoder_layers, "eps": model.normalization_layer_epsilon,
    "timescale": model.rope_max_timescale, "lr": opt.learning_rate, "b1": opt.adam_b1, "b2": opt.adam_b2,
    "adam_eps": opt.adam_eps, "decay": opt.adam_weight_decay, "clip": opt.gradient_clipping_threshold,
  }  # fmt: skip
  batch = _steps.packed_batch(cfg, cfg.data.per_device_batch_size)
  np.savez(path, **weights, **batch, **{f"sizes/{name}": value for name, value in sizes.items()})
  command = [sys.executable, str(Path(__file__).with_name("_torch_step.py")), str(path)]
  process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
  answer = process.stdout.readline()
  if not answer.startswith("ready"):
    raise RuntimeError("the PyTorch process did not start")
  return process


def torch_step(process: subprocess.Popen, losses: list) -> float:
  process.stdin.write("step\n")
  process.stdin.flush()
  seconds, loss = map(float, process.stdout.readline().split())
  losses.append(loss)
  return seconds


def beside_maxtext(args, rows: list, figures: list, notes: list) -> None:
  """Whole commands in turns; median seconds of their steps after the first two."""
  runs: dict[str, list[tuple[float, float]]] = {"maxghost": [], "MaxText": []}
  for number in range(args.maxtext_rounds if args.maxtext_python else 1):
    for name in ("maxghost", "MaxText") if number % 2 else ("MaxText", "maxghost"):
      if name == "maxghost":
        runs[name].append(run_maxghost(args.maxtext_steps))
      elif args.maxtext_python:
        runs[name].append(run_maxtext(args.maxtext_python, args.maxtext_steps))
  tokens = SMALL["per_device_batch_size"] * SMALL["max_target_length"]
  for name, times in runs.items():
    if times:
      step, wall = (statistics.median(column) for column in zip(*times, strict=True))
      row = {"shape": "MaxText's small", "step": f"{name}, remat full", "seconds": step, "tokens/s": tokens / step}
      rows.append(row)
      notes.append(f"MaxText's small, {args.maxtext_steps} steps: the whole {name} command took {wall:.0f} s")
  if not args.maxtext_python:
    notes.append(MAXTEXT_ELSEWHERE)
    return
  pairs = zip(runs["MaxText"], runs["maxghost"], strict=True)
  speedup = statistics.median(theirs[0] / ours[0] for theirs, ours in pairs)
  figures.append(Figure("MaxText's small: tokens/s over MaxText 0.2.4's", speedup, 1.3, above=True, form="{:.2f}"))


def run_maxghost(steps: int) -> tuple[float, float]:
  """(median seconds of a step, wall seconds) of the real command."""
  with tempfile.TemporaryDirectory() as folder:
    keys = [f"{key}={value}" for key, value in SMALL.items()]
    command = [sys.executable, "-m", "maxghost.train", str(_measure.BASE), *keys, *MAXGHOST_KEYS]
    wall, _ = run([*command, f"steps={steps}", f"base_output_directory={folder}"], folder)
    lines = (Path(folder) / "base" / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["perf/step_time_seconds"] for line in lines]
  return statistics.median(seconds[2:]), wall


def run_maxtext(python: str, steps: int) -> tuple[float, float]:
  """(median seconds of a step, wall seconds) of MaxText's trainer. Its log's last step is too short and left out."""
  find = "import importlib.util as u; print(u.find_spec('maxtext').submodule_search_locations[0])"
  package = subprocess.run([python, "-c", find], check=True, capture_output=True, text=True).stdout.strip()
  folder = tempfile.mkdtemp()
  try:
    keys = [f"{key}={value}" for key, value in SMALL.items()]
    command = [python, "-m", "maxtext.trainers.pre_train.train", f"{package}/configs/base.yml", "run_name=small"]
    wall, log = run([*command, *keys, *MAXTEXT_KEYS, f"steps={steps}", f"base_output_directory={folder}"], folder)
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  seconds = [float(value) for value in re.findall(r"completed step: \d+, seconds: ([0-9.]+)", log)]
  if len(seconds) != steps:
    raise RuntimeError(f"MaxText logged {len(seconds)} of {steps} steps:\n{log[-2000:]}")
  return statistics.median(seconds[2:-1]), wall


def run(command: list[str], folder: str) -> tuple[float, str]:
  """(wall seconds, output) of a command. Raises RuntimeError with the end of its output where it fails."""
  begin = time.perf_counter()
  done = subprocess.run(
    command, cwd=folder, env={**os.environ, "JAX_PLATFORMS": jax.default_backend()}, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )  # fmt: skip
  if done.returncode:
    raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
  return time.perf_counter() - begin, done.stdout


if __name__ == "__main__":
  sys.exit(_measure.run(main))
