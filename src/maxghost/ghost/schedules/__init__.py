"""How validation and training share a step: one module for each schedule, and the passes that they share."""

from maxghost.ghost.schedules.passes import (
  TrainPass,
  adam_scalars,
  by_label,
  concat_pass,
  direction_parts,
  mean_loss,
  plain_pass,
  second_order_gradients,
  train_pass,
  unscored_pass,
  validation_gradients,
  validation_mean,
)

__all__ = [
  "TrainPass",
  "adam_scalars",
  "by_label",
  "concat_pass",
  "direction_parts",
  "mean_loss",
  "plain_pass",
  "second_order_gradients",
  "train_pass",
  "unscored_pass",
  "validation_gradients",
  "validation_mean",
]
