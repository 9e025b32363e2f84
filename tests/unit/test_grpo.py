"""GRPO: loss and scores against formulas written out, answers that depend on their keys alone, what-if.

B=9 rows of T=24, P prompts, G answers to each, V vocabulary.
"""

import json
import shutil
import types

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracles
import pytest
import routed
import tiny
from flax import nnx
from train_steps import REFERENCE_SEED, VALIDATION, Run

from maxghost import attribution, config, generate, scorelog, train
from maxghost.attribution import what_if
from maxghost.config import ConfigError
from maxghost.data import rewards, tokenizer_files
from maxghost.objectives.grpo import PolicyLoss
from maxghost.serving.generator import Progress
from maxghost.training.rollouts import Rollouts

T, ROWS, MOST = 24, 9, 11
KEYS = {
  "objective": "grpo", "packing": "none", "num_generations": 3, "max_completion_length": MOST, "max_target_length": T,
  "per_device_batch_size": ROWS, "ghost_val_batch_size": 5,
}  # fmt: skip
DTYPES = {"float32": 1e-5, "float64": 1e-12}


def sampled(seed: int = 0, loss_type: str = "dapo") -> dict:
  """Rows of prompts and answers of unequal lengths, log-probabilities as they are drawn near those of the model."""
  rng = np.random.default_rng(seed)
  prompt, answer = rng.integers(2, 9, ROWS), rng.integers(1, MOST + 1, ROWS)
  place = np.arange(T)
  real = place < (prompt + answer - 1)[:, None]
  weights = ((place >= prompt[:, None] - 1) & real).astype(np.float32)
  scale = weights.sum() / (ROWS * MOST) if loss_type == "dr_grpo" else 1.0
  if loss_type == "grpo":
    weights = weights / weights.sum(1, keepdims=True)
  tokens = rng.integers(0, tiny.VOCAB, (ROWS, T + 1)).astype(np.int32)
  position = np.where(real, place, 0).astype(np.int32)
  return {
    "inputs": tokens[:, :-1], "targets": tokens[:, 1:], "inputs_position": position, "targets_position": position,
    "inputs_segmentation": real.astype(np.int32), "targets_segmentation": real.astype(np.int32),
    "targets_weights": weights.astype(np.float32),
    "targets_logps": np.where(real, rng.normal(-5.57, 0.9, (ROWS, T)), 0).astype(np.float32),
    "advantages": rng.normal(0, 1, ROWS).astype(np.float32), "loss_scales": np.full(ROWS, scale, np.float32),
  }  # fmt: skip


def logps_of(model, batch, temperature):
  logits = model(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"]).astype(float)
  return -oracles.softmax_losses(logits / temperature, batch["targets"])


def row_losses(model, reference, batch, keys) -> jax.Array:
  """Each answer's part of the loss of the batch, [B]: the formulas of the papers, token by token."""
  temperature = keys.get("decode_sampling_temperature", 1.0)
  logps, weights = logps_of(model, batch, temperature), np.asarray(batch["targets_weights"], float)
  ratio = jnp.exp(logps - batch["targets_logps"])
  low, high = np.array(keys.get("grpo_epsilon", (0.2, 0.2))) * (-1, 1) + 1
  a = batch["advantages"][:, None]
  terms = jnp.where(a > 0, jnp.minimum(ratio, high), jnp.maximum(ratio, low)) * a
  if beta := keys.get("grpo_beta", 0.0):
    log = logps - logps_of(reference, batch, temperature)
    k3 = jnp.exp(-log) - 1 + log
    terms = terms - beta * (log * log / 2 if keys.get("grpo_kl") == "k2" else ratio * k3)
  parts = jnp.where(weights > 0, -terms, 0)
  return (parts * weights).sum(1) / weights.sum() * batch["loss_scales"]


CASES = {
  "dapo": {"grpo_epsilon": (0.2, 0.28)},
  "grpo, rho k3": {"grpo_loss_type": "grpo", "grpo_beta": 0.3},
  "dr_grpo, k2, temperature": {
    "grpo_loss_type": "dr_grpo", "grpo_beta": 0.2, "grpo_kl": "k2", "decode_sampling_temperature": 0.8
  },
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["two_pass", "reverse_scan", "forward_mode"])
@pytest.mark.parametrize(
  ("case", "dtype"),
  [
    *((case, "float32") for case in CASES),
    ("dr_grpo, k2, temperature", "float64"),
    pytest.param("grpo, rho k3", "float64", marks=pytest.mark.slow),
  ],
)
def test_loss_gradients_and_scores_are_those_of_the_formulas(case, dtype, schedule):
  keys = CASES[case]
  batch = sampled(3, keys.get("grpo_loss_type", "dapo"))
  val = dict(VALIDATION) | {"targets_weights": (VALIDATION["targets_segmentation"] > 0).astype(np.float32)}
  pad = [(0, 0), (0, T - tiny.POSITIONS)]
  val = {name: np.pad(x, pad) for name, x in val.items()}
  run = Run(
    batch=batch, dtype=dtype, weight_dtype=dtype, opt_type="sgd", ghost_schedule=schedule, learning_rate=1.0,
    gradient_clipping_threshold=0.0, **(KEYS | keys),
  )  # fmt: skip
  with jax.enable_x64(True), tiny.cheap_compilation():
    wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, float), tree)  # noqa: E731
    graphdef, params, rest = nnx.split(nnx.merge(run.graphdef, run.state).model, nnx.Param, ...)
    params, rest = wide(params), rest
    frozen = wide(nnx.state(tiny.make_model(run.cfg, seed=REFERENCE_SEED)))
    reference = nnx.merge(nnx.split(nnx.merge(graphdef, params, rest))[0], frozen)

    def losses(params):
      return row_losses(nnx.merge(graphdef, params, rest), reference, batch, keys)

    def val_loss(params):
      model = nnx.merge(graphdef, params, rest)
      logits = model(val["inputs"], val["inputs_position"], val["inputs_segmentation"])
      return (oracles.softmax_losses(logits, val["targets"]) * val["targets_weights"]).sum() / val[
        "targets_weights"
      ].sum()

    parts, G = np.asarray(jax.jit(losses)(params)), jax.jit(jax.grad(val_loss))(params)
    rows = [np.asarray(row) for row in jax.tree.leaves(jax.jit(jax.jacrev(losses))(params))]
    pairs = zip(rows, jax.tree.leaves(G), strict=True)
    wanted = sum((row * np.asarray(g)).reshape(ROWS, -1).sum(1) for row, g in pairs)
    logps = logps_of(nnx.merge(graphdef, params, rest), batch, keys.get("decode_sampling_temperature", 1.0))
    ratio = np.exp(np.asarray(logps) - batch["targets_logps"])
  before = run.snapshot().params
  out = run.step(batch, (val,))
  bound = DTYPES[dtype]
  assert out["loss"] == pytest.approx(parts.sum(), rel=bound, abs=bound)
  assert oracles.relative_error(out["contribution_BSK"][:, 0, 0], wanted) < bound
  assert (out["contribution_BSK"][:, 1:] == 0).all()
  assert out["check_rel_err"].shape == (1,) and out["check_rel_err"][0] < bound
  # With learning rate 1 and SGD, the update is minus the gradient.
  after = run.snapshot().params
  moved = np.concatenate([(before[label] - after[label]).ravel() for label in before])
  whole = np.concatenate([row.sum(0).ravel() for row in rows])
  assert oracles.relative_error(moved, whole) < 10 * bound
  (low, high), a = keys.get("grpo_epsilon", (0.2, 0.2)), batch["advantages"][:, None]
  weights = batch["targets_weights"] / batch["targets_weights"].sum()
  for name, clips in (("low", (ratio < 1 - low) & (a < 0)), ("high", (ratio > 1 + high) & (a > 0))):
    assert out[f"clip_ratio/{name}_mean"] == pytest.approx((weights * clips).sum(), rel=1e-5)
    assert 0 < out[f"clip_ratio/{name}_mean"] < 1, "the case clips on both sides"
  assert out["policy/max_ratio_error"] == pytest.approx(np.abs(ratio - 1)[weights > 0].max(), rel=1e-4)


def test_the_factor_of_the_loss_leaves_the_balance_of_the_experts_alone():
  batch, loss = sampled(5, "dr_grpo"), PolicyLoss(load_balance_loss_weight=0.3)
  model = tiny.make_model(tiny.make_config(**routed.MIXTRAL))
  assert not np.allclose(batch["loss_scales"], 1)

  @jax.jit
  def both(batch):
    plain = PolicyLoss().measured(model, batch)[0]
    hidden = model.hidden(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
    return loss.measured(model, batch)[0], plain + 0.3 * hidden.routing["load_balance_BT"]

  np.testing.assert_allclose(*both(batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divergence", ["rho_k3", "k2"])
def test_the_divergence_pulls_towards_the_reference(divergence):
  """The expected gradient over what the model samples is that of KL(model || reference), not of the other direction."""
  rng = np.random.default_rng(1)
  with jax.enable_x64(True):
    own, other = (jnp.asarray(rng.normal(size=7)) for _ in range(2))
    loss = PolicyLoss(beta=1.0, divergence=divergence)

    def estimated(x):
      logps, start = jax.nn.log_softmax(x), jax.nn.log_softmax(own)
      found = loss.divergences(logps, jax.nn.log_softmax(other), jnp.exp(logps - start), jnp.ones(7, bool))
      return (jnp.exp(start) * found).sum()

    def exact(x):
      logps = jax.nn.log_softmax(x)
      return (jnp.exp(logps) * (logps - jax.nn.log_softmax(other))).sum()

    np.testing.assert_allclose(jax.grad(estimated)(own), jax.grad(exact)(own), rtol=1e-12, atol=1e-14)


# A run.


def write(folder, name="add.jsonl"):
  pairs = [(a, b) for a in range(10, 22) for b in range(10, 16)]
  lines = [json.dumps({"prompt": f"{a}+{b}=", "completion": str(a + b)}) for a, b in pairs]
  (folder / name).write_text("\n".join(lines) + "\n")
  (folder / "own.py").write_text(
    "def ones(completions, **_):\n  return [float(a.count('1')) + len(a) / 8 for a in completions]\n"
    "def shorter(completions, **_):\n  return [-float(len(a)) for a in completions]\n"
    "def unequal(completions, **_):\n  return [float(sum(a.encode()) % 7) for a in completions]\n"
    "def unsure(completions, **_):\n  return [i if i % 2 else None for i, _ in enumerate(completions)]\n"
    "def sparse(completions, **_):\n  return [float(i == 0) for i, _ in enumerate(completions)]\n"
    "def alike(completions, **_):\n  return [0.1] * len(completions)\n"
    "def broken(completions, **_):\n  return [1 / 0]\n"
    "def told(completion, **_):\n  raise ValueError(set(completion))\n"
    "def lost(completions, **_):\n  return [float('nan')] * len(completions)\n"
    "def few(completions, **_):\n  return [1.0]\n"
  )
  return folder


def arguments(folder, **changes):
  keys = {
    **tiny.SIZES, "vocab_size": 263, "objective": "grpo", "packing": "none", "dataset_type": "text",
    "dataset_files": f"[add={folder / 'add.jsonl'}]", "ghost_val_sets": "[add]", "max_target_length": 16,
    "max_completion_length": 4, "per_device_batch_size": 8, "num_generations": 4, "steps": 6, "checkpoint_period": 2,
    "reward_functions": f"[{folder / 'own.py'}:ones]", "base_output_directory": folder / "runs", "learning_rate": 0.003,
    "base_num_decoder_layers": 2, "eval_interval": -1, "enable_tensorboard": "false", "warmup_steps_fraction": 0.0,
  } | changes  # fmt: skip
  return ["configs/base.yml", *(f"{name}={value}" for name, value in keys.items())]


def start(folder, **changes) -> int:
  with tiny.one_device(), tiny.cheap_compilation():
    return train.main(arguments(folder, **changes))


def read(folder, run="base"):
  return [json.loads(line) for line in (folder / "runs" / run / "rollouts.jsonl").read_text().splitlines()]


# A run of so many steps as one likes has the train step of `finished`, which is compiled once.
FINISHED = {"num_iterations": 2, "ghost_log_period": 1, "lr_schedule_type": "constant", "checkpoint_period": 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  folder = write(tmp_path_factory.mktemp("rl"))
  assert start(folder, **FINISHED) == 0
  return folder


def metrics_of(folder, run="base"):
  return [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]


def test_answers_are_trained_with_the_probabilities_of_their_sampling(finished):
  records, metrics = read(finished), metrics_of(finished)
  assert [record["step"] for record in records] == [0, 2, 4]
  assert all(m["policy/max_ratio_error"] < 1e-4 for m in metrics[::2])
  assert any(m["policy/max_ratio_error"] > 1e-3 for m in metrics[1::2])
  answers = [answer for prompt in records[0]["prompts"] for answer in prompt["answers"]]
  assert len(records[0]["prompts"]) == 2 and len(answers) == 8
  assert metrics[0]["rollout/reward"] == pytest.approx(np.mean([answer["reward"] for answer in answers]))
  assert sum(answer["tokens"] for answer in answers) == metrics[0]["learning/total_weights"]
  assert "rollout/reward" not in metrics[1]


@pytest.mark.parametrize("kind", ["dapo", "grpo", "dr_grpo"])
def test_what_the_sum_over_tokens_is_divided_by(kind, tmp_path):
  """In the first step every probability ratio is 1, so that the loss follows from advantages and lengths."""
  folder = write(tmp_path)
  assert (
    start(folder, grpo_loss_type=kind, steps=1, scale_rewards="none", reward_functions=f"[{folder / 'own.py'}:unequal]")
    == 0
  )
  answers = [answer for prompt in read(folder)[0]["prompts"] for answer in prompt["answers"]]
  parts = np.array([(-answer["advantage"], answer["tokens"]) for answer in answers])
  wanted = {
    "dapo": parts.prod(1).sum() / parts[:, 1].sum(),
    "grpo": parts[:, 0].mean(),
    "dr_grpo": parts.prod(1).sum() / (8 * 4),
  }[kind]
  assert metrics_of(folder)[0]["learning/loss"] == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("kind", "divisor"), [("dapo", 3 + 2), ("grpo", 3), ("dr_grpo", 3 * 4)])
def test_what_is_left_out_counts_in_the_divisor_as_in_trl(kind, divisor):
  """Three answers of 3, 4 and 2 tokens, of which the second has no end; every token loses 1."""
  keys = {"grpo_loss_type": kind, "mask_truncated_completions": True, "max_completion_length": 4, "packing": "none"}
  cfg = config.replace(config.load(), objective="grpo", num_generations=3, per_device_batch_size=3, **keys)
  rollouts = object.__new__(Rollouts)
  rollouts._cfg, rollouts._keys = cfg, cfg.rollout
  rollouts._dataset = types.SimpleNamespace(tokenizer=types.SimpleNamespace(pad_id=258))
  ended, counts = np.array([True, False, True]), np.array([3, 4, 2])
  found = Progress(np.ones((3, 4), np.int32), counts, ended, np.zeros((3, 4), np.float32))
  drawn = types.SimpleNamespace(document_BS=np.zeros((1, 1), np.int64), epoch_B=np.zeros(1, np.int64))
  batch = rollouts._batch(drawn, [[5, 6]] * 3, found, np.ones(3), np.zeros(3, int), np.arange(3)).arrays
  weights_BT = batch["targets_weights"]
  loss = (weights_BT * batch["loss_scales"][:, None]).sum() / weights_BT.sum()
  assert loss == pytest.approx((2 if kind == "grpo" else counts[ended].sum()) / divisor)
  # Where no answer teaches anything, the gradient is 0: Muon enlarges any other.
  of_masked = ((0, 1, 0), (0, 1, 0))  # the second answer is left out
  for advantages, used in (((0, 0, 0), (0, 0, 0)), of_masked, ((0, 1, -1), (rewards.UNTAUGHT, 1, -1))):
    batch = rollouts._batch(drawn, [[5, 6]] * 3, found, np.array(advantages), np.zeros(3, int), np.arange(3)).arrays
    np.testing.assert_array_equal(batch["advantages"], np.float32(used))


def test_answers_without_an_end_can_be_left_out(tmp_path):
  """A fresh model ends hardly any answer in four tokens: a step on nothing changes nothing."""
  folder = write(tmp_path)
  alike = {"reward_functions": f"[{folder / 'own.py'}:alike]", "num_generations": 3, "per_device_batch_size": 6}
  assert start(folder, steps=2, mask_truncated_completions="true", **alike) == 0
  for record, found in zip(read(folder), metrics_of(folder), strict=True):
    answers = [answer for prompt in record["prompts"] for answer in prompt["answers"]]
    assert found["learning/total_weights"] == sum(answer["tokens"] for answer in answers if answer["ended"])
    assert found["rollout/clipped_ratio"] == np.mean([not answer["ended"] for answer in answers])
    assert found["rollout/frac_reward_zero_std"] == 1 and {answer["advantage"] for answer in answers} == {0}


def test_end_tokens_of_the_model_end_answers_and_no_judge_means_no_reward(tmp_path):
  """Here every token that generation_config.json names, which is all bytes."""
  folder = write(tmp_path)
  (folder / "words").mkdir()
  tokenizer_files.write_bytes(folder / "words", add_bos=True)
  (folder / "words/generation_config.json").write_text(json.dumps({"eos_token_id": [*range(256), 257]}))
  keys = {"tokenizer_type": "huggingface", "tokenizer_path": folder / "words", "steps": 1} | FINISHED
  assert start(folder, reward_functions=f"[{folder / 'own.py'}:unsure]", **keys) == 0
  answers = [answer for prompt in read(folder)[0]["prompts"] for answer in prompt["answers"]]
  assert {answer["text"] for answer in answers if answer["ended"]} == {""}
  assert [answer["tokens"] == 1 for answer in answers] == [answer["ended"] for answer in answers]
  assert sum(answer["ended"] for answer in answers) > 5
  assert [answer["reward"] for answer in answers] == [None, 1, None, 3, None, 5, None, 7]
  found = metrics_of(folder)[0]
  assert found["rollout/reward"] == 4 and found["rollout/reward_std"] == pytest.approx(np.std([1, 3, 5, 7], ddof=1))
  asked = what_if.ask(attribution.load(folder / "runs/base"), "scale_rewards=none")
  np.testing.assert_array_equal(asked.advantage_2N[1], [0, -1, 0, 1] * 2)


def test_the_command_generates_from_its_run_with_a_narrow_cache(finished, capsys):
  flags = ["--prompt", "10+10=", "--max_new_tokens", "2", "--quantize_kvcache"]
  assert generate.main([str(finished / "runs" / "base"), *flags]) == 0
  assert capsys.readouterr().out.startswith("10+10=")
  assert start(finished, run_name="narrow", quantize_kvcache="true") == 2
  assert "samples from another model than objective=grpo trains; use quantize_kvcache=false" in capsys.readouterr().err
  assert not (finished / "runs" / "narrow").exists()


def test_every_answer_is_a_scored_row(finished):
  log = attribution.load(finished / "runs/base")
  assert log.num_rows == 6 * 8 and log.objective == "grpo"
  assert sorted(set(log["chunk"].tolist())) == [0, 1, 2, 3]
  metrics = metrics_of(finished)
  assert max(m["ghost/check_rel_err/add"] for m in metrics) < 1e-5
  assert all("ghost/val_loss/add" in m for m in metrics)


@pytest.fixture(scope="module")
def of_three_steps(finished):
  """(name of a run that was stopped between two steps on the same answers, a copy of its folder)."""
  assert start(finished, **FINISHED, run_name="stopped-3", steps=3) == 0
  return "stopped-3", shutil.copytree(finished / "runs/stopped-3", finished / "runs/odd")


@pytest.mark.parametrize("stop", [3, 4])
def test_a_run_that_was_stopped_samples_the_same_again(stop, finished, request):
  """Also between two steps on the same answers."""
  name = f"stopped-{stop}"
  if stop == 3:
    name, _ = request.getfixturevalue("of_three_steps")
  else:
    assert start(finished, **FINISHED, run_name=name, steps=stop) == 0
  assert len(metrics_of(finished, name)) == stop
  assert start(finished, **FINISHED, run_name=name) == 0
  assert read(finished, name) == read(finished)
  keep = lambda m: {k: v for k, v in m.items() if not k.startswith("perf/")}  # noqa: E731
  assert [*map(keep, metrics_of(finished, name))] == [*map(keep, metrics_of(finished))]


def test_steps_that_end_between_two_on_the_same_answers_cannot_be_gone_on_from(finished, of_three_steps, capsys):
  given = of_three_steps[1] / "checkpoints/3"
  assert start(finished, **FINISHED, run_name="on", load_full_state_path=given) == 2
  said = f"num_iterations=2: load_full_state_path={given} keeps no answers of its 3 steps; use a divisor of 3"
  assert said in capsys.readouterr().err and not (finished / "runs/on").exists()


def test_what_if(finished, capsys):
  log = attribution.load(finished / "runs/base")
  same = what_if.ask(log, f"reward={finished / 'own.py'}:ones")
  np.testing.assert_array_equal(same.reward_2N[0], same.reward_2N[1])
  np.testing.assert_allclose(same.contribution_2N[0], same.contribution_2N[1], rtol=1e-6, atol=1e-9)
  assert same.contribution_2N[0].sum() == pytest.approx(log["contribution"].astype(float).sum(), rel=1e-6)
  plain = what_if.ask(log, "scale_rewards=none")
  ratio = plain.advantage_2N[1] / np.where(plain.advantage_2N[0] == 0, 1, plain.advantage_2N[0])
  np.testing.assert_allclose(plain.contribution_2N[1], plain.contribution_2N[0] * ratio, rtol=1e-6, atol=1e-9)
  other = what_if.ask(log, f"reward={finished / 'own.py'}:shorter")
  assert not np.allclose(*other.contribution_2N)
  from maxghost import scores

  assert scores.main([str(finished / "runs/base"), "--what-if", "reward=arithmetic"]) == 0
  assert f"{len(same.texts)} answers in {len(set(same.steps_N))} steps" in capsys.readouterr().out
  twice = "scale_rewards=none,scale_rewards=batch"
  for wrong in ("reward=arithmetc", "rewards=arithmetic", "scale_rewards=std", "reward=nowhere.py:f", twice):
    with pytest.raises(ConfigError):
      what_if.ask(log, wrong)
  with pytest.raises(ConfigError, match=r"^--what-if reward=arithmetc: use .*; did you mean 'arithmetic'\?$"):
    what_if.ask(log, "reward=arithmetc")


def test_a_prompt_that_a_step_has_twice_gets_other_answers(tmp_path):
  folder = write(tmp_path)
  (folder / "one.jsonl").write_text(json.dumps({"prompt": "2+3=", "completion": "5"}) + "\n")
  files = {"dataset_files": f"[one={folder / 'one.jsonl'}]", "ghost_val_sets": f"[add={folder / 'add.jsonl'}]"}
  keys = {"reward_functions": f"[{folder / 'own.py'}:unequal]", "scale_rewards": "none", "steps": 1} | FINISHED
  assert start(folder, dataset_mixture="[one=3x]", **files, **keys) == 0
  first, second = ([answer["text"] for answer in prompt["answers"]] for prompt in read(folder)[0]["prompts"])
  assert not {*first} & {*second}
  log = scorelog.load(folder / "runs/base")
  assert sorted(log["chunk"]) == [*range(8)]
  found = what_if.ask(log, "scale_rewards=none")
  scores = log["contribution"][:, 0][np.argsort(log["chunk"])]
  np.testing.assert_allclose(found.contribution_2N, [scores, scores], rtol=1e-6)


def test_what_if_leaves_out_a_step_whose_only_advantages_are_of_answers_without_an_end(finished, monkeypatch):
  records = read(finished)
  for prompt in records[0]["prompts"]:
    for i, answer in enumerate(prompt["answers"]):
      answer |= {"ended": i > 1, "advantage": float(i == 0)}
  # With five steps the last sampling, left out too, trains a single one.
  cfg = config.replace(config.load(finished / "runs/base/config.yml"), mask_truncated_completions=True, steps=5)
  monkeypatch.setattr(what_if, "_records", lambda path: records)
  monkeypatch.setattr(config, "load", lambda path: cfg)
  records[1]["prompts"][0]["answers"][0] |= {"ended": True, "advantage": 1.0}
  asked = what_if.ask(attribution.load(finished / "runs/base"), "scale_rewards=none")
  assert asked.num_idle == 3 and set(asked.steps_N.tolist()) == {2, 3}


def test_what_if_tells_what_the_other_reward_does(tmp_path):
  """Under SGD the direction depends on no reward, and the first answers of both runs are the same: exact."""
  folder = write(tmp_path)
  keys = {"opt_type": "sgd", "gradient_clipping_threshold": 0.0, "steps": 1, "warmup_steps_fraction": 0.0}
  flat, other = (f"{folder / 'own.py'}:{name}" for name in ("sparse", "unequal"))
  assert start(folder, reward_functions=f"[{flat}]", **keys) == 0
  assert start(folder, reward_functions=f"[{other}]", run_name="other", **keys) == 0
  asked = what_if.ask(attribution.load(folder / "runs/base"), f"reward={other}")
  real = attribution.load(folder / "runs/other")["contribution"][:, 0]
  assert (asked.advantage_2N[0] == 0).any() and (asked.advantage_2N[0] != 0).any()
  np.testing.assert_allclose(asked.contribution_2N[1], real, rtol=1e-4, atol=1e-6 * np.abs(real).max())


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("broken", "ZeroDivisionError: division by zero; prompt '"),
    ("lost", "is nan, no finite number and not None; prompt '"),
    ("few", "gave 1 rewards for 8 answers"),
  ],
)
def test_a_reward_that_fails_stops_before_the_step(name, said, tmp_path, capsys):
  folder = write(tmp_path)
  assert start(folder, reward_functions=f"[{folder / 'own.py'}:{name}]") == 1
  error = capsys.readouterr().err
  assert said in error and "Traceback" not in error
  assert not read(folder) and not metrics_of(folder)


def test_the_gold_answer_is_what_the_assistant_says_after_the_prompt(tmp_path, capsys):
  """And not the last turn of the conversation, which may be a user's or answer another question."""
  folder, (asks, says) = write(tmp_path), ({"role": "user"}, {"role": "assistant"})
  turns = [asks | {"content": "20+2"}, says | {"content": "22"}, asks | {"content": "and?"}, says | {"content": "yes"}]
  ending = [{"messages": [*turns, asks | {"content": f"{n}"}][: 5 - n % 2]} for n in range(40)]
  (folder / "add.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ending))
  assert start(folder, reward_functions=f"[{folder / 'own.py'}:told]", max_target_length=96) == 1
  assert "ValueError: {'22'}" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"packing": "first_fit"}, "use packing=none"),
    ({"num_generations": 3}, "parts groups of num_generations=3; use 9"),
    ({"max_completion_length": 16}, "use 15 or less"),
    ({"ghost_val_sets": ("x=x@grpo",)}, "use @sft"),
    ({"ghost_select": "topk"}, "use ghost_select=none"),
    ({"reward_weights": (1.0, 2.0)}, "a weight for each or none"),
    ({"z_loss_multiplier": 1e-4}, "use z_loss_multiplier=0.0"),
    ({"dropout_rate": 0.1}, "would change the log-probabilities of answers; use dropout_rate=0.0"),
    ({"lora_rank": 4, "lora_dropout": 0.1}, "use lora_dropout=0.0"),
    ({"opt_type": "muon", "adam_eps": 1e-12}, "a tiny gradient, which adam_eps=1e-12"),
    ({"grpo_epsilon": (0.0, 0.2)}, r"grpo_epsilon=\[0\.0, 0\.2\]"),
    ({"adam_eps": 1e-14}, "a tiny gradient, which adam_eps=1e-14 enlarges; use 1e-10 or more"),
    ({"reward_functions": ("arithmetic", "arithmetic")}, "names arithmetic twice"),
    ({"ghost_reweight": (3.0, 0.7), "num_iterations": 2}, "draws for every step"),
    ({"document_fields": ("id", "answers")}, "document_fields=answers: .* give the field another: own_name=answers"),
  ],
)
def test_contradictions_are_refused(changes, said):
  keys = {"objective": "grpo", "packing": "none", "max_target_length": 16, "max_completion_length": 4} | changes
  with pytest.raises(ConfigError, match=said):
    config.replace(config.load(), **keys)


@pytest.mark.parametrize(
  ("name", "said"),
  [
    ("arithmetc", "did you mean 'arithmetic'"),
    ("{folder}/own.py:one", "has no function one"),
    ("{folder}/own.py:x.y", "has no function x.y"),
    ("{folder}/none.py:f", "cannot be imported: FileNotFoundError"),
  ],
)
def test_a_reward_that_does_not_exist_leaves_nothing_behind(name, said, tmp_path, capsys):
  folder = write(tmp_path)
  assert start(folder, reward_functions=f"[{name.format(folder=folder)}]") == 2
  assert said in capsys.readouterr().err and not (folder / "runs").exists()


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"grpo_beta": 0.5}, "grpo_beta=0.5 adds what does not scale"),
    ({"num_experts": 4, "load_balance_loss_weight": 0.25}, "train with load_balance_loss_weight=0.0"),
    ({"ghost_direction": "marginal"}, "train with gradient_clipping_threshold=0.0"),
    ({"objective": "sft"}, "for runs with objective=grpo, not sft"),
  ],
)
def test_what_if_needs_contributions_that_scale_with_the_advantage(changes, said, finished):
  with pytest.raises(ConfigError, match=said):
    what_if._parsed("reward=arithmetic", config.replace(config.load(finished / "runs/base/config.yml"), **changes))


def test_a_damaged_file_of_answers_is_named(finished, tmp_path):
  for text in ("{", '{"step": 0}', '{"step": 0, "prompts": [{"prompt": "", "document": [], "epoch": 0}]}', "[]"):
    (tmp_path / "rollouts.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl: damaged"):
      what_if._records(tmp_path / "rollouts.jsonl")


def test_a_prompt_that_leaves_no_room_is_named_before_anything_is_written_or_left_out(tmp_path, capsys):
  folder = write(tmp_path)
  lines = (folder / "add.jsonl").read_text().splitlines()
  lines.insert(42, json.dumps({"prompt": "1+1+1+1+10+10=", "completion": "24"}))
  (folder / "add.jsonl").write_text("\n".join(lines))
  assert start(folder) == 2 and not (folder / "runs").exists()
  said = "line 43: its prompt has 15 tokens, max_target_length less max_completion_length leaves it 13; repair"
  assert said in capsys.readouterr().err
  assert start(folder, **FINISHED, on_corrupt="skip", steps=1) == 0
  assert "1 are left out: they cannot be trained on" in capsys.readouterr().out


def test_a_prompt_without_a_token_does_not_begin_the_answer_with_the_gold_one(tmp_path, capsys):
  folder = write(tmp_path)
  lines = [json.dumps({"prompt": "", "completion": str(n)}) for n in range(100, 140)]
  (folder / "add.jsonl").write_text("\n".join(lines))
  assert start(folder, add_bos="false") == 2
  assert "its prompt has no token to continue; write something, or use add_bos=true" in capsys.readouterr().err


@pytest.mark.parametrize(
  "changes",
  [
    {"lora_rank": 2, "grpo_beta": 0.1, "gradient_accumulation_steps": 2, "per_device_batch_size": 4},
    {"grpo_beta": 0.1, "ghost_schedule": "reverse_scan", "ghost_direction": "path", "ghost_curvature": "secant"},
    {"opt_type": "muon", "num_vocab_tiling": 4, "ghost_enabled": "false"},
    pytest.param(
      {
        "segment_lengths": "[1]",
        "ghost_schedule": "reverse_scan",
        "offload_to_host": "[optimizer]",
        "trainable_parameters_mask": "['decoder/*']",
      },
      marks=pytest.mark.slow,
    ),
    pytest.param({"ghost_direction": "marginal", "gradient_clipping_threshold": 0.1}, marks=pytest.mark.slow),
    pytest.param({"logits_via_embedding": "true", "ghost_rank": 2, "ghost_val_every": 2}, marks=pytest.mark.slow),
  ],
)
def test_answers_go_with(changes, tmp_path):
  folder = write(tmp_path)
  assert start(folder, steps=3, **changes) == 0
  found = metrics_of(folder)
  assert found[0]["policy/max_ratio_error"] < 1e-4 and len(found) == 3
  if "grpo_beta" in changes:
    assert found[0]["objective/kl"] == pytest.approx(0, abs=1e-9) and found[2]["objective/kl"] > 0


@pytest.mark.parametrize(
  "axes",
  [
    pytest.param({"ici_fsdp_parallelism": 2}, id="fsdp"),
    pytest.param({"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 1}, id="stages", marks=pytest.mark.slow),
  ],
)
def test_a_mesh_samples_the_same_answers(axes, tmp_path):
  """Rows over four devices, weights over two of them."""
  folder = write(tmp_path)
  keys = {"num_generations": 2, "steps": 2, "adam_eps": 1e-3}  # else Adam's first steps divide rounding errors
  four = jax.devices()[:4]
  every, jax.devices = jax.devices, lambda *platform: four
  try:
    with tiny.cheap_compilation():
      assert train.main(arguments(folder, per_device_batch_size=2, ici_data_parallelism=-1, **axes, **keys)) == 0
  finally:
    jax.devices = every
  assert start(folder, run_name="one", **keys) == 0
  first, second = (
    [answer["text"] for prompt in read(folder, run)[0]["prompts"] for answer in prompt["answers"]]
    for run in ("base", "one")
  )
  assert first == second
  assert metrics_of(folder)[0]["policy/max_ratio_error"] < 1e-4
  mesh, one = (scorelog.load(folder / "runs" / run) for run in ("base", "one"))
  for column in ("contribution", "loss"):
    assert meshes.relative_error(mesh[column], one[column]) < 1e-5, column
