"""The Python code of README and docs runs as it stands: the blocks of a page in order, in one namespace."""

import contextlib
import itertools
import pickle
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny
from checkpoint_convert_trees import unpack
from flax import nnx
from jax.experimental.serialize_executable import serialize
from test_checkpoint_convert_load import SIZES

from maxghost import config, scorelog
from maxghost.checkpoint.manager import CheckpointManager
from maxghost.config import plugins
from maxghost.ghost import rules
from maxghost.parallel import distributed
from maxghost.training import devices
from maxghost.training.state import to_tree

ROOT = Path(__file__).resolve().parents[2]
REGISTRIES = (plugins.OPTIMIZERS, plugins.OBJECTIVES, rules.RULES)


@pytest.fixture(autouse=True)
def own_registries():
  """What the code of a page registers is forgotten after it."""
  before = [dict(table) for table in REGISTRIES]
  yield
  for table, entries in zip(REGISTRIES, before, strict=True):
    table.clear()
    table.update(entries)


def run_page(page: str, **given) -> dict:
  """Runs a page with all but its Python code blanked, so that a traceback names the page and its line.

  given: names that the code uses and the text around it explains.
  """
  text = (ROOT / page).read_text("utf-8")
  lines = ["" for _ in text.splitlines()]
  blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M))
  assert blocks, f"{page} has no Python code to run"
  for block in blocks:
    first = text[: block.start(1)].count("\n")
    lines[first : first + block[1].count("\n")] = block[1].splitlines()
  namespace: dict = {"__name__": "page", **given}
  with jax.numpy_rank_promotion("allow"):  # as in a script of a user
    exec(compile("\n".join(lines), page, "exec"), namespace)
  return namespace


def test_pages_with_code_are_run():
  """A page that gains Python code gets its test here."""
  pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
  found = {page.name for page in pages if "```python" in page.read_text("utf-8")}
  written = Path(__file__).read_text("utf-8")
  assert {name for name in found if f'run_page("docs/{name}"' not in written} == set()


def test_code_of_the_plug_ins_runs():
  run_page("docs/extending.md")
  assert "momentum" in plugins.OPTIMIZERS and "pair_mean" in plugins.OBJECTIVES


def test_code_of_the_engine_runs_and_writes_a_log(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  page = run_page("docs/engine.md")
  assert page["result"].dot.shape == (8,) and sorted(page["result"].per_param)[0] == "layers/0/bias"
  log = scorelog.load("runs/own")
  assert log["step"].tolist() == [step for step in range(4) for _ in range(8)]


def test_code_of_the_score_log_runs(tmp_path, monkeypatch):
  """It reads runs/base, which stands for any run, and writes a log of its own."""
  monkeypatch.chdir(tmp_path)
  writer = scorelog.Writer("runs/base")
  writer.restore(None)
  for step in range(98, 103):
    rows = {"tokens": [31, 7], "loss": [2.5, 3.1], "dot": [0.02, -0.01], "contribution": [0.25 * step, -1.0]}
    writer.append({"step": step, "val_loss": 2.0}, rows, [("code", "a.py", 0), ("code", "b.py", 0)])
  writer.close()
  page = run_page("docs/attribution.md")
  assert page["answer"].columns["contribution"].tolist() == [0.25 * (100 + 101 + 102), -3.0]
  assert scorelog.load("runs/own")["tokens"].tolist() == [31, 7]


def test_code_for_models_and_checkpoints_runs(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  cfg = tiny.make_config()
  Path("runs/base").mkdir(parents=True)
  config.save(cfg, Path("runs/base/config.yml"))
  manager = CheckpointManager(Path("runs/base/checkpoints"), asynchronous=False)
  manager.save(3, {"model": to_tree(nnx.state(tiny.make_model(cfg)))}, {})
  manager.close()
  progress = run_page("docs/generation.md")["progress"]
  assert len(progress.counts_B) == 2
  page = run_page("docs/serving.md")
  assert len(page["texts"]) == 2 and page["result"].ids_B.shape == (8,)
  unpack("linen_scanned", tmp_path).parent.rename(tmp_path / "checkpoints")
  (tmp_path / "mt").mkdir()
  (tmp_path / "checkpoints").rename(tmp_path / "mt" / "checkpoints")
  page = run_page("docs/checkpoints.md", cfg=config.replace(config.load(), **SIZES, tokenizer_type="huggingface"))
  assert page["train_state"].step == 3


def test_code_for_segments_and_compiled_steps_runs(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  make = nnx.vmap(lambda rngs: nnx.Linear(3, 3, rngs=rngs), in_axes=0)
  page = run_page("docs/memory.md", x=jnp.ones((2, 3)), layers=make(nnx.Rngs(0).split(8)))
  assert page["x"].shape == (2, 3)
  whole = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P())
  one, two = (jax.device_put(value, whole) for value in (1.0, 2.0))
  step = jax.jit(lambda state, batch, val_batches: (state + batch, {})).lower(one, two, ()).compile()
  Path("step.pkl").write_bytes(pickle.dumps(serialize(step)))
  assert run_page("docs/aot.md")["step"](one, two, ())[0] == 3.0


def test_the_reward_of_the_page_on_reinforcement_learning_runs():
  near = run_page("docs/reinforcement.md")["near"]
  assert near(None, ["12", "about 3", "7"], completion=["10", "3", "7"]) == [-2, None, 0]


def test_the_table_of_what_is_exact_names_what_is_refused():
  text = (ROOT / "docs/exact.md").read_text("utf-8")
  head, _, *rows = re.search(r"<!-- exact -->\n(.*?)<!-- /exact -->", text, re.S)[1].splitlines()
  schedules = re.findall(r"`(\w+)`", head)
  needs = {"distill": {"distill_teacher": "x"}, "grpo": {"packing": "none", "max_completion_length": 9}}
  for row in rows:
    first, *cells = (cell.strip() for cell in row.strip("|").split("|"))
    given, *others = re.findall(r"`([^`]+)`", first)
    key, value = given.split("=")
    choices = [{key: value}, *({key: other} for other in others)]
    if "direction" in first:
      choices = [{key: value, "ghost_direction": other, "sgd_momentum": 0.5 * (value == "sgd")} for other in others]
    for choice, (schedule, cell) in itertools.product(choices, zip(schedules, cells, strict=True)):
      keys = {**choice, "ghost_schedule": schedule, **needs.get(choice.get("objective"), {})}
      with contextlib.nullcontext() if cell != "-" else pytest.raises(config.ConfigError):
        config.load(None, *(f"{name}={given}" for name, given in keys.items()))


def test_what_several_processes_refuse_is_on_their_page(monkeypatch):
  layout = devices.Layout.of(config.load().parallel)
  monkeypatch.setattr(distributed, "count", lambda: 2)
  said = (ROOT / "docs/multihost.md").read_text("utf-8").partition("Several processes do not support")[2]
  needs = {"max_target_length": 64, "ghost_schedule": "two_pass", "packing": "none", "max_completion_length": 9}
  for text in ("objective=grpo", "sample_every=5", "ghost_select=topk", "ghost_detail=token"):
    key, _, value = text.partition("=")
    cfg = config.load(None, *(f"{name}={x}" for name, x in {**needs, key: value}.items()))
    with pytest.raises(config.ConfigError, match=rf"{text}\b.* process"):
      devices.check_layout(cfg, layout)
    assert f"`{key}" in said


def test_values_on_the_pages_are_values_of_their_keys():
  """`packing=first_fit`, and the like."""
  wrong = []
  for page in {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "extending.md"}:  # adds its own
    for key, text in set(re.findall(r"\b([a-z_0-9]+)=([a-z][\w.]*\w)", page.read_text("utf-8"))):
      try:
        config.load(*[f"{key}={text}"] * (key in config.fields()))
      except config.ConfigError as error:  # others are those of a key that needs further ones, or stands for a number
        wrong += [f"{page.name}: {problem}" for problem in error.problems if " is not one of " in problem]
  assert not wrong
