"""GRPO's loss, gradients and advantages beside TRL's, on the same tiny model in float32 (extra `hf`, and trl).

B answers, T positions, G answers to a prompt.
"""

import types

import hf_models
import jax
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx

from maxghost import config, objectives
from maxghost.data import rewards

pytestmark = pytest.mark.hf
PROMPTS, LENGTHS, MOST = (5, 5, 2, 2), (5, 9, 6, 3), 11


@pytest.fixture(scope="module")
def libraries():
  trl = pytest.importorskip("trl", reason="trl is not installed")
  torch = pytest.importorskip("torch")
  return types.SimpleNamespace(trl=trl, torch=torch, transformers=pytest.importorskip("transformers"))


def trainer_of(libraries, tmp_path, judge, **keys):
  """TRL's trainer of the fixture."""
  transformers, torch = libraries.transformers, libraries.torch
  model = transformers.AutoModelForCausalLM.from_pretrained(hf_models.FOLDER / "llama3", dtype=torch.float32)
  tokenizers = pytest.importorskip("tokenizers")
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
  words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2")
  data = pytest.importorskip("datasets").Dataset.from_list([{"prompt": "3 4"}, {"prompt": "5 6"}])
  args = libraries.trl.GRPOConfig(
    output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, per_device_train_batch_size=4,
    max_completion_length=MOST, gradient_checkpointing=False, steps_per_generation=1, **{"num_generations": 2} | keys,
  )  # fmt: skip
  return libraries.trl.GRPOTrainer(model, judge, args=args, train_dataset=data, processing_class=tokenizer)


def sides(rng, vocab: int) -> dict:
  """Prompts padded at the left, answers padded at the right, as TRL has them."""
  out = {name: np.zeros((4, max(PROMPTS)), np.int64) for name in ("prompt_ids", "prompt_mask")}
  out |= {name: np.zeros((4, max(LENGTHS)), np.int64) for name in ("completion_ids", "completion_mask")}
  for row, (prompt, answer) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
    out["prompt_ids"][row, -prompt:], out["prompt_mask"][row, -prompt:] = rng.integers(1, vocab, prompt), 1
    out["completion_ids"][row, :answer], out["completion_mask"][row, :answer] = rng.integers(1, vocab, answer), 1
  return out


def batch_of(given: dict, arrays: dict, kind: str) -> dict:
  """The same answers as rows that begin at the left. arrays: of the tokens of the answers, [B, N]."""
  length = max(p + a for p, a in zip(PROMPTS, LENGTHS, strict=True)) - 1
  names = ("inputs", "targets", "segments", "targets_weights", *arrays)
  rows: dict = {name: np.zeros((4, length), np.float32 if name not in names[:3] else np.int32) for name in names}
  for row, (prompt, answer) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
    ids, stop = [*given["prompt_ids"][row, -prompt:], *given["completion_ids"][row, :answer]], prompt + answer - 1
    rows["inputs"][row, :stop], rows["targets"][row, :stop], rows["segments"][row, :stop] = ids[:-1], ids[1:], 1
    rows["targets_weights"][row, prompt - 1 : stop] = 1 / answer if kind == "grpo" else 1
    for name, value in arrays.items():
      rows[name][row, prompt - 1 : stop] = value[row, :answer]
  place = np.broadcast_to(np.arange(length, dtype=np.int32), rows["inputs"].shape)
  rows |= {
    f"{side}_{name}": value
    for side in ("inputs", "targets")
    for name, value in (("position", place), ("segmentation", rows["segments"]))
  }
  scale = sum(LENGTHS) / (4 * MOST) if kind == "dr_grpo" else 1
  return rows | {"loss_scales": np.full(4, scale, np.float32)}


@pytest.mark.parametrize(
  ("kind", "beta", "temperature"), [("dapo", 0.0, 1.0), ("grpo", 0.3, 1.0), ("dr_grpo", 0.2, 0.8)]
)
def test_loss_and_gradients_are_those_of_trl(libraries, tmp_path, kind, beta, temperature):
  torch, rng = libraries.torch, np.random.default_rng(4)
  judge = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
  keys = {"loss_type": kind, "beta": beta, "epsilon": 0.2, "epsilon_high": 0.28, "temperature": temperature}
  trainer = trainer_of(libraries, tmp_path, judge, use_bias_correction_kl=True, **keys)
  cfg, *_ = hf_models.load("llama3")
  given = sides(rng, cfg.model.vocab_size)
  shape = given["completion_ids"].shape
  center = -np.log(cfg.model.vocab_size)
  logps = {name: rng.normal(center, 0.7, shape).astype(np.float32) for name in ("targets_logps", "reference_logps")}
  advantages = np.array([1.2, -0.7, 0.4, -1.5], np.float32)
  inputs = given | {
    "advantages": advantages, "old_per_token_logps": logps["targets_logps"],
    "ref_per_token_logps": logps["reference_logps"], "num_items_in_batch": np.array(sum(LENGTHS)),
  }  # fmt: skip
  trainer.model.train()
  trainer.current_gradient_accumulation_steps = 1
  loss = trainer._compute_loss(trainer.model, {name: torch.tensor(x) for name, x in inputs.items()})
  loss.backward()
  cfg = config.replace(
    cfg, objective="grpo", grpo_loss_type=kind, grpo_beta=beta, grpo_epsilon=(0.2, 0.28), packing="none",
    decode_sampling_temperature=temperature, num_generations=2, per_device_batch_size=4, max_completion_length=MOST,
    max_target_length=2 * MOST,
  )  # fmt: skip
  model, ours = hf_models.model("llama3")[0], objectives.create(cfg)
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  batch = batch_of(given, logps, kind) | {"advantages": advantages}

  @jax.jit
  @jax.value_and_grad
  def run(params):
    losses, weights = ours(nnx.merge(graphdef, params, rest), batch)
    return (losses * weights).sum() / weights.sum()

  value, grads = run(params)
  assert float(value) == pytest.approx(loss.item(), rel=1e-5)
  theirs = {name: p.grad.numpy() for name, p in trainer.model.named_parameters()}
  for label, wanted in hf_models.stacked("llama3", cfg.model, theirs).items():
    assert oracles.relative_error(tiny.by_label(grads)[label], wanted) < 1e-5, label


@pytest.mark.parametrize("unsure", [False, True])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_trl(libraries, tmp_path, scale, unsure):
  rng, given = np.random.default_rng(2), []

  def judge(completions, **_):
    given.append([1.5, None, -0.25, 0.5, None, None, None, 2.0] if unsure else rng.normal(size=8).tolist())
    return given[-1]

  trainer = trainer_of(libraries, tmp_path, judge, scale_rewards=scale, num_generations=4)
  found = trainer._generate_and_score_completions([{"prompt": text} for text in ("3 4",) * 4 + ("5 6",) * 4])
  ours = rewards.advantages(np.array(given[-1], np.float32), 4, scale)
  np.testing.assert_allclose(found["advantages"].numpy(), ours, rtol=1e-5)
