"""The loop around a toy step: every record and score row once, the same numbers however often it is interrupted.

B rows, S segments, K validation sets.
"""

import functools
import json
import time
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxghost import config
from maxghost.checkpoint.manager import CheckpointManager
from maxghost.config import plugins
from maxghost.parallel.shardings import Layout
from maxghost.scorelog import Writer
from maxghost.training import compiled_steps, scoring
from maxghost.training.batches import Prefetcher
from maxghost.training.console import Console
from maxghost.training.loop import Sinks, TrainingLoop
from maxghost.training.metrics import MetricsLog, NonFiniteMetricError
from maxghost.training.plan import Plan
from maxghost.training.score_recorder import ScoreRecorder
from maxghost.training.state import Position, abstract_arrays, from_tree, to_tree

B, S, T, WIDTH = 3, 2, 5, 4
STEPS = 11
VAL_SETS = {"manual": "manual"}
NAMES = ("inputs", "targets", "inputs_segmentation")


class ToyState(nnx.Module):
  def __init__(self):
    self.model = nnx.Dict(w=nnx.Param(jnp.linspace(0.5, 1.5, WIDTH)))
    self.optimizer = nnx.Dict(step=nnx.Variable(jnp.uint32(0)), key=nnx.Variable(jax.random.key(5)))


class ToyBatch(SimpleNamespace):
  unit_BS = None


class ToyIterator:
  """Batches that depend on the whole past: skipping or repeating one changes everything after it."""

  def __init__(self):
    self._past, self.drawn = 1, 0

  def __next__(self):
    self.drawn += 1
    self._past = (self._past * 1103515245 + 12345) % 2**31
    rng = np.random.default_rng(self._past)
    document_BS = rng.integers(0, 50, size=(B, S))
    document_BS[0, 1] = -1
    return ToyBatch(
      arrays={"x": rng.normal(size=(B, WIDTH)).astype(np.float32)} | dict.fromkeys(NAMES, np.zeros((B, T), np.int32)),
      document_BS=document_BS,
      offset_BS=np.where(document_BS < 0, -1, rng.integers(0, 9, size=(B, S))),
      epoch_B=np.arange(B),
    )

  def state(self):
    return {"past": self._past}

  def restore(self, state):
    self._past = state["past"]


class ToyDataset:
  def __init__(self):
    self.train = ToyIterator()

  def validation_batch(self, index, num_rows, domain=None):
    rng = np.random.default_rng([index, num_rows])
    return ToyBatch(arrays={"x": rng.normal(size=(num_rows, WIDTH)).astype(np.float32)})

  def document_id(self, index):
    return (("code", "tables")[index % 2], f"doc{index}", 0)


def toy_step(graphdef, val_every):
  def step(state, batch, val_batches, nan_at, unscored_at):
    toy = nnx.merge(graphdef, state)
    w, number = toy.model.w[...], toy.optimizer.step[...]
    noise = jax.random.normal(toy.optimizer.key[...], (WIDTH,))
    val_loss = toy_val_loss(graphdef)(state, val_batches) if val_batches else None
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - 1) ** 2) + jnp.sum(w * noise) * 1e-3)(w)
    toy.model.w[...] = w - 0.05 * grad
    toy.optimizer.step[...] = number + 1
    toy.optimizer.key[...] = jax.random.split(toy.optimizer.key[...])[0]
    out = {"loss": jnp.where(number == nan_at, jnp.nan, loss), "grad_norm": jnp.linalg.norm(grad)}
    out |= {"param_norm": jnp.linalg.norm(w), "learning_rate": jnp.float32(0.05), "clip_factor": jnp.float32(1)}
    out["tokens"] = jnp.float32(B * T)
    if val_batches:
      out["val_loss"] = jnp.where(number % val_every == 0, val_loss, jnp.nan)
      if val_every == 1:
        out["prev_predicted"] = 0.1 * val_loss
      out |= {"scored_ok": number != unscored_at, "nonfinite_scores": {"w": number == unscored_at, "b": False}}
      out["token_contribution_KBT"] = jnp.tile(loss, (1, B, T))
      columns = ("predicted_examples", "momentum", "weight_decay", "unscored", "direction_residual", "check_rel_err")
      out |= {name: out["val_loss"] * 0.01 * (k + 1) for k, name in enumerate(columns)}
      score_BS = batch["x"][:, :S] * loss
      out |= {"score_dot_BSK": score_BS[..., None], "contribution_BSK": 0.05 * score_BS[..., None]}
      out |= {"tokens_BS": jnp.tile(jnp.array([2, 3], jnp.int32), (B, 1)), "loss_BS": score_BS + 1}
      out["param_contribution"] = {"w": 0.05 * score_BS[None, ..., None], "b": jnp.stack([score_BS[..., None]] * 2)}
    return nnx.state(toy), out

  return step


def toy_val_loss(graphdef):
  def loss(state, val_batches):
    w = nnx.merge(graphdef, state).model.w[...]
    return jnp.stack([jnp.mean((batch["x"] @ w - 1) ** 2) for batch in val_batches])

  return loss


@functools.cache
def compiled(val_every=1):
  """(step(state, batch, val_batches, nan_at=-1, unscored_at=-1), closing(state, val_batches))."""
  graphdef, _ = nnx.split(ToyState())
  val_loss = toy_val_loss(graphdef)

  def closing(state, val_batches):
    loss = val_loss(state, val_batches)
    return {"prev_val_loss": loss} | ({"prev_predicted": 0.1 * loss} if val_every == 1 else {})

  run = jax.jit(toy_step(graphdef, val_every), donate_argnums=0)

  def step(state, batch, val_batches, nan_at=-1, unscored_at=-1):
    return run(state, batch, val_batches, nan_at, unscored_at)

  return step, jax.jit(closing)


class ToyProgram:
  outer, to_host, check_objective = None, staticmethod(scoring.to_host), staticmethod(lambda *_: None)

  def __init__(self, nan_at=-1, unscored_at=-1, fail_at=-1, stop_at=-1, signals=None, val_every=1):
    step, self.closing = compiled(val_every)
    self._step = functools.partial(step, nan_at=nan_at, unscored_at=unscored_at)
    self._fail_at, self._stop_at, self._signals = fail_at, stop_at, signals
    self.calls = 0

  def train_step(self, state, batch, val_batches):
    number = int(to_tree(state)["optimizer"]["step"])
    if number == self._fail_at:
      raise OSError("the machine is gone")
    if number == self._stop_at:
      self._signals.requested = True
    return self._step(state, batch, val_batches)

  plain_step = train_step

  def evaluate(self, state, batch):
    rows = jnp.float32(batch["x"].shape[0])
    return self.closing(state, (batch,))["prev_val_loss"][0] * rows, rows

  def function(self, name):
    return getattr(self, name)

  def is_ready(self, name):
    return True


def make_config(**changes):
  base = {
    "steps": STEPS,
    "eval_interval": 5,
    "eval_steps": 3,
    "checkpoint_period": 4,
    "ghost_log_period": 3,
    "ghost_val_refresh_steps": 3,
    "ghost_val_batch_size": 2,
    "per_device_batch_size": B,
    "max_target_length": T,
    "learning_rate": 0.05,  # the toy's, in every step
    "warmup_steps_fraction": 0.0,
    "lr_schedule_type": "constant",
  }
  return config.replace(config.load(), **(base | changes))


def toy_plan(cfg) -> Plan:
  """What the loop reads of a plan, on one device."""
  return Plan(cfg, Layout.of(cfg.parallel, jax.devices()[:1]), graphdef=None, state=None, spread="")


def run_toy(folder, cfg, *, ghost=True, async_checkpoints=True, console=None, program=None, watch=None,
            stopped=False, **trouble):  # fmt: skip
  """One process: opens the logs, goes to the newest checkpoint and trains. Returns (completed steps, their seconds)."""
  folder.mkdir(exist_ok=True)
  signals = SimpleNamespace(requested=stopped)
  dataset = ToyDataset()
  fresh = nnx.state(ToyState())
  abstract = abstract_arrays(fresh)
  local = cfg.checkpoint.local_checkpoint_directory
  checkpoints = CheckpointManager(folder / "checkpoints", asynchronous=async_checkpoints, local=local)
  restored = checkpoints.restore_latest(to_tree(abstract))
  state, position = fresh, Position()
  if restored is not None:
    state, position = from_tree(restored.tree, abstract), Position.from_json(restored.positions)
    dataset.train.restore(position.data)
  log = MetricsLog(folder / "metrics.jsonl")
  log.restore(position.metrics_bytes, position.metrics_crc)
  scores = None
  if ghost:
    writer = Writer(folder, tuple(VAL_SETS), period=3)
    scores = ScoreRecorder(writer, dataset.document_id, ("code", "tables"))
    scores.restore(position.scores, position.completed_steps)
  sinks = Sinks(console or Quiet(), log, scores, checkpoints, **({"watch": watch} if watch else {}))
  prefetcher = Prefetcher(dataset.train, jax.device_put, cfg.run.steps - position.completed_steps)
  program = program or ToyProgram(signals=signals, val_every=cfg.ghost.ghost_val_every, **trouble)
  loop = TrainingLoop(toy_plan(cfg), program, dataset.validation_batch, sinks, signals)
  try:
    return loop.run(state, position, prefetcher)
  finally:
    prefetcher.close()
    sinks.close()


class Quiet(Console):
  def __init__(self):
    super().__init__()
    self.lines = []

  def line(self, text):
    self.lines.append(text)

  def start(self, total_steps, completed_steps):
    pass


def records(folder):
  """The records without what a clock measured."""
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [{k: v for k, v in json.loads(line).items() if not k.startswith("perf/")} for line in lines]


def score_arrays(folder):
  """All step records and rows in the order of the files, names spelled out, as text: equal text = equal bits."""
  steps, rows, modules = [], [], []
  for path in sorted((folder / "ghost").glob("*.npz"), key=lambda p: int(p.stem.split("_")[-1])):
    with np.load(path) as file:
      steps += [repr(step) for step in file["steps"]]
      names = [(str(file["domain_table"][r["domain"]]), str(file["path_table"][r["path"]])) for r in file["rows"]]
      fields = [name for name in file["rows"].dtype.names if name not in ("domain", "path")]
      rows += [(name, *(row[f].tobytes() for f in fields)) for name, row in zip(names, file["rows"], strict=True)]
      if "module_contribution" in file:
        modules += [value.tobytes() for value in file["module_contribution"]]
  return steps, rows, modules


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """An uninterrupted run."""
  folder = tmp_path_factory.mktemp("whole") / "run"
  assert run_toy(folder, make_config())[0] == STEPS
  return folder


def test_a_run_stopped_after_a_local_checkpoint_was_read_saves_a_durable_one(whole, tmp_path):
  """The machine of the local one may go, and the run goes on from where it was."""
  cfg = make_config(local_checkpoint_directory=str(tmp_path / "near"), local_checkpoint_period=1)
  run = tmp_path / "run"
  with pytest.raises(OSError, match="the machine is gone"):
    run_toy(run, cfg, fail_at=7)
  assert not (run / "checkpoints" / "7").exists()
  for _ in range(2):  # the second has nothing to save
    assert run_toy(run, cfg, stopped=True)[0] == 7 and (run / "checkpoints" / "7").is_dir()
  assert not any((tmp_path / "near").rglob("*.bin"))
  run_toy(run, cfg)
  assert records(run) == records(whole) and score_arrays(run) == score_arrays(whole)


def test_a_record_per_step_and_a_score_row_per_document(whole):
  found = records(whole)
  assert [record["step"] for record in found] == list(range(STEPS))
  steps, rows, modules = score_arrays(whole)
  assert len(steps) == STEPS + 1  # and the closing one
  assert len(rows) == STEPS * (B * S - 1)
  assert len(modules) == STEPS


def test_actual_drop_is_measured_on_the_rows_of_the_step(whole):
  """Recomputed by training again by hand, one step at a time."""
  dataset, state = ToyDataset(), nnx.state(ToyState())
  step, val_loss = compiled()
  found = records(whole)
  for t in range(STEPS):
    val = (dataset.validation_batch(t // 3, 2).arrays,)
    before = float(val_loss(state, val)["prev_val_loss"][0])
    state, out = step(state, next(dataset.train).arrays, val)
    assert found[t]["learning/loss"] == pytest.approx(float(out["loss"]), rel=1e-5)
    assert found[t]["ghost/val_loss/manual"] == pytest.approx(before, rel=1e-5)
    drop = before - float(val_loss(state, val)["prev_val_loss"][0])
    assert found[t]["ghost/actual_drop/manual"] == pytest.approx(drop, rel=1e-3, abs=1e-6)
    assert found[t]["ghost/predicted_drop/manual"] == pytest.approx(before * 0.15, rel=1e-5)


def test_the_score_log_holds_the_loss_after_each_step(whole):
  found, by_step = records(whole), {}
  for path in (whole / "ghost").glob("*.npz"):
    with np.load(path) as file:
      by_step |= {int(step["step"]): step for step in file["steps"]}
  assert sorted(by_step) == list(range(STEPS + 1))
  assert np.isnan(by_step[0]["prev_val_loss"]).all() and np.isnan(by_step[STEPS]["loss"])
  for t in range(STEPS):
    drop = found[t]["ghost/val_loss/manual"] - float(by_step[t + 1]["prev_val_loss"][0])
    assert drop == found[t]["ghost/actual_drop/manual"]
    after, predicted = float(by_step[t + 1]["prev_predicted"][0]), found[t]["ghost/predicted_drop/manual"]
    assert after == pytest.approx(0.1 * float(by_step[t + 1]["prev_val_loss"][0]), rel=1e-6)
    assert found[t]["ghost/curvature/manual"] == (after - predicted) / 2
    if t + 1 == STEPS:
      assert np.isnan(by_step[STEPS]["val_loss"]).all()
    elif (t + 1) % 3:
      assert by_step[t + 1]["prev_val_loss"] == by_step[t + 1]["val_loss"]
    else:
      assert by_step[t + 1]["prev_val_loss"] != by_step[t + 1]["val_loss"]


def test_evaluations_come_every_interval_and_at_the_end_and_weigh_tokens(whole):
  found = records(whole)
  assert [record["step"] for record in found if "eval/avg_loss" in record] == [4, 9, 10]
  assert found[4]["eval/total_weights"] == 3 * B


@pytest.mark.parametrize(
  "stop_at", [pytest.param(t, marks=[pytest.mark.slow] if t in (1, 6, 9) else []) for t in range(STEPS)]
)
def test_a_signal_at_any_step_changes_nothing(tmp_path, whole, stop_at):
  folder = tmp_path / "run"
  assert run_toy(folder, make_config(), stop_at=stop_at)[0] == stop_at + 1
  assert [record["step"] for record in records(folder)] == list(range(stop_at + 1))
  if stop_at < STEPS - 1:
    assert run_toy(folder, make_config())[0] == STEPS
  assert records(folder) == records(whole)
  assert score_arrays(folder) == score_arrays(whole)


@pytest.mark.parametrize(
  ("fail_at", "async_checkpoints"),
  [(0, True), (2, False), (4, True), (4, False), (5, True), (7, False), (8, True), (10, False)],
)
def test_a_crash_at_any_step_changes_nothing(tmp_path, whole, fail_at, async_checkpoints):
  folder = tmp_path / "run"
  with pytest.raises(OSError, match="the machine is gone"):
    run_toy(folder, make_config(), fail_at=fail_at, async_checkpoints=async_checkpoints)
  run_toy(folder, make_config())
  assert records(folder) == records(whole)
  assert score_arrays(folder) == score_arrays(whole)


def test_interrupted_again_and_again(tmp_path, whole):
  folder = tmp_path / "run"
  for stop_at in (0, 3, 4, 8):
    run_toy(folder, make_config(), stop_at=stop_at)
  run_toy(folder, make_config())
  assert records(folder) == records(whole)
  assert score_arrays(folder) == score_arrays(whole)


def test_without_ghost_the_losses_are_the_same(tmp_path, whole):
  folder = tmp_path / "run"
  run_toy(folder, make_config(ghost_enabled=False), ghost=False, stop_at=6)
  run_toy(folder, make_config(ghost_enabled=False), ghost=False)
  ghostless = [{k: v for k, v in record.items() if not k.startswith("ghost/")} for record in records(whole)]
  assert [record["step"] for record in records(folder)] == list(range(STEPS))
  for found, expected in zip(records(folder), ghostless, strict=True):
    assert found == pytest.approx(expected, rel=1e-6)  # the toy's two programs may round differently
  assert not (folder / "ghost").exists()


def test_a_finished_run_goes_on_with_more_steps(tmp_path, whole):
  """As if it had never stopped (this toy's step does not depend on the number of steps)."""
  folder = tmp_path / "run"
  run_toy(folder, make_config(steps=6))
  assert records(folder)[-1]["ghost/actual_drop/manual"] is not None
  run_toy(folder, make_config())
  without_eval = [{k: v for k, v in r.items() if not k.startswith("eval/")} for r in records(folder)]
  assert without_eval == [{k: v for k, v in r.items() if not k.startswith("eval/")} for r in records(whole)]
  assert score_arrays(folder) == score_arrays(whole)


@pytest.mark.parametrize(("every", "known"), [(1, [0, 1, 2, 3, 4, 6, 7, 8]), (4, [0, 4, 8])])
def test_no_curvature_of_a_step_whose_rate_the_longer_schedule_changes(tmp_path, every, known):
  """The step after it derives its update from the rate of the new schedule: better none than a wrong one. Of a run
  that stopped between scored steps, no such step is scored."""
  for steps in (6, 9):
    run_toy(tmp_path / "run", make_config(steps=steps, lr_schedule_type="cosine", ghost_every=every))
  assert [record["step"] for record in records(tmp_path / "run") if "ghost/curvature/manual" in record] == known


@pytest.mark.parametrize("nan_at", [0, 3, 10])
def test_a_nan_stops_the_run_and_names_the_step(tmp_path, nan_at):
  folder = tmp_path / "run"
  with pytest.raises(NonFiniteMetricError, match=f"step {nan_at}: loss is nan"):
    run_toy(folder, make_config(), nan_at=nan_at)
  assert [record["step"] for record in records(folder)] == list(range(nan_at))
  saved = sorted(int(p.name) for p in (folder / "checkpoints").iterdir())
  assert all(step <= nan_at for step in saved)


def test_a_checkpoint_holds_the_position_of_the_trained_batch_not_of_the_fetched_one(tmp_path):
  folder = tmp_path / "run"
  run_toy(folder, make_config(steps=8, checkpoint_period=4), stop_at=3)
  positions = json.loads((folder / "checkpoints" / "4" / "positions" / "metadata").read_text())
  iterator = ToyIterator()
  for _ in range(4):
    next(iterator)
  assert positions["data"] == iterator.state()
  assert positions["completed_steps"] == 4 and positions["pending"]["step"] == 3


class Watched:
  """A step's output that tells when the host reads it."""

  def __init__(self, log, name, value):
    self.log, self.name, self.value = log, name, value

  def __array__(self, dtype=None, copy=None):
    self.log.append(self.name)
    return np.asarray(self.value, dtype)


def test_step_k_starts_before_step_k_minus_1_is_read(tmp_path):
  log = []

  class WatchingProgram(ToyProgram):
    def train_step(self, state, batch, val_batches):
      log.append(f"start {self.calls}")
      state, out = self._step(state, batch, val_batches)
      out["loss"] = Watched(log, f"read {self.calls}", out["loss"])
      self.calls += 1
      return state, out

  state = nnx.state(ToyState())
  signals = SimpleNamespace(requested=False)
  metrics_log = MetricsLog(tmp_path / "metrics.jsonl")
  cfg = make_config(steps=5, eval_interval=-1, checkpoint_period=0)
  dataset = ToyDataset()
  sinks = Sinks(Quiet(), metrics_log, None, None)
  loop = TrainingLoop(toy_plan(cfg), WatchingProgram(), dataset.validation_batch, sinks, signals)
  loop.run(state, Position(), Prefetcher(dataset.train, jax.device_put, 5))
  metrics_log.close()
  expected = ["start 0"]
  for step in range(1, 5):
    expected += [f"start {step}", f"read {step - 1}"]
  assert log == [*expected, "read 4"]


def test_step_times_leave_out_evaluations_and_saves(tmp_path, monkeypatch):
  original = ToyProgram.evaluate

  def slow(self, state, batch):
    time.sleep(0.4)
    return original(self, state, batch)

  monkeypatch.setattr(ToyProgram, "evaluate", slow)
  _, seconds = run_toy(tmp_path / "run", make_config(steps=7, eval_interval=2, eval_steps=1))
  assert sum(seconds[1:]) < 0.4
  assert len(seconds) == 7


def test_the_console_shows_every_log_period_and_the_last(tmp_path):
  console = Quiet()
  run_toy(tmp_path / "run", make_config(log_period=4), console=console)
  shown = [line for line in console.lines if line.startswith("completed step")]
  assert [int(line.split(",")[0].split()[-1]) for line in shown] == [0, 4, 8, 10]
  assert "drop: " in shown[-1] and "Tokens/s/device" in shown[0]
  assert sum(line.startswith("Completed eval after train step") for line in console.lines) == 3


@pytest.fixture(scope="module")
def whole_of_spans(tmp_path_factory):
  """An uninterrupted run with a validation gradient every 4 steps."""
  folder = tmp_path_factory.mktemp("spans") / "run"
  run_toy(folder, make_config(ghost_val_every=4))
  return folder


def test_with_a_validation_gradient_every_few_steps_the_account_spans_them(whole_of_spans):
  """Validation every 4 steps, new rows every 3: losses at 0, 4, 8, each of the old rows and of the new."""
  found = records(whole_of_spans)
  assert [t for t, record in enumerate(found) if record["ghost/val_loss/manual"] is not None] == [0, 4, 8]
  drops = {t: record["ghost/actual_drop/manual"] for t, record in enumerate(found) if "ghost/account_steps" in record}
  assert {t: found[t]["ghost/account_steps"] for t in drops} == {3: 4, 7: 4, 10: 3}
  dataset, state = ToyDataset(), nnx.state(ToyState())
  step, val_loss = compiled(val_every=4)
  before = {}
  for t in range(STEPS + 1):
    old_rows = (dataset.validation_batch(max(t - 1, 0) // 4 * 4 // 3, 2).arrays,)
    if t - 1 in drops:
      assert drops[t - 1] == pytest.approx(
        before[(t - 1) // 4] - float(val_loss(state, old_rows)["prev_val_loss"][0]), rel=1e-3
      )
    rows = (dataset.validation_batch(t // 4 * 4 // 3, 2).arrays,)
    before.setdefault(t // 4, float(val_loss(state, rows)["prev_val_loss"][0]))
    if t < STEPS:
      state, _ = step(state, next(dataset.train).arrays, rows)


@pytest.mark.parametrize("stop_at", [0, 3, 4, 5, 7])
def test_a_signal_inside_such_a_span_changes_nothing(tmp_path, whole_of_spans, stop_at):
  cfg, folder = make_config(ghost_val_every=4), tmp_path / "run"
  run_toy(folder, cfg, stop_at=stop_at)
  run_toy(folder, cfg)
  assert records(folder) == records(whole_of_spans)
  assert score_arrays(folder) == score_arrays(whole_of_spans)


def test_scores_that_are_not_finite_are_left_out_and_named(tmp_path):
  console = Quiet()
  run_toy(tmp_path / "run", make_config(), console=console, unscored_at=4)
  found = records(tmp_path / "run")
  assert [record["ghost/scored"] for record in found] == [1] * 4 + [0] + [1] * 6
  assert [line for line in console.lines if "not scored" in line] == [
    "maxghost: step 4 is not scored: its scores are not finite in w"
  ]
  steps, rows, _ = score_arrays(tmp_path / "run")
  assert len(steps) == STEPS + 1 and len(rows) == (STEPS - 1) * (B * S - 1)


def test_token_files_of_later_steps_are_removed_on_resume(tmp_path):
  folder = tmp_path / "run"
  run_toy(folder, make_config(steps=6))
  tokens = folder / "ghost" / "tokens"
  (tokens / "step_17.npz").write_bytes(b"from a run that was cut off")
  run_toy(folder, make_config())
  assert sorted(int(path.stem[5:]) for path in tokens.iterdir()) == list(range(STEPS))
  with np.load(tokens / "step_2.npz") as file:
    assert file["contribution_KBT"].shape == (1, B, T) and file["path"].shape == (B, S)
    assert file["path"][0, 1] == "" and file["path"][1, 0].startswith("doc")


def test_a_schedule_without_columns_is_logged_without_them(tmp_path, monkeypatch):
  original = ToyProgram.train_step

  def without(self, state, batch, val_batches):
    state, out = original(self, state, batch, val_batches)
    columns = (*plugins.ledger_columns(), "check_rel_err")
    return state, {name: value for name, value in out.items() if name not in columns}

  monkeypatch.setattr(ToyProgram, "train_step", without)
  console = Quiet()
  run_toy(tmp_path / "run", make_config(), console=console)
  found = records(tmp_path / "run")
  assert "ghost/predicted_drop/manual" not in found[3] and "ghost/actual_drop/manual" in found[3]
  line = next(line for line in console.lines if line.startswith("completed step: 3,"))
  assert "val_loss" in line


def test_no_compilation_counts_as_a_hang(tmp_path):
  """What is waited for with a limit is never a compilation, whichever function it is of."""
  bounded, asked = [], set()

  class Compiling(ToyProgram):
    def __getattribute__(self, name):
      if name in ("train_step", "plain_step", "executable"):
        asked.add(name)
        assert not bounded[-1], name
      return super().__getattribute__(name)

    def is_ready(self, name):
      return False

    def executable(self, name):
      pass

    def plain_step(self, state, batch, val_batches):
      return self._step(state, batch, val_batches)

  cfg = make_config(ghost_every=2, ghost_val_refresh_steps=2)
  watch = lambda step, doing, program="", **given: bounded.append(given.get("bounded", False))  # noqa: E731
  run_toy(tmp_path / "run", cfg, program=Compiling(), watch=watch)
  assert asked == {"train_step", "plain_step", "executable"} and any(bounded)


def test_whether_a_program_is_ready_is_the_same_in_every_process(monkeypatch):
  """What follows from it has exchanges between the processes, whose order must be the same too."""
  future = Future()
  future.set_result(compiled_steps.Executable("closing", print, 0.0, 0.0))
  program, others = compiled_steps.Program({"closing": future}, {}), [False]
  monkeypatch.setattr(compiled_steps.distributed, "gather", lambda own: [own, *others])
  assert not program.is_ready("closing")
  others[0] = True
  assert program.is_ready("closing") and program.function("closing") is print
  monkeypatch.setattr(compiled_steps.distributed, "gather", None)  # no exchange any more
  assert program.is_ready("closing")
