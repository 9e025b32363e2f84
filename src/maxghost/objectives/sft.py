"""Supervised fine-tuning: next-token prediction of the completions of conversations."""

import jax
import numpy as np

from maxghost.objectives.next_token import LanguageModelLoss


class FineTuning(LanguageModelLoss):
  """Cross-entropy of the tokens that the data gives a weight; the data gives prompts none."""

  def batch_spec(self, num_rows, length):
    shape = jax.ShapeDtypeStruct((num_rows, length), np.float32)
    return super().batch_spec(num_rows, length) | {"targets_weights": shape}
