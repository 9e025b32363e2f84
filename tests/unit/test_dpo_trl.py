"""Preference losses, rewards and gradients beside TRL's, on the same tiny model in float32 (extra `hf`, and trl).

P pairs, T positions, V vocabulary.
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

pytestmark = pytest.mark.hf
LENGTHS = ((7, 3), (5, 9), (11, 6))  # of chosen and rejected response of each pair
PROMPTS = (4, 2, 6)
BETA = 0.7


@pytest.fixture(scope="module")
def libraries():
  trl = pytest.importorskip("trl", reason="trl is not installed")
  torch = pytest.importorskip("torch")
  return types.SimpleNamespace(trl=trl, torch=torch, transformers=pytest.importorskip("transformers"))


def rows(vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(ids, attention mask, completion mask), [2 P, T]: all chosen rows, then all rejected ones."""
  rng, width = np.random.default_rng(5), max(p + max(pair) for p, pair in zip(PROMPTS, LENGTHS, strict=True))
  ids, real, own = (np.zeros((2 * len(LENGTHS), width), np.int64) for _ in range(3))
  for number, (prompt, pair) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
    shared = rng.integers(1, vocab, prompt)
    for side, length in enumerate(pair):
      row = number + side * len(LENGTHS)
      ids[row, : prompt + length] = [*shared, *rng.integers(1, vocab, length)]
      real[row, : prompt + length], own[row, prompt : prompt + length] = 1, 1
  return ids, real, own


def batch_of(ids, real, own) -> dict:
  """The same rows as pairs of adjacent rows."""
  order = np.arange(len(ids)).reshape(2, -1).T.ravel()
  ids, real, own = (x[order].astype(np.int32) for x in (ids, real, own))
  places = np.broadcast_to(np.arange(ids.shape[1] - 1, dtype=np.int32), (len(ids), ids.shape[1] - 1))
  arrays = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "targets_weights": own[:, 1:].astype(np.float32)}
  arrays |= {f"{kind}_position": places for kind in ("inputs", "targets")}
  return arrays | {f"{kind}_segmentation": real[:, 1:] for kind in ("inputs", "targets")}


def trainer_of(libraries, tmp_path, algo: str, smoothing: float):
  """TRL's trainer of the fixture, with another model as its reference."""
  transformers, torch = libraries.transformers, libraries.torch
  load = lambda: transformers.AutoModelForCausalLM.from_pretrained(hf_models.FOLDER / "llama3", dtype=torch.float32)  # noqa: E731
  model, reference = load(), load()
  with torch.no_grad():
    for p in reference.parameters():
      p.mul_(1.4)
  tokenizers = pytest.importorskip("tokenizers")
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(20)}, unk_token="0"))
  words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2")
  datasets = pytest.importorskip("datasets")
  data = datasets.Dataset.from_list([{"prompt": "3 4", "chosen": " 5 6", "rejected": " 7"}] * 2)
  args = libraries.trl.DPOConfig(
    output_dir=str(tmp_path), beta=BETA, loss_type=[algo], label_smoothing=smoothing, report_to=[], use_cpu=True,
    bf16=False, per_device_train_batch_size=2, gradient_checkpointing=False,
  )  # fmt: skip
  return libraries.trl.DPOTrainer(model, reference, args=args, train_dataset=data, processing_class=tokenizer)


@pytest.mark.parametrize(("algo", "smoothing"), [("sigmoid", 0.0), ("ipo", 0.0), ("hinge", 0.0), ("robust", 0.2)])
def test_losses_rewards_and_gradients_are_those_of_trl(libraries, tmp_path, algo, smoothing):
  torch = libraries.torch
  trainer = trainer_of(libraries, tmp_path, algo, smoothing)
  cfg, values, *_ = hf_models.load("llama3")
  ids, real, own = rows(cfg.model.vocab_size)
  inputs = {"input_ids": ids, "attention_mask": real, "completion_mask": own}
  trainer.model.train()
  loss = trainer._compute_loss(trainer.model, {name: torch.tensor(x) for name, x in inputs.items()}, False)
  loss.backward()
  cfg = config.replace(
    cfg, objective="dpo", dpo_algo=algo, dpo_beta=BETA, dpo_label_smoothing=smoothing, max_segments_per_seq=1,
    per_device_batch_size=2 * len(LENGTHS), max_target_length=ids.shape[1] - 1,
  )  # fmt: skip
  model = hf_models.model("llama3")[0]
  frozen = {k: np.float32(1.4) * v for k, v in values.items()}
  reference = tiny.with_values(nnx.eval_shape(lambda: model), frozen)
  ours = objectives.create(cfg)
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)
  batch = jax.jit(ours.from_reference)(reference, batch_of(ids, real, own))

  @jax.jit
  def run(params):
    def mean(params):
      losses, weights, metrics = ours.measured(nnx.merge(graphdef, params, rest), batch)
      return (losses * weights).sum() / weights.sum(), metrics

    return jax.value_and_grad(mean, has_aux=True)(params)

  (value, metrics), grads = run(params)
  assert float(value) == pytest.approx(loss.item(), rel=1e-5)
  size = abs(float(metrics["logps/chosen"]))  # of the sums whose differences rewards are
  for name, found in trainer._metrics["train"].items():
    if name in metrics:
      assert float(metrics[name]) == pytest.approx(found[-1], rel=1e-5, abs=5e-7 * size), name
  assert {"rewards/margins", "logps/chosen"} <= set(metrics) & set(trainer._metrics["train"])
  theirs = {name: p.grad.numpy() for name, p in trainer.model.named_parameters()}
  for label, wanted in hf_models.stacked("llama3", cfg.model, theirs).items():
    assert oracles.relative_error(tiny.by_label(grads)[label], wanted) < 1e-5, label


@pytest.mark.parametrize(("algo", "smoothing"), [("simpo", 0.0), ("simpo", 0.2), ("orpo", 0.0)])
def test_losses_without_a_reference_are_those_of_trl(libraries, algo, smoothing):
  """The loss of each pair and its derivative by both mean log-probabilities; ORPO's cross-entropy is taken off."""
  torch, rng = libraries.torch, np.random.default_rng(3)
  chosen, rejected = (-rng.gamma(2.0, 0.6, 5).astype(np.float32) - np.float32(0.01) for _ in range(2))
  logps = [torch.tensor(x, requires_grad=True) for x in (chosen, rejected)]
  device = types.SimpleNamespace(device="cpu")
  if algo == "simpo":
    from trl.experimental.cpo import CPOTrainer as Trainer
  else:
    from trl.experimental.orpo import ORPOTrainer as Trainer
  theirs = types.SimpleNamespace(
    beta=BETA, accelerator=device, loss_type="simpo", simpo_gamma=0.4, label_smoothing=smoothing, alpha=0.0
  )
  found = (Trainer.cpo_loss if algo == "simpo" else Trainer.odds_ratio_loss)(theirs, *logps)
  losses = found[0] if algo == "simpo" else -found[0]
  losses.sum().backward()
  keys = {"dpo_beta": BETA, "orpo_lambda": BETA, "simpo_gamma": 0.4, "dpo_label_smoothing": smoothing}
  ours = objectives.create(tiny.make_config(objective="dpo", dpo_algo=algo, per_device_batch_size=2, **keys))

  def loss(chosen, rejected):
    return ours.pair_losses(chosen, rejected) + (chosen if algo == "orpo" else 0)

  np.testing.assert_allclose(loss(chosen, rejected), losses.detach().numpy(), rtol=1e-5)
  grads = jax.grad(lambda *x: loss(*x).sum(), (0, 1))(chosen, rejected)
  for own, other in zip(grads, logps, strict=True):
    np.testing.assert_allclose(own, other.grad.numpy(), rtol=2e-5)
