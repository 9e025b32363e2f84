"""Ids and fields of records: from the files into the score log, through queries, and back into the next run."""

import dataclasses
import gzip
import json
import pickle

import numpy as np
import pytest
from array_record.python import array_record_module

from maxghost import attribution, config, data, scores
from maxghost.attribution.query import Query, ask
from maxghost.config import ConfigError
from maxghost.data import prepare
from maxghost.data.build import open_all
from maxghost.data.sources import open_source
from maxghost.scorelog import Writer
from maxghost.scorelog.compact import compact
from maxghost.scorelog.export import to_parquet
from maxghost.training import score_recorder
from maxghost.training.score_recorder import DomainSums, ScoreRecorder, open_recorder

BASE = dataclasses.replace(
  config.load().data, dataset_type="text", max_target_length=31, per_device_batch_size=4, ghost_val_sets=("b",)
)
LANGS = ("en", "de", "de")


def line(domain, n, **more):
  return json.dumps({"text": f"{domain} text number {n} " * 3, "lang": LANGS[n % 3], "stars": n, **more})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  (folder / "a.jsonl").write_text("".join(line("a", n, id=f"a-{n}") + "\n" for n in range(12)))
  (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(line("b", n, id=n) + "\n" for n in range(9)).encode()))
  (folder / "c.txt").write_text("a text without a record, which is a line long")
  files = (f"a={folder}/a.jsonl", f"b={folder}/b.jsonl.gz", f"c={folder}/c.txt")
  return dataclasses.replace(BASE, dataset_files=files)


def source_of(cfg, *fields):
  return open_source(dataclasses.replace(cfg, document_fields=fields), 0)


def all_fields(source):
  return [source.document_fields(index) for index in range(len(source))]


def test_the_id_of_records_is_kept_without_asking_and_other_fields_when_asked(corpus):
  source = source_of(corpus)
  assert source.fields == ("id",)
  assert all_fields(source) == [*((f"a-{n}",) for n in range(12)), *((str(n),) for n in range(9)), ("",)]
  named = source_of(corpus, "lang", "rating=stars")
  assert named.fields == ("lang", "rating") and named.document_fields(4) == ("de", "4")
  assert named.fingerprint == source.fingerprint
  without = dataclasses.replace(corpus, dataset_files=corpus.dataset_files[2:])
  assert source_of(without).fields == ()


def test_fields_that_do_not_exist_are_named(corpus, tmp_path):
  for cfg, fields, said in (
    (corpus, ("language",), "document_fields has 'language', which domain 'a' does not have; did you mean 'lang'"),
    (dataclasses.replace(corpus, dataset_files=corpus.dataset_files[2:]), ("id",), "the data has no records with"),
    (dataclasses.replace(BASE, dataset_type="stdlib"), ("id",), "document_fields is set, but dataset_type=stdlib"),
  ):
    with pytest.raises(ConfigError, match=said):
      source_of(cfg, *fields)
  for name in ("domain", "source", "contribution", "a-b"):
    with pytest.raises(ConfigError, match=f"document_fields={name}: the score log has a column of this name"):
      Writer(tmp_path, fields=(name,))


def test_fields_of_a_hugging_face_dataset(tmp_path):
  datasets = pytest.importorskip("datasets")
  datasets.disable_progress_bars()
  rows = {"text": [f"text {n}" for n in range(7)], "id": [f"h{n}" for n in range(7)], "stars": list(range(7))}
  datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "h")
  cfg = dataclasses.replace(BASE, dataset_type="hf", dataset_files=(f"h={tmp_path}/h",))
  assert all_fields(source_of(cfg)) == [(f"h{n}",) for n in range(7)]
  assert source_of(cfg, "stars").document_fields(3) == ("3",)


def write_records(path, records):
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  for record in records:
    writer.write(record)
  writer.close()


def example_of(record):
  from tensorflow_datasets.proto import tf_example_pb2

  message = tf_example_pb2.Example()
  for name, value in record.items():
    feature = message.features.feature[name]
    if isinstance(value, str):
      feature.bytes_list.value.append(value.encode())
    else:
      feature.int64_list.value.append(value)
  return message.SerializeToString()


def test_a_field_that_the_first_record_lacks_is_kept(tmp_path):
  (tmp_path / "b.jsonl").write_text('{"text": "no id"}\n' + "".join(f'{{"text": "a", "id": {n}}}\n' for n in range(3)))
  cfg = dataclasses.replace(BASE, dataset_files=(f"b={tmp_path}/b.jsonl",))
  assert all_fields(source_of(cfg)) == [("",), ("0",), ("1",), ("2",)]


@pytest.mark.parametrize("kind", ["json", "example"])
def test_an_empty_first_record_does_not_make_the_others_plain_text(tmp_path, kind):
  rows = [{"text": f"text {n}", "id": f"h{n}"} for n in range(7)]
  cfg = write_as(kind, tmp_path, rows)
  make = example_of if kind == "example" else lambda record: json.dumps(record).encode()
  write_records(tmp_path / "b.array_record", [b"", *map(make, rows)])
  source = source_of(dataclasses.replace(cfg, on_corrupt="skip"))
  assert source.texts(np.arange(1, 8)) == [b"text %d" % n for n in range(7)] and source.document_fields(7) == ("h6",)


def write_as(kind, folder, rows):
  """The keys that read these records of domain `b`, whose first file is plain text, from files of a kind."""
  pyarrow, file = pytest.importorskip("pyarrow"), folder / "b.parquet"
  (folder / "a.txt").write_text("no record " * 9)
  kinds = {"dataset_type": "grain", "dataset_files": (f"b={folder}/b.array_record",)}
  if kind == "parquet":
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=3)
    kinds = {"dataset_type": "text", "dataset_files": (f"b={file}", f"a={folder}/a.txt")}
  elif kind == "tfds":
    kinds = {"dataset_type": "tfds", "dataset_files": ("b=made_b",), "dataset_path": str(folder)}
    write_tfds(folder, rows)
  else:
    make = example_of if kind == "example" else lambda record: json.dumps(record).encode()
    write_records(folder / "b.array_record", map(make, rows))
  return dataclasses.replace(BASE, **kinds)


def write_tfds(folder, rows):
  import tensorflow_datasets as tfds

  class Made(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.2.0")
    name = "made_b"

    def _info(self):
      features = {"text": tfds.features.Text(), "id": tfds.features.Text(), "lang": tfds.features.Text()}
      features = tfds.features.FeaturesDict(features | {"stars": np.int32})
      return tfds.core.DatasetInfo(builder=self, description="made by a test", features=features)

    def _split_generators(self, dl_manager):
      return {"train": self._generate_examples()}

    def _generate_examples(self):
      yield from enumerate(rows)

  Made(data_dir=folder, file_format="array_record").download_and_prepare()


@pytest.mark.parametrize("kind", ["parquet", "json", "example", "tfds"])
def test_fields_of_every_kind_of_record(tmp_path, kind):
  rows = [json.loads(line("b", n, id=f"b-{n}")) for n in range(11)]
  cfg = write_as(kind, tmp_path, rows)
  source = pickle.loads(pickle.dumps(source_of(cfg)))
  of = {source[index].text.decode(): source.document_fields(index) for index in range(len(source))}
  assert source.fields == ("id",) and of.pop("no record " * 9, ("",)) == ("",)
  assert of == {record["text"]: (record["id"],) for record in rows}
  named = source_of(cfg, "rating=stars", "lang")
  assert named.fields == ("rating", "lang") and named.fingerprint == source.fingerprint
  assert {named.document_fields(index) for index in range(11)} == {(str(n), LANGS[n % 3]) for n in range(11)}
  said = "document_fields has 'language', which domain 'b' does not have; did you mean 'lang'"
  with pytest.raises(ConfigError, match=said):
    source_of(cfg, "language")
  folder = tmp_path / "prepared"
  prepare.prepare(source_of(cfg, "id", "rating=stars"), cfg, str(folder), part_bytes=200)
  prepared = dataclasses.replace(BASE, dataset_type="grain", dataset_files=(str(folder),))
  whole, _ = open_all(prepared, 0)
  assert whole.fields == ("id", "rating") and len(whole.meta["shards"]) > 2
  texts = [whole[index].text.decode() for index in range(len(whole))]
  assert dict(zip(texts, all_fields(whole), strict=True)) == {
    text: (of.get(text, ("",))[0], text.split()[3] if text in of else "") for text in texts
  }
  assert len({*texts} & of.keys()) == 11
  one, _ = open_all(dataclasses.replace(prepared, document_fields=("stars=rating",)), 0)
  again = pickle.loads(pickle.dumps(one))
  assert again.fields == ("stars",) and all_fields(again) == [values[1:] for values in all_fields(whole)]
  with pytest.raises(ConfigError, match=r"document_fields has 'ratings', which the prepared corpus .* 'rating'"):
    open_all(dataclasses.replace(prepared, document_fields=("ratings",)), 0)


def test_a_prepared_corpus_without_records_has_no_fields(corpus, tmp_path):
  cfg = dataclasses.replace(corpus, dataset_files=corpus.dataset_files[2:])
  meta = prepare.prepare(source_of(cfg), cfg, str(tmp_path / "p"))
  assert meta["fields"] == [] and not (tmp_path / "p" / "index" / "fields.bin").exists()
  prepared = dataclasses.replace(BASE, dataset_type="grain", dataset_files=(f"{tmp_path}/p",))
  assert open_all(prepared, 0)[0].fields == ()
  with pytest.raises(ConfigError, match=r"document_fields has 'id', which the prepared corpus .* does not have"):
    open_all(dataclasses.replace(prepared, document_fields=("id",)), 0)


class Recorded:
  """A batch of one row with a document in each slot."""

  unit_BS = None

  def __init__(self, documents):
    self.document_BS = np.array([documents])
    self.offset_BS, self.epoch_B, self.arrays = np.zeros_like(self.document_BS), np.zeros(1, np.int64), {}


def outputs_of(documents, value):
  shape = (1, len(documents))
  arrays = dict.fromkeys(("tokens_BS", "loss_BS"), np.ones(shape))
  scores = {"score_dot_BSK": np.full((*shape, 1), value), "contribution_BSK": np.full((*shape, 1), value)}
  return arrays | scores | {"scored_ok": True, "val_loss": np.ones(1), "learning_rate": 1e-3}


@pytest.fixture
def run_dir(corpus, tmp_path):
  """A run of 6 steps over the documents of `a` in turn; a document's contribution is its number minus 5."""
  run_dir = tmp_path / "run"
  cfg = config.load(
    None, f"dataset_files=[{','.join(corpus.dataset_files)}]", "dataset_type=text", "ghost_val_sets=b",
    "document_fields=[id,lang]", "ghost_log_period=2", "max_target_length=31",
  )  # fmt: skip
  run_dir.mkdir()
  config.save(cfg, run_dir / "config.yml")
  dataset = data.load_dataset(cfg.data)
  recorder = open_recorder(cfg, dataset, run_dir)
  recorder.restore(None, 0)
  for step in range(6):
    documents = [2 * step, 2 * step + 1]
    outputs = outputs_of(documents, 0.0)
    outputs["contribution_BSK"][0, :, 0] = np.array(documents) - 5
    recorder.record(step, outputs, None, Recorded(documents))
  recorder.close()
  return run_dir


def ids(answer):
  return dict(zip(answer.columns["id"], answer.columns["contribution"].tolist(), strict=True))


def test_a_log_is_asked_by_id_and_filtered_by_fields(run_dir, capsys):
  log = attribution.load(run_dir)
  assert log.columns[-2:] == ("id", "lang") and set(log["lang"]) == {"en", "de"}
  assert log["id"].tolist() == [f"a-{n}" for n in range(12)]
  assert ids(ask(log, Query(by="id"))) == {f"a-{n}": n - 5.0 for n in range(12)}
  assert list(ids(ask(log, Query(by="id", where="lang=en,id!=a-0", top=2)))) == ["a-9", "a-6"]
  assert ask(log, Query(by="lang")).columns["tokens"].tolist() == [8, 4]
  with pytest.raises(ConfigError, match="unknown column 'language'; did you mean 'lang'"):
    ask(log, Query(where="language=en"))
  with pytest.raises(ConfigError, match=r"there are .*, id, lang, and what document_fields named before the training"):
    ask(log, Query(by="publisher"))
  assert scores.main([str(run_dir), "--by", "id", "--format", "csv", "--top", "1"]) == 0
  assert capsys.readouterr().out.splitlines()[1].startswith("a-11,1,1,")


def test_compaction_a_return_and_parquet_keep_the_fields(run_dir, tmp_path):
  log = attribution.load(run_dir)
  expected = log["id"].tolist()
  parquet = pytest.importorskip("pyarrow.parquet")
  rows = parquet.read_table(to_parquet(log, tmp_path / "parquet")[0])
  assert rows.column("id").to_pylist() == expected
  compact(run_dir)
  again = attribution.load(run_dir)
  assert len(again.shards) == 1 and again["id"].tolist() == expected
  writer = Writer(run_dir, ("b",), period=2, fields=("id", "lang"))
  writer.restore({"step": 2})
  rows = {"tokens": [1], "loss": [1.0], "dot": [1.0], "contribution": [1.0]}
  writer.append({"step": 3}, rows, [("a", "a.jsonl", 7, "new", "fr")])
  with pytest.raises(ValueError, match=r"expected domain, path, offset and \['id', 'lang'\]"):
    writer.append({"step": 4}, rows, [("a", "a.jsonl", 7)])
  writer.close()
  assert attribution.load(run_dir)["id"].tolist() == [*(f"a-{n}" for n in range(6)), "new"]


def test_a_log_that_was_begun_without_fields_is_continued(tmp_path):
  rows = {"tokens": [1], "loss": [1.0], "dot": [1.0], "contribution": [1.0]}
  for fields, steps in (((), range(3)), (("id",), range(3, 6))):
    writer = Writer(tmp_path, period=2, fields=fields)
    writer.restore({"step": steps[0] - 1} if steps[0] else None)
    for step in steps:
      writer.append({"step": step}, rows, [("a", "p", step, *(f"id {step}" for _ in fields))])
    writer.close()
  log = attribution.load(tmp_path)
  assert log.fields == () and log.messages == ["only some of the score files have the documents' id"]
  assert log["offset"].tolist() == list(range(6)) and len(ask(log, Query(by="document"))) == 6


def test_what_hurts_is_dropped_from_the_next_run_in_one_command(run_dir, corpus, tmp_path, capsys):
  file = tmp_path / "exclude.jsonl"
  assert scores.main([str(run_dir), "--drop-below", "0", "--output", str(file)]) == 0
  said = capsys.readouterr().out
  assert "5 of 12 scored documents, 41.7% of their tokens, -15 nats" in said and f"dataset_exclude_file={file}" in said
  assert scores.main([str(run_dir), "--drop-below", "-99", "--output", str(tmp_path / "none")]) == 0
  assert "empty, since none of 12 documents is below -99" in capsys.readouterr().out
  by_place = data.load_dataset(dataclasses.replace(corpus, dataset_exclude_file=str(file))).parts[0].split.excluded
  file.write_text("".join(json.dumps({"id": f"a-{n}"}) + "\n" for n in range(5)))
  by_id = data.load_dataset(dataclasses.replace(corpus, dataset_exclude_file=str(file))).parts[0].split.excluded
  np.testing.assert_array_equal(by_id, by_place)
  assert len(by_id) == 5
  file.write_text('{"id": "a-0"}\n{"id": "a-77"}\n')
  with pytest.raises(ConfigError, match=r"exclude.jsonl, line 2: no record of the data has the id 'a-77'"):
    data.load_dataset(dataclasses.replace(corpus, dataset_exclude_file=str(file)))
  with pytest.raises(ConfigError, match="has ids of records, but the data keeps none; name id in document_fields"):
    files = corpus.dataset_files[2:]
    text_only = dataclasses.replace(corpus, dataset_files=files, dataset_exclude_file=str(file), ghost_val_sets=("c",))
    data.load_dataset(text_only)
  assert scores.main([str(run_dir), "--drop-below", "0"]) == 2
  assert "--drop-below needs --output FILE" in capsys.readouterr().err


def test_the_next_run_trains_on_the_best_share_alone(run_dir, corpus, tmp_path, capsys):
  """--keep writes the best documents, or records by id; the next run leaves out all others, but holds out the same."""
  file, ids = tmp_path / "best.jsonl", tmp_path / "ids.jsonl"
  asked = [str(run_dir), "--keep", "33%", "--format", "ids", "--output"]
  assert scores.main([*asked, str(file)]) == 0
  said = capsys.readouterr()
  assert "4 of 12 scored documents, 33.3% of their tokens" in said.out and f"dataset_include_file={file}" in said.out
  assert scores.main([*asked, str(ids), "--where", "step<1"]) == 0
  few, unscored = capsys.readouterr(), "7 of 19 documents to train on were not scored"
  assert "of 12 scored" not in few.out and unscored in said.err and unscored in few.err
  log = attribution.load(run_dir)
  best = ask(log, Query(by="document", top=4, bottom=0))
  names = ("domain", "path", "offset")
  keys = zip(*(best.columns[name] for name in names), strict=True)
  expected = [dict(zip(names, key, strict=True)) for key in keys]
  assert [json.loads(text) for text in file.read_text().splitlines()] == expected
  assert scores.main([*asked, str(ids), "--by", "id"]) == 0
  assert {*json.loads(ids.read_text().splitlines()[0])} == {"id"}

  def load(**files):
    return data.load_dataset(dataclasses.replace(corpus, **{k: str(v) for k, v in files.items()}))

  def split_of(**files):
    return load(**files).parts[0].split

  every = np.arange(22)
  plain, kept, by_id = (split_of(), split_of(dataset_include_file=file), split_of(dataset_include_file=ids))
  np.testing.assert_array_equal(kept.held_out(every), plain.held_out(every))
  np.testing.assert_array_equal(kept.left_out(every), by_id.left_out(every))
  trained = every[~kept.left_out(every)]
  source = source_of(corpus)
  assert sorted(source.document_id(n).offset for n in trained) == sorted(entry["offset"] for entry in expected)
  ids.write_text(file.read_text().splitlines()[1])
  both = split_of(dataset_include_file=file, dataset_exclude_file=ids)
  assert (~both.left_out(every)).sum() == 3
  assert load(dataset_include_file=file, dataset_exclude_file=ids).num_train_documents == 3, "as the start says"
  assert scores.main([str(run_dir), "--drop-below", "inf", "--by", "id", "--output", str(ids)]) == 0
  assert {tuple(json.loads(line)) for line in ids.read_text().splitlines()} == {("id",)}


def test_records_without_an_id_are_not_named_by_an_empty_one(tmp_path, capsys):
  writer, names = Writer(tmp_path, fields=("id",)), ("tokens", "loss", "dot", "contribution")
  rows = [("a", "p", 0, "x"), ("a", "p", 9, ""), ("b", "q", 0, "")]
  writer.append({"step": 0}, {name: np.ones(3) for name in names}, rows)
  writer.close()
  asked = [str(tmp_path), "--drop-below", "2", "--output", str(tmp_path / "ids"), "--by"]
  assert scores.main([*asked, "id"]) == 2 and not (tmp_path / "ids").exists()
  assert "--by id: some records have no id; use --by document, or leave them out: --where 'id~?*'" in (
    capsys.readouterr().err
  )
  assert scores.main([*asked, "id", "--where", "id~?*"]) == 0
  assert (tmp_path / "ids").read_text() == '{"id": "x"}\n'
  assert scores.main([*asked, "document"]) == 0 and len((tmp_path / "ids").read_text().splitlines()) == 3


def test_ids_to_include_that_match_nothing_are_counted_or_refused(corpus, tmp_path):
  file, again = tmp_path / "some.jsonl", tmp_path / "again.jsonl"
  again.write_text(line("d", 0, id="a-3") + "\n")  # an id of two records counts once
  files = (*corpus.dataset_files, f"d={again}")
  cfg = dataclasses.replace(corpus, dataset_include_file=str(file), dataset_files=files)
  file.write_text('{"id": "a-3"}\n{"id": "a-77"}\n{"domain": "a", "path": "no", "offset": 0}\n')
  dataset = data.load_dataset(cfg)
  note = f"dataset_include_file={file}: 2 of its 3 ids are those of no document of the data"
  assert note in dataset.notes()
  assert dataset.train.state() != data.load_dataset(corpus).train.state()
  for text, said in {
    '{"domain": "a", "path": "no", "offset": 0}': "none of its 1 ids is that of a document of the data",
    '{"path": 3}': "dataset_include_file=.*, line 1: not an object with domain, path and offset, or id",
    '{"domain": "a", "path": "no", "offset": 1e30}': r"line 1: not an object with domain, path and offset",
    "[" * 100_000: "line 1: not an object with domain",
    "\udcff": "dataset_include_file=.* cannot be read: 'utf-8' codec",
  }.items():
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=said):
      data.load_dataset(cfg)
  held_out = json.dumps(next(source_of(corpus).document_id(n)._asdict() for n in range(12, 21)))
  file.write_text(held_out)
  with pytest.raises(ConfigError, match=r"nothing to train on: .*or list more in dataset_include_file"):
    data.load_dataset(dataclasses.replace(cfg, ghost_val_fraction=1.0))


def test_mistakes_with_keep(run_dir, capsys):
  for arguments, said in {
    ("--keep", "5%"): "--keep and --format ids go together",
    ("--format", "ids"): "--keep and --format ids go together",
    ("--keep", "5", "--format", "ids"): "--keep 5: a share of the documents above 0% and up to 100%, such as 5%",
    ("--keep", "0%", "--format", "ids"): "--keep 0%: a share",
    ("--keep", "5%", "--format", "ids", "--by", "step"): "--by step: --keep writes the ids of documents",
  }.items():
    assert scores.main([str(run_dir), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_contributions_by_domain_are_metrics():
  names = [("a", "p", 0), ("b", "p", 1), ("a", "p", 2)]
  sums = DomainSums(("v", "w"), ("a", "b", "c"), names.__getitem__)
  outputs = {"tokens_BS": np.array([[1, 1, 1, 0]]), "scored_ok": True}
  outputs["contribution_BSK"] = np.array([[[1.0, 2.0], [10.0, 20.0], [100.0, 200.0], [7.0, 7.0]]])
  found = sums(outputs, Recorded([0, 1, 2, -1]))()
  assert found == {
    f"ghost/contribution/{name}/{domain}": scale * value
    for name, scale in (("v", 1), ("w", 2))
    for domain, value in (("a", 101.0), ("b", 10.0), ("c", 0.0))
  }
  assert sums(outputs | {"scored_ok": False}, Recorded([0, 1, 2, -1]))() == {}
  copy = DomainSums(("v", "w"), ("a", "b", "c"), names.__getitem__, writes=False)
  assert set(copy(outputs, Recorded([0, 1, 2, -1]))().values()) == {0.0}


def test_a_long_run_holds_the_names_of_few_documents(monkeypatch):
  monkeypatch.setattr(score_recorder, "HELD_DOCUMENTS", 3)
  document = lambda index: ("a", str(index), 0)  # noqa: E731
  for one in (DomainSums(("v",), ("a",), document), ScoreRecorder(None, document, ("a",))):
    assert [one._name(index)[1] for index in (*range(9), 0)] == [*map(str, range(9)), "0"]
    assert one._name.cache_info().currsize == 3
