"""Distillation: the student's next-token distribution is drawn to that of a frozen teacher.

alpha T^2 KL_T + (1 - alpha) cross-entropy per token, with KL at temperature T (Hinton et al., arXiv:1503.02531). Of the
teacher's k largest logits alone, both sides have one bucket for the rest of the vocabulary: the KL is then a lower
bound of the whole one, and equal to it for k = V.

B batch, T positions, V vocabulary, k entries of the teacher.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from maxghost.config import Config
from maxghost.data.teacher_logits import IDS, LOG_SUM, LOGITS, open_logits
from maxghost.data.types import Batch
from maxghost.models.layers import Hidden
from maxghost.objectives.cross_entropy import log1mexp, token_losses
from maxghost.objectives.next_token import LanguageModelLoss


@dataclasses.dataclass(frozen=True, eq=False)
class Distillation(LanguageModelLoss):
  """kl: "forward", KL(teacher || student), or "reverse". top_k: 0 = the whole vocabulary.

  folder: of `TeacherLogits`, which then stand for the teacher; top_k is a number, and dtype that of the logits.
  """

  alpha: float = 0.5
  temperature: float = 1.0
  kl: str = "forward"
  top_k: int = 0
  folder: str = ""
  dtype: Any = np.float32

  @classmethod
  def of(cls, cfg: Config) -> Self:
    keys, folder = cfg.optimizer, cfg.data.offline_data_dir
    return dataclasses.replace(
      super().of(cfg), alpha=keys.distill_alpha, temperature=keys.distill_temperature, kl=keys.distill_kl,
      top_k=keys.distill_top_k or (cfg.model.vocab_size if folder else 0), folder=folder,
      dtype=jnp.promote_types(cfg.model.dtype, jnp.float32),
    )  # fmt: skip

  def batch_spec(self, num_rows, length):
    spec = super().batch_spec(num_rows, length)
    if not self.folder:
      return spec
    entries = num_rows, length, self.top_k
    shapes = {LOGITS: (entries, self.dtype), IDS: (entries, np.int32), LOG_SUM: (entries[:2], self.dtype)}
    return spec | {name: jax.ShapeDtypeStruct(*facts) for name, facts in shapes.items()}

  def prepare(self, batch: Batch) -> Batch:
    """Adds the teacher's logits of `folder`, if there is one. Raises ConfigError where they are not there."""
    known = open_logits(self.folder).arrays(batch, self.top_k, self.dtype) if self.folder else {}
    return dataclasses.replace(batch, arrays=batch.arrays | known)

  def from_reference(self, reference, batch):
    if LOGITS in batch:
      return batch
    hidden = reference.hidden(batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
    logits_BTV = reference.logits(hidden) / self.temperature
    if not self.top_k:
      return dict(batch) | {LOGITS: logits_BTV}
    logits_BTk, ids_BTk = jax.lax.top_k(logits_BTV, self.top_k)
    return dict(batch) | {LOGITS: logits_BTk, IDS: ids_BTk, LOG_SUM: jax.nn.logsumexp(logits_BTV, -1)}

  def measured_head(self, model, x: Hidden, batch):
    """Metrics: distill/kl at the temperature, without its square, and distill/cross_entropy."""
    logits_BTV = model.logits(x)
    kl_BT = self.divergence(logits_BTV, batch)
    entropy_BT = token_losses(logits_BTV, batch["targets"])
    parts = {"distill/kl": kl_BT, "distill/cross_entropy": entropy_BT}
    losses_BT = self.balanced(x, self.alpha * self.temperature**2 * kl_BT + (1 - self.alpha) * entropy_BT)
    if self.z_loss_multiplier:  # whole, whatever the share of the teacher
      losses_BT += self.z_loss_multiplier * jnp.square(jax.nn.logsumexp(logits_BTV, -1))
    weights_BT = self.weights(batch).astype(losses_BT.dtype)
    share_BT = self.shares(batch, weights_BT)
    found = {name: jnp.sum(value_BT * share_BT) for name, value_BT in parts.items()}
    return losses_BT, weights_BT, self.metrics(x, batch) | found

  def divergence(self, logits_BTV, batch):
    """The KL of each token at the temperature, [B, T] in nats."""
    student = jax.nn.log_softmax(logits_BTV / self.temperature)
    teacher = batch[LOGITS].astype(student.dtype)
    if IDS not in batch:
      teacher = jax.nn.log_softmax(teacher)
    else:
      teacher = teacher - batch[LOG_SUM].astype(student.dtype)[..., None]
      whole, student = student, jnp.take_along_axis(student, batch[IDS], -1)
      if teacher.shape[-1] < logits_BTV.shape[-1]:  # with the log-probability of all entries that are not there
        others = jnp.put_along_axis(whole, batch[IDS], -jnp.inf, -1, inplace=False)
        student = jnp.concatenate([student, jax.nn.logsumexp(others, -1, keepdims=True)], -1)
        teacher = jnp.concatenate([teacher, log1mexp(jax.nn.logsumexp(teacher, -1, keepdims=True))], -1)
    first, second = (teacher, student) if self.kl == "forward" else (student, teacher)
    return jnp.sum(jnp.exp(first) * (first - second), -1)
