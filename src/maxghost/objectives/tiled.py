"""Output projection and cross-entropy in tiles: both passes hold only one tile of the logits at a time.

The backward pass recomputes each tile's logits and uses the saved log-sum-exp. If the tokens' weights are given, the
forward pass computes the gradients as well, and the backward pass only scales them. Only the projection's table and the
hidden states have gradients.

B batch, T positions, D features, V vocabulary; n tiles of c positions or of v vocabulary entries.
Source of the online log-sum-exp: Milakov and Gimelshein, arXiv:1805.02867.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxghost.models import autodiff, dense
from maxghost.parallel import shardings

AXES = ("tokens", "vocab")


@dataclasses.dataclass(frozen=True)
class Tiling:
  """Tile settings of an objective; `Head` adds those of the projection."""

  num_tiles: int
  axis: str = "tokens"
  z_loss: float = 0.0

  def of(self, *, tied: bool, dtype, precision=None, soft_cap: float | None = None) -> "Head":
    return Head(self.num_tiles, self.axis, tied, dtype, precision, self.z_loss, soft_cap)


@dataclasses.dataclass(frozen=True)
class Head:
  """A tiled projection. num_tiles: n. axis: 'tokens' (tiles of ceil(T / n) positions of every row) or 'vocab'.

  tied: the table is [V, D], else [D, V]. dtype: of the products, as in the untiled layer; losses, log-sum-exp and the
  sums over tiles are float32 or wider. soft_cap: a logit y becomes soft_cap * tanh(y / soft_cap).
  """

  num_tiles: int
  axis: str
  tied: bool
  dtype: Any
  precision: Any = None
  z_loss: float = 0.0
  soft_cap: float | None = None

  def __post_init__(self):
    if self.axis not in AXES:
      raise ValueError(f"vocab_tiling_axis={self.axis}: use one of {', '.join(AXES)}")

  def __call__(self, x_BTD, w, targets_BT, weights_BT=None):
    """`tiled_losses`; uses the weights on CPU only, where arithmetic costs more than holding a table's gradient."""
    return tiled_losses(self, x_BTD, w, targets_BT, weights_BT if shardings.platform() == "cpu" else None)

  @property
  def wide(self):
    return jnp.promote_types(self.dtype, jnp.float32)

  def logits(self, x, w):
    """[..., D] and a table (or a block of its vocabulary) -> float32 or wider [..., V]."""
    product = dense.contract_transposed if self.tied else dense.contract
    logits = product(x, w, 1, self.precision).astype(self.wide)
    return logits if self.soft_cap is None else self.soft_cap * jnp.tanh(logits / self.soft_cap)

  def losses(self, log_sum, label):
    """Losses from the log-sum-exp and the label's logit."""
    return log_sum - label + self.z_loss * log_sum**2 if self.z_loss else log_sum - label

  def cotangent(self, logits, targets, log_sum, g):
    """Cotangent of the projection's output, in `dtype`. targets: index of the label in `logits`; -1: none."""
    weight = g * (1 + 2 * self.z_loss * log_sum) if self.z_loss else g
    is_target = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    delta = jnp.exp(logits - log_sum[..., None]) * weight[..., None] - jnp.where(is_target, g[..., None], 0)
    if self.soft_cap is not None:  # padding has ratios far outside [-1, 1], and a delta of 0
      delta = delta * (1 - jnp.square(jnp.clip(logits / self.soft_cap, -1, 1)))
    return delta.astype(self.dtype)

  def d_inputs(self, delta, w, out_dtype=None):
    product = dense.contract if self.tied else dense.contract_transposed
    return product(delta, w, 1, self.precision, out_dtype or self.dtype)

  def d_table(self, x, delta):
    """The table's gradient from some tokens or some of the vocabulary, float32 or wider."""
    left, right = (delta, x) if self.tied else (x, delta)
    return dense.outer_sum(left, right, 1, 1, self.precision, self.wide)

  def split_vocab(self, table, axis: int):
    """[..., V, ...] -> [n, ..., v, ...], padded with zeros.

    Entry i of block j is entry i n + j of the vocabulary, so that all blocks of a sharded vocabulary are sharded alike.
    """
    padding = -table.shape[axis] % self.num_tiles
    table = jnp.pad(table, [(0, padding if i == axis else 0) for i in range(table.ndim)]) if padding else table
    shape = (*table.shape[:axis], table.shape[axis] // self.num_tiles, self.num_tiles, *table.shape[axis + 1 :])
    return jnp.moveaxis(table.reshape(shape), axis + 1, 0)

  def join_vocab(self, blocks_n, axis: int, size: int):
    """The inverse of `split_vocab`."""
    table = jnp.moveaxis(blocks_n, 0, axis + 1)
    table = table.reshape(*table.shape[:axis], -1, *table.shape[axis + 2 :])
    return lax.slice_in_dim(table, 0, size, axis=axis)

  @property
  def vocab_axis(self) -> int:
    """The vocabulary axis of the table."""
    return 0 if self.tied else 1


def tiled_losses(head: Head, x_BTD, w, targets_BT, weights_BT=None):
  """Cross-entropy of each position in nats plus z_loss * logsumexp**2, [B, T], float32 or wider.

  Equal to `token_losses` of the whole logits.
  x_BTD: input of the projection (after the final norm). weights_BT: expected weights of the losses, up to a common
  factor. With tiles of tokens, the backward pass then needs no logits, but the table's gradient is held since the
  forward pass. If the actual weights differ, the gradient is computed anew.
  """
  if autodiff.in_forward_mode():
    return forward(head, x_BTD, w, targets_BT)[0]
  if weights_BT is None or head.axis != "tokens":
    return _losses(head, x_BTD, w, targets_BT)
  return _weighted_losses(head, x_BTD, w, targets_BT, jnp.asarray(weights_BT))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(head: Head, x_BTD, w, targets_BT):
  return forward(head, x_BTD, w, targets_BT)[0]


def _losses_fwd(head, x_BTD, w, targets_BT):
  losses_BT, log_sum_BT = forward(head, x_BTD, w, targets_BT)
  return losses_BT, (x_BTD, w, targets_BT, log_sum_BT)


def _losses_bwd(head, residuals, g_BT):
  x_BTD, w, targets_BT, log_sum_BT = residuals
  d_x, d_w, _ = backward(head, x_BTD, w, targets_BT, log_sum_BT, g_BT)
  return d_x, d_w, autodiff.no_cotangent(targets_BT)


_losses.defvjp(_losses_fwd, _losses_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_losses(head: Head, x_BTD, w, targets_BT, weights_BT):
  return forward(head, x_BTD, w, targets_BT)[0]


def _weighted_losses_fwd(head, x_BTD, w, targets_BT, weights_BT):
  x, table = x_BTD.astype(head.dtype), w.astype(head.dtype)
  tiles = _Positions(head, x.shape[1])
  padded = [tiles.pad(a) for a in (x, targets_BT, weights_BT.astype(head.wide))]

  def tile(d_w, j):
    x_j, targets, weights = (tiles.cut(a, j) for a in padded)
    logits = head.logits(x_j, table)
    log_sum, label = jax.nn.logsumexp(logits, axis=-1), _label(logits, targets)
    delta = head.cotangent(logits, targets, log_sum, weights)
    return d_w + head.d_table(x_j, delta), (log_sum, label, head.d_inputs(delta, table))

  d_w, (log_sum_n, label_n, d_x_n) = lax.scan(tile, jnp.zeros(w.shape, head.wide), jnp.arange(tiles.count))
  log_sum_BT, label_BT = tiles.join(log_sum_n), tiles.join(label_n)
  losses_BT = head.losses(log_sum_BT, label_BT)
  return losses_BT, (x_BTD, w, targets_BT, log_sum_BT, weights_BT, tiles.join(d_x_n), d_w)


def _weighted_losses_bwd(head, residuals, g_BT):
  x_BTD, w, targets_BT, log_sum_BT, weights_BT, d_x, d_w = residuals
  weights, g = weights_BT.astype(head.wide).ravel(), g_BT.astype(head.wide).ravel()
  largest = jnp.argmax(jnp.abs(weights))
  scale = jnp.where(weights[largest] == 0, 0, g[largest] / jnp.where(weights[largest] == 0, 1, weights[largest]))
  expected = scale * weights
  as_expected = jnp.all(jnp.abs(g - expected) <= 4 * jnp.finfo(head.wide).eps * jnp.abs(expected))

  def scaled():
    return (scale * d_x.astype(head.wide)).astype(x_BTD.dtype), (scale * d_w).astype(w.dtype)

  d_x, d_w = lax.cond(as_expected, scaled, lambda: backward(head, x_BTD, w, targets_BT, log_sum_BT, g_BT)[:2])
  return d_x, d_w, autodiff.no_cotangent(targets_BT), jnp.zeros_like(weights_BT)


_weighted_losses.defvjp(_weighted_losses_fwd, _weighted_losses_bwd)


def _label(logits, targets):
  return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


def forward(head: Head, x_BTD, w, targets_BT):
  """(losses, log-sum-exp of the logits), both [B, T] in float32 or wider."""
  x, w = x_BTD.astype(head.dtype), w.astype(head.dtype)
  if head.axis == "tokens":
    tiles = _Positions(head, x.shape[1])

    def tile(_, j):
      logits = head.logits(tiles.cut(x_padded, j), w)
      return None, (jax.nn.logsumexp(logits, axis=-1), _label(logits, tiles.cut(targets, j)))

    x_padded, targets = tiles.pad(x), tiles.pad(targets_BT)
    _, (log_sum_n, label_n) = lax.scan(tile, None, jnp.arange(tiles.count))
    log_sum_BT, label_BT = tiles.join(log_sum_n), tiles.join(label_n)
  else:
    log_sum_BT, label_BT = _forward_vocab(head, x, w, targets_BT)
  return head.losses(log_sum_BT, label_BT), log_sum_BT


class _Positions:
  """Tiles of c = ceil(T / n) positions, the last one padded."""

  def __init__(self, head: Head, length: int):
    self.length, self.size = length, -(-length // head.num_tiles)
    self.count = -(-length // self.size)

  def pad(self, x):
    padding = self.count * self.size - self.length
    return jnp.pad(x, [(0, padding if i == 1 else 0) for i in range(x.ndim)]) if padding else x

  def cut(self, x, j):
    """Tile j of a padded array [B, n c, ...]."""
    return lax.dynamic_slice_in_dim(x, j * self.size, self.size, 1)

  def join(self, tiles_n, axis: int = 1):
    """[n, ..., c, ...] with the positions at `axis` of the rest -> [..., T, ...]."""
    x = jnp.moveaxis(tiles_n, 0, axis)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, self.length, axis=axis)


def _vocab_logits(head: Head, x, w_j, j, size: int):
  """Logits of block j of a vocabulary of `size` entries; padding gets a very large negative logit."""
  logits = head.logits(x, w_j)
  entries = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) * head.num_tiles + j
  return jnp.where(entries < size, logits, -0.7 * jnp.finfo(logits.dtype).max)


def _targets_in(head: Head, targets, j):
  """Index of each label in block j, -1 for labels of other blocks."""
  return jnp.where(targets % head.num_tiles == j, targets // head.num_tiles, -1)


def _forward_vocab(head: Head, x, w, targets_BT):
  size = w.shape[head.vocab_axis]

  def block(carry, scanned):
    highest, total, label = carry
    w_j, j = scanned
    logits = _vocab_logits(head, x, w_j, j, size)
    new_highest = jnp.maximum(highest, logits.max(-1))
    total = total * jnp.exp(highest - new_highest) + jnp.exp(logits - new_highest[..., None]).sum(-1)
    place = _targets_in(head, targets_BT, j)
    own = jnp.where(place >= 0, _label(logits, jnp.maximum(place, 0)), 0)
    return (new_highest, total, label + own), None

  lowest = jnp.full(targets_BT.shape, -0.7 * jnp.finfo(head.wide).max, head.wide)
  init = (lowest, jnp.zeros_like(lowest), jnp.zeros_like(lowest))
  blocks = (head.split_vocab(w, head.vocab_axis), jnp.arange(head.num_tiles))
  (highest, total, label), _ = lax.scan(block, init, blocks)
  return highest + jnp.log(total), label


def backward(
  head: Head,
  x_BTD,
  w,
  targets_BT,
  log_sum_BT,
  g_BT,
  *,
  gradients: bool = True,
  visit: Callable | None = None,
  extra=None,
):
  """Returns (gradient of x in x's dtype, gradient of w in w's dtype, visited) for the losses' cotangent g_BT.

  visit: called as visit(x_tile, delta_tile, extra) in every tile, with the projection's input and its output's
  cotangent. It returns an array whose last axes are those of the tile's tokens; `visited` joins these for all tokens
  and is None without visit. extra: passed on unchanged for tiles of tokens; for tiles of the vocabulary, arrays
  [n, ...] indexed by tile. gradients: False computes none (both are then None).
  """
  x, table = x_BTD.astype(head.dtype), w.astype(head.dtype)
  g_BT = g_BT.astype(head.wide)
  if head.axis == "tokens":
    d_x, d_w, visited = _backward_tokens(head, x, table, targets_BT, log_sum_BT, g_BT, gradients, visit, extra)
  else:  # a block's gradient is complete, so it needs no wider sum
    out = _backward_vocab(head, x, table, targets_BT, log_sum_BT, g_BT, w.dtype if gradients else None, visit, extra)
    d_x, d_w, visited = out
  if not gradients or d_x is None or d_w is None:
    return None, None, visited
  return d_x.astype(x_BTD.dtype), d_w.astype(w.dtype), visited


def _backward_tokens(head, x, w, targets_BT, log_sum_BT, g_BT, gradients, visit, extra):
  tiles = _Positions(head, x.shape[1])
  # Zeros in the last tile's padding: logits 0, log-sum-exp 0, cotangent 0.
  padded = [tiles.pad(a) for a in (x, targets_BT, log_sum_BT, g_BT)]

  def tile(d_w, j):
    x_j, targets, log_sum, g = (tiles.cut(a, j) for a in padded)
    delta = head.cotangent(head.logits(x_j, w), targets, log_sum, g)
    seen = None if visit is None else visit(x_j, delta, extra)
    if not gradients:
      return d_w, (None, seen)
    return d_w + head.d_table(x_j, delta), (head.d_inputs(delta, w), seen)

  init = jnp.zeros(w.shape, head.wide) if gradients else None
  d_w, (d_x_n, seen_n) = lax.scan(tile, init, jnp.arange(tiles.count))
  seen = None if seen_n is None else tiles.join(seen_n, axis=seen_n.ndim - 2)
  return None if d_x_n is None else tiles.join(d_x_n), d_w, seen


def _backward_vocab(head, x, w, targets_BT, log_sum_BT, g_BT, table_dtype, visit, extra):
  size = w.shape[head.vocab_axis]

  def block(carry, scanned):
    d_x, seen = carry
    w_j, j, extra_j = scanned
    logits = _vocab_logits(head, x, w_j, j, size)
    delta = head.cotangent(logits, _targets_in(head, targets_BT, j), log_sum_BT, g_BT)
    if visit is not None:
      seen = seen + visit(x, delta, extra_j)
    if table_dtype is None:
      return (d_x, seen), None
    return (d_x + head.d_inputs(delta, w_j, head.wide), seen), head.d_table(x, delta).astype(table_dtype)

  blocks = (head.split_vocab(w, head.vocab_axis), jnp.arange(head.num_tiles), extra)
  seen = None
  if visit is not None:
    w_0, _, extra_0 = jax.tree.map(lambda a: a[0], blocks)
    delta = jax.ShapeDtypeStruct((*targets_BT.shape, w_0.shape[head.vocab_axis]), x.dtype)
    shape = jax.eval_shape(visit, x, delta, extra_0)
    seen = jnp.zeros(shape.shape, shape.dtype)
  init = (None if table_dtype is None else jnp.zeros(x.shape, head.wide), seen)
  (d_x, seen), d_w_n = lax.scan(block, init, blocks)
  return d_x, None if d_w_n is None else head.join_vocab(d_w_n, head.vocab_axis, size), seen
