"""Files of every kind behind one reader: ids that lead to the bytes, exact resume, damage that is named."""

import dataclasses
import gc
import gzip
import json
import os
import pickle
import sys
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python import array_record_module

from maxghost import config, data
from maxghost.config import ConfigError
from maxghost.data.sources import base, open_source

BASE = dataclasses.replace(
  config.load().data, max_target_length=31, per_device_batch_size=4, shuffle_window_bytes=700, ghost_val_sets=("b",)
)
ARRAYS = ("inputs", "targets", "inputs_position", "inputs_segmentation")


def texts_of(domain, count):
  rng = np.random.default_rng(len(domain) * 1000 + count + ord(domain[0]))
  return [f"{domain}{n} é " + " ".join(str(x) for x in rng.integers(0, 999, 3 + n % 9)) for n in range(count)]


A, B = texts_of("a", 37), texts_of("b", 29)


def write_records(path, records, options="group_size:1"):
  writer = array_record_module.ArrayRecordWriter(str(path), options)
  for record in records:
    writer.write(record)
  writer.close()


def write_parquet(path, texts, rows=5):
  pq.write_table(pa.table({"text": texts, "year": list(range(len(texts)))}), path, row_group_size=rows)


def jsonl(texts):
  return "".join(json.dumps({"text": text, "year": n}) + "\n" for n, text in enumerate(texts)).encode()


def write_text(folder):
  (folder / "b").mkdir(parents=True)
  (folder / "a.jsonl").write_bytes(jsonl(A[:20]))
  (folder / "a2.jsonl.gz").write_bytes(gzip.compress(jsonl(A[20:30])))
  with pa.OSFile(str(folder / "a3.jsonl.zst"), "wb") as raw, pa.CompressedOutputStream(raw, "zstd") as out:
    out.write(jsonl(A[30:]))
  for n, text in enumerate(B[:20]):
    (folder / "b" / f"{n:02d}.txt").write_text(text)
  write_parquet(folder / "b" / "rows.parquet", B[20:])
  return dict(dataset_type="text", dataset_files=(f"a={folder}/a*.jsonl*", f"b={folder}/b/**"))


def write_grain(folder):
  folder.mkdir()
  from tensorflow_datasets.proto import tf_example_pb2

  def example(text):
    message = tf_example_pb2.Example()
    message.features.feature["text"].bytes_list.value.append(text.encode())
    message.features.feature["year"].int64_list.value.append(3)
    return message.SerializeToString()

  write_records(folder / "a-0.array_record", map(example, A[:20]))
  write_records(folder / "a-1.array_record", map(example, A[20:]))
  write_records(folder / "b-0.array_record", [json.dumps({"text": text}).encode() for text in B[:15]])
  write_records(folder / "b-1.array_record", [text.encode() for text in B[15:]])
  return dict(dataset_type="grain", dataset_files=(f"a={folder}/a-*", f"b={folder}/b-*"))


def write_tfds(folder):
  import tensorflow_datasets as tfds

  def builder(texts, name):
    features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "year": np.int32})

    class Made(tfds.core.GeneratorBasedBuilder, skip_registration=True):
      VERSION = tfds.core.Version("1.2.0")

      def _info(self):
        return tfds.core.DatasetInfo(builder=self, description="made by a test", features=features)

      def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(), "test": self._generate_examples()}

      def _generate_examples(self):
        for n, text in enumerate(texts):
          yield n, {"text": text, "year": n}

    Made.name = name
    return Made(data_dir=folder, file_format="array_record")

  for texts, name in ((A, "made_a"), (B, "made_b")):
    builder(texts, name).download_and_prepare()
  return dict(dataset_type="tfds", dataset_files=("a=made_a", "b=made_b:1.2.0"), dataset_path=str(folder))


def write_hf(folder):
  datasets = pytest.importorskip("datasets")
  datasets.disable_progress_bars()
  made = datasets.Dataset.from_dict
  made({"text": A, "year": [*range(len(A))]}).with_format("numpy", columns=["year"]).save_to_disk(folder / "a")
  datasets.DatasetDict({"train": made({"text": B}), "test": made({"text": A})}).save_to_disk(folder / "b")
  return dict(dataset_type="hf", dataset_files=(f"a={folder}/a", f"b={folder}/b"))


def write_prepared(folder):
  from maxghost.data import prepare

  cfg = dataclasses.replace(BASE, **write_text(folder / "raw"))
  prepare.prepare(open_source(cfg, 0), cfg, str(folder / "out"), part_bytes=400)
  return dict(dataset_type="grain", dataset_files=(str(folder / "out"),))


WRITERS = {
  "text": write_text,
  "grain": write_grain,
  "tfds": write_tfds,
  "hf": write_hf,
  "prepared": write_prepared,
  "stdlib": lambda folder: dict(
    dataset_domain_bytes=60_000,
    dataset_domains=("manual", "tables"),
    ghost_val_sets=("manual",),
    ghost_val_fraction=0.5,
  ),
  "synthetic": lambda folder: dict(dataset_type="synthetic", dataset_domain_bytes=20_000, ghost_val_sets=("words",)),
}
FILE_KINDS = ("text", "grain", "tfds", "hf", "prepared")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Configuration of a corpus by kind, written once."""
  made = {}

  def get(kind):
    if kind not in made:
      made[kind] = dataclasses.replace(BASE, **WRITERS[kind](tmp_path_factory.mktemp("corpus") / kind))
    return made[kind]

  return get


def equal(left, right):
  return all((left.arrays[name] == right.arrays[name]).all() for name in ARRAYS) and all(
    (getattr(left, name) == getattr(right, name)).all() for name in ("document_BS", "offset_BS", "epoch_B")
  )


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_documents_and_ids(kind, written):
  dataset = data.load_dataset(written(kind))
  source = dataset.source
  assert source.domains == ("a", "b") and len(source) == len(A) + len(B)
  documents = [dataset.document(n) for n in range(len(source))]
  assert sorted(d.text.decode() for d in documents) == sorted(A + B)
  assert len({d.id for d in documents}) == len(documents)
  assert [dataset.document_id(n) for n in range(len(source))] == [d.id for d in documents]
  indices = np.arange(len(source))
  assert [source.domains[n] for n in source.domain_numbers(indices)] == [d.domain for d in documents]
  assert len(set(source.id_hashes(indices).tolist())) == len(source)
  assert data.find_documents(source, [d.id for d in documents[::9]] + [("a", "none", 0)]) == {
    d.id: n for n, d in enumerate(documents) if n % 9 == 0
  }
  back = source.texts(indices[::-1])
  assert back == [d.text for d in documents[::-1]]
  estimate = sum(len(d.text) for d in documents)
  assert estimate / 2 < source.num_bytes < 2 * estimate
  again = pickle.loads(pickle.dumps(source))
  assert again.texts(indices[:5]) == source.texts(indices[:5]) and again.fingerprint == source.fingerprint
  assert [entry.documents for entry in dataset.summary()] == [len(A), len(B)]


@pytest.mark.parametrize("kind", ["text", "grain"])
def test_files_are_closed_with_their_source(kind, written, monkeypatch):
  """Also those that the source let go before, since it keeps few of them open."""
  monkeypatch.setattr("maxghost.data.sources.text._OPEN_FILES", 2)
  with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always", ResourceWarning)
    source = open_source(written(kind), 0)
    source.texts(np.arange(len(source)))
    del source
    gc.collect()
  assert not [one for one in said if one.category is ResourceWarning], [str(one.message) for one in said]


@pytest.mark.parametrize("kind", WRITERS)
def test_restart_and_processes(kind, written):
  cfg = written(kind)
  single = data.load_dataset(cfg, 5, batch_size=8)
  for _ in range(23):
    next(single.train)
  state = json.loads(json.dumps(single.train.state()))
  resumed = data.load_dataset(cfg, 5, batch_size=8)
  resumed.train.restore(state)
  shards = [data.load_dataset(cfg, 5, num, shard, batch_size=8) for num in (2, 4) for shard in range(num)]
  for shard in shards:
    shard.train.restore(state)
  for _ in range(100):
    batch = next(single.train)
    assert equal(batch, next(resumed.train))
    rows = [next(shard.train).arrays["inputs"] for shard in shards]
    assert (np.concatenate(rows[:2]) == batch.arrays["inputs"]).all()
    assert (np.concatenate(rows[2:]) == batch.arrays["inputs"]).all()
  assert (batch.epoch_B > 0).any() or kind in ("stdlib", "synthetic")
  for slot in np.argwhere(batch.document_BS >= 0):
    text = single.document(batch.document_BS[tuple(slot)]).text
    here = batch.arrays["inputs"][slot[0]][batch.arrays["inputs_segmentation"][slot[0]] == slot[1] + 1]
    found = bytes(int(token) for token in here if token < 256)
    offset = batch.offset_BS[tuple(slot)]
    assert text[offset : offset + len(found)] == found


def test_worker_processes_make_the_same_batches(written):
  cfg = written("prepared")
  threaded = data.load_dataset(cfg, 5)
  workers = data.load_dataset(dataclasses.replace(cfg, grain_worker_count=1), 5)
  assert all(equal(next(threaded.train), next(workers.train)) for _ in range(12))
  resumed = data.load_dataset(dataclasses.replace(cfg, grain_worker_count=1), 5)
  resumed.train.restore(workers.train.state())
  assert equal(next(resumed.train), next(threaded.train))


def test_prepared_data_has_the_ids_and_the_split_of_its_source(tmp_path):
  folder = tmp_path / "x"
  folder.mkdir()
  prepared = data.load_dataset(dataclasses.replace(BASE, **write_prepared(folder)))
  raw = data.load_dataset(
    dataclasses.replace(BASE, dataset_type="text", dataset_files=(f"a={folder}/raw/a*.jsonl*", f"b={folder}/raw/b/**"))
  )
  ids = [{dataset.document(n).id for n in range(66)} for dataset in (raw, prepared)]
  assert ids[0] == ids[1]
  held = [{dataset.source[n].id for n in dataset.parts[0].split.pool("b", 99)} for dataset in (raw, prepared)]
  assert held[0] == held[1] and 2 < len(held[0]) < 20
  only_b = dataclasses.replace(
    BASE, dataset_type="grain", dataset_files=(f"{folder}/out",), dataset_domains=("b",), max_target_length=13
  )
  dataset = data.load_dataset(only_b)
  read = {dataset.document(d).domain for _ in range(60) for d in next(dataset.train).document_BS.ravel() if d >= 0}
  assert read == {"b"} and [entry.documents for entry in dataset.summary()] == [29]


def test_no_tensorflow_is_imported(written):
  for kind in ("tfds", "grain"):
    next(data.load_dataset(written(kind)).train)
  assert "tensorflow" not in sys.modules


def test_held_out_files(written, tmp_path):
  (tmp_path / "v.jsonl").write_bytes(jsonl(["held out one", "held out two", A[3]]))
  cfg = dataclasses.replace(written("text"), ghost_val_sets=(f"v={tmp_path}/v.jsonl",))
  dataset = data.load_dataset(cfg)
  batch = dataset.validation_batch(0, 3)
  held = {dataset.document(n).text.decode() for n in batch.document_BS.ravel() if n >= 0}
  assert held == {"held out one", "held out two", A[3]}
  assert {dataset.document_id(n).domain for n in batch.document_BS.ravel() if n >= 0} == {"v"}
  assert dataset.num_train_documents == len(A) + len(B) - 1, "no part of the domains is held out, a copy is left out"
  numbers = {n for _ in range(80) for n in next(dataset.train).document_BS.ravel() if n >= 0}
  read = {dataset.document(n).text.decode() for n in numbers}
  assert read == set(A + B) - {A[3]}, "a copy of a held-out text is left out of training"
  assert "1 training document is a byte-identical copy of held-out text (left out): a:a.jsonl:" in dataset.notes()[-1]
  with pytest.raises(ConfigError, match="ghost_val_sets has the name 'a', which is a domain of the training data"):
    data.load_dataset(dataclasses.replace(cfg, ghost_val_sets=(f"a={tmp_path}/v.jsonl",)))


def refused(**keys):
  with pytest.raises(ConfigError) as caught:
    next(data.load_dataset(dataclasses.replace(BASE, **keys)).train)
  assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)
  return str(caught.value)


def test_wrong_text_settings_are_named(tmp_path, written):
  cfg = written("text")
  text = dict(dataset_type="text")
  assert "dataset_files is empty" in refused(**text)
  assert "no file matches /nowhere/*.txt" in refused(**text, dataset_files=("a=/nowhere/*.txt",))
  for kind, ending in (("text", "txt"), ("grain", "array_record")):
    said = refused(dataset_type=kind, dataset_files=(str(tmp_path),))
    assert f"{tmp_path} is a folder; write {tmp_path}/**/*.{ending}" in said
  (tmp_path / "notes").mkdir()
  for number in range(2):
    (tmp_path / "notes" / f"{number}.md").write_text("a note " * 60)
  (tmp_path / "notes" / "more.txt").write_text("a text")
  assert f"write {tmp_path}/notes/**/*.md" in refused(dataset_type="text", dataset_files=(f"a={tmp_path}/notes",))
  keys = {"dataset_type": "text", "dataset_files": (f"a={tmp_path}/notes/*.md", f"b={tmp_path}/notes/*.txt")}
  said = refused(**keys, ghost_val_sets=())
  assert "ghost_val_sets is not given; name the domain that documents are held out of: a, b" in said
  assert "not of the form domain=" in refused(**text, dataset_files=("=/x",))
  assert "has 'c', which dataset_files does not have; dataset_files has a, b" in refused(
    **text, dataset_files=cfg.dataset_files, dataset_domains=("c",)
  )
  assert "dataset_files is set, but dataset_type=stdlib does not read it; use dataset_type=text" in refused(
    dataset_files=("a=/x",)
  )
  assert "did you mean 'text'" in refused(**text, dataset_files=cfg.dataset_files, train_data_columns=("txt",))
  (tmp_path / "x.pdf").write_text("x")
  assert "not a kind of file that can be read" in refused(**text, dataset_files=(f"b={tmp_path}/x.pdf",))
  (tmp_path / "none.jsonl").write_text("\n \n")
  assert "domain 'b' has no documents" in refused(**text, dataset_files=(f"b={tmp_path}/none.jsonl",))
  assert "does not work with Parquet" in refused(**text, dataset_files=cfg.dataset_files, dataset_domain_bytes=900)
  assert "is below the first document of domain 'a'" in refused(
    **text, dataset_files=cfg.dataset_files[:1], dataset_domain_bytes=9
  )
  capped = open_source(
    dataclasses.replace(BASE, **text, dataset_files=cfg.dataset_files[:1], dataset_domain_bytes=500), 0
  )
  assert 2 < len(capped) < 20 and capped.num_bytes <= 500


def test_a_hugging_face_dataset_is_streamed_up_to_a_cap(tmp_path):
  datasets = pytest.importorskip("datasets")
  datasets.disable_progress_bars()
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "train.jsonl").write_bytes(jsonl(A))
  whole = open_source(dataclasses.replace(BASE, dataset_type="hf", dataset_files=(f"{tmp_path}/a",)), 0)
  assert [whole[i].text.decode() for i in range(len(whole))] == A and whole.domains == ("a",)
  cap, prints = sum(len(text.encode()) for text in A[:9]), []
  for bytes, count in ((cap, 9), (cap + 1, 9), (10**9, len(A))):
    keys = dict(dataset_type="hf", dataset_files=(f"{tmp_path}/a",), dataset_domain_bytes=bytes)
    source = open_source(dataclasses.replace(BASE, **keys), 0)
    assert [source[i].text.decode() for i in range(len(source))] == A[:count]
    assert source.document_id(3) == whole.document_id(3)
    prints.append(source.fingerprint)
  assert prints[0] == prints[1] != prints[2]
  assert "first document" in refused(**keys | {"dataset_domain_bytes": 3})


@pytest.mark.parametrize("cap", [-1, 10**6])
def test_a_column_of_hugging_face_that_is_no_text_is_named(cap, tmp_path):
  datasets = pytest.importorskip("datasets")
  datasets.disable_progress_bars()
  (tmp_path / "train.jsonl").write_text("".join(f'{{"text": "one two", "n": {n}}}\n' for n in range(9)))
  keys = dict(dataset_type="hf", dataset_files=(f"b={tmp_path}",), dataset_domain_bytes=cap, train_data_columns=("n",))
  assert f"{tmp_path}, record 0: no text in column 'n'" in refused(**keys)
  assert "all the text, 0 bytes" in refused(**keys, on_corrupt="skip")


def test_a_broken_line_of_hugging_face_is_named(tmp_path):
  (tmp_path / "x").mkdir()
  (tmp_path / "x" / "a.jsonl").write_text('{"text": "a"}\n' * 9 + "{bad")
  said = refused(dataset_type="hf", dataset_files=(f"b={tmp_path}/x",), train_data_columns=("text",))
  assert "cannot be read: DatasetGenerationError: " in said and "JSON parse error" in said and "in row 9" in said


def test_a_name_of_the_hub_that_cannot_be_reached_is_one_line(monkeypatch):
  datasets = pytest.importorskip("datasets")
  monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
  asked = []

  def load_dataset(*arguments, streaming):
    asked.append((arguments, streaming))
    raise ConnectionError("no such dataset")

  monkeypatch.setattr(datasets, "load_dataset", load_dataset)
  said = refused(dataset_type="hf", dataset_files=("b=owner/name:config",))
  assert "dataset_files=owner/name:config cannot be read (there is no such folder; on the hub): ConnectionError" in said
  refused(dataset_type="hf", dataset_files=("owner/b",), dataset_domain_bytes=100)
  assert asked == [(("owner/name", "config"), False), (("owner/b",), True)]
  assert "no name of a dataset such as owner/name:config" in refused(dataset_type="hf", dataset_files=("b=~/x/y z",))


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path):
  (tmp_path / "a[1].txt").write_text("one " * 20)
  (tmp_path / "b.txt").write_text("two " * 20)
  files = (f"a={tmp_path}/a[[]1].txt", f"b={tmp_path}/b.txt")
  escaped, plain = (
    open_source(dataclasses.replace(BASE, dataset_type="text", dataset_files=(one, files[1])), 0)
    for one in (files[0], f"a={tmp_path}/a[1].txt")
  )
  assert [source.document_id(0) for source in (escaped, plain)] == [("a", "a[1].txt", 0)] * 2


@pytest.mark.parametrize("records", ["text", "conversations"])
def test_a_file_that_is_one_json_array_is_named(tmp_path, records):
  (tmp_path / "whole.jsonl").write_text("\n" + json.dumps([{"text": "one"}, {"text": "two"}]))
  cfg = dataclasses.replace(BASE, dataset_type="text", dataset_files=(f"b={tmp_path}/whole.jsonl",))
  with pytest.raises(ConfigError, match=r"whole.jsonl at byte 1, line 2: no JSON object; write one per line"):
    data.load_dataset(cfg, records=records)


def test_a_first_line_with_a_number_of_too_many_digits_is_named(tmp_path):
  (tmp_path / "x.jsonl").write_bytes(b'{"text": "one", "n": %s}\n' % (b"9" * 5000) + jsonl(A))
  keys = dict(dataset_type="text", dataset_files=(f"b={tmp_path}/x.jsonl",))
  with pytest.raises(ConfigError, match=r"x.jsonl at byte 0, line 1: not a line of JSON"):
    data.load_dataset(dataclasses.replace(BASE, **keys, ghost_val_fraction=0.9))
  assert next(data.load_dataset(dataclasses.replace(BASE, **keys, on_corrupt="skip")).train).document_BS.any()


def test_records_of_another_kind_are_named(tmp_path):
  (tmp_path / "alpaca.jsonl").write_text('{"instruction": "1+1", "output": "2"}\n' * 9)
  cfg = dataclasses.replace(BASE, dataset_type="text", dataset_files=(f"b={tmp_path}/alpaca.jsonl",))
  said = r"alpaca.jsonl has instruction, output; its records need one of messages, conversations, prompt, completion$"
  with pytest.raises(ConfigError, match=said):
    data.load_dataset(cfg, records="conversations")


def test_blank_lines_are_no_documents(tmp_path):
  lines = [line + b"\n" for line in jsonl(A[:9]).splitlines()]
  between = [b"", b"\n", b" \n", b"\r\n", b"\t\r\n", b"    \n", b" " * 99 + b"\r\n", b"  ", b"   \n\n     \n"]
  (tmp_path / "a.jsonl").write_bytes(b"".join(a + b for a, b in zip(between, lines, strict=True)) + b"     ")
  source = open_source(dataclasses.replace(BASE, dataset_type="text", dataset_files=(f"b={tmp_path}/a.jsonl",)), 0)
  assert [text.decode() for text in source.texts(np.arange(len(source)))] == A[:9]


def test_reading_a_record_looks_for_no_line_number(tmp_path, monkeypatch):
  """Which takes as long as reading the file, so a file would take the square of its length."""
  settings = write_text(tmp_path / "raw")

  def place(*_):
    raise AssertionError("a place is asked for")

  monkeypatch.setattr("maxghost.data.sources.text._place", place)
  source = open_source(dataclasses.replace(BASE, **settings), 0)
  assert sorted(source.texts(np.arange(len(source)))) == sorted(one.encode() for one in A + B)


def damaged(folder, kind):
  """A corpus with a damaged second document or file of domain b; returns settings and what must be named."""
  folder.mkdir()
  if kind == "utf8":
    (folder / "b.txt").write_bytes(b"fine " * 30)
    (folder / "c.txt").write_bytes(b"not \xff fine")
    return dict(dataset_type="text", dataset_files=(f"b={folder}/*.txt",)), (f"{folder}/c.txt at byte 4: not UTF-8",)
  if kind == "json":
    first = jsonl(B[:1])
    (folder / "b.jsonl").write_bytes(first + b'{"text": 7}\n{"tex\n' + jsonl(B))
    return dict(dataset_type="text", dataset_files=(f"b={folder}/b.jsonl",)), (
      f"{folder}/b.jsonl at byte {len(first)}",
    )
  if kind == "gzip":
    (folder / "b.jsonl").write_bytes(jsonl(B))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(jsonl(A))[:-30])
    return dict(dataset_type="text", dataset_files=(f"b={folder}/*",)), (f"{folder}/c.jsonl.gz cannot be read",)
  if kind == "parquet":
    write_parquet(folder / "b.parquet", B)
    write_parquet(folder / "c.parquet", A)
    raw = bytearray((folder / "c.parquet").read_bytes())
    raw[4:60] = bytes(56)
    (folder / "c.parquet").write_bytes(raw)
    return dict(dataset_type="grain", dataset_files=(f"b={folder}/*",)), (f"{folder}/c.parquet, row group 0",)
  write_records(folder / "b.array_record", [text.encode() for text in B])
  write_records(folder / "c.array_record", [(text * 400).encode() for text in A], "group_size:1,uncompressed")
  raw = bytearray((folder / "c.array_record").read_bytes())
  if kind == "record":
    raw[150_000] ^= 255
    named = (f"{folder}/c.array_record, record ", "at byte")
  else:
    raw = raw[: len(raw) // 2]
    named = (f"{folder}/c.array_record is no whole ArrayRecord file",)
  (folder / "c.array_record").write_bytes(raw)
  return dict(dataset_type="grain", dataset_files=(f"b={folder}/*",)), named


@pytest.mark.parametrize("kind", ["utf8", "json", "gzip", "parquet", "record", "shard"])
def test_damage_is_named_or_skipped_and_counted(kind, tmp_path):
  keys, named = damaged(tmp_path / "x", kind)
  keys = dict(keys, max_target_length=17, ghost_val_fraction=0.05, shuffle_window_bytes=10**9)
  if kind == "utf8":
    keys["ghost_val_fraction"] = 0.0
  said = refused(**keys)
  assert all(part in said for part in named) and "on_corrupt=skip" in said
  dataset = data.load_dataset(dataclasses.replace(BASE, **keys, on_corrupt="skip"))
  next(dataset.train)
  left_out = dataset.train.counts["corrupt"] + sum(note.startswith("left out: ") for note in dataset.notes())
  assert left_out == {"json": 2, "parquet": 5}.get(kind, left_out) and left_out >= 1


def test_a_text_of_parquet_that_is_not_utf8_is_named_by_its_row(tmp_path):
  raw = [text.encode() for text in B]
  raw[7] += b"\xff"
  texts = pa.Array.from_buffers(pa.string(), len(raw), pa.array(raw).buffers())  # as programs without a check write it
  pq.write_table(pa.table({"text": texts, "id": texts}), tmp_path / "b.parquet", row_group_size=10)
  keys = dict(dataset_type="text", dataset_files=(f"b={tmp_path}/b.parquet",), max_target_length=17)
  with pytest.raises(ConfigError, match=r"b.parquet, row 7: 'utf-8' codec .* byte 0xff .* or use on_corrupt=skip"):
    next(data.load_dataset(dataclasses.replace(BASE, **keys, shuffle_window_bytes=10**9)).train)
  dataset = data.load_dataset(dataclasses.replace(BASE, **keys, on_corrupt="skip", shuffle_window_bytes=10**9))
  next(dataset.train)
  held_out = dataset.summary()[0].held_out - dataset.parts[0].split.held_out(np.array([7]))[0]
  assert dataset.train.counts["documents"] + held_out == len(B) - 1, "the other rows of its group are read"
  assert dataset.document_record(7)[3:] == ("",) and dataset.document_record(6)[3:] == (B[6],)


def test_a_field_that_cannot_be_read_is_named(tmp_path):
  write_parquet(tmp_path / "b.parquet", B)
  column = pq.ParquetFile(tmp_path / "b.parquet").metadata.row_group(2).column(1)
  raw = bytearray((tmp_path / "b.parquet").read_bytes())
  start = column.dictionary_page_offset or column.data_page_offset
  raw[start : start + 9] = b"\xff" * 9
  (tmp_path / "b.parquet").write_bytes(raw)
  keys = dict(dataset_type="text", dataset_files=(f"b={tmp_path}/b.parquet",), document_fields=("year",))
  stop, skip = (open_source(dataclasses.replace(BASE, **keys, on_corrupt=what), 0) for what in ("error", "skip"))
  assert skip.document_fields(9) == ("9",) and skip.document_fields(10) == ("",)
  with pytest.raises(ConfigError, match=r"b.parquet, row group 2 .* or use on_corrupt=skip"):
    stop.document_fields(10)


def test_a_column_of_parquet_with_a_dot_in_its_name_counts_as_text(tmp_path):
  pq.write_table(pa.table({"a.text": B}), tmp_path / "b.parquet")
  keys = dict(dataset_type="text", dataset_files=(f"b={tmp_path}/b.parquet",), train_data_columns=("a.text",))
  assert open_source(dataclasses.replace(BASE, **keys), 0).num_bytes > sum(map(len, B)) / 2


def test_a_changed_file_is_named_on_resume(tmp_path):
  (tmp_path / "b1.jsonl").write_bytes(jsonl(B))
  (tmp_path / "b2.jsonl").write_bytes(jsonl(A))
  cfg = dataclasses.replace(BASE, dataset_type="text", dataset_files=(f"b={tmp_path}/*.jsonl",))
  state = data.load_dataset(cfg).train.state()
  data.load_dataset(cfg).train.restore(state)
  (tmp_path / "b2.jsonl").write_bytes(jsonl([*A[:-1], A[-1].upper()]))
  with pytest.raises(ConfigError, match=r"changed since the position was saved \(changed: b/b2.jsonl\)"):
    data.load_dataset(cfg).train.restore(state)


def test_wrong_settings_of_the_other_types(tmp_path, written):
  tfds = written("tfds")
  keys = dict(dataset_type="tfds", dataset_path=tfds.dataset_path)
  assert "dataset_files=none_such is not found" in refused(**keys, dataset_files=("b=none_such",))
  assert "made_a, made_b" in refused(**keys, dataset_files=("b=none_such",))
  assert "train_split has 'dev'" in refused(**keys, dataset_files=tfds.dataset_files, train_split="dev")
  assert "which dataset_files=made_a does not have" in refused(
    **keys, dataset_files=tfds.dataset_files, train_data_columns=("body",)
  )
  grain = written("grain")
  assert "did you mean 'text'" in refused(
    dataset_type="grain", dataset_files=grain.dataset_files, train_data_columns=("texts",)
  )
  assert "dataset_domain_bytes=9 works with" in refused(
    dataset_type="grain", dataset_files=grain.dataset_files, dataset_domain_bytes=9
  )
  notes = data.load_dataset(grain).notes()
  assert "a: records of its ArrayRecord files are read as tf.train.Example" in notes
  assert "b: records of its ArrayRecord files are read as JSON objects" in notes
  hf = written("hf")
  assert "is no folder" in refused(dataset_type="hf", dataset_files=("b=/nowhere",))
  alone, both = hf.dataset_files
  assert "train_split has 'dev'" in refused(dataset_type="hf", dataset_files=(both,), train_split="dev")
  assert "/a has train" in refused(dataset_type="hf", dataset_files=(alone,), train_split="dev")


def test_reads_that_give_less_than_asked_for_are_continued(tmp_path, monkeypatch):
  """One call of pread gives at most 2 GiB, so documents and places beyond would be taken for the end of the file."""
  settings, pread = write_text(tmp_path / "raw"), os.pread
  keys, named = damaged(tmp_path / "x", "json")
  monkeypatch.setattr(os, "pread", lambda file, size, place: pread(file, min(size, 7), place))
  source = open_source(dataclasses.replace(BASE, **settings), 0)
  assert sorted(source.texts(np.arange(len(source)))) == sorted(one.encode() for one in A + B)
  assert all(part in refused(**keys) for part in named)


def test_an_error_of_a_reader_process_keeps_its_place():
  """Also where the place is told by something that stays in that process, such as an open file."""
  error = base.CorruptError("no text", lambda: "a.jsonl, line 3")
  again = pickle.loads(pickle.dumps(error))
  assert type(again) is base.CorruptError and str(again) == str(error) == "a.jsonl, line 3: no text"


def test_skipped_lines_are_not_looked_for(tmp_path, monkeypatch):
  """The line number of a damaged document takes as long as reading the file up to it."""
  (tmp_path / "b.jsonl").write_bytes(jsonl(B) + b"{\n" * 50)
  cfg = dataclasses.replace(BASE, dataset_type="text", dataset_files=(f"b={tmp_path}/b.jsonl",), on_corrupt="skip")
  monkeypatch.setattr("maxghost.data.sources.text._place", lambda *_: pytest.fail("a place is asked for"))
  dataset = data.load_dataset(dataclasses.replace(cfg, shuffle_window_bytes=10**9))
  next(dataset.train)
  assert dataset.train.counts["corrupt"] + dataset.train.counts["documents"] > len(B)


@pytest.mark.parametrize("other", [b"[" * 100_000 + b"]" * 100_000, b"1" * 5000], ids=["deep", "digits"])
def test_a_record_nested_too_deeply_or_with_too_many_digits_is_a_corrupt_one(tmp_path, other):
  deep = b'{"text": "x", "other": ' + other + b"}"
  keys = dict(dataset_type="grain", dataset_files=(f"b={tmp_path}/*",), shuffle_window_bytes=10**9)
  write_records(tmp_path / "b.array_record", [deep])  # no plain text
  assert "record 0: its file holds JSON objects, and this is none" in refused(**keys, ghost_val_fraction=1.0)
  write_records(tmp_path / "b.array_record", [json.dumps({"text": text}).encode() for text in B] + [deep])
  assert "record 29: its file holds JSON objects, and this is none" in refused(**keys, ghost_val_fraction=1.0)
  dataset = data.load_dataset(dataclasses.replace(BASE, **keys, on_corrupt="skip", ghost_val_fraction=0.1))
  assert next(dataset.train) and dataset.train.counts["corrupt"] == 1


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    (dict(dataset_type="text", train_split="dev"), "train_split is set, but dataset_type=text does not read it"),
    (dict(dataset_type="stdlib", train_data_columns=("body",)), "train_data_columns is set, but dataset_type=stdlib"),
    (dict(dataset_type="stdlib", dataset_domains=("code", "code")), "dataset_domains names 'code' twice"),
  ],
)
def test_keys_that_would_be_ignored_are_refused(keys, said):
  assert said in refused(**keys, ghost_val_sets=())
