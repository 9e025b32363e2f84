"""Every benchmark can still be imported: what they use of the package has not moved away."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("torch", [False, True])
def test_all_import(torch):
  names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
  names = [name for name in names if name.startswith("_torch") == torch]
  if torch:
    pytest.importorskip("torch")
  assert len(names) > (1 if torch else 15)
  code = "import sys; sys.path.insert(0, 'benchmarks'); import " + ", ".join(names)
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr[-2000:]
