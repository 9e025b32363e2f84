"""Muon: the momentum of each matrix, made orthogonal, by optax.

Sources: Jordan et al., kellerjordan.github.io/posts/muon (2024); Liu et al., arXiv:2502.16982 (decay, consistent_rms).

A matrix is [I, O]; ... are axes that number matrices (experts); *stack are those of layers; K validation sets.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxghost.config import ConfigError, OptimizerConfig
from maxghost.optimizers import orthogonal
from maxghost.optimizers.adamw import AdamW
from maxghost.optimizers.base import Matrix, Parameter, Response, UpdateRule, by_label, each_layer, to_come, widened
from maxghost.parallel.shardings import constrain_factor, slash_path


class Momentum(NamedTuple):
  """count: steps taken. mu: {label: momentum}, or a State of the same paths."""

  count: Any
  mu: Any


@dataclasses.dataclass(frozen=True)
class Muon(UpdateRule):
  """Muon on the matrices that say they are one (`Matrix`), AdamW on all other parameters.

  A matrix moves by -rate (D + weight_decay theta), with D = c NS(N / |N|), m_t = b m_(t-1) + (1 - b) g and
  N = b m_t / (1 - b^(t+1)) + (1 - b) g / (1 - b^t); NS: five Newton-Schulz iterations, in float32 or wider. c is the
  root of max(1, O / I), or consistent_rms times the root of max(I, O). As in MaxText, adam_eps is added to |N|, and
  mu_dtype is that of the momentum.

  All scores go along the path. matrices: pairs (label, Matrix), from `of_params`. nodes: of the path's quadrature.
  """

  state_keys: ClassVar = {"first_moment": "mu", "second_moment": "nu"}

  beta: float = 0.95
  weight_decay: float = 0.0
  consistent_rms: float = 0.0
  adam: AdamW = dataclasses.field(default_factory=AdamW)
  nodes: int = 2
  matrices: tuple[tuple[str, Matrix], ...] = ()

  @classmethod
  def from_config(cls, cfg: OptimizerConfig) -> "Muon":
    return cls(cfg.muon_beta, cfg.muon_weight_decay, cfg.muon_consistent_rms, AdamW.from_config(cfg))

  def path(self) -> "Muon":
    return self

  def marginal(self) -> "MuonMarginal":
    return MuonMarginal(*(getattr(self, field.name) for field in dataclasses.fields(self)))

  @property
  def others(self) -> UpdateRule:
    """The rule that scores all parameters that are no matrix."""
    return self.adam.marginal() if self.direction == "marginal" else self.adam.path()

  def of_params(self, params: nnx.State) -> "Muon":
    found = {slash_path(path): (variable, Matrix.of(variable)) for path, variable in nnx.to_flat_state(params)}
    for label, (variable, matrix) in found.items():
      _check_label(label, matrix, variable.shape)
    if not any(matrix for _, matrix in found.values()):
      said = "opt_type=muon makes the updates of matrices orthogonal, but none of the parameters to train is one"
      raise ConfigError(f"{said}: {', '.join(found) or 'there are none'}; use opt_type=adamw")
    return dataclasses.replace(self, matrices=tuple((label, matrix) for label, (_, matrix) in found.items() if matrix))

  def transformation(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    if not self.matrices:  # all would be left to AdamW
      raise ConfigError("opt_type=muon needs the Params to train: make_optimizer(cfg, steps, params)")
    parts = {"muon": self._of_matrices(learning_rate), "adam": self.adam.transformation(learning_rate)}
    labels = {label for label, _ in self.matrices}

    def part(name: str, tree):
      """The parameters of one optimizer: a State of a State, else {label: array}."""
      own = lambda label: (label in labels) == (name == "muon")  # noqa: E731
      if isinstance(tree, nnx.State):
        return nnx.filter_state(tree, lambda path, _: own(slash_path(path)))
      return tree and {label: x for label, x in by_label(tree).items() if own(label)}

    def init(params):
      return {name: optimizer.init(part(name, params)) for name, optimizer in parts.items()}

    def update(updates, state, params=None):
      moved, after = {}, {}
      for name, optimizer in parts.items():
        found, after[name] = optimizer.update(part(name, updates), state[name], part(name, params))
        moved |= by_label(found)
      return _like(updates, moved), after

    return optax.GradientTransformation(init, update)

  def _of_matrices(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    labels = dict(self.matrices)

    def init(params):
      zeros = optax.tree_utils.tree_zeros_like(params, dtype=jnp.dtype(self.adam.mu_dtype))
      return Momentum(jnp.zeros([], jnp.int32), zeros)

    def update(updates, state, params=None):
      moved, after, momentum = {}, {}, by_label(state.mu)
      for label, g in by_label(updates).items():
        step = functools.partial(self.moved, labels[label], state.count)
        moved[label], after[label] = each_layer(step, labels[label].stacked, g, momentum[label])
      return _like(updates, moved), Momentum(state.count + 1, _like(state.mu, after))

    decay, rate = optax.add_decayed_weights(self.weight_decay), optax.scale_by_learning_rate(learning_rate)
    return optax.chain(optax.GradientTransformation(init, update), decay, rate)

  def moved(self, matrix: Matrix, count, g, momentum):
    """(D, the momentum after the step) of one layer's matrices [..., *rows, *columns], by optax."""
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)  # of the matrix view
    found = optax.contrib.scale_by_muon(beta=self.beta, eps=self.adam.eps, weight_dimension_numbers=axes)
    view, momentum = (_placed(matrix, x) for x in (g, momentum))
    state: Any = optax.contrib.MuonState(count, momentum, jnp.asarray(orthogonal.COEFFICIENTS))
    with jax.default_matmul_precision("highest"):
      direction, state = cast(Any, widened(found).update(view, state))
    return (self.scale(*view.shape[-2:]) * direction).reshape(g.shape), state.mu.reshape(g.shape)

  def scale(self, inputs: int, outputs: int) -> float:
    """c of a matrix."""
    rms = self.consistent_rms
    return rms * math.sqrt(max(inputs, outputs)) if rms else math.sqrt(max(1, outputs / inputs))

  def reach(self, rates_S: np.ndarray, parameter: Parameter | None = None) -> np.ndarray | None:
    """Of a matrix by the weights of g in N: in its own step b / (1 - b^(t+1)) + 1 / (1 - b^t), k steps later
    b^(k+1) / (1 - b^(t+k+1)), both times 1 - b, with t = 1 for the first step. None for all: others are AdamW's."""
    if parameter is None:
      return None
    if not parameter.matrix:
      return self.adam.reach(rates_S)
    t = np.arange(1.0, len(rates_S) + 1)
    held_S = self.beta / (1 - self.beta ** (t + 1))
    own_S = held_S + 1 / (1 - self.beta**t)
    return rates_S + np.append(self.beta * to_come(held_S * rates_S, self.beta)[1:], 0) / own_S

  def reads(self, parameter: Parameter) -> tuple[str, ...]:
    return ("first_moment",) if parameter.matrix else ("first_moment", "second_moment")

  def scalars(self, count, clip_factor):
    """Those of AdamW (the clipping factor first), and the steps taken."""
    adam = self.adam.scalars(count, clip_factor)
    return jnp.append(adam, jnp.asarray(count, adam.dtype))

  def state_shapes(self, parameter: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
    return self.adam.state_shapes(parameter)  # a matrix has no second moment

  def response(self, parameter: Parameter, gradient, arrays: dict[str, Any], scalars) -> Response:
    """Raises ConfigError for a parameter of several axes that does not say whether it is a matrix."""
    _check_label(parameter.label, parameter.matrix, gradient.shape)
    if not parameter.matrix:
      return self.others.response(parameter, gradient, arrays, scalars)
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    depth = gradient.ndim - parameter.groups - parameter.matrix.rows - parameter.matrix.columns
    clip_factor, count = scalars[0].astype(wide), scalars[-1].astype(jnp.int32)
    momentum = arrays["first_moment"] if self.beta else jnp.zeros_like(arrays["first_moment"])  # it has no part in D
    of_matrix = MarginalResponse if self.direction == "marginal" else PathResponse
    return of_matrix(self, parameter.matrix, depth, clip_factor * gradient.astype(wide), momentum, count, clip_factor)

  def column_arrays(self, parameter: Parameter, value, gradient, arrays: dict[str, Any], response: Response) -> dict:
    if isinstance(response, PathResponse):
      return {"momentum": response.steps[1], "weight_decay": self.weight_decay * value}
    found = self.others.column_arrays(parameter, value, gradient, arrays, response)
    return found | {"weight_decay": self.adam.weight_decay * value}


@dataclasses.dataclass(frozen=True)
class PathResponse(Response):
  """The response of D averaged over the gradients x g, x from 0 to 1, by Gauss-Legendre quadrature.

  P_t = sum over nodes of weight D'(x g), each D' by JAX's derivative of optax's step. A matrix without momentum jumps
  from 0 to D(g) at x = 0; there P_t is the Shampoo form (`orthogonal.balanced`), for which P_t g = D(g) too.

  g: the clipped gradient [*stack, ..., *rows, *columns]. depth: number of stack axes; layers are computed one by one.
  """

  rule: Muon
  matrix: Matrix
  depth: int
  g: Any
  momentum: Any
  count: Any
  clip_factor: Any

  @functools.cached_property
  def steps(self) -> tuple[Any, Any]:
    """(D(g), D(0)); two calls more of Newton-Schulz."""
    both = lambda g, momentum: (self._moved(momentum, g), self._moved(momentum, jnp.zeros_like(g)))  # noqa: E731
    return each_layer(both, self.depth, self.g, self.momentum)

  def whole(self, gradient):
    """(D(g) - D(0)) / clip_factor, without quadrature."""
    moved, resting = self.steps
    return (moved - resting) / self.clip_factor

  def transpose(self, x):
    return self._map(lambda step, g: jax.vjp(step, g)[1], x)

  def apply(self, x):
    return self._map(lambda step, g: lambda x: (jax.jvp(step, (g,), (x,))[1],), x)

  def _map(self, linear: Callable, x):
    """The average of linear(D, x g), a function of arrays like g, applied to x [*lead, *stack, ...]."""
    lead = x.shape[: x.ndim - self.g.ndim]
    x_K = jnp.moveaxis(x.astype(self.g.dtype).reshape(-1, *self.g.shape), 0, self.depth)
    found_K = each_layer(functools.partial(self._layer, linear), self.depth, self.g, self.momentum, x_K)
    return jnp.moveaxis(found_K, self.depth, 0).reshape(*lead, *self.g.shape)

  def _layer(self, linear: Callable, g, momentum, x_K):
    """One layer; x_K [K, ..., *rows, *columns]."""
    own = (*range(-self.matrix.rows - self.matrix.columns, 0),)
    at_rest, still = (jnp.all(x == 0, own, keepdims=True) for x in (momentum, g))
    jumps = at_rest & ~still
    # Without momentum D has no derivative at 0: there the value of `along` is not used.
    step = functools.partial(self._moved, jnp.where(at_rest, jnp.ones_like(momentum), momentum))

    def along(total, quadrature):
      node, weight = quadrature
      pull = linear(step, node * g)
      return total + weight * jax.vmap(lambda x: pull(x)[0])(x_K), None

    nodes, weights = np.polynomial.legendre.leggauss(self.rule.nodes)  # on [-1, 1]
    points = jnp.asarray((nodes + 1) / 2, g.dtype), jnp.asarray(weights / 2, g.dtype)
    total, _ = jax.lax.scan(along, jnp.zeros_like(x_K), points)
    total = jnp.where(at_rest[None], 0, total)
    either = lambda: jnp.where(jumps[None], self._from_rest(g, x_K), total)  # noqa: E731
    return jax.lax.cond(jnp.any(jumps), either, lambda: total)

  def _from_rest(self, g, x_K):
    """P_t of a matrix without momentum: N is a multiple of g."""
    n, beta, t = self.matrix.view(g), self.rule.beta, self.count + 1
    share = (beta * (1 - beta) / (1 - beta ** (t + 1)) + (1 - beta) / (1 - beta**t)).astype(g.dtype)
    size = share * jnp.sqrt(jnp.sum(jnp.square(n), (-2, -1), keepdims=True)) + self.rule.adam.eps
    made = orthogonal.balanced(share * n / size, self.matrix.view(x_K))
    return (self.rule.scale(*n.shape[-2:]) * share / size[None] * made).reshape(x_K.shape)

  def _moved(self, momentum, g):
    return self.rule.moved(self.matrix, self.count, g, momentum)[0]


@dataclasses.dataclass(frozen=True)
class MarginalResponse(PathResponse):
  """The derivative D'(g) at the whole gradient, which D has without momentum too."""

  def whole(self, gradient):
    return self.apply(gradient)

  def _layer(self, linear: Callable, g, momentum, x_K):
    own = (*range(-self.matrix.rows - self.matrix.columns, 0),)
    nothing = jnp.all((momentum == 0) & (g == 0), own, keepdims=True)
    pull = linear(functools.partial(self._moved, jnp.where(nothing, jnp.ones_like(momentum), momentum)), g)
    return jnp.where(nothing[None], 0, jax.vmap(lambda x: pull(x)[0])(x_K))


@dataclasses.dataclass(frozen=True)
class MuonMarginal(Muon):
  """Muon scored by the derivative of its step."""

  direction = "marginal"


def _check_label(label: str, matrix: Matrix | None, shape: tuple[int, ...]) -> None:
  if matrix is None and len(shape) >= 2:
    said = f"opt_type=muon: {label} {list(shape)} does not say whether it is a matrix: give the Param the metadata"
    form = "matrix=(input axes, output axes), the numbers of its last axes, such as matrix=(1, 1)"
    raise ConfigError(f"{said} {form}, or matrix=() to leave it to AdamW")


def _placed(matrix: Matrix, x):
  """The view [..., I, O] of one layer's matrices; on a mesh its shorter side is whole on every device.

  Products with the transposed matrix are then sums over the devices, of the size of the shorter side's square.
  """
  view, axes = matrix.view(x), matrix.axes
  if axes is None or len(axes) != x.ndim:
    return view
  groups = view.ndim - 2
  dim, place = (groups, groups) if view.shape[-2] > view.shape[-1] else (groups + 1, groups + matrix.rows)
  return constrain_factor(view, dim, {i: i for i in range(groups)} | {dim: place}, axes, x.shape, "a matrix of Muon")


def _like(tree, labelled: dict[str, Any]):
  """A tree of the same paths with the arrays of {label: array}."""
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return jax.tree.map_with_path(lambda path, _: labelled[name(path)], tree)
