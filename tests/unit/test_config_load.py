"""Reading, overriding, replacing and saving configurations."""

import dataclasses
import difflib
import os
import pickle
import re
import string
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxghost import config
from maxghost.config import renamed, values
from maxghost.config.help import about
from maxghost.config.schema import SECTIONS


def problems_of(*arguments, **keywords):
  with pytest.raises(config.ConfigError) as caught:
    config.load(*arguments, **keywords)
  return list(caught.value.problems)


def choices_of(key):
  return ", ".join(config.fields()[key].metadata["choices"])


def write(path, text):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text, encoding="utf-8")
  return str(path)


def values_of(field):
  """A strategy of valid values for a key: its type, choices and bounds. Cross-key rules are not looked at."""
  choices, low, high = (field.metadata[name] for name in ("choices", "minimum", "maximum"))
  kind = field.type
  if values.is_tuple(kind):
    return st.lists(st.sampled_from(choices) if choices else st.text(), max_size=4).map(tuple)
  if choices:
    return st.sampled_from(choices)
  return {
    bool: st.booleans(),
    int: st.integers(0 if low is None else low, 2**40 if high is None else high),
    float: st.floats(low, high, allow_nan=False, allow_infinity=False),
    str: st.text(st.characters(exclude_categories=["Cs"])),
  }[kind]


# Keys that a rule across keys ties to others stay at their defaults here; so does model_name, which names a file.
TIED = {
  "model_name", "base_num_query_heads", "base_num_kv_heads", "head_dim", "mlp_activations", "vocab_size",
  "tokenizer_type", "warmup_steps_fraction", "wsd_decay_steps_fraction", "lr_schedule_type", "eval_interval",
  "ghost_direction", "ghost_curvature", "opt_type", "ghost_val_fraction", "ghost_enabled", "decoder_block",
  "trainable_position_size",
  "rope_type", "inhomogeneous_layer_cycle_interval", "attention_type", "sliding_window_size", "num_experts",
  "num_experts_per_tok", "load_balance_loss_weight", "objective", "chat_template_path", "distill_teacher", "lora_rank",
  "lora_weight_qtype", "lora_restore_path",
}  # fmt: skip
SIMPLE = [field for name, field in config.fields().items() if name not in TIED]


@st.composite
def changes(draw):
  chosen = draw(st.lists(st.sampled_from(SIMPLE), min_size=1, max_size=6, unique_by=lambda field: field.name))
  return {field.name: draw(values_of(field)) for field in chosen}


def try_replace(changed):
  """The changed configuration, or None where a rule across keys forbids it."""
  try:
    return config.replace(config.load(), **changed)
  except config.ConfigError:
    return None


@settings(max_examples=150, deadline=None)
@given(changes())
def test_saved_configuration_reads_back_equal(tmp_path_factory, changed):
  cfg = try_replace(changed)
  if cfg is None:
    return
  path = tmp_path_factory.mktemp("saved") / "config.yml"
  config.save(cfg, path)
  again = config.load(path)
  assert again == cfg
  for key, value in changed.items():
    assert again.flat()[key] == value and type(again.flat()[key]) is type(value)


@pytest.mark.parametrize(
  "text", ["\x85", "a\nb", "\r", "\u2028 x", "null", "", " a", "1e3", "~", "\t", "\ufeff", "#", "\U0001f47b"]
)
def test_awkward_texts_read_back_equal(tmp_path, text):
  cfg = config.replace(config.load(), run_name=text, ghost_exclude=(text, "b,c"))
  config.save(cfg, tmp_path / "config.yml")
  assert config.load(tmp_path / "config.yml") == cfg
  assert all(line.isprintable() or "\t" in line for line in values.to_yaml("run_name", text).splitlines())


def test_random_changes_are_mostly_valid():
  """The round trip above leaves out what a rule forbids; it would prove nothing if rules forbade nearly all."""
  seen = []

  @settings(max_examples=60, deadline=None, database=None, derandomize=True)
  @given(changes())
  def collect(changed):
    seen.append(try_replace(changed) is not None)

  collect()
  assert sum(seen) > 0.5 * len(seen)


def test_defaults_base_file_and_sparse_file_agree(tmp_path):
  assert config.load() == config.Config()
  assert config.load(config.config_dir() / "base.yml") == config.Config()
  assert config.load(write(tmp_path / "empty.yml", "# nothing\n")) == config.Config()
  sparse = config.load(write(tmp_path / "sparse.yml", "steps: 7\nhead_dim: 24\n"))
  assert config.differing_keys(config.Config(), sparse) == {"steps": (200, 7), "head_dim": (64, 24)}


def test_model_file_over_yaml_and_command_line_over_both(tmp_path):
  write(tmp_path / "models" / "tiny.yml", "base_emb_dim: 20\nbase_mlp_dim: 36\nbase_num_decoder_layers: 6\n")
  base = write(tmp_path / "mine.yml", "model_name: tiny\nbase_emb_dim: 28\nsteps: 13\nbase_num_decoder_layers: 4\n")
  loaded = config.load_with_origins(base, "base_mlp_dim=44")
  model = loaded.config.model
  assert (model.base_emb_dim, model.base_mlp_dim, model.base_num_decoder_layers) == (20, 44, 6)
  assert (loaded.config.run.steps, model.model_name) == (13, "tiny")
  origin = loaded.origins
  assert origin["base_emb_dim"] == f"{tmp_path}/models/tiny.yml:1"
  assert (origin["base_mlp_dim"], origin["steps"], origin["head_dim"]) == ("command line", f"{base}:3", "default")
  assert len(loaded.notes) == 1 and loaded.notes[0].startswith(f"base_emb_dim=28 ({base}:2) is overridden by 20")


def test_model_name_on_the_command_line_and_base_dir(tmp_path):
  write(tmp_path / "here" / "models" / "a.yml", "steps: 3\n")
  write(tmp_path / "there" / "models" / "a.yml", "steps: 5\n")
  base = write(tmp_path / "here" / "base.yml", "steps: 2\n")
  assert config.load(base, "model_name=a").run.steps == 3
  assert config.load(base, "model_name=a", base_dir=tmp_path / "there").run.steps == 5
  assert config.load("model_name=a", "steps=4", base_dir=tmp_path / "there").run.steps == 4
  assert problems_of(base, "model_name=b") == [
    "model_name=b (command line) has no file models/b.yml; there are " + ", ".join(["default", *shipped("a")])
  ]
  assert "did you mean 'a'" in problems_of(base, "model_name=a.yml")[0]


def shipped(*more):
  return sorted([*more, *(path.stem for path in (config.config_dir() / "models").glob("*.yml"))])


def test_every_shipped_model_file_loads():
  for name in shipped():
    assert config.load(f"model_name={name}").model.model_name == name


def test_saved_configuration_does_not_lay_the_model_file_again(tmp_path):
  write(tmp_path / "models" / "tiny.yml", "base_emb_dim: 20\nbase_mlp_dim: 36\n")
  cfg = config.load("model_name=tiny", "base_emb_dim=256", base_dir=tmp_path)  # back to the default
  config.save(cfg, tmp_path / "config.yml")
  assert config.load(tmp_path / "config.yml") == cfg
  # Named anew on the command line, the model file counts again.
  assert config.load(tmp_path / "config.yml", "model_name=tiny").model.base_emb_dim == 20
  write(tmp_path / "other.yml", "config_is_resolved: false\nmodel_name: tiny\n")
  assert config.load(tmp_path / "other.yml").model.base_emb_dim == 20


def test_values_take_the_type_of_their_key(tmp_path):
  cfg = config.load(
    "learning_rate=2e-4", "steps=1e3", "run_name=17", "packing=no", "dataset_domains=code, tables",
    "ghost_exclude=['a,b', c*]", "jax_cache_dir=", "adam_b1=0",
  )  # fmt: skip
  assert cfg.optimizer.learning_rate == 2e-4 and cfg.run.steps == 1000 and cfg.run.run_name == "17"
  assert cfg.data.packing == "none" and cfg.data.dataset_domains == ("code", "tables")
  assert cfg.ghost.ghost_exclude == ("a,b", "c*") and cfg.run.jax_cache_dir == ""
  assert type(cfg.run.steps) is int and type(cfg.optimizer.adam_b1) is float
  assert config.load("dataset_domains=").data.dataset_domains == ()
  assert config.load('sample_prompt="name": "x"').run.sample_prompt == '"name": "x"'
  path = write(tmp_path / "a.yml", "learning_rate: 2e-4\nghost_exclude:\n- p*\n- q\nrun_name: 'no'\n")
  cfg = config.load(path)
  assert (cfg.optimizer.learning_rate, cfg.ghost.ghost_exclude, cfg.run.run_name) == (2e-4, ("p*", "q"), "no")


@pytest.mark.parametrize(
  ("text", "told"),
  [
    ("steps=abc", "steps='abc' (command line) is not of type int"),
    ("steps=1.5", "steps='1.5' (command line) is not of type int"),
    ("steps=1__0", "steps='1__0' (command line) is not of type int"),
    ("steps=1_", "steps='1_' (command line) is not of type int"),
    ("steps='5'", "steps='5' (command line) is not of type int; remove the quotes"),
    ("steps=[1]", "steps=['1'] (command line) is not of type int"),
    ("steps=null", "steps='null' (command line) is not of type int"),
    ("steps=" + "9" * 5000, "is not of type int"),
    ('steps="7', "steps='\"7' (command line) is not of type int"),
    ("ghost_every=~", "ghost_every='~' (command line) is not of type int"),
    ("run_name=null", "run_name='null' (command line) is not of type str"),
    ("mlp_bias=1", "mlp_bias='1' (command line) is not of type bool"),
    ("learning_rate=nan", "learning_rate='nan' (command line) is not of type finite float"),
    ("learning_rate=1e999", "is not of type finite float"),
    ("ghost_exclude=[*a", "ghost_exclude (command line): '[*a' is not a YAML list; write a,b or quote the items"),
    ("ghost_exclude=[[a]]", "ghost_exclude=[['a']] (command line) is not of type list of str"),
    ("steps=0", "steps=0 (command line) is below the least allowed value 1"),
    ("adam_eps=0", "adam_eps=0.0 (command line) is below the least allowed value 1e-15"),
    ("dropout_rate=1", "dropout_rate=1.0 (command line) is above the greatest allowed value 0.999"),
    ("opt_type=adam", f"opt_type=adam (command line) is not one of {choices_of('opt_type')}; did you mean 'adamw'?"),
    (
      "mlp_activations=silo,linear",
      f"(command line) holds silo, which is not one of {choices_of('mlp_activations')}; did you mean 'silu'?",
    ),
    ("stepz=5", "unknown key 'stepz' (command line); did you mean 'steps'?"),
    ("layers=5", "did you mean 'scan_layers', 'base_num_decoder_layers' or 'mtp_num_layers'?"),
    ("Steps=5", "unknown key 'Steps' (command line); did you mean 'steps'?"),
    ("adam_b3=5", "unknown key 'adam_b3' (command line); did you mean 'adam_b1' or 'adam_b2'?"),
    ("qqq=5", "unknown key 'qqq' (command line)"),
    ("=5", "'=5' (command line) is not of the form key=value"),
  ],
)
def test_one_problem_one_line(text, told):
  (problem,) = problems_of(None, text)
  assert told in problem and "\n" not in problem
  if "did you mean" not in told:
    assert "did you mean" not in problem


def test_all_problems_of_all_sources_at_once(tmp_path):
  path = write(
    tmp_path / "bad.yml", "steps: x\nstepz: 4\nlog_period: 2\nlog_period: 3\nhead_dim: 7\nrun_name: {a: 1}\n"
  )
  assert problems_of(path, "log_period=0", "oops") == [
    f"log_period is given twice in {path}, in lines 3 and 4; remove one",
    "'oops' (command line) is not of the form key=value",
    f"steps='x' ({path}:1) is not of type int",
    f"unknown key 'stepz' ({path}:2); did you mean 'steps'?",
    f"run_name={{...}} ({path}:6) is not of type str",
    "log_period=0 (command line) is below the least allowed value 1",
    "head_dim=7 is odd, but the rotary embedding turns pairs; use 8",
  ]


@pytest.mark.parametrize(
  ("text", "told"),
  [
    ("steps: 3\nfoo: [1\nbar: 2\n", ":3 is not YAML: expected ',' or ']'"),
    ("steps: 3\n\tlog_period: 2\n", ":2 is not YAML"),
    ("a: 1\n---\nb: 2\n", " is not YAML"),
    ("- steps\n", " does not hold `key: value` lines"),
    ("steps\n", " does not hold `key: value` lines"),
    ("\x00", " is not YAML"),
    ("[" * 20_000, ""),
    ("run_name:\n", ":1) is not of type str"),
    ("ghost_exclude: &a [*a]\n", "ghost_exclude=[[[...]]] ("),
    ("config_is_resolved: treu\n", "config_is_resolved='treu' ("),
    ("model_name:\n", ":1) is not of type str"),
    ("dataset_mixture: {a: [1, 2]}\n", "dataset_mixture={...} ("),
    ("[steps, log_period]: 3\n", "unknown key '['steps', 'log_period']' ("),
  ],
)
def test_broken_yaml_is_one_line(tmp_path, text, told):
  (problem,) = problems_of(write(tmp_path / "broken.yml", text))
  assert told in problem and str(tmp_path / "broken.yml") in problem and "\n" not in problem


def test_missing_and_unreadable_files(tmp_path):
  write(tmp_path / "mine.yml", "steps: 3")
  write(tmp_path / "mein2.yml", "services: 3")  # is no configuration, as score_log.yml is none
  assert problems_of("score_log") == ["config file score_log does not exist"]
  assert problems_of(tmp_path / "mein.yml") == [
    f"config file {tmp_path}/mein.yml does not exist; nearest is {tmp_path}/mine.yml"
  ]
  assert problems_of("elsewhere/bsae.yml") == [
    f"config file elsewhere/bsae.yml does not exist; nearest is {config.config_dir() / 'base.yml'}"
  ]
  assert problems_of("configs/score_lg.yml") == ["config file configs/score_lg.yml does not exist"]  # nothing is near
  assert problems_of(tmp_path) == [f"config file {tmp_path} is a folder"]
  write(tmp_path / "config.yml", "")
  assert problems_of(tmp_path) == [f"config file {tmp_path} is a folder; give {tmp_path}/config.yml"]
  assert problems_of("steps") == ["config file steps does not exist; for the key, write steps=VALUE"]


def test_a_model_file_names_no_other_model(tmp_path):
  write(tmp_path / "models" / "a.yml", "model_name: b\nsteps: 5\n")
  (problem,) = problems_of("model_name=a", base_dir=tmp_path)
  assert problem == f"model_name in {tmp_path}/models/a.yml:1 must be a, the name of the file; remove it"


def test_later_override_wins_and_is_noted():
  loaded = config.load_with_origins("steps=5", "steps=6", "steps=6")
  assert loaded.config.run.steps == 6
  assert loaded.notes == ("steps=5 (command line) is overridden by the later steps=6",)


def test_a_key_that_the_run_does_not_read_is_noted(tmp_path):
  write(tmp_path / "mine.yml", "sgd_momentum: 0.5\nlora_alpha: 8.0\n")  # the second is the default
  loaded = config.load_with_origins(tmp_path / "mine.yml", "ghost_select_fraction=0.25")
  assert loaded.notes == (
    f"sgd_momentum=0.5 ({tmp_path}/mine.yml:1) is not read with opt_type=adamw",
    "ghost_select_fraction=0.25 (command line) is not read with ghost_select=none",
  )
  assert config.load_with_origins(tmp_path / "mine.yml", "opt_type=sgd").notes == ()
  config.save(loaded.config, tmp_path / "config.yml")
  assert config.load_with_origins(tmp_path / "config.yml").notes == ()  # said when the run began


def test_validation_sets_with_objectives_of_their_own_read_their_keys():
  keys = ("objective=sft", "dpo_beta=0.3", "ghost_val_sets=[pairs=*.jsonl@dpo]")
  assert config.load_with_origins(*keys[:2]).notes == ("dpo_beta=0.3 (command line) is not read with objective=sft",)
  assert config.load_with_origins(*keys).notes == ()
  (note,) = config.load_with_origins(*keys, "distill_alpha=0.3").notes
  assert note == "distill_alpha=0.3 (command line) is not read with objective=sft"
  (note,) = config.load_with_origins("objective=dpo", "sft_train_on_completion_only=false").notes
  assert note == "sft_train_on_completion_only=false (command line) is not read with objective=dpo"


def misspellings(key):
  for i in range(len(key)):
    yield key[:i] + key[i + 1 :]
    yield key[:i] + key[i + 1 : i + 2] + key[i] + key[i + 2 :]
    for letter in "aez_7":
      yield key[:i] + letter + key[i:]
      yield key[:i] + letter + key[i + 1 :]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_misspelt_key_names_the_nearest(data):
  keys = list(config.fields())
  key = data.draw(st.sampled_from(keys))
  others = {*keys, *renamed.FORMER, *renamed.OTHER}  # a former key, or one of MaxText, has an answer of its own
  wrong = data.draw(st.sampled_from(sorted(set(misspellings(key)) - others)))
  with pytest.raises(config.ConfigError) as caught:
    config.load(f"{wrong}=1")
  assert f"unknown key '{wrong}'" in str(caught.value)
  named = re.findall(r"'(\w+)'", str(caught.value).partition(";")[2])
  # Another key may be spelt as much like it.
  assert key in named or likeness(named[0], wrong) >= likeness(key, wrong)


def likeness(name, wrong):
  return difflib.SequenceMatcher(a=name, b=wrong).ratio()


@given(st.text(string.printable, max_size=12), st.lists(st.text(string.printable, max_size=12), max_size=5))
def test_nearest_gives_valid_names_only(name, valid):
  assert set(config.nearest(name, valid)) <= set(valid)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(config.fields())), st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_for_any_key_is_taken_or_refused_in_one_line_each(key, text):
  try:
    config.load(f"{key}={text}")
  except config.ConfigError as error:
    assert error.problems and all(problem.strip() for problem in error.problems)


def test_replace_converts_validates_and_leaves_the_original():
  cfg = config.load("steps=5")
  new = config.replace(cfg, learning_rate=1, ghost_exclude=["a"], steps=9)
  assert (new.optimizer.learning_rate, new.ghost.ghost_exclude, new.run.steps) == (1.0, ("a",), 9)
  assert type(new.optimizer.learning_rate) is float and cfg.run.steps == 5
  with pytest.raises(config.ConfigError) as caught:
    config.replace(cfg, stepz=1, steps=True, mlp_bias=0, log_period=0, head_dim=3, model_name="gpt2-small")
  assert list(caught.value.problems) == [
    "unknown key 'stepz'; did you mean 'steps'?",
    "model_name=gpt2-small cannot be set by replace; use load with model_name=gpt2-small",
    "steps=True is not of type int",
    "log_period=0 is below the least allowed value 1",
    "mlp_bias=0 is not of type bool",
    "head_dim=3 is odd, but the rotary embedding turns pairs; use 4",
  ]


def test_construction_validates():
  with pytest.raises(config.ConfigError, match="base_emb_dim=0 is below"):
    config.Config(model=config.ModelConfig(base_emb_dim=0))
  with pytest.raises(config.ConfigError, match=r"ghost_exclude=.* is not of type tuple"):
    config.Config(ghost=config.GhostConfig(ghost_exclude=["a"]))
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.Config().run.steps = 4
  assert hash(config.load("steps=3")) == hash(config.load("steps=3")) != hash(config.load("steps=4"))


def test_config_error_keeps_its_problems():
  error = pickle.loads(pickle.dumps(config.ConfigError("one", "two")))
  assert error.problems == ("one", "two") and str(error) == "one\ntwo" and isinstance(error, ValueError)


def test_save_is_atomic(tmp_path, monkeypatch):
  path = tmp_path / "config.yml"
  config.save(config.load("steps=3"), path)

  def fail(*_):
    raise OSError("disk full")

  for step in ("fsync", "replace"):
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
      patch.setattr(os, step, fail)
      config.save(config.load("steps=4"), path)
    assert config.load(path).run.steps == 3 and os.listdir(tmp_path) == ["config.yml"]


def test_keys_are_few_documented_and_distinct():
  keys = config.fields()
  assert len(keys) == sum(len(dataclasses.fields(part)) for part in SECTIONS.values())  # no name twice
  assert 40 < len(keys) <= 201
  for name, field in keys.items():
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    assert 5 < len(about(field)) <= 200, name


def test_importing_the_configuration_imports_no_jax():
  code = "import sys, maxghost.config, maxghost.cli; maxghost.config.load(); print(sorted(sys.modules))"
  modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
  for heavy in ("'jax'", "'jaxlib'", "'flax'", "'numpy'"):
    assert heavy not in modules


@pytest.mark.parametrize("text", ["ghost_exclude: null", "ghost_exclude: ~", "ghost_exclude:", "ghost_exclude: []"])
def test_nothing_for_a_list_of_texts_is_an_empty_list(text, tmp_path):
  (tmp_path / "c.yml").write_text(text)
  assert config.load(tmp_path / "c.yml").ghost.ghost_exclude == ()
  assert config.load("ghost_exclude=null").ghost.ghost_exclude == ()
  assert config.load("ghost_exclude='null'").ghost.ghost_exclude == ("null",)
