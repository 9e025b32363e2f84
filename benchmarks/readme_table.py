"""Writes the figures in README.md and docs/figures.md from what the benchmarks have appended to figures.jsonl.

  python benchmarks/main_job.py --json benchmarks/figures.jsonl      # and the others
  python benchmarks/readme_table.py [--check]

The newest line of each benchmark counts. --check changes nothing and exits with 1 where a page is not up to date.
"""

import argparse
import ast
import json
import re
import sys
from pathlib import Path

import _measure

README, PAGE = _measure.ROOT / "README.md", _measure.ROOT / "docs" / "figures.md"
FIGURES = Path(__file__).with_name("figures.jsonl")
ORDER = ("main_job", "startup", "exactness", "ghost_overhead", "step_speed")
SHOWN = 3  # figures of a benchmark in the summary
# The README's five figures: {benchmark: {figure: what it is called there, None for its own name}}.
HEADLINES = {
  "main_job": {"seconds from start to the end of training": "default run with scores, seconds on two CPU cores"},
  "exactness": dict.fromkeys(
    ("largest relative error of a score, float32", "bytes that differ after 20 steps, scores on and off")
  ),
  "ghost_overhead": {
    "two_pass exact, sgd: time over that of plain step": "exact scores: time over a plain step, CPU",
  },
  "ghost_overhead_gpu": {
    "gpt2-small on a GPU, two_pass exact, sgd: time over plain": "exact scores: time over a plain step, H200",
  },
}
DOMAIN_COLUMNS = {
  "domain": "domain",
  "tokens": "tokens",
  "nats in all": "total, nats",
  "nats per million tokens": "nats per million tokens",
  "training loss": "training loss",
}
MEMORY_COLUMNS = ("program", "temporaries GB", "arguments GB", "host GB", "closed form GB", "off", "verdict")


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--check", action="store_true")
  check = parser.parse_args().check
  results = newest()
  pages = {page: page.read_text("utf-8") for page in (README, PAGE)}
  tables = {
    README: {"domains": domains_table(results), "headlines": headlines(results)},
    PAGE: {
      "summary": summary(results),
      "overhead": overhead_table(results),
      "gpu": gpu_table(results),
      "tpu": tpu_table(results),
      "memory": memory_table(results),
      "figures": figures_table(results),
    },
  }
  wanted = {page: filled(page, text, tables[page]) for page, text in pages.items()}
  if check:
    return int(wanted != pages)
  for page, text in wanted.items():
    page.write_text(text, "utf-8")
  return 0


def newest() -> dict[str, dict]:
  """{benchmark: its newest results}."""
  lines = FIGURES.read_text("utf-8").splitlines() if FIGURES.is_file() else []
  return {result["benchmark"]: result for result in map(json.loads, lines)}


def filled(page: Path, text: str, parts: dict[str, str]) -> str:
  """A page with its generated parts renewed."""
  for name, table in parts.items():
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    text, count = re.subn(pattern, lambda match, table=table: match[1] + table + match[2], text, flags=re.S)
    if count != 1:
      raise SystemExit(f"{page.name} needs the lines <!-- {name} --> and <!-- /{name} --> once")
  return text


def in_order(results: dict[str, dict]) -> list[str]:
  """The benchmarks that have figures and still exist."""
  others = sorted(name for name in results if name not in ORDER and Path(__file__).with_name(f"{name}.py").is_file())
  return [name for name in (*ORDER, *others) if results.get(name, {}).get("figures")]


def headlines(results: dict[str, dict]) -> str:
  """The README's few figures, and how many of all targets are missed."""
  rows, verdicts = [], []
  for name in in_order(results):
    figures = results[name]["figures"]
    verdicts += [figure["met"] for figure in figures if figure["met"] is not None]
    for figure in figures:
      if figure["name"] in HEADLINES.get(name, {}):
        shown = HEADLINES[name][figure["name"]] or figure["name"]
        rows.append({"figure": shown, "value": figure["shown"], "target": _target(figure),
                     "command": f"`benchmarks/{name}.py`"})  # fmt: skip
  if not rows:
    return ""
  missed = verdicts.count(False)
  return f"{_measure.markdown(rows)}\n\nTargets: {len(verdicts) - missed} met, {missed} missed.\n"


def summary(results: dict[str, dict]) -> str:
  """A row for each benchmark that has targets: what it asks, the first of its figures, and every target missed."""
  rows = []
  for name in in_order(results):
    wanted = [figure for figure in results[name]["figures"] if figure["met"] is not None]
    missed = [figure for figure in wanted if not figure["met"]]
    first = [figure for figure in wanted if figure["met"]][:SHOWN]
    if wanted:
      rows.append({
        "question": _first_line(name),
        "some of its figures": "<br>".join(map(_with_target, first)),
        "targets missed": "<br>".join(map(_with_target, missed)) or f"none of {len(wanted)}",
        "command": f"`benchmarks/{name}.py`",
      })  # fmt: skip
  return _measure.markdown(rows) + "\n" if rows else ""


def _first_line(name: str) -> str:
  """Of a benchmark's docstring."""
  tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text("utf-8"))
  return ast.get_docstring(tree).splitlines()[0]


def _with_target(figure: dict) -> str:
  return f"{figure['name']}: **{figure['shown']}** ({figure['wanted']})"


def figures_table(results: dict[str, dict]) -> str:
  rows, machines = [], []
  for name in in_order(results):
    for figure in results[name]["figures"]:
      rows.append({"figure": figure["name"], "value": figure["shown"], "target": _target(figure),
                   "command": f"`benchmarks/{name}.py`"})  # fmt: skip
    machines.append(described(results[name]["machine"]))
  if not rows:
    return ""
  return _measure.markdown(rows) + "\n\nTaken on " + "; ".join(dict.fromkeys(machines)) + ".\n"


def described(machine: dict) -> str:
  packages = ", ".join(f"{name} {machine[name]}" for name in ("jax", "flax") if name in machine)
  device = f"{machine['device']}, " if "device" in machine else ""
  cores = f"{machine['cores']} cores of {machine['cpu']}"
  return f"{device}{cores}, Python {machine['python']}, {packages}, {machine['date']}"


def domains_table(results: dict[str, dict]) -> str:
  rows = results.get("main_job", {}).get("rows", ())
  if not rows:
    return ""
  return _measure.markdown([{title: row[column] for column, title in DOMAIN_COLUMNS.items()} for row in rows]) + "\n"


def overhead_table(results: dict[str, dict]) -> str:
  """The rows of ghost_overhead with the targets for their times and, where the TPU compiler was asked, its numbers."""
  found = results.get("ghost_overhead", {"rows": ()})
  if not found["rows"]:
    return ""
  wanted = {}
  for figure in found["figures"]:
    step, _, base = figure["name"].partition(": time over that of ")
    if base:
      of = "" if base == "plain step" else f" of {base}"
      wanted[step] = _target(figure, of)
  tpu = results.get("ghost_overhead_tpu", {"rows": (), "figures": (), "machine": {}})
  estimates = {row["step"]: row for row in tpu["rows"] if row.get("shape", "gpt2-small") == "gpt2-small"}
  chips = {figure["name"].rpartition("(")[2].rstrip(")") for figure in tpu["figures"]}
  device = " ".join(["TPU", *chips])
  rows = []
  for row in found["rows"]:
    shown = {column: row[column] for column in ("step", "time / plain")} | {"wanted": wanted.get(row["step"], "")}
    shown |= {column: row[column] for column in ("FLOPs / plain", "memory / plain")}
    estimate = estimates.get(row["step"], {"FLOPs": "", "estimated": ""})
    rows.append(shown | {f"{device}: FLOPs": estimate["FLOPs"], f"{device}: time": estimate["estimated"]})
  intro = (
    "What scoring costs: GPT-2 small's layer shapes at width 512, 16 training rows and one validation row, on CPU\n"
    "with `remat_policy=minimal` (times measured in turns; memory: the compiler's temporaries); and of GPT-2 small\n"
    "by the TPU compiler ahead of time, whose times are estimates. One validation row is a sixteenth of the training\n"
    "rows."
  )
  by = f"By `benchmarks/ghost_overhead.py` on {described(found['machine'])}"
  if tpu["rows"]:
    by += f", and `benchmarks/ghost_overhead_tpu.py`, libtpu {tpu['machine'].get('libtpu')}"
  return f"{intro}\n\n{_measure.markdown(rows)}\n\n{by}.\n"


def gpu_table(results: dict[str, dict]) -> str:
  """The rows of ghost_overhead_gpu with the targets for their times."""
  found = results.get("ghost_overhead_gpu", {"rows": (), "figures": (), "machine": {}})
  wanted = {figure["name"]: _target(figure) for figure in found["figures"]}
  rows = []
  for row in found["rows"]:
    figure = f"{row['shape']} on a GPU, {row['step']}: time over plain"
    shown = {column: row[column] for column in ("shape", "step", "time / plain")} | {"wanted": wanted.get(figure, "")}
    shown |= {"milliseconds": 1000 * row["median seconds"]}
    rows.append(shown | {column: row[column] for column in ("memory / plain", "tokens/s")})
  return f"{_measure.markdown(rows)}\n\nTaken on {described(found['machine'])}.\n" if rows else ""


def tpu_table(results: dict[str, dict]) -> str:
  """The rows of ghost_overhead_tpu whose estimated time has a target, and the least that validation rows cost."""
  found = results.get("ghost_overhead_tpu", {"rows": (), "figures": (), "machine": {}})
  rows = []
  for row, figure in zip(found["rows"], found["figures"], strict=True):
    if figure["met"] is not None or row["step"].endswith("with the validation rows"):
      shown = {"shape": row["shape"], "step": row["step"], "time / plain": row["estimated"]}
      shown["wanted"] = _target(figure)
      rows.append(shown | {f"{name} / plain": row.get(name, "") for name in ("cycles", "FLOPs", "bytes")})
  by = f"By `benchmarks/ghost_overhead_tpu.py`, libtpu {found['machine'].get('libtpu')}."
  return f"{_measure.markdown(rows)}\n\n{by}\n" if rows else ""


def _target(figure: dict, of: str = "") -> str:
  """What the figure should reach and whether it does; nothing where it has no target."""
  return "" if figure["met"] is None else f"{figure['wanted']}{of}, {'met' if figure['met'] else '**missed**'}"


def memory_table(results: dict[str, dict]) -> str:
  found = results.get("memory", {"rows": ()})
  if not found["rows"]:
    return ""
  intro = (
    "What long and deep programs need on one TPU v5e chip of 16.9 GB, according to the TPU compiler ahead of time,\n"
    "and what [the estimate](memory.md) says before anything is compiled: 48 layers of width 2048, one row of\n"
    "65,536 tokens, bfloat16; the output head with a vocabulary of 201,088 and 32,768 tokens of width 2880."
  )
  rows = _measure.markdown([{column: row[column] for column in MEMORY_COLUMNS} for row in found["rows"]])
  return f"{intro}\n\n{rows}\n\nBy `benchmarks/memory.py`, libtpu {found['machine'].get('libtpu')}.\n"


if __name__ == "__main__":
  sys.exit(main())
