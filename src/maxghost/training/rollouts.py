"""Answers sampled during training, their rewards and advantages, and the batch made of them.

An answer depends on its prompt, on the weights and on a random key made of (data_shuffle_seed, step, document, epoch,
number of the answer), so that a repeated step samples the same texts. rollouts.jsonl has a line for each step that
samples: the prompts with their answers, rewards and advantages.

P prompts, G answers to each, B = P G rows, T positions, N tokens of the longest answer.
"""

import base64
import functools
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from maxghost import adapters
from maxghost.config import Config
from maxghost.data import rewards
from maxghost.data.conversations import read
from maxghost.data.types import Batch
from maxghost.objectives.grpo import ADVANTAGES, SAMPLED, SCALES
from maxghost.parallel.shardings import Layout
from maxghost.serving.generator import Generator, Progress
from maxghost.serving.sampling import Sampling
from maxghost.training.batches import Fetched, Prefetcher
from maxghost.training.devices import rows_per_step
from maxghost.training.metrics import MetricsLog

_OF_BATCH = ("document_BS", "offset_BS", "epoch_B")  # fields of a Batch beside its arrays, in order


class Rollouts:
  """Samples answers for the loop. dataset: of conversations, one to a row. path: the run directory."""

  def __init__(self, cfg: Config, dataset, layout: Layout, path: Path):
    self._cfg, self._keys, self._dataset, self._layout = cfg, cfg.rollout, dataset, layout
    self._functions = {name: rewards.load(name) for name in self._keys.reward_functions}
    rendering = dataset.parts[0].rendering
    self._stop_ids = dataset.tokenizer.stop_ids | (rendering.end_ids() if rendering.template else set())
    self._generator = Generator(
      nnx.graphdef(adapters.create_abstract(cfg)), cfg.data.max_target_length + 1, stop_ids=sorted(self._stop_ids),
      sampling=Sampling(self._keys.decode_sampling_temperature),
      sharding=layout.rows(rows_per_step(cfg, layout.num_devices)) if layout.num_devices > 1 else None)  # fmt: skip
    self._log = MetricsLog(path / rewards.FILE)
    self._held: Fetched | None = None

  def num_samplings(self, completed: int) -> int:
    """Number of the remaining steps of the run that sample."""
    every = self._keys.num_iterations
    return -(-self._cfg.run.steps // every) - -(-completed // every)

  def __call__(self, step: int, state: nnx.State, prefetcher: Prefetcher) -> Fetched:
    """The answers on which a step trains: newly sampled, or those of an earlier step. Raises RolloutError."""
    if step % self._keys.num_iterations:
      assert self._held is not None, "a position between two samplings has the answers of the first"
      return self._held._replace(record=None, metrics={})
    drawn, begin = next(prefetcher), time.perf_counter()
    numbers = np.arange(len(drawn.batch.document_BS)).repeat(self._keys.num_generations)
    whose_P = list(zip(drawn.batch.document_BS[:, 0].tolist(), drawn.batch.epoch_B.tolist(), strict=True))
    first_P = np.array(rewards.first_numbers(whose_P, self._keys.num_generations))
    generation_B = np.arange(len(numbers)) % self._keys.num_generations + first_P[numbers]
    ids_P, prompts_P, columns_P = self._prompts(drawn.batch)
    ids_B, prompts_B = [ids_P[i] for i in numbers], [prompts_P[i] for i in numbers]
    identity_B4 = np.array([(step, *whose_P[i], n) for i, n in zip(numbers, generation_B.tolist(), strict=True)])
    keys_B = _random_keys(self._cfg.run.data_shuffle_seed, identity_B4.astype(np.uint32))
    found = self._generator.generate(state["model"], ids_B, self._keys.max_completion_length, keys_B=keys_B)
    texts = [self._text(found.row(i)) for i in range(len(numbers))]
    columns = {name: [values[i] for i in numbers] for name, values in columns_P.items()}
    by_name = rewards.judge(self._functions, prompts_B, texts, columns)
    reward_B = rewards.combined(by_name, self._keys.reward_weights)
    advantage_B = rewards.advantages(reward_B, self._keys.num_generations, self._keys.scale_rewards)
    batch = self._batch(drawn.batch, ids_B, found, advantage_B, numbers, generation_B)
    told = self._told(drawn.batch, prompts_P, columns_P, texts, found, by_name, reward_B, advantage_B)
    metrics = self._metrics(found, by_name, reward_B) | {"perf/rollout_seconds": time.perf_counter() - begin}
    self._held = Fetched(batch, self._layout.put(batch.arrays), drawn.position, metrics, dict(step=step, prompts=told))
    return self._held

  def write(self, fetched: Fetched) -> None:
    """Writes the answers of a step that is done, if it sampled them."""
    if fetched.record is not None:
      self._log.append(fetched.record)

  def position(self, completed: int) -> dict:
    """State for a checkpoint: the file's length, and the answers if the next step trains on them again."""
    again = completed % self._keys.num_iterations != 0 and self._held
    return {"bytes": self._log.position(), "crc": self._log.checksum, "held": _packed(again) if again else None}

  def restore(self, position: dict | None) -> None:
    """Truncates the file to a position; None empties it."""
    position = position or {"bytes": 0, "crc": None, "held": None}
    self._log.restore(position["bytes"], position["crc"])
    if position["held"]:
      batch = _unpacked(position["held"]["batch"])
      self._held = Fetched(batch, self._layout.put(batch.arrays), position["held"]["position"])

  def close(self) -> None:
    self._log.close()

  def _prompts(self, batch: Batch) -> tuple[list[list[int]], list[str], dict[str, list]]:
    """(token ids, texts, columns of the records) of the prompts. A prompt ends before the first trained token."""
    ends_P = (batch.arrays["targets_weights"] * (batch.arrays["targets_segmentation"] == 1) > 0).argmax(1) + 1
    ids = [row[:end].tolist() for row, end in zip(batch.arrays["inputs"], ends_P, strict=True)]
    records = []
    for index in batch.document_BS[:, 0].tolist():
      found = read(self._dataset.document(index).text)
      said = (m.get("content") for m in found.messages[found.first :] if m["role"] == "assistant")
      gold = found.plain[1] if found.plain else next((text for text in said if text is not None), "")
      records.append((gold, *self._dataset.document_record(index)[3:]))
    columns = zip(("completion", *self._dataset.source.fields), map(list, zip(*records, strict=True)), strict=True)
    return ids, [self._text(prompt) for prompt in ids], dict(columns)

  def _text(self, ids: Any) -> str:
    """The text of token ids, without a stop token at the end."""
    ids = ids[:-1] if len(ids) and int(ids[-1]) in self._stop_ids else ids
    return self._dataset.tokenizer.decode(ids).decode("utf-8", errors="replace")

  def _batch(self, drawn: Batch, ids_B, found: Progress, advantage_B, numbers, generation_B) -> Batch:
    """A row for each answer: the prompt's tokens have weight 0, the answer's the weight of grpo_loss_type."""
    rows, length, keys = len(numbers), self._cfg.data.max_target_length, self._keys
    pad = self._dataset.tokenizer.pad_id
    tokens_BT, filled_BT = (np.full((rows, length + 1), value, np.int32) for value in (pad, 0))
    weights_BT, logps_BT = np.zeros((2, rows, length + 1), np.float32)
    kept_B = found.done_B | np.bool_(not keys.mask_truncated_completions)
    for i, prompt in enumerate(ids_B):
      answer = found.row(i)
      stop = len(prompt) + len(answer)
      tokens_BT[i, :stop], filled_BT[i, :stop] = [*prompt, *answer.tolist()], 1
      logps_BT[i, len(prompt) : stop] = found.logps_BN[i, : len(answer)]
      if kept_B[i]:
        weights_BT[i, len(prompt) : stop] = 1 / len(answer) if keys.grpo_loss_type == "grpo" else 1
    fills_BT = filled_BT[:, 1:]
    # Divisors beside the sum of the weights, which the loss is divided by: they count answers that are left out too.
    scales = {"grpo": kept_B.mean(), "dr_grpo": weights_BT.sum() / (rows * keys.max_completion_length)}
    # A step that learns from no advantage has no direction, and some optimizers would enlarge a tiny gradient.
    untaught = rewards.UNTAUGHT if advantage_B[kept_B].any() else 0.0
    place_BT = np.broadcast_to(np.arange(length, dtype=np.int32), fills_BT.shape) * fills_BT
    arrays = {"inputs": np.where(fills_BT, tokens_BT[:, :-1], pad), "targets": tokens_BT[:, 1:],
              "inputs_position": place_BT, "targets_position": place_BT, "inputs_segmentation": fills_BT,
              "targets_segmentation": fills_BT, "targets_weights": weights_BT[:, 1:], SAMPLED: logps_BT[:, 1:],
              SCALES: np.full(rows, scales.get(keys.grpo_loss_type, 1.0), np.float32),
              ADVANTAGES: np.where(advantage_B == 0, untaught, advantage_B).astype(np.float32)}  # fmt: skip
    documents_B1, generation_B1 = (x[:, None].astype(np.int64) for x in (drawn.document_BS[numbers, 0], generation_B))
    return Batch(arrays, documents_B1, generation_B1, drawn.epoch_B[numbers])

  def _told(self, drawn: Batch, prompts_P, columns_P, texts, found: Progress, by_name, reward_B, advantage_B):
    """The prompts of a line of rollouts.jsonl."""
    size = self._keys.num_generations
    # As lists with None in place of NaN, for an answer that was not judged.
    total, *judged = (np.ma.masked_invalid(x).tolist() for x in (reward_B, *by_name.values()))
    answers = [
      {"text": text, "tokens": int(found.counts_B[i]), "ended": bool(found.done_B[i]),
       "rewards": {name: values[i] for name, values in zip(by_name, judged, strict=True)}, "reward": total[i],
       "advantage": float(advantage_B[i])}
      for i, text in enumerate(texts)
    ]  # fmt: skip
    return [
      {"document": list(self._dataset.document_id(int(drawn.document_BS[p, 0]))), "epoch": int(drawn.epoch_B[p]),
       "prompt": prompt, **{name: values[p] for name, values in columns_P.items()},
       "answers": answers[p * size : (p + 1) * size]}
      for p, prompt in enumerate(prompts_P)
    ]  # fmt: skip

  def _metrics(self, found: Progress, by_name: dict, reward_B: np.ndarray) -> dict[str, float]:
    groups_PG = np.ma.masked_invalid(reward_B.reshape(-1, self._keys.num_generations))
    values = {"reward": groups_PG.mean(), "reward_std": groups_PG.std(ddof=1),
              "frac_reward_zero_std": (groups_PG.ptp(1).filled(0) == 0).mean(), "mean_length": found.counts_B.mean(),
              "clipped_ratio": (~found.done_B).mean()}  # fmt: skip
    values |= {f"reward/{name}": np.ma.masked_invalid(value).mean() for name, value in by_name.items()}
    return {f"rollout/{name}": float(value) for name, value in values.items() if value is not np.ma.masked}


@functools.partial(jax.jit, static_argnums=0)
def _random_keys(seed: int, numbers_BN):
  return jax.vmap(lambda numbers: functools.reduce(jax.random.fold_in, numbers, jax.random.key(seed)))(numbers_BN)


def _packed(fetched: Fetched) -> dict:
  """The host's batch of answers, and the data position, as JSON values."""
  arrays = fetched.batch.arrays | {name: getattr(fetched.batch, name) for name in _OF_BATCH}
  coded = {name: [x.dtype.str, x.shape, base64.b64encode(x.tobytes()).decode()] for name, x in arrays.items()}
  return {"batch": coded, "position": fetched.position}


def _unpacked(coded: dict) -> Batch:
  arrays = {name: np.frombuffer(base64.b64decode(x), dtype).reshape(shape) for name, (dtype, shape, x) in coded.items()}
  return Batch(arrays, *(arrays.pop(name) for name in _OF_BATCH))
