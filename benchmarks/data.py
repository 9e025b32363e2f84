"""How fast text becomes batches, how full the rows are, and whether a restart and several processes read the same.

  python benchmarks/data.py [--rounds 5] [--steps 8] [key=value ...]

Rates are per second of processor time of this process, all its threads together, while it is held to one core (two
threads on two cores slow each other down, in processor time too); the best round is taken. `train step` compares steps
fed with prepared data with steps on one batch that stays on the device; --steps 0 leaves it out.
"""

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a rate per core needs one thread

import _corpora
import _measure
import numpy as np
from _measure import Figure

from maxghost import config as configuration
from maxghost import data
from maxghost.config import DataConfig
from maxghost.data import prepare
from maxghost.data.sources import stdlib
from maxghost.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

BPE_IDS = 4096
EPOCHS = 10  # of a measurement
RESTART_BATCHES = 100


def main() -> int:
  args = _measure.arguments(__doc__, rounds=5, steps=8)
  cfg = configuration.load(None, "max_target_length=1024", *args.overrides)
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    source = stdlib.load(cfg.data.dataset_domains)
    prepare.train_bpe(source, BPE_IDS, str(folder / "tokenizer.json"))
    bpe = load_tokenizer("huggingface", str(folder / "tokenizer.json"))
    prepared = _prepared(source, cfg.data, folder)
    with one_core():
      rows, figures = rates(source, cfg.data, bpe, prepared, args.rounds)
    figures += efficiencies(source, cfg.data, bpe)
    checks, identical = restarts(folder / "types", cfg.data)
    rows_of_checks = _measure.markdown(checks)
    figures.append(Figure("types whose restart and shards are byte-identical", identical, 7, True, "{:.0f}"))
    if args.steps:
      figures.append(train_step(cfg, args.rounds, args.steps, folder / "prepared"))
  notes = [f"text: {source.num_bytes:,} bytes, {len(source):,} documents of the standard library", rows_of_checks]
  return _measure.publish("data", rows, figures, notes, args.json)


def _prepared(source, cfg: DataConfig, folder: Path) -> DataConfig:
  """The standard library prepared with the BPE; the configuration that reads it."""
  path = str(folder / "tokenizer.json")
  cfg = dataclasses.replace(cfg, tokenizer_type="huggingface", tokenizer_path=path)
  prepare.prepare(source, cfg, str(folder / "prepared"))
  return dataclasses.replace(cfg, dataset_type="grain", dataset_files=(str(folder / "prepared"),))


@contextlib.contextmanager
def one_core() -> Iterator[None]:
  """Holds this process to one of its cores, where the system can."""
  if not hasattr(os, "sched_setaffinity"):
    yield
    return
  before = os.sched_getaffinity(0)
  try:
    _hold({min(before)})
    yield
  finally:
    _hold(before)


def _hold(cores: set[int]) -> None:
  for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), cores)


def _epochs(dataset: data.Dataset, count: int) -> tuple[int, float]:
  """Target tokens of some passes over the data, and the processor seconds that they took (the window that is made
  ahead when the last one ends is in the time, so count more than one)."""
  begin, tokens = time.process_time(), 0
  while True:
    batch = next(dataset.train)
    if batch.epoch_B[-1] >= count:
      return tokens, time.process_time() - begin
    tokens += int(np.count_nonzero(batch.arrays["targets_segmentation"]))


def rates(source, cfg: DataConfig, bpe: Tokenizer, prepared: DataConfig, rounds: int) -> tuple[list, list[Figure]]:
  """Text (or tokens) per processor second, from the source to batches."""
  makers = {
    "bytes, from text": lambda: data.make_dataset(source, cfg, tokenizer=ByteTokenizer()),
    f"BPE of {BPE_IDS} ids, from text": lambda: data.make_dataset(source, cfg, tokenizer=bpe),
    "BPE, prepared": lambda: data.load_dataset(prepared),
  }
  best = dict.fromkeys(makers, (0.0, 0.0))
  for _ in range(rounds):
    for name, make in makers.items():
      tokens, seconds = _epochs(make(), EPOCHS)
      text_rate = EPOCHS * source.num_bytes / seconds / 1e6
      best[name] = max(best[name], (text_rate, tokens / seconds / 1e6))
  rows = [{"path": name, "MB of text/s": mb, "M tokens/s": tokens} for name, (mb, tokens) in best.items()]
  (byte_mb, _), (bpe_mb, _), (_, prepared_tokens) = best.values()
  return rows, [
    Figure("tokenize and pack bytes, MB of text per core-second", byte_mb, 20, True, "{:.1f}"),
    Figure(f"tokenize and pack a BPE of {BPE_IDS}, MB of text per core-second", bpe_mb, 3, True, "{:.2f}"),
    Figure("read and pack prepared shards, M tokens per core-second", prepared_tokens, 50, True, "{:.0f}"),
  ]


def efficiencies(source, cfg: DataConfig, bpe: Tokenizer) -> list[Figure]:
  """Share of the places in the rows that hold a token, over one pass."""
  figures = []
  for strategy in ("first_fit", "concat_then_split"):
    for tokenizer, name in ((ByteTokenizer(), "bytes"), (bpe, "BPE")):
      dataset = data.make_dataset(source, dataclasses.replace(cfg, packing=strategy), tokenizer=tokenizer)
      _epochs(dataset, 1)
      title = f"rows filled, {strategy}, {name}, T = {cfg.max_target_length}, %"
      figures.append(Figure(title, 100 * dataset.train.packing_efficiency, 98, True, "{:.2f}"))
  return figures


def train_step(cfg: configuration.Config, rounds: int, steps: int, folder: Path) -> Figure:
  """Time of steps on prepared data over steps on one batch, of the default model without scores."""
  import _steps
  import jax

  from maxghost.training.batches import Prefetcher

  plain = configuration.replace(
    cfg, ghost_enabled=False, max_target_length=256, vocab_size=BPE_IDS, dataset_type="grain",
    dataset_files=(str(folder),), tokenizer_type="huggingface", tokenizer_path=str(folder / "tokenizer.json"),
  )  # fmt: skip
  step = _steps.make_step(plain)
  held = step.batch
  prefetcher = Prefetcher(data.load_dataset(plain.data).train, jax.device_put, (rounds + 2) * steps)

  def fed() -> None:
    for _ in range(steps):
      step.batch = next(prefetcher).arrays
      step()

  def repeated() -> None:
    step.batch = held
    for _ in range(steps):
      step()

  seconds = _measure.take_turns({"prepared": fed, "repeated": repeated}, rounds)
  prefetcher.close()
  return Figure("train step, prepared data / one repeated batch", _measure.ratio(seconds, "prepared", "repeated"), 1.02)


def restarts(folder: Path, cfg: DataConfig) -> tuple[list[dict], int]:
  """For every type: are the batches after a restart, and the joined batches of 2 and 4 processes, the same?"""
  folder.mkdir()
  small = dataclasses.replace(cfg, max_target_length=128, shuffle_window_bytes=30_000, tokenizer_type="byte")
  rng, rows, identical = np.random.default_rng(), [], 0
  for name, one in _corpora.every_type(folder, small).items():
    before = int(rng.integers(1, 200))
    through = data.load_dataset(one, batch_size=8)
    for _ in range(before):
      next(through.train)
    state = through.train.state()
    groups = {count: [data.load_dataset(one, 0, count, n, batch_size=8) for n in range(count)] for count in (1, 2, 4)}
    same = dict.fromkeys(groups, True)
    for dataset in (dataset for group in groups.values() for dataset in group):
      dataset.train.restore(state)
    for _ in range(RESTART_BATCHES):
      batch = next(through.train)
      for count, group in groups.items():
        same[count] &= _joined([next(dataset.train) for dataset in group]) == _joined([batch])
    identical += all(same.values())
    rows.append(
      {
        "type": name,
        "restart after batch": before,
        f"next {RESTART_BATCHES} identical": same[1],
        "2 processes": same[2],
        "4 processes": same[4],
      }
    )
  return rows, identical


def _joined(batches: list[data.Batch]) -> bytes:
  """Every byte of the batches' rows, in order."""
  names = batches[0].arrays
  parts = [np.concatenate([batch.arrays[name] for batch in batches]).tobytes() for name in names]
  parts += [np.concatenate([getattr(b, name) for b in batches]).tobytes() for name in ("document_BS", "offset_BS")]
  return b"".join(parts)


if __name__ == "__main__":
  sys.exit(_measure.run(main))
