"""The built-in sources: the standard library of the running Python, and synthetic text."""

import ast
import dataclasses
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from maxghost import config, data
from maxghost.data.__main__ import main
from maxghost.data.sources import stdlib, synthetic
from maxghost.training import console

ROOT = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="module")
def library():
  return stdlib.load()


def test_the_four_domains_have_text_in_path_order(library):
  assert library.domains == ("code", "docstrings", "manual", "tables")
  for domain in library.domains:
    documents = [d for d in library.documents if d.domain == domain]
    assert sum(len(d.text) for d in documents) > 300_000
    assert [(d.path, d.offset) for d in documents] == sorted({(d.path, d.offset) for d in documents})
  assert all(d.text.decode("utf-8") for d in library.documents)


def test_a_docstring_is_the_bytes_at_its_offset(library):
  docstrings = [d for d in library.documents if d.domain == "docstrings"]
  for document in docstrings[::97]:
    raw = (ROOT / document.path).read_bytes()
    assert raw[document.offset : document.offset + len(document.text)] == document.text
  path = "textwrap.py"
  tree = ast.parse((ROOT / path).read_text())
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
  known = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, kinds)} - {None}
  ours = {ast.literal_eval(f'"""{d.text.decode()}"""') for d in docstrings if d.path == path}
  assert len(ours) > 5 and ours <= known


def test_code_has_no_docstrings_but_the_rest_of_the_module(library):
  (module,) = [d for d in library.documents if (d.domain, d.path) == ("code", "textwrap.py")]
  tree = ast.parse(module.text)
  assert not ast.get_docstring(tree) and b"def fill(" in module.text and b"import re" in module.text
  paths = {d.path for d in library.documents if d.domain == "code"}
  assert {"test", "encodings", "site-packages", "pydoc_data"}.isdisjoint(p for path in paths for p in Path(path).parts)


def test_manual_and_tables(library):
  manual = {d.path: d for d in library.documents if d.domain == "manual"}
  assert b"assert" in manual["pydoc_data/topics.py:assert"].text
  assert "encodings/cp037.py" in {d.path for d in library.documents if d.domain == "tables"}


def test_the_cap_takes_whole_documents_in_order(library):
  capped = stdlib.load(("tables", "code"), 200_000)
  assert capped.domains == ("tables", "code")
  tables = [d for d in capped.documents if d.domain == "tables"]
  everything = [d for d in library.documents if d.domain == "tables"]
  assert tables == everything[: len(tables)]
  size = sum(len(d.text) for d in tables)
  assert size <= 200_000 < size + len(everything[len(tables)].text)
  with pytest.raises(config.ConfigError, match="dataset_domain_bytes=10 is below the first document of domain"):
    stdlib.load(("manual",), 10)


def test_what_a_python_lacks_is_named(tmp_path, monkeypatch):
  (tmp_path / "module.py").write_text('"""What this module is about, in prose."""\n\nx = 1\n')
  monkeypatch.setitem(sys.modules, "pydoc_data", None)
  monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
  with pytest.raises(config.ConfigError) as caught:
    stdlib.load(("code", "manual"), root=tmp_path)
  assert "dataset_domains has 'manual', but this Python" in str(caught.value)
  assert "has no pydoc_data.topics; use dataset_domains=[code]" in str(caught.value)
  with pytest.raises(config.ConfigError, match=r"'tables', but .* has no source files"):
    stdlib.load(("tables",), root=tmp_path)
  with pytest.raises(config.ConfigError, match=r"'manul'.*did you mean 'manual'"):
    stdlib.load(("manul",))
  only = stdlib.load(("code", "docstrings"), root=tmp_path)
  assert [(d.domain, d.path, d.offset, d.text) for d in only.documents] == [
    ("code", "module.py", 0, b'""""""\n\nx = 1\n'),
    ("docstrings", "module.py", 3, b"What this module is about, in prose."),
  ]


def test_the_fingerprint_follows_the_text(tmp_path):
  (tmp_path / "module.py").write_text("x = 1\n")
  before = stdlib.load(("code",), root=tmp_path).fingerprint
  assert stdlib.load(("code",), root=tmp_path).fingerprint == before
  (tmp_path / "module.py").write_text("x = 2\n")
  assert stdlib.load(("code",), root=tmp_path).fingerprint != before


def test_the_default_run_starts_soon_and_packs_well():
  cfg = dataclasses.replace(config.load().data, max_target_length=1024, per_device_batch_size=12)
  start = time.process_time()
  dataset = data.load_dataset(cfg)
  batch = next(dataset.train)
  dataset.validation_batch(0, 2)
  assert time.process_time() - start < 3.0
  assert batch.arrays["inputs"].shape == (12, 1024) and batch.document_BS.shape == (12, 32)
  assert dataset.train.packing_efficiency > 0.98
  assert any("byte-identical" in note for note in dataset.notes()) or not dataset.copies
  assert [entry.line for entry in dataset.summary()][2].startswith("manual: ")
  assert dataset.summary()[0]._replace(documents=1, bytes=5, held_out=1, held_out_bytes=5).line == (
    f"{dataset.summary()[0].domain}: 1 document, 5 bytes (1, 5 bytes held out)"
  )


def test_synthetic_domains_differ_and_follow_the_seed():
  source = synthetic.load()
  assert source.domains == ("words", "digits", "brackets", "noise") and len(source) == 1024
  alphabets = {domain: set() for domain in source.domains}
  for document in source.documents:
    alphabets[document.domain] |= set(document.text)
  assert alphabets["brackets"] == set(b"()") and alphabets["digits"] == set(b"0123456789 ")
  assert len(alphabets["words"]) < 27 < len(alphabets["noise"])
  assert synthetic.load(seed=0).fingerprint == source.fingerprint != synthetic.load(seed=1).fingerprint
  with pytest.raises(config.ConfigError, match=r"'digit'.*did you mean 'digits'"):
    synthetic.load(("digit",))


@pytest.mark.parametrize("settings", [[], ["ghost_enabled=false"], ["dataset_domains=[digits,noise]"]])
def test_synthetic_text_needs_no_further_key(settings):
  dataset = data.load_dataset(config.load(None, "dataset_type=synthetic", *settings).data)
  assert next(dataset.train).document_BS.max() >= 0
  assert dataset.val_domain == dataset.source.domains[0] and len(dataset.validation_rows())


def test_held_out_rows_that_repeat_are_said():
  keys = "dataset_type=synthetic", "dataset_domain_bytes=9000", "ghost_val_sets=[words,digits]", "max_target_length=64"
  cfg = config.load(None, *keys, "per_device_batch_size=4")
  dataset = data.load_dataset(cfg.data)
  words, digits = (len(dataset.validation_rows(name)) for name in ("words", "digits"))
  fits = {"eval_steps": words // 8, "ghost_val_batch_size": min(words, digits)}
  said = lambda **keys: list(console.repeated_rows(config.replace(cfg, **{**fits, **keys}), 2, dataset))  # noqa: E731
  assert said() == said(eval_steps=10**6, eval_interval=-1) == []
  many = f"eval_steps={words} batches of 8 rows: domain 'words' has {words} held-out rows, so some count more than once"
  assert said(eval_steps=words) == [many]
  more = max(words, digits) + 1
  assert [line.split(" has ")[0] for line in said(ghost_val_batch_size=more)] == [
    f"ghost_val_batch_size={more}: domain '{name}'" for name in ("words", "digits")
  ]
  assert said(ghost_val_batch_size=more, ghost_enabled=False) == []


def test_a_run_without_scores_and_evaluations_may_hold_nothing_out(capsys):
  keys = "dataset_type=synthetic", "dataset_domain_bytes=9000", "ghost_val_fraction=0", "ghost_enabled=false"
  cfg = config.load(None, *keys, "eval_interval=-1")
  assert list(console.repeated_rows(cfg, 1, data.load_dataset(cfg.data))) == []
  assert main(["show", *keys, "eval_interval=-1"]) == 0
  assert "first window" in (said := capsys.readouterr().out) and "validation" not in said
