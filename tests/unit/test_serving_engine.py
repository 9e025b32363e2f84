"""The engine: whatever else it serves, in whatever order and slots, a request has the text and the log-probabilities of
a pass over its own tokens; nothing is compiled for a request; the Batcher ends every job, whatever happens."""

import dataclasses
import functools
import itertools
import threading

import hf_models
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
import tiny
from flax import nnx

from maxghost.config import ConfigError
from maxghost.data.tokenizers import ByteTokenizer
from maxghost.parallel.shardings import Layout
from maxghost.serving import Batcher, Closed, Engine, Generator, QueueFull, Request, Sampling
from maxghost.serving import engine as engine_module
from maxghost.serving.prefixes import Prefixes
from maxghost.serving.sampling import TOP, choose, draw

SIZE, CHUNK, NEW = 48, 8, 6
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [200], list(range(40, 59)), [17, 3, 99, 4]]
SAMPLED = Sampling(1.4, top_k=60, top_p=0.95, min_p=0.001, repetition_penalty=1.2)


@pytest.fixture(scope="module", autouse=True)
def cheap():
  """And decode steps of several lengths in short caches."""
  with tiny.cheap_compilation(), pytest.MonkeyPatch.context() as patch:
    patch.setattr(engine_module, "_VISIBLE", 16)
    yield


@pytest.fixture(scope="module")
def model():
  return tiny.make_model(tiny.make_config())


@pytest.fixture(scope="module")
def served(model):
  """(engine, params), warm."""
  engine = Engine(nnx.graphdef(model), slots=3, cache_size=SIZE, prefill_chunk=CHUNK)
  params = engine.load_params(nnx.state(model))
  engine.warm_up(params)
  return engine, params


@pytest.fixture
def batcher(served):
  batcher = Batcher(*served, ByteTokenizer(), stop_ids=[257], queue_limit=40)
  yield batcher
  batcher.close()


@nnx.jit
def whole_logits(model, tokens_BT):
  return model(tokens_BT)


def ids(job) -> list[int]:
  return [token for piece in job for token in piece.ids]


def run(engine, params, prompt, num_new: int, *, slot: int = 0, state=None, **options):
  """(new ids, results) of one request by the engine's own calls."""
  prefix = engine.prefill(params, prompt, **options)
  state = engine.insert(prefix, state or engine.init_decode_state(), slot)
  results = [tuple(x[0] for x in prefix.result)]
  for _ in range(num_new - 1):
    state, result = engine.generate(params, state)
    results.append(tuple(x[slot] for x in result))
  return [int(found[0]) for found in results], results


def spoilt(state):
  """The state with NaN in every cache."""
  state.kept = jax.tree.map(lambda x: jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding), state.kept)
  return state


def check_against_whole_pass(model, prompt, new, results):
  """Greedy tokens, their log-probabilities and the alternatives, by one pass over prompt and answer."""
  logits_TV = np.asarray(whole_logits(model, jnp.asarray([prompt + new], jnp.int32)))[0, len(prompt) - 1 : -1]
  logps_TV = logits_TV - np.log(np.exp(logits_TV.astype(np.float64)).sum(-1, keepdims=True))
  np.testing.assert_array_equal(new, logits_TV.argmax(-1))
  for logps_V, (token, logp, top_ids, top_logps) in zip(logps_TV, results, strict=True):
    np.testing.assert_allclose(logp, logps_V[token], atol=2e-5)
    np.testing.assert_allclose(top_logps, np.sort(logps_V)[::-1][: len(top_logps)], atol=2e-5)
    np.testing.assert_allclose(logps_V[top_ids], top_logps, atol=2e-5)


@pytest.mark.parametrize(
  "name", ["tiny", "unscanned", "lora", "gpt2", pytest.param("qwen3", marks=pytest.mark.slow), "mixtral", "gpt_oss"]
)
def test_chunks_and_steps_have_the_logits_of_a_whole_pass(model, name):
  """Learned positions, norms of queries, experts, windows of 9 with sinks. Prompts of four chunks, windows pass by; the
  other slot is full of NaN."""
  if name in hf_models.NAMES:
    model, prompt = hf_models.model(name)[0], 2 * hf_models.model(name)[2][0].tolist()
  else:
    changes = {"unscanned": {"scan_layers": False}, "lora": {"lora_rank": 3}}.get(name, {})
    model, prompt = tiny.make_model(tiny.make_config(**changes)) if changes else model, list(range(70, 89))
  graphdef, state = nnx.split(model)
  size = 31 if name == "gpt2" else 19  # all positions that it has
  engine = Engine(graphdef, slots=2, cache_size=size, prefill_chunk=4, prefix_bytes=0)
  params = engine.load_params(state)
  for length, num_new in ((13, NEW), (size - 1, 1)):  # the second one's padding lies behind the last position
    state = spoilt(engine.init_decode_state())
    new, results = run(engine, params, prompt[:length], num_new, slot=1, state=state, top=1)
    check_against_whole_pass(model, prompt[:length], new, results)


def test_any_order_of_arrival_gives_the_text_of_each_alone(model, batcher):
  """Greedy and sampled, more requests than slots; against the Generator, one prompt at a time."""
  graphdef, state = nnx.split(model)
  keys = [jax.random.key(seed) for seed in range(len(PROMPTS))]
  expected = {}
  for sampling in (Sampling(), SAMPLED):
    generator = Generator(graphdef, SIZE, sampling=sampling)
    for seed, prompt in enumerate(PROMPTS):
      row = generator.generate(state, [prompt], NEW, keys_B=jnp.stack([keys[seed]])).row(0)
      expected[sampling, seed] = row.tolist()
  assert expected[SAMPLED, 0] != expected[Sampling(), 0]
  asked = list(expected) * 2
  for order in (asked, asked[::-1], asked[3:] + asked[:3]):
    jobs = [
      batcher.submit(Request(tuple(PROMPTS[seed]), NEW, sampling, seed, ignore_stop_ids=True))
      for sampling, seed in order
    ]
    assert [ids(job) for job in jobs] == [expected[key] for key in order]
  counters = batcher.counters
  assert (counters.done, counters.running, counters.waiting) == (48, 0, 0)
  assert (counters.generated_tokens, counters.prompt_tokens) == (48 * NEW, 12 * sum(map(len, PROMPTS)))


def test_a_cache_in_int8_is_read_the_same_in_chunks_and_at_once():
  """Codes and scales are kept by the engine, chunk by chunk and of shared beginnings, as the Generator keeps them."""
  graphdef, state = nnx.split(tiny.make_model(tiny.make_config(quantize_kvcache=True)))
  engine = Engine(graphdef, slots=2, cache_size=SIZE, prefill_chunk=CHUNK)
  params, generator = engine.load_params(state), Generator(graphdef, SIZE)
  kept = jax.tree.leaves(engine.init_decode_state().kept)
  assert {x.dtype for x in kept} == {jnp.dtype("int8"), jnp.dtype("float32")}
  for prompt in (PROMPTS[2], PROMPTS[2]):
    new, _ = run(engine, params, prompt, NEW, slot=1)
    assert new == generator.generate(state, [prompt], NEW).row(0).tolist()


def test_nothing_is_compiled_for_a_request(served, batcher):
  found = []

  def hear(name, *_, **__):
    found.append(name)

  jax.monitoring.register_event_duration_secs_listener(hear)
  try:
    jobs = [
      batcher.submit(Request(tuple(prompt), NEW, sampling, seed=7, logprobs=top, stop=("zz",)))
      for sampling, top in ((Sampling(), 0), (SAMPLED, 5), (Sampling(0.7), TOP))
      for prompt in [*PROMPTS, list(range(SIZE - NEW)), [3] * 9]
    ]
    assert all([*job][-1].finish in ("stop", "length") for job in jobs)
    jax.jit(lambda x: x + 1.5)(np.arange(7.0))  # so that the listener is known to hear
  finally:
    jax.monitoring.unregister_event_duration_listener(hear)
  compiled = [name for name in found if "backend_compile" in name]
  assert len(compiled) == 1, found


def test_a_kept_beginning_has_the_same_logits(served):
  engine, params = served
  engine._prefixes = Prefixes(1 << 28)
  beginning = list(range(100, 120))  # two chunks and a half
  first = engine.prefill(params, [*beginning, 7], top=1)
  again = engine.prefill(params, [*beginning, 7], top=1)
  other = engine.prefill(params, [*beginning, 8], top=1)
  assert (first.reused, again.reused, other.reused) == (0, 2 * CHUNK, 2 * CHUNK)
  for a, b in zip(jax.tree.leaves(first.kept), jax.tree.leaves(again.kept), strict=True):
    np.testing.assert_array_equal(a, b)
  for a, b in zip(first.result, again.result, strict=True):
    np.testing.assert_array_equal(a, b)
  assert not np.array_equal(first.result.top_logps_BN, other.result.top_logps_BN)
  assert engine.prefill(params, beginning[:CHUNK]).reused == 0  # the last token is read again, for its logits
  changed = engine.prefill(params, [1, *beginning[1:]], top=1)
  assert changed.reused == 0


def test_kept_beginnings_stay_within_their_memory(served):
  engine, params = served
  engine._prefixes = Prefixes(1 << 28)
  engine.prefill(params, [1] * (CHUNK + 1))
  one = engine._prefixes.bytes
  before, engine._prefixes.limit = engine._prefixes.limit, 3 * one
  try:
    assert one > 0
    for token in (2, 3):
      engine.prefill(params, [token] * (CHUNK + 1))
    assert engine.prefill(params, [1] * (CHUNK + 1)).reused == CHUNK  # used again, so that 2 is the oldest
    engine.prefill(params, [4] * (CHUNK + 1))
    assert engine._prefixes.bytes == 3 * one
    reused = [engine.prefill(params, [token] * (CHUNK + 1)).reused for token in (4, 3, 1, 2)]
    assert reused == [CHUNK] * 3 + [0]
  finally:
    engine._prefixes.limit = before


def test_other_slots_and_freed_ones_are_never_read(served):
  """NaN everywhere but in a request's own slot changes no bit; a slot that is used again has nothing of before."""
  engine, params = served
  clean, expected = run(engine, params, PROMPTS[0], NEW, slot=1, top=1)
  state = engine.insert(engine.prefill(params, PROMPTS[2]), spoilt(engine.init_decode_state()), 2)
  state = spoilt(engine.free(state, 2))
  dirty, results = run(engine, params, PROMPTS[0], NEW, slot=1, state=state, top=1)
  assert dirty == clean
  for found, wanted in zip(results, expected, strict=True):
    for a, b in zip(found, wanted, strict=True):
      np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", [pytest.param("data 8", marks=pytest.mark.slow), "tensor 4 x data 2"])
def test_a_mesh_has_the_tokens_of_one_device(name):
  cfg = meshes.make_config(meshes.MESHES[name])
  graphdef, state = nnx.split(tiny.make_model(cfg))
  texts = {}
  for layout in (None, Layout.of(cfg.parallel)):
    engine = Engine(graphdef, slots=8, cache_size=24, prefill_chunk=8, layout=layout)
    params = engine.load_params(state)
    decoding = engine.init_decode_state()
    found = []
    for slot, prompt in enumerate(PROMPTS):
      prefix = engine.prefill(params, prompt, SAMPLED if slot == 3 else None, seed=5)
      found.append([int(prefix.result.ids_B[0])])
      decoding = engine.insert(prefix, decoding, 2 * slot)
    for _ in range(NEW - 2):
      decoding, result = engine.generate(params, decoding)
      for slot, row in enumerate(found):
        row.append(int(result.ids_B[2 * slot]))
    texts[layout is None] = found
    if layout is not None:
      shards = {x.sharding.shard_shape(x.shape)[-4] for x in jax.tree.leaves(decoding.kept)}
      assert shards == {8 // layout.row_parts} and layout.row_parts > 1
      assert any(x.sharding.shard_shape(x.shape) != x.shape for x in jax.tree.leaves(params)) == ("tensor" in name)
  assert texts[True] == texts[False]


def rows_of(samplings, **more) -> dict:
  rows = {
    name: np.array([getattr(s, name) for s in samplings], np.int32 if name == "top_k" else np.float32)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
  }
  count = len(samplings)
  defaults = {
    "key": np.zeros((count, 2), np.uint32),
    "step": np.zeros(count, np.int32),
    "top": np.zeros(count, np.int32),
  }
  return rows | defaults | more


def probabilities(logits, seen, sampling) -> np.ndarray:
  """What NumPy says of the distribution that is drawn from, float64."""
  x = np.asarray(logits, np.float64)
  penalty = sampling.repetition_penalty
  x = np.where(seen, np.where(x > 0, x / penalty, x * penalty), x) / sampling.temperature
  p = np.exp(x - x.max())
  order = np.argsort(-p)
  keep = np.ones(len(p), bool)
  if sampling.top_k:
    keep[order[sampling.top_k :]] = False
  share = np.cumsum(p[order] * keep[order]) / (p * keep).sum()
  keep[order[1:][share[:-1] >= sampling.top_p]] = False
  keep &= p >= sampling.min_p * p.max()
  return p * keep / (p * keep).sum()


SAMPLINGS = [
  Sampling(0.8, top_k=3), Sampling(1.3, top_p=0.6), Sampling(1.0, min_p=0.2), Sampling(1.0, repetition_penalty=1.7),
  Sampling(0.9, top_k=6, top_p=0.8), Sampling(2.0, 7, 0.9, 0.1, 0.6), Sampling(1.1, top_k=10**6),
]  # fmt: skip


def test_draws_have_numpys_distribution_row_by_row():
  """Every row has a sampling of its own in one call; frequencies of 3,000 draws, and no draw of a token left out."""
  rng = np.random.default_rng(3)
  count, vocab = 3000, 11
  logits_BV = rng.normal(size=(len(SAMPLINGS), vocab)).astype(np.float32) * 1.5
  seen_BV = rng.random((len(SAMPLINGS), vocab)) < 0.4
  rows = rows_of(SAMPLINGS)
  rows["key"][:, 1] = 5
  steps = jax.jit(jax.vmap(lambda step_B: draw(logits_BV, seen_BV, rows | {"step": step_B})[:2]))
  drawn, logps = steps(np.repeat(np.arange(count, dtype=np.int32)[:, None], len(SAMPLINGS), 1))
  model_BV = np.asarray(jax.nn.log_softmax(logits_BV))
  for i, sampling in enumerate(SAMPLINGS):
    wanted = probabilities(logits_BV[i], seen_BV[i], sampling)
    found = np.bincount(np.asarray(drawn)[:, i], minlength=vocab) / count
    assert set(np.flatnonzero(found)) <= set(np.flatnonzero(wanted)), sampling
    np.testing.assert_allclose(found, wanted, atol=0.035)
    np.testing.assert_allclose(np.asarray(logps)[:, i], model_BV[i, np.asarray(drawn)[:, i]], atol=1e-6)


def test_rows_with_samplings_of_their_own_draw_as_those_with_one(model):
  """`draw` and `choose` with the same keys; greedy rows with a penalty as well."""
  rng = np.random.default_rng(4)
  logits_BV = jnp.asarray(rng.normal(size=(64, 31)), jnp.float32)
  seen_BV = jnp.asarray(rng.random((64, 31)) < 0.3)
  keys = np.stack([np.full(64, 9, np.uint32), np.arange(64, dtype=np.uint32)], 1)
  keys_B = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys, impl="threefry2x32"), np.arange(64))
  row_by_row = jax.jit(draw)
  for sampling in (SAMPLINGS[0], SAMPLINGS[5], Sampling(repetition_penalty=1.5), Sampling()):
    rows = rows_of([sampling] * 64, key=keys, step=np.arange(64, dtype=np.int32), top=np.ones(64, np.int32))
    token_B, _, top_BN, _ = row_by_row(logits_BV, seen_BV, rows)
    one = jax.jit(functools.partial(choose, sampling=sampling))
    np.testing.assert_array_equal(token_B, one(logits_BV, keys_B, seen_BV=seen_BV)[0])
    assert top_BN.shape == (64, TOP)
    np.testing.assert_array_equal(top_BN, np.argsort(-np.asarray(logits_BV), 1)[:, :TOP])


def test_a_seed_is_that_of_jax(served):
  engine, _ = served
  for seed in (0, 3, 2**32 - 1, 2**40 + 5, -1):
    key = engine.open([1], seed=seed).rows["key"][0]
    if 0 <= seed < 2**32:
      np.testing.assert_array_equal(key, jax.random.key_data(jax.random.key(seed)))
    assert key.tolist() == [(seed >> 32) % 2**32, seed % 2**32]


@pytest.mark.parametrize(
  ("request_", "message"),
  [
    (Request(()), "the prompt has no token"),
    (Request((1,) * SIZE), f"a prompt of {SIZE} tokens: cache_size={SIZE} leaves room for {SIZE - 1} at most"),
    (Request((1,) * 40, 9), "max_tokens=9: 1 to 8: the prompt has 40 tokens, and cache_size=48 is for both"),
    (Request((1,), 0), "max_tokens=0: 1 to 47"),
    (Request((1, 263)), "token id 263: the vocabulary of the model has the ids 0 to 262"),
    (Request((-1,)), "token id -1"),
    (Request(("a",)), "no list of token ids"),  # type: ignore
    (Request((1,), logprobs=21), "logprobs=21: 0 to 20"),
  ],
)
def test_requests_that_cannot_be_served(batcher, request_, message):
  with pytest.raises(ValueError, match=message):
    batcher.submit(request_)


def test_engines_that_cannot_be_made(model, served):
  gpt2 = hf_models.model("gpt2")[0]
  with pytest.raises(ConfigError, match=r"cache_size=4000: the model has \d+ positions; use at most"):
    Engine(nnx.graphdef(gpt2), cache_size=4000).load_params(nnx.state(gpt2))
  with pytest.raises(ConfigError, match="slots=0: at least 1"):
    Engine(nnx.graphdef(model), slots=0)
  engine, params = served
  with pytest.raises(ValueError, match="not the params that load_params gave last"):
    engine.prefill(nnx.state(model), [1])
  with pytest.raises(ValueError, match="0 of the 1 tokens of this prompt are read"):
    engine.insert(engine.open([1]), engine.init_decode_state(), 0)
  state = engine.insert(engine.prefill(params, [1] * (SIZE - 1)), engine.init_decode_state(), 1)
  state, _ = engine.generate(params, state)
  with pytest.raises(ValueError, match="slot 1 has 48 tokens: cache_size=48 has room for no more; free it"):
    engine.generate(params, state)


class Letters:
  """A tokenizer for the test: an id is a byte; 250 cannot be decoded."""

  def __init__(self):
    self.specials = {"<|turn|>": 8}

  def decode(self, ids):
    if 250 in list(ids):
      raise RuntimeError("250 has no text")
    return bytes(int(i) % 256 for i in ids)


class Scripted:
  """Stands for an engine: every request gets its prompt again, shifted by one; `gate` holds it before each step. 251
  has the log-probability NaN."""

  slots, cache_size, vocab_size = 2, 64, 300

  def __init__(self):
    self.gate, self.steps, self.fails = threading.Semaphore(0), itertools.count(), False
    self.freed = []

  def open(self, prompt, sampling, *, seed, top):
    return dataclasses.make_dataclass("P", ["prompt", "at", "kept", "reused"])(list(prompt), 0, None, 0)

  def init_decode_state(self):
    return {}

  def read(self, params, prefix):
    self.gate.acquire()
    return self.result({0: prefix})

  def insert(self, prefix, state, slot):
    return state | {slot: prefix}

  def generate(self, params, state):
    self.gate.acquire()
    if self.fails:
      raise RuntimeError("the device is gone")
    return state, self.result(state)

  def free(self, state, slot):
    self.freed.append(slot)
    return {other: prefix for other, prefix in state.items() if other != slot}

  def result(self, state):
    found = np.zeros(2, np.int32)
    for slot, prefix in state.items():
      found[slot] = prefix.prompt[prefix.at % len(prefix.prompt)]
      prefix.at += 1
    top = {"top_ids_BN": np.zeros((2, 20), int), "top_logps_BN": np.zeros((2, 20))}
    return type("R", (), top | {"ids_B": found, "logps_B": np.where(found == 251, np.nan, 0.0)})


@pytest.fixture
def scripted():
  engine = Scripted()
  batcher = Batcher(engine, None, Letters(), stop_ids=[7], queue_limit=2)
  yield engine, batcher
  engine.gate.release(10**6)
  batcher.close()


def asked(text: bytes, count: int, **options) -> Request:
  return Request(tuple(text), count, **options)


def test_texts_end_where_they_should(scripted):
  engine, batcher = scripted
  engine.gate.release(10**6)

  def pieces(request):
    found = [*batcher.submit(request)]
    assert all(piece.finish == "" for piece in found[:-1])
    return [piece.text for piece in found], len([i for piece in found for i in piece.ids]), found[-1].finish

  assert pieces(asked("aé漢".encode(), 6)) == (["a", "", "é", "", "", "漢"], 6, "length")
  texts, count, finish = pieces(asked(b"so ENxEND more", 30, stop=("END",)))
  assert ("".join(texts), count, finish) == ("so ENx", 9, "stop")
  assert pieces(asked(b"ab\x07cd", 9))[1:] == (3, "stop")
  for ignored in (False, True):
    request = asked(b"ab\x08cd", 9, stop=("<|turn|>",), ignore_stop_ids=ignored)
    assert pieces(request)[1:] == (3, "stop"), "a special token has no text in which it could be found"
  texts, count, finish = pieces(asked(b"ab\x07cd", 5, ignore_stop_ids=True))
  assert ("".join(texts), count, finish) == ("ab\x07cd", 5, "length")
  assert pieces(asked("é".encode()[:1], 1)) == (["\ufffd"], 1, "length")
  *_, last = batcher.submit(Request((65, 251, 66), 9))
  assert (last.finish, last.text) == ("error", "") and "the weights of the model may have diverged" in last.error


def test_a_full_queue_refuses_and_cancelled_requests_free_their_slots(scripted):
  engine, batcher = scripted
  jobs = [batcher.submit(asked(b"ab", 50))]
  engine.gate.release(1)
  assert next(iter(jobs[0])).text == "a"
  jobs += [batcher.submit(asked(b"ab", 50))]
  engine.gate.release(3)  # a step of the first, the second's prompt, a step of both
  assert next(iter(jobs[1])).text == "a"
  jobs += [batcher.submit(asked(b"cd", 2)) for _ in range(2)]
  with pytest.raises(QueueFull, match=r"2 requests wait already \(queue_limit=2\)"):
    batcher.submit(asked(b"ab", 5))
  assert (batcher.counters.running, batcher.counters.waiting) == (2, 2)
  jobs[0].cancel(), jobs[2].cancel()
  engine.gate.release(10**6)
  assert [*jobs[0]][-1].finish == [*jobs[2]][-1].finish == "cancelled"
  assert "".join(piece.text for piece in jobs[3]) == "cd"
  jobs[1].cancel()
  assert [*jobs[1]][-1].finish in ("cancelled", "length")
  assert [*jobs[1]] == []
  assert sorted(engine.freed) == [0, 0, 1] or sorted(engine.freed) == [0, 1, 1]


def test_an_error_of_a_request_ends_that_one_and_an_error_of_the_thread_all(scripted):
  engine, batcher = scripted
  good, bad = batcher.submit(asked(b"abc", 40)), batcher.submit(Request((65, 66, 250), 9))
  engine.gate.release(12)
  found = [*bad]
  assert found[-1].finish == "error" and "250 has no text" in found[-1].error
  assert next(iter(good)).text == "a"
  waiting = batcher.submit(asked(b"x", 3))
  engine.fails = True
  engine.gate.release(10**6)
  for job in (good, waiting):
    last = [*job][-1]
    assert last.finish == "error" and "the device is gone" in last.error
  with pytest.raises(Closed, match="the device is gone"):
    batcher.submit(asked(b"x", 3))
  counters = batcher.counters
  assert (counters.failed, counters.running, counters.waiting) == (3, 0, 0)


def test_an_error_of_the_function_that_takes_the_pieces_ends_this_request_alone(scripted, capsys):
  engine, batcher = scripted
  taken = []

  def put(piece):
    taken.append(piece)
    raise RuntimeError("the loop is closed")

  bad, good = batcher.submit(asked(b"ab", 40), put), batcher.submit(asked(b"cd", 4))
  engine.gate.release(10**6)
  assert "".join(piece.text for piece in good) == "cdcd"
  assert bad.cancelled and len(taken) == 2 and batcher.failure == ""
  line = "maxghost: a request was ended: its function for pieces raised RuntimeError: the loop is closed\n"
  assert capsys.readouterr().err == 2 * line  # of its first piece, and of the last, which says that it is cancelled


def test_closing_lets_requests_finish_or_cancels_them(served):
  batcher = Batcher(*served, ByteTokenizer())
  jobs = [batcher.submit(Request((60 + i,), 12)) for i in range(5)]
  batcher.close(timeout=60)
  assert [[*job][-1].finish for job in jobs] == ["length"] * 5
  with pytest.raises(Closed, match="no more requests are taken"):
    batcher.submit(Request((1,)))
  batcher = Batcher(*served, ByteTokenizer())
  jobs = [batcher.submit(Request((60 + i,), 40)) for i in range(9)]
  batcher.close()
  finished = [[*job][-1].finish for job in jobs]
  assert set(finished) <= {"length", "cancelled"} and finished[-1] == "cancelled"
  assert not batcher._thread.is_alive()
