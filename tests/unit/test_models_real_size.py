"""Published sizes on CPU: GPT-2 small is made and trained for one step, every document scored."""

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from maxghost import config
from maxghost.training import state, step
from maxghost.training.devices import compiler_options

SETTINGS = (
  "model_name=gpt2-small", "tokenizer_type=huggingface", "max_target_length=32", "per_device_batch_size=2",
  "ghost_val_batch_size=1", "learning_rate=1e-3", "warmup_steps_fraction=0", "ghost_detail=total",
)  # fmt: skip


@pytest.mark.slow
def test_gpt2_small_takes_a_scored_step():
  cfg = config.load(*SETTINGS)
  graphdef, start = state.create_split(cfg)
  params = nnx.to_flat_state(nnx.state(nnx.merge(graphdef, start).model, nnx.Param))
  assert sum(v.size for _, v in params) == 124_439_808
  batch = tiny.make_batch(((20, 12), (32,)), seed=1, num_positions=32)
  validation = tiny.make_batch(((32,),), seed=2, num_positions=32)
  function, _ = step.make_train_step(cfg, graphdef, start, batch, num_segments=2)
  run = jax.jit(function, donate_argnums=0, compiler_options=compiler_options())
  losses = []
  for _ in range(2):
    start, out = run(start, batch, (validation,))
    out = jax.tree.map(np.asarray, out)
    assert out["scored_ok"] and out["check_rel_err"].max() < 1e-4
    assert (out["tokens_BS"] > 0).sum() == 3 and np.abs(out["score_dot_BSK"][out["tokens_BS"] > 0]).min() > 0
    losses.append(float(out["loss"]))
  assert abs(losses[0] - np.log(50257)) < 0.7  # nothing is known yet
  assert losses[1] < losses[0]
