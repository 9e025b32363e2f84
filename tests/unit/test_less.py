"""LESS against gradients of one document at a time, and the Adam step of optax on each."""

import contextlib
import dataclasses
import functools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx

from maxghost import attribute, config, optimizers
from maxghost.attribution import index, less, offline
from maxghost.attribution.corpus import Corpus
from maxghost.attribution.offline import Point
from maxghost.training import state
from maxghost.training.state import TrainStateNNX

CFG = tiny.make_config(
  base_num_decoder_layers=1, max_target_length=24, max_segments_per_seq=3, remat_policy="none", steps=20,
  learning_rate=0.01, adam_eps=1e-5, warmup_steps_fraction=0.2, lr_schedule_type="cosine", ghost_detail="total",
)  # fmt: skip
DOCUMENTS = ("for i in range(7): print(i)", "x", "It was late.", "a" * 40, "Nothing moved there.")
STEPS = (3, 11)


@contextlib.contextmanager
def precision(dtype):
  before = jax.config.read("jax_enable_x64")
  jax.config.update("jax_enable_x64", dtype == "float64")
  try:
    yield
  finally:
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  for number, text in enumerate(DOCUMENTS):
    (folder / f"note{number}.txt").write_text(text)
  (folder / "ask.txt").write_text("for j in range(9): print(j)")
  patterns = f"notes={folder}/note*.txt", f"ask={folder}/ask.txt"
  documents, asked = (Corpus((pattern,), CFG.data, "--data") for pattern in (*patterns[:1], *patterns[1:]))
  assert max((batch.document_BS >= 0).sum(1).max() for batch in documents.batches(1)) > 1, "some are packed"
  return documents, asked, {"ask": asked.sample("ask", 2)[0]}, patterns


def make_points(cfg, size: float = 1.0):
  """Checkpoints whose moments are random, of this size, and belong to the step."""
  found = []
  for seed, step in enumerate(STEPS):
    rng = np.random.default_rng(seed)
    model = tiny.make_model(cfg, seed)
    tx = optimizers.make_optimizer(cfg.optimizer, cfg.run.steps)
    held = TrainStateNNX(model, tx, trainable=state.trainable(cfg, model))
    flat = nnx.to_flat_state(nnx.state(held))
    values = []
    for path, variable in flat:
      scale = size * {"mu": 0.02, "nu": 4e-4}.get(next((str(p) for p in path if p in ("mu", "nu")), ""), 0.0)
      noise = rng.normal(size=variable.shape).astype(variable.dtype)
      values.append(
        (path, variable.replace(jnp.asarray(scale * (noise if scale > 1e-3 else noise**2))) if scale else variable)
      )
    held = nnx.merge(nnx.split(held)[0], nnx.from_flat_state(values))
    held.optimizer.step[...] = jnp.asarray(step, held.optimizer.step.dtype)
    found.append(Point(step, nnx.state(held), f"d{step}"))
  return found


def brute_force(cfg, points, corpus, query):
  """{path, chunk: score}: each document alone in its row, materialised; Adam by optax; cosine in float64."""
  schedule, last, total = optimizers.learning_rate_schedule(cfg.optimizer, cfg.run.steps), 0, {}
  adam = optax.scale_by_adam(cfg.optimizer.adam_b1, cfg.optimizer.adam_b2, cfg.optimizer.adam_eps)

  def mean_loss(params, graphdef, rest, row):
    model = nnx.merge(graphdef, params, rest)
    logits = model(*(row[name] for name in ("inputs", "inputs_position", "inputs_segmentation")))
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), row["targets"][..., None], -1)[..., 0]
    counts = row["targets_segmentation"] != 0
    return (losses * counts).sum() / counts.sum()

  def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])

  grad = jax.jit(jax.grad(mean_loss), static_argnums=1)

  @functools.partial(jax.jit, static_argnums=1)
  def step(params, graphdef, rest, row, moments):
    with jax.numpy_dtype_promotion("standard"):
      return adam.update(nnx.as_pure(jax.grad(mean_loss)(params, graphdef, rest, row)), moments)[0]

  for point in points:
    held = nnx.merge(state.abstract_split(cfg)[0], point.state)
    graphdef, params, rest = nnx.split(held.model, held.optimizer.wrt, ...)
    (moments,) = (x for x in jax.tree.leaves(held.optimizer.opt_state, is_leaf=is_adam) if is_adam(x))
    moments = optax.ScaleByAdamState(jnp.asarray(point.step, jnp.int32), *map(nnx.as_pure, (moments.mu, moments.nu)))
    moments = moments._replace(mu=jax.tree.map(lambda m, v: m.astype(v.dtype), moments.mu, moments.nu))
    rate = float(np.mean([float(schedule(n)) for n in range(last, point.step)]))
    last, asked = point.step, flat(grad(params, graphdef, rest, query.arrays))
    for batch in corpus.batches(1):
      for slot, document in enumerate(batch.document_BS[0]):
        if document < 0:
          continue
        own = {
          name: np.where(batch.arrays[f"{name.partition('_')[0]}_segmentation"] == slot + 1, x, 0)
          for name, x in batch.arrays.items()
        }
        moved = flat(step(params, graphdef, rest, own, moments))
        key = (corpus.source.document_id(document).path, int(batch.offset_BS[0, slot]))
        cosine = moved @ asked / np.linalg.norm(moved) / np.linalg.norm(asked)
        total[key] = total.get(key, 0.0) + rate * cosine
  return total


def is_adam(x):
  return isinstance(x, optax.ScaleByAdamState)


def scored(cfg, points, corpora, folder, num_directions) -> dict:
  documents, asked, queries, _ = corpora
  offline.build_index(cfg, iter(points), documents, folder, 3, 3, num_directions, "less")
  about = index.open_index(folder, STEPS)
  found = offline.nearest(cfg, iter(points), folder, about, queries, asked, top=about["chunks"])["ask"]
  assert [chunk["contribution"] for chunk in found] == sorted((c["contribution"] for c in found), reverse=True)
  return {(chunk["path"], chunk["chunk"]): (chunk["contribution"], chunk["standard_error"]) for chunk in found}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_without_a_projection_less_is_the_cosine_of_materialised_gradients(dtype, tolerance, corpora, tmp_path):
  """Packed documents, a document of one token, one cut into chunks; two checkpoints, with the rates between them."""
  with precision(dtype), tiny.cheap_compilation():
    cfg = config.replace(CFG, dtype=dtype, weight_dtype=dtype)
    points = make_points(cfg)
    expected = brute_force(cfg, points, corpora[0], corpora[2]["ask"])
    found = scored(cfg, points, corpora, tmp_path, 0)
  assert found.keys() == expected.keys() and len(found) > len(DOCUMENTS)
  size = max(map(abs, expected.values()))
  for key, value in expected.items():
    assert abs(found[key][0] - value) <= tolerance * size, (key, found[key], value)
    assert found[key][1] == 0


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_projections_come_near_the_cosine(lora_rank, corpora, tmp_path):
  """Without moments and with a large adam_eps, updates are gradients, and that of a text like the query is near it.

  No matrix of adapters of rank 2 is wide enough for projections of rank one.
  """
  cfg = config.replace(CFG, adam_eps=1e6, lora_rank=lora_rank, lora_module_path=".*/(query|wo)" * bool(lora_rank))
  with tiny.cheap_compilation():
    points = make_points(cfg, 0.0)
    expected = brute_force(cfg, points, corpora[0], corpora[2]["ask"])
    found = scored(cfg, points, corpora, tmp_path, 192)
  exact, (estimated, error) = np.array([*expected.values()]), np.array([found[key] for key in expected]).T
  assert (np.abs(estimated - exact) < 4 * error).all(), (exact, estimated, error)
  assert np.abs(exact).max() > 10 * error.max() and np.corrcoef(estimated, exact)[0, 1] > 0.9, (exact, estimated, error)


def test_what_less_is_not_defined_for(tmp_path, capsys):
  run = tmp_path / "run"
  (run / "checkpoints" / "3").mkdir(parents=True)
  config.save(config.replace(CFG, opt_type="sgd", ghost_direction="sgd"), run / "config.yml")
  index = ["--index", str(tmp_path / "index"), "--data", "a=x"]
  for arguments, said in {
    (
      "--method",
      "less",
      "--data",
      "a=x",
      "--queries",
      "q=y",
      "--output",
      "z",
    ): "--method has no effect without --index",
    ("--method", "lass", *index): "--method lass: unknown; did you mean 'less'?",
    ("--directions", "0", *index): "--directions 0: at least 2",
    ("--method", "less", *index): "--method less needs the moments of AdamW; the run has opt_type=sgd",
  }.items():
    assert attribute.main([str(run), *arguments]) == 2
    assert said in capsys.readouterr().err
  config.save(CFG, run / "config.yml")
  cfg, args = CFG, attribute.parse([str(run), "--method", "less", *index, "--direction", "sgd"])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(attribute, "has_optimizer", lambda path: path.name != "3")
    with pytest.raises(config.ConfigError, match="3 holds no optimizer state, whose moments --method less needs"):
      attribute.check_less(cfg, args, {3: run / "checkpoints" / "3"})
    with pytest.raises(config.ConfigError, match="--direction sgd: --method less has its own direction"):
      attribute.check_less(cfg, args, {4: run / "checkpoints" / "4"})
    args = attribute.parse([str(run), "--method", "less", *index, "--queries", "q=y", "--order", "nats"])
    with pytest.raises(config.ConfigError, match="--order nats: --method less ranks by its value"):
      attribute.check_less(cfg, args, {4: run / "checkpoints" / "4"})
  assert json.dumps(offline.LESS_UNIT) and less.Less


ONES = SimpleNamespace(  # the sketches of all documents
  prepare=lambda batch: dataclasses.replace(batch, arrays={"shape": batch.document_BS.shape}),
  respond=lambda *_: (None,),
  sketch=lambda _, __, arrays: (np.ones((*arrays["shape"], 1, 2)), np.ones(arrays["shape"], int)),
)


def test_a_finished_index_has_the_settings_that_find_its_texts(corpora, tmp_path, monkeypatch):
  """Killed behind its last file: no config.yml of an earlier index stays, by which other documents would be shown."""

  def killed(_):
    raise KeyboardInterrupt

  monkeypatch.setitem(offline.METHODS, index.LESS, lambda *_: ONES)
  monkeypatch.setattr(attribute, "points", lambda *_: iter([Point(3, None, "x")]))
  monkeypatch.setattr(offline, "sealed", killed)
  args = attribute.parse(["run", "--method", "less", "--data", "notes=b", "--index", str(tmp_path / "index")])
  with pytest.raises(KeyboardInterrupt):
    attribute._index(args, CFG, {}, corpora[0], None, {}, 3, CFG)
  assert config.load(tmp_path / "index" / "config.yml").data.dataset_files == (f"notes={Path('b').absolute()}",)


def test_one_command_at_a_time_writes_an_index(corpora, tmp_path, monkeypatch):
  """Two would write files of one name, and the first to end give the sketches of the other one its own ids."""
  write, refused = functools.partial(offline.build_index, CFG, corpus=corpora[0], folder=tmp_path / "index"), []
  write = functools.partial(write, num_rows=2, step_rows=2, num_directions=2, method=index.LESS)

  def points():
    yield Point(3, None, "x")
    with pytest.raises(
      config.ConfigError, match=r"another command writes .*index; wait for its end, or give another --index"
    ):
      write(iter([Point(3, None, "y")]))
    refused.append(3)

  monkeypatch.setitem(offline.METHODS, index.LESS, lambda *_: ONES)
  count = write(points())
  assert refused and index.open_index(tmp_path / "index")["checkpoints"] == [[3, "x"]]
  assert write(iter([Point(3, None, "y")])) == count
