"""A teacher's logits on disk: `maxghost distill-logits` writes them once, runs with `offline_data_dir` read them.

The logits at a position depend on the tokens of its segment alone. So each segment is kept once, and is found by its
tokens. index.json says of which data and teacher the logits are; tokens-00000.npy and so on hold a record for each
token. B rows, T positions, k entries of the teacher.
"""

import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxghost.config import Config, ConfigError
from maxghost.config.files import check_seal, sealed, write_text
from maxghost.config.values import shown
from maxghost.data.hashing import changed_files, changed_keys, sha256, text_hash
from maxghost.data.packing import token_dtype
from maxghost.data.reader import TrainIterator
from maxghost.data.types import Batch

LOGITS, IDS, LOG_SUM = "teacher_logits", "teacher_ids", "teacher_log_sum"  # [B, T, k], int32[B, T, k], [B, T]
_INDEX, _SHARD_BYTES = "index.json", 1 << 28
_OTHERS = ("data_shuffle_seed", "vocab_size", "distill_temperature")  # keys that rows and logits depend on, beside data
_IRRELEVANT = ("per_device_batch_size", "grain_worker_count", "offline_data_dir")  # keys of the data that change no row


def segments(arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[int, slice]]:
  """(hash of the tokens, place in the flattened rows) of each segment of a batch."""
  segment_BT, tokens = arrays["inputs_segmentation"], np.asarray(arrays["inputs"], np.int32).ravel()
  number = (segment_BT + (segment_BT.max() + 1) * np.arange(len(segment_BT))[:, None]).ravel()
  for first, stop in itertools.pairwise(np.flatnonzero(np.diff(number, prepend=-1, append=-1)).tolist()):
    if segment_BT.flat[first]:
      yield text_hash(tokens[first:stop].tobytes()), slice(first, stop)


class Writer:
  """Writes the logits of segments into an empty folder, each segment once; `close` makes them readable."""

  def __init__(self, folder: Path, num_entries: int, vocab_size: int, dtype: Any):
    fields = [("begins", bool), ("token", np.int32), (LOG_SUM, dtype), (LOGITS, dtype, (num_entries,))]
    self._record = np.dtype([*fields, (IDS, token_dtype(vocab_size), (num_entries,))])
    self._folder, self._files, self._known = folder, [], set()
    self._shard: list[np.ndarray] = []  # records that are not written yet

  def lacks(self, arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether a segment of the batch is not there yet."""
    return any(key not in self._known for key, _ in segments(arrays))

  def add(self, arrays: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> None:
    """found: `LOGITS`, `IDS` and `LOG_SUM` of the batch, the log-sum over the whole vocabulary."""
    flat = {name: np.asarray(found[name]).reshape(-1, *found[name].shape[2:]) for name in (LOGITS, IDS, LOG_SUM)}
    flat["token"] = np.asarray(arrays["inputs"]).ravel()
    for key, place in segments(arrays):
      if key in self._known:
        continue
      records = np.zeros(place.stop - place.start, self._record)
      for name, values in flat.items():
        records[name] = values[place]
      records["begins"][0] = True
      self._known.add(key)
      self._shard.append(records)
    if sum(records.nbytes for records in self._shard) >= _SHARD_BYTES:
      self._flush()

  def _flush(self) -> None:
    self._files.append(self._folder / f"tokens-{len(self._files):05d}.npy")
    np.save(self._files[-1], np.concatenate(self._shard))
    self._shard = []

  def close(self, about: Mapping[str, Any]) -> tuple[int, int]:
    """Writes the index. about: what it says of the logits, as JSON values. Returns (segments, bytes)."""
    if self._shard:
      self._flush()
    files = {path.name: sha256(path) for path in self._files}
    write_text(self._folder / _INDEX, json.dumps(sealed({**about, "files": files}), indent=1))
    return len(self._known), sum(path.stat().st_size for path in self._files)


class TeacherLogits:
  """A folder of `Writer`. about: what its index says. digest: of the files. Raises ConfigError for a damaged folder."""

  def __init__(self, folder: str):
    self._name, again = f"offline_data_dir={folder}", "write it with maxghost distill-logits"
    place = Path(folder).expanduser()
    try:
      self.about = check_seal(json.loads((place / _INDEX).read_text("utf-8")))
      if "files" not in self.about:
        raise ValueError("it is of something else")
    except (OSError, ValueError) as error:
      raise ConfigError(f"{self._name} holds no logits of a teacher: {_INDEX}: {error}; {again}") from error
    files, self._records = self.about["files"], {}
    if damage := [sentence for _, sentence in changed_files(place, files)]:
      raise ConfigError(*(f"{self._name} is damaged: {sentence}; {again}" for sentence in damage))
    self.digest = f"{text_hash(*files.values()):016x}"
    for name in files:
      shard = np.load(place / name, mmap_mode="r").view(np.ndarray)  # np.memmap is slow to index
      tokens, begins = np.array(shard["token"]), np.flatnonzero(shard["begins"]).tolist()
      for first, stop in itertools.pairwise([*begins, len(shard)]):
        self._records[text_hash(tokens[first:stop].tobytes())] = shard[first:stop]

  def arrays(self, batch: Batch, num_entries: int, dtype: Any) -> dict[str, np.ndarray]:
    """`LOGITS`, `IDS` and `LOG_SUM` of a batch, the k largest of each position; padding gets uniform ones. Raises
    ConfigError for a segment whose logits are not there."""
    shape = batch.arrays["inputs"].shape
    logits, log_sum = np.zeros((*shape, num_entries), dtype), np.full(shape, np.log(num_entries + 1), dtype)
    out = {LOGITS: logits, IDS: np.zeros(logits.shape, np.int32), LOG_SUM: log_sum}
    for key, place in segments(batch.arrays):
      if key not in self._records:
        row, segment = place.start // shape[1], int(batch.arrays["inputs_segmentation"].flat[place.start])
        where = f"document {batch.document_BS[row, segment - 1]} from byte {batch.offset_BS[row, segment - 1]}"
        raise ConfigError(f"{self._name} holds no logits of {where}: it was written for other rows")
      records = self._records[key]
      log_sum.reshape(-1)[place] = records[LOG_SUM]
      for name in (LOGITS, IDS):
        out[name].reshape(-1, num_entries)[place] = records[name][:, :num_entries]
    return out


open_logits = functools.cache(TeacherLogits)  # whose checksums are compared once


def settings(cfg: Config) -> dict[str, Any]:
  """The keys that decide which segments a run reads, and what is kept of each, as JSON values."""
  kept = {k: v for k, v in cfg.flat().items() if k in _OTHERS or (hasattr(cfg.data, k) and k not in _IRRELEVANT)}
  return json.loads(json.dumps(kept))


def check(cfg: Config) -> None:
  """Compares the folder of a run with its keys; does nothing for a run without one. Raises ConfigError."""
  if not cfg.data.offline_data_dir:
    return
  about, keys, here = open_logits(cfg.data.offline_data_dir).about, cfg.optimizer, settings(cfg)
  name, problems = f"offline_data_dir={cfg.data.offline_data_dir}", []
  if there := {key: value for key, value in about["settings"].items() if here.get(key) != value}:
    unlike = "; ".join(f"{key}={shown(value)} there, {shown(here.get(key))} here" for key, value in there.items())
    problems.append(f"{name} was written for other rows: {unlike}")
  if (wanted := keys.distill_top_k or cfg.model.vocab_size) > (held := about["entries"]):
    problems.append(f"{name} holds {held} entries of the teacher; use distill_top_k={held} or fewer, not {wanted}")
  if cfg.run.steps > about["steps"]:
    problems.append(f"{name} holds the rows of {about['steps']} steps; use steps={about['steps']}, or write more")
  if keys.distill_teacher and str(Path(keys.distill_teacher).resolve()) != about["teacher"]:
    problems.append(f"{name} holds the logits of {about['teacher']}, not of distill_teacher={keys.distill_teacher}")
  if problems:
    raise ConfigError(*problems)


def bind(folder: str, rows: int, train: TrainIterator) -> None:
  """Makes the positions of the iterator depend on the logits. rows: of a step. Raises ConfigError for other rows."""
  held, position = open_logits(folder), train.state()
  if held.about["data"]["fingerprint"] != position["fingerprint"]:
    changed = changed_keys(held.about["data"]["files"], position["files"])
    why = f"changed: {', '.join(changed[:5])}" if changed else f"{held.about['rows']} a step there, {rows} here"
    raise ConfigError(f"offline_data_dir={folder} was written for other rows: {why}")
  train.depend_on(folder, held.digest)
