"""What is exported, in the hands of transformers itself: it loads without a complaint and gives the same logits and
texts. Needs the `hf` extra and torch."""

import hf_models
import numpy as np
import pytest

from maxghost import load_model
from maxghost.interop import hf_checkpoint
from maxghost.serving import Generator

pytestmark = pytest.mark.hf

PROMPTS = [[3, 14, 15, 9, 2, 6], [5, 3]]


def silent(line):
  pass


@pytest.mark.parametrize("name", hf_models.NAMES)
def test_exports_load_and_give_the_recorded_logits_and_our_texts(name, tmp_path):
  torch = pytest.importorskip("torch")
  pytest.importorskip("transformers")
  hf_checkpoint.import_model(hf_models.FOLDER / name, tmp_path / "in", say=silent)
  hf_checkpoint.export_model(tmp_path / "in", tmp_path / "out", shard_bytes=20_000, say=silent)
  model, said = hf_models.in_transformers(tmp_path / "out", output_loading_info=True)
  assert not any(said.values()), said
  parity = np.load(hf_models.FOLDER / name / "logits.npz")
  with torch.no_grad():
    logits = model.eval()(torch.from_numpy(parity["tokens"]).long(), use_cache=False).logits.numpy()
  np.testing.assert_allclose(logits, parity["logits"], rtol=0, atol=2e-5)
  graphdef, state = load_model.load(*load_model.find(tmp_path / "out"), silent)
  ours = Generator(graphdef, 24).generate(state, PROMPTS, 12)
  for i, prompt in enumerate(PROMPTS):
    theirs = model.generate(
      torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=12,
      min_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert theirs[0, len(prompt) :].tolist() == ours.row(i).tolist()
