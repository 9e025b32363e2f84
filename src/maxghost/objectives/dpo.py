"""Preference losses on pairs of responses: DPO and its relatives.

A pair is a segment of two adjacent rows, the chosen response in the first, the rejected one in the second. h is how
much the policy prefers the chosen response: the difference of both log-probabilities, each less that of the reference.
The loss of a batch is the mean over its pairs.

sigmoid: -(1 - e) log s(b h) - e log s(-b h), with label smoothing e (Rafailov et al., arXiv:2305.18290).
robust: the same with -e in place of e, over 1 - 2 e (Chowdhury et al., arXiv:2403.00409).
hinge: max(0, 1 - b h) (Zhao et al., arXiv:2305.10425).
ipo: (h - 1 / (2 b))^2 of means over tokens (Azar et al., arXiv:2310.12036).
simpo: sigmoid of b h - gamma, of means, without a reference (Meng et al., arXiv:2405.14734).
orpo: -mean log p(chosen) - lambda log s(log odds ratio), of means, without a reference (Hong et al., arXiv:2403.07691).

B = 2 U rows, T positions, S segments of a row; arrays [U, 2, S] have the chosen response first.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from maxghost.config import Config, plugins
from maxghost.data.build import max_segments
from maxghost.data.types import Batch
from maxghost.models import autodiff
from maxghost.models.layers import Hidden
from maxghost.objectives.next_token import LanguageModelLoss

REFERENCE = "reference_logps"  # float32 [B, S]: summed log-probabilities under the reference
_MEANS = ("ipo", "simpo", "orpo")  # losses of means over a response's tokens; the others are of sums


@dataclasses.dataclass(frozen=True, eq=False)
class PreferenceLoss(LanguageModelLoss):
  """The preference loss `algo`; the other fields are the keys of these names. num_slots: S. is_known: whether the data
  has the reference's log-probabilities.

  A token of a response has its pair's loss and its part of the pair's weight, which is 1 in all.
  """

  name = "dpo"
  schedules = ("two_pass", "reverse_scan")
  rows_per_unit = 2
  records = "pairs"
  parts = ("chosen", "rejected")
  reference = "start"
  algo: str = "sigmoid"
  beta: float = 0.1
  label_smoothing: float = 0.0
  orpo_lambda: float = 0.1
  simpo_gamma: float = 0.5
  num_slots: int = 1
  is_known: bool = False

  @classmethod
  def of(cls, cfg: Config) -> Self:
    keys = cfg.optimizer
    return dataclasses.replace(
      super().of(cfg),
      algo=keys.dpo_algo,
      beta=keys.dpo_beta,
      label_smoothing=keys.dpo_label_smoothing,
      orpo_lambda=keys.orpo_lambda,
      simpo_gamma=keys.simpo_gamma,
      num_slots=max_segments(cfg.data),
      is_known=plugins.REFERENCE_COLUMNS[0] in cfg.data.train_data_columns,
    )

  def batch_spec(self, num_rows, length):
    weights = jax.ShapeDtypeStruct((num_rows, length), np.float32)
    known = {REFERENCE: jax.ShapeDtypeStruct((num_rows, self.num_slots), np.float32)} if self.is_known else {}
    return super().batch_spec(num_rows, length) | {"targets_weights": weights} | known

  def prepare(self, batch: Batch) -> Batch:
    """Numbers the pairs, and gives every target the weight 1 where the data has no weights."""
    document_BS = batch.document_BS
    if len(document_BS) % 2 or (document_BS[::2] != document_BS[1::2]).any():
      raise ValueError("the rows of a batch of pairs are not chosen and rejected responses of the same pairs in turn")
    pair_BS = np.arange(document_BS.size // 2).reshape(-1, document_BS.shape[1]).repeat(2, 0)
    ones = {"targets_weights": np.ones(batch.arrays["targets"].shape, np.float32)}
    return dataclasses.replace(batch, arrays=ones | batch.arrays, unit_BS=np.where(document_BS >= 0, pair_BS, -1))

  @property
  def compares(self) -> bool:
    """Whether the loss reads the reference's log-probabilities."""
    return bool(self.reference) and self.algo not in plugins.WITHOUT_REFERENCE

  def from_reference(self, reference, batch):
    if not self.compares or REFERENCE in batch:
      return batch
    places = batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"]
    sums_U2S, _ = self._sums(batch, -self.cross_entropy(reference, reference.hidden(*places), batch["targets"]))
    return dict(batch) | {REFERENCE: sums_U2S.reshape(-1, self.num_slots)}

  def head(self, model, x: Hidden, batch):
    return self.measured_head(model, x, batch)[:2]

  def measured_head(self, model, x: Hidden, batch):
    """Metrics, means over the pairs: rewards/*, beta times the log-probabilities less the reference's, and logps/*."""
    logps_BT = -self.cross_entropy(model, x, batch["targets"])
    sums_U2S, counts_U2S = self._sums(batch, logps_BT)
    is_pair_US = (counts_U2S > 0).all(1)
    facts = self._known(batch, sums_U2S, counts_U2S)

    def losses(sums_U2S):
      return jnp.where(is_pair_US, self.pair_losses(*self._preferences(sums_U2S, *facts)), 0)

    loss_US = losses(sums_U2S)
    size_US = jnp.where(is_pair_US, counts_U2S.sum(1), 1)
    weights_BT = self.weights(batch) * self._spread(batch, is_pair_US / size_US)
    losses_BT = self._spread(batch, loss_US)
    if autodiff.in_forward_mode():
      # The derivative of a pair's loss, which is at all of its tokens, is here at the tokens that it comes from.
      slope_U2S = jax.grad(lambda sums: losses(sums).sum())(jax.lax.stop_gradient(sums_U2S)) * size_US[:, None]
      slope_BT = self._of_slots(batch, slope_U2S.reshape(-1, self.num_slots))
      losses_BT = jax.lax.stop_gradient(losses_BT) + slope_BT * (logps_BT - jax.lax.stop_gradient(logps_BT))
    metrics = self.metrics(x, batch) | self._rewards(is_pair_US, sums_U2S, *facts)
    return self.balanced(x, losses_BT), weights_BT.astype(losses_BT.dtype), metrics

  def pair_losses(self, chosen_US, rejected_US):
    """The loss of each pair, [U, S], from the log-probabilities of its responses less those of the reference."""
    beta, smoothing, h_US = self.beta, self.label_smoothing, chosen_US - rejected_US
    if self.algo == "ipo":
      return jnp.square(h_US - 1 / (2 * beta))
    if self.algo == "hinge":
      return jax.nn.relu(1 - beta * h_US)
    if self.algo == "orpo":
      odds_US = h_US - (_log1mexp(chosen_US) - _log1mexp(rejected_US))
      return -chosen_US - self.orpo_lambda * jax.nn.log_sigmoid(odds_US)
    z_US = beta * h_US - (self.simpo_gamma if self.algo == "simpo" else 0)
    flipped = -smoothing if self.algo == "robust" else smoothing
    loss_US = -(1 - smoothing) * jax.nn.log_sigmoid(z_US) - flipped * jax.nn.log_sigmoid(-z_US)
    return loss_US / (1 - 2 * smoothing) if self.algo == "robust" else loss_US

  def _sums(self, batch, logps_BT) -> tuple[Any, Any]:
    """(log-probabilities, weights), each summed over the tokens of a response: [U, 2, S]."""
    weights_BT, member_BTS = self.weights(batch).astype(logps_BT.dtype), self._members(batch, logps_BT.dtype)
    found = (jnp.einsum("bts,bt->bs", member_BTS, value_BT) for value_BT in (logps_BT * weights_BT, weights_BT))
    sums_U2S, counts_U2S = (value_BS.reshape(-1, 2, self.num_slots) for value_BS in found)
    return sums_U2S, counts_U2S

  def _known(self, batch, sums_U2S, counts_U2S) -> tuple[Any, Any]:
    """(what to subtract from the sums, what to divide them by), [U, 2, S]."""
    subtracted = jnp.zeros_like(sums_U2S)
    if self.compares:
      subtracted = batch[REFERENCE].reshape(sums_U2S.shape).astype(sums_U2S.dtype)
    divisor = counts_U2S if self.algo in _MEANS else jnp.ones_like(counts_U2S)
    return subtracted, jnp.where(divisor > 0, divisor, 1)

  def _preferences(self, sums_U2S, subtracted_U2S, divisor_U2S) -> tuple[Any, Any]:
    ratio_U2S = (sums_U2S - subtracted_U2S) / divisor_U2S
    return ratio_U2S[:, 0], ratio_U2S[:, 1]

  def _rewards(self, is_pair_US, sums_U2S, subtracted_U2S, divisor_U2S) -> dict:
    """The metrics, with TRL's names: log-probabilities are sums, but means for losses without a reference."""
    divisor_U2S = divisor_U2S if self.algo in plugins.WITHOUT_REFERENCE else jnp.ones_like(divisor_U2S)
    beta = self.orpo_lambda if self.algo == "orpo" else self.beta
    chosen_US, rejected_US = self._preferences(sums_U2S, subtracted_U2S, divisor_U2S)
    share_US = is_pair_US / jnp.maximum(is_pair_US.sum(), 1)

    def mean(value_US):
      return jnp.sum(jnp.where(is_pair_US, value_US, 0) * share_US).astype(sums_U2S.dtype)

    logps_U2S = sums_U2S / divisor_U2S
    return {
      "rewards/chosen": mean(beta * chosen_US),
      "rewards/rejected": mean(beta * rejected_US),
      "rewards/accuracies": mean(chosen_US > rejected_US),
      "rewards/margins": mean(beta * (chosen_US - rejected_US)),
      "logps/chosen": mean(logps_U2S[:, 0]),
      "logps/rejected": mean(logps_U2S[:, 1]),
    }

  def _members(self, batch, dtype):
    """[B, T, S]: 1 where a target is of a segment."""
    return jax.nn.one_hot(batch["targets_segmentation"] - 1, self.num_slots, dtype=dtype)

  def _of_slots(self, batch, value_BS):
    """[B, T]: the value of each target's segment."""
    return jnp.einsum("bts,bs->bt", self._members(batch, value_BS.dtype), value_BS)

  def _spread(self, batch, value_US):
    """[B, T]: the value of each target's pair."""
    return self._of_slots(batch, jnp.repeat(value_US, 2, axis=0))


@dataclasses.dataclass(frozen=True, eq=False)
class Margin(PreferenceLoss):
  """log p(rejected) - log p(chosen), summed over tokens: a contribution is a rise of the margin, in nats."""

  name = "margin"
  reference = ""

  @classmethod
  def of(cls, cfg: Config) -> Self:
    return dataclasses.replace(super().of(cfg), algo="margin", beta=1.0)

  def pair_losses(self, chosen_US, rejected_US):
    return rejected_US - chosen_US


def _log1mexp(x):
  """log(1 - exp(x)) for x <= 0, that of the next smaller number for 0."""
  return jax.nn.log1mexp(jnp.maximum(-x, jnp.finfo(x.dtype).eps))
