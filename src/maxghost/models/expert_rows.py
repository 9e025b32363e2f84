"""Tokens sorted by the experts they are sent to, and back.

N tokens, k experts of a token, R = N k rows (a token once for each of its experts), E experts.
"""

import dataclasses

import jax
import jax.numpy as jnp

from maxghost.models.autodiff import no_cotangent, with_backward


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """The (token, choice) pairs sorted by expert.

  order_R: pair of each row. place_R: row of each pair. sizes_E: rows of each expert. expert_R: expert of each row.
  partial: these are only some of the experts; the rows of all others come last and do not count.
  """

  order_R: jax.Array
  place_R: jax.Array
  sizes_E: jax.Array
  expert_R: jax.Array
  num_chosen: int = dataclasses.field(metadata={"static": True})
  partial: bool = dataclasses.field(default=False, metadata={"static": True})

  @classmethod
  def sort(cls, index_BTk, num_experts: int, first_expert=None) -> "Rows":
    """first_expert: index of the first one where `num_experts` are only some of the experts; None: all of them."""
    expert_of_pair = index_BTk.reshape(-1)
    if first_expert is not None:
      expert_of_pair = expert_of_pair - first_expert
      own = (expert_of_pair >= 0) & (expert_of_pair < num_experts)
      expert_of_pair = jnp.where(own, expert_of_pair, num_experts)
    order_R = jnp.argsort(expert_of_pair, stable=True)
    expert_R = expert_of_pair[order_R]
    edges = jnp.searchsorted(expert_R, jnp.arange(num_experts + 1, dtype=expert_R.dtype)).astype(jnp.int32)
    place_R = jnp.argsort(order_R)
    return cls(order_R, place_R, jnp.diff(edges), expert_R, index_BTk.shape[-1], first_expert is not None)

  def own(self, y_RO) -> jax.Array:
    """y with zeros in the rows of other experts."""
    return jnp.where(self.expert_R[:, None] < self.sizes_E.shape[0], y_RO, 0) if self.partial else y_RO

  def take(self, x_N):
    """Rows of the tokens' values: [N, ...] -> [R, ...]."""
    return _take(self.num_chosen, x_N, self.order_R, self.place_R)

  def restore(self, y_R):
    """Puts rows back in the order of the pairs."""
    return _permute(y_R, self.place_R, self.order_R)

  def sums(self, s_R):
    """Sums over each token's rows: [R] -> [N]."""
    return s_R[self.place_R].reshape(-1, self.num_chosen).sum(1)

  def of_expert(self, b_E):
    """The entry of each row's expert: [E, ...] -> [R, ...]."""
    return _of_expert(b_E, self.expert_R)


# Gathers with a gather or a product as transpose: on CPU a scatter runs one row at a time.


def _take_backward(num_chosen: int, place_R, g_R):
  g_pairs = g_R[place_R]
  sums_N = g_pairs.reshape(-1, num_chosen, *g_pairs.shape[1:]).sum(1)
  return sums_N, no_cotangent(place_R), no_cotangent(place_R)


def _of_expert_backward(kept, g_R):
  b_E, expert_R = kept
  one_hot_RE = jax.nn.one_hot(expert_R, b_E.shape[0], dtype=g_R.dtype)
  return jnp.einsum("re,ro->eo", one_hot_RE, g_R).astype(b_E.dtype), no_cotangent(expert_R)


_take = with_backward(lambda k, x_N, order_R, place_R: (x_N[order_R // k], place_R), _take_backward, (0,))
_permute = with_backward(
  lambda y_R, there, back: (y_R[there], (there, back)),
  lambda kept, g: (g[kept[1]], no_cotangent(kept[0]), no_cotangent(kept[1])),
)
_of_expert = with_backward(lambda b_E, expert_R: (b_E[expert_R], (b_E, expert_R)), _of_expert_backward)
