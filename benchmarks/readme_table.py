"""Writes the README's tables of figures from what the benchmarks have appended to figures.jsonl.

  python benchmarks/main_job.py --json benchmarks/figures.jsonl      # and the others
  python benchmarks/readme_table.py [--check]

The newest line of each benchmark counts. --check changes nothing and exits with 1 where the README is not up to date.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import _measure

README = _measure.ROOT / "README.md"
FIGURES = Path(__file__).with_name("figures.jsonl")
ORDER = ("main_job", "startup", "exactness", "ghost_overhead", "step_speed")
DOMAIN_COLUMNS = ("domain", "tokens", "nats in all", "nats per million tokens", "training loss")
MEMORY_COLUMNS = ("program", "temporaries GB", "arguments GB", "host GB", "closed form GB", "off", "verdict")


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--check", action="store_true")
  check = parser.parse_args().check
  text = README.read_text("utf-8")
  wanted = filled(text, newest())
  if check:
    return int(wanted != text)
  README.write_text(wanted, "utf-8")
  return 0


def newest() -> dict[str, dict]:
  """{benchmark: its newest results}."""
  lines = FIGURES.read_text("utf-8").splitlines() if FIGURES.is_file() else []
  return {result["benchmark"]: result for result in map(json.loads, lines)}


def filled(text: str, results: dict[str, dict]) -> str:
  """The README with its generated parts renewed."""
  parts = {"figures": figures_table(results), "domains": domains_table(results), "memory": memory_table(results)}
  for name, table in parts.items():
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    text, count = re.subn(pattern, lambda match, table=table: match[1] + table + match[2], text, flags=re.S)
    if count != 1:
      raise SystemExit(f"README.md needs the lines <!-- {name} --> and <!-- /{name} --> once")
  return text


def figures_table(results: dict[str, dict]) -> str:
  rows, machines = [], []
  others = sorted(name for name in results if name not in ORDER and Path(__file__).with_name(f"{name}.py").is_file())
  for name in [*ORDER, *others]:
    for figure in results.get(name, {}).get("figures", ()):
      state = {True: "met", False: "**missed**", None: ""}[figure["met"]]
      wanted = f"{figure['wanted']}, {state}" if state else ""
      rows.append({"figure": figure["name"], "value": figure["shown"], "target": wanted,
                   "command": f"`benchmarks/{name}.py`"})  # fmt: skip
    if name in results:
      machines.append(described(results[name]["machine"]))
  if not rows:
    return ""
  return _measure.markdown(rows) + "\n\nTaken on " + "; ".join(dict.fromkeys(machines)) + ".\n"


def described(machine: dict) -> str:
  packages = ", ".join(f"{name} {machine[name]}" for name in ("jax", "flax") if name in machine)
  return f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, {packages}, {machine['date']}"


def domains_table(results: dict[str, dict]) -> str:
  rows = results.get("main_job", {}).get("rows", ())
  if not rows:
    return ""
  return _measure.markdown([{column: row[column] for column in DOMAIN_COLUMNS} for row in rows]) + "\n"


def memory_table(results: dict[str, dict]) -> str:
  found = results.get("memory", {"rows": ()})
  if not found["rows"]:
    return ""
  return _measure.markdown([{c: row[c] for c in MEMORY_COLUMNS} for row in found["rows"]]) + (
    f"\n\nlibtpu {found['machine'].get('libtpu')}.\n"
  )


if __name__ == "__main__":
  sys.exit(main())
