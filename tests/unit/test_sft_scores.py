"""Scores of conversations against the gradient of each conversation alone: masked prompts, several to a row, packed.

B=3 rows of T=60, S=5 segments of a row at most, N conversations, V vocabulary.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx
from train_steps import Run

from maxghost import attribute, config, data
from maxghost.attribution.texts import Source
from maxghost.data.conversations import Rendering
from maxghost.data.tokenizers import ByteTokenizer

T = 60


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
  path = tmp_path_factory.mktemp("chat") / "x.jsonl"
  turns = [
    [("user", f"{n}?"), ("assistant", "yes" * (1 + n % 3)), ("user", "so?"), ("assistant", f"{n * n}")]
    for n in range(12)
  ]
  messages = [
    [{"role": role, "content": text} for role, text in one[: 2 + 2 * (n % 3 == 0)]] for n, one in enumerate(turns)
  ]
  path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in messages))
  cfg = dataclasses.replace(
    config.load().data, dataset_type="text", dataset_files=(f"x={path}",), ghost_val_sets=("x",), max_target_length=T,
    max_segments_per_seq=tiny.SEGMENTS, per_device_batch_size=3, ghost_val_fraction=0.4,
  )  # fmt: skip
  return data.load_dataset(cfg, 2, records="conversations")


def alone(dataset, batch) -> tuple[dict, list]:
  """Each conversation of a batch as a row of its own, made of its ids and weights, and its (row, segment)."""
  made = Rendering.of(dataclasses.replace(config.load().data), ByteTokenizer())
  places = np.argwhere(batch.document_BS >= 0)
  rows = {name: np.zeros((len(places), T), np.int32) for name in ("inputs", "targets", "segments", "positions")}
  weights = np.zeros((len(places), T))
  for row, (b, s) in enumerate(places):
    ids, weight = made.encode(dataset.document(batch.document_BS[b, s]).text)
    size = len(ids) - 1
    rows["inputs"][row, :size], rows["targets"][row, :size] = ids[:-1], ids[1:]
    rows["segments"][row, :size], rows["positions"][row, :size] = 1, np.arange(size)
    weights[row, :size] = weight[1:]
  return rows | {"weights": weights}, [tuple(place) for place in places]


def gradients(model, rows) -> tuple[np.ndarray, list]:
  """(summed losses [N], gradients [N, ...]) without the project's loss."""
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)

  def loss(params, row):
    model = nnx.merge(graphdef, params, rest)
    logits = model(row["inputs"][None], row["positions"][None], row["segments"][None])[0].astype(float)
    return (oracles.softmax_losses(logits, row["targets"]) * row["weights"]).sum()

  losses, grads = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(params, rows)
  return np.asarray(losses), [np.asarray(g).reshape(len(losses), -1) for g in jax.tree.leaves(grads)]


@pytest.mark.parametrize(
  ("schedule", "dtype"),
  [
    ("two_pass", "float64"),
    ("reverse_scan", "float32"),
    pytest.param("reverse_scan", "float64", marks=pytest.mark.slow),
  ],
)
def test_scores_of_conversations_are_exact(schedule, dtype, dataset):
  train, val = next(dataset.train), dataset.validation_batch(0, 2)
  run = Run(
    batch=train.arrays, objective="sft", dtype=dtype, weight_dtype=dtype, opt_type="sgd", ghost_schedule=schedule,
    max_target_length=T, per_device_batch_size=3, ghost_val_batch_size=2, base_num_decoder_layers=2,
  )  # fmt: skip
  mine, places = alone(dataset, train)
  theirs, _ = alone(dataset, val)
  assert len(places) > 3 and mine["weights"].sum() < (mine["segments"] > 0).sum()
  with jax.enable_x64(True), tiny.cheap_compilation():
    graphdef, state = nnx.split(nnx.merge(run.graphdef, run.state).model)
    model = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(x, float), state))
    losses, own = gradients(model, {name: np.concatenate([mine[name], theirs[name]]) for name in mine})
  count, total = len(places), mine["weights"].sum()
  wanted = sum(g[:count] @ g[count:].sum(0) for g in own) / total / theirs["weights"].sum()
  out = run.step(train.arrays, (val.arrays,))
  assert out["loss"] == pytest.approx(losses[:count].sum() / total, rel=1e-6)
  assert out["val_loss"][0] == pytest.approx(losses[count:].sum() / theirs["weights"].sum(), rel=1e-6)
  assert [out["tokens_BS"][place] for place in places] == mine["weights"].sum(1).tolist()
  share = np.array([out["share_BS"][place] for place in places], np.float64)
  np.testing.assert_allclose(share, mine["weights"].sum(1) / total, rtol=1e-6)
  found = share * [out["score_dot_BSK"][place][0] for place in places]
  assert oracles.relative_error(found, wanted) < {"float32": 1e-5, "float64": 1e-12}[dtype]


def test_the_text_of_a_conversation_shorter_than_a_row_is_shown(tmp_path):
  (tmp_path / "a.jsonl").write_text('{"prompt": "no ", "completion": "record"}')
  keys = {"objective": "sft", "dataset_files": ("a=b",), "ghost_val_sets": ("a",), "max_target_length": 99}
  config.save(attribute.as_run(tiny.make_config(**keys), [f"a={tmp_path}/a.jsonl"], ("a",)), tmp_path / "config.yml")
  source = Source(tmp_path)
  assert source.open(()) == []
  assert source.find([("a", "a.jsonl", 0)]) == {("a", "a.jsonl", 0): "no record"}
