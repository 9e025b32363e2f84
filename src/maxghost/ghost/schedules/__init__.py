"""How validation and training share a step: one module for each schedule, and the passes that they share."""

from maxghost.ghost.schedules.passes import (
  TrainPass,
  by_label,
  concat_pass,
  direction_parts,
  like,
  mean_loss,
  plain_pass,
  respond,
  second_order_gradients,
  train_pass,
  unscored_pass,
  validation_gradients,
  validation_mean,
)

__all__ = [
  "TrainPass",
  "by_label",
  "concat_pass",
  "direction_parts",
  "like",
  "mean_loss",
  "plain_pass",
  "respond",
  "second_order_gradients",
  "train_pass",
  "unscored_pass",
  "validation_gradients",
  "validation_mean",
]
