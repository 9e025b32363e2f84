"""Help texts, the listing of values, and configs/base.yml."""

import contextlib
import dataclasses
import io
import re

import pytest
import yaml

from maxghost import config
from maxghost.config.help import about, comments, limits, list_values, print_help
from maxghost.config.schema import SECTIONS


def printed(key=None, terminal=False, usage=""):
  class Stream(io.StringIO):
    def isatty(self):
      return terminal

  with contextlib.redirect_stdout(stream := Stream()):
    print_help(key, usage)
  return re.sub("\x1b\\[[0-9;]*m", "", stream.getvalue())


@pytest.mark.parametrize("terminal", [False, True])
def test_help_lists_every_key_in_its_section(terminal, monkeypatch):
  monkeypatch.setenv("COLUMNS", "150")
  text = printed(terminal=terminal, usage="usage: this")
  words = text.split()
  assert text.startswith("usage: this")
  for name, field in config.fields().items():
    assert words.count(name) >= 1, name
    assert about(field).split()[0] in words
  order = [text.index(f"\n{name}") for name in ("run", "model", "data", "optimizer", "ghost", "checkpoint")]
  assert order == sorted(order)
  assert text.index("\nghost") < text.index("ghost_log_period") < text.index("\ncheckpoint")
  assert "[int; 1 or more; default 200]" in text


def test_help_of_one_key_tells_type_default_limits_and_section():
  assert printed("opt_type").splitlines() == [
    "opt_type",
    "  optimizer; muon = Muon for matrices, AdamW for embeddings, head, norms, biases",
    "  type:    str",
    "  default: adamw",
    "  limits:  " + "one of " + ", ".join(config.fields()["opt_type"].metadata["choices"]),
    "  section: optimizer: AdamW, SGD or Muon and their schedule.",
    "  example: opt_type=" + [*config.fields()["opt_type"].metadata["choices"]][-1],
  ]
  assert "limits:  from 0 to 0.999" in printed("dropout_rate")
  assert "example" not in printed("ghost_val_sets")  # the default, empty, shows nothing
  assert "type:    list of str" in printed("ghost_exclude") and "limits:  none" in printed("ghost_exclude")
  with pytest.raises(config.ConfigError, match="unknown key 'opttype'; did you mean 'opt_type'"):
    printed("opttype")


def test_base_yml_has_the_defaults_and_explains_every_key_with_its_limits():
  path = config.config_dir() / "base.yml"
  text = path.read_text(encoding="utf-8")
  assert list(yaml.safe_load(text)) == list(config.fields())  # also for readers that are not ours
  loaded = config.load_with_origins(path)
  assert loaded.config == config.Config() and loaded.notes == ()
  assert not [key for key, origin in loaded.origins.items() if not origin.startswith(f"{path}:")]
  lines = text.splitlines()
  assert max(map(len, lines)) <= 120
  assert lines[lines.index("opt_type: adamw") - 1] == (
    "# optimizer; muon = Muon for matrices, AdamW for embeddings, head, norms, biases (one of adamw, sgd, muon)"
  )
  for name, cls in SECTIONS.items():
    assert f"# ---- {name}: {cls.__doc__}" in lines
    for item in dataclasses.fields(cls):
      bound = limits(item)
      assert about(item) and comments()[item.name] == about(item) + (f" ({bound})" if bound else ""), item.name


def test_listing_shows_value_and_origin_and_reads_back(tmp_path):
  path = tmp_path / "a.yml"
  path.write_text('log_period: 7\nrun_name: "a b\\n c"\n', encoding="utf-8")
  loaded = config.load_with_origins(path, "steps=9", "ghost_exclude=*x,y")
  rows = {line.split(":")[0]: line for line in list_values(loaded).splitlines()}
  assert rows["steps"].startswith("steps: 9 ") and rows["steps"].endswith("# command line")
  assert rows["log_period"].endswith(f"# {path}:1") and rows["head_dim"].endswith("# default")
  again = tmp_path / "again.yml"
  again.write_text(list_values(loaded), encoding="utf-8")
  assert config.load(again) == loaded.config
