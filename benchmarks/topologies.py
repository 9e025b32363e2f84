"""Memory and collectives of the train step of large models on TPU slices, scored and not, compiled without a TPU.

  python benchmarks/topologies.py [--rows NAME] [--kept FILE] [--memory-only] [--json FILE] [key=value ...]

Needs the extra `tpu`. A row is compiled in a process of its own and takes minutes on two cores. --rows: only rows whose
name holds this text. --kept: a file that each row is appended to as soon as it is there; rows of the same keys, sources
and compiler that it holds already are not compiled again, so that a table can be made in several goes. --memory-only:
each compilation ends where the buffers are assigned; the machine code, which takes most of the time, changes nothing of
the table but the time.

The last rows time the abstract path of a 70B model (configuration, mesh of 256 devices, abstract state with shardings)
and its peak memory, from the start of a fresh process.

Rows: bfloat16 compute, float32 weights and moments where not said otherwise, remat full, 4096 tokens in a row, the
output projection in 8 tiles of the vocabulary; scored with rank 32 along the validation gradient
(ghost_direction=sgd), one validation row for each device. "GB of a device" are arguments, temporaries and outputs that
replace no argument. The compiler spends free memory on fetching weights ahead; so the scored step is compiled for
devices that have 1.05 times what the plain step takes. Where it does not fit, it is compiled for all they have, and in
both ways with the validation gradient on the host. "GB moved" are the bytes of each collective's whole array, as often
as it runs in a step.
"""

import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _measure
from _measure import Figure

BFLOAT16 = "weight_dtype=bfloat16"
CASES = {  # topology, model, keys of the row
  "llama3-8b v5p-256": ("v5p-256", "llama3-8b", ("per_device_batch_size=4", "ghost_val_batch_size=128")),
  "llama3-8b v5e-256": ("v5e-256", "llama3-8b", ("per_device_batch_size=4", "ghost_val_batch_size=256")),
  "qwen3-30b-a3b v5e-64": (
    "v5e-64",
    "qwen3-30b-a3b",
    (BFLOAT16, "per_device_batch_size=2", "ghost_val_batch_size=64"),
  ),
  "gpt-oss-20b v5e-32": ("v5e-32", "gpt-oss-20b", (BFLOAT16, "ghost_val_batch_size=32")),
  "llama3-70b v5p-128, 4 stages": (
    "v5p-128",
    "llama3-70b",
    ("per_device_batch_size=2", "ghost_val_batch_size=64", "ici_stage_parallelism=4", "num_pipeline_microbatches=8"),
  ),
}
KEYS = ("dtype=bfloat16", "max_target_length=4096", "remat_policy=full", "per_device_batch_size=1",
        "num_vocab_tiling=8", "vocab_tiling_axis=vocab")  # fmt: skip
SCORED = ("ghost_enabled=true", "ghost_rank=32", "ghost_direction=sgd", "ghost_detail=total")
ON_HOST = "offload_to_host=[val_gradient]"  # also compiled where the scored step takes more than MOST_ADDED
PLAIN = ("ghost_enabled=false",)
ABSTRACT = "llama3-70b"
WHOLE = -1  # limit: all the memory of a device
MOST_ADDED, MOST_SECONDS, MOST_GB = 1.05, 20.0, 2.0


def main() -> int:
  if sys.argv[1:2] == ["--one"]:  # what the processes of the rows are started with
    name, limit, folder, *overrides = sys.argv[2:]
    print(json.dumps(abstract() if name == ABSTRACT else measure(name, int(limit), Path(folder), overrides)))
    return 0
  args = _measure.arguments(__doc__, rows="", kept="", memory_only=False)
  if _measure.version("libtpu") is None:
    print("skipped: libtpu is not installed; pip install '.[tpu]' brings the TPU compiler")
    return 0
  results = []
  for name in CASES:
    if args.rows in name:
      results.append(row(name, 0, args))
      print(shown(results)[-1], flush=True)
      limit = int(MOST_ADDED * (results[-1]["bytes"] or 0)) or WHOLE
      results.append(scored(name, limit, args))
      print(shown(results)[-1], flush=True)
      if (results[-1]["bytes"] or math.inf) > limit > 0:
        for most, how in ((limit, ", val_gradient on the host"), (WHOLE, ", val_gradient on the host, uncapped")):
          results.append(scored(name, most, args, ON_HOST) | {"how": how})
          print(shown(results)[-1], flush=True)
  start = row(ABSTRACT, 0, args) if args.rows in ABSTRACT else None
  notes = [f"libtpu {_measure.version('libtpu')}; seconds are those of tracing and compiling on this machine"]
  if start:
    notes.append(
      f"{ABSTRACT} on 256 devices: {start['parameters'] / 1e9:.1f} billion parameters, abstract state with shardings "
      f"{start['seconds']:.1f} s after the start of the process, peak memory {start['gb']:.2f} GB"
    )
  return _measure.publish("topologies", shown(results), figures(results, start), notes, path=args.json)


def scored(name: str, limit: int, args, *more: str) -> dict:
  """As `row`, of the scored step with all the memory of a device if it does not fit within the limit."""
  found = row(name, limit, args, *more)
  return row(name, WHOLE, args, *more) if found["bytes"] is None and limit != WHOLE else found


def row(name: str, limit: int, args, *more: str) -> dict:
  """The results of a row: kept ones, or those of a new process, which are then kept. limit: see `measure`. more: keys
  besides those of the command."""
  overrides = [*args.overrides, *more]
  versions = [_measure.version(package) for package in ("jax", "libtpu")]
  partial = args.memory_only and name != ABSTRACT
  identity = [name, limit, partial, keys_of(name, limit, overrides), versions, sources()]
  path = Path(args.kept) if args.kept else None
  if path is not None and path.is_file():
    for line in path.read_text().splitlines():
      kept = json.loads(line)
      if kept["identity"] == identity:
        return kept["result"]
  with tempfile.TemporaryDirectory() as folder:
    begin = time.time()
    command = [sys.executable, __file__, "--one", name, str(limit), folder, *overrides]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    result = assigned(process, Path(folder)) if partial else None
    out, err = process.communicate()
  lines = [line for line in out.splitlines() if line.startswith("{")]
  if result is None and not lines:
    raise SystemExit(f"{name}: {err.strip()[-2000:]}")
  result = result or json.loads(lines[-1])
  if "ready" in result:
    result["seconds"] = result["ready"] - begin
  if path is not None:
    with path.open("a") as file:
      file.write(json.dumps({"identity": identity, "result": result}) + "\n")
  return result


def assigned(process: subprocess.Popen, folder: Path) -> dict | None:
  """What the compiler wrote down when it had assigned the buffers; the process is ended there. None where it ended by
  itself before, as it does where the step does not fit."""
  while process.poll() is None and not list(folder.glob("*jit_train_step*.after_optimizations_after_buffer*.txt")):
    time.sleep(0.5)
  if process.poll() is not None:
    return None
  time.sleep(2)  # the file is being written
  process.kill()
  from maxghost.parallel import collectives

  result = json.loads((folder / "planned.json").read_text())
  texts = {part: next(folder.glob(f"*jit_train_step*.after_optimizations{part}.txt")).read_text()
           for part in ("", "-buffer-assignment")}  # fmt: skip
  sizes = re.findall(r"^allocation \d+: size (\d+), page 0, preallocated-temp", texts["-buffer-assignment"], re.M)
  return summed(result, collectives.read(texts[""], result["mesh"]), max(map(int, sizes)))


def summed(result: dict, found: list, temporaries: int) -> dict:
  """With collectives and memory."""
  return result | {
    "bytes": result["arguments"] + temporaries,
    "collectives": sum(one.count for one in found),
    "moved": sum(one.count * one.num_bytes for one in found),
  }


def keys_of(name: str, limit: int, overrides: list[str]) -> list[str]:
  """The configuration of a row."""
  own = CASES[name][2] if name in CASES else ()
  values = dict(text.split("=", 1) for text in (*KEYS, *own, *(SCORED if limit else PLAIN), *overrides))
  return [f"{key}={value}" for key, value in values.items()]


def sources() -> str:
  """A digest of what a step is made of."""
  digest = hashlib.sha256()
  for path in [*sorted((_measure.ROOT / "src").rglob("*.py")), *sorted((_measure.ROOT / "configs").rglob("*.yml"))]:
    digest.update(path.read_bytes())
  return digest.hexdigest()[:16]


def measure(name: str, limit: int, folder: Path, keys: list[str]) -> dict:
  """One compilation, in this process. limit: 0 for the plain step, else that of the scored step: the bytes of a device,
  or WHOLE. folder: for what the compiler writes down."""
  from maxghost.parallel import topologies

  topology, model, _ = CASES[name]
  topologies.prepare_environment(topology)
  from maxghost import config
  from maxghost.parallel.shardings import Layout
  from maxghost.training import aot
  from maxghost.training.plan import Plan

  cfg = config.load(f"model_name={model}", *keys_of(name, limit, keys))
  begin = time.perf_counter()
  layout = Layout.of(cfg.parallel, topologies.open_devices(topology))
  plan = Plan.of(cfg, layout)
  result = {
    "name": name, "scored": limit != 0, "hbm": topologies.hbm_bytes(topology), "parameters": plan.num_params,
    "arguments": plan.memory.arguments, "mesh": dict(layout.mesh.shape), "bytes": None, "problem": "",
  }  # fmt: skip
  (folder / "planned.json").write_text(json.dumps(result))
  options = {"xla_tpu_max_hbm_size_mib": limit // 2**20} if limit > 0 else {}
  compiled = aot.compile_step(plan, options, folder)
  result |= {"seconds": time.perf_counter() - begin, "problem": compiled.problem}
  if compiled.executable is None:
    return result
  return summed(result, compiled.collectives(), compiled.executable.memory_analysis().temp_size_in_bytes)


def abstract() -> dict:
  """The abstract path of a 70B model, in this process: peak memory, and the clock when it is there."""
  import jax

  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 256)
  from maxghost import config
  from maxghost.parallel.shardings import Layout
  from maxghost.training.plan import Plan

  cfg = config.load(f"model_name={ABSTRACT}", "max_target_length=4096", "per_device_batch_size=1")
  plan = Plan.of(cfg, Layout.of(cfg.parallel, jax.devices()))
  return {
    "parameters": plan.num_params, "ready": time.time(), "cpu_seconds": time.process_time(),
    "gb": _measure.peak_bytes() / 1e9,
  }  # fmt: skip


def shown(results: list[dict]) -> list[dict]:
  """The rows of the table."""
  plain = {result["name"]: result["bytes"] for result in results if not result["scored"]}
  rows = []
  for result in results:
    need, before = result["bytes"], plain.get(result["name"])
    rows.append({
      "model, slice": result["name"],
      "scores": f"rank 32{result.get('how', '')}" if result["scored"] else "-",
      "GB of a device": result["problem"] if need is None else f"{need / 1e9:.2f}",
      "it has": f"{result['hbm'] / 1e9:.1f}",
      "fits": "no" if need is None or need > result["hbm"] else "yes",
      "against plain": f"{need / before - 1:+.1%}" if result["scored"] and before and need else "",
      "collectives": result.get("collectives", ""),
      "GB moved": f"{result['moved'] / 1e9:.1f}" if "moved" in result else "",
      "compiled in": f"{result['seconds'] / 60:.1f} min" if "seconds" in result else "",
    })  # fmt: skip
  return rows


def figures(results: list[dict], start: dict | None) -> list[Figure]:
  """Memory scored over plain, whether each fits, and the start of the 70B model."""
  found = []
  plain = {result["name"]: result["bytes"] for result in results if not result["scored"]}
  for result in results:
    before, need = plain.get(result["name"]), result["bytes"]
    if result["scored"] and before:
      said = f"{result['name']}: memory scored{result.get('how', '')} over plain"
      found.append(Figure(said, (need or math.inf) / before, MOST_ADDED, form="{:.3f}"))
    if result["scored"] and "seconds" in result:
      found.append(Figure(f"{result['name']}: minutes to compile, scored", result["seconds"] / 60, form="{:.1f}"))
  if start:
    found.append(Figure(f"{ABSTRACT}: seconds to the abstract state", start["seconds"], MOST_SECONDS, form="{:.1f}"))
    found.append(Figure(f"{ABSTRACT}: GB of host memory for it", start["gb"], MOST_GB, form="{:.2f}"))
  return found


if __name__ == "__main__":
  sys.exit(_measure.run(main))
