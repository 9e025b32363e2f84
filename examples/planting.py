"""Plants harmful answers among conversations, trains with a configuration, and tells how well the scores find them."""

import codecs
import json
import random
from pathlib import Path

import numpy as np

from maxghost import report, scorelog, train

KINDS = ("wrong", "shuffled", "rot13")


def harmful(kind: str, answer: str, others: list[str], rng: random.Random) -> str:
  """The answer made harmful: another one of the task, its words or letters shuffled, or in another alphabet."""
  if kind == "wrong":
    return rng.choice([other for other in others if other != answer] or [answer[::-1]])
  if kind == "rot13":  # digits become letters
    return codecs.encode(answer, "rot13").translate(str.maketrans("0123456789", "qwertyuiop"))
  gap = " " if " " in answer else ""
  parts = answer.split(" ") if gap else list(answer)
  return gap.join(rng.sample(parts, len(parts)))


def plant(records: list[dict], share: float, seed: int) -> list[dict]:
  """The records, a share of them with harmful answers; the field `planted` says which, "" for a sound one."""
  rng = random.Random(seed)
  answers: dict[str, list[str]] = {}
  for record in records:
    answers.setdefault(record["domain"], []).append(record["messages"][-1]["content"])
  out = []
  for record in records:
    kind, last = rng.choice(KINDS) if rng.random() < share else "", record["messages"][-1]
    changed = harmful(kind, last["content"], answers[record["domain"]], rng) if kind else last["content"]
    kind = kind if changed != last["content"] else ""
    out.append(record | {"messages": [*record["messages"][:-1], last | {"content": changed}], "planted": kind})
  return out


def write(path: Path, records: list[dict]) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def auroc(planted: np.ndarray, value: np.ndarray) -> float:
  """Chance that a planted example has a lower value than a sound one; equal values count half."""
  if planted.all() or not planted.any():
    return float("nan")
  low, high = value[planted][:, None], value[~planted][None]
  return float((low < high).mean() + 0.5 * (low == high).mean())


def tell(run: str) -> None:
  """Prints the AUROC of planted against sound examples of their tasks, by scores and by what people sort by else."""
  log = scorelog.load(run)
  inside = np.isin(log["domain"], np.unique(np.array(log["domain"])[np.array(log["planted"]) != ""]))
  log = {
    name: np.asarray(log[name])[inside]
    for name in ("domain", "path", "offset", "planted", "loss", "tokens", "dot", "contribution")
  }
  _, place = np.unique(np.stack([log["domain"], log["path"], log["offset"].astype(str)]), axis=1, return_inverse=True)
  place = place.ravel()
  count = np.bincount(place)
  kinds = np.empty(len(count), object)
  kinds[place] = log["planted"]
  print(f"\n{len(count):,} examples, {(kinds != '').sum():,} of them planted; AUROC, 0.5 = chance:")
  contribution = log["contribution"].reshape(len(place), -1)[:, 0]
  mean = lambda values: np.bincount(place, values) / count  # noqa: E731
  values = {
    "score (nats)": np.bincount(place, contribution),
    "score by token": mean(log["dot"].reshape(len(place), -1)[:, 0]),
    "loss, highest first": -mean(log["loss"]),
    "length, longest first": -mean(log["tokens"].astype(float)),
    "random": np.random.default_rng(0).random(len(count)),
  }
  worst = np.argsort(values["score (nats)"])[: len(count) // 10]
  print(
    f"of the tenth with the lowest scores, {(kinds[worst] != '').mean():.0%} are planted; of all, "
    f"{(kinds != '').mean():.0%}"
  )
  print(f"{'':24}{'all':>8}" + "".join(f"{kind:>10}" for kind in KINDS))
  for name, value in values.items():
    parts = [
      auroc((kinds == kind)[(kinds == kind) | (kinds == "")], value[(kinds == kind) | (kinds == "")]) for kind in KINDS
    ]
    print(f"{name:24}{auroc(kinds != '', value):>8.3f}" + "".join(f"{part:>10.3f}" for part in parts))


def main(config: str, run: str, *changes: str) -> int:
  """Trains, writes the report, and tells how well the planted examples are found."""
  code = train.main([config, *changes])
  if code == 0 and (code := report.main([run])) == 0:
    tell(run)
  return code
