"""Planted flipped pairs: how well the scores of a DPO run find them, beside the loss and the reference's margin.

  python benchmarks/preferences.py [--pairs 400] [--steps 60] [--flipped 0.15] [--seeds 2]

The task has a right answer: the sum of two digits. A small model first learns the form of the answers, right and wrong
alike, so that it prefers neither. Then it is trained by DPO on pairs of a right and a wrong answer, of which a share is
flipped, and scored against held-out pairs that are not. AUROC: of telling flipped pairs from the others, 0.5 by chance.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import _measure
import numpy as np

from maxghost import scorelog

MODEL = (
  "base_emb_dim=64", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=16", "base_mlp_dim=128",
  "base_num_decoder_layers=2", "max_target_length=64", "max_segments_per_seq=3", "dataset_type=text",
  "warmup_steps_fraction=0.0", "eval_interval=-1", "enable_tensorboard=false", "log_period=1000",
  "ghost_val_refresh_steps=0",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pair:
  """The prompt of a pair, its right answer and a wrong one."""

  prompt: str
  right: str
  wrong: str


def draw(rng: np.random.Generator, count: int) -> list[Pair]:
  found = []
  for _ in range(count):
    a, b = rng.integers(0, 10, 2)
    wrong = int((a + b + rng.integers(1, 18)) % 19)
    found.append(Pair(f"{a}+{b}=", f"{a + b:02d}", f"{wrong:02d}"))
  return found


def write(path: Path, records: list[dict]) -> Path:
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return path


def auroc(value: np.ndarray, is_flipped: np.ndarray) -> float:
  """Share of the pairs (flipped, other) in which the flipped one has the larger value; ties count half."""
  gap = value[is_flipped][:, None] - value[~is_flipped][None]
  return float((gap > 0).mean() + 0.5 * (gap == 0).mean())


def run(folder: Path, seed: int, num_pairs: int, steps: int, share: float) -> dict[str, float]:
  rng = np.random.default_rng(seed)
  pairs, held_out = draw(rng, num_pairs), draw(rng, 64)
  is_flipped = rng.permutation(num_pairs) < round(share * num_pairs)
  form = [{"text": one.prompt + answer} for one in draw(rng, 800) for answer in (one.right, one.wrong)]
  write(folder / "form.jsonl", form)
  told = [
    (p.prompt, *((p.wrong, p.right) if f else (p.right, p.wrong))) for p, f in zip(pairs, is_flipped, strict=True)
  ]
  clean = [(p.prompt, p.right, p.wrong) for p in held_out]
  for name, rows in (("pairs", told), ("clean", clean)):
    keys = ("prompt", "chosen", "rejected")
    write(folder / f"{name}.jsonl", [{"id": str(i), **dict(zip(keys, r, strict=True))} for i, r in enumerate(rows)])
  common = (*MODEL, f"base_output_directory={folder}", f"init_weights_seed={seed}")
  begun = ("run_name=form", "steps=150", "per_device_batch_size=8", "ghost_enabled=false", "learning_rate=3e-3")
  finish = _measure.planting().finish
  finish([*common, *begun, f"dataset_files=form={folder}/form.jsonl", "ghost_val_sets=form"])
  asked = (
    "run_name=dpo", "objective=dpo", f"steps={steps}", "per_device_batch_size=16", "ghost_val_batch_size=32",
    f"load_parameters_path={folder}/form", "learning_rate=3e-4", "lr_schedule_type=constant", "checkpoint_period=0",
    "ghost_val_fraction=0.01", f"dataset_files=pairs={folder}/pairs.jsonl",
    f"ghost_val_sets=[clean={folder}/clean.jsonl,margin={folder}/clean.jsonl@margin]",
  )  # fmt: skip
  finish([*common, *asked])
  log = scorelog.load(folder / "dpo")
  pair_N, last = np.array(log["id"], int), int(log["step"].max())
  total = {name: np.zeros(num_pairs) for name in ("score", "margin", "chosen", "rejected", "loss", "times")}
  np.add.at(total["score"], pair_N, -log["contribution"][:, 0])
  np.add.at(total["margin"], pair_N, -log["contribution"][:, 1])
  np.add.at(total["chosen"], pair_N, -log["contribution_chosen"][:, 0])
  np.add.at(total["rejected"], pair_N, -log["contribution_rejected"][:, 0])
  np.add.at(total["loss"], pair_N, log["loss"])
  np.add.at(total["times"], pair_N, 1)
  first, late = np.full(num_pairs, np.nan), np.full(num_pairs, np.nan)
  order = np.argsort(log["step"], kind="stable")
  late[pair_N[order]] = log["loss"][order]
  first[pair_N[order[::-1]]] = log["loss"][order[::-1]]
  seen = total["times"] > 0
  value = {
    "score against held-out pairs (contribution, lowest first)": total["score"],
    "score against their margin": total["margin"],
    "  the chosen part alone": total["chosen"],
    "  the rejected part alone": total["rejected"],
    "loss, mean over the steps": total["loss"] / np.maximum(total["times"], 1),
    "loss difference, last exposure less the first": late - first,
    "random": rng.random(num_pairs),
  }
  print(f"seed {seed}: {seen.sum()} pairs in {last + 1} steps, {is_flipped[seen].sum()} of them flipped")
  return {name: auroc(x[seen], is_flipped[seen]) for name, x in value.items()}


def main() -> int:
  given = _measure.arguments(__doc__, False, pairs=400, steps=60, flipped=0.15, seeds=2)
  rows = []
  for seed in range(given.seeds):
    with tempfile.TemporaryDirectory() as folder:
      rows.append(run(Path(folder), seed, given.pairs, given.steps, given.flipped))
  print(f"\nAUROC of {given.flipped:.0%} flipped pairs, mean over {given.seeds} seeds (least, largest)")
  for name in rows[0]:
    found = [row[name] for row in rows]
    print(f"  {name:<60}{np.mean(found):.3f} ({min(found):.3f}, {max(found):.3f})")
  return 0


if __name__ == "__main__":
  sys.exit(_measure.run(main))
