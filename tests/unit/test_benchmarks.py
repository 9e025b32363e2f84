"""Every benchmark can still be imported: what they use of the package has not moved away."""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_all_import():
  names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
  if importlib.util.find_spec("torch") is None:
    names = [name for name in names if not name.startswith("_torch")]
  assert len(names) > 15
  code = "import sys; sys.path.insert(0, 'benchmarks'); import " + ", ".join(names)
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr[-2000:]
