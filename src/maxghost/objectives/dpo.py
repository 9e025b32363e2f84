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
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from maxghost.config import Config, plugins
from maxghost.data.packing import REFERENCE
from maxghost.data.types import Batch
from maxghost.models import autodiff
from maxghost.models.layers import Hidden
from maxghost.objectives.cross_entropy import log1mexp
from maxghost.objectives.next_token import LanguageModelLoss


@dataclasses.dataclass(frozen=True, eq=False)
class PreferenceLoss(LanguageModelLoss):
  """The preference loss `algo`; the other fields are the keys of these names. num_slots: S. is_known: whether the data
  has the reference's log-probabilities.

  A token of a response has its pair's loss and its part of the pair's weight, which is 1 in all.
  """

  parts = ("chosen", "rejected")
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
      super().of(cfg), algo=keys.dpo_algo, beta=keys.dpo_beta, label_smoothing=keys.dpo_label_smoothing,
      orpo_lambda=keys.orpo_lambda, simpo_gamma=keys.simpo_gamma, num_slots=cfg.data.max_segments,
      is_known=cfg.data.has_reference,
    )  # fmt: skip

  def batch_spec(self, num_rows, length):
    more = {"targets_weights": length} | ({REFERENCE: self.num_slots} if self.is_known else {})
    shapes = {name: jax.ShapeDtypeStruct((num_rows, size), np.float32) for name, size in more.items()}
    return super().batch_spec(num_rows, length) | shapes

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
    hidden = reference.hidden(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
    logps_BT = -self.cross_entropy(reference, hidden, batch["targets"])
    return dict(batch) | {REFERENCE: self._spread("bt->bs", batch, logps_BT * self.weights(batch))}

  def measured_head(self, model, x: Hidden, batch):
    """Metrics, means over the pairs, with TRL's names: log-probabilities are sums, but means without a reference."""
    logps_BT = -self.cross_entropy(model, x, batch["targets"])
    weights_BT = self.weights(batch).astype(logps_BT.dtype)
    by_response = lambda v: self._spread("bt->bs", batch, v).reshape(-1, 2, self.num_slots)  # noqa: E731
    sums_U2S, counts_U2S = by_response(logps_BT * weights_BT), by_response(weights_BT)
    known_U2S = batch[REFERENCE].reshape(sums_U2S.shape).astype(sums_U2S.dtype) if self.compares else 0
    is_pair_US, tokens_U2S = (counts_U2S > 0).all(1), jnp.where(counts_U2S > 0, counts_U2S, 1)
    of_pair_US = jnp.where(is_pair_US, tokens_U2S.sum(1), 1)

    def losses(sums_U2S):
      ratio_U2S = sums_U2S - known_U2S
      ratio_U2S = ratio_U2S / tokens_U2S if self.algo in ("ipo", "simpo", "orpo") else ratio_U2S
      return jnp.where(is_pair_US, self.pair_losses(ratio_U2S[:, 0], ratio_U2S[:, 1]), 0)

    weights_BT = weights_BT * self._spread("bs->bt", batch, jnp.repeat(is_pair_US / of_pair_US, 2, axis=0))
    losses_BT = self._spread("bs->bt", batch, jnp.repeat(losses(sums_U2S), 2, axis=0))
    if autodiff.in_forward_mode():
      # The derivative of a pair's loss, which is at all of its tokens, is here at the tokens that it comes from.
      slope_U2S = jax.grad(lambda sums: losses(sums).sum())(jax.lax.stop_gradient(sums_U2S)) * of_pair_US[:, None]
      slope_BT = self._spread("bs->bt", batch, slope_U2S.reshape(-1, self.num_slots))
      losses_BT = jax.lax.stop_gradient(losses_BT) + slope_BT * (logps_BT - jax.lax.stop_gradient(logps_BT))
    scale = self.beta if self.algo != "orpo" else self.orpo_lambda
    logps_U2S = sums_U2S / tokens_U2S if self.algo in plugins.WITHOUT_REFERENCE else sums_U2S
    reward_U2S, share_US = scale * (logps_U2S - known_U2S), is_pair_US / jnp.maximum(is_pair_US.sum(), 1)
    margin_US = reward_U2S[:, 0] - reward_U2S[:, 1]
    found = {"rewards/margins": margin_US, "rewards/accuracies": margin_US > 0}
    for place, part in enumerate(self.parts):
      found |= {f"rewards/{part}": reward_U2S[:, place], f"logps/{part}": logps_U2S[:, place]}
    mean = lambda v: jnp.sum(jnp.where(is_pair_US, v, 0) * share_US).astype(logps_BT.dtype)  # noqa: E731
    metrics = self.metrics(x, dict(batch) | {"targets_weights": weights_BT})  # those of the loss, as its balance has
    metrics |= {name: mean(value_US) for name, value_US in found.items()}
    return self.balanced(x, losses_BT), weights_BT.astype(losses_BT.dtype), metrics

  def pair_losses(self, chosen_US, rejected_US):
    """The loss of each pair, [U, S], from the log-probabilities of its responses less those of the reference."""
    beta, smoothing, h_US = self.beta, self.label_smoothing, chosen_US - rejected_US
    if self.algo == "margin":
      return -h_US
    if self.algo == "ipo":
      return jnp.square(h_US - 1 / (2 * beta))
    if self.algo == "hinge":
      return jax.nn.relu(1 - beta * h_US)
    if self.algo == "orpo":
      odds_US = h_US - (log1mexp(chosen_US) - log1mexp(rejected_US))
      return -chosen_US - self.orpo_lambda * jax.nn.log_sigmoid(odds_US)
    z_US = beta * h_US - (self.simpo_gamma if self.algo == "simpo" else 0)
    flipped = -smoothing if self.algo == "robust" else smoothing
    loss_US = -(1 - smoothing) * jax.nn.log_sigmoid(z_US) - flipped * jax.nn.log_sigmoid(-z_US)
    return loss_US / (1 - 2 * smoothing) if self.algo == "robust" else loss_US

  def _spread(self, axes: str, batch, value):
    """axes "bt->bs": sums over the targets of each segment; "bs->bt": the value of each target's segment."""
    members_BTS = jax.nn.one_hot(batch["targets_segmentation"] - 1, self.num_slots, dtype=value.dtype)
    return jnp.einsum(f"bts,{axes}", members_BTS, value, precision="highest")


@dataclasses.dataclass(frozen=True, eq=False)
class Margin(PreferenceLoss):
  """log p(rejected) - log p(chosen), summed over tokens: a contribution is a rise of the margin, in nats."""

  @classmethod
  def of(cls, cfg: Config) -> Self:
    return dataclasses.replace(super().of(cfg), algo="margin", beta=1.0)
