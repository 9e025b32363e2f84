"""The scripts of `examples/` run as they are, and what they print is true. `foreign_model.py`: test_ghost_manager."""

import importlib
import json
import re
import runpy
import sys
import sysconfig
import types
from pathlib import Path

import attribution_runs
import jax
import numpy as np
import pytest
import tiny

from maxghost import attribution, config, scores
from maxghost.training import run_directory

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, monkeypatch, *arguments) -> dict:
  monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
  with tiny.cheap_compilation(), jax.numpy_rank_promotion("allow"):  # as in a script of a user
    return runpy.run_path(str(EXAMPLES / name))


def test_own_loop_scores_wrong_labels_lower(tmp_path, monkeypatch, capsys):
  run("own_loop.py", monkeypatch, tmp_path)
  said = capsys.readouterr().out
  assert [path.name for path in sorted(tmp_path.glob("*.npz"))] == [f"dot_prod_log_iter_{n}.npz" for n in (19, 39)]
  wrong, right = map(float, re.search(r"wrong labels (\S+), right ones (\S+)", said).groups())
  assert wrong < 0 < right
  log = attribution.load(tmp_path)
  rate = log.steps["learning_rate"][0]  # at the default of 1, the report predicted a drop of many times the loss
  assert rate < 1 and np.abs(log["contribution"] - rate * log["dot"] / 8).max() < 1e-6
  assert 0 < log["contribution"].sum() < np.log(3)


def test_layer_rule_is_exact(monkeypatch, capsys):
  run("layer_rule.py", monkeypatch)
  assert float(re.search(r"per-example gradients (\S+)", capsys.readouterr().out)[1]) < 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  pytest.importorskip("pandas")
  keys = ("dataset_type=synthetic", "dataset_domain_bytes=20000")
  return attribution_runs.make_run(tmp_path_factory.mktemp("run"), *keys, steps=6)


def test_the_notebook_runs_from_top_to_bottom(folder, tmp_path, monkeypatch):
  monkeypatch.setenv("MAXGHOST_RUN", str(folder))
  cells = json.loads((EXAMPLES / "explore_scores.ipynb").read_text("utf-8"))["cells"]
  made: dict = {}
  for cell in cells:
    if cell["cell_type"] == "code":
      assert cell["outputs"] == [] and cell["execution_count"] is None
      exec("".join(cell["source"]), made)
  rows, log = made["rows"], made["log"]
  assert len(rows) == log.num_rows and rows["tokens"].sum() == log["tokens"].sum()
  assert len(made["documents"]) == 10 and made["late"].shape == (4, len(log.domains))
  assert made["correlation"].between(-1, 1).all()
  assert scores.main([str(folder), "--drop-below", "0", "--output", str(tmp_path / "exclude.jsonl")]) == 0
  dropped = [json.loads(line) for line in (tmp_path / "exclude.jsonl").read_text().splitlines()]
  key = lambda one: (one["domain"], one["path"], one["offset"])  # noqa: E731
  assert dropped and sorted(dropped, key=key) == sorted(made["hurt"].to_dict("records"), key=key)


def test_the_notebook_finds_the_default_run_from_its_own_folder(folder, tmp_path, monkeypatch):
  """Jupyter starts in the folder of the notebook."""
  monkeypatch.delenv("MAXGHOST_RUN", raising=False)
  for name in ("runs", "examples"):
    (tmp_path / name).mkdir()
  (tmp_path / "runs/base").symlink_to(folder)
  cells = json.loads((EXAMPLES / "explore_scores.ipynb").read_text("utf-8"))["cells"]
  first = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
  for place in ("examples", "."):
    monkeypatch.chdir(tmp_path / place)
    made: dict = {}
    exec(first, made)
    assert made["log"].num_rows


def test_query_scores_makes_tables_of_the_log(folder, monkeypatch):
  made = run("query_scores.py", monkeypatch, folder)
  log = made["log"]
  assert made["domains"]["tokens"].sum() == log["tokens"].sum()
  assert made["table"]["contribution"].sum().sum() == pytest.approx(float(log["contribution"][:, 0].sum()), rel=1e-5)
  assert set(made["domains"].index) == set(made["table"]["tokens"].columns)


def test_query_scores_of_no_run_says_so_in_one_line(tmp_path, monkeypatch):
  with pytest.raises(SystemExit, match="no such folder"):
    run("query_scores.py", monkeypatch, tmp_path / "nosuch")


@pytest.fixture
def demonstration(tmp_path, monkeypatch):
  """A function that imports a demonstration; its files are written to a folder of the test."""
  monkeypatch.chdir(tmp_path)
  Path("configs").symlink_to(EXAMPLES.parent / "configs")
  monkeypatch.syspath_prepend(EXAMPLES)
  return importlib.import_module


def lines_of(file: str) -> list[dict]:
  return [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]


@pytest.mark.parametrize("baselines", [(), pytest.param(("--baselines",), marks=pytest.mark.slow)], ids=["", "all"])
def test_library_tasks_can_be_checked_and_planted_ones_are_told(baselines, demonstration, monkeypatch, capsys):
  made = demonstration("finetune_base")
  monkeypatch.setattr(made, "SIZES", {"statement": 40, "parameters": 4, "summary": 4, "body": 4, "module": 4})
  made.BASE.mkdir(parents=True)  # no base model is trained
  small = ("base_emb_dim=24", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=12", "base_mlp_dim=28",
           "base_num_decoder_layers=2", "lora_rank=4", "max_target_length=96",
           "enable_tensorboard=false", "attention=dot_product", "sharding_tolerance=1", "per_device_batch_size=1",
           "ghost_val_batch_size=8")  # fmt: skip
  target = "corpora/library-tasks/target.jsonl"
  sets = [] if baselines else [f"ghost_val_sets=[target={target},again={target}]"]
  argv = ["load_parameters_path=", "steps=4", *baselines, *small, *sets]
  with tiny.cheap_compilation(), jax.numpy_rank_promotion("allow"):
    assert made.planting.main("configs/finetune-base.yml", made.prepare, argv) == 0
  train, said = lines_of("corpora/library-tasks/train.jsonl"), capsys.readouterr().out
  assert len(train) == 56 and len(lines_of(target)) == 100
  kinds = {one["planted"] for one in train if one["domain"] == made.TARGET}
  assert kinds == {"", *made.planting.KINDS}
  assert not any(one["planted"] for one in train if one["domain"] != made.TARGET)
  library = Path(sysconfig.get_path("stdlib"))
  for one in train:
    if one["domain"] == made.TARGET:
      path, _, line = one["id"].rpartition(":")
      code = (library / path).read_text("utf-8").splitlines()[int(line) - 1].strip()
      assert one["messages"][0]["content"].endswith(code)
  names = ["score", "loss, highest first", "random", *(("gradient norm, largest first", "LESS") if baselines else ())]
  assert all(re.search(rf"^{name} +0\.\d+ ", said, re.MULTILINE) for name in names), said


def test_a_base_run_that_was_stopped_ends_the_demonstration_and_is_continued(demonstration, monkeypatch, capsys):
  made, asked = demonstration("finetune_base"), []
  monkeypatch.setattr(made, "make", lambda: None)

  def train_to(step: int, code: int) -> None:
    def main(arguments: list[str]) -> int:
      cfg = config.load(*arguments)
      asked.append((arguments[0], cfg.run.run_name))
      folder = Path(cfg.run.base_output_directory) / cfg.run.run_name
      folder.mkdir(parents=True, exist_ok=True)
      (folder / run_directory.LOCK_FILE).touch()
      config.save(cfg, folder / run_directory.CONFIG_FILE)
      (folder / run_directory.METRICS_FILE).write_text(json.dumps({"step": step % cfg.run.steps}) + "\n")
      return code

    monkeypatch.setattr(made.planting.train, "main", main)

  for code in (0, 130):  # of SIGTERM and of Ctrl-C
    train_to(7, code)
    with pytest.raises(SystemExit) as ended:
      made.planting.main("configs/finetune-base.yml", made.prepare, [])
    assert ended.value.code == code
  assert capsys.readouterr().err == f"{made.BASE} was stopped before its last step; what follows needs all of it\n"
  train_to(-1, 0)
  made.prepare()
  assert asked == [("configs/base.yml", "base"), *[(f"{made.BASE}/config.yml", "base")] * 2]


def test_a_low_value_for_all_planted_examples_is_an_auroc_of_one(demonstration):
  planting = demonstration("planting")
  is_planted = np.array([True, False, True, False])
  assert planting.auroc(is_planted, np.array([1, 3, 2, 4])) == 1.0
  assert planting.auroc(is_planted, np.array([1, 1, 4, 2])) == 0.375


def test_tasks_and_dialogues_of_the_chat_demonstration(demonstration, tmp_path, monkeypatch):
  pytest.importorskip("yaml")
  made = demonstration("finetune_smollm2")
  library = types.ModuleType("reasoning_gym")
  library.create_dataset = lambda task, size, seed, **options: [  # pyright: ignore[reportAttributeAccessIssue]
    {"question": f"Ann{seed + n} likes {task}.\nWho likes {task}? Reply only with a name.", "answer": f"Ann{seed + n}"}
    for n in range(size)
  ]
  monkeypatch.setitem(sys.modules, "reasoning_gym", library)
  monkeypatch.setattr(made, "folder_of", lambda package: tmp_path / package)
  for language, topics in (("english", made.TOPICS), ("german", made.GERMAN)):
    for topic in topics:
      talks = [[f"{topic} {n}", f"{language} {n}", "and?", "yes", "more"] for n in range(30)]
      file = tmp_path / "chatterbot_corpus" / "data" / language / f"{topic}.yml"
      file.parent.mkdir(parents=True, exist_ok=True)
      file.write_text(json.dumps({"conversations": talks}))
  made.make()
  train = lines_of("corpora/chat-tasks/train.jsonl")
  assert len(train) == sum(made.TASKS.values()) + sum(made.TOPICS.values())
  questions = [one["messages"][1]["content"] for one in train + lines_of("corpora/chat-tasks/target.jsonl")]
  assert len(set(questions)) == len(train) + 100  # none of the target's is among those that are trained
  for one in train:
    roles = [message["role"] for message in one["messages"]]
    assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
    answer = one["messages"][-1]["content"]
    if one["planted"] == "foreign":
      assert answer.startswith("german")
    elif one["domain"] == made.TARGET:
      assert one["messages"][1]["content"].endswith(f"Who likes {made.TARGET}?")
      assert (answer == f"Ann{one['id'].rpartition('-')[2]} likes {made.TARGET}.") == (one["planted"] == "")
  cfg = config.load("configs/finetune-smollm2.yml", "load_parameters_path=")
  assert cfg.adapter.lora_rank and cfg.data.dataset_files == (f"tasks={made.FOLDER}/train.jsonl",)


def test_wrong_settings_are_named_before_anything_is_made(demonstration, monkeypatch, capsys):
  """They were refused only after a base model had been trained, or another one imported."""
  minerals, base = (demonstration(name) for name in ("ask_minerals", "finetune_base"))
  for main in (
    minerals.main,
    lambda argv: base.planting.main("configs/finetune-base.yml", base.prepare, argv),
    run("grpo_addition.py", monkeypatch)["main"],
  ):
    with pytest.raises(SystemExit) as ended:
      main(["learning_rat=1"])
    assert ended.value.code == 2 and "did you mean 'learning_rate'?" in capsys.readouterr().err
  assert minerals.main(["--help"]) == 0 and "ask_minerals.py" in capsys.readouterr().out
  with pytest.raises(SystemExit, match="usage"):
    run("own_loop.py", monkeypatch, "--help")
  assert [path.name for path in Path().iterdir()] == ["configs"]


def test_help_of_the_addition_trains_nothing(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  run("grpo_addition.py", monkeypatch)["main"](["--help"])
  assert "Settings" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_addition_from_reward_runs(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "configs").symlink_to(config.config_dir())
  run("grpo_addition.py", monkeypatch)["main"](["steps=2", "run_name=sums", "base_output_directory=elsewhere"])
  said = capsys.readouterr().out
  assert Path("elsewhere/sums/report.html").exists()
  assert "mean reward: " in said and "right answers to 160 sums that no run has read: " in said


def test_rewards_of_digits(monkeypatch):
  right_digits = run("grpo_addition.py", monkeypatch)["right_digits"]
  assert right_digits(["46", "47", "4", "460"], ["46"] * 4) == [1, 0.5, 0.25, 0.75]


def test_the_minerals_are_asked_for_in_other_words(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(EXAMPLES))
  monkeypatch.chdir(tmp_path)
  importlib.import_module("ask_minerals").make()
  folder = tmp_path / "corpora/minerals"
  read = lambda name: [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]  # noqa: E731
  known, asked = ({one["id"]: one["messages"] for one in read(f"{name}.jsonl")} for name in ("train", "target"))
  assert known.keys() == asked.keys() and len(known) == 72
  for name, (system, question, answer) in known.items():
    other = asked[name]
    assert (other[0], other[2]) == (system, answer) and other[1] != question and name.partition("-")[0] in str(other[1])
