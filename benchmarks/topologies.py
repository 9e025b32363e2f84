"""Memory and collectives of the train step of large models on TPU slices, scored and not, compiled without a TPU.

`python benchmarks/topologies.py [--only NAME] [--keys key=value ...]` prints one table. Needs the extra `tpu`; a row is
compiled in a process of its own and takes minutes on two cores. `--abstract` prints instead how long the abstract
path of a 70B model takes and how much memory it needs.

Rows: bfloat16 compute, float32 weights and moments, remat full, one row of 4096 tokens per device where not said
otherwise; scored with rank 32 along the validation gradient (ghost_direction=sgd), 4 validation rows.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time

CASES = {
  "llama3-8b v5p-256": ("v5p-256", "llama3-8b", ("per_device_batch_size=2",)),
  "llama3-8b v5e-256": ("v5e-256", "llama3-8b", ("num_vocab_tiling=8",)),
  "qwen3-30b-a3b v5e-64": ("v5e-64", "qwen3-30b-a3b", ("num_vocab_tiling=8", "weight_dtype=bfloat16")),
  "gpt-oss-20b v5e-32": ("v5e-32", "gpt-oss-20b", ("num_vocab_tiling=8", "weight_dtype=bfloat16")),
}
KEYS = ("dtype=bfloat16", "max_target_length=4096", "remat_policy=full", "per_device_batch_size=1")
SCORED = ("ghost_enabled=true", "ghost_rank=32", "ghost_direction=sgd", "ghost_val_batch_size=4", "ghost_detail=total")
PLAIN = ("ghost_enabled=false",)


def measure(name: str, scored: bool, keys: list[str]) -> dict:
  """One compilation, in this process."""
  from maxghost.parallel import topologies

  topology, model, own = CASES[name]
  topologies.prepare_environment(topology)
  from maxghost import config
  from maxghost.parallel import Layout
  from maxghost.training import ahead

  values = dict(text.split("=", 1) for text in (*KEYS, *own, *(SCORED if scored else PLAIN), *keys))
  cfg = config.load(f"model_name={model}", *(f"{key}={value}" for key, value in values.items()))
  begin = time.perf_counter()
  layout = Layout.of(cfg.parallel, topologies.open_devices(topology))
  compiled = ahead.compile_step(ahead.plan(cfg, layout))
  result = {
    "name": name, "scored": scored, "seconds": time.perf_counter() - begin, "hbm": topologies.hbm_bytes(topology),
    "parameters": compiled.planned.num_params, "bytes": compiled.device_bytes, "problem": compiled.problem,
  }  # fmt: skip
  if compiled.executable is not None:
    found = compiled.collectives()
    result["collectives"] = sum(one.count for one in found)
    result["moved"] = sum(one.count * one.num_bytes for one in found)
  return result


def in_process(name: str, scored: bool, keys: list[str]) -> dict:
  command = [sys.executable, __file__, "--one", name, str(int(scored)), "--keys", *keys]
  done = subprocess.run(command, capture_output=True, text=True)
  lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
  if not lines:
    return {"name": name, "scored": scored, "problem": done.stderr.strip().splitlines()[-1][:200], "bytes": None}
  return json.loads(lines[-1])


def table(results: list[dict]) -> list[str]:
  lines = [f"{'model, slice':<24}{'scores':>8}{'GB / device':>13}{'of GB':>8}{'fits':>6}{'against plain':>15}"
           f"{'collectives':>13}{'GB moved':>10}{'compiled in':>13}"]  # fmt: skip
  plain = {row["name"]: row["bytes"] for row in results if not row["scored"]}
  for row in results:
    start = f"{row['name']:<24}{'rank 32' if row['scored'] else '-':>8}"
    if row["bytes"] is None:
      lines.append(f"{start}  {row['problem']}")
      continue
    before = plain.get(row["name"])
    against = f"{row['bytes'] / before - 1:+.1%}" if row["scored"] and before else ""
    lines.append(
      f"{start}{row['bytes'] / 1e9:>13.2f}{row['hbm'] / 1e9:>8.1f}{'yes' if row['bytes'] <= row['hbm'] else 'no':>6}"
      f"{against:>15}{row['collectives']:>13,}{row['moved'] / 1e9:>10.1f}{row['seconds']:>11.0f} s"
    )
  return lines


def abstract() -> str:
  """Start of the abstract path of a 70B model: seconds and peak memory of this process."""
  import resource

  begin = time.perf_counter()
  import jax

  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 256)
  from maxghost import config
  from maxghost.parallel import Layout
  from maxghost.training import ahead

  cfg = config.load("model_name=llama3-70b", "max_target_length=4096", "per_device_batch_size=1")
  planned = ahead.plan(cfg, Layout.of(cfg.parallel, jax.devices()))
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
  return (
    f"llama3-70b on 256 devices: {planned.num_params / 1e9:.1f} billion parameters, abstract state with shardings "
    f"after {time.perf_counter() - begin:.1f} s ({time.process_time():.1f} s of CPU), peak memory {peak:.2f} GB"
  )


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--only", help="rows whose name holds this text")
  parser.add_argument("--keys", nargs="*", default=[], help="further configuration keys")
  parser.add_argument("--one", nargs=2, metavar=("NAME", "SCORED"), help=argparse.SUPPRESS)
  parser.add_argument("--abstract", action="store_true")
  args = parser.parse_args()
  if args.one:
    print(json.dumps(measure(args.one[0], args.one[1] == "1", args.keys)))
    return 0
  if args.abstract:
    print(abstract())
    return 0
  results = []
  for name in CASES:
    if not args.only or args.only in name:
      for scored in (False, True):
        results.append(in_process(name, scored, args.keys))
        print(table(results)[-1], flush=True)
  versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "libtpu"))
  print("\n".join([f"\n{versions}", *table(results)]))
  return 0


if __name__ == "__main__":
  sys.exit(main())
