"""`maxghost ask`: sources of an answer against gradients written out, its index against numpy, and the command."""

import argparse
import collections
import dataclasses
import json
import math
import re
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from test_attribute import CFG, SGD, points
from test_less import precision

from maxghost import ask, attribute, attribution, cli, config, data, scorelog, train
from maxghost.attribution import index, offline, words
from maxghost.attribution import sources as sources_module
from maxghost.attribution.corpus import Corpus
from maxghost.attribution.output import console
from maxghost.attribution.sources import TOKEN_TOP, Sources
from maxghost.attribution.texts import Source

TEXTS = ("for i in range(7): print(i)", "It was late in Ulm.", "a" * 40 + " tail", "Ulm lies on the river.", "x")
PROMPT, ANSWER = "Where is Ulm? ", "on the river"
ROWS = 3


def written(cfg, folder, directions):
  """(corpus, index folder) of TEXTS."""
  for number, text in enumerate(TEXTS):
    (folder / f"{number}.txt").write_text(text)
  pattern = f"notes={folder}/?.txt"
  corpus = Corpus((pattern,), cfg.data, "--data")
  rows = len(list(corpus.batches(1)))
  with tiny.cheap_compilation():
    offline.build_index(cfg, iter(points(cfg)), corpus, folder / "index", ROWS, rows, directions)
  config.save(attribute.as_run(cfg, [pattern], ("notes",)), folder / "index" / "config.yml")
  return corpus, rows


def sources_of(cfg, folder):
  with tiny.cheap_compilation():
    return Sources(folder, folder / "index", cfg, iter(points(cfg)))


def ids_of(sources, text):
  return sources.tokenizer.encode([text.encode()])[0].tolist()


def token_gradients(cfg, point, ids, num):
  """Gradients [A, P] of the cross-entropy of each of the last tokens, each by itself."""
  held = nnx.merge(offline.state.abstract_split(cfg)[0], point.state)
  graphdef, params, rest = nnx.split(held.model, nnx.Param, ...)
  ids = jnp.asarray(ids)[None]

  def loss(params, place):
    places = jnp.arange(ids.shape[1] - 1)[None]
    logits = nnx.merge(graphdef, params, rest)(ids[:, :-1], places, jnp.ones_like(places))
    return -jax.nn.log_softmax(logits)[0, place, ids[0, place + 1]]

  each = jax.jit(lambda params, places: jax.lax.map(lambda place: jax.value_and_grad(loss)(params, place), places))
  losses, found = each(params, jnp.arange(ids.shape[1] - 1 - num, ids.shape[1] - 1))
  return losses, np.concatenate([np.asarray(x).reshape(num, -1) for x in jax.tree.leaves(found)], 1)


def document_gradients(cfg, point, corpus, rows):
  """{(path, chunk): gradient [P] of the summed loss}, and rate times clipping over tokens of the first step (SGD)."""
  held = nnx.merge(offline.state.abstract_split(cfg)[0], point.state)
  graphdef, params, rest = nnx.split(held.model, nnx.Param, ...)
  objective, found, total, count = offline.create(cfg), {}, 0.0, 0

  @jax.jit
  def gradient(params, batch, row, slot):
    def loss(params):
      losses, weights = objective(nnx.merge(graphdef, params, rest), batch)
      here = (batch["targets_segmentation"] == slot) & (jnp.arange(len(losses)) == row)[:, None]
      return jnp.sum(losses * jnp.where(here, weights, 0))

    return jax.grad(loss)(params)

  (batch,) = corpus.batches(rows)
  for row, slot in zip(*np.nonzero(batch.document_BS >= 0), strict=True):
    leaves = jax.tree.leaves(gradient(params, batch.arrays, row, slot + 1))
    flat = np.concatenate([np.asarray(x, np.float64).ravel() for x in leaves])
    key = corpus.source.document_id(batch.document_BS[row, slot]).path, int(batch.offset_BS[row, slot])
    found[key], total = flat, total + flat
    count += int((batch.arrays["targets_segmentation"][row] == slot + 1).sum())
  clip = min(1.0, cfg.optimizer.gradient_clipping_threshold / np.linalg.norm(total / count))
  return found, cfg.optimizer.learning_rate * clip / count


@pytest.mark.parametrize("cfg", [SGD], ids=["sgd"])
def test_each_token_is_a_query_of_its_own_and_they_add_up(cfg, tmp_path):
  """Against gradients of each token and each document written out: within the errors of 640 directions."""
  corpus, rows = written(cfg, tmp_path, 640)
  sources = sources_of(cfg, tmp_path)
  prompt, answer = ids_of(sources, PROMPT), ids_of(sources, ANSWER)
  with tiny.cheap_compilation():
    found = sources.of_answer(prompt, answer, top=100)
    expected, logp_A = collections.defaultdict(float), None
    for point in points(cfg):
      losses, token_AP = token_gradients(cfg, point, prompt + answer, len(answer))
      documents, factor = document_gradients(cfg, point, corpus, rows)
      for key, gradient in documents.items():
        expected[key] = expected[key] + factor * token_AP @ gradient
      logp_A = -np.asarray(losses)
    cut = sources.of_answer(prompt, ids_of(sources, "né")[:2])
  assert "".join(token["text"] for token in found["tokens"]) == ANSWER
  assert [token["text"] for token in cut["tokens"]] == ["n", "\ufffd"], "as `maxghost generate` shows it"
  np.testing.assert_allclose([token["logp"] for token in found["tokens"]], logp_A, rtol=1e-4)
  assert len(found["documents"]) == len(expected) > len(TEXTS)
  for one in found["documents"]:
    np.testing.assert_allclose(sum(one["token_nats"]), one["nats"], rtol=1e-4, atol=1e-7)
    exact_A = expected[one["path"], one["chunk"]]
    assert abs(one["nats"] - exact_A.sum()) < 4 * one["standard_error"]
    own = json.dumps(one["text"])
    assert own[1:-1] in json.dumps(TEXTS[int(one["path"][0])]), own
  size = np.concatenate([one["token_nats"] for one in found["documents"]])
  exact = np.concatenate([expected[one["path"], one["chunk"]] for one in found["documents"]])
  assert np.corrcoef(size, exact)[0, 1] > 0.95
  assert len(found["token_top"]) == len(answer) and {len(top) for top in found["token_top"]} == {TOKEN_TOP}
  assert found["notes"] and "when documents were trained on is not known" in found["notes"][0]


def test_the_seconds_of_an_answer_contain_no_compilation(tmp_path, monkeypatch):
  written(SGD, tmp_path, 8)
  sources, events = sources_of(SGD, tmp_path), []
  heard = lambda name, *_, **__: events.append(name)  # noqa: E731
  jax.monitoring.register_event_duration_secs_listener(heard)
  monkeypatch.setattr(sources_module.time, "perf_counter", lambda: events.append("clock") or 0.0)
  try:
    with tiny.cheap_compilation():
      sources.of_answer(ids_of(sources, PROMPT), ids_of(sources, ANSWER), top=2)
  finally:
    jax.monitoring.unregister_event_duration_listener(heard)
  begin, end = (place for place, name in enumerate(events) if name == "clock")
  assert any("jaxpr_trace" in name for name in events[:begin]) and end == begin + 1


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-11)])
def test_tokens_add_up_to_the_query_of_the_whole_answer(dtype, tolerance, tmp_path):
  """Through AdamW's response: the sketches of all tokens against that of the mean loss of the same targets."""
  with precision(dtype), tiny.cheap_compilation():
    cfg = config.replace(CFG, dtype=dtype, weight_dtype=dtype, z_loss_multiplier=0.0)
    _, fresh = offline.state.create_split(cfg)
    layout = Corpus((f"a={write(tmp_path / 'a.txt', TEXTS[0])}",), cfg.data, "--data").layout
    sketcher, batch = offline.Sketcher(cfg, layout, 1, 16), tiny.make_batch(((20,),), 3, num_positions=24, mask=0.0)
    places = np.array([5, 6, 9, -1])
    weighted = np.isin(np.arange(24), places)[None]
    val = batch | {"targets_segmentation": np.where(weighted, 1, 0).astype(np.int32)}
    _, factor, (whole_MR,) = sketcher.respond(fresh, batch, (val,))
    sketch_AMR = np.asarray(sketcher.ask(fresh, sketcher.step(fresh, batch), batch, places)[1])
    expected = 3 * float(factor) * np.asarray(whole_MR)
  assert sketch_AMR.dtype == dtype and not sketch_AMR[-1].any()
  np.testing.assert_allclose(sketch_AMR.sum(0), expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def test_no_device_rounds_gradients_on_their_way_into_an_index(tmp_path):
  cfg = config.replace(CFG, matmul_precision="highest")
  _, fresh = offline.state.create_split(cfg)
  layout = Corpus((f"a={write(tmp_path / 'a.txt', TEXTS[0])}",), cfg.data, "--data").layout
  sketcher, batch = offline.Sketcher(cfg, layout, 1, 16), tiny.make_batch(((20,),), 3, num_positions=24, mask=0.0)
  scale = jax.eval_shape(sketcher.step, fresh, batch).scale
  for made, more in ((sketcher.sketch, (scale, batch)), (sketcher.respond, (batch, (batch,)))):
    assert not tiny.rounded_products(made.func.trace(*made.args, fresh, *more).jaxpr)


def write(path, text):
  path.write_text(text)
  return path


def made_by_hand(folder, sketch_NMR):
  held = index.Shrunk()
  for part in np.array_split(sketch_NMR, 3):
    held.add(part)
  held.save(folder, 7)
  (folder / "ids.jsonl").write_text("".join(json.dumps(["d", f"{n}", 0, 0, 5]) + "\n" for n in range(len(sketch_NMR))))
  return index.Index(folder, {"checkpoints": [[7, "x"]]})


@pytest.mark.parametrize(("chunks", "directions"), [(400, 16), (400, 128), (40, 128)])
def test_the_index_ranks_by_whitened_blocks_and_knows_nats(chunks, directions, tmp_path):
  rng = np.random.default_rng(0)
  common = 2 * rng.normal(size=(5, directions))
  sketch = ((rng.normal(size=(chunks, 5, directions)) + common) * rng.lognormal(0, 3, (chunks, 5, 1))).astype(
    np.float32
  )
  sketch[:, 3] = 0  # a parameter that no chunk uses
  asked = (rng.normal(size=(3, 5, directions)) + common).astype(np.float32)
  opened = made_by_hand(tmp_path, sketch)
  exact = np.einsum("nmr,qmr->qn", sketch.astype(float), asked) / directions
  size = np.linalg.norm(sketch, axis=-1) @ np.linalg.norm(asked, axis=-1).max(0) / directions
  for found in (opened.scores([asked], "nats"), opened.products([asked], np.arange(chunks)).mean(-1)):
    assert (np.abs(found - exact) < 0.02 * size).all(), "the error of int8"
  norm = np.linalg.norm(sketch, axis=-1, keepdims=True)
  unit = (sketch / np.where(norm > 0, norm, 1)).astype(float)
  expected = 0.0
  for m in (0, 1, 2, 4):
    moment = unit[:, m].T @ unit[:, m] / len(unit)
    damped = moment + 0.1 * np.trace(moment) / directions * np.eye(directions)
    query = asked[:, m] / np.linalg.norm(asked[:, m], axis=-1, keepdims=True)
    expected = expected + np.linalg.solve(damped, query.T).T @ unit[:, m].T / 5
  found = opened.scores([asked])
  np.testing.assert_allclose(found, expected, atol=0.2 * expected.std())
  assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.998


def test_each_of_several_queries_has_the_chunks_and_ranks_of_its_own(tmp_path, monkeypatch):
  rng = np.random.default_rng(0)
  asked = rng.normal(size=(3, 5, 16)).astype(np.float32)
  opened = made_by_hand(tmp_path, rng.normal(size=(9, 5, 16)).astype(np.float32))
  np.savez(tmp_path / "step.npz", x=np.zeros(1))
  sketcher = SimpleNamespace(prepare=lambda batch: batch, respond=lambda *_: (None, 0.5, asked))
  monkeypatch.setitem(offline.METHODS, index.CONTRIBUTION, lambda *_: sketcher)
  about = {"method": "contribution", "directions": 16, "chunks": 9, "checkpoints": [[7, "x"]]}
  queries = {name: SimpleNamespace(epoch_B=[0], arrays={}) for name in "abc"}
  rest = (tmp_path, about, queries, SimpleNamespace(layout=None), 4)
  for by in ("nats", "similarity"):
    found = offline.nearest(CFG, iter([offline.Point(7, None, "x")]), *rest, by)
    for chunks, score_N in zip(found.values(), opened.scores([0.5 * asked], by), strict=True):
      order = np.argsort(-score_N)[:4]
      assert [c["path"] for c in chunks] == [str(n) for n in order]
      np.testing.assert_allclose([c["score"] for c in chunks], score_N[order], rtol=1e-4, atol=1e-6)
      if by == "similarity":
        assert [(c["rank"], c["tied"]) for c in chunks] == [(1, False), (2, False), (3, False), (4, False)]


def test_an_open_index_stays_as_it_was_while_it_is_written_again(tmp_path):
  """Its sketches are mapped into memory; a file that was cut short in place would end the reader with a bus error."""

  def write(sketch):
    held = index.Shrunk()
    held.add(np.array([[sketch]]))
    return tmp_path / held.save(tmp_path, 7)[0]

  mapped = np.load(write([3.0, 4.0]), mmap_mode="r")
  again = np.load(write([-3.0, 4.0]))
  assert mapped.ravel().tolist() == [76, 102] and again.ravel().tolist() == [-76, 102]


def test_words_are_bm25_and_orders_are_fused(tmp_path):
  texts = ["Ulm on the river", "the river, the RIVER", "", "a" * 9, "Ulm"]
  words.write(tmp_path, enumerate(texts), len(texts))
  held = words.Words(tmp_path, len(texts))
  split = [re.findall(r"\w+", text.lower()) for text in texts]
  mean, expected = np.mean([len(one) for one in split]), np.zeros(5)
  for word in ("ulm", "river", "river", "absent"):
    have = sum(word in one for one in split)
    for n, one in enumerate(split):
      times = one.count(word)
      norm = 1.2 * (0.25 + 0.75 * len(one) / mean)
      expected[n] += math.log(1 + (5 - have + 0.5) / (have + 0.5)) * times * 2.2 / (times + norm)
  np.testing.assert_allclose(held.scores("Ulm river? River absent"), expected, rtol=1e-5)
  fused = words.fused(np.array([0.1, 0.3, 0.2]), np.array([5.0, 0.0, 7.0]))
  np.testing.assert_allclose(fused, [1 / 63 + 1 / 62, 1 / 61, 1 / 62 + 1 / 61], rtol=1e-6)


def test_a_chunk_ends_where_the_next_one_begins_also_if_that_one_is_not_indexed(tmp_path):
  """Of a document of four chunks the run has trained on the second one alone."""
  text = "".join(f"word{n:02} " for n in range(12))  # 84 bytes: chunks of 24 pairs begin at bytes 0, 23, 47 and 71
  (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in (text, "x")))
  pattern = f"notes={tmp_path}/notes.jsonl"
  corpus = Corpus((pattern,), CFG.data, "--data")
  corpus._trained, corpus._chunks = {("notes", "notes.jsonl", 0)}, {("notes", "notes.jsonl", 0, 23)}
  with tiny.cheap_compilation():
    assert offline.build_index(CFG, iter(points(CFG)), corpus, tmp_path / "index", 1, 1, 8) == 1
  config.save(attribute.as_run(CFG, [pattern], ("notes",)), tmp_path / "index" / "config.yml")
  sources = sources_of(CFG, tmp_path)
  with pytest.raises(config.ConfigError, match="token id 99999: the vocabulary"):  # once the sources of another token
    sources.of_answer([1], [99999])
  assert sources._texts_of([0]) == [text[23:47]]
  assert words.Words(tmp_path / "index", 1)._number.keys() == {*words.words_of(text[23:47])}


RUN = (
  "steps=6", "checkpoint_period=3", "max_num_checkpoints_to_keep=0", "async_checkpointing=false", "run_name=run",
  "base_emb_dim=16", "base_num_query_heads=2", "base_num_kv_heads=1", "head_dim=8", "base_mlp_dim=24",
  "base_num_decoder_layers=1", "max_target_length=32", "per_device_batch_size=2", "dataset_type=text",
  "ghost_val_sets=held", "eval_interval=-1", "enable_tensorboard=false", "remat_policy=none",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run with an index of what it trains on at RUN/index, of the last step."""
  folder = tmp_path_factory.mktemp("ask")
  records = [{"text": f"{text} {n}"} for n in range(4) for text in TEXTS]
  (folder / "notes.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
  for number in range(6):
    (folder / f"held{number}.txt").write_text(f"held out text {number}")
  files = f"dataset_files=[notes={folder}/notes.jsonl,held={folder}/held*.txt]"
  with tiny.cheap_compilation(), tiny.one_device():
    assert train.main([*RUN, files, "ghost_val_fraction=0.5", f"base_output_directory={folder}"]) == 0
    made = ["attribute", f"{folder}/run/checkpoints/6", "--data", "run"]
    assert cli.main([*made, "--index", f"{folder}/run/index", "--directions", "16", "--rows", "2"]) == 0
  return folder / "run"


def test_the_command_prints_the_answer_and_its_sources(run, capsys):
  with tiny.cheap_compilation(), tiny.one_device():
    assert cli.main(["ask", str(run), PROMPT, "--max_new_tokens", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    given = ("--answer", ANSWER, "--token", "2", "--top", "1")
    assert cli.main(["ask", str(run / "checkpoints" / "6"), PROMPT, *given]) == 0
    shown = capsys.readouterr().out
  assert shown.count("notes.jsonl:") == 1
  assert ANSWER in shown and "of token 2" in shown and "notes:notes.jsonl:" in shown
  assert 1 <= len(found["tokens"]) <= 4 and len(found["documents"]) >= 3 and found["notes"] == []
  first = found["documents"][0]
  assert first.keys() >= {
    "id", "domain", "path", "offset", "chunk", "text", "nats", "standard_error", "token_nats", "trained"
  }  # fmt: skip
  assert found["trained_for"] == "held" and found.keys() >= {"tokens", "token_top", "seconds", "method", "unit"}
  log = log_of(run)
  for one in found["documents"]:
    key = one["domain"], one["path"], one["offset"], one["chunk"]
    assert [(t["step"], t["epoch"]) for t in one["trained"]] == [row[:2] for row in log[key]]
    np.testing.assert_allclose([t["contribution"] for t in one["trained"]], [row[2] for row in log[key]], rtol=1e-6)
    assert one["domain"] == "held" or any(one["text"].rstrip(" 0123456789") in text for text in TEXTS)
  assert max(len(one["trained"]) for one in found["documents"]) > 0
  lines = (run / "index" / "ids.jsonl").read_text().splitlines()
  assert {tuple(json.loads(line)[:4]) for line in lines} == log.keys(), "what the run has trained on"


def log_of(run):
  log, found = attribution.load(run), collections.defaultdict(list)
  columns = [np.asarray(log[name]).tolist() for name in ("domain", "path", "offset", "chunk", "step", "epoch")]
  for *key, step, epoch, value in zip(*columns, log["contribution"][:, 0].tolist(), strict=True):
    found[tuple(key)].append((step, epoch, value))
  return found


def test_what_a_selection_saw_and_left_out_was_not_trained_on(tmp_path):
  (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
  files = (f"notes={tmp_path}/notes.jsonl",)
  cfg = config.replace(CFG, dataset_type="text", dataset_files=files, ghost_val_sets=("notes",))
  config.save(cfg, tmp_path / "config.yml")
  ids = [tuple(data.load_dataset(cfg.data, 0).source.document_id(n)) for n in range(2)]
  writer = scorelog.Writer(tmp_path, ("notes",), period=1)
  rows = {"tokens": [9, 9], "loss": [1, 1], "dot": [1, 1], "contribution": [0.5, 0], "share": [1, 0], "epoch": [0, 0]}
  writer.append({"step": 0}, rows, ids)
  writer.close()
  sources = object.__new__(Sources)
  sources._log = attribution.load(tmp_path)
  assert [len(one) for one in sources._trained([(*key, 0) for key in ids])] == [1, 0]
  corpus = Corpus.of_run(cfg, tmp_path)
  documents = np.concatenate([batch.document_BS.ravel() for batch in corpus.batches(1)])
  assert corpus._trained == {ids[0]} and {*documents[documents >= 0].tolist()} == {0}


def test_a_chunk_beside_one_that_was_trained_on_is_not_indexed(tmp_path):
  """The ends of two documents share a row; the run has trained on the first one's alone."""
  (tmp_path / "notes.jsonl").write_text("".join(json.dumps({"text": one * 31}) + "\n" for one in "ab"))
  corpus = Corpus((f"notes={tmp_path}/notes.jsonl",), CFG.data, "--data")
  corpus.layout = dataclasses.replace(corpus.layout, max_segments=2)
  first, second = (tuple(corpus.source.document_id(n)) for n in range(2))
  corpus._trained, corpus._chunks = {first, second}, {(*first, 23), (*second, 0)}
  named = [(b.document_BS[at], b.offset_BS[at]) for b in corpus.batches(1) for at in [b.document_BS >= 0]]
  assert {pair for documents, offsets in named for pair in zip(documents, offsets, strict=True)} == {(0, 23), (1, 0)}


def test_an_index_of_texts_that_changed_since_the_training_says_so(run, tmp_path, capsys, monkeypatch):
  copied = shutil.copytree(run, tmp_path / "run")
  config_of = [copied / "config.yml", copied / "index" / "config.yml"]
  (tmp_path / "notes.jsonl").write_text((run.parent / "notes.jsonl").read_text().replace("Ulm", "ULM"))
  for path in config_of:
    path.write_text(path.read_text().replace(f"{run.parent}/notes", f"{tmp_path}/notes"))
  monkeypatch.setattr(attribute, "_index", lambda *_: 0)
  assert cli.main(["attribute", str(copied), "--data", "run", "--index", str(tmp_path / "new")]) == 0
  assert "has changed since the run" in capsys.readouterr().err
  _, then, _ = sources_module._log_of(copied, copied / "index")
  source = Source(copied / "index")
  source.open(())
  assert source.open(then) and not source.open((source.dataset.fingerprint,))


@pytest.mark.parametrize(
  ("key", "known", "note"),
  [
    ("packing: concat_then_split", False, "is not known: packing=concat_then_split cut them at other places"),
    ("ghost_every: 3", True, "ghost_every=3: only scored steps are known to have trained on a document"),
  ],
)
def test_what_the_log_does_not_know_is_said(key, known, note, run, tmp_path, capsys):
  copied = shutil.copytree(run, tmp_path / "run")
  saved = (copied / "config.yml").read_text()
  (copied / "config.yml").write_text(re.sub(f"^{key.split()[0]} .*$", key, saved, flags=re.M))
  log, then, notes = sources_module._log_of(copied, copied / "index")
  assert (log is not None) == known and note in notes[0]
  assert bool(then) == known, "the documents of the index are the run's"
  one = {"token_nats": [1.0], "nats": 1.0, "standard_error": 0.1, "trained": [], "id": "d", "text": "t"}
  found = {"tokens": [{"text": "a"}], "documents": [one], "trained_for": "held" if known else None}
  with console() as shown:
    said = {"unit": "", "method": "", "seconds": 1.0}
    ask._show(argparse.Namespace(question="q", token=None, top=1), found | said, shown)
  assert (" 0× " in capsys.readouterr().out) == known


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("checkpoints/3", "q"), "made from step 6, not from step 3"),
    (("checkpoints/3", "q"), "checkpoints/3; give "),
    ((".", "q", "--index", "nowhere"), "no index there; write one: maxghost attribute"),
    ((".", ""), "the question is empty"),
    ((".", "q", "--answer", ""), "--answer is empty"),
    ((".", "q", "--top", "0"), "--top 0: at least 1"),
    ((".", "q", "--seed", str(-1 << 64)), "--seed -18446744073709551616: at least"),
    ((".", "q", "--answr", "x"), "did you mean '--answer'"),
    ((".", "q", "--answer", "x", "--temperature", "0.5"), "--temperature has no effect with --answer"),
    ((".", "q", "--token", "2", "--json"), "--token has no effect with --json; leave one of them out"),
    (("absent", "q"), "does not exist"),
  ],
)
def test_wrong_input_is_one_line(run, arguments, message, capsys):
  folder, *rest = arguments
  assert cli.main(["ask", str(run / folder), *rest]) == 2
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


def test_an_index_of_other_weights_and_a_token_beyond_the_answer_are_refused(run, tmp_path, capsys):
  with tiny.cheap_compilation(), tiny.one_device():
    assert cli.main(["ask", str(run), "q", "--answer", "ab", "--token", "3"]) == 2
    assert "--token 3: the answer has 2 tokens" in capsys.readouterr().err
    opened = ask.opened(run, None)
    point = next(attribute.points(opened[1], opened[2]))
    with pytest.raises(config.ConfigError, match="step 6 had other weights"):
      Sources(run, run / "index", opened[1], iter([point._replace(digest="0")]))


def test_a_run_without_scores_is_told_to_name_files(tmp_path, capsys):
  (tmp_path / "checkpoints" / "3").mkdir(parents=True)
  (tmp_path / "config.yml").write_text("steps: 3\n")
  for given in ("NAME=GLOB", "run"):  # what a run without a score log has trained on is not known
    assert cli.main(["ask", str(tmp_path), "q"]) == 2
    assert f"--data {given} --index" in capsys.readouterr().err
    (tmp_path / "ghost").mkdir(exist_ok=True)


def test_files_that_attribute_leaves_out_are_named(tmp_path, capsys, monkeypatch):
  """With on_corrupt=skip, of --data and of --queries."""
  (tmp_path / "run/checkpoints/5").mkdir(parents=True)
  config.save(config.replace(CFG, on_corrupt="skip"), tmp_path / "run/config.yml")
  for name in ("data", "asked"):
    (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + '\n{"text": ""}\n{"text": 7}\n')
    (tmp_path / f"{name}.jsonl.gz").write_text("no gzip")
  corpora = []
  monkeypatch.setattr(attribute, "has_optimizer", lambda path: True)
  monkeypatch.setattr(attribute, "_exact", lambda args, cfg, paths, corpus, *_: corpora.append(corpus) or 0)
  asked = ["--queries", f"q={tmp_path}/asked*", "--output", str(tmp_path / "out")]
  assert attribute.main([str(tmp_path / "run"), "--data", f"d={tmp_path}/data*", *asked]) == 0
  said = capsys.readouterr().err
  assert [f"{name}.jsonl.gz cannot be read" in said for name in ("data", "asked")] == [True, True]
  assert len(list(corpora[0].batches(2))) == 1 and corpora[0].left_out[0].endswith("empty or corrupt: 2")
