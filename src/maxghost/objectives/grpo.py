"""Group relative policy optimization (GRPO) and its relatives: the loss of answers that the model itself has sampled.

A row is a prompt and one answer, with the advantage A of the answer over its group. rho is the probability ratio of a
token under the model and under the one that sampled it, d the log ratio of the model and a frozen reference:

    -min(rho A, clip(rho, 1 - e_low, 1 + e_high) A) + beta KL

rho_k3: KL = rho (exp(-d) + d - 1). k2: KL = d^2 / 2. Where model and sampler agree, both have the gradient of
KL(model || reference); k1 = d would have 0, and k3 alone that of KL(reference || model) (arXiv:2510.01555).

Sources: GRPO, Shao et al., arXiv:2402.03300; Dr. GRPO, Liu et al., arXiv:2503.20783; DAPO, Yu et al., arXiv:2503.14476.

B rows, T positions.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from maxghost.config import Config
from maxghost.models.layers import Hidden
from maxghost.objectives.cross_entropy import token_losses
from maxghost.objectives.next_token import LanguageModelLoss

SAMPLED, OF_REFERENCE, ADVANTAGES, SCALES = "targets_logps", "reference_logps", "advantages", "loss_scales"


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyLoss(LanguageModelLoss):
  """The loss above; the fields are the keys of these names, temperature is that of the sampling.

  The batch has, besides tokens and `targets_weights`, the log-probabilities with which the tokens were sampled
  (`targets_logps`, [B, T]), the `advantages` [B] and `loss_scales` [B], a factor of the loss that is the same in all
  rows (`training.rollouts` makes them). With grpo_beta it also gets `reference_logps` [B, T].
  """

  maxima = (*LanguageModelLoss.maxima, "policy/max_ratio_error")
  epsilon_low: float = 0.2
  epsilon_high: float = 0.2
  beta: float = 0.0
  divergence: str = "rho_k3"
  temperature: float = 1.0

  @classmethod
  def of(cls, cfg: Config) -> Self:
    keys = cfg.rollout
    return dataclasses.replace(
      super().of(cfg), epsilon_low=keys.grpo_epsilon[0], epsilon_high=keys.grpo_epsilon[1], beta=keys.grpo_beta,
      divergence=keys.grpo_kl, temperature=keys.decode_sampling_temperature,
    )  # fmt: skip

  def batch_spec(self, num_rows, length):
    tokens, rows = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((num_rows, length), (num_rows,)))
    more = {"targets_weights": tokens, SAMPLED: tokens, ADVANTAGES: rows, SCALES: rows}
    return super().batch_spec(num_rows, length) | more

  def from_reference(self, reference, batch):
    if not self.beta:
      return batch
    hidden = reference.hidden(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
    return dict(batch) | {OF_REFERENCE: self.log_probabilities(reference, hidden, batch["targets"])}

  def log_probabilities(self, model, x: Hidden, targets_BT):
    """Of each target at the temperature of the sampling, [B, T]."""
    if self.temperature == 1:
      return -self.cross_entropy(model, x, targets_BT)
    return -token_losses(model.logits(x) / self.temperature, targets_BT)

  def measured_head(self, model, x: Hidden, batch):
    """Metrics, means over the weighted tokens: objective/kl, and what was clipped; how far rho is from 1 at most."""
    logps_BT = self.log_probabilities(model, x, batch["targets"])
    weights_BT = self.weights(batch).astype(logps_BT.dtype)
    counts_BT = weights_BT > 0
    advantage_B1 = batch[ADVANTAGES].astype(logps_BT.dtype)[:, None]
    # Where nothing counts, nothing is computed: a ratio there could overflow.
    ratio_BT = jnp.exp(jnp.where(counts_BT, logps_BT - batch[SAMPLED].astype(logps_BT.dtype), 0))
    clipped_BT = jnp.clip(ratio_BT, 1 - self.epsilon_low, 1 + self.epsilon_high)
    losses_BT = -jnp.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
    found = {
      "clip_ratio/low_mean": (ratio_BT < 1 - self.epsilon_low) & (advantage_B1 < 0),
      "clip_ratio/high_mean": (ratio_BT > 1 + self.epsilon_high) & (advantage_B1 > 0),
    }
    if self.beta:
      divergence_BT = self.divergences(logps_BT, batch[OF_REFERENCE].astype(logps_BT.dtype), ratio_BT, counts_BT)
      losses_BT += self.beta * divergence_BT
      found["objective/kl"] = divergence_BT
    share_BT = self.shares(batch, weights_BT)
    metrics = {name: jnp.sum(value * share_BT).astype(losses_BT.dtype) for name, value in found.items()}
    metrics["policy/max_ratio_error"] = jnp.max(jnp.where(counts_BT, jnp.abs(ratio_BT - 1), 0))
    losses_BT = self.balanced(x, losses_BT * batch[SCALES].astype(losses_BT.dtype)[:, None])
    return losses_BT, weights_BT, self.metrics(x, batch) | metrics

  def divergences(self, logps_BT, reference_BT, ratio_BT, counts_BT):
    """The estimate of KL(model || reference) at each token that counts."""
    log_BT = jnp.where(counts_BT, logps_BT - reference_BT, 0)
    return jnp.square(log_BT) / 2 if self.divergence == "k2" else ratio_BT * (jnp.exp(-log_BT) + log_BT - 1)
