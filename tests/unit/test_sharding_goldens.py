"""How three models are split on three topologies, against files that were looked at and committed.

To accept a change: `python tools/dump_shardings.py --goldens`, and read the difference in version control.
"""

import sys
from pathlib import Path

import pytest

from maxghost import config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import dump_shardings

# The two large ones take seconds each to trace: one topology of each by default.
SLOW = {
  ("qwen3-30b-a3b", "v5p-128"), ("qwen3-30b-a3b", "cpu-8"), ("gpt-oss-20b", "v5e-32"), ("gpt-oss-20b", "cpu-8"),
}  # fmt: skip
CASES = [
  pytest.param(model, topology, marks=[pytest.mark.slow] if (model, topology) in SLOW else [])
  for model in dump_shardings.MODELS
  for topology in dump_shardings.TOPOLOGIES
]


@pytest.mark.parametrize(("model", "topology"), CASES)
def test_every_array_is_split_as_it_was(model, topology):
  cfg = config.load(*dump_shardings.golden_keys(model, topology))
  path = dump_shardings.GOLDENS / dump_shardings.file_name(cfg, topology)
  assert path.is_file(), f"{path} is missing; write it with: python tools/dump_shardings.py --goldens"
  found = dump_shardings.to_text(dump_shardings.dump(cfg, topology))
  difference = dump_shardings.difference(path.read_text(encoding="utf-8"), found)
  assert not difference, f"{path.name} differs:\n{difference}"


def test_a_difference_names_the_array():
  golden = '"state": {\n"model/w": ["float32", [8], "mlp", ["tensor"]],\n}'
  text = dump_shardings.difference(golden, golden.replace("tensor", "fsdp"))
  assert '-"model/w": ["float32", [8], "mlp", ["tensor"]],' in text and '+"model/w"' in text
