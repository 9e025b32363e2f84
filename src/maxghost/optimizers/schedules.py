"""The learning rate of each step."""

import optax

from maxghost.config.schema import OptimizerConfig


def learning_rate_schedule(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
  """Learning rate of step 0..steps-1, with MaxText's values. Warm-up rises linearly from exactly 0.

  cosine: decays to learning_rate_final_fraction at the last step. wsd: constant, then decays linearly to the same value
  over the last wsd_decay_steps_fraction of the steps (Hu et al., arXiv:2404.06395). constant: no decay.
  """
  peak, final = cfg.learning_rate, cfg.learning_rate * cfg.learning_rate_final_fraction
  warmup = int(steps * cfg.warmup_steps_fraction)
  rest = max(steps - warmup, 1)
  if cfg.lr_schedule_type == "cosine":
    after = optax.cosine_decay_schedule(peak, max(rest - 1, 1), cfg.learning_rate_final_fraction)
  elif cfg.lr_schedule_type == "wsd":
    decay = max(int(steps * cfg.wsd_decay_steps_fraction), 1)
    after = optax.join_schedules(
      [optax.constant_schedule(peak), optax.linear_schedule(peak, final, max(decay - 1, 1))], [rest - decay]
    )
  else:
    after = optax.constant_schedule(peak)
  if warmup == 0:
    return after
  return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])
