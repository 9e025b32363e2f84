"""The sources of an answer: the documents of an index whose one exposure most lowers the loss of this very answer.

T positions, A tokens of the answer, Q = 1 + A queries (the answer, and each of its tokens), N chunks, M blocks of a
sketch, R directions.
"""

import codecs
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxghost import attribution, config
from maxghost.attribution.index import ENDS, KEYS, Index, open_index, standard_error
from maxghost.attribution.offline import UNIT, Point, Sketcher, step_of
from maxghost.attribution.texts import Source
from maxghost.config import Config, ConfigError
from maxghost.data.packing import CONCAT, Layout
from maxghost.data.tokenizers import load_tokenizer
from maxghost.objectives.base import BATCH_ARRAYS
from maxghost.parallel import heap, shardings

TOKEN_TOP = 3  # documents of each token
_AMONG = 8192  # chunks, the most similar to the whole answer, among which the documents of its tokens are sought
_LENGTHS = tuple(2**power for power in range(6, 21))  # of the rows for which a query is compiled
_PLACES = 32  # tokens of a compiled call


class Sources:
  """An index with the weights it was made from, ready for questions.

  run_dir: of the score log. cfg, points: as `attribute.scoring_config` and `attribute.points` make them for the steps
  of the index. notes: sentences for the reader, such as why there are no texts. Raises ConfigError for an index of
  other weights.
  """

  def __init__(self, run_dir: Path, index_dir: Path, cfg: Config, points: Iterator[Point]):
    about, data = open_index(index_dir), cfg.data
    # Else XLA keeps hundreds of MB that are free after a compilation. Decoding takes the same CPU time with one heap.
    heap.call("mallopt", heap.ARENA_MAX, 1)
    ranked = "ranked by similar gradients and shared words, of a token by gradients alone"
    self.cfg, self.method = cfg, f"{ranked}; nats along direction {about['direction']}, {about['directions']} sketches"
    self.tokenizer = load_tokenizer(data.tokenizer_type, data.tokenizer_path)
    self.index = Index(index_dir, about)
    self._sketcher = Sketcher(cfg, Layout(data.max_target_length, 1), 1, about["directions"])
    self._held, step_batch = [], step_of(index_dir)
    for point in points:
      self.index.check(point.step, point.digest)
      self._held.append((point.state, jax.block_until_ready(self._sketcher.step(point.state, step_batch))))
    self._sketcher.step.clear_cache()  # it is not asked again
    self._layout, self._compiled = shardings.current(), dict[int, Callable]()  # by the length of the row
    heap.call("malloc_trim", 0)
    self._texts, self._ends = Source(index_dir), np.load(index_dir / ENDS)
    self._log, then, notes = _log_of(run_dir, index_dir)
    self.notes = self._texts.open((about["fingerprint"], *then)) + notes

  def warm_up(self, length: int = 256) -> None:
    """Compiles what a question with up to `length` tokens, its answer included, needs."""
    for size in _LENGTHS[: 1 + np.searchsorted(_LENGTHS, length).item()]:
      self._compile(size)

  def of_answer(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], top: int = 10) -> dict[str, Any]:
    """The sources of an answer (docs/asking.md lists the keys); the query is its loss, summed over its tokens.

    nats of a document are the sum of its token_nats. Raises ConfigError for no ids, too many, or unknown ones.
    """
    ids_T, num, size = np.array([*prompt_ids, *answer_ids], np.int32), len(answer_ids), self.cfg.model.vocab_size
    if not len(prompt_ids) or not num:
      raise ConfigError("a question and its answer need at least one token each")
    if 0 < (most := self.cfg.model.trainable_position_size) < len(prompt_ids) + num - 1:
      raise ConfigError(f"question and answer have {len(prompt_ids) + num} tokens: the model has {most} positions")
    if len(wrong := ids_T[(ids_T < 0) | (ids_T >= size)]):
      raise ConfigError(f"token id {wrong[0]}: the vocabulary of the model has the ids 0 to {size - 1}")
    self._compile(len(ids_T))
    begin = time.perf_counter()
    logp_A, tokens = self._asked(ids_T, num)
    asked = [np.concatenate([token_AMR.sum(0, keepdims=True), token_AMR]) for token_AMR in tokens]
    (similar_N,) = self.index.scores([one[:1] for one in asked])
    score_N = self.index.hybrid(similar_N, self.tokenizer.decode(ids_T).decode("utf-8", "replace"))
    among = np.union1d(_best(similar_N, _AMONG), _best(score_N, top))
    of_tokens = self.index.scores([one[1:] for one in asked], among=among)
    best = [_best(score_N, top), *(among[_best(one, TOKEN_TOP)].tolist() for one in of_tokens)]
    more = sorted({n for of_token in best[1:] for n in of_token} - {*best[0]}, key=lambda n: -score_N[n])
    chosen = [*best[0], *more]
    product_QNG = self.index.products(asked, np.array(chosen))
    nats_QN, error_N = product_QNG.mean(-1), standard_error(product_QNG[0])
    ids = [dict(zip(KEYS, self.index.ids[n], strict=True)) for n in chosen]
    texts, trained = self._texts_of(chosen), self._trained([tuple(one.values())[:4] for one in ids])
    documents = [
      {"id": "{domain}:{path}:{offset}+{chunk}".format(**one), **one, "text": text, "score": float(score_N[n]),
       "nats": float(nats_QN[0, i]), "standard_error": float(error_N[i]), "token_nats": nats_QN[1:, i].tolist(),
       "trained": steps}
      for i, (n, one, text, steps) in enumerate(zip(chosen, ids, texts, trained, strict=True))
    ]  # fmt: skip
    place, decoder = {n: i for i, n in enumerate(chosen)}, codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(self.tokenizer.piece(int(n)), i == num) for i, n in enumerate(answer_ids, 1)]
    return {
      "tokens": [{"text": text, "logp": float(logp)} for text, logp in zip(pieces, logp_A, strict=True)],
      "documents": documents, "token_top": [[place[n] for n in of_token] for of_token in best[1:]],
      "seconds": time.perf_counter() - begin, "method": self.method, "unit": UNIT, "notes": self.notes,
      "trained_for": self._log.val_sets[0] if self._log else None,
    }  # fmt: skip

  def _compile(self, length: int) -> tuple[int, Callable]:
    """(length of a row for so many tokens, the compiled pass of such rows): compiled before an answer's time starts."""
    size = next(size for size in _LENGTHS if size >= length)
    if size not in self._compiled:
      row, places = {name: np.zeros((1, size), np.int32) for name in BATCH_ARRAYS}, np.zeros(_PLACES, np.int32)
      ask = self._sketcher.ask  # a jitted function with its first argument
      with shardings.use(self._layout):
        lowered = ask.func.lower(*ask.args, *self._held[0], row, places)
      self._compiled[size] = functools.partial(lowered.compile(), *ask.args)
      heap.call("malloc_trim", 0)
    return size, self._compiled[size]

  def _asked(self, ids_T: np.ndarray, num: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """(log-probabilities [A] at the last checkpoint, sketches [A, M, R] at each) of the last `num` tokens."""
    (size, ask), used = self._compile(len(ids_T)), len(ids_T) - 1
    row = {name: np.zeros((1, size), np.int32) for name in BATCH_ARRAYS}
    for side, values in (("inputs", ids_T[:-1]), ("targets", ids_T[1:])):
      row[side][0, :used], row[f"{side}_position"][0, :used] = values, np.arange(used)
      row[f"{side}_segmentation"][0, :used] = 1
    places = np.pad(np.arange(used - num, used, dtype=np.int32), (0, -num % _PLACES), constant_values=-1)
    found, logp_A = [], np.zeros(num)
    for state, step in self._held:
      parts = [jax.device_get(ask(state, step, row, some)) for some in places.reshape(-1, _PLACES)]
      losses, sketches = (np.concatenate(some)[:num] for some in zip(*parts, strict=True))
      logp_A, found = -losses, [*found, sketches]
    return logp_A, found

  def _texts_of(self, chunks: list[int]) -> list[str]:
    """The text of each chunk; empty where the source of the index cannot be read."""
    places = [(tuple(self.index.ids[n][:3]), (self.index.ids[n][3], self._ends[n])) for n in chunks]
    cut = self._texts.cutters(dict.fromkeys(key for key, _ in places))
    return [cut[key](*place) if key in cut else "" for key, place in places]

  def _trained(self, keys: list[tuple]) -> list[list[dict]]:
    """The steps in which the run trained on each chunk, with its contribution to the first validation set then."""
    found: dict[tuple, list[dict]] = {key: [] for key in keys}
    paths, offsets = ([*{key[i] for key in keys}] for i in (1, 2))
    for shard, rows in self._log.blocks() if self._log else ():
      domain, path = shard.texts("domain"), shard.texts("path")
      for row in rows[np.isin(path, paths)[rows["path"]] & np.isin(rows["offset"], offsets) & (rows["share"] > 0)]:
        key = (str(domain[row["domain"]]), str(path[row["path"]]), int(row["offset"]), int(row["chunk"]))
        if key in found:
          values = int(row["step"]), int(row["epoch"]), float(row["contribution"][0])
          found[key].append(dict(zip(("step", "epoch", "contribution"), values, strict=True)))
    return [sorted(found[key], key=lambda one: one["step"]) for key in keys]


def _log_of(run_dir: Path, index_dir: Path) -> tuple[attribution.ScoreLog | None, tuple[str, ...], list[str]]:
  """(the log of what was trained on, or None; the fingerprints of the index's documents then, if known; notes)."""
  try:
    log, run, own = attribution.load(run_dir), *(config.load(path / "config.yml") for path in (run_dir, index_dir))
    if run.data.packing == CONCAT:
      raise ConfigError(f"packing={CONCAT} cut them at other places than the index")
  except ConfigError as error:
    return None, (), [f"when documents were trained on is not known: {error}"]
  said = f"ghost_every={run.ghost.ghost_every}: only scored steps are known to have trained on a document"
  then = log.said_of("fingerprint") if own.data == run.data else ()
  return log, then, [said] if run.ghost.ghost_every > 1 else []


def _best(score_N: np.ndarray, num: int) -> list[int]:
  """The places of the largest, largest first."""
  return np.argsort(-score_N, kind="stable")[:num].tolist()
