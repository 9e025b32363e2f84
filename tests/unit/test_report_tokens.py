"""Tokens in the report: which exposure is shown, how pieces are cut, what the page says. K = 2 sets, B = 2, T = 7."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from attribution_runs import make_run

from maxghost import attribution
from maxghost.attribution import summary, token_values
from maxghost.attribution.html import render
from maxghost.attribution.texts import Source
from maxghost.data.tokenizers import load_tokenizer
from maxghost.scorelog import tokens

TEXT = "né!".encode()  # 4 bytes, 3 characters; the end token follows


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
  folder = tmp_path_factory.mktemp("runs") / "tokens"
  return make_run(folder, "dataset_type=synthetic", "ghost_val_sets=words", val_sets=("a", "b"), steps=3)


def write(run_dir, step, scale):
  """One file: document x in row 1 as the second segment; its tokens are worth 1, 2, 4, 8, 16 times scale to set a."""
  contribution = np.zeros((2, 2, 7), np.float32)
  contribution[0, 1, 2:7] = scale * 2.0 ** np.arange(5)
  contribution[1, 1, 2:7] = -1.0
  segments = np.array([[1] * 7, [1, 1, 2, 2, 2, 2, 2]], np.int32)
  targets = np.full((2, 7), 90, np.int32)
  targets[1, 2:7] = [*TEXT, 257]
  batch = SimpleNamespace(
    arrays={"inputs": targets, "targets": targets, "inputs_segmentation": segments},
    document_BS=np.array([[0, -1], [0, 1]]),
    offset_BS=np.zeros((2, 2), np.int64),
  )
  names = [("words", "other", 0), ("words", "x", 5)]
  tokens.write(run_dir / "ghost" / "tokens", step, contribution, batch, lambda index: names[index])


def test_the_larger_exposure_in_characters(run_dir):
  write(run_dir, 9, 0.5)
  write(run_dir, 10, -2.0)
  key = ("words", "x", 5)
  found, messages = token_values.find(run_dir, [[key], [("words", "absent", 0)]], {}, False)
  assert not messages and set(found) == {(0, key)}
  marked = found[0, key]
  assert marked.step == 10 and marked.pieces == ("n", "é", "!", token_values.END)
  np.testing.assert_allclose(marked.values, [-2, -4 - 8, -16, -32])
  shutil.rmtree(run_dir / "ghost" / "tokens")


def test_the_total_of_an_exposure_counts_what_is_not_shown(run_dir, monkeypatch):
  monkeypatch.setattr(token_values, "SHOWN_CHARS", 3)  # the exclamation mark and the end are behind
  write(run_dir, 9, 0.5)
  key = ("words", "x", 5)
  (marked,) = token_values.find(run_dir, [[key]], {}, False)[0].values()
  assert marked.pieces == ("n", "é") and marked.total == pytest.approx(0.5 * 31)
  shutil.rmtree(run_dir / "ghost" / "tokens")


def test_a_chunk_that_ends_inside_a_character_keeps_its_value():
  tokenizer = load_tokenizer("byte", "")
  _, pieces, values = token_values._pieces([97, *"é漢".encode()[:-1]], np.arange(1.0, 6.0), tokenizer)
  assert pieces == ("a", "é", "\ufffd")
  np.testing.assert_array_equal(values, [1, 5, 9])
  assert token_values._pieces([0xE9], np.ones(1), tokenizer)[1] == ("\ufffd",), "a page of nothing but such a chunk"


def test_a_document_without_a_position_in_its_row_has_no_tokens_to_mark(run_dir):
  """Where rows are cut from a stream, the last token of one may be the first of a document."""
  write(run_dir, 9, 0.0)
  path = run_dir / "ghost" / "tokens" / "step_9.npz"
  file = dict(np.load(path)) | {"inputs_segmentation": np.ones((2, 7), np.int32)}
  np.savez(path, **file)
  assert token_values.find(run_dir, [[("words", "x", 5)]], {}, False) == ({}, [])
  shutil.rmtree(run_dir / "ghost" / "tokens")


def test_the_page_marks_pieces_by_size_and_sign(run_dir):
  log = attribution.load(run_dir)
  plain = render(summary.summarize(log, 2, Source(run_dir)))
  assert "<mark" not in plain
  top = summary.summarize(log, 2, Source(run_dir)).sets[0].top[0]
  write_for(run_dir, top)
  page = render(summary.summarize(log, 2, Source(run_dir)))
  assert '<mark class="up4" title="+32 nats">⟨end⟩</mark>' in page
  assert '<mark class="down2" title="−16 nats">!</mark>' in page
  assert "step 10: +18.0 nats" in page
  shutil.rmtree(run_dir / "ghost" / "tokens")


def write_for(run_dir, value):
  contribution = np.zeros((2, 1, 4), np.float32)
  contribution[0, 0] = [1, 1, -16, 32]
  array = np.array([[110, 105, 33, 257]], np.int32)
  batch = SimpleNamespace(
    arrays={"inputs": array, "targets": array, "inputs_segmentation": np.ones((1, 4), np.int32)},
    document_BS=np.array([[0]]),
    offset_BS=np.zeros((1, 1), np.int64),
  )
  name = (value.domain, value.path, value.offset)
  tokens.write(run_dir / "ghost" / "tokens", 10, contribution, batch, lambda index: name)


def test_a_run_without_a_readable_tokenizer_says_so(run_dir, tmp_path):
  copy = tmp_path / "copy"
  shutil.copytree(run_dir, copy)
  write(copy, 1, 1.0)
  (copy / "config.yml").unlink()
  found, messages = token_values.find(copy, [[("words", "x", 5)], []], {}, False)
  assert not found and len(messages) == 1 and "cannot be shown" in messages[0]
