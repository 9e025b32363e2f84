"""DiLoCo against a plain loop over slices in numpy: parameters, scores, what is sent, resuming, what is refused.

R slices, H steps in a period, F fragments; 8 rows of one document each, 16 positions, 2 layers (`meshes`).
"""

import contextlib
import functools
import itertools
import json
import subprocess
import sys

import jax
import meshes
import numpy as np
import oracles
import pytest
import run_copies
import tiny
from flax import nnx

from maxghost import attribution, cli, config, scores, train
from maxghost.config import ConfigError
from maxghost.interop.load_tree import load_tree
from maxghost.optimizers import by_label
from maxghost.parallel import collectives
from maxghost.parallel.shardings import Layout, own_rows
from maxghost.training import compiled_steps, memory_report, run_directory, scoring, state
from maxghost.training.outer import MERGE, SEND, SYNC, Outer
from maxghost.training.plan import Plan

ROWS = ((16,), (9,), (11,), (2,), (6,), (12,), (5,), (13,))
BATCHES = [tiny.make_batch(ROWS, seed=300 + i, num_positions=meshes.POSITIONS) for i in range(7)]
VALIDATION = tiny.make_batch(((6,), (16,), (4,), (12,)), seed=400, num_positions=meshes.POSITIONS)
RATE, CLIP = 3e-3, 0.5  # some steps of some slices are clipped
KEYS = {
  "enable_diloco": True, "dcn_data_parallelism": 2, "diloco_sync_period": 3, "diloco_outer_lr": 0.6, "steps": 7,
  "lr_schedule_type": "constant", "learning_rate": RATE, "gradient_clipping_threshold": CLIP, "eval_interval": -1,
}  # fmt: skip
STREAMED = {
  "num_diloco_fragments": 2, "num_communication_overlapping_steps": 1, "communication_overlapping_alpha": 0.25,
}  # fmt: skip


def plan_of(num_devices: int, **changes) -> Plan:
  keys = meshes.SIZES | {"per_device_batch_size": 8 // num_devices} | KEYS | changes
  cfg = config.replace(config.load(), **keys)
  return Plan.of(cfg, Layout.of(cfg.parallel, jax.devices()[:num_devices]))


def arrays(train_state) -> dict:
  """{slash path: array} of a whole train state."""
  return {"/".join(map(str, path)): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(train_state)}


class Run:
  """states: arrays before the first step and after each, with its outer step. apart: before the outer step."""

  def __init__(self, num_devices: int = 2, batches=BATCHES, **changes):
    self.plan = plan = plan_of(num_devices, **changes)
    self.program = program = compiled_steps.build(plan)
    begun = meshes.place(plan.cfg, plan.graphdef, plan.inner, plan.layout)
    now = plan.apart.begin(begun) if plan.apart else begun
    rows = (plan.layout.put(VALIDATION),) if plan.cfg.val_sets else ()
    self.states, self.apart, self.outs, self.accounts = [arrays(now)], [], [], []
    for done, batch in enumerate(batches, 1):
      now, out = program.function("train_step")(now, plan.layout.put(batch, len(ROWS)), rows)
      self.outs.append(program.to_host(out))
      self.apart.append(arrays(now))
      if program.outer:
        moves = Outer(plan.apart).due(done)
        now, account = Outer(plan.apart).moved(program.function, now, moves, rows if moves else ())
        self.accounts.append(account)
      self.states.append(arrays(now))


@functools.cache
def run_of(**changes) -> Run:
  return Run(**changes)


@functools.cache
def gradients_of(cfg) -> oracles.ExampleGradients:
  return oracles.ExampleGradients(tiny.make_model(cfg))


def below(values: dict, start: str) -> dict:
  return {label.removeprefix(start): x for label, x in values.items() if label.startswith(start)}


class Slice:
  """One slice in numpy: AdamW or SGD by their formulas on the gradient of the mean loss of its own rows."""

  def __init__(self, start: dict, cfg, frozen: tuple = ()):
    self.cfg, self.frozen, self.t = cfg, frozen, 0
    self.x = {k: x[0].astype(np.float64) for k, x in below(start, "inner_state/model/").items()}
    name = "inner_state/optimizer/opt_state/0/"
    self.m, self.v = (
      {k: x[0].astype(np.float64) for k, x in below(start, name + kind).items()} for kind in ("mu/", "nu/")
    )

  def step(self, rows: dict) -> float:
    sums, each = gradients_of(plain(self.cfg)).with_losses(rows, self.x)
    gradient = {k: g for k, g in oracles.batch_gradient(each, rows).items() if k not in self.frozen}
    norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
    self.clip_factor = min(1.0, CLIP / norm)
    o, self.t = self.cfg.optimizer, self.t + 1
    for k, g in gradient.items():
      g = g * self.clip_factor
      if o.opt_type == "sgd":
        self.x[k] = self.x[k] - RATE * g
        continue
      self.m[k] = o.adam_b1 * self.m[k] + (1 - o.adam_b1) * g
      self.v[k] = o.adam_b2 * self.v[k] + (1 - o.adam_b2) * g**2
      m, v = self.m[k] / (1 - o.adam_b1**self.t), self.v[k] / (1 - o.adam_b2**self.t)
      self.x[k] = self.x[k] - RATE * (m / (np.sqrt(v) + o.adam_eps) + o.adam_weight_decay * self.x[k])
    return sums.sum() / oracles.token_counts(rows).sum()


def plain(cfg):
  """The configuration of a model alone, which the oracle's gradients depend on."""
  return config.replace(config.load(), **{k: cfg.flat()[k] for k in (*meshes.SIZES, "dtype", "weight_dtype")})


def loop(run: Run, frozen: tuple = ()):
  """DiLoCo as the papers write it, over (parameter, layer) pairs; yields (slices, global, momentum, losses)."""
  cfg = run.plan.cfg
  p = cfg.parallel
  slices = [Slice(run.states[0], cfg, frozen) for _ in range(p.dcn_data_parallelism)]
  g = {k: x.astype(np.float64) for k, x in below(run.states[0], "model/").items()}
  momentum = {k: np.zeros_like(x) for k, x in g.items() if k not in frozen}
  own = {"/".join(map(str, path)): fragments for path, fragments in run.plan.apart.trained.items()}
  assert own.keys() == momentum.keys()
  period, count, late = p.diloco_sync_period, p.num_diloco_fragments, p.num_communication_overlapping_steps
  flying: list = []

  def cells(fragment):
    for k in momentum:
      if "/layers/" in k and count > 1:
        yield from ((k, i) for i in range(len(g[k])) if i % count == fragment)
      elif own[k] == (fragment,):
        yield k, ...

  def send(fragment):
    return {(k, i): g[k][i] - np.mean([one.x[k][i] for one in slices], 0) for k, i in cells(fragment)}

  def meet(pseudo, alpha):
    for (k, i), delta in pseudo.items():
      momentum[k][i] = p.diloco_outer_momentum * momentum[k][i] + delta
      g[k][i] = g[k][i] - p.diloco_outer_lr * (delta + p.diloco_outer_momentum * momentum[k][i])
      for one in slices:
        one.x[k][i] = alpha * one.x[k][i] + (1 - alpha) * g[k][i]

  per_slice = len(ROWS) // len(slices)
  for done, batch in enumerate(BATCHES, 1):
    parts = [{k: x[r * per_slice : (r + 1) * per_slice] for k, x in batch.items()} for r in range(len(slices))]
    losses = [one.step(rows) for one, rows in zip(slices, parts, strict=True)]
    last = done == cfg.run.steps
    for when, pseudo in [entry for entry in flying if entry[0] == done or last]:
      meet(pseudo, p.communication_overlapping_alpha)
      flying.remove((when, pseudo))
    for fragment in range(count):
      if last or (not late and done % period == fragment * period // count):
        meet(send(fragment), 0.0)
      elif done % period == fragment * period // count:
        flying.append((done + late, send(fragment)))
    yield slices, g, momentum, losses


CASES = {
  "adamw": {},
  "sgd": {"opt_type": "sgd"},
  "every step": {"diloco_sync_period": 1, "diloco_outer_lr": 1.0, "diloco_outer_momentum": 0.0},
  "fragments": {"num_diloco_fragments": 2},
  "streamed": STREAMED,
  "streamed masked": STREAMED | {"trainable_parameters_mask": ("*self_attention*", "*norm*")},
}


QUICK = (("adamw", False), ("sgd", True), ("streamed masked", False))


@pytest.mark.parametrize(
  ("case", "wide"),
  [
    pytest.param(case, wide, id=f"{case}-{'f64' if wide else 'f32'}", marks=[] if both in QUICK else [pytest.mark.slow])
    for both in itertools.product(CASES, (False, True))
    for case, wide in [both]
  ],
)
def test_the_trainer_is_a_plain_loop_over_slices(case, wide):
  types = {"dtype": "float64", "weight_dtype": "float64"} if wide else {}
  with jax.enable_x64(True) if wide else contextlib.nullcontext():
    run = run_of(**CASES[case], **types, ghost_enabled=case == "adamw")
    frozen = ()
    if "masked" in case:
      frozen = tuple(k for k in below(run.states[0], "model/") if "attention" not in k and "norm" not in k)
      assert 0 < len(frozen) < 6
    # Adam's first moment is kept in float32 (mu_dtype).
    tolerance, clipped = (1e-9 if "sgd" in case else 1e-7) if wide else 2e-5, []
    for step, (slices, g, momentum, losses) in enumerate(loop(run, frozen)):
      found, out = run.states[step + 1], run.outs[step]
      assert [out[f"diloco/loss/{r}"] for r in range(2)] == pytest.approx(losses, rel=tolerance)
      assert out["loss"] == pytest.approx(np.mean(losses), rel=tolerance)
      clipped += [one.clip_factor for one in slices]
      for k, x in g.items():
        start = run.states[0][f"model/{k}"]
        moved = np.abs(x - start).max()
        own_R = found[f"inner_state/model/{k}"]
        rounding = 0 if wide else 4e-7 * np.abs(x).max()
        assert np.abs(found[f"model/{k}"] - x).max() <= tolerance * moved + rounding, (step, k)
        for r, one in enumerate(slices):
          assert np.abs(own_R[r] - one.x[k]).max() < tolerance * np.abs(one.x[k]).max(), (step, r, k)
        if k in momentum and np.abs(momentum[k]).max() > 0:
          at = found[f"outer_state/momentum/{k}"]
          assert np.abs(at - momentum[k]).max() <= tolerance * np.abs(momentum[k]).max() + rounding, (step, k)
        if k in frozen:
          np.testing.assert_array_equal(found[f"model/{k}"], start)
    assert min(clipped) < 1 and len(set(clipped)) > 7  # each slice clips by its own norm
    norm = "model/decoder/decoder_norm/scale"  # after the last outer step every slice has the global parameters
    np.testing.assert_array_equal(found[norm], found[f"inner_state/{norm}"][0])
    assert not np.array_equal(*run.apart[-1][f"inner_state/{norm}"])


def test_scores_are_of_each_slices_own_parameters():
  """Contributions, shares and the ledger are parts of the mean over slices, which have parted by then."""
  run = run_of(ghost_direction="sgd")
  examples = gradients_of(plain(run.plan.cfg))
  for step in (1, 4):
    values, out = run.states[step], run.outs[step]
    predicted = []
    for r in range(2):
      own = {k: x[r] for k, x in below(values, "inner_state/model/").items()}
      rows = {k: x[4 * r : 4 * r + 4] for k, x in BATCHES[step].items()}
      G = oracles.batch_gradient(examples(VALIDATION, own), VALIDATION)
      each = examples(rows, own)
      norm = np.sqrt(sum((g**2).sum() for g in oracles.batch_gradient(each, rows).values()))
      dot = sum(oracles.dots(each, G).values())
      count = oracles.token_counts(rows)
      share = count / count.sum()
      expected = RATE * min(1.0, CLIP / norm) * dot / count.sum() / 2
      found = out["contribution_BSK"][4 * r : 4 * r + 4, 0, 0]
      assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
      np.testing.assert_allclose(out["share_BS"][4 * r : 4 * r + 4, 0], share / 2, rtol=1e-6)
      np.testing.assert_allclose(
        out["score_dot_BSK"][4 * r : 4 * r + 4, 0, 0], dot / np.maximum(count, 1), rtol=1e-3, atol=1e-5
      )
      predicted.append(expected.sum())
    assert out["predicted_examples"][0] == pytest.approx(sum(predicted), rel=1e-4)
    assert out["contribution_BSK"].sum() == pytest.approx(float(out["predicted_examples"][0]), rel=1e-4)


FULL = [tiny.make_batch(((16,),) * 4, seed=500 + i, num_positions=meshes.POSITIONS, mask=0.0) for i in range(6)]
FULL = [{k: np.concatenate([x, FULL[i + 3][k]]) for k, x in FULL[i].items()} for i in range(3)]


def test_one_step_periods_of_sgd_are_synchronous_training():
  """With equal numbers of tokens in the slices, without clipping: parameters to 1e-6, scores too."""
  keys = {"opt_type": "sgd", "learning_rate": 0.1, "gradient_clipping_threshold": 0.0, "steps": 3}
  meeting = {"diloco_sync_period": 1, "diloco_outer_lr": 1.0, "diloco_outer_momentum": 0.0}
  one = Run(4, FULL, dcn_data_parallelism=4, **keys, **meeting)
  other = Run(4, FULL, enable_diloco=False, dcn_data_parallelism=4, **keys)
  for k, x in below(other.states[-1], "model/").items():
    assert np.abs(one.states[-1][f"model/{k}"] - x).max() < 1e-6 * np.abs(x).max()
    assert np.abs(x - other.states[0][f"model/{k}"]).max() > 1e-3 * np.abs(x).max()
  for ours, theirs in zip(one.outs, other.outs, strict=True):
    for name in ("contribution_BSK", "share_BS", "loss", "val_loss", "predicted_examples", "param_contribution"):
      for a, b in zip(*map(jax.tree.leaves, (ours[name], theirs[name])), strict=True):
        assert meshes.relative_error(a, b) < 1e-5, name


def test_the_account_of_an_outer_step():
  """By hand from the gradient at the global parameters; momentum and slices add up to the prediction, which a small
  step measures."""
  run = run_of(opt_type="sgd")
  cfg = run.plan.cfg.parallel
  assert [bool(account) for account in run.accounts] == [False, False, True, False, False, True, True]
  for done in (3, 6):
    before, after, account = run.apart[done - 1], run.states[done], run.accounts[done - 1]
    at = below(before, "model/")
    G = oracles.batch_gradient(gradients_of(plain(run.plan.cfg))(VALIDATION, at), VALIDATION)
    factor = cfg.diloco_outer_lr * (1 + cfg.diloco_outer_momentum) / 2
    for r in range(2):
      pseudo = {k: x - before[f"inner_state/model/{k}"][r] for k, x in at.items()}
      assert account["slice"][r, 0] == pytest.approx(
        factor * sum((G[k] * x).sum() for k, x in pseudo.items()), rel=1e-3
      )
    moved = -sum((G[k] * (after[f"model/{k}"] - x)).sum() for k, x in at.items())
    assert account["predicted_drop"][0] == pytest.approx(moved, rel=1e-3)
    assert account["slice"].sum() == pytest.approx(account["pseudo_gradient"][0], rel=1e-5)
    assert account["actual_drop"][0] == pytest.approx(account["predicted_drop"][0], rel=0.05)
  assert run.accounts[2]["momentum"][0] == 0 and abs(run.accounts[5]["momentum"][0]) > 1e-6


# What is sent.


def sent(compiled, plan) -> list:
  return collectives.read(compiled.as_text(), dict(plan.layout.mesh.shape), ("diloco",))


@pytest.mark.parametrize("devices", [4, 8])
def test_only_outer_steps_send_between_slices(devices):
  """Four slices of one or two devices; H = 50 sends less than 1/40 of what synchronous training does, on average."""
  keys = {"dcn_data_parallelism": 4, "per_device_batch_size": 1, "ghost_schedule": "two_pass"}
  plan = plan_of(devices, **keys, num_diloco_fragments=2)
  program = compiled_steps.build(plan)
  for name in ("train_step", "closing", "outer_gradients", "outer_losses"):
    assert not [one for one in sent(program.executable(name).call, plan) if "diloco" in one.axes], name
  size = 4 * plan.num_params * 4 // devices  # bytes of a device's part
  parts = []
  for fragment in range(2):
    crossing = [one for one in sent(program.executable(f"outer_step_sync_{fragment}").call, plan)]
    crossing = [one for one in crossing if "diloco" in one.axes]
    assert {one.axes for one in crossing} == {("diloco",)} and {one.kind for one in crossing} == {"all-reduce"}
    parts.append(sum(one.num_bytes * one.count for one in crossing))
    assert parts[-1] == Outer(plan.apart).bytes_sent(fragment)
  norms = 0 if devices == 4 else 4 * 5 * 24  # whole on both devices of a slice
  assert size <= sum(parts) <= size + norms and max(parts) < 0.6 * size
  together = plan_of(devices, enable_diloco=False, ghost_enabled=False, **keys)
  step = compiled_steps.lower(
    "train_step", compiled_steps.train_step(together)[0], together.layout, *together.arguments
  )
  every = [one for one in sent(step.compile(), together) if "data" in one.axes]
  assert sum(parts) / 50 < sum(one.num_bytes * one.count for one in every) / 40


def test_the_order_of_outer_steps():
  """H = 6, F = 2, 2 steps of overlap; a run of 20 steps, and one continued after 8, whose last step met early."""
  streamed = {"diloco_sync_period": 6, "num_communication_overlapping_steps": 2, "num_diloco_fragments": 2}
  due = Outer(plan_of(2, **streamed, steps=20).apart).due
  assert {done: due(done) for done in range(1, 21) if due(done)} == {
    3: [(SEND, 1)], 5: [(MERGE, 1)], 6: [(SEND, 0)], 8: [(MERGE, 0)], 9: [(SEND, 1)], 11: [(MERGE, 1)],
    12: [(SEND, 0)], 14: [(MERGE, 0)], 15: [(SEND, 1)], 17: [(MERGE, 1)], 18: [(SEND, 0)],
    20: [(MERGE, 0), (SYNC, 0), (SYNC, 1)],
  }  # fmt: skip
  due = Outer(plan_of(2, **streamed, steps=7).apart).due
  assert due(7) == [(MERGE, 0), (SYNC, 0), (SYNC, 1)]
  due = Outer(plan_of(2, diloco_sync_period=6, steps=8).apart).due
  assert {done: due(done) for done in range(1, 9) if due(done)} == {6: [(SYNC, 0)], 8: [(SYNC, 0)]}


def test_nothing_is_merged_twice():
  """A run that ended while a fragment was on its way, and is continued, merges what is no longer on its way."""
  plan = plan_of(2, **STREAMED)
  program = compiled_steps.build(plan)
  now = plan.apart.begin(meshes.place(plan.cfg, plan.graphdef, plan.inner, plan.layout))
  rows = (plan.layout.put(VALIDATION),)
  now, _ = program.function("train_step")(now, plan.layout.put(BATCHES[0], 8), rows)
  _, gradients = program.executable("outer_gradients").call(now, rows)
  move = lambda kind, now, *rest: program.executable(f"outer_step_{kind}_0").call(now, *rest)  # noqa: E731
  now, _ = move(SEND, now, ())
  now, _ = program.function("train_step")(now, plan.layout.put(BATCHES[1], 8), rows)
  now, account = move(MERGE, now, gradients)
  assert abs(account["pseudo_gradient"][0]) > 0
  before = arrays(now)
  now, account = move(MERGE, now, gradients)
  assert {k for k, x in arrays(now).items() if not np.array_equal(x, before[k])} == set()
  assert account["pseudo_gradient"][0] == 0


def test_slices_have_parts_of_a_whole_or_none():
  """After the last step of a run with overlap, one move is divided among the slices and another is not."""
  ones = jax.device_put(np.ones((2, 1)))
  known = {"momentum": ones, "pseudo_gradient": ones}
  found = {"outer_gradients": (ones, ()), "outer_losses": ones, "outer_step_merge_0": (None, known)}
  found["outer_step_sync_0"] = None, known | {"slice": ones}
  outer, moves = Outer(plan_of(2, **STREAMED).apart), [(MERGE, 0), (SYNC, 0)]
  account = lambda moves: outer.moved(lambda name: lambda *_: found[name], None, moves, (None,))[1]  # noqa: E731
  assert "slice" in account(moves[1:]) and "slice" not in account(moves)


# Runs of the command.

COMMAND = (
  "base_num_decoder_layers=2", "base_emb_dim=32", "base_mlp_dim=48", "head_dim=8", "base_num_kv_heads=4",
  "vocab_size=272", "max_target_length=32", "per_device_batch_size=2", "dataset_type=synthetic", "eval_steps=1",
  "ghost_val_sets=words", "ghost_val_batch_size=4", "learning_rate=3e-3", "steps=8", "checkpoint_period=5",
  "eval_interval=4", "ghost_log_period=3", "enable_tensorboard=false", "sharding_tolerance=1.0",
  "attention=dot_product", "enable_diloco=true", "dcn_data_parallelism=4", "diloco_sync_period=3",
  "num_diloco_fragments=2", "num_communication_overlapping_steps=2", "adam_eps=1e-4",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """Four slices of two devices, 8 steps. The checkpoint after 5 steps comes after an outer step of fragment 0, while
  fragment 1 is on its way."""
  folder = tmp_path_factory.mktemp("diloco")
  assert train.main([*COMMAND, f"base_output_directory={folder}", "run_name=run"]) == 0
  return folder / "run"


def test_a_run_resumes_with_the_same_bits(whole, tmp_path):
  again = tmp_path / "again" / "run"
  assert run_copies.interrupted(whole.parent, again.parent) == "8"
  assert train.main([*COMMAND, f"base_output_directory={again.parent}", "run_name=run"]) == 0

  def records(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]

  assert records(again) == records(whole)
  a, b = attribution.load(again), attribution.load(whole)
  for name in ("step", "contribution", "dot", "share", "slice"):
    np.testing.assert_array_equal(a[name], b[name])
  ours, theirs = (held(run, 8) for run in (again, whole))
  assert ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)


def held(run, step: int) -> dict:
  """{slash path: array} of a checkpoint."""
  import orbax.checkpoint as ocp

  tree = ocp.StandardCheckpointer().restore(run / "checkpoints" / str(step) / "items")
  return {label: np.asarray(x) for label, x in by_label(tree).items()}


def test_the_log_names_the_slices_and_adds_up(whole, capsys):
  log = attribution.load(whole)
  lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
  assert set(log["slice"]) == {"0", "1", "2", "3"}
  for line in lines:
    here = log["step"] == line["step"]
    assert log["share"][here].sum() == pytest.approx(1, rel=1e-5)
    by_slice = [log["share"][here & (log["slice"] == str(r))].sum() for r in range(4)]
    assert by_slice == pytest.approx([0.25] * 4, rel=1e-5)
    sums = log["contribution"][here].sum(), line["ghost/predicted_examples/words"]
    assert sums[0] == pytest.approx(sums[1], rel=1e-3, abs=1e-6)
    assert line["ghost/check_rel_err/words"] < 1e-5
    # The account of a step ends before the outer step: first order and curvature explain the measured drop.
    explained = line["ghost/predicted_drop/words"] + line["ghost/curvature/words"]
    assert line["ghost/actual_drop/words"] == pytest.approx(explained, rel=0.05, abs=2e-4)
  met = [line["step"] for line in lines if "diloco/actual_drop/words" in line]
  assert met == [2, 4, 5, 7]  # fragment 1 is sent after 1 and 4 steps, fragment 0 after 3 and 6; at the end both meet
  capsys.readouterr()
  assert scores.main([str(whole), "--by", "slice"]) == 0
  assert capsys.readouterr().out.startswith("slice")


def test_readers_of_parameters_read_the_global_ones(whole, tmp_path, capsys):
  from maxghost import load_model

  saved = held(whole, 5)
  cfg = config.load(whole / "config.yml")
  wanted = state.to_tree(state.abstract_arrays(tiny.abstract_split(cfg)[1]))
  tree = load_tree(whole / "checkpoints" / "5", {"model": wanted})["model"]
  for label, x in by_label(tree).items():
    np.testing.assert_array_equal(x, saved[f"model/{label}"])
    assert not np.array_equal(x, saved[f"inner_state/model/{label}"][0])
  assert load_model.find(whole)[1] == cfg
  steps = whole / "checkpoints" / "8"
  places = ["--source_path", str(steps), "--target_path", str(tmp_path / "linen")]
  convert = ["checkpoint", "convert", *places, "--to", "linen"]
  for command in (["generate", str(whole), "--prompt", "a", "--max_new_tokens", "3"], convert):
    assert cli.main(command) == 0, capsys.readouterr().err
  assert cli.main(["checkpoint", "hf", "export", str(whole), str(tmp_path / "hf")]) == 0
  begins = [f"load_parameters_path={whole}", f"base_output_directory={tmp_path}", "run_name=next", "steps=1"]
  assert train.main([*COMMAND, *begins]) == 0  # begins every slice with them
  after = json.loads((tmp_path / "next" / "metrics.jsonl").read_text().splitlines()[0])
  assert after["learning/current_learning_rate"] >= 0 and after["ghost/val_loss/words"] > 0


def test_evaluations_are_of_the_global_parameters():
  plan = plan_of(4, dcn_data_parallelism=2, eval_interval=4)
  program, layout = compiled_steps.build(plan), plan.layout
  now = plan.apart.begin(meshes.place(plan.cfg, plan.graphdef, plan.inner, layout))
  for batch in BATCHES[:2]:
    now, _ = program.function("train_step")(now, layout.put(batch, 8), (layout.put(VALIDATION),))
  values = below(arrays(now), "model/")
  losses, _ = gradients_of(plain(plan.cfg)).with_losses(BATCHES[5], values)
  total, weight = program.function("evaluate")(now, layout.put(BATCHES[5]))
  assert float(total) == pytest.approx(losses.sum(), rel=1e-5) and weight == oracles.token_counts(BATCHES[5]).sum()
  crossing = [one for one in sent(program.executable("evaluate").call, plan) if "diloco" in one.axes]
  assert max(one.num_bytes for one in crossing) <= BATCHES[5]["inputs"].nbytes  # token ids and sums, no activation


def test_the_memory_estimate_counts_every_array_of_the_state():
  for changes in ({}, STREAMED):
    plan = plan_of(4, dcn_data_parallelism=2, **changes)
    compiled = compiled_steps.build(plan).executable()
    sizes = memory_report.compiled_sizes(compiled.call.memory_analysis())
    assert plan.memory.arguments == pytest.approx(sizes["arguments"], rel=0.01)
    assert plan.memory.resident["state of the outer step"]


def test_the_rows_of_a_process_know_their_slice():
  plan = plan_of(8, dcn_data_parallelism=4, per_device_batch_size=2)
  assert plan.slices.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
  assert own_rows(plan.layout.rows(16, apart=True), 16, 0).num_shards == 1
  assert plan_of(8, enable_diloco=False, dcn_data_parallelism=4).slices is None


REFUSED = [
  ({"dcn_data_parallelism": -1}, "dcn_data_parallelism=-1 names no second one; give dcn_data_parallelism the number"),
  ({"dcn_data_parallelism": 1}, "dcn_data_parallelism=1 names no second one"),
  ({"num_diloco_fragments": 3, "base_num_decoder_layers": 2}, "num_diloco_fragments=3 is too many.* use 2 or less"),
  ({"num_diloco_fragments": 3, "diloco_sync_period": 2}, "a step of diloco_sync_period=2; use 2 or less"),
  ({"num_diloco_fragments": 2, "scan_layers": False}, "use scan_layers=true, or num_diloco_fragments=1"),
  ({"num_communication_overlapping_steps": 36}, "=36 is not less than diloco_sync_period=36.* use 35 or less"),
  ({"document_fields": ("slice",)}, "records the slice of each row as 'slice'"),
  ({"lora_rank": 4}, "lora_rank=4 keeps a frozen model in each slice.* use lora_rank=0, or enable_diloco=false"),
  ({"num_experts": 4, "decoder_block": "mixtral"}, "num_experts=4 sends routing between the slices"),
  ({"dropout_rate": 0.1}, "dropout_rate=0.1 would draw the same masks"),
  ({"offload_to_host": ("optimizer",), "segment_lengths": (2,), "ghost_enabled": False}, "offload_to_host"),
  ({"objective": "dpo"}, "objective=dpo has a frozen model"),
  ({"load_full_state_path": "elsewhere"}, "load_full_state_path=elsewhere has no state of slices"),
  ({"ghost_select": "topk"}, "ghost_select=topk chooses rows of one model"),
  ({"ghost_curvature": "secant"}, "ghost_curvature=secant compares steps across outer ones"),
  ({"ghost_val_every": 2}, "ghost_val_every=2 scores across outer steps"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_work_is_refused_by_name(changes, message):
  with pytest.raises(ConfigError, match=message):
    config.replace(config.load(), **({"enable_diloco": True, "dcn_data_parallelism": 2} | changes))


def test_a_missing_slice_is_one_line_before_jax(tmp_path):
  code = (
    "import sys; from maxghost import train; "
    f"code = train.main(['enable_diloco=true', 'base_output_directory={tmp_path}']); "
    "assert 'jax' not in sys.modules; sys.exit(code)"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
  assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
  assert "enable_diloco=true trains slices apart, but dcn_data_parallelism=-1 names no second one" in done.stderr
  assert list(tmp_path.iterdir()) == []


def test_a_run_keeps_its_slices(tmp_path, capsys):
  """The outer keys and the number of slices may not change; other keys of the mesh may."""
  base = [*COMMAND, f"base_output_directory={tmp_path}", "run_name=run"]
  run_directory.claim(run_directory.inspect(cfg := config.load(None, *base)), cfg).close()
  (tmp_path / "run" / run_directory.METRICS_FILE).write_text('{"step": 0}\n')
  assert not run_directory.inspect(config.load(None, *base, "ici_fsdp_parallelism=2")).is_new
  assert train.main([*base, "dcn_data_parallelism=2", "steps=9"]) == 2
  assert "holds a DiLoCo run of 4 slices, each with parameters of its own; use dcn_data" in capsys.readouterr().err
  assert train.main([*base, "diloco_outer_lr=0.5"]) == 2
  assert "diloco_outer_lr: the run has 0.3, the command 0.5" in capsys.readouterr().err


def first_steps(plan: Plan, batches: list, begun):
  """(state, outputs on the host) after the given batches, with the train step alone."""
  step, _ = compiled_steps.train_step(plan)
  compiled = compiled_steps.lower("train_step", step, plan.layout, *plan.arguments).compile()
  if plan.apart:
    assert not [one for one in sent(compiled, plan) if "diloco" in one.axes]
  now, outs = begun, []
  for batch in batches:
    now, out = compiled(now, plan.layout.put(batch, len(batch["inputs"])), (plan.layout.put(VALIDATION),))
    outs.append((plan.apart or scoring).to_host(out))
  return arrays(now), outs


COMBINED = {
  "muon": {"opt_type": "muon"},
  "accumulation": {"gradient_accumulation_steps": 2},
  "reverse_scan": {"ghost_schedule": "reverse_scan", "segment_lengths": (1,)},
  "forward_mode": {"ghost_schedule": "forward_mode"},
  "concat": {"ghost_schedule": "concat", "ghost_direction": "sgd"},
  "second_order": {"ghost_direction": "second_order"},
  "rank": {"ghost_rank": 4},
  "qk_clip": {"use_qk_clip": True, "qk_clip_threshold": 0.01},
  "mtp": {"mtp_num_layers": 1},
  "path": {"ghost_direction": "path", "ghost_detail": "token"},
  "marginal": {"ghost_direction": "marginal", "gradient_clipping_threshold": 0.1},
}


@pytest.mark.parametrize(
  "case", [pytest.param(name, marks=[] if name == "reverse_scan" else [pytest.mark.slow]) for name in COMBINED]
)
def test_a_slice_is_a_run_of_its_own(case):
  """Two steps of two slices are those of two plain runs with half of the rows each; scores are halved."""
  keys = COMBINED[case] | {"learning_rate": 1e-3}
  rows = 4 // keys.get("gradient_accumulation_steps", 1)
  plan = plan_of(2, **keys, per_device_batch_size=rows)
  begun = meshes.place(plan.cfg, plan.graphdef, plan.inner, plan.layout)
  whole, outs = first_steps(plan, BATCHES[:2], plan.apart.begin(begun))
  for r in range(2):
    alone = plan_of(1, enable_diloco=False, dcn_data_parallelism=1, **keys, per_device_batch_size=rows)
    begun = meshes.place(alone.cfg, alone.graphdef, alone.state, alone.layout)
    halves = [{k: x[4 * r : 4 * r + 4] for k, x in batch.items()} for batch in BATCHES[:2]]
    expected, theirs = first_steps(alone, halves, begun)
    for k, x in expected.items():
      found = whole[f"inner_state/{k}"]
      found = found[r] if found.ndim > x.ndim else found
      assert np.abs(found - x).max() <= 2e-5 * max(np.abs(x).max(), 1e-6), k
    for ours, own in zip(outs, theirs, strict=True):
      assert ours[f"diloco/loss/{r}"] == pytest.approx(float(own["loss"]), rel=1e-5)
      for name, axis in scoring.ROW_AXIS.items():
        for a, b in zip(*(jax.tree.leaves(out.get(name, ())) for out in (ours, own)), strict=True):
          a = np.take(a, range(4 * r, 4 * r + 4), axis) * (2 if name in HALVED else 1)
          assert meshes.relative_error(a, b) < 1e-4, name


HALVED = ("contribution_BSK", "share_BS", "param_contribution", "token_contribution_KBT")
