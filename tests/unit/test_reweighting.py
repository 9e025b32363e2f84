"""Domain reweighting: the rule, the reader's change of shares, and that a continued run draws the same rows."""

import dataclasses
import json
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from maxghost import config, data
from maxghost.config import ConfigError
from maxghost.parallel.shardings import Layout
from maxghost.training import compiled_steps, reweighting
from maxghost.training.batches import Prefetcher
from maxghost.training.plan import Plan
from maxghost.training.reweighting import LAG, Reweighter, reweighted

KEYS = (
  "dataset_type=synthetic", "dataset_domains=[words,digits,brackets]", 
  "dataset_mixture=[words=0.5,digits=0.3,brackets=0.2]", "ghost_val_sets=words", "max_target_length=32",
  "per_device_batch_size=5", "ghost_reweight=3,0.7",
)  # fmt: skip
STEPS = 23
SOME = np.ones(3, bool)


def open_run(writes=True):
  cfg = config.load(None, *KEYS)
  dataset = data.load_dataset(cfg.data, 0)
  shares = {"words": 0.5, "digits": 0.3, "brackets": 0.2}
  return dataset, Reweighter(cfg.ghost, shares, dataset.train, dataset.document_id, writes)


def outputs_of(batch, dataset):
  """Scores in which a token of digits is worth 3, of words 1, of brackets -1."""
  worth = {"digits": 3e-4, "words": 1e-4, "brackets": -1e-4}
  tokens = np.zeros(batch.document_BS.shape, np.int32)
  nats = np.zeros((*tokens.shape, 2), np.float32)
  for place in zip(*np.nonzero(batch.document_BS >= 0), strict=True):
    row, segment = place
    tokens[place] = np.count_nonzero(batch.arrays["targets_segmentation"][row] == segment + 1)
    nats[place] = worth[dataset.document_id(int(batch.document_BS[place])).domain] * tokens[place]
  return {"contribution_BSK": nats, "tokens_BS": tokens, "scored_ok": np.bool_(True)}


def run(first, last, position=None, slow=False):
  """Steps first..last-1 as the loop runs them: batch s + 1 is fetched before step s is read. Returns the inputs of each
  batch, the records, and what a checkpoint after them would hold."""
  dataset, reweighter = open_run()
  if position is not None:
    data_position, state = json.loads(json.dumps(position))
    dataset.train.restore(data_position)
    reweighter.restore(state)
  prefetcher = Prefetcher(dataset.train, lambda arrays: arrays, STEPS - first)
  inputs, records, started = [], [], None
  try:
    for step in range(first, last):
      fetched = next(prefetcher)
      if slow:
        time.sleep(0.02)  # the reader fills its queue
      inputs.append(fetched.arrays["inputs"])
      if started is not None:
        records.append(reweighter.observe(step - 1, outputs_of(started.batch, dataset), started.batch))
      started = fetched
    records.append(reweighter.observe(last - 1, outputs_of(started.batch, dataset), started.batch))
  finally:
    prefetcher.close()
  return inputs, records, (started.position, reweighter.state()), reweighter


def test_the_rule():
  shares = reweighted(np.array([0.5, 0.3, 0.2]), np.array([1.0, 3.0, -2.0]), SOME, 0.5, 0.0)
  expected = np.array([0.5, 0.3, 0.2]) * np.exp(0.5 * np.array([0.5, 1.5, -1.0]))
  np.testing.assert_allclose(shares, expected / expected.sum())


def test_the_floor_holds_and_a_domain_not_seen_moves_with_the_mean():
  shares = reweighted(np.array([0.9, 0.05, 0.05]), np.array([9.0, -9.0, -9.0]), SOME, 3.0, 0.1)
  assert shares.min() >= 0.1
  np.testing.assert_allclose(shares.sum(), 1.0)
  unseen = reweighted(np.array([0.4, 0.4, 0.2]), np.array([2.0, 2.0, 0.0]), np.array([True, True, False]), 0.5, 0.0)
  np.testing.assert_allclose(unseen, [0.4, 0.4, 0.2])


def test_a_large_step_leaves_shares():
  before = np.array([0.5, 0.3, 0.2])
  once = reweighted(before, np.array([1.0, 3.0, -2.0]), SOME, 1000.0, 0.0)
  np.testing.assert_allclose(once, [0, 1, 0], atol=1e-12)
  np.testing.assert_allclose(reweighted(once, np.array([9.0, -1.0, 1.0]), SOME, 1000.0, 0.0), once)


def test_nothing_moves_where_nothing_was_earned():
  before = np.array([0.5, 0.3, 0.2])
  np.testing.assert_array_equal(reweighted(before, np.zeros(3), SOME, 0.5, 0.02), before)
  np.testing.assert_array_equal(reweighted(before, np.zeros(3), ~SOME, 0.5, 0.02), before)


def test_shares_follow_the_value_and_the_rows_follow_the_shares():
  inputs, records, (_, state), _ = run(0, STEPS)
  _, shares = state["changes"][-1]
  assert all(first >= STEPS for first, _ in state["changes"][1:]), "changes of the past are dropped"
  assert shares["digits"] > 0.75 > 0.3 > shares["brackets"]
  assert "ghost/share/digits" not in records[2 + LAG - 1]
  assert records[2 + LAG]["ghost/share/digits"] > 0.3
  is_digits = [np.mean([bytes(row[row < 256].astype(np.uint8)).count(b"1") > 0 for row in batch]) for batch in inputs]
  assert np.mean(is_digits[-5:]) > np.mean(is_digits[:5]) + 0.25


@pytest.mark.parametrize("cut", [1, 7, 12])
def test_a_continued_run_draws_the_same_rows(cut):
  whole, records, _, _ = run(0, STEPS)
  first, early, position, _ = run(0, cut, slow=True)
  rest, late, _, _ = run(cut, STEPS, position)
  assert early + late == records
  for ours, theirs in zip(first + rest, whole, strict=True):
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_sums_of_all_processes_go_on_in_any_number_of_them(count, monkeypatch):
  """Of two processes that stop between two changes; as many go on with the same bits, each with its own sums."""
  dataset, reweighter = open_run()
  own = []
  for step in range(2):
    batch = next(dataset.train)
    reweighter.observe(step, outputs_of(batch, dataset), batch)
    own.append(reweighter._sums_2D.copy())
  process = SimpleNamespace(gather=lambda value: [sums.tolist() for sums in own], count=lambda: count)
  monkeypatch.setattr(reweighting, "distributed", process)
  state, kept = json.loads(json.dumps(reweighter.state())), []
  for index in range(count):
    process.index, process.is_first = lambda index=index: index, lambda index=index: index == 0
    _, again = open_run()
    again.restore(state)
    kept.append(again._sums_2D)
  np.testing.assert_array_equal(sum(kept), sum(own))
  assert count != 2 or all(map(np.array_equal, kept, own))


def test_rows_that_two_processes_hold_count_once():
  """As the other steps of the interval, if one process goes on with the sums of both."""
  dataset, second = open_run(writes=False)
  batch = next(dataset.train)
  second.observe(0, outputs_of(batch, dataset), batch)
  assert not np.any(second.state()["sums"])


def test_forgetting_the_decisions_would_change_the_rows():
  whole, _, _, _ = run(0, STEPS)
  _, _, position, _ = run(0, 12)
  dataset, _ = open_run()
  dataset.train.restore(position[0])
  rest = [next(dataset.train).arrays["inputs"] for _ in range(STEPS - 12)]
  assert any(not np.array_equal(a, b) for a, b in zip(rest, whole[12:], strict=True))


@pytest.mark.parametrize("keys", [(), ("ghost_rank=4", "ghost_direction=sgd", "offload_to_host=[val_gradient]")])
def test_steps_between_scored_ones_leave_out_the_keys_that_need_scores(keys, monkeypatch):
  monkeypatch.setattr(compiled_steps, "lower", lambda name, *arguments, **options: name)
  monkeypatch.setattr(compiled_steps, "_compile", lambda name, *arguments: name)
  cfg = config.load(None, *KEYS, "ghost_every=2", "base_emb_dim=16", "base_num_decoder_layers=2", *keys)
  program = compiled_steps.build(Plan.of(cfg, Layout.of(cfg.parallel, jax.devices()[:1])))
  assert program.executable("plain_step") == "plain_step"


def test_rows_left_out_by_selection_earn_nothing():
  dataset, reweighter = open_run()
  batch = next(dataset.train)
  outputs = outputs_of(batch, dataset) | {"chosen_B": np.array([True, False, False, True, False])}
  reweighter.observe(0, outputs, batch)
  assert sum(reweighter.state()["sums"][0][1]) == outputs["tokens_BS"][[0, 3]].sum()


def test_the_reader_refuses_a_change_of_the_past():
  dataset, _ = open_run()
  for _ in range(4):
    next(dataset.train)
  with pytest.raises(ValueError, match="4 batches were drawn"):
    dataset.train.schedule_mixture([(2, {"words": 1.0, "digits": 0.0, "brackets": 0.0})])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ("ghost_enabled=false", "ghost_enabled=true"),
    ("ghost_reweight=3,0.7,0.4", "0.333 or less"),
  ],
)
def test_contradictions_are_refused(change, message):
  with pytest.raises(ConfigError, match=message):
    config.load(None, *KEYS, change)


def test_other_mixtures_are_refused():
  keys = [key for key in KEYS if not key.startswith("dataset_mixture")]
  with pytest.raises(ConfigError, match="shares"):
    config.load(None, *keys)
  cfg = dataclasses.replace(config.load().data, dataset_type="synthetic", ghost_val_sets=("words",))
  with pytest.raises(ConfigError, match="shares"):
    data.load_dataset(cfg).train.schedule_mixture([])


def test_lag_covers_what_is_drawn_ahead():
  """The reader never holds a batch of index s + LAG or later when step s is read."""
  drawn = []

  class Counting:
    def __next__(self):
      drawn.append(len(drawn))
      return SimpleNamespace(arrays={})

    def state(self):
      return {}

  prefetcher = Prefetcher(Counting(), lambda arrays: arrays, 50)
  for step in range(6):
    next(prefetcher)  # batch `step` is taken; step - 1 is read now
    time.sleep(0.1)
    assert max(drawn) < step - 1 + reweighting.LAG
  prefetcher.close()


def test_many_changes_of_the_mixture_are_compared_once_each():
  class Number(int):
    compared = 0

    def __eq__(self, other):
      Number.compared += 1
      return int(self) == int(other)

    __hash__ = int.__hash__

  dataset, _ = open_run()
  shares = {"words": 0.5, "digits": 0.25, "brackets": 0.25}
  changes = [(Number(batch), shares) for batch in range(100)]
  dataset.train.schedule_mixture(changes)
  for _ in range(100):
    next(dataset.train)
  Number.compared = 0
  dataset.train.schedule_mixture([(Number(batch), shares) for batch in range(101)])
  assert Number.compared < 1000
