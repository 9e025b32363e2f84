"""`maxghost attribute`: scores at checkpoints against the run's own log and against gradients of one document at a
time, and the sketches with their errors."""

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

from maxghost import attribute, attribution, config, data, optimizers, scorelog, scores, train
from maxghost.attribution import index, offline
from maxghost.attribution.corpus import Corpus
from maxghost.attribution.offline import Point
from maxghost.attribution.texts import Source
from maxghost.checkpoint.manager import CheckpointManager
from maxghost.config import ConfigError, files
from maxghost.objectives import LanguageModelLoss
from maxghost.parallel import heap
from maxghost.training import state
from maxghost.training.state import TrainStateNNX

ROWS = 3
Z_LOSS = 1e-2
CFG = tiny.make_config(
  base_num_decoder_layers=1, max_target_length=24, max_segments_per_seq=3, remat_policy="none", scan_layers=True,
  z_loss_multiplier=Z_LOSS, gradient_clipping_threshold=0.3, warmup_steps_fraction=0.0, lr_schedule_type="constant",
  learning_rate=0.01, adam_eps=1e-6, ghost_direction="adam", ghost_detail="total",
)  # fmt: skip
SGD = config.replace(CFG, opt_type="sgd", ghost_direction="sgd", learning_rate=0.5)
DOCUMENTS = {"code": ["for i in range(7): print(i)", "x"], "prose": ["It was late.", "a" * 40, "Nothing moved there."]}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  for domain, texts in DOCUMENTS.items():
    for number, text in enumerate(texts):
      (folder / f"{domain}{number}.txt").write_text(text)
  (folder / "ask.txt").write_text("for j in range(9): print(j)")
  data = Corpus((f"code={folder}/code*.txt", f"prose={folder}/prose*.txt"), CFG.data, "--data")
  return data, Corpus((f"ask={folder}/ask.txt", f"tell={folder}/prose0.txt"), CFG.data, "--queries")


@nnx.jit
def updated(held, gradient):
  held.optimizer.update(held.model, gradient)


@functools.cache
def points(cfg):
  """Two checkpoints with moments of earlier gradients, the clipping factors of the steps before not 1."""
  found = []
  for step, seed in ((4, 0), (9, 1)):
    model, rng = tiny.make_model(cfg, seed), np.random.default_rng(seed)
    trained, tx = state.trainable(cfg, model), optimizers.make_optimizer(cfg.optimizer, cfg.run.steps)
    held, values = TrainStateNNX(model, tx, trainable=trained), nnx.state(model, trained)
    for _ in range(2):
      gradient = jax.tree.map(lambda x, rng=rng: 0.03 * rng.normal(size=x.shape).astype("f4"), values)
      with tiny.cheap_compilation():
        updated(held, gradient)
    held.clip_factor[...] = jnp.float32(0.6 + 0.1 * seed)
    found.append(Point(step, nnx.state(held), f"d{step}"))
  return found


@pytest.fixture(scope="module")
def queries(corpora):
  return {name: corpora[1].sample(name, 2)[0] for name in corpora[1].source.domains}


@functools.cache
def gradient_function(graphdef, z_loss):
  def mean_loss(params, rest, rows, segment):
    model = nnx.merge(graphdef, params, rest)
    logits = model(*(rows[name] for name in ("inputs", "inputs_position", "inputs_segmentation")))
    counts = jnp.where(segment > 0, rows["targets_segmentation"] == segment, rows["targets_segmentation"] != 0)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), rows["targets"][..., None], -1)[..., 0]
    losses += z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return (losses * counts).sum() / counts.sum()

  def per_segment(params, rest, rows, segments):
    one = jax.grad(mean_loss)
    return jax.vmap(lambda row, s: one(params, rest, jax.tree.map(lambda x: x[None], row), s))(rows, segments)

  return jax.jit(jax.grad(mean_loss)), jax.jit(per_segment)


@functools.cache
def graphdef_of(cfg):
  return state.abstract_split(cfg)[0]


def truth(cfg, point, batch, queries):
  """{(row, segment): contributions [K]} of a step on `batch`: vmap(grad), and optax's own update, linear in g."""
  held = nnx.merge(graphdef_of(cfg), point.state)
  graphdef, params, rest = nnx.split(held.model, nnx.Param, ...)
  whole, each = gradient_function(graphdef, Z_LOSS)
  documents = tiny.documents(batch.arrays)
  rows = [row for row, _ in documents]
  picked = {name: v[rows] for name, v in batch.arrays.items()}
  segments = np.array([segment for _, segment in documents])
  g_N = each(params, rest, picked, segments)
  tokens_N = (picked["targets_segmentation"] == segments[:, None]).sum(-1)
  share_N = tokens_N / tokens_N.sum()
  g = jax.tree.map(lambda x: np.einsum("n,n...->...", share_N, x), g_N)
  norm = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(g)))
  clip_factor = min(1.0, cfg.optimizer.gradient_clipping_threshold / norm)
  assert clip_factor < 1
  response = jax.tree.map(np.ones_like, g)
  if cfg.optimizer.opt_type == "adamw":  # in one step without a first moment the update is linear, but for v
    (adam,) = (x for x in jax.tree.leaves(held.optimizer.opt_state, is_leaf=is_adam) if is_adam(x))
    assumed = float(held.clip_factor[...])
    gradient = jax.tree.map(lambda x: np.float32(assumed) * x.astype("f4"), g)
    start = optax.ScaleByAdamState(adam.count[...], jax.tree.map(np.zeros_like, gradient), nnx.as_pure(adam.nu))
    update = adam_update(cfg.optimizer.adam_b1, cfg.optimizer.adam_b2, cfg.optimizer.adam_eps)
    moved, _ = update(nnx.as_pure(gradient), start._replace(mu=nnx.as_pure(start.mu)))
    response = jax.tree.map(lambda u, x: np.where(x == 0, 0, u / np.where(x == 0, 1, x)), moved, nnx.as_pure(gradient))
  asked = [whole(params, rest, q.arrays, 0) for q in queries.values()]
  flat = lambda tree: np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])  # noqa: E731
  u_K = [flat(response) * flat(G) for G in asked]
  rate = cfg.optimizer.learning_rate * clip_factor
  one = lambda n: flat(jax.tree.map(lambda x: x[n], g_N))  # noqa: E731
  return {pair: rate * share_N[n] * np.array([one(n) @ u for u in u_K]) for n, pair in enumerate(documents)}


@functools.cache
def adam_update(b1, b2, eps):
  return jax.jit(optax.scale_by_adam(b1, b2, eps).update)


def is_adam(x):
  return isinstance(x, optax.ScaleByAdamState)


def written(cfg, corpus, queries, folder, num_rows, share=1.0):
  writer = scorelog.Writer(folder, tuple(queries), period=1)
  writer.restore(None)
  count = offline.score(cfg, iter(points(cfg)), corpus, queries, writer, num_rows, share)
  writer.close()
  return attribution.load(folder), count


@pytest.mark.parametrize("cfg", [CFG, SGD], ids=["adamw", "sgd"])
def test_every_document_is_scored_as_the_next_step_would(cfg, corpora, queries, tmp_path):
  with tiny.cheap_compilation():
    log, count = written(cfg, corpora[0], queries, tmp_path, ROWS, share=0.25)
  assert log.val_sets == ("ask", "tell") and log.steps["step"].tolist() == [4, 9]
  expected = {}
  for point in points(cfg):
    for batch in corpora[0].batches(ROWS):
      with tiny.cheap_compilation():
        found = truth(cfg, point, batch, queries)
      for (row, segment), value in found.items():
        document = batch.document_BS[row, segment - 1]
        if document >= 0:
          chunk = int(batch.offset_BS[row, segment - 1])
          expected[point.step, *corpora[0].source.document_id(document), chunk] = 0.25 * value
  names = ("step", "domain", "path", "offset", "chunk")
  keys = list(zip(*(np.asarray(log[name]).tolist() for name in names), strict=True))
  assert sorted(keys) == sorted(expected) and count == len(expected) / 2 >= 6
  assert len({key[2] for key in keys}) == 5, "every document once"
  scale = np.abs(list(expected.values())).max()
  np.testing.assert_allclose(log["contribution"], [expected[key] for key in keys], rtol=1e-4, atol=1e-5 * scale)


RUN = (
  "steps=7", "checkpoint_period=5", "max_num_checkpoints_to_keep=0", "async_checkpointing=false", "run_name=run",
  "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=8", "base_mlp_dim=24",
  "base_num_decoder_layers=2", "max_target_length=32", "per_device_batch_size=8",
  "dataset_type=synthetic", "ghost_val_sets=words", "eval_interval=-1", "enable_tensorboard=false",
  "gradient_clipping_threshold=0.4", "dropout_rate=0.1", "z_loss_multiplier=0.01", "warmup_steps_fraction=0.3",
  "remat_policy=none",
)  # fmt: skip
KINDS = {
  "adamw": (
    "adam_weight_decay=0.2", "ghost_val_every=5", "trainable_parameters_mask=*layers*",
    "gradient_accumulation_steps=2",
  ),
  "sgd": ("opt_type=sgd", "learning_rate=0.3", "ghost_schedule=reverse_scan"),
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """The folder of a run of each kind, or with one key."""

  @functools.cache
  def one(kind):
    folder = tmp_path_factory.mktemp(kind)
    with tiny.cheap_compilation(), tiny.one_device():
      assert train.main([*RUN, *KINDS.get(kind, [kind]), f"base_output_directory={folder}"]) == 0
    return folder / "run"

  return one


@pytest.mark.parametrize("kind", KINDS)
def test_a_logged_step_asked_again_at_its_checkpoint_is_the_log(kind, trained, tmp_path):
  """The step after the checkpoint: its own training and validation rows, asked as a corpus and a query."""
  run, step = trained(kind), 5
  cfg = config.load(str(run / "config.yml"))
  rows = attribute.rows_per_step(cfg, run)
  dataset = data.load_dataset(cfg.data, cfg.run.data_shuffle_seed, batch_size=rows)
  batch = [next(dataset.train) for _ in range(step + 1)][-1]
  asked = {"words": dataset.validation_batch(0, cfg.ghost.ghost_val_batch_size, "words")}
  corpus = SimpleNamespace(
    layout=dataset.layout, batches=lambda num_rows: [batch], document_record=dataset.document_record
  )
  paths = {step: run / "checkpoints" / str(step)}
  cfg = attribute.scoring_config(cfg, paths)
  assert cfg.ghost.ghost_direction == ("sgd" if kind == "sgd" else "adam")
  writer = scorelog.Writer(tmp_path / "asked", ("words",), period=1)
  with tiny.cheap_compilation():
    offline.score(cfg, attribute.points(cfg, paths), corpus, asked, writer, rows)
  writer.close()
  again, log = attribution.load(tmp_path / "asked"), attribution.load(run)
  here = log["step"] == step
  assert here.sum() == len(again["step"]) > rows / 2
  for name in ("domain", "path", "offset", "chunk", "tokens"):
    np.testing.assert_array_equal(again[name], log[name][here], err_msg=name)
  for name in ("share", "loss", "dot", "contribution"):
    value = log[name][here]
    np.testing.assert_allclose(again[name], value, rtol=2e-5, atol=2e-6 * np.abs(value).max(), err_msg=name)
  before, after = (x.steps[x.steps["step"] == step] for x in (log, again))
  for name in ("learning_rate", "learning_rate_in_all"):
    np.testing.assert_allclose(after[name], before[name], rtol=1e-6)
  assert (before["learning_rate_in_all"] > 1.2 * before["learning_rate"]).all() == (kind != "sgd")
  np.testing.assert_allclose(after["predicted_examples"], before["predicted_examples"], rtol=1e-4)


@pytest.mark.parametrize("cfg", [CFG, pytest.param(SGD, marks=pytest.mark.slow)], ids=["adamw", "sgd"])
def test_the_index_is_unbiased_and_knows_its_error(cfg, corpora, queries, tmp_path, monkeypatch):
  """20 independent estimates from 32 directions each, of chunks whose exact contributions are known.

  A step has one clipping factor here: the scored step forms its direction with the one of the step before.
  """
  cfg, groups, each = config.replace(cfg, gradient_clipping_threshold=0.0), 20, 32
  rows = len(list(corpora[0].batches(1)))
  with tiny.cheap_compilation():
    log, count = written(cfg, corpora[0], queries, tmp_path, rows)
    offline.build_index(cfg, iter(points(cfg)), corpora[0], tmp_path, ROWS, rows, groups * each)
  exact = np.asarray(log["contribution"]).reshape(2, count, 2).sum(0)
  with np.load(tmp_path / "step.npz") as file:
    step_batch = dict(file)
  sketcher = offline.Sketcher(cfg, corpora[1].layout, ROWS, groups * each)
  asked = []
  for point in points(cfg):
    with tiny.cheap_compilation():
      _, rate, sketch_KMR = sketcher.respond(point.state, step_batch, tuple(q.arrays for q in queries.values()))
    asked.append(np.asarray(rate * sketch_KMR))
  about = index.open_index(tmp_path, (4, 9))
  opened = index.Index(tmp_path, about)
  product_NKg = np.swapaxes(opened.products(asked, np.arange(count)), 0, 1)
  names = [tuple(one[:4]) for one in opened.ids]
  keys = list(zip(*(np.asarray(log[n])[:count].tolist() for n in ("domain", "path", "offset", "chunk")), strict=True))
  exact = exact[[keys.index(name) for name in names]]
  error = index.standard_error(product_NKg)
  assert (np.abs(product_NKg.mean(-1) - exact) < 4 * error).all(), "unbiased"
  estimate_NKG = product_NKg.reshape(count, 2, groups, -1)
  off = np.abs(estimate_NKG.mean(-1) - exact[..., None]) / index.standard_error(estimate_NKG)
  assert 0.9 < (off < 2).mean() < 0.98, (off < 2).mean()
  monkeypatch.setitem(offline.METHODS, index.CONTRIBUTION, lambda *_: sketcher)  # the one that has been compiled
  found = offline.nearest(cfg, iter(points(cfg)), tmp_path, about, queries, corpora[1], count, "nats")
  for k, name in enumerate(queries):
    values = {tuple(c[n] for n in ("domain", "path", "offset", "chunk")): c for c in found[name]}
    np.testing.assert_allclose([values[n]["contribution"] for n in names], product_NKg.mean(-1)[:, k], rtol=1e-4)
    np.testing.assert_allclose([values[n]["standard_error"] for n in names], error[:, k], rtol=1e-4)
    order = [c["contribution"] for c in found[name]]
    assert order == sorted(order, reverse=True)
    assert found[name][0]["rank"] == 1


def test_the_index_prepares_its_batches_as_the_objective_says(corpora, tmp_path, monkeypatch):
  """An objective that counts only the first three targets of a document; adapters too narrow for rank one."""
  cfg = config.replace(SGD, lora_rank=2)

  def first_three(self, batch):
    segments_BT, positions_BT = (batch.arrays[f"targets_{name}"] for name in ("segmentation", "position"))
    counted = {"targets_segmentation": np.where(positions_BT < 3, segments_BT, 0)}
    return dataclasses.replace(batch, arrays=batch.arrays | counted)

  rows = len(list(corpora[0].batches(1)))
  monkeypatch.setattr(LanguageModelLoss, "prepare", first_three)
  with tiny.cheap_compilation():
    (tmp_path / "sketch_99.npy").write_bytes(b"of an index that was here before")
    count = offline.build_index(cfg, iter(points(cfg)[:1]), corpora[0], tmp_path, ROWS, rows, 2)
  assert not (tmp_path / "sketch_99.npy").exists() and len(list(tmp_path.glob("sketch_*"))) == 1
  tokens = [json.loads(line)[-1] for line in (tmp_path / "ids.jsonl").read_text().splitlines()]
  assert len(tokens) == count > 4 and max(tokens) == 3


def test_answers_name_the_direction_and_are_written(trained, tmp_path, capsys, monkeypatch):
  for name, text in {"a": "for i in range(7): print(i)", "b": "It was late.", "ask": "j in 9", "c": ""}.items():
    (tmp_path / f"{name}.txt").write_text(text)
  checkpoint = str(trained("adamw") / "checkpoints" / "5")
  data, ask, kept = ["--data", f"notes={tmp_path}/[abc].txt"], ["--queries", f"mine={tmp_path}/ask.txt"], []
  index, answer = str(tmp_path / "index"), tmp_path / "answer.json"
  monkeypatch.setattr(heap, "keep", lambda: kept.append(True))  # else a CPU maps its buffers anew in every batch
  with tiny.cheap_compilation():
    assert attribute.main([checkpoint, *data, *ask, "--rows", "4", "--output", str(tmp_path / "our log")]) == 0
    assert attribute.main([checkpoint, *data, "--index", index, "--directions", "8", "--rows", "2"]) == 0
    assert attribute.main([checkpoint, *ask, "--index", index, "--output", str(answer)]) == 0
  out, err = capsys.readouterr()
  assert f"'{tmp_path}/our log' --by=document --set=mine" in out and kept and "hybrid; ± is the standard error\n" in out
  assert "direction adam; ±" in out and "adam, estimated from 8 random" in out and err.count("corrupt: 1\n") == 2
  assert attribution.load(tmp_path / "our log").said_of("direction") == ("adam",)
  assert scores.main([str(tmp_path / "our log"), "--by", "document", "--format", "json"]) == 0
  assert json.loads(capsys.readouterr().out)["direction"] == "adam"
  written = json.loads(answer.read_text())
  assert written["direction"] == "adam" and {c["path"][-5:] for c in written["queries"]["mine"]} == {"a.txt", "b.txt"}
  assert {"rank", "tied", "contribution", "standard_error"} < written["queries"]["mine"][0].keys()
  assert attribute.main([checkpoint, *ask, "--index", index, "--direction", "sgd"]) == 2
  assert "the index was written for adam" in capsys.readouterr().err
  assert attribute.main([checkpoint, *data, "--index", index, "--direction", "marginal"]) == 2
  assert "of the clipping, which no sketch tells; give --direction path" in capsys.readouterr().err
  (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
  for more in (["--index", str(tmp_path / "none")], [*ask, "--output", str(tmp_path / "none")]):
    assert attribute.main([checkpoint, "--data", f"notes={tmp_path}/empty.jsonl", *more]) == 2
    assert "these documents hold no text to score" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_scores_that_are_not_finite_leave_nothing_behind(trained, tmp_path, capsys, monkeypatch):
  (tmp_path / "a.txt").write_text("for i in range(7): print(i)")
  files, written = f"={tmp_path}/a.txt", []

  def score(cfg, points, corpus, queries, writer, *_):
    written.extend(tmp_path.glob("asked*"))
    raise ConfigError("step 5: a score is not finite")

  monkeypatch.setattr(offline, "score", score)
  asked = ["--data", "notes" + files, "--queries", "mine" + files, "--output", str(tmp_path / "asked")]
  assert attribute.main([str(trained("ghost_enabled=false") / "checkpoints" / "5"), *asked]) == 2
  assert "a score is not finite" in capsys.readouterr().err
  assert len(written) == 1 and not list(tmp_path.glob("asked*"))


def test_a_checkpoint_is_found_from_inside_it_and_a_model_by_a_number(tmp_path, monkeypatch):
  step, *models = (tmp_path / name for name in ("run/checkpoints/3", "7", "imported"))
  for folder, config_of in ((step, step.parents[1]), *zip(models, models, strict=True)):
    folder.mkdir(parents=True)
    (config_of / "config.yml").write_text("steps: 3\n")
  monkeypatch.chdir(step)
  assert attribute.resolve([Path()]) == (step.parents[1], {3: Path()})
  assert [attribute.resolve([model]) for model in models] == [(model, {0: model}) for model in models]


def test_ranks_do_not_tell_apart_what_the_error_does_not(tmp_path, monkeypatch):
  """Products made by hand: a is best, b and c differ by noise alone, d is worst."""
  rng = np.random.default_rng(0)
  noise = rng.normal(size=(4, 1, 50)).astype(np.float32)
  value = np.array([9.0, 2.0, 2.1, -3.0], np.float32)
  product_NMR = noise + value[:, None, None]
  np.save(tmp_path / "sketch_3.npy", product_NMR)
  np.savez(tmp_path / "step.npz", x=np.zeros(1))
  (tmp_path / "ids.jsonl").write_text("".join(json.dumps(["d", name, 0, 0, 5]) + "\n" for name in "abcd"))
  ones = SimpleNamespace(
    prepare=lambda batch: batch,
    respond=lambda *_: (None, 1.0, np.ones((1, 1, 50), np.float32)),
  )
  monkeypatch.setitem(offline.METHODS, index.CONTRIBUTION, lambda *_: ones)
  about = {"method": "contribution", "directions": 50, "chunks": 4, "checkpoints": [[3, "x"]]}
  corpus = SimpleNamespace(layout=None)
  queries = {"q": SimpleNamespace(epoch_B=[0], arrays={})}
  ask = functools.partial(offline.nearest, CFG, folder=tmp_path, about=about, queries=queries, corpus=corpus)
  (chunks,) = ask(points=iter([Point(3, None, "x")]), top=4, by="nats").values()
  assert [c["rank"] for c in chunks] == [1, 2, 2, 4]
  assert [c["tied"] for c in chunks] == [False, True, True, False]
  assert chunks[0]["path"] == "a" and chunks[-1]["path"] == "d"
  np.testing.assert_allclose(chunks[0]["standard_error"], noise[0].std(ddof=1) / 50**0.5, rtol=1e-5)
  (chunks,) = ask(points=iter([Point(3, None, "x")]), top=2, by="nats").values()
  assert [c["tied"] for c in chunks] == [False, True], "tied with one that is not shown"
  with pytest.raises(ConfigError, match="step 3 had other weights"):
    ask(points=iter([Point(3, None, "y")]), top=2)
  ones.respond = lambda *_: (None, 1.0, np.full((1, 1, 50), np.nan, np.float32))
  with pytest.raises(ConfigError, match="gradient of the query is not finite"):
    ask(points=iter([Point(3, None, "x")]), top=2, by="nats")


@pytest.mark.parametrize("method", offline.METHODS)
def test_no_index_is_written_of_gradients_that_are_not_finite(method, corpora, tmp_path, monkeypatch):
  def sketch(_, __, arrays):
    return np.full((*arrays["shape"], 1, 2), np.nan), np.ones(arrays["shape"], int)

  shaped = lambda batch: dataclasses.replace(batch, arrays={"shape": batch.document_BS.shape})  # noqa: E731
  broken = SimpleNamespace(prepare=shaped, respond=lambda *_: (None,), sketch=sketch)
  monkeypatch.setitem(offline.METHODS, method, lambda *_: broken)
  with pytest.raises(ConfigError, match="gradient of the corpus is not finite"):
    offline.build_index(CFG, iter([Point(3, None, "x")]), corpora[0], tmp_path, 2, 2, 2, method)
  assert not any(tmp_path.iterdir())
  (tmp_path / "index.json").touch()  # an earlier index stays as long as nothing of the new one is written
  (tmp_path / ".sketch_3.npy.17.tmp").touch()  # of a command that was killed while it wrote
  attribute.parse(["run", "--data", "a=b", "--index", str(tmp_path)])  # may be written again
  with pytest.raises(ConfigError, match="gradient of the corpus is not finite"):
    offline.build_index(CFG, iter([Point(3, None, "x")]), corpora[0], tmp_path, 2, 2, 2, method)
  assert [path.name for path in tmp_path.iterdir()] == ["index.json"]


@pytest.mark.parametrize(
  ("keys", "given", "domain"),
  [({"document_fields": ("id", "lang")}, "~/a.txt", "text"), ({"dataset_type": "hf"}, "a= ~/*.txt", "a"),
   ({"dataset_type": "tfds", "dataset_path": "/data", "train_split": "all"}, "a@sft=~/a.txt", "a@sft")],
)  # fmt: skip
def test_the_texts_of_an_answer_are_found_whatever_the_run_reads(keys, given, domain, tmp_path, monkeypatch):
  (tmp_path / "a.txt").write_text("no record")
  monkeypatch.setenv("HOME", str(tmp_path))
  cfg = attribute.as_run(config.replace(CFG, **keys), [given], (domain,))
  config.save(cfg, tmp_path / "config.yml")
  source = Source(tmp_path)
  assert source.open(()) == []
  assert source.find([(domain, "a.txt", 0)]) == {(domain, "a.txt", 0): "no record"}


@pytest.mark.parametrize(
  "keys",
  [
    {"ghost_select": "topk"},
    {"ghost_reweight": (2.0,), "dataset_mixture": ("notes=1",)},
    {"offload_to_host": ("val_gradient",), "ghost_rank": 4, "ghost_direction": "sgd"},
  ],
  ids=lambda keys: next(iter(keys)),
)
def test_a_run_with_keys_that_need_scores_can_score_another_corpus(keys):
  """The configuration beside the answer, written when all is scored, has no scores of its own."""
  cfg = attribute.as_run(config.replace(CFG, **keys), ["a=/notes/*.txt"], ("a",))
  assert not cfg.ghost.ghost_enabled and cfg.data.ghost_val_sets == ("a",)


def test_an_index_of_other_checkpoints_is_refused(tmp_path):
  about = {"version": index.VERSION, "directions": 2, "chunks": 0, "checkpoints": [[4, "d4"], [9, "other"]]}
  (tmp_path / "index.json").write_text(json.dumps(about))
  with pytest.raises(ConfigError, match=r"steps \[4, 9\], queried with \[4\]"):
    index.open_index(tmp_path, [4])
  with pytest.raises(ConfigError, match="no index there"):
    index.open_index(tmp_path / "nowhere", [4])
  (tmp_path / "index.json").rename(tmp_path / "sketch_4.npy")  # as an interrupted command leaves it
  with pytest.raises(ConfigError, match="its index was not finished; give --data"):
    index.open_index(tmp_path, [4])
  for version, message in ((index.VERSION + 1, "update maxghost"), (3, "give --data to write the index again")):
    (tmp_path / "index.json").write_text(json.dumps(about | {"version": version}))
    with pytest.raises(ConfigError, match=message):
      index.open_index(tmp_path, [4, 9])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["nowhere", "--data", "a=b", "--queries", "c=d", "--output", "out"], "nowhere does not exist"),
    (["run", "--data", "a=b", "--output", "out"], "--queries is missing"),
    (["run", "--data", "a=b", "--index", "i", "--output", "out"], "the JSON file for the answer"),
    (["run", "--index", "i"], "needs --data"),
    (["run", "--index", "i", "--method", "x"], "--method x: unknown; there are contribution, less"),
    (["run", "--data", "a=b", "--queries", "c=d", "--output", "full"], "is not empty"),
    (
      ["run", "--data", "a=b", "--queries", "c=d", "--output", "out", "--order", "nats"],
      "--order has no effect without --index",
    ),
    (["run", "--data", "a=b", "--queries", "c=d", "--output", "o", "--directions", "8"], "no effect without --index"),
    (["run", "--index", "i", "--queries", "a=b", "--directions", "8"], "--directions has no effect without --data"),
    (["run", "--index", "i", "--queries", "a=b", "--rows", "4"], "--rows has no effect without --data; leave it out"),
    (["run", "--index", "i", "--data", "a=b", "--query-rows", "4"], "--query-rows has no effect without --queries"),
    (["run", "--index", "i", "--data", "a=b", "--top", "4"], "--top has no effect without --queries"),
    (["run", "--index", "i", "--data", "a=b", "--order", "nats"], "--order has no effect without --queries"),
    (["run", "--index", "i", "--data", "run", "a=b"], "--data run stands for all that the run has trained on"),
    (["run", "--data", "a=b", "--index", "run"], "--index run holds something else than an index"),
    (["run", "--data", "a=b", "--index", "run/config.yml"], "holds something else than an index"),
    (["run", "--queris", "a=b"], "did you mean '--queries'"),
    (["run", "--index", "i", "--queries", "a=b", "--directions", "1"], "at least 2"),
    (["empty", "--index", "i", "--queries", "a=b"], "no checkpoint in"),
    (["full", "--index", "i", "--queries", "a=b"], "is not a checkpoint"),
    (["run", "other", "--index", "i", "--queries", "a=b"], "different runs"),
    (["other", "--index", "i", "--queries", "a=b"], "no config.yml"),
  ],
)
def test_wrong_input_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  for folder in ("run/checkpoints/3", "other/checkpoints/5", "empty/checkpoints", "full/x"):
    (tmp_path / folder).mkdir(parents=True)
  (tmp_path / "run" / "config.yml").write_text("steps: 3\n")
  assert attribute.main(arguments) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("output", [".", "../here"])
def test_the_current_folder_is_not_replaced(output, tmp_path, monkeypatch, capsys):
  (tmp_path / "here").mkdir()
  monkeypatch.chdir(tmp_path / "here")  # empty
  assert attribute.main(["../run", "--data", "a=b", "--queries", "c=d", "--output", output]) == 2
  assert f"--output {output} is not empty, or it is the current folder" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("keys", "named"),
  [
    ("objective: dpo", "objective=dpo"),
    ("{objective: distill, distill_teacher: t}", "objective=distill"),
    ("{objective: distill, offline_data_dir: d}", "objective=distill and offline_data_dir=d"),
    ("ghost_val_sets: ['a=b/*.jsonl@sft']", "ghost_val_sets=['a=b/*.jsonl@sft']"),
  ],
)
def test_runs_of_pairs_or_with_a_second_model_are_refused_by_key(keys, named, tmp_path, capsys):
  (tmp_path / "checkpoints" / "3").mkdir(parents=True)
  (tmp_path / "config.yml").write_text(keys)
  asked = ["--data", "a=b", "--queries", "c=d", "--output", str(tmp_path / "out")]
  assert attribute.main([str(tmp_path), *asked]) == 2
  assert f"{tmp_path} has {named}; attribute scores" in capsys.readouterr().err


def test_checkpoints_of_a_run_are_found_in_order(tmp_path, monkeypatch):
  for step in ("10", "9", "200", "4.unusable"):
    (tmp_path / "checkpoints" / step).mkdir(parents=True)
  (tmp_path / "config.yml").write_text("")
  run_dir, paths = attribute.resolve([tmp_path])
  assert run_dir == tmp_path and list(paths) == [9, 10, 200]
  assert list(attribute.resolve([tmp_path / "checkpoints" / "9"])[1]) == [9]
  monkeypatch.setattr(Path, "is_dir", lambda path: str(path) == "/5")  # a folder of the root
  with pytest.raises(ConfigError, match=r"^/ has no config.yml"):
    attribute.resolve([Path("/5")])


def saved(cfg, folder, *parts):
  """A checkpoint of step 7 of a fresh state; its tree."""
  with tiny.cheap_compilation():
    graphdef, split = state.create_split(cfg)
  tree = state.to_tree(split)
  manager = CheckpointManager(folder / "checkpoints", asynchronous=False)
  manager.save(7, {name: tree[name] for name in parts} if parts else tree, {})
  manager.wait()
  manager.close()
  return nnx.merge(graphdef, split)


def test_a_checkpoint_loads_as_the_state_that_was_saved(tmp_path):
  held = saved(CFG, tmp_path)
  paths = {7: tmp_path / "checkpoints" / "7"}
  with tiny.cheap_compilation():
    (point,) = attribute.points(CFG, paths)
  for label, value in tiny.by_label(point.state["model"]).items():
    np.testing.assert_array_equal(value, tiny.by_label(held.model)[label])
  assert len(jax.tree.leaves(point.state)) == len(jax.tree.leaves(nnx.state(held)))
  with pytest.raises(ConfigError):
    next(attribute.points(config.replace(CFG, base_mlp_dim=35), paths))
  still = config.replace(CFG, warmup_steps_fraction=0.5)  # the rate of step 0 is 0, and so would be all values
  with pytest.raises(ConfigError, match=r"checkpoints/7: the step after it has learning rate 0.* name earlier"):
    next(attribute.points(still, paths))
  assert next(attribute.points(still, paths, index.LESS)).step == 7, "it takes the mean of the rates before"
  with pytest.raises(ConfigError, match=r"checkpoints/6 is gone: a run in training removes old ones; name newer ones"):
    next(attribute.points(CFG, {6: tmp_path / "checkpoints" / "6"}))


def test_without_optimizer_state_the_direction_must_be_named(tmp_path):
  saved(CFG, tmp_path, "model")
  paths = {7: tmp_path / "checkpoints" / "7"}
  for direction in ("", "auto"):
    with pytest.raises(ConfigError, match=r"holds no optimizer state.* give --direction sgd"):
      attribute.scoring_config(CFG, paths, direction)
  cfg = attribute.scoring_config(CFG, paths, "sgd")
  assert cfg.ghost.ghost_direction == "sgd"
  with tiny.cheap_compilation():
    (point,) = attribute.points(cfg, paths)
  assert all(not np.asarray(x).any() for x in jax.tree.leaves(point.state["optimizer"]["opt_state"]))


def test_damaged_facts_of_a_run_are_named(tmp_path):
  """They say how many rows a step had, by which contributions are scaled."""
  cfg, file = config.load("per_device_batch_size=3", "gradient_accumulation_steps=2"), tmp_path / "run_facts.json"
  assert attribute.rows_per_step(cfg, tmp_path) == 6
  whole = json.dumps(files.sealed({"rows per step": "1,024"}))
  for text, rows in ((whole, 1024), ('{"rows per step": "16"}', 16), ("{}", 6)):
    file.write_text(text)
    assert attribute.rows_per_step(cfg, tmp_path) == rows
  for text in (whole.replace("1,0", "7,0"), "{", "[]", '{"rows per step": [7]}', '{"rows per step": "x"}'):
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"run_facts.json is damaged"):
      attribute.rows_per_step(cfg, tmp_path)


def test_a_changed_index_is_refused(tmp_path):
  about = {"version": index.VERSION, "directions": 2, "chunks": 0, "checkpoints": [[4, "d4"]]}
  about["files"] = {"sketch_4.npy": "0" * 64}
  sealed = json.dumps(files.sealed(about))
  (tmp_path / "index.json").write_text(sealed)
  (tmp_path / "sketch_4.npy").write_bytes(b"x")
  with pytest.raises(ConfigError, match=r"sketch_4.npy: checksum .*give --data to write the index again"):
    index.open_index(tmp_path, [4])
  (tmp_path / "index.json").write_text(sealed.replace('"directions": 2', '"directions": 3'))
  with pytest.raises(ConfigError, match=r"index.json: damaged \(its content does not match its checksum\)"):
    index.open_index(tmp_path, [4])
  (tmp_path / "sketch_4.npy").rename(tmp_path / "step.npz")  # as the messages propose, also if the sketches are lost
  assert attribute.parse(["run", "--data", "a=b", "--index", str(tmp_path)]).index == tmp_path
