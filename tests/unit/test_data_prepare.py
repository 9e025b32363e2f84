"""`python -m maxghost.data prepare`: interrupted, damaged, mismatched, and a hundred million documents."""

import base64
import dataclasses
import json
import os
import resource
import shlex
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from array_record.python import array_record_module

from maxghost import config, data
from maxghost.config import ConfigError
from maxghost.data import __main__ as data_command
from maxghost.data import packing, prepare, prepared
from maxghost.data.sources import open_source, stdlib, synthetic
from maxghost.data.tokenizers import byte_level_alphabet, load_tokenizer
from maxghost.data.types import Document

BASE = dataclasses.replace(config.load().data, ghost_val_sets=("words",), max_target_length=64)


def files_of(folder):
  return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def read(folder, **keys):
  keys = {**dict(dataset_type="grain", dataset_files=(str(folder),)), **keys}
  return data.load_dataset(dataclasses.replace(BASE, **keys))


def test_an_interrupted_preparation_is_taken_up(tmp_path):
  source = synthetic.load(domain_bytes=60_000)
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  meta = prepare.prepare(source, BASE, str(whole), part_bytes=50_000)
  assert len(meta["shards"]) > 3 and meta["tokens"] == source.num_bytes
  done = []

  def stop(manifest):
    done.append(manifest["name"])
    if len(done) == 2:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    prepare.prepare(source, BASE, str(broken), part_bytes=50_000, progress=stop)
  assert not (broken / prepared.INDEX_FILE).exists()
  (broken / "shards" / done[0]).write_bytes(b"cut off")
  times = {p.name: p.stat().st_mtime_ns for p in (broken / "shards").iterdir()}
  prepare.prepare(source, BASE, str(broken), part_bytes=50_000)
  assert (broken / "shards" / done[1]).stat().st_mtime_ns == times[done[1]], "a complete part is not done again"
  assert files_of(broken) == files_of(whole)


def test_processes_write_the_same(tmp_path):
  source = synthetic.load(domain_bytes=30_000)
  prepare.prepare(source, BASE, str(tmp_path / "one"), part_bytes=40_000)
  prepare.prepare(source, BASE, str(tmp_path / "two"), part_bytes=40_000, num_workers=2)
  assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_the_command_trains_a_bpe_and_the_result_reads(tmp_path, capsys):
  out = tmp_path / "out"
  settings = ["dataset_type=synthetic", "dataset_domain_bytes=40000", "ghost_val_sets=words"]
  command = ["prepare", *settings, "--output", str(out), "--train_bpe", "400", "--part_bytes", "60000"]
  assert data_command.main(command) == 0
  said = capsys.readouterr().out
  keys = dict(item.split("=", 1) for item in shlex.split(said.split("train on it with: ")[1]))
  assert keys["tokenizer_type"] == "huggingface" and keys["vocab_size"] == "400"
  before = files_of(out)
  assert data_command.main(command) == 0 and files_of(out) == before
  assert data_command.main(["verify", str(out)]) == 0 and "as it was written" in capsys.readouterr().out
  dataset = read(out, tokenizer_type="huggingface", tokenizer_path=keys["tokenizer_path"])
  source = synthetic.load(domain_bytes=40_000)
  assert {dataset.document(n) for n in range(len(source))} == set(source.documents)
  assert len(dataset.source.columns["token_end"]) == len(source)
  assert dataset.source.columns["token_end"][-1] < source.num_bytes / 2


def test_the_printed_settings_are_those_of_the_folder(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  settings = ["dataset_type=synthetic", "dataset_domain_bytes=9000", "ghost_val_sets=[all=words,digits]"]
  assert data_command.main(["prepare", *settings, "--output=~/Ann's corpus, 2 [new]"]) == 0
  said = shlex.split(capsys.readouterr().out.split("train on it with: ")[1])
  cfg = config.load(None, *said)
  assert cfg.data.dataset_files == (f"{tmp_path}/Ann's corpus, 2 [new]",)
  assert cfg.data.ghost_val_sets == ("all=words", "digits")
  assert len(data.load_dataset(cfg.data).source) > 10


def test_damage_is_found_and_only_the_damaged_shard_redone(tmp_path, capsys):
  out = tmp_path / "out"
  source = synthetic.load(domain_bytes=60_000)
  prepare.prepare(source, BASE, str(out), part_bytes=50_000)
  good = files_of(out)
  victim = sorted((out / "shards").iterdir())[1]
  raw = bytearray(victim.read_bytes())
  raw[200:260] = bytes(60)
  victim.write_bytes(raw)
  with pytest.raises(ConfigError, match=rf"{victim.name}, record \d+: .*maxghost.data verify"):
    next(read(out, shuffle_window_bytes=10**9, ghost_val_fraction=0.0).train)
  skipping = read(out, shuffle_window_bytes=10**9, on_corrupt="skip")
  next(skipping.train)
  assert 0 < skipping.train.counts["corrupt"] < len(source)
  with pytest.raises(ConfigError, match=rf"{victim.name}, record \d+: .*maxghost.data verify"):
    read(out).validation_rows()
  rows, held_out = skipping.validation_rows(), read(out).parts[0].split.pool("words", 10**6)
  assert 0 < len(np.unique(rows.document)) < len(held_out) and np.isin(rows.document, held_out).all()
  assert data_command.main(["verify", str(out)]) == 1 and victim.name in capsys.readouterr().out
  columns = out / "parts" / "00000.npz"
  columns.write_bytes(columns.read_bytes()[:-40])
  prepare.prepare(source, BASE, str(out), part_bytes=50_000)
  assert files_of(out) == good


def test_what_does_not_fit_is_refused(tmp_path, capsys):
  out = tmp_path / "out"
  source = synthetic.load(domain_bytes=20_000)
  prepare.prepare(source, BASE, str(out))
  with pytest.raises(ConfigError, match=r"dataset_shards=8 is more than the 4 documents \(or prepared blocks\)"):
    read(out, dataset_shards=8)
  with pytest.raises(ConfigError, match=r"prepared from other data or settings \(source, part_documents"):
    prepare.prepare(synthetic.load(domain_bytes=20_000, seed=1), BASE, str(out))
  with pytest.raises(ConfigError, match="other data or settings"):
    prepare.prepare(source, BASE, str(out), part_bytes=999)
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "thesis.tex").write_text("mine")
  with pytest.raises(ConfigError, match="is not empty and holds no prepared corpus"):
    prepare.prepare(source, BASE, str(tmp_path / "full"))
  with pytest.raises(ConfigError, match="a prepared corpus, which goes alone"):
    read(out, dataset_files=(str(out), "a=/x"))
  with pytest.raises(ConfigError, match=r"'digit'.*did you mean 'digits'"):
    read(out, dataset_domains=("digit",))
  prepare.train_bpe(source, 300, str(tmp_path / "t.json"))
  with pytest.raises(ConfigError, match=r"another tokenizer than .*use tokenizer_type=byte and no tokenizer_path"):
    read(out, tokenizer_type="huggingface", tokenizer_path=str(tmp_path / "t.json"))
  with pytest.raises(ConfigError, match="below the 259 ids"):
    prepare.train_bpe(source, 258, str(tmp_path / "u.json"))
  assert data_command.main(["prepare", "--output", str(tmp_path / "full"), "dataset_typ=x"]) == 2
  assert "did you mean" in capsys.readouterr().err
  assert data_command.main(["verify", str(tmp_path)]) == 2
  empty = data.DocumentList([Document("a", "p", n, b"") for n in range(3)], ("a",))
  with pytest.raises(ConfigError, match="nothing to prepare"):
    prepare.prepare(empty, BASE, str(tmp_path / "empty"))


def test_prepared_and_read_directly_give_the_same_tokens(tmp_path):
  source = stdlib.load(("manual", "docstrings"), 80_000)
  prepare.prepare(source, BASE, str(tmp_path / "out"), part_bytes=30_000)
  dataset = read(tmp_path / "out", ghost_val_sets=("manual",), shuffle_window_bytes=10**9)
  by_id = {document.id: document.text for document in source.documents}
  held_out = sum(entry.held_out for entry in dataset.summary())
  found = {}
  while True:
    batch = next(dataset.train)
    for row, slot in np.argwhere((batch.document_BS >= 0) & (batch.epoch_B == 0)[:, None]):
      here = batch.arrays["inputs_segmentation"][row] == slot + 1
      tokens = batch.arrays["inputs"][row][here]
      found.setdefault(int(batch.document_BS[row, slot]), []).append((int(batch.offset_BS[row, slot]), tokens))
    if (batch.epoch_B > 0).all():
      break
  assert len(found) == len(source) - held_out - len(dataset.copies)
  for number, chunks in found.items():
    chunks.sort(key=lambda chunk: (chunk[0], chunk[1][0] != 256))
    text = bytes(int(token) for _, tokens in chunks for token in tokens if token < 256)
    assert text == by_id[dataset.document_id(number)]


def test_copies_of_held_out_documents_are_left_out_of_prepared_data(tmp_path):
  texts = [b"text number %d of some length" % n for n in range(40)]
  documents = [Document("a", f"copy{n}", 0, text) for n, text in enumerate(texts)]
  documents += [Document("words", f"f{n}", 0, text) for n, text in enumerate(texts)]
  prepare.prepare(data.DocumentList(documents, ("a", "words")), BASE, str(tmp_path / "out"))
  dataset = read(tmp_path / "out", max_target_length=31)
  held_out = {n - 40 for n in dataset.parts[0].split.pool("words", 99)}
  assert 3 < len(held_out) == len(dataset.copies) and "left out" in dataset.notes()[-1]
  trained = {int(n) for _ in range(60) for n in next(dataset.train).document_BS.ravel() if n >= 0}
  assert trained == set(range(80)) - held_out - {n + 40 for n in held_out}


def test_a_tokenizer_that_normalizes_keeps_the_places(tmp_path):
  import sentencepiece

  lines = [f"the  river {n} keeps  é under the stone" for n in range(60)]
  with open(tmp_path / "sp.model", "wb") as model:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(lines), model_writer=model, vocab_size=290, byte_fallback=True, minloglevel=2
    )
  keys = dict(tokenizer_type="sentencepiece", tokenizer_path=str(tmp_path / "sp.model"), max_target_length=7)
  documents = [Document("words", f"f{n}", 0, " ".join(lines[n : n + 3]).encode()) for n in range(57)]
  source = data.DocumentList(documents, ("words",))
  prepare.prepare(source, dataclasses.replace(BASE, **keys), str(tmp_path / "out"))
  direct = data.make_dataset(
    source, dataclasses.replace(BASE, **keys), tokenizer=load_tokenizer("sentencepiece", keys["tokenizer_path"])
  )
  segments = [segments_of_an_epoch(dataset) for dataset in (direct, read(tmp_path / "out", **keys))]
  assert segments[0] == segments[1] and len({offset for _, offset in segments[0]}) > 10


def byte_level(folder, normalizer=None, add_prefix_space=False):
  """Keys of a byte-level tokenizer without merges, with a table of the bytes of its tokens."""
  alphabet = {letter: n for n, letter in enumerate(byte_level_alphabet())}
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet | {"<s>": 256, "</s>": 257}, []))
  inner.add_special_tokens(["<s>", "</s>"])
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
  if normalizer:
    inner.normalizer = normalizer
  inner.save(str(folder / "tokenizer.json"))
  return {"tokenizer_type": "huggingface", "tokenizer_path": str(folder / "tokenizer.json"), "max_target_length": 16}


@pytest.mark.parametrize(
  "more", [{"normalizer": tokenizers.normalizers.NFC()}, {"add_prefix_space": True}], ids=lambda more: next(iter(more))
)
def test_a_tokenizer_with_a_table_that_changes_text_keeps_the_places(more, tmp_path):
  """Half of the texts have decomposed letters, so that blocks with and without sizes are read together."""
  keys = byte_level(tmp_path, **more)
  towns = [("plain", "zurich"), ("words", "zu\u0308rich")]
  documents = [
    Document(name, f"f{n}", 0, f"{town}, text {n} of words".encode()) for name, town in towns for n in range(20)
  ]
  source = data.DocumentList(documents, ("plain", "words"))
  cfg = dataclasses.replace(BASE, **keys)
  prepare.prepare(source, cfg, str(tmp_path / "out"))
  tokenizer = load_tokenizer("huggingface", keys["tokenizer_path"])
  assert tokenizer.byte_table is not None
  direct = data.make_dataset(source, cfg, tokenizer=tokenizer)
  segments = [segments_of_an_epoch(dataset) for dataset in (direct, read(tmp_path / "out", **keys))]
  assert segments[0] == segments[1]
  for document, offset in segments[0]:  # a row is the begin token and 15 bytes of the changed text
    more_bytes = -1 if "add_prefix_space" in more else int(document.domain == "words")
    assert offset in (0, 15 + more_bytes)


def segments_of_an_epoch(dataset):
  """{(id, offset in bytes)} of the first epoch."""
  found = set()
  while True:
    batch = next(dataset.train)
    for row, slot in np.argwhere((batch.document_BS >= 0) & (batch.epoch_B == 0)[:, None]):
      found.add((dataset.document_id(batch.document_BS[row, slot]), int(batch.offset_BS[row, slot])))
    if (batch.epoch_B > 0).all():
      return found


PROGRAM = """
import json, resource, sys
import numpy as np
from maxghost.data import prepared
from maxghost.data.packing import Layout
from maxghost.data.split import Split
from maxghost.data.tokenizers import ByteTokenizer
from maxghost.data.windows import Order, Windows

folder, touch = sys.argv[1:]
source = prepared.PreparedSource(folder, ByteTokenizer())
split = Split(source, ("b",), 0.2, 0)
units = prepared.PreparedUnits(source, split, ByteTokenizer(), Layout(256, 8), "error")
prepared.read_records = lambda readers, path, records: [bytes(2 * 64 * 20)] * len(records)
order = Order([units.all_units()], 0)
windows = Windows(units, order, name="", seed=0, num_lanes=4, window_bytes=1 << 18)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rows = sum(len(windows.make(lane, 1, 9)[0]) for lane in range(int(touch)))
assert source.document_id(len(source) - 1).offset == 0
print(json.dumps([len(source), rows, before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


def sparse_index(folder, num_documents, per_block=64, tokens=20):
  """An index as large as that of so many documents; the columns are sparse files that hold zeros but for a few."""
  (folder / "index").mkdir(parents=True)
  num_blocks = num_documents // per_block
  sizes = dict.fromkeys(prepared.DOCUMENT_COLUMNS, num_documents) | dict.fromkeys(prepared.BLOCK_COLUMNS, num_blocks)
  for name, size in {**sizes, "path_end": 1, "path_domain": 1}.items():
    column = np.lib.format.open_memmap(folder / "index" / f"{name}.npy", "w+", prepared.COLUMNS[name], (size,))
    if name == "block_first":
      column[:] = np.arange(num_blocks) * per_block
    if name == "path_end":
      column[:] = 4
  (folder / "index" / "paths.bin").write_bytes(b"path")
  meta = {
    "version": 1,
    "fingerprint": "0",
    "domains": ["a", "b"],
    "domain_documents": {"a": num_documents, "b": 0},
    "domain_bytes": {"a": num_documents * tokens, "b": 0},
    "tokens": num_documents * tokens,
    "tokenizer": {"type": "byte", "path": "", "copied": False, "fingerprint": "byte", "vocab_size": 259},
    "shards": [{"name": "s", "sha256": "0" * 64, "size": 1, "blocks": num_blocks}],
  }
  (folder / prepared.INDEX_FILE).write_text(json.dumps(meta))
  return num_blocks


def test_a_hundred_million_documents_cost_a_worker_no_memory(tmp_path):
  used = {}
  for num_documents in (100_000_000, 1_000_000):
    folder = tmp_path / str(num_documents)
    sparse_index(folder, num_documents)
    # The only pages written are those of block_first; token ends of the windows read are given by arithmetic.
    program = PROGRAM.replace(
      "before =",
      "class Ends:\n  def __getitem__(self, at):\n"
      "    at = np.arange(*at.indices(len(source))) if isinstance(at, slice) else at\n    return (at + 1) * 20\n"
      "source.columns['token_end'] = Ends()\nbefore =",
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder), "4"], capture_output=True, text=True, check=True)
    length, rows, before, after = json.loads(done.stdout)
    assert length == num_documents and rows > 1000
    used[num_documents] = (before, after)
  (before, after), (small_before, small_after) = used[100_000_000], used[1_000_000]
  assert after - before < small_after - small_before + 40_000, "kilobytes for windows, whatever the size of the index"
  assert before - small_before < 20_000, "kilobytes for opening it"


def test_a_prepared_folder_is_found_and_its_keys_are_checked(tmp_path, monkeypatch):
  out = tmp_path / "out"
  prepare.prepare(synthetic.load(domain_bytes=20_000), BASE, str(out))
  monkeypatch.setenv("HOME", str(tmp_path))
  assert len(read("~/out").source) == len(read(out).source)
  with pytest.raises(ConfigError, match=rf"words={out}, .* has domains of its own; write dataset_files=\[{out}\]"):
    read(out, dataset_files=(f"words={out}",))
  with pytest.raises(ConfigError, match="dataset_domain_bytes=9 works with"):
    read(out, dataset_domain_bytes=9)
  with pytest.raises(ConfigError, match="dataset_domains names 'words' twice"):
    read(out, dataset_domains=("words", "words"))


def test_names_of_files_that_are_no_utf8_stay_as_they_are(tmp_path):
  raw = tmp_path / "raw"
  raw.mkdir()
  for n in range(9):
    (raw / os.fsdecode(b"caf\xe9%d.txt" % n)).write_text(f"document {n} " * 9)
  raw = raw.rename(tmp_path / os.fsdecode(b"\xe9"))
  with open(raw / "a.parquet", "wb") as file:
    pq.write_table(pa.table({"text": ["a row"]}), file)
  with open(raw / "b.jsonl.zst", "wb") as file, pa.CompressedOutputStream(file, "zstd") as out:
    out.write(b'{"text": "a line"}')
  cfg = dataclasses.replace(BASE, dataset_type="text", dataset_files=(f"words={raw}/*",))
  source = open_source(cfg, 0)
  prepare.prepare(source, cfg, str(out := tmp_path / os.fsdecode(b"\x80")))
  prepared_source = read(out).source
  assert prepared_source.texts(np.arange(11)) == source.texts(np.arange(11)) and b"a row" in source.texts(np.arange(11))
  assert [prepared_source.document_id(n) for n in range(11)] == [source.document_id(n) for n in range(11)]


def test_what_a_corrupt_document_asks_for_is_done(tmp_path):
  """Skipping it continues in the same folder, and so does repairing it, as long as no part is complete."""
  texts, out = [json.dumps({"text": f"document {n} " * 9}) for n in range(40)], str(tmp_path / "out")
  file = tmp_path / "texts.jsonl"
  cfg = dataclasses.replace(BASE, dataset_type="text", dataset_files=(f"words={file}",))
  for damaged, line, part_bytes in (([*texts[:9], "{"], 10, 10**6), ([*texts, "{"], 41, 500)):
    file.write_text("\n".join(damaged))
    with pytest.raises(ConfigError, match=rf"line {line}.*on_corrupt=skip"):
      prepare.prepare(open_source(cfg, 0), cfg, out, part_bytes=part_bytes)
  skipping, seen = dataclasses.replace(cfg, on_corrupt="skip"), []
  times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "shards").glob("*.array_record")}
  prepare.prepare(open_source(skipping, 0), skipping, out, part_bytes=500, progress=seen.append)
  assert len(times) > 3 and all(path.stat().st_mtime_ns == time for path, time in times.items())
  assert [sum(part[name] for part in seen) for name in ("documents", "corrupt")] == [40, 1]
  with pytest.raises(ConfigError, match=r"line 41.*on_corrupt=skip"):
    prepare.prepare(open_source(cfg, 0), cfg, out, part_bytes=500)
  file.write_text("\n".join(texts))
  with pytest.raises(ConfigError, match="give another --output, or remove this folder"):
    prepare.prepare(open_source(cfg, 0), cfg, out, part_bytes=500)


def test_a_damaged_job_is_one_line(tmp_path):
  source, out = synthetic.load(domain_bytes=20_000), tmp_path / "out"
  prepare.prepare(source, BASE, str(out))
  for text in ("{", "[]", "{}"):
    (out / "job.json").write_text(text)
    with pytest.raises(ConfigError, match=r"job.json is damaged|other data or settings"):
      prepare.prepare(source, BASE, str(out))


def test_another_size_of_the_bpe_is_refused(tmp_path, capsys):
  command = ["prepare", "dataset_type=synthetic", "dataset_domain_bytes=20000", "ghost_val_sets=words", "--output"]
  command += [str(tmp_path / "out"), "--train_bpe"]
  assert data_command.main([*command, "300"]) == 0
  assert data_command.main([*command, "280"]) == 2
  assert data_command.main([*command, "9" * 20]) == 2
  assert "--train_bpe 99999999999999999999: at most 1000000000" in (error := capsys.readouterr().err)
  assert "tokenizer.json has 300 ids already, not --train_bpe 280; give another --output" in error
  assert data_command.main([*command, "320"]) == 0
  assert "keeps the 300 ids of" in capsys.readouterr().out


def test_a_prepared_corpus_keeps_all_files_of_its_tokenizer(tmp_path):
  """The ranks that a saved tiktoken encoding names, and the special tokens that tokenizer_config.json names."""
  tiktoken = pytest.importorskip("tiktoken")
  source = synthetic.load(domain_bytes=20_000)
  prepare.train_bpe(source, 300, str(tmp_path / "hf" / "tokenizer.json"))
  (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|bos|>"}))
  ranks = "".join(f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256))
  (tmp_path / "bytes.tiktoken").write_text(ranks)
  (tmp_path / "saved").mkdir()
  load_tokenizer("tiktoken", str(tmp_path / "bytes.tiktoken")).save(tmp_path / "saved")
  assert tiktoken
  for kind, path in (("huggingface", "hf"), ("tiktoken", "saved/bytes.encoding.json"), ("tiktoken", "bytes.tiktoken")):
    out, before = tmp_path / f"out-{path.replace('/', '-')}", load_tokenizer(kind, str(tmp_path / path))
    cfg = dataclasses.replace(BASE, tokenizer_type=kind, tokenizer_path=str(tmp_path / path))
    made = prepare.prepare(source, cfg, str(out))["tokenizer"]
    after = load_tokenizer(kind, str(out / made["path"]))
    assert made["copied"] and after.fingerprint == before.fingerprint
    assert (after.bos_id, after.eos_id) == (before.bos_id, before.eos_id)


class Deadly(data.DocumentList):
  """Ends the process that reads it, as the system does when memory runs out."""

  def texts(self, indices):
    os._exit(9)


@pytest.mark.parametrize("early", [False, True])
def test_a_worker_that_is_killed_is_one_line(early, tmp_path, monkeypatch):
  """Early: before all parts were handed out."""
  submit = prepare.ProcessPoolExecutor.submit
  if early:
    wait = lambda pool, *work: (future := submit(pool, *work)).exception() and future  # noqa: E731
    monkeypatch.setattr(prepare.ProcessPoolExecutor, "submit", wait)
  source = Deadly([Document("words", "p", n, b"text " * 9) for n in range(9)], ("words",))
  with pytest.raises(OSError, match=r"a process was ended from outside.*fewer --workers than 2"):
    prepare.prepare(source, BASE, str(tmp_path / "out"), num_workers=2, part_bytes=100)


@pytest.mark.parametrize(("limit", "file"), [(2000, "shards/"), (140_000, "out: ")])
def test_a_full_disk_is_one_line_and_the_same_command_continues(tmp_path, capsys, limit, file):
  """ArrayRecord tells of it by a RuntimeError; the index, of which single files are larger than a shard, by an OSError
  without a name. No file may be larger than `limit`."""
  texts, out = tmp_path / "a.jsonl", tmp_path / "out"
  texts.write_text('{"text": "x"}\n' * 20_000)
  command = ["prepare", "dataset_type=text", f"dataset_files=[a={texts}]", "ghost_val_sets=a", "--output", str(out)]
  command += ["--part_bytes", "4000"]
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
  try:
    code = data_command.main(command)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  said = capsys.readouterr().err
  assert code == 1 and said.count("\n") == 1 and "File too large" in said and file in said, said
  assert data_command.main(command) == 0 and data_command.main(["verify", str(out)]) == 0


def test_a_preparation_of_other_columns_is_not_taken_up(tmp_path):
  """Their sizes are the same, and an ArrayRecord file has one fingerprint."""
  records = [{"text": "aa bb " * 20, "upper": "AA BB " * 20, "l1": "en", "l2": "de"} for _ in range(9)]
  writer = array_record_module.ArrayRecordWriter(str(tmp_path / "r.array_record"), "group_size:1")
  for record in records:
    writer.write(json.dumps(record).encode())
  writer.close()
  keys = {"dataset_type": "grain", "dataset_files": (f"r={tmp_path}/r.array_record",), "ghost_val_sets": ("r",)}

  def make(**more):
    cfg = dataclasses.replace(BASE, **keys, **more)
    return prepare.prepare(open_source(cfg, 0), cfg, str(tmp_path / "out"))

  make(document_fields=("lang=l1",))
  with pytest.raises(ConfigError, match=r"prepared from other data or settings \(fields, columns\)"):
    make()
  for more in ({"document_fields": ("lang=l2",)}, {"document_fields": ("lang=l1",), "train_data_columns": ("upper",)}):
    with pytest.raises(ConfigError, match=r"prepared from other data or settings \(columns\)"):
      make(**more)
  make(document_fields=("lang=l1",))


def test_only_copies_in_the_domains_of_the_run_count(tmp_path):
  texts = [b"text %d of some words" % n for n in range(12)]
  documents = [Document("a", f"a{n}", 0, text) for n, text in enumerate(texts)]
  documents += [Document(domain, f"{domain}{n}", 0, texts[n]) for domain in "bc" for n in range(3)]
  prepare.prepare(data.DocumentList(documents, ("a", "b", "c")), BASE, str(tmp_path / "out"))
  keys = {"ghost_val_sets": ("a",), "ghost_val_fraction": 0.5, "max_target_length": 8}
  both, alone = (read(tmp_path / "out", **keys, dataset_domains=names) for names in (("a", "c"), ("a",)))
  held_out = alone.summary()[0].held_out
  assert 0 < held_out < 12 and alone.copies == () and alone.notes() == [] and 0 < len(both.copies) <= 3
  assert alone.num_train_documents == 12 - held_out
  assert both.num_train_documents == 15 - held_out - len(both.copies)
  read(tmp_path / "out", **keys, dataset_domains=("a",), ghost_val_copies="error")


def test_a_part_of_a_text_is_found_in_what_a_normalizing_tokenizer_kept(tmp_path):
  """A ligature of three bytes became two letters; places count the bytes that were tokenized."""
  inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate("fiabc")}, []))
  inner.normalizer, inner.decoder = tokenizers.normalizers.NFKC(), tokenizers.decoders.Fuse()
  inner.save(str(tmp_path / "tokenizer.json"))
  keys = {"tokenizer_type": "huggingface", "tokenizer_path": str(tmp_path / "tokenizer.json"),
          "add_bos": False, "add_eos": False, "ghost_val_sets": ("a",), "ghost_val_fraction": 0.5}  # fmt: skip
  text = "\ufb01a\ufb01bac" * 2
  source = data.DocumentList([Document("a", f"a{n}", 0, text.encode()) for n in range(9)], ("a",))
  prepare.prepare(source, dataclasses.replace(BASE, **keys), str(tmp_path / "out"))
  part = read(tmp_path / "out", **keys, max_target_length=4).parts[0]
  cut = part.cutter(0)
  assert cut(0, 2**62) == "fiafibac" * 2
  assert [cut(4, 10), cut(10, 14), cut(0, 4)] == ["fibac", "fia", "fia"]
  rows = packing.pack(part.encode_documents(np.array([0])), part.layout, lambda size, _: np.arange(size))
  places = sorted(rows.offset.tolist())
  parts = [cut(begin, end) for begin, end in zip(places, [*places[1:], 2**62], strict=True)]
  assert "".join(parts) == "fiafibac" * 2 and max(map(len, parts)) <= 5


def test_one_command_at_a_time_writes_a_folder(tmp_path):
  """Two would write the same files, and the first to end tell of a whole corpus that the other one damages."""
  source, out = synthetic.load(("words",), 5000), str(tmp_path / "out")
  refused = []

  def again(_: dict) -> None:
    with pytest.raises(ConfigError, match=r"another command writes .*out; wait for its end") as caught:
      prepare.prepare(source, BASE, out)
    refused.append(caught.value)

  prepare.prepare(source, BASE, out, progress=again)
  assert refused and not prepare.verify(out)
  prepare.prepare(source, BASE, out)


def test_no_bpe_is_written_into_a_folder_of_other_files(tmp_path, capsys):
  (tmp_path / "notes.txt").write_text("own")
  command = ["prepare", "dataset_type=synthetic", "dataset_domain_bytes=20000", "ghost_val_sets=words", "--output"]
  assert data_command.main([*command, str(tmp_path), "--train_bpe", "300"]) == 2
  assert "is not empty and holds no prepared corpus" in capsys.readouterr().err
  assert [*files_of(tmp_path)] == ["notes.txt"]
