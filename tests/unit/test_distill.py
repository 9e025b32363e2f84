"""Distillation: its divergence against sums over the vocabulary, and its scores against `vmap(grad)`.

B rows, T positions, V vocabulary, k entries of the teacher.
"""

import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import run_copies
import tiny
from flax import nnx
from train_steps import REFERENCE_SEED, TEACHER, TRAIN, VALIDATION, Run

from maxghost import config, data, distill_logits, objectives, train
from maxghost.config import ConfigError
from maxghost.data.teacher_logits import IDS, LOG_SUM, LOGITS, TeacherLogits, Writer, settings
from maxghost.data.types import Batch
from maxghost.objectives.distill import Distillation

KEYS = {"objective": "distill", "distill_teacher": "t", "distill_alpha": 0.7, "distill_temperature": 1.6}


def kl(p_logits, q_logits, temperature: float, k: int = 0) -> np.ndarray:
  """KL(p || q) over the k largest entries of the first, and one for the rest; k = 0: over all."""

  def probabilities(logits):
    logits = np.asarray(logits, np.float64) / temperature
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)

  p, q = probabilities(p_logits), probabilities(q_logits)
  if k:
    order = np.argsort(-p, -1)[..., :k]
    p, q = (np.take_along_axis(x, order, -1) for x in (p, q))
    p, q = (np.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in (p, q))
  return np.where(p > 1e-300, p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300))), 0).sum(-1)


def known(loss: Distillation, teacher_BTV) -> dict:
  """What the loss reads of a teacher with these logits."""
  model = type("Fixed", (), {"hidden": lambda *_: None, "logits": lambda *_: jnp.asarray(teacher_BTV)})()
  return loss.from_reference(model, dict.fromkeys(("inputs", "inputs_position", "inputs_segmentation")))


def test_divergences_are_sums_over_the_vocabulary():
  rng = np.random.default_rng(2)
  teacher, student = (3 * rng.normal(size=(2, 5, 23)).astype(np.float32) for _ in range(2))
  for temperature in (1.0, 2.5):
    found = {
      (way, k): Distillation(temperature=temperature, kl=way, top_k=k)
      for way in ("forward", "reverse")
      for k in (0, 4, 23)
    }
    value = {key: np.asarray(loss.divergence(student, known(loss, teacher))) for key, loss in found.items()}
    np.testing.assert_allclose(value["forward", 0], kl(teacher, student, temperature), rtol=1e-5)
    np.testing.assert_allclose(value["reverse", 0], kl(student, teacher, temperature), rtol=1e-5)
    np.testing.assert_allclose(value["forward", 4], kl(teacher, student, temperature, 4), rtol=1e-4)
    for way in ("forward", "reverse"):
      np.testing.assert_allclose(value[way, 23], value[way, 0], rtol=1e-5)
      assert (value[way, 4] < value[way, 0]).all() and (value[way, 4] >= 0).all()


def test_the_rest_counts_for_a_student_that_is_sure_of_the_entries():
  """It gives the other 6 entries 1e-10, which float32 cannot tell from 0 as a difference from 1; the teacher 0.1."""
  p = np.array([0.5, 0.3, 0.1, *[0.1 / 6] * 6], np.float32)
  student = np.log(np.array([0.6, 0.3, 0.1, *[1e-10 / 6] * 6], np.float32))
  loss = Distillation(top_k=3)
  batch = known(loss, np.log(p)[None, None])
  value, slope = jax.value_and_grad(lambda x: loss.divergence(x, batch).sum())(student[None, None])
  np.testing.assert_allclose(value, kl(np.log(p), student, 1.0, 3), rtol=1e-5)
  np.testing.assert_allclose(slope[0, 0], np.exp(student) - p, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_z_loss_is_whole_whatever_the_share_of_the_teacher(alpha):
  rng = np.random.default_rng(4)
  teacher, student = (rng.normal(size=(2, 5, 23)) for _ in range(2))
  model = types.SimpleNamespace(logits=lambda _: jnp.asarray(student))
  ones = np.ones((2, 5), np.int32)
  batch = known(Distillation(), teacher) | {"targets": 3 * ones, "targets_segmentation": ones}
  hidden: Any = types.SimpleNamespace(peaks_BLH=None, routing=None)
  (plain, _, before), (losses, _, after) = (
    Distillation(alpha=alpha, z_loss_multiplier=z).measured_head(model, hidden, batch) for z in (0.0, 0.5)
  )
  expected = 0.5 * np.log(np.exp(student).sum(-1)) ** 2
  np.testing.assert_allclose(losses - plain, expected, rtol=1e-5)
  assert before == after


@pytest.mark.parametrize("k", [0, 3, 23])
def test_a_student_that_is_its_teacher_has_no_gradient(k):
  logits = np.random.default_rng(3).normal(size=(2, 5, 23)).astype(np.float32)
  for way in ("forward", "reverse"):
    loss = Distillation(temperature=1.7, kl=way, top_k=k)
    batch = known(loss, logits)
    value, slope = jax.value_and_grad(lambda x, loss=loss, batch=batch: loss.divergence(x, batch).sum())(logits)
    assert abs(float(value)) < 1e-5 and np.abs(slope).max() < 1e-6


def batch_of(arrays: dict) -> Batch:
  """A host's batch; every segment is a document of its own."""
  documents = np.arange(arrays["inputs"].shape[0] * tiny.SEGMENTS).reshape(-1, tiny.SEGMENTS)
  return Batch(arrays, documents, 0 * documents, documents[:, 0])


def write_logits(folder, cfg, batches) -> None:
  """What the teacher of `Run` says of these batches, as `maxghost distill-logits` writes it."""
  keys, dtype = cfg.optimizer, cfg.model.dtype
  loss = Distillation(temperature=keys.distill_temperature, top_k=keys.distill_top_k or tiny.VOCAB)
  writer = Writer(folder, loss.top_k, tiny.VOCAB, dtype)
  with jax.enable_x64(dtype == "float64"), tiny.cheap_compilation():
    teacher = tiny.make_model(config.replace(cfg, **TEACHER), seed=REFERENCE_SEED)
    for batch in batches:
      writer.add(batch, loss.from_reference(teacher, batch))
  writer.close({})


OFFLINE = {"distill_teacher": "", "offline_data_dir": "logits"}


@pytest.mark.parametrize(
  ("schedule", "dtype", "more"),
  [
    ("two_pass", "float64", {"distill_top_k": 9}),
    ("two_pass", "float64", OFFLINE),
    ("two_pass", "float32", OFFLINE | {"distill_top_k": 9}),
    pytest.param("reverse_scan", "float32", OFFLINE | {"distill_kl": "reverse"}, marks=pytest.mark.slow),
    pytest.param("reverse_scan", "float32", {"distill_kl": "reverse"}, marks=pytest.mark.slow),
    pytest.param("forward_mode", "float64", {}, marks=pytest.mark.slow),
  ],
)
def test_scores_are_exact(schedule, dtype, more, tmp_path):
  """Of a smaller student, against held-out text by its cross-entropy, and the teacher stays as it is.

  The teacher's logits on disk stand for it, all of them or the largest ones of a position.
  """
  made = {"dtype": dtype, "weight_dtype": dtype, "ghost_schedule": schedule, "ghost_val_sets": ("words@next_token",)}
  made |= {"opt_type": "sgd", **KEYS, **more}
  cfg, train = tiny.make_config(**made), TRAIN[0]
  if cfg.data.offline_data_dir:
    write_logits(tmp_path, cfg, (TRAIN[1], train))
    made["offline_data_dir"] = str(tmp_path)
    train = objectives.create(tiny.make_config(**made)).prepare(batch_of(train)).arrays
  run = Run(batch=train, **made)
  tolerance, cfg = {"float32": 1e-5, "float64": 1e-12}[dtype], run.cfg
  wide = config.replace(cfg, dtype="float64", weight_dtype="float64")
  with jax.enable_x64(True), tiny.cheap_compilation():
    model, teacher = tiny.make_model(wide), tiny.make_model(config.replace(wide, **TEACHER), seed=REFERENCE_SEED)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    keys = cfg.optimizer

    def logits(model, row):
      row = {name: v[None] for name, v in row.items()}
      return model(row["inputs"], row["inputs_position"], row["inputs_segmentation"])[0]

    def of_row(params, row, alpha):
      own, other = logits(nnx.merge(graphdef, params, rest), row), logits(teacher, row) / keys.distill_temperature
      p, q = jax.nn.softmax(other), jax.nn.softmax(own / keys.distill_temperature)
      if keys.distill_top_k:
        top, ids = jax.lax.top_k(p, keys.distill_top_k)
        p, q = jnp.append(top, 1 - top.sum(-1, keepdims=True), -1), jnp.take_along_axis(q, ids, -1)
        q = jnp.append(q, 1 - q.sum(-1, keepdims=True), -1)
      p, q = (p, q) if keys.distill_kl == "forward" else (q, p)
      divergence = (p * (jnp.log(p) - jnp.log(q))).sum(-1) * keys.distill_temperature**2
      entropy = oracles.softmax_losses(own, row["targets"])
      return jnp.sum(jnp.where(row["targets_segmentation"] != 0, alpha * divergence + (1 - alpha) * entropy, 0))

    grad = jax.jit(jax.vmap(jax.value_and_grad(of_row), (None, 0, None)))
    losses, grads = jax.tree.map(np.asarray, grad(params, TRAIN[0], keys.distill_alpha))
    val_losses, val_grads = jax.tree.map(np.asarray, grad(params, VALIDATION, 0.0))
  count, val_count = ((batch["targets_segmentation"] != 0).sum() for batch in (TRAIN[0], VALIDATION))
  pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(val_grads), strict=True)
  dots = sum(np.reshape(g, (tiny.ROWS, -1)) @ np.ravel(np.sum(v, 0)) for g, v in pairs) / count / val_count
  out = run.step(train)
  assert out["loss"] == pytest.approx(np.sum(losses) / count, rel=tolerance)
  assert out["val_loss"][0] == pytest.approx(np.sum(val_losses) / val_count, rel=tolerance)
  scale = out["learning_rate"] * out["clip_factor"]
  assert oracles.relative_error(out["contribution_BSK"][..., 0].sum(1), scale * dots) < tolerance
  parts = cfg.optimizer.distill_alpha, cfg.optimizer.distill_temperature**2
  whole = parts[0] * parts[1] * out["distill/kl"] + (1 - parts[0]) * out["distill/cross_entropy"]
  assert out["loss"] == pytest.approx(whole, rel=1e-5)
  if not cfg.reference:
    return
  with jax.enable_x64(run.wide):
    before = tiny.by_label(tiny.make_model(config.replace(cfg, **TEACHER), seed=REFERENCE_SEED))
  for label, value in tiny.by_label(nnx.merge(run.graphdef, run.state).reference_model).items():
    np.testing.assert_array_equal(value, before[label], err_msg=label)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"distill_teacher": ""}, "objective=distill needs distill_teacher"),
    ({"objective": "next_token"}, "distill_teacher=t is for objective=distill"),
    (OFFLINE | {"objective": "next_token"}, "offline_data_dir=logits is for objective=distill"),
    (OFFLINE | {"dataset_mixture": ("a=1.0",), "ghost_reweight": (2,)}, "in a known order, which ghost_reweight="),
    ({"num_vocab_tiling": 2}, "num_vocab_tiling=1, not 2"),
    ({"distill_top_k": 300}, "distill_top_k=300 is more than vocab_size=263"),
    (
      {"ghost_val_sets": ("p=p/*.jsonl@dpo",), "ghost_val_batch_size": 2},
      "several frozen models; use one, or offline_data",
    ),
  ],
)
def test_what_does_not_go_together_is_refused_by_name(changes, message):
  with pytest.raises(ConfigError, match=message):
    tiny.make_config(**(KEYS | changes))


SMALL = (
  "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=6", "base_mlp_dim=36", "base_num_decoder_layers=2",
  "max_target_length=48", "per_device_batch_size=1", "ghost_val_batch_size=2", "dataset_type=synthetic",
  "dataset_domain_bytes=20000", "enable_tensorboard=false", "eval_interval=-1", "checkpoint_period=1",
  "max_num_checkpoints_to_keep=0", "async_checkpointing=false", "ici_data_parallelism=8", "ici_fsdp_parallelism=1",
)  # fmt: skip


def test_logits_on_disk_are_found_by_their_tokens(tmp_path):
  """Wherever a segment is in a row; what is not there, and what was damaged, is refused by name."""
  cfg = tiny.make_config(**KEYS, distill_top_k=5)
  write_logits(tmp_path, cfg, TRAIN[:2])
  held, shape = TeacherLogits(str(tmp_path)), TRAIN[1]["inputs"].shape
  whole = held.arrays(batch_of(TRAIN[1]), 5, np.float32)
  for row, segment in ((3, 4), (0, 2), (6, 1)):
    alone = {name: v[None] for name, v in tiny.alone(TRAIN[1], row, segment).items()}
    found, where = held.arrays(batch_of(alone), 3, np.float64), TRAIN[1]["inputs_segmentation"][row] == segment
    assert found[LOGITS].dtype == np.float64 and found[IDS].shape == (1, shape[1], 3)
    for name, values in found.items():
      own = whole[name][row, where]
      np.testing.assert_array_equal(values[0, : len(own)], own if name == LOG_SUM else own[:, :3])
  other = dict(TRAIN[1], inputs=np.where(np.arange(shape[1]) == 2, 1, TRAIN[1]["inputs"]))
  with pytest.raises(ConfigError, match="holds no logits of document 0 from byte 0"):
    held.arrays(batch_of(other), 5, np.float32)
  file = tmp_path / "tokens-00000.npy"
  damaged = bytearray(file.read_bytes())
  damaged[-7] ^= 1
  file.write_bytes(damaged)
  with pytest.raises(ConfigError, match=r"is damaged: .*tokens-00000.npy: checksum"):
    TeacherLogits(str(tmp_path))
  with pytest.raises(ConfigError, match="holds no logits of a teacher"):
    TeacherLogits(str(tmp_path / "nowhere"))


STUDENT = ("objective=distill", "base_emb_dim=20", "distill_top_k=5", "eval_interval=2")


def run(name: str, *more, folder, command=train) -> int:
  with tiny.cheap_compilation():
    return command.main([*SMALL, f"base_output_directory={folder}", f"run_name={name}", "steps=2", *more])


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
  """A folder with the run of a wider teacher."""
  folder = tmp_path_factory.mktemp("taught")
  assert run("teacher", "base_emb_dim=28", "ghost_enabled=false", folder=folder) == 0
  return folder


@pytest.fixture(scope="module")
def student(taught):
  """The folder of a run that learns from it."""
  assert run("run", *STUDENT, f"distill_teacher={taught}/teacher", folder=taught / "whole") == 0
  return taught / "whole"


def records(folder) -> list[dict]:
  return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


MEASURED = ("learning/loss", "distill/kl", "distill/cross_entropy", "ghost/val_loss/words")


def test_a_run_learns_from_another_run_and_continues_bit_for_bit(taught, student, tmp_path, capsys):
  """One with another vocabulary is refused before anything is written."""
  asked = (*STUDENT, f"distill_teacher={taught}/teacher")
  run_copies.interrupted(student, tmp_path / "parts")
  assert run("run", *asked, folder=tmp_path / "parts") == 0
  whole, parts = records(student), records(tmp_path / "parts")
  for name in MEASURED:
    assert [record[name] for record in whole] == [record[name] for record in parts]
  assert whole[0]["distill/kl"] > 0
  assert run("other", *asked, "vocab_size=300", folder=tmp_path) == 2
  assert "has another vocabulary (259 entries" in capsys.readouterr().err
  assert not (tmp_path / "other").exists()
  assert objectives.create(config.load(None, *asked)).top_k == 5


def test_a_run_learns_from_logits_on_disk(taught, student, tmp_path, capsys):
  """As from the teacher itself, bit for bit where it continues; rows that others were written for are refused."""
  teacher, given = f"distill_teacher={taught}/teacher", f"offline_data_dir={tmp_path}/logits"
  assert run("run", *STUDENT, teacher, given, folder=tmp_path, command=distill_logits) == 0
  assert "wrote the 5 largest logits of the tokens of" in capsys.readouterr().out and not (tmp_path / "run").exists()
  asked = (*STUDENT, given)
  assert run("run", *asked, teacher, folder=tmp_path / "whole") == 0
  online, whole = records(student), records(tmp_path / "whole")
  for name in (*MEASURED, "eval/avg_loss"):
    found, expected = ([record[name] for record in each if name in record] for each in (whole, online))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
  run_copies.interrupted(tmp_path / "whole", tmp_path / "parts")
  assert run("run", *asked, teacher, folder=tmp_path / "parts") == 0
  for name in MEASURED:
    assert [record[name] for record in whole] == [record[name] for record in records(tmp_path / "parts")]
  refused = {
    "steps=3": "holds the rows of 2 steps; use steps=2", "distill_top_k=6": "holds 5 entries of the teacher",
    "distill_temperature=2.0": "was written for other rows: distill_temperature=1.0 there, 2.0 here",
    "distill_teacher=elsewhere": "teacher, not of distill_teacher=elsewhere",
    "max_target_length=40": "was written for other rows: max_target_length=48 there, 40 here",
    "data_shuffle_seed=3": "data_shuffle_seed=0 there, 3 here", "per_device_batch_size=2": "8 a step there, 16 here",
  }  # fmt: skip
  capsys.readouterr()
  for changed, text in refused.items():
    assert run("other", *asked, changed, folder=tmp_path) == 2
    assert text in capsys.readouterr().err
  assert run("run", *STUDENT, teacher, given, folder=tmp_path, command=distill_logits) == 2
  assert "is there already" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_rows_of_validation_sets_are_written_by_a_command_without_scores():
  """A run with scores may read them later; it may be that there are none."""
  keys = (*SMALL, *STUDENT, "distill_teacher=t", "ghost_enabled=false", "eval_interval=-1", "steps=2")
  for share, held_out in ((0.25, True), (0.0, False)):
    cfg = config.load(None, *keys, f"ghost_val_fraction={share}")
    dataset = data.load_dataset(cfg.data, batch_size=8)
    batches = -(-len(dataset.validation_rows()) // 8) if held_out else 0
    assert len(list(distill_logits._rows(cfg, dataset, 8))) == batches + 2


def test_logits_are_written_for_a_run_that_has_another_frozen_model(taught, tmp_path, capsys):
  """Pairs have the start of the run as their reference; a run with both needs the teacher's logits on disk."""
  pair = json.dumps({"prompt": "what?", "chosen": "yes, this", "rejected": "no"})
  (tmp_path / "pairs.jsonl").write_text(f"{pair}\n" * 20)
  (tmp_path / "held.txt").write_text("what the teacher says of this line\n")
  asked = (
    "objective=dpo", "dataset_type=text", f"dataset_files=[p={tmp_path}/pairs.jsonl]", "ghost_val_fraction=0.5",
    "ghost_val_copies=keep", f"ghost_val_sets=[p,said={tmp_path}/held.t*@distill]", f"distill_teacher={taught}/teacher",
    f"offline_data_dir={tmp_path}/logits", "per_device_batch_size=2",
  )  # fmt: skip
  assert run("run", *asked, folder=tmp_path, command=distill_logits) == 0, capsys.readouterr().err
  assert TeacherLogits(str(tmp_path / "logits")).about["settings"] == settings(
    config.load(None, *SMALL, "steps=2", *asked)
  )
  assert "of the tokens of 1 segments" in capsys.readouterr().out


def test_a_folder_of_something_else_and_other_logits_are_named(tmp_path):
  (tmp_path / "index.json").write_text("{}")
  with pytest.raises(ConfigError, match=r"holds no logits of a teacher: index\.json: it is of something else"):
    TeacherLogits(str(tmp_path))
  before, now = (data.load_dataset(tiny.make_config(dataset_type="synthetic").data).train for _ in range(2))
  before.depend_on("logits", "a")
  now.depend_on("logits", "b")
  with pytest.raises(ConfigError, match=r"changed since the position was saved \(changed: logits\); restore"):
    now.restore(before.state())
