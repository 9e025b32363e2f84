"""Output projection and cross-entropy in tiles: both passes hold only one tile of the logits at a time.

The backward pass recomputes each tile's logits and uses the saved log-sum-exp. If the cotangent of the losses is given
beforehand, the forward pass computes the gradients, of table and hidden states, as well.

B batch, T positions, D features, V vocabulary; n tiles of c positions or of v vocabulary entries.
Source of the online log-sum-exp: Milakov and Gimelshein, arXiv:1805.02867.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxghost.models import autodiff, dense, rounding
from maxghost.objectives.cross_entropy import d_logits_of, label_of, loss_of
from maxghost.parallel import shardings


@dataclasses.dataclass(frozen=True)
class Head:
  """A tiled projection. num_tiles: n. axis: 'tokens' (tiles of ceil(T / n) positions of every row) or 'vocab'.

  tied: the table is [V, D], else [D, V]. dtype: of the products, as in the untiled layer; losses, log-sum-exp and the
  sums over tiles are float32 or wider. soft_cap: a logit y becomes soft_cap * tanh(y / soft_cap). An objective sets
  num_tiles, axis and z_loss; `OutputHead.losses` adds the rest, which is the projection's.
  """

  num_tiles: int
  axis: str = "tokens"
  tied: bool = False
  dtype: Any = None
  precision: Any = None
  z_loss: float = 0.0
  soft_cap: float | None = None

  def __call__(self, x_BTD, w, targets_BT, expected_BT=None):
    """`tiled_losses`; expected_BT is used on CPU only, where arithmetic costs more than holding a table's gradient."""
    # Not with a soft cap: XLA may compute its tanh once more in another loop, where it rounds otherwise.
    known = shardings.platform() == "cpu" and self.soft_cap is None
    return tiled_losses(self, x_BTD, w, targets_BT, expected_BT if known else None)

  @property
  def wide(self):
    return jnp.promote_types(self.dtype, jnp.float32)

  def logits(self, x, w):
    """[..., D] and a table (or a block of its vocabulary) -> float32 or wider [..., V]."""
    product = dense.contract_transposed if self.tied else dense.contract
    logits = product(x, w, 1, self.precision).astype(self.wide)
    return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

  def cotangent(self, logits, targets, log_sum, g):
    """Cotangent of the projection's output, in `dtype`; see `d_logits_of`."""
    delta = d_logits_of(logits, targets, log_sum, g, self.z_loss)
    if self.soft_cap is not None:  # padding has ratios far outside [-1, 1], and a delta of 0
      delta = delta * (1 - jnp.square(jnp.clip(logits / self.soft_cap, -1, 1)))
    return delta.astype(self.dtype)

  def d_inputs(self, delta, w, out_dtype=None):
    product = dense.contract if self.tied else dense.contract_transposed
    return product(delta, w, 1, rounding.back(self.precision), out_dtype or self.dtype)

  def d_table(self, x, delta):
    """The table's gradient from some tokens or some of the vocabulary, float32 or wider."""
    x, delta = rounding.operands(self.precision, x, delta)
    left, right = (delta, x) if self.tied else (x, delta)
    return dense.outer_sum(left, right, 1, 1, rounding.plain(self.precision), self.wide)

  def split_vocab(self, table, axis: int):
    """[..., V, ...] -> [n, ..., v, ...], padded with zeros.

    Entry i of block j is entry i n + j of the vocabulary, so that all blocks of a sharded vocabulary are sharded alike.
    """
    table = _padded(table, axis, self.num_tiles)
    shape = (*table.shape[:axis], table.shape[axis] // self.num_tiles, self.num_tiles, *table.shape[axis + 1 :])
    return jnp.moveaxis(table.reshape(shape), axis + 1, 0)

  @property
  def vocab_axis(self) -> int:
    return 0 if self.tied else 1


def _padded(x, axis: int, multiple: int):
  """x with zeros at the end of an axis, to a multiple of a length."""
  padding = -x.shape[axis] % multiple
  return jnp.pad(x, [(0, padding if i == axis else 0) for i in range(x.ndim)]) if padding else x


def _joined(tiles_n, place: int, axis: int, length: int):
  """[n, ...] with the tiles' axis moved to `place` and merged with its neighbour at `axis`, without padding."""
  x = jnp.moveaxis(tiles_n, 0, place)
  return lax.slice_in_dim(x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :]), 0, length, axis=axis)


def tiled_losses(head: Head, x_BTD, w, targets_BT, expected_BT=None):
  """Cross-entropy of each position in nats plus z_loss * logsumexp**2, [B, T], float32 or wider.

  Equal to `token_losses` of the whole logits. x_BTD: input of the projection (after the final norm). expected_BT: the
  losses' cotangent, if it is known. With tiles of tokens, the backward pass then needs no logits, but the table's
  gradient is held since the forward pass. If the actual cotangent differs by a bit, gradients are computed anew:
  without a soft cap they are the same with and without expected_BT, bit for bit.
  """
  if autodiff.in_forward_mode():
    return forward(head, x_BTD, w, targets_BT)[0]
  return _losses(head, x_BTD, w, targets_BT, expected_BT if head.axis == "tokens" else None)


def _losses_fwd(head, x_BTD, w, targets_BT, expected_BT):
  if expected_BT is None:
    losses_BT, log_sum_BT = forward(head, x_BTD, w, targets_BT)
    return losses_BT, (x_BTD, w, targets_BT, log_sum_BT, None, None)
  expected_BT = jnp.asarray(expected_BT)
  x, table = x_BTD.astype(head.dtype), w.astype(head.dtype)
  found = _by_tokens(head, x, table, targets_BT, g_BT=expected_BT.astype(head.wide))
  losses_BT = loss_of(found["log_sum"], found["label"], head.z_loss)
  known = found["x"].astype(x_BTD.dtype), found["w"].astype(w.dtype)
  return losses_BT, (x_BTD, w, targets_BT, found["log_sum"], expected_BT, known)


def _losses_bwd(head, residuals, g_BT):
  x_BTD, w, targets_BT, log_sum_BT, expected_BT, known = residuals
  anew = lambda: backward(head, x_BTD, w, targets_BT, log_sum_BT, g_BT)[:2]  # noqa: E731
  if known is None:
    return *anew(), autodiff.no_cotangent(targets_BT), None
  d_x, d_w = lax.cond(jnp.all(g_BT == expected_BT), lambda: known, anew)
  return d_x, d_w, autodiff.no_cotangent(targets_BT), jnp.zeros_like(expected_BT)


_losses = jax.custom_vjp(lambda head, x, w, targets, _: forward(head, x, w, targets)[0], nondiff_argnums=(0,))
_losses.defvjp(_losses_fwd, _losses_bwd)


def forward(head: Head, x_BTD, w, targets_BT):
  """(losses, log-sum-exp of the logits), both [B, T] in float32 or wider."""
  over_tiles = _by_tokens if head.axis == "tokens" else _forward_vocab
  found = over_tiles(head, x_BTD.astype(head.dtype), w.astype(head.dtype), targets_BT)
  return loss_of(found["log_sum"], found["label"], head.z_loss), found["log_sum"]


def _by_tokens(head, x, w, targets_BT, log_sum_BT=None, g_BT=None, gradients=True, visit=None, extra=None) -> dict:
  """One pass over tiles of c = ceil(T / n) positions, the last one padded, as a dict.

  Without log_sum: log_sum and label, of the logits. With the losses' cotangent g: visited, and the gradients x and w.
  """
  length = x.shape[1]
  size = -(-length // head.num_tiles)
  whole = {"x": x, "targets": targets_BT, "log_sum": log_sum_BT, "g": g_BT}
  # The padding has logits, log-sum-exp and cotangent 0.
  whole = {name: _padded(x, 1, size) for name, x in whole.items() if x is not None}

  def tile(d_w, j):
    cut = {name: lax.dynamic_slice_in_dim(x, j * size, size, 1) for name, x in whole.items()}
    logits, found = head.logits(cut["x"], w), {}
    if log_sum_BT is None:
      cut["log_sum"] = jax.nn.logsumexp(logits, axis=-1)
      found = {"log_sum": cut["log_sum"], "label": label_of(logits, cut["targets"])}
    if g_BT is None:
      return d_w, found
    delta = head.cotangent(logits, cut["targets"], cut["log_sum"], cut["g"])
    if visit is not None:
      found["visited"] = visit(cut["x"], delta, extra)
    if gradients:
      d_w, found["x"] = d_w + head.d_table(cut["x"], delta), head.d_inputs(delta, w)
    return d_w, found

  init = jnp.zeros(w.shape, head.wide) if gradients and g_BT is not None else None
  d_w, found = lax.scan(tile, init, jnp.arange(-(-length // size)))
  axes = {name: 2 if name == "visited" else 1 for name in found}  # of the positions
  return {name: _joined(found[name], axis, axis, length) for name, axis in axes.items()} | {"w": d_w}


def _vocab_tile(head: Head, x, w_j, j, targets, size: int):
  """(logits of block j of a vocabulary of `size` entries, index of each label in it, -1 for labels of other blocks).

  Padding gets a very large negative logit.
  """
  logits = head.logits(x, w_j)
  entries = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) * head.num_tiles + j
  logits = jnp.where(entries < size, logits, -0.7 * jnp.finfo(logits.dtype).max)
  return logits, jnp.where(targets % head.num_tiles == j, targets // head.num_tiles, -1)


def _forward_vocab(head: Head, x, w, targets_BT) -> dict:
  size = w.shape[head.vocab_axis]

  def block(carry, scanned):
    highest, total, label = carry
    w_j, j = scanned
    logits, place = _vocab_tile(head, x, w_j, j, targets_BT, size)
    new_highest = jnp.maximum(highest, logits.max(-1))
    total = total * jnp.exp(highest - new_highest) + jnp.exp(logits - new_highest[..., None]).sum(-1)
    return (new_highest, total, label + jnp.where(place >= 0, label_of(logits, jnp.maximum(place, 0)), 0)), None

  lowest = jnp.full(targets_BT.shape, -0.7 * jnp.finfo(head.wide).max, head.wide)
  init = (lowest, jnp.zeros_like(lowest), jnp.zeros_like(lowest))
  blocks = (head.split_vocab(w, head.vocab_axis), jnp.arange(head.num_tiles))
  (highest, total, label), _ = lax.scan(block, init, blocks)
  return {"log_sum": highest + jnp.log(total), "label": label}


def _backward_vocab(head, x, w, targets_BT, log_sum_BT, g_BT, gradients, visit, extra, table_dtype) -> dict:
  axis, size = head.vocab_axis, w.shape[head.vocab_axis]

  def block(sums, scanned):
    w_j, j, extra_j = scanned
    delta = head.cotangent(*_vocab_tile(head, x, w_j, j, targets_BT, size), log_sum_BT, g_BT)
    found = {} if visit is None else {"visited": visit(x, delta, extra_j)}
    if gradients:
      found["x"] = head.d_inputs(delta, w_j, head.wide)
    d_w = head.d_table(x, delta).astype(table_dtype) if gradients else None  # is complete, so it needs no wider sum
    return {name: found[name] if sums is None else sums[name] + found[name] for name in found}, d_w

  blocks = (head.split_vocab(w, axis), jnp.arange(head.num_tiles), extra)
  shapes, _ = jax.eval_shape(lambda blocks: block(None, jax.tree.map(lambda a: a[0], blocks)), blocks)
  sums, d_w_n = lax.scan(block, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), blocks)
  return sums | {"w": _joined(d_w_n, axis + 1, axis, size) if gradients else None}


def backward(head: Head, x_BTD, w, targets_BT, log_sum_BT, g_BT, *, gradients=True, visit: Any = None, extra=None):
  """Returns (gradient of x in x's dtype, gradient of w in w's dtype, visited) for the losses' cotangent g_BT.

  visit: called as visit(x_tile, delta_tile, extra) in every tile, with the projection's input and its output's
  cotangent. It returns an array whose last axes are those of the tile's tokens; `visited` joins these for all tokens
  and is None without visit. extra: passed on unchanged for tiles of tokens; for tiles of the vocabulary, arrays
  [n, ...] indexed by tile. gradients: False computes none (both are then None).
  """
  x, table = x_BTD.astype(head.dtype), w.astype(head.dtype)
  rows = (x, table, targets_BT, log_sum_BT, g_BT.astype(head.wide), gradients, visit, extra)
  found = _by_tokens(head, *rows) if head.axis == "tokens" else _backward_vocab(head, *rows, w.dtype)
  if not gradients:
    return None, None, found.get("visited")
  return found["x"].astype(x_BTD.dtype), found["w"].astype(w.dtype), found.get("visited")
