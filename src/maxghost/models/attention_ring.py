"""Ring attention: the positions of a row lie on several devices, and the keys and values go around among them.

C devices along the ring, N chunks of positions on each, t positions in a chunk; B batch, T positions of one device, K
key/value heads, G query heads per key/value head, h head width. A device never holds more than two devices' keys.

Under a causal mask later positions attend to more keys. So each device takes a chunk from the front and one from the
back of the row (chunks d and 2C - 1 - d), and all devices compute the same amount in every round. Queries, keys and
values are sent there, and the outputs are sent back. With a sliding window the load is balanced already: chunks stay
where they are, and keys are sent only as far as they are visible.

Source: Liu, Zaharia and Abbeel, arXiv:2310.01889; the two chunks: Llama team, arXiv:2407.21783, section 3.3.2.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from maxghost.models import attention_blockwise, autodiff
from maxghost.models.attention_blockwise import back_over_queries, before_keys, over_keys, unblock


@dataclasses.dataclass(frozen=True)
class Ring:
  """The static form of a ring. axes: its mesh axes. size: C. chunks: N, 2 if balanced, else 1. rounds: of the keys."""

  axes: tuple[str, ...]
  size: int
  chunks: int
  rounds: int
  block: int

  @classmethod
  def of(cls, axes: tuple[str, ...], size: int, num_positions: int, window: int | None) -> "Ring":
    """num_positions: T. window: of the attention, see `attention.attend`."""
    seen = size - 1 if window is None else min(-(-(window - 1) // num_positions), size - 1)
    chunks = 2 if seen == size - 1 and num_positions % 2 == 0 else 1
    length = num_positions // chunks
    block = next(n for n in range(min(attention_blockwise.BLOCK, length), 0, -1) if length % n == 0)
    return cls(axes, size, chunks, size - 1 if chunks == 2 else seen, block)

  @property
  def place(self):
    """This device's number d on the ring."""
    return lax.axis_index(self.axes)

  def starts(self, device, length: int):
    """Positions [N] where the chunks of `device` begin, in rows of which a chunk has `length`."""
    return jnp.stack([device, 2 * self.size - 1 - device] if self.chunks == 2 else [device]) * length

  def send(self, tree, places: int):
    """The arrays of the device that is `places` before this one."""
    pairs = [(i, (i + places) % self.size) for i in range(self.size)]
    return jax.tree.map(lambda x: lax.ppermute(x, self.axes, pairs), tree)

  def split(self, x, axis: int):
    """This device's chunks [N, ..., t, ...] from its adjacent positions at `axis` of x."""
    x = jnp.moveaxis(x.reshape(*x.shape[:axis], self.chunks, -1, *x.shape[axis + 1 :]), axis, 0)
    if self.chunks == 1:
      return x
    # Chunk g goes to device g or 2C - 1 - g. Of each pair of adjacent chunks, one is even; a device gets one of each.
    even, odd = (lax.ppermute(x[i], self.axes, self._moves(i)) for i in range(2))
    return self._by_parity(even, odd)

  def join(self, x_N, axis: int):
    """The inverse of `split`: adjacent positions at `axis`."""
    if self.chunks == 2:
      even_odd = self._by_parity(x_N[0], x_N[1])
      back = ([(there, here) for here, there in self._moves(i)] for i in range(2))
      x_N = jnp.stack([lax.ppermute(x, self.axes, pairs) for x, pairs in zip(even_odd, back, strict=True)])
    return unblock(x_N, axis)

  def _moves(self, parity: int) -> list[tuple[int, int]]:
    """(from, to) of the chunks of one parity."""
    return [(g // 2, g if g < self.size else 2 * self.size - 1 - g) for g in range(parity, 2 * self.size, 2)]

  def _by_parity(self, first, second):
    """[2, ...]: the two in this order on devices with an even number, else swapped."""
    swap = self.place % 2 == 1
    return jnp.stack([jnp.where(swap, second, first), jnp.where(swap, first, second)])


def attend(ring: Ring, shape, q_BKGTh, k_BKTh, v_BKTh, segment_ids_BT, sinks_BKGT):
  """As `attention.attend` of the whole row, on grouped heads and on the positions of one device, inside shard_map."""
  if segment_ids_BT is None:
    segment_ids_BT = jnp.zeros((q_BKGTh.shape[0], q_BKGTh.shape[3]), jnp.int32)
  axes = (3, 2, 2, 1, 3)
  arrays = (q_BKGTh, k_BKTh, v_BKTh, segment_ids_BT, sinks_BKGT)
  chunks = [None if x is None else ring.split(x, axis) for x, axis in zip(arrays, axes, strict=True)]
  return ring.join(_attend(ring, shape, *chunks), 3)


def _forward(ring: Ring, shape, q_N, k_N, v_N, segments_N, sinks_N):
  """(out, (the arguments, out, log-sum-exp of the scores and the sink [N, B, K, G, t] in float32 or wider))."""
  wide, rows, here = jnp.promote_types(q_N.dtype, jnp.float32), q_N.shape[:-1], ring.place
  state = before_keys(sinks_N, rows, v_N.shape[-1], wide)
  own = q_N, segments_N, ring.starts(here, rows[-1])

  def read(state_N, keys_N, source):
    """The softmax so far, with the keys of device `source`."""
    keys_N = *keys_N, ring.starts(source, rows[-1])

    def of_queries(_, own_and_state):
      (q, segments_q, at_q), state = own_and_state

      def of_keys(state, keys):
        k, v, segments_k, at_k = keys
        start = lambda i: tuple(lax.dynamic_slice_in_dim(x, i * ring.block, ring.block, 3) for x in state)  # noqa: E731
        pair = (segments_q, segments_k), (at_q, at_k)
        found = over_keys(shape, ring.block, q, k, v, *pair, start, lambda *state: state)
        return tuple(unblock(x, 3) for x in found), None

      return None, lax.scan(of_keys, state, keys_N)[0]

    return lax.scan(of_queries, None, (own, state_N))[1]

  def one_round(carry, number):
    state, keys = carry
    return (read(state, keys, (here - number) % ring.size), ring.send(keys, 1)), None

  carry = state, (k_N, v_N, segments_N)
  carry, _ = lax.scan(one_round, carry, jnp.arange(ring.rounds))
  highest, total, out = read(*carry, (here - ring.rounds) % ring.size)
  out, log_sum = (out / total[..., None]).astype(q_N.dtype), highest + jnp.log(total)
  return out, (q_N, k_N, v_N, segments_N, sinks_N, out, log_sum)


def _backward(ring: Ring, shape, residuals, g_N):
  q_N, k_N, v_N, segments_N, sinks_N, out_N, log_sum_N = residuals
  wide, length, here = log_sum_N.dtype, q_N.shape[-2], ring.place
  row_N, d_sinks = jax.vmap(attention_blockwise.cotangent_rows)(out_N, g_N, log_sum_N, sinks_N)
  own = (q_N, log_sum_N, row_N, g_N), segments_N, ring.starts(here, length)

  def read(dq_N, keys_N, d_keys_N, source):
    """(dq, cotangents of the keys and values of device `source`), with what these devices' pairs add."""
    keys_N = *keys_N, ring.starts(source, length)

    def of_queries(d_keys_N, own_and_dq):
      (of_queries, segments_q, at_q), dq = own_and_dq

      def of_keys(dq, keys):
        (k, v, segments_k, at_k), sums = keys
        pair = (segments_q, segments_k), (at_q, at_k)
        dq, found = back_over_queries(shape, ring.block, of_queries, k, v, *pair, dq, lambda *d_keys: d_keys)
        return dq, tuple(a + unblock(b, 2) for a, b in zip(sums, found, strict=True))

      dq, d_keys_N = lax.scan(of_keys, dq, (keys_N, d_keys_N))
      return d_keys_N, dq

    d_keys_N, dq_N = lax.scan(of_queries, d_keys_N, (own, dq_N))
    return dq_N, d_keys_N

  def one_round(carry, number):
    dq, keys, d_keys = carry
    dq, d_keys = read(dq, keys, d_keys, (here - number) % ring.size)
    return (dq, *ring.send((keys, d_keys), 1)), None

  zeros = [jnp.zeros(x.shape, wide) for x in (q_N, k_N, v_N)]
  carry = zeros[0], (k_N, v_N, segments_N), tuple(zeros[1:])
  carry, _ = lax.scan(one_round, carry, jnp.arange(ring.rounds))
  dq, d_keys = read(*carry, (here - ring.rounds) % ring.size)
  dk, dv = ring.send(d_keys, -ring.rounds)
  found = [x.astype(like.dtype) for x, like in ((dq, q_N), (dk, k_N), (dv, v_N))]
  return *found, autodiff.no_cotangent(segments_N), d_sinks


_attend = autodiff.with_backward(_forward, _backward, nondiff_argnums=(0, 1))
