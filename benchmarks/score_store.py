"""How far the score log carries: aggregation, report and Parquet at sizes no laptop run reaches.

  python benchmarks/score_store.py [--rows 100000000] [--documents 1000000] [--folder /tmp]

Made-up score files (48 to 52 bytes a row, on disk under --folder, removed afterwards) are added up by domain, by source
and by document, each in a process of its own whose peak memory is taken. Then a run with --documents documents is
turned into a report; where chromium is installed, the time it takes to open it is compared with an empty page.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _measure
import numpy as np
from _measure import Figure

from maxghost.scorelog import format as fmt
from maxghost.scorelog.shard import write_shard

ROWS_PER_FILE = 2_000_000
DOCUMENTS_PER_PATH = 1000
CHILD = """
import json, resource, sys, time
begin = time.perf_counter()
{work}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps([time.perf_counter() - begin, peak, {result}]))
"""
AGGREGATE = """
from maxghost import attribution
from maxghost.attribution.query import Query, ask
answer = ask(attribution.load({folder!r}), Query(by={by!r}, top=20))
"""
REPORT = """
from maxghost import attribution
from maxghost.attribution import html
from maxghost.attribution.summary import summarize
page = html.render(summarize(attribution.load({folder!r})))
open({page!r}, "w").write(page)
"""


def main() -> int:
  args = _measure.arguments(__doc__, False, rows=100_000_000, documents=1_000_000, folder="")
  folder = Path(tempfile.mkdtemp(prefix="score_store_", dir=args.folder or None))
  try:
    rows, figures, notes = measure(folder, args.rows, args.documents)
  finally:
    shutil.rmtree(folder)
  return _measure.publish("score_store", rows, figures, notes, args.json)


def measure(folder: Path, num_rows: int, num_documents: int):
  """(table, figures, notes)."""
  table, figures, notes = [], [], []
  write_run(folder / "large", num_rows, 20_000)
  for by in ("domain", "source"):
    work = AGGREGATE.format(folder=str(folder / "large"), by=by)
    seconds, peak, groups = child(work, "answer.num_groups")
    table.append({"what": f"by {by}", "rows": num_rows, "groups": groups, "seconds": seconds, "peak GB": peak})
    if by == "domain":
      figures += [Figure("by domain, seconds", seconds, 60.0), Figure("by domain, peak GB", peak, 1.0)]
  shutil.rmtree(folder / "large")
  small = min(num_rows, 10 * num_documents)
  write_run(folder / "documents", small, num_documents)
  page = folder / "report.html"
  seconds, peak, size = child(REPORT.format(folder=str(folder / "documents"), page=str(page)), "len(page.encode())")
  table.append({"what": "report", "rows": small, "groups": num_documents, "seconds": seconds, "peak GB": peak})
  figures.append(Figure("report, MB", size / 2**20, 5.0))
  opening = open_in_browser(page, folder)
  if opening is None:
    notes.append("chromium is not installed: how long the page takes to open was not measured.")
  else:
    figures.append(Figure("report, seconds to open beyond an empty page", opening, 2.0))
  return table, figures, notes


def child(work: str, result: str) -> tuple:
  """(seconds, peak GB, result) of `work` in a fresh interpreter."""
  code = CHILD.format(work=work, result=result)
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  return tuple(json.loads(done.stdout))


def write_run(run_dir: Path, num_rows: int, num_documents: int):
  """Score files of one process; every document lies in one of six domains."""
  (run_dir / "ghost").mkdir(parents=True)
  rng = np.random.default_rng(0)
  paths = [f"corpus/part-{i:05d}.jsonl" for i in range(-(-num_documents // DOCUMENTS_PER_PATH))]
  domains = ["code", "docstrings", "manual", "tables", "web", "books"]
  num_files = max(1, num_rows // ROWS_PER_FILE)
  for number in range(num_files):
    num = num_rows // num_files
    rows = np.zeros(num, fmt.row_dtype(1))
    document = rng.integers(0, num_documents, num)
    rows["path"], rows["offset"] = document // DOCUMENTS_PER_PATH, document % DOCUMENTS_PER_PATH * 4096
    rows["domain"] = rows["path"] % len(domains)
    rows["step"] = 100 * number + np.arange(num) * 100 // num
    rows["tokens"], rows["loss"] = rng.integers(1, 2048, num), 3.0
    rows["share"] = 100 / num
    rows["contribution"][:, 0] = rng.normal(1e-7, 1e-6, num)
    steps = fmt.unmeasured_steps(np.arange(100 * number, 100 * number + 100), 1)
    meta = {
      "schema_version": fmt.SCHEMA_VERSION, "val_sets": ["manual"], "process_index": 0, "first_step": 100 * number,
      "last_step": 100 * number + 99, "before": (100 * number, num * number), "ledger": fmt.LEDGER,
      "objective": fmt.NEXT_TOKEN,
    }  # fmt: skip
    path = run_dir / "ghost" / fmt.shard_name(100 * number + 99, 0)
    write_shard(path, meta, {"domain": domains, "path": paths}, steps, None, [rows], num)


def open_in_browser(page: Path, folder: Path) -> float | None:
  """Seconds chromium takes for the page, scripts included, beyond what it takes for an empty one; None without it."""
  browser = shutil.which("chromium") or shutil.which("google-chrome")
  if browser is None:
    return None
  empty = folder / "empty.html"
  empty.write_text("<!doctype html><title>empty</title>")
  seconds = {}
  for target in (empty, page, empty, page, empty, page):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    begin = time.perf_counter()
    subprocess.run(
      [browser, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", target.as_uri()],
      capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    seconds.setdefault(target, []).append(time.perf_counter() - begin)
  return min(seconds[page]) - min(seconds[empty])


if __name__ == "__main__":
  sys.exit(_measure.run(main))
