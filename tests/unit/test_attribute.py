"""`maxghost attribute`: scores at fixed checkpoints against gradients of one document at a time, and the sketches."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from maxghost import attribute, attribution, config, scorelog
from maxghost.attribution import offline
from maxghost.attribution.corpus import Corpus
from maxghost.attribution.offline import Point
from maxghost.config import ConfigError

CFG = tiny.make_config(base_num_decoder_layers=1, max_target_length=24, remat_policy="none", scan_layers=True)
DOCUMENTS = {"code": ["for i in range(7): print(i)", "x"], "prose": ["It was late.", "a" * 40, "Nothing moved there."]}
ROWS = 3


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  for domain, texts in DOCUMENTS.items():
    for number, text in enumerate(texts):
      (folder / f"{domain}{number}.txt").write_text(text)
  (folder / "ask.txt").write_text("for j in range(9): print(j)")
  data = Corpus((f"code={folder}/code*.txt", f"prose={folder}/prose*.txt"), CFG.data, "--data")
  return data, Corpus((f"ask={folder}/ask.txt", f"tell={folder}/prose0.txt"), CFG.data, "--queries")


@pytest.fixture(scope="module")
def points():
  return [Point(step, tiny.make_model(CFG, seed), rate, f"d{step}") for step, seed, rate in ((4, 0, 0.5), (9, 1, 0.25))]


@pytest.fixture(scope="module")
def queries(corpora):
  return {name: corpora[1].sample(name, 2)[0] for name in corpora[1].domains}


@functools.cache
def gradient_function(graphdef):
  def mean_loss(params, rest, rows, segment):
    model = nnx.merge(graphdef, params, rest)
    logits = model(*(rows[name] for name in ("inputs", "inputs_position", "inputs_segmentation")))
    counts = jnp.where(segment > 0, rows["targets_segmentation"] == segment, rows["targets_segmentation"] != 0)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), rows["targets"][..., None], -1)[..., 0]
    return (losses * counts).sum() / counts.sum()

  return jax.jit(jax.grad(mean_loss))


def gradient(model, rows, segment=0):
  """Of the mean loss of a segment of the rows, or (0) of all their tokens."""
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  grad = gradient_function(graphdef)(params, rest, rows, segment)
  return np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(grad)])


@pytest.fixture(scope="module")
def truth(corpora, points, queries):
  """{document id and chunk: exact dot products [checkpoint, query]}."""
  out = {}
  for p, point in enumerate(points):
    asked = [gradient(point.model, batch.arrays) for batch in queries.values()]
    for batch in corpora[0].batches(ROWS):
      for row, segment in zip(*np.nonzero(batch.document_BS >= 0), strict=True):
        arrays = {name: v[row : row + 1] for name, v in batch.arrays.items()}
        own = gradient(point.model, arrays, segment + 1)
        key = (*corpora[0].document_id(batch.document_BS[row, segment]), int(batch.offset_BS[row, segment]))
        out.setdefault(key, np.zeros((len(points), len(asked))))[p] = [own @ one for one in asked]
  return out


def test_every_document_is_scored_exactly_at_every_checkpoint(corpora, points, queries, truth, tmp_path):
  writer = scorelog.Writer(tmp_path, tuple(queries), period=1)
  writer.restore(None)
  assert offline.score(iter(points), corpora[0], queries, writer, ROWS, 100) == len(truth) >= 6
  writer.close()
  log = attribution.load(tmp_path)
  assert log.val_sets == ("ask", "tell")
  keys = list(zip(log["domain"], log["path"], log["offset"].tolist(), log["chunk"].tolist(), strict=True))
  steps = {4: 0, 9: 1}
  expected = np.array([truth[key][steps[int(step)]] for key, step in zip(keys, log["step"], strict=True)])
  np.testing.assert_allclose(log["dot"], expected, rtol=2e-4, atol=1e-6)
  rate = np.where(log["step"] == 4, 0.5, 0.25) * log["tokens"] / 100
  np.testing.assert_allclose(log["contribution"], rate[:, None] * log["dot"], rtol=1e-5)
  assert {key[:2] for key in keys} >= {("code", keys[0][1])}
  assert len({key[1] for key in keys}) == 5, "every document once"


@pytest.mark.slow
def test_the_index_estimates_the_same_sums_and_finds_the_same_best(corpora, points, queries, truth, tmp_path):
  index = tmp_path / "index"
  assert offline.build_index(points, corpora[0], index, ROWS, 128) == len(truth)
  found = offline.nearest(index, points, queries, corpora[1], top=len(truth))
  rates = np.array([0.5, 0.25])
  for k, name in enumerate(queries):
    estimate = {tuple(key[:4]): value for value, key in found[name]}
    exact = {key: rates @ value[:, k] for key, value in truth.items()}
    pairs = np.array([(estimate[key], exact[key]) for key in exact])
    assert np.corrcoef(pairs.T)[0, 1] > 0.95
    np.testing.assert_allclose(pairs[:, 0].sum(), pairs[:, 1].sum(), rtol=0.25)
  values = [value for value, _ in found["ask"]]
  assert values == sorted(values, reverse=True)


def test_an_index_of_other_weights_is_refused(points, tmp_path):
  about = {"version": 2, "directions": 2, "chunks": 0, "checkpoints": [[4, 0.5, "d4"], [9, 0.25, "other"]]}
  (tmp_path / "index.json").write_text(json.dumps(about))
  with pytest.raises(ConfigError, match="step 9 has other weights"):
    offline.open_index(tmp_path, points)
  with pytest.raises(ConfigError, match="no index there"):
    offline.open_index(tmp_path / "nowhere", points)
  for version, message in ((3, "update maxghost"), (1, "give --data to write the index again")):
    (tmp_path / "index.json").write_text(json.dumps(about | {"version": version}))
    with pytest.raises(ConfigError, match=message):
      offline.open_index(tmp_path, points)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["nowhere", "--data", "a=b", "--queries", "c=d", "--output", "out"], "nowhere does not exist"),
    (["run", "--data", "a=b", "--output", "out"], "--queries is missing"),
    (["run", "--queries", "a=b", "--index", "i", "--output", "out"], "give one of them"),
    (["run", "--index", "i"], "needs --data"),
    (["run", "--data", "a=b", "--queries", "c=d", "--output", "full"], "is not empty"),
    (["run", "--queris", "a=b"], "did you mean '--queries'"),
    (["run", "--index", "i", "--queries", "a=b", "--directions", "0"], "at least 1"),
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


def test_checkpoints_of_a_run_are_found_in_order(tmp_path):
  for step in (10, 9, 200):
    (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
  (tmp_path / "checkpoints" / "4.unusable").mkdir()
  (tmp_path / "config.yml").write_text("")
  run_dir, paths = attribute.resolve([tmp_path])
  assert run_dir == tmp_path and list(paths) == [9, 10, 200]
  assert list(attribute.resolve([tmp_path / "checkpoints" / "9"])[1]) == [9]


def test_a_checkpoint_loads_as_the_model_that_was_saved(tmp_path):
  from maxghost.checkpoint.manager import CheckpointManager
  from maxghost.training import resume, state

  cfg = config.replace(CFG, steps=20, lr_schedule_type="constant", warmup_steps_fraction=0.0)
  _, split = state.create_split(cfg)
  manager = CheckpointManager(tmp_path / "checkpoints", asynchronous=False)
  manager.save(7, resume.to_tree(split), {})
  manager.wait()
  manager.close()
  point = attribute.load_point(cfg, 7, tmp_path / "checkpoints" / "7")
  saved = tiny.by_label(nnx.merge(*state.create_split(cfg)).model)
  assert point.learning_rate == pytest.approx(cfg.optimizer.learning_rate)
  for label, value in tiny.by_label(point.model).items():
    np.testing.assert_array_equal(value, saved[label])
  with pytest.raises(ConfigError):
    attribute.load_point(config.replace(cfg, base_mlp_dim=35), 7, tmp_path / "checkpoints" / "7")
