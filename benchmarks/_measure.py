"""What the benchmarks share: taking turns, medians, ratios within a round, and how results are printed.

On a machine with other work on it an absolute time says little; the ratio of two times taken one after the other says
a lot. So contenders take turns, round after round, and a ratio is the median over rounds of the ratios in each round.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from maxghost.config import values

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "configs" / "base.yml"
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy", "torch")


@dataclasses.dataclass(frozen=True)
class Figure:
  """One figure. limit: what it should reach, None where it is only stated; above: more is better."""

  name: str
  value: float
  limit: float | None = None
  above: bool = False
  form: str = "{:.3g}"

  @property
  def met(self) -> bool | None:
    if self.limit is None:
      return None
    return bool(self.value >= self.limit if self.above else self.value <= self.limit)

  @property
  def wanted(self) -> str:
    return "" if self.limit is None else f"{'≥' if self.above else '≤'} {self.form.format(self.limit)}"

  def line(self) -> str:
    shown = f"{self.name}: {self.form.format(self.value)}"
    return f"     {shown}" if self.limit is None else f"{'PASS' if self.met else 'MISS'} {shown} (wanted {self.wanted})"


def planting():
  """The module of that name in examples/."""
  sys.path.append(str(ROOT / "examples"))
  return importlib.import_module("planting")


def run(main: Callable[[], int | None]) -> int:
  """Runs a benchmark's `main`; a wrong key or value ends it with one line and exit code 2."""
  return values.guard(main, "benchmark")


def arguments(description: str, with_keys: bool = True, **options) -> argparse.Namespace:
  """The command line of a benchmark: `options` (name=default, dashes for underscores), `--json FILE`, and with_keys
  key=value overrides of the configuration."""
  parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name, default in options.items():
    flag = "--" + name.replace("_", "-")
    if isinstance(default, bool):
      parser.add_argument(flag, action="store_true", default=default)
    else:
      parser.add_argument(flag, type=str if default is None else type(default), default=default)
  parser.add_argument("--json", type=Path, metavar="FILE", help="append the results as one line of JSON")
  if with_keys:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
  return parser.parse_args()


def named(name: str, texts: str) -> bool:
  """Whether `name` holds one of the texts, which are separated by |."""
  return any(text in name for text in texts.split("|"))


def take_turns(contenders: Mapping[str, Callable[[], float | None]], rounds: int, warmup: int = 1) -> dict:
  """{name: seconds of each round}. A contender does one measurement's work until it is really done; what it returns
  replaces the time around it. Every second round goes backwards, so that nobody always runs after the same one."""
  seconds: dict[str, list[float]] = {name: [] for name in contenders}
  for number in range(-warmup, rounds):
    order = list(contenders)
    for name in order if number % 2 else reversed(order):
      begin = time.perf_counter()
      own = contenders[name]()
      if number >= 0:
        seconds[name].append(time.perf_counter() - begin if own is None else own)
  return seconds


def timed(work: Callable[[], object]) -> float:
  """Seconds of one call."""
  begin = time.perf_counter()
  work()
  return time.perf_counter() - begin


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> float:
  """Median over rounds of the time of `name` over that of `base` in the same round."""
  return statistics.median(a / b for a, b in zip(seconds[name], seconds[base], strict=True))


def machine() -> dict:
  """Where and when the figures were taken."""
  load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
  return {
    "date": time.strftime("%Y-%m-%d", time.gmtime()),
    "cpu": _cpu_name(),
    "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    "load": round(load, 1),
    "python": platform.python_version(),
    **{name: found for name in PACKAGES if (found := version(name))},
    **_accelerator(),
  }


def _accelerator() -> dict:
  """The kind of the device that JAX computes on, where this program has loaded JAX and it is not the CPU."""
  jax = sys.modules.get("jax")
  if jax is None or jax.default_backend() == "cpu":
    return {}
  return {"device": jax.devices()[0].device_kind}


def peak_bytes() -> int:
  """Most memory that this process has had resident. On Linux from /proc: there getrusage begins with what the parent
  held when this process was started."""
  status = Path("/proc/self/status")
  if status.is_file():
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024
  import resource

  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def version(package: str) -> str | None:
  """Installed version, None where it is not installed; nothing is imported."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _cpu_name() -> str:
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor() or platform.machine()
  return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def markdown(rows: Sequence[Mapping]) -> str:
  """A Markdown table; the columns are the keys of the first row. Floats are shown with three digits."""
  columns = list(rows[0])
  lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
  lines += ["| " + " | ".join(_cell(row.get(column, "")) for column in columns) + " |" for row in rows]
  return "\n".join(lines)


def _cell(value) -> str:
  if isinstance(value, float):
    if math.isnan(value):
      return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
  return f"{value:,}" if isinstance(value, int) else str(value)


def publish(
  name: str, rows: Sequence[Mapping], figures: Sequence[Figure], notes: Sequence[str] = (), path: Path | None = None
) -> int:
  """Prints the machine, the table, the figures against their targets and one line of JSON, which is also appended to
  `path`. Returns 1 where a target is missed, else 0."""
  where = machine()
  print(f"\n## {name}\n\n" + ", ".join(f"{key} {value}" for key, value in where.items()))
  if where["load"] > where["cores"] / 2:
    print(f"\nThe machine is busy (load {where['load']}): take ratios, not times, from this run.")
  if rows:
    print("\n" + markdown(rows))
  if notes:
    print()
  for note in notes:
    print(note)
  print()
  for figure in figures:
    print(figure.line())
  kept = [
    {"name": f.name, "shown": f.form.format(f.value), "wanted": f.wanted, "value": float(f.value), "met": f.met}
    for f in figures
  ]
  line = json.dumps({"benchmark": name, "machine": where, "rows": list(rows), "figures": kept, "notes": list(notes)})
  print("\n" + line)
  if path is not None:
    with open(path, "a", encoding="utf-8") as file:
      file.write(line + "\n")
  sys.stdout.flush()
  return int(any(figure.met is False for figure in figures))
