"""The routed feed-forward layer: each token goes to a few of many experts, and no token is dropped.

B batch, T positions, N = B T tokens, D embed dim, F width of an expert, E experts, k experts of a token, R = N k rows
(a token once for each of its experts).
Source of the load-balancing loss: Fedus et al., arXiv:2101.03961, equations 4 to 6, for k experts.
"""

import contextvars
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from maxghost.config.schema import ModelConfig
from maxghost.models.autodiff import no_cotangent, with_backward
from maxghost.models.grouped_matmul import grouped_matmul
from maxghost.models.layers import HIDDEN, gated, linear, precision
from maxghost.models.rounding import Rounded, plain
from maxghost.parallel import shardings

_micro_batches = contextvars.ContextVar("maxghost_load_by", default=1)
# counted_by(num_micro): counts the experts' load separately for each of so many micro-batches.
counted_by = functools.partial(shardings.setting, _micro_batches)


def no_routing(num_experts: int, shape_BT: tuple[int, int], dtype) -> dict:
  """What `layers.Hidden` carries: sums over the layers so far, divided by the number of layers, in float32 or wider.

  load_balance_BT: each token's part of the load-balancing loss, E sum_e f_e p_te, with f_e the share of the batch's
    tokens that expert e gets (held constant, without padding) and p_te the router's probability; the loss is its mean.
  entropy_BT: of the router's probabilities, nats.
  chosen_BE: tokens of each row that chose each expert, over k.
  """
  shapes = {"load_balance_BT": shape_BT, "entropy_BT": shape_BT, "chosen_BE": (shape_BT[0], num_experts)}
  return {name: jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32)) for name, shape in shapes.items()}


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
  def sort(cls, index_BTk, num_experts: int, first_expert) -> "Rows":
    """first_expert: index of the first one where `num_experts` are only some of the experts; None: all of them."""
    expert_of_pair = index_BTk.reshape(-1)
    if first_expert is not None:
      expert_of_pair = expert_of_pair - first_expert
      own = (expert_of_pair >= 0) & (expert_of_pair < num_experts)
      expert_of_pair = jnp.where(own, expert_of_pair, num_experts)
    order_R = jnp.argsort(expert_of_pair, stable=True)
    expert_R = expert_of_pair[order_R]
    edges = jnp.searchsorted(expert_R, jnp.arange(num_experts + 1, dtype=expert_R.dtype)).astype(jnp.int32)
    return cls(order_R, jnp.argsort(order_R), jnp.diff(edges), expert_R, index_BTk.shape[-1], first_expert is not None)

  def own(self, y_RO) -> jax.Array:
    """y with zeros in the rows of other experts."""
    return jnp.where(self.expert_R[:, None] < self.sizes_E.shape[0], y_RO, 0) if self.partial else y_RO

  def take(self, x_N):
    """Rows of the tokens' values: [N, ...] -> [R, ...]."""
    return _take(self.num_chosen, x_N, self.order_R, self.place_R)

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
  return jnp.einsum("re,ro->eo", one_hot_RE, g_R, precision="highest").astype(b_E.dtype), no_cotangent(expert_R)


_take = with_backward(lambda k, x_N, order_R, place_R: (x_N[order_R // k], place_R), _take_backward, (0,))
_permute = with_backward(
  lambda y_R, there, back: (y_R[there], (there, back)),
  lambda kept, g: (g[kept[1]], no_cotangent(kept[0]), no_cotangent(kept[1])),
)
_of_expert = with_backward(lambda b_E, expert_R: (b_E[expert_R], (b_E, expert_R)), _of_expert_backward)


@dataclasses.dataclass(frozen=True)
class Split:
  """The mesh axes of the tokens' rows and positions, of the experts, and of their width; no mesh on one device.

  Devices that differ in their experts gather each other's tokens, each applies its own experts, and the sum over
  experts returns to the device of the token.
  """

  mesh: Any
  rows: tuple[str, ...]
  length: tuple[str, ...]
  experts: tuple[str, ...]
  width: tuple[str, ...]

  @property
  def tokens(self) -> PartitionSpec:
    """Spec of arrays [B, T, ...]."""
    return PartitionSpec(self.rows or None, self.length or None)

  @property
  def sorted_rows(self) -> tuple[str, ...]:
    """Mesh axes over which arrays [R, ...] are split; devices that differ in them hold different rows."""
    return (*self.rows, *self.length, *(axis for axis in self.experts if axis not in self.rows))

  def param(self, name: str, leading: int = 0) -> PartitionSpec:
    """Spec of the layer's Param `name`, with `leading` more axes in front."""
    wide = is_wide(name)[name.endswith("_bias") :]  # a bias has the outputs alone
    return PartitionSpec(*[None] * leading, self.experts or None, *(self.width or None if w else None for w in wide))

  def map(self, function: Callable, in_specs, out_specs) -> Callable:
    return function if self.mesh is None else shardings.mapped(function, self.mesh, in_specs, out_specs)

  def run(self, experts: Callable, params: dict, x_BTD, index_BTk, weight_BTk):
    """Runs `experts(params, x, index, weight, first_expert)` on every device; whole arrays in and out."""

    def local(params, *tokens):
      if "wo_bias" in params and self.width:  # on only one of the devices whose outputs are summed
        bias = params["wo_bias"]
        params = params | {"wo_bias": jnp.where(self.is_first, bias, jnp.zeros_like(bias))}
      return self.sum(experts(params, *self.gather(*tokens), self.first_expert(params)))

    specs = {name: self.param(name) for name in params}
    return self.map(local, (specs, *[self.tokens] * 3), self.tokens)(params, x_BTD, index_BTk, weight_BTk)

  # For use inside `map`.

  def gather(self, *tokens):
    """Gathers arrays [B, T, ...] from the devices that differ only in their experts."""
    shared = self._gathered
    return [jax.lax.all_gather(x, shared, axis=0, tiled=True) for x in tokens] if shared else list(tokens)

  def sum(self, y_BT):
    """Sums the parts [B, T, ...] of gathered tokens and returns each token to its device."""
    if self._gathered:
      y_BT = jax.lax.psum_scatter(y_BT, self._gathered, scatter_dimension=0, tiled=True)
    others = (*self.width, *(axis for axis in self.experts if axis not in self._gathered))
    return jax.lax.psum(y_BT, others) if others else y_BT

  def first_expert(self, params: dict):
    """Index of the first expert of this device; None without a mesh."""
    return None if self.mesh is None else self._index(self.experts) * num_held(params)

  @property
  def is_first(self):
    """Whether this device has the first part of the experts' width."""
    return self._index(self.width) == 0

  @property
  def _gathered(self) -> tuple[str, ...]:
    return tuple(axis for axis in self.experts if axis in self.rows)

  def _index(self, axes: tuple[str, ...]):
    return functools.reduce(lambda index, axis: index * self.mesh.shape[axis] + jax.lax.axis_index(axis), axes, 0)


def is_wide(name: str) -> tuple[bool, bool]:
  """Whether inputs and outputs of a Param have the experts' width."""
  return name in ("wo", "wo_lora_a"), not name.startswith("wo") and not name.endswith("_lora_a")


def num_held(params: dict) -> int:
  """Number of experts whose parameters these are; it is the first axis of each."""
  return next(iter(params.values())).shape[0]


def find_split(layer, x_shape: tuple[int, ...]) -> Split:
  """How the layer's tokens [B, T, D] and Params lie on the mesh of the layout in use."""
  if (layout := shardings.across_devices()) is None:
    return Split(None, (), (), (), ())
  # An axis of both tokens and weights splits the tokens, and weights are gathered: a sum over it would mix tokens.
  rows, length, _ = layout.rules.assign(HIDDEN, (0, *x_shape[1:]), "an activation")
  experts, width, _ = layout.rules.assign(("exp", "mlp", None), layer.wo_shape, "experts")
  width = tuple(axis for axis in width if axis not in (*rows, *length))
  experts = tuple(axis for axis in experts if axis not in length)  # those of rows gather each other's tokens
  return Split(layout.mesh, layout.rules.leading(rows, x_shape[0]), length, experts, width)


class RoutedMoe(nnx.Module):
  """sum over a token's experts of weight * wo_e(act_0(wi_0_e x) * act_1(wi_1_e x)); chosen and weighted by a router.

  Params: wi_i [E, D, F], wo [E, F, D]; with mlp_bias wi_i_bias [E, F], wo_bias [E, D]; gate/kernel [D, E], gate/bias. A
  matrix may have an adapter, wi_i_lora_a [E, D, r] and wi_i_lora_b [E, r, F], which adds lora_scale x a b.
  """

  lora_scale: float

  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    experts, embed, width = cfg.num_experts, cfg.base_emb_dim, cfg.feed_forward_width
    self.num_experts, self.num_chosen = experts, cfg.num_experts_per_tok
    self.num_layers = cfg.base_num_decoder_layers + cfg.mtp_num_layers  # those with a router
    self.activations, self.limit = cfg.mlp_activations, cfg.mlp_activations_limit
    self.sums_to_one, self.sparse, self.has_bias = cfg.norm_topk_prob, cfg.sparse_matmul, cfg.mlp_bias
    self.dtype, self.precision, self.wo_shape = jnp.dtype(cfg.dtype), precision(cfg), (experts, width, embed)
    self.gate: Any = linear(cfg, embed, experts, ("embed", None), rngs=rngs, std=embed**-0.5, use_bias=cfg.mlp_bias)
    self.gate.precision = plain(self.precision)  # a rounded router would send tokens to other experts

    shapes = dict.fromkeys(self.branches, (embed, width)) | {"wo": (width, embed)}
    axes = dict.fromkeys(self.branches, ("embed", "mlp")) | {"wo": ("mlp", "embed")}
    dtype, out_std = jnp.dtype(cfg.weight_dtype), (width * 2 * cfg.base_num_decoder_layers) ** -0.5
    for name, (inputs, outputs) in shapes.items():
      std = out_std if name == "wo" else embed**-0.5
      value = std * jax.random.normal(rngs.params(), (experts, inputs, outputs), dtype)
      setattr(self, name, nnx.Param(value, axes=("exp", *axes[name]), matrix=(1, 1)))
      if self.has_bias:
        zeros = jnp.zeros((experts, outputs), dtype)
        setattr(self, f"{name}_bias", nnx.Param(zeros, axes=("exp", axes[name][1]), matrix=()))

  @property
  def branches(self) -> list[str]:
    return [f"wi_{i}" for i in range(len(self.activations))]

  def __call__(self, x_BTD, segment_ids_BT, routing: dict):
    """(y_BTD, routing with this layer's share added)."""
    logits_BTE = self.gate(x_BTD)
    logits_BTE = logits_BTE.astype(jnp.promote_types(logits_BTE.dtype, jnp.float32))
    probability_BTE = jax.nn.softmax(logits_BTE)
    top_BTk, index_BTk = jax.lax.top_k(logits_BTE, self.num_chosen)
    if self.sums_to_one:
      weight_BTk = jax.nn.softmax(top_BTk)
    else:
      weight_BTk = jnp.take_along_axis(probability_BTE, index_BTk, axis=-1)
    y_BTD = self.experts(x_BTD, index_BTk, weight_BTk)
    return y_BTD, self._add(routing, probability_BTE, index_BTk, segment_ids_BT)

  def _add(self, routing: dict, probability_BTE, index_BTk, segment_ids_BT) -> dict:
    wide = probability_BTE.dtype
    real_BT = jnp.ones(index_BTk.shape[:2], wide) if segment_ids_BT is None else (segment_ids_BT > 0).astype(wide)
    chosen_BE = (jax.nn.one_hot(index_BTk, self.num_experts, dtype=wide) * real_BT[..., None, None]).sum((1, 2))
    num = _micro_batches.get()  # row i of micro-batch m is row i num + m
    of_each = lambda x: x.reshape(-1, num, *x.shape[1:]).sum(0)  # noqa: E731
    share_ME = of_each(chosen_BE) / jnp.maximum(of_each(real_BT.sum(1)), 1)[:, None]
    share_BE = jax.lax.stop_gradient(jnp.tile(share_ME, (chosen_BE.shape[0] // num if num > 1 else 1, 1)))
    fixed_BTE = jax.lax.stop_gradient(probability_BTE)
    added = {
      "load_balance_BT": self.num_experts * (probability_BTE * share_BE[:, None]).sum(-1),
      "entropy_BT": -(fixed_BTE * jnp.log(jnp.maximum(fixed_BTE, jnp.finfo(wide).tiny))).sum(-1),
      "chosen_BE": chosen_BE / self.num_chosen,
    }
    return {name: routing[name] + value / self.num_layers for name, value in added.items()}

  def experts(self, x_BTD, index_BTk, weight_BTk):
    """The weighted sum of the chosen experts' outputs, [B, T, D]; the only method that uses the experts' Params."""
    params = {name: v[...] for name, v in vars(self).items() if isinstance(v, nnx.Variable)}
    if not self.sparse:
      return self._experts_dense(params, x_BTD, index_BTk, weight_BTk)
    return find_split(self, x_BTD.shape).run(self.experts_sorted, params, x_BTD, index_BTk, weight_BTk)

  def experts_sorted(self, params: dict, x_BTD, index_BTk, weight_BTk, first_expert):
    """`experts` by sorted rows. first_expert: of params that hold only some; choices of others then add nothing."""
    rows = Rows.sort(index_BTk, num_held(params), first_expert)
    branches = self.branch_rows(params, rows.take(x_BTD.reshape(-1, x_BTD.shape[-1])), rows)
    y_RD = rows.own(self.multiply(params, "wo", gated(branches, self.activations, self.limit), rows))
    y_NkD = _permute(y_RD, rows.place_R, rows.order_R).reshape(-1, self.num_chosen, y_RD.shape[-1])
    weight_Nk = weight_BTk.reshape(-1, self.num_chosen).astype(y_NkD.dtype)
    return jnp.einsum("nkd,nk->nd", y_NkD, weight_Nk, precision=plain(self.precision)).reshape(x_BTD.shape)

  def branch_rows(self, params: dict, x_RD, rows: Rows) -> list:
    """The inputs of the activations: one array [R, F] for each branch."""
    return [self.multiply(params, name, x_RD, rows) for name in self.branches]

  def multiply(self, params: dict, name: str, x_RI, rows: Rows):
    """x times the matrix of each row's expert, plus its adapter and its bias if there are."""
    y_RO = self._product(params, name, x_RI, rows)
    if f"{name}_lora_a" in params:
      y_RO = y_RO + self._product(params, f"{name}_lora_b", self.narrow(params, name, x_RI, rows), rows)
    return y_RO + rows.of_expert(params[f"{name}_bias"].astype(self.dtype)) if self.has_bias else y_RO

  def narrow(self, params: dict, name: str, x_RI, rows: Rows):
    """What the adapter of a matrix multiplies with its `b`: scale * x a, [R, r]."""
    x_Rr = self._product(params, f"{name}_lora_a", x_RI, rows)
    return x_Rr * jnp.asarray(self.lora_scale, x_Rr.dtype)

  def matrix(self, params: dict, name: str):
    """A matrix of all experts, in the dtype of the products."""
    return params[name].astype(self.dtype)

  def precision_of(self, name: str) -> Any:
    """Of the products with a matrix; a scale of rounded operands serves the whole width of an expert."""
    if not isinstance(self.precision, Rounded):
      return self.precision
    width = find_split(self, (0, 0, 0)).width
    return dataclasses.replace(self.precision, **{"inputs" if name == "wo" else "outputs": width})

  def _product(self, params: dict, name: str, x_RI, rows: Rows):
    return grouped_matmul(x_RI.astype(self.dtype), self.matrix(params, name), rows.sizes_E, self.precision_of(name))

  def _experts_dense(self, params: dict, x_BTD, index_BTk, weight_BTk):
    """`experts` by applying every expert to every token, for comparison: E / k times the work."""
    params = {name: value.astype(self.dtype) for name, value in params.items()}

    def product(spec, x, name):
      y = jnp.einsum(spec, x, params[name], precision=self.precision)
      return y + params[f"{name}_bias"][None, None] if self.has_bias else y

    weight_BTE = (jax.nn.one_hot(index_BTk, self.num_experts, dtype=weight_BTk.dtype) * weight_BTk[..., None]).sum(2)
    branches = [product("btd,edf->btef", x_BTD.astype(self.dtype), name) for name in self.branches]
    y_BTED = product("btef,efd->bted", gated(branches, self.activations, self.limit), "wo")
    return jnp.einsum("bted,bte->btd", y_BTED, weight_BTE.astype(y_BTED.dtype), precision=self.precision)
