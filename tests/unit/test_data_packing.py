"""Orders and packing on their own: permutations, mixtures, rows."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxghost.data import hashing, packing
from maxghost.data.windows import Order, row_domains


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63))
def test_shuffled_index_is_a_permutation_known_at_any_place(size, seed):
  order = hashing.shuffled_index(np.arange(size), size, seed)
  assert (np.sort(order) == np.arange(size)).all()
  some = np.arange(0, size, 7)
  assert (hashing.shuffled_index(some, size, seed) == order[some]).all()


def test_shuffled_index_mixes_and_is_the_same_everywhere():
  order = hashing.shuffled_index(np.arange(100_000), 100_000, 1, 2)
  assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02
  assert (np.diff(order) == 1).mean() < 0.001
  assert hashing.shuffled_index(np.arange(5), 1000, 42).tolist() == [828, 857, 487, 780, 384]
  far = hashing.shuffled_index(np.array([0, 10**12 - 1]), 10**12, 3)
  assert ((far >= 0) & (far < 10**12)).all()


def test_hashes_tell_parts_apart():
  assert hashing.text_hash("ab", "c") != hashing.text_hash("a", "bc")
  assert hashing.combine(1, 2) != hashing.combine(2, 1)
  assert len(np.unique(hashing.content_hashes([b"", b"a", b"b", b"ab"]))) == 4


def test_repeats_and_fresh_fractions():
  parts = [range(10, 20), np.array([3, 1, 4])]
  order = Order(parts, 5, [2.0, 1 / 3])
  seen = [order.units(epoch, np.arange(len(order))) for epoch in range(30)]
  assert len(order) == 21 and all((np.bincount(one, minlength=20)[10:] == 2).all() for one in seen)
  small = [int(one[one < 10][0]) for one in seen]
  assert set(small) == {1, 3, 4}, "the third that is read is drawn anew in each epoch"
  assert (Order([range(4, 9)], 1).units(0, np.arange(5)) != Order([range(4, 9)], 1).units(1, np.arange(5))).any()


def test_the_mixture_is_even_at_every_length():
  weights = np.array([0.55, 0.05, 0.4])
  domains = row_domains(weights, 3, 0, 0, 5000)
  counts = np.cumsum(domains[:, None] == np.arange(3), axis=0)
  assert (np.abs(counts - np.arange(1, 5001)[:, None] * weights) < 5).all()
  assert (row_domains(weights, 3, 0, 1234, 50) == domains[1234:1284]).all()


@pytest.mark.parametrize("strategy", [packing.FIRST_FIT, packing.CONCAT])
def test_loss_weights_stay_with_their_targets(strategy):
  """Token i has the weight i / 4 as a target, wherever its chunk is put; padding has none."""
  lengths = np.array([5, 13, 2, 30, 7])
  tokens = np.arange(1, lengths.sum() + 1)
  encoded = packing.Encoded(
    tokens, np.cumsum(lengths), np.arange(5), np.ones(100, np.int64), weights=(tokens / 4).astype(np.float32)
  )
  layout = packing.Layout(11, 3, strategy)
  rows = packing.pack(encoded, layout, lambda size, name: np.arange(size)[::-1])
  batch = packing.fill([(rows, number, 0) for number in range(len(rows))], layout, 0)
  weights_BT = batch.arrays["targets_weights"]
  assert weights_BT.dtype == np.float32
  counts_BT = batch.arrays["targets_segmentation"] != 0
  np.testing.assert_array_equal(weights_BT, np.where(counts_BT, batch.arrays["targets"] / 4, 0))
  assert counts_BT.sum() == (lengths - 1).sum()
  plain = packing.fill([(dataclasses.replace(rows, weights=None), 0, 0)], layout, 0)
  assert "targets_weights" not in plain.arrays


@settings(deadline=None)
@given(
  length=st.lists(st.integers(1, 64), min_size=1, max_size=200),
  segments=st.integers(1, 9),
)
def test_first_fit_respects_room_and_segments(length, segments):
  length = np.array(length)
  row = packing.first_fit(length, 64, segments)
  num_rows = row.max() + 1
  assert set(row.tolist()) == set(range(num_rows))
  assert (np.bincount(row, length) <= 64).all() and (np.bincount(row) <= segments).all()


def test_first_fit_fills_rows_of_short_documents():
  rng = np.random.default_rng(0)
  length = rng.exponential(70, 9000).astype(int) % 1024 + 1
  num_rows = packing.first_fit(length, 1024, 32).max() + 1
  assert length.sum() / num_rows / 1024 > 0.98


@settings(deadline=None)
@given(
  sizes=st.lists(st.integers(0, 40), min_size=1, max_size=60),
  row_length=st.integers(2, 23),
  segments=st.integers(1, 6),
)
def test_concat_fills_every_row_but_the_last(sizes, row_length, segments):
  ends = np.cumsum(sizes)
  order = np.arange(len(sizes))[::-1]
  document, _, length, row = packing.concat(ends, order, row_length, segments)
  pairs = np.maximum(np.array(sizes) - 1, 0)
  assert (np.bincount(document, length, len(sizes)) == pairs).all()
  filled, used = np.bincount(row, length), np.bincount(row)
  assert all(f == row_length or u == segments for f, u in zip(filled[:-1], used[:-1], strict=True))
  assert (used <= segments).all() and (filled <= row_length).all()


@pytest.mark.parametrize("vocab_size,kind", [(259, np.uint16), (65536, np.uint16), (65537, np.int32)])
def test_token_types(vocab_size, kind):
  assert packing.token_dtype(vocab_size) is kind
