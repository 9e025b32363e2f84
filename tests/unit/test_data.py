"""The reader as training sees it: every token once, ids that lead back to the bytes, exact positions, shards."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxghost import config, data
from maxghost.data.sources.files import expand
from maxghost.data.types import Document

ARRAYS = ("inputs", "inputs_position", "inputs_segmentation", "targets", "targets_position", "targets_segmentation")
BASE = config.load().data
BOS, EOS, PAD = 256, 257, 258


def data_config(**keys):
  values = {"ghost_val_sets": ("b",), "max_target_length": 13, "per_device_batch_size": 6}
  return dataclasses.replace(BASE, **{**values, **keys})


def some_documents(lengths, domains=("a", "b", "c")):
  """Documents of the given sizes whose bytes tell document and place; domains in turn, grouped."""
  rng = np.random.default_rng(7)
  documents = [
    Document(domains[number % len(domains)], f"file-{number}", 5 * number, rng.bytes(length))
    for number, length in enumerate(lengths)
  ]
  return data.DocumentList(sorted(documents, key=lambda d: d.domain), tuple(domains))


def make(source, *, num_shards=1, shard=0, batch_size=None, seed=3, **keys):
  return data.make_dataset(source, data_config(**keys), seed, num_shards, shard, batch_size=batch_size)


def segments(batch):
  """(row, document, offset, epoch, inputs, targets) of every segment of a batch; checks what holds for all batches."""
  a = batch.arrays
  assert tuple(a) == ARRAYS and all(x.dtype == np.int32 for x in a.values())
  assert (a["inputs_segmentation"] == a["targets_segmentation"]).all()
  assert (a["inputs_position"] == a["targets_position"]).all()
  for row in range(len(batch.document_BS)):
    segmentation = a["inputs_segmentation"][row]
    present = np.flatnonzero(batch.document_BS[row] >= 0)
    assert set(segmentation[segmentation > 0] - 1) == set(present)
    assert (a["inputs"][row][segmentation == 0] == PAD).all() and (a["targets"][row][segmentation == 0] == PAD).all()
    assert (batch.offset_BS[row][batch.document_BS[row] < 0] == -1).all()
    for slot in present:
      here = np.flatnonzero(segmentation == slot + 1)
      assert (np.diff(here) == 1).all(), "a segment lies in one piece"
      assert (a["inputs_position"][row, here] == np.arange(len(here))).all()
      yield (
        row,
        int(batch.document_BS[row, slot]),
        int(batch.offset_BS[row, slot]),
        int(batch.epoch_B[row]),
        a["inputs"][row, here],
        a["targets"][row, here],
      )


def first_epoch(dataset):
  """Segments of epoch 0: batches until no lane is in it."""
  found = []
  for batch in itertools.islice(dataset.train, 3000):
    found.extend(segment for segment in segments(batch) if segment[3] == 0)
    if (batch.epoch_B > 0).all():
      return found
  raise AssertionError("the epoch does not end")


def text_of(ids):
  return bytes(int(i) for i in ids if i < 256)


def equal(a, b):
  return (
    all((a.arrays[name] == b.arrays[name]).all() for name in ARRAYS)
    and (a.document_BS == b.document_BS).all()
    and (a.offset_BS == b.offset_BS).all()
    and (a.epoch_B == b.epoch_B).all()
  )


layouts = {
  "packing": st.sampled_from(("first_fit", "concat_then_split", "none")),
  "max_segments_per_seq": st.integers(1, 5),
  "add_bos": st.booleans(),
  "add_eos": st.booleans(),
  "max_target_length": st.sampled_from((2, 11, 29)),
  "shuffle_window_bytes": st.sampled_from((1, 60, 4000)),
  "dataset_shards": st.sampled_from((1, 2, 3)),
}


@settings(max_examples=40, deadline=None)
@given(
  lengths=st.lists(st.integers(2, 90), min_size=25, max_size=40),
  keys=st.fixed_dictionaries(layouts),
  short=st.lists(st.integers(0, 1), max_size=3),
)
def test_every_token_once_per_epoch_and_ids_lead_to_the_bytes(lengths, keys, short):
  source = some_documents([*lengths, *short])
  dataset = make(source, **keys, ghost_val_fraction=0.0)
  found = {}
  for _, document, offset, _, inputs, targets in first_epoch(dataset):
    found.setdefault(document, []).append((offset, inputs, targets))
    assert (inputs[1:] == targets[:-1]).all(), "within a segment the targets are the inputs one later"
  for number, document in enumerate(source.documents):
    whole = [BOS] * keys["add_bos"] + list(document.text) + [EOS] * keys["add_eos"]
    if not document.text or len(whole) < 2:
      assert number not in found
      continue
    chunks = sorted(found[number], key=lambda chunk: (chunk[0], chunk[1][0] != BOS))
    assert [*np.concatenate([c[1] for c in chunks])] == whole[:-1], "each token but the last is an input once"
    assert [*np.concatenate([c[2] for c in chunks])] == whole[1:], "each token but the first is a target once"
    for offset, inputs, _ in chunks:
      text = text_of(inputs)
      assert document.text[offset : offset + len(text)] == text


@settings(max_examples=25, deadline=None)
@given(
  steps=st.integers(0, 60),
  seed=st.integers(0, 99),
  keys=st.fixed_dictionaries(layouts),
  mixture=st.sampled_from(((), ("a=0.5", "b=0.2", "c=0.3"), ("a=2x", "b=0.5x", "c=1x"))),
)
def test_restore_continues_byte_for_byte(steps, seed, keys, mixture):
  source = some_documents([(17 * n) % 61 + 1 for n in range(40)])
  keys = {**keys, "dataset_mixture": mixture, "ghost_val_fraction": 0.6}
  through = make(source, seed=seed, **keys)
  for _ in range(steps):
    next(through.train)
  state = json.loads(json.dumps(through.train.state()))
  resumed = make(source, seed=seed, **keys)
  resumed.train.restore(state)
  assert all(equal(next(through.train), next(resumed.train)) for _ in range(30))
  assert through.train.state() == resumed.train.state()


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_end_to_end_are_the_single_order(num_shards, lanes):
  source = some_documents([(31 * n) % 83 + 1 for n in range(50)])
  keys = dict(dataset_shards=lanes, shuffle_window_bytes=300, batch_size=12)
  single = make(source, **keys)
  shards = [make(source, num_shards=num_shards, shard=shard, **keys) for shard in range(num_shards)]
  for _ in range(40):
    whole, parts = next(single.train), [next(shard.train) for shard in shards]
    assert all(len(part.document_BS) == 12 // num_shards for part in parts)
    for name in ARRAYS:
      assert (np.concatenate([part.arrays[name] for part in parts]) == whole.arrays[name]).all()
    assert (np.concatenate([part.document_BS for part in parts]) == whole.document_BS).all()
  merged = data.merge_states([shard.train.state() for shard in shards])
  assert merged == single.train.state()
  again = make(source, **keys)
  again.train.restore(merged)
  assert equal(next(again.train), next(single.train))


def test_the_lanes_of_a_shard_read_only_their_documents():
  source = some_documents([20] * 40)
  shards = [make(source, dataset_shards=2, num_shards=2, shard=s, batch_size=4, ghost_val_fraction=0.0) for s in (0, 1)]
  read = [{segment[1] for segment in first_epoch(shard)} for shard in shards]
  assert read[0].isdisjoint(read[1]) and len(read[0] | read[1]) == 40


def test_epochs_differ_in_order_and_seeds_differ():
  source = some_documents([9] * 60)
  order = {}
  dataset = make(source, batch_size=1)
  for batch in itertools.islice(dataset.train, 200):
    for _, document, _, epoch, _, _ in segments(batch):
      order.setdefault(epoch, []).append(document)
  assert sorted(order[0]) == sorted(order[1]) and order[0] != order[1]
  other = [segment[1] for segment in first_epoch(make(source, batch_size=1, seed=4))]
  assert sorted(other) != order[0] and other != order[0]


def test_held_out_documents_and_their_copies_are_not_trained_on():
  texts = [b"text number %d, with some words" % n for n in range(60)]
  documents = [Document("a" if n < 30 else "b", f"f{n}", 0, text) for n, text in enumerate(texts)]
  documents += [Document("a", f"copy{n}", 0, texts[n]) for n in range(30, 60)]
  source = data.DocumentList(sorted(documents, key=lambda d: d.domain), ("a", "b"))
  dataset = make(source, ghost_val_fraction=0.4)
  (a, b) = dataset.summary()
  assert (a.documents, b.documents, a.held_out) == (60, 30, 0) and 5 <= b.held_out <= 20
  trained = {segment[1] for segment in first_epoch(dataset)}
  batches = [dataset.validation_batch(i, 3) for i in range(30)]
  held_out = {segment[1] for batch in batches for segment in segments(batch)}
  assert len(held_out) == b.held_out and {dataset.document(i).domain for i in held_out} == {"b"}
  assert trained.isdisjoint(held_out)
  texts_out = {dataset.document(i).text for i in held_out}
  assert texts_out.isdisjoint({dataset.document(i).text for i in trained})
  assert len(trained) == dataset.num_train_documents == 90 - 2 * b.held_out
  assert dataset.train.counts["copies"] >= b.held_out
  (note,) = dataset.notes()
  says = "training documents are byte-identical copies of held-out text (left out): a:copy"
  assert note.startswith(f"{b.held_out} {says}")
  kept = make(source, ghost_val_fraction=0.4, ghost_val_copies="keep")
  assert len({segment[1] for segment in first_epoch(kept)}) == 90 - b.held_out and "kept" in kept.notes()[0]
  with pytest.raises(config.ConfigError, match=r"ghost_val_copies=error: \d+ training documents .* text: a:copy"):
    make(source, ghost_val_fraction=0.4, ghost_val_copies="error")


def test_copies_that_are_found_only_as_the_data_is_read_end_the_run(monkeypatch):
  monkeypatch.setattr("maxghost.data.dataset._COPY_CANDIDATES", 0)
  texts = [b"text number %d, with some words" % n for n in range(30)]
  source = data.DocumentList([Document(d, f"f{n}", 0, text) for d in "ab" for n, text in enumerate(texts)], ("a", "b"))
  assert "looked for as it is read" in make(source).notes()[0] and next(make(source).train)
  with pytest.raises(config.ConfigError, match=r"ghost_val_copies=error: \d+ or more training documents"):
    next(make(source, ghost_val_copies="error").train)


def test_several_validation_sets_are_held_out():
  source = some_documents([30] * 90)
  dataset = make(source, ghost_val_sets=("b", "one=a", "c"))
  assert all(entry.held_out > 1 for entry in dataset.summary())
  for domain in "abc":
    batch = dataset.validation_batch(0, 4, domain)
    assert {source[d].domain for d in batch.document_BS.ravel() if d >= 0} == {domain}
  trained = {segment[1] for segment in first_epoch(dataset)}
  assert len(trained) == dataset.num_train_documents == 90 - sum(entry.held_out for entry in dataset.summary())
  elsewhere = make(source, ghost_val_sets=("one=c",))
  assert elsewhere.val_domain == "c" and [entry.held_out > 0 for entry in elsewhere.summary()] == [False, False, True]
  with pytest.raises(config.ConfigError, match="changed since the position was saved"):
    dataset.train.restore(make(source).train.state())
  with pytest.raises(config.ConfigError, match="ghost_val_sets has 'd', which the data does not have"):
    make(source, ghost_val_sets=("one=d",))


def test_what_was_read_is_counted_window_by_window():
  """The line at the end of a run: documents and tokens of the windows that were begun, once more in every epoch."""
  dataset = make(some_documents([30] * 90), shuffle_window_bytes=10**9)
  seen, tokens = 0, 0
  while not seen:
    seen += int(next(dataset.train).epoch_B.max())
    counts = dataset.train.counts
    tokens = max(tokens, counts["tokens"])
  assert dataset.train.describe().startswith(
    f"Data read, in whole windows and ahead of training: {counts['documents']:,} documents, {tokens:,} tokens in "
    f"{counts['rows']:,} rows of {dataset.layout.row_length}, filled to "
  )
  assert counts["documents"] == 2 * dataset.num_train_documents
  counts["copies"] = 1
  assert dataset.train.describe().endswith("; left out: copies 1")


def test_the_split_is_by_id_and_not_by_place():
  source = some_documents([30] * 90)
  out = {source[i].id for i in make(source).parts[0].split.pool("b", 99)}
  turned = data.DocumentList(source.documents[::-1], source.domains)
  assert {turned[i].id for i in make(turned).parts[0].split.pool("b", 99)} == out
  assert {source[i].id for i in make(source, seed=8).parts[0].split.pool("b", 99)} != out


def test_validation_batches_are_cyclic_and_pure():
  dataset = make(some_documents([37] * 60))
  rows = len(dataset.validation_rows())
  every = [dataset.validation_batch(i, 1) for i in range(rows)]
  for _ in range(5):
    next(dataset.train)
  again = dataset.validation_batch(0, rows)
  for name in ARRAYS:
    assert (np.concatenate([batch.arrays[name] for batch in every]) == again.arrays[name]).all()
  round_two = dataset.validation_batch(rows, 1)
  assert (round_two.arrays["inputs"] == every[0].arrays["inputs"]).all() and round_two.epoch_B[0] == 1
  assert dataset.validation_batch(0, 2 * rows + 1).document_BS.shape == (2 * rows + 1, dataset.layout.max_segments)
  with pytest.raises(config.ConfigError, match="'a' has no held-out documents"):
    dataset.validation_batch(0, 2, "a")
  with pytest.raises(config.ConfigError, match="validation_batch has 'bb', which the data does not have; did you mean"):
    dataset.validation_batch(0, 2, "bb")


def test_weights_give_shares_of_the_rows():
  source = some_documents([40] * 90)
  weights = {"a": 0.6, "b": 0.1, "c": 0.3}
  dataset = make(source, dataset_mixture=tuple(f"{k}={v}" for k, v in weights.items()), dataset_shards=2)
  rows = dict.fromkeys(weights, 0)
  for batch in itertools.islice(dataset.train, 100):
    for row in range(6):
      names = {source[d].domain for d in batch.document_BS[row] if d >= 0}
      assert len(names) == 1
      rows[names.pop()] += 1
  for name, share in weights.items():
    assert abs(rows[name] - 600 * share) <= 6


def test_epochs_repeat_the_domains():
  source = some_documents([25] * 60)
  dataset = make(
    source,
    dataset_mixture=("a=3x", "b=0x", "c=1.5x"),
    ghost_val_fraction=0.0,
    max_target_length=29,
    packing="none",
  )
  times = np.zeros(60, int)
  for segment in first_epoch(dataset):
    times[segment[1]] += 1
  by_domain = {name: sorted(times[[d.domain == name for d in source.documents]]) for name in "abc"}
  assert by_domain == {"a": [3] * 20, "b": [0] * 20, "c": [1] * 10 + [2] * 10}


def test_a_user_sees_what_is_wrong():
  source = some_documents([30] * 30)

  def message(**keys):
    with pytest.raises(config.ConfigError) as caught:
      make(source, **keys)
    return str(caught.value)

  assert message(ghost_val_sets=("x",)) == "ghost_val_sets has 'x', which the data does not have; the data has a, b, c"
  assert "the validation set is empty" in message(ghost_val_fraction=1e-9)
  assert message(max_target_length=901).startswith("max_target_length=901 is longer than all the text, 900 bytes")
  assert message(dataset_shards=4).endswith("use one of 1, 2, 3, 6")
  assert "more than the 30 documents" in message(dataset_shards=60, batch_size=60)
  few = message(dataset_shards=6, dataset_mixture=("a=0.3x", "b=0x", "c=0.2x"))
  assert few.startswith("dataset_shards=6 is more than the 5 documents (or prepared blocks) of an epoch; use fewer")
  none = message(dataset_mixture=("a=0.04x", "b=1x", "c=0x"))
  assert none == "dataset_mixture: a=0.04x is none of 10 documents; use more, or 0x"
  assert "numbers from 0 to 1,000,000,000" in message(dataset_mixture=("a=1e18x", "b=1x", "c=1x"))
  assert "does not divide over 4 shards" in message(num_shards=4, batch_size=6)
  assert "has none for b, c; add b=..." in message(dataset_mixture=("a=1",))
  assert "sums to 1.5, but shares sum to 1; use for example [a=0.333333,b=0.333333,c=0.333333]" in message(
    dataset_mixture=("a=0.5", "b=0.5", "c=0.5")
  )
  assert "dataset_mixture has 'e', which the data does not have" in message(dataset_mixture=("e=1",))
  assert "not of the form domain=share" in message(dataset_mixture=("a",))


def empty_but(source, kept):
  """The source with the texts of all other documents emptied."""
  documents = [dataclasses.replace(d, text=d.text * (n in kept)) for n, d in enumerate(source.documents)]
  return data.DocumentList(documents, source.domains)


def test_nothing_to_train_on_is_said():
  source = some_documents([30] * 20, domains=("b",))
  with pytest.raises(config.ConfigError, match="nothing to train on: every document is held out"):
    make(source, ghost_val_fraction=1.0)
  empty = data.DocumentList([Document("b", f"f{n}", n, b"x" * 40 * (n < 9)) for n in range(30)], ("b",))
  held_out = {n for n in range(9) if make(empty, ghost_val_fraction=0.5).parts[0].split.held_out(np.array([n]))[0]}
  assert 0 < len(held_out) < 9
  dataset, read = make(empty_but(empty, held_out), ghost_val_fraction=0.5), []
  object.__setattr__(dataset.parts[0], "read", lambda indices: read.append(indices) or [b""] * len(indices))
  with pytest.raises(config.ConfigError, match="nothing to train on in the data"):
    next(dataset.train)
  assert len(read) <= 25, "the text is not read a thousand times"


def test_a_position_of_other_data_or_settings_is_refused():
  source = some_documents([30] * 30)
  state = make(source).train.state()
  for other in (
    make(some_documents([31] * 30)),
    make(source, seed=5),
    make(source, max_target_length=14),
    make(source, batch_size=3),
    make(source, add_eos=False),
  ):
    with pytest.raises(config.ConfigError, match="changed since the position was saved"):
      other.train.restore(state)
  shard = make(source, dataset_shards=2, num_shards=2, shard=1, batch_size=6)
  whole = make(source, dataset_shards=2, batch_size=6)
  with pytest.raises(config.ConfigError, match=r"has no lanes \[0\]; join the positions"):
    whole.train.restore(shard.train.state())


def test_reading_imports_no_jax():
  program = (
    "import sys; from maxghost import config, data; d = data.load_dataset(config.load(None, 'dataset_type=synthetic', "
    "'ghost_val_sets=words').data); next(d.train); print({'jax', 'grain', 'tensorflow'} & set(sys.modules))"
  )
  done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "set()"


def test_a_domain_has_one_share():
  cfg = config.load(
    "dataset_type=synthetic", "dataset_domains=words,digits", "dataset_mixture=[words=0.5,words=0.2,digits=0.8]",
    "ghost_val_sets=words",
  )  # fmt: skip
  with pytest.raises(config.ConfigError, match="dataset_mixture names 'words' twice; give it one number"):
    data.load_dataset(cfg.data)


def test_the_rows_of_the_first_validation_set_are_made_once():
  dataset = data.load_dataset(config.load("dataset_type=synthetic", "ghost_val_sets=words").data)
  assert dataset.validation_rows() is dataset.validation_rows("words")


def test_folders_behind_links_count_once(tmp_path):
  """A link to the folder above is a loop, in which `**` finds every file 41 times."""
  for name in ("x/a.txt", "x/y/a.txt", "x/y/b.txt"):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(name)
  (tmp_path / "x" / "loop").symlink_to(".")
  (tmp_path / "x" / "again").symlink_to("y")
  (tmp_path / "x" / "y" / "other.txt").symlink_to("b.txt")  # a name of its own, as a user gave it
  files = expand("dataset_files", [f"a={tmp_path}/x/**/*.txt"])
  assert [file.name for file in files] == ["a.txt", "again/a.txt", "again/b.txt", "again/other.txt"]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch, capsys):
  for name in ("a/a.txt", "a/locked/b.txt", "a/.hidden/c.txt", "other/locked/d.txt"):
    (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / name).write_text(name)
  scandir = os.scandir

  def refusing(path):
    if os.fspath(path).endswith(("locked", ".hidden")):
      raise PermissionError(13, "Permission denied", path)
    return scandir(path)

  monkeypatch.setattr(os, "scandir", refusing)
  assert [file.name for file in expand("dataset_files", [f"a={tmp_path}/[a]/**/*.txt"])] == ["a/a.txt"]
  said = f"maxghost: note: left out: {tmp_path}/a/locked cannot be listed: Permission denied\n"
  assert capsys.readouterr().err == said


@pytest.mark.parametrize(
  "wrong", [b"x", Document("a", "p", 0, "x"), Document("a", "p", 0.5, b"x"), Document("z", "p", 0, b"x")]
)
def test_what_is_no_document_of_the_domains_is_refused(wrong):
  """A fraction of an offset would be cut off in the score log, and two documents would have one id."""
  with pytest.raises(
    config.ConfigError, match=r"a document of the list is .*; give Document\(domain, path, offset, text"
  ):
    data.DocumentList([Document("a", "p", 1, b"y"), wrong], ("a", "b"))
  assert len(data.DocumentList((Document("a", "p", np.int64(n), b"y") for n in range(3)), ("a",))) == 3


def test_a_source_with_too_few_texts_is_named():
  class Short(data.DocumentList):
    def texts(self, indices):
      return super().texts(indices)[:-1]

  documents = some_documents([40] * 30).documents
  with pytest.raises(config.ConfigError, match=r"Short.texts gives \d+ texts for \d+ documents"):
    next(make(Short(documents, ("a", "b", "c")), ghost_val_copies="keep").train)


def test_a_text_that_many_rows_of_parquet_share_counts_for_each(tmp_path):
  """A dictionary holds it once, and the file's footer has the size of the dictionary."""
  pq.write_table(pa.table({"text": ["a line of eighteen"] * 50}), tmp_path / "x.parquet")
  keys = {"dataset_type": "text", "dataset_files": (f"x={tmp_path}/x.parquet",), "ghost_val_sets": ("x",)}

  def load(length):
    return data.load_dataset(config.replace(config.Config(), **keys, max_target_length=length).data)

  assert load(900).source.domains == ("x",)
  with pytest.raises(config.ConfigError, match="max_target_length=901 is longer than all the text, 900 bytes"):
    load(901)
