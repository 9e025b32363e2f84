"""AdamW: Loshchilov and Hutter, arXiv:1711.05101."""

import dataclasses
import inspect
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxghost.config.schema import OptimizerConfig
from maxghost.optimizers.base import Elementwise, Parameter, Response, RuleState, UpdateRule, to_come, widened


@dataclasses.dataclass(frozen=True)
class AdamW(UpdateRule):
  """AdamW with decay on every parameter.

  P_t = (1 - b1) / [(1 - b1^t) (sqrt(v_t / (1 - b2^t)) + eps)], entry by entry, with
  v_t = b2 v_{t-1} + (1 - b2) (clip_factor g)^2, which contains *this* step's gradient g.
  """

  state_keys: ClassVar = {"first_moment": "mu", "second_moment": "nu"}

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0
  mu_dtype: str = "float32"

  @classmethod
  def from_config(cls, cfg: OptimizerConfig) -> "AdamW":
    return cls(cfg.adam_b1, cfg.adam_b2, cfg.adam_eps, cfg.adam_weight_decay, cfg.mu_dtype)

  def transformation(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    mu_dtype, decay = jnp.dtype(self.mu_dtype), self.weight_decay
    return widened(optax.adamw(learning_rate, self.b1, self.b2, self.eps, mu_dtype=mu_dtype, weight_decay=decay))

  def path(self) -> "AdamWPath":
    return AdamWPath(*dataclasses.astuple(self))

  def marginal(self) -> "AdamWMarginal":
    return AdamWMarginal(*dataclasses.astuple(self))

  def reach(self, rates_S: np.ndarray, parameter: Parameter | None = None) -> np.ndarray:
    """(1 - b1^t) sum over k >= 0 of b1^k rate_{t+k} / (1 - b1^(t+k)), t = 1 for the first step: from the last one back.

    k steps after its own, a gradient has b1^k of its weight in the first moment, under that step's bias correction.
    """
    correction_S = 1 - self.b1 ** np.arange(1.0, len(rates_S) + 1)
    return correction_S * to_come(rates_S / correction_S, self.b1)

  def reads(self, parameter: Parameter) -> tuple[str, ...]:
    return ("second_moment",)

  def scalars(self, count, clip_factor):
    """[clip_factor, 1 - b1^t, 1 - b2^t] of step t = count + 1."""
    t = jnp.asarray(count + 1, float)  # float: float32, or float64 under jax_enable_x64
    corrections = (1 - jnp.asarray(b, t.dtype) ** t for b in (self.b1, self.b2))
    return jnp.stack([jnp.asarray(clip_factor, t.dtype), *corrections])

  def response(self, parameter: Parameter, gradient, arrays: dict[str, Any], scalars) -> Elementwise:
    g, correction1, correction2 = _wide(gradient, scalars)
    v = self.b2 * arrays["second_moment"].astype(g.dtype) + (1 - self.b2) * jnp.square(g)
    return Elementwise((1 - self.b1) / (correction1 * (jnp.sqrt(v / correction2) + self.eps)))

  def column_arrays(self, parameter: Parameter, value, gradient, arrays: dict[str, Any], response: Response) -> dict:
    return {"momentum": self.b1 / (1 - self.b1) * response.weighting() * arrays["first_moment"], "weight_decay": value}

  def column_scales(self, learning_rate, clip_factor) -> dict:
    return {"momentum": learning_rate, "weight_decay": learning_rate * self.weight_decay}

  def last_update(self, value, arrays: dict[str, Any], state: RuleState) -> Any:
    """-rate (A + weight_decay theta) from the moments that made A, and from the value after it; 0 before any step."""
    wide = jnp.promote_types(value.dtype, jnp.float32)
    m, v = (arrays[name].astype(wide) for name in ("first_moment", "second_moment"))
    _, correction1, correction2 = (x.astype(wide) for x in self.scalars(jnp.maximum(state.count, 1) - 1, 1.0))
    rate = jnp.asarray(state.last_rate, wide)
    moved = m / correction1 / (jnp.sqrt(v / correction2) + self.eps)
    return -rate * (moved + self.weight_decay * value) / (1 - rate * self.weight_decay)


@dataclasses.dataclass(frozen=True)
class AdamWPath(AdamW):
  """AdamW with the response of the whole step: P_t g = (D(clip_factor g) - D(0)) / clip_factor, entry by entry.

  D(g) = m_t / [(1 - b1^t) (sqrt(v_t / (1 - b2^t)) + eps)], in which both moments contain g. AdamW's own response holds
  v_t fixed, so it credits a large gradient with the movement but not with the larger v_t that brakes the momentum. With
  R = sqrt(v_t / (1 - b2^t)), and R0 the same without g, R - R0 = (1 - b2) / (1 - b2^t) (clip_factor g)^2 / (R + R0), so
  P_t = [(1 - b1) / (1 - b1^t) - D(0) (R - R0) / (clip_factor g)] / (R + eps), which divides by nothing small.
  The momentum column is D(0), the step that would have been taken without a gradient.
  """

  direction = "path"

  def reads(self, parameter: Parameter) -> tuple[str, ...]:
    return ("first_moment", "second_moment")

  def response(self, parameter: Parameter, gradient, arrays: dict[str, Any], scalars) -> Elementwise:
    """Its size is AdamW's own response, which is positive."""
    g, correction1, correction2 = _wide(gradient, scalars)
    m, v = (arrays[name].astype(g.dtype) for name in self.reads(parameter))
    share, root0 = (1 - self.b2) / correction2, jnp.sqrt(self.b2 * v / correction2)
    root = jnp.sqrt(jnp.square(root0) + share * jnp.square(g))
    size = (1 - self.b1) / (correction1 * (root + self.eps))
    resting = self.b1 * m / (correction1 * (root0 + self.eps))
    return Elementwise(self._factor(g, resting, share, root0, root, size), size, resting)

  def _factor(self, g, resting, share, root0, root, size):
    """P_t at the clipped gradient g. size: AdamW's own response. share: (1 - b2) / (1 - b2^t). root, root0: R, R0."""
    return size - resting * _over(share * g, root + root0) / (root + self.eps)

  def column_arrays(self, parameter: Parameter, value, gradient, arrays: dict[str, Any], response: Response) -> dict:
    assert isinstance(response, Elementwise)
    return {"momentum": response.resting, "weight_decay": value}


@dataclasses.dataclass(frozen=True)
class AdamWMarginal(AdamWPath):
  """AdamW with the derivative of the whole step: P_t = D'(clip_factor g), entry by entry.

  With R as in `AdamWPath`, dR/dg = (1 - b2) / (1 - b2^t) clip_factor g / R, so
  P_t = [(1 - b1) / (1 - b1^t) - D(clip_factor g) dR/dg] / (R + eps).
  """

  direction = "marginal"

  def _factor(self, g, resting, share, root0, root, size):
    moved = resting * (root0 + self.eps) / (root + self.eps) + size * g
    return size - moved * _over(share * g, root) / (root + self.eps)


def _wide(gradient, scalars):
  """(the clipped gradient, both bias corrections) in float32 or wider."""
  g = gradient.astype(jnp.promote_types(gradient.dtype, jnp.float32))
  clip_factor, correction1, correction2 = (scalars[i].astype(g.dtype) for i in range(3))
  return clip_factor * g, correction1, correction2


def _over(x, roots):
  """x / roots; 0 where the squares under the roots are too small for their dtype: R is then far below eps."""
  return jnp.where(roots > 0, x / jnp.where(roots > 0, roots, 1), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdamState:
  """The state before a step that directions 'adam', 'path' and 'marginal' need; the first moments for the last two.

  Moments are {path: array}. count: steps taken. clip_factor: the one assumed for this step. constants: known
  (b1, b2, eps) of the optimizer, which must be those of the rule.
  """

  second_moments: dict[str, Any]
  count: Any
  clip_factor: Any = 1.0
  first_moments: dict[str, Any] | None = None
  constants: frozenset = dataclasses.field(default=frozenset(), metadata={"static": True})

  @classmethod
  def from_optax(cls, optimizer, *, count=None, clip_factor=1.0) -> "AdamState":
    """Reads an `nnx.Optimizer` made with `optax.adamw` or `optax.adam`, or their optax state, with Adam's own count.

    Raises ValueError for another optimizer, or hidden constants. In an optax state, some look like Adam (radam, yogi).
    """
    state = getattr(optimizer, "opt_state", optimizer)
    found = optax.tree_utils.tree_get_all_with_path(state, "nu")
    names = {getattr(path[-1], "tuple_name", "ScaleByAdamState") for path, _ in found}
    steps = _changing(_steps(getattr(getattr(optimizer, "tx", None), "update", None), []))
    names |= {" with ".join((name, *filter(own.get, ("nesterov", "eps_root")))) for name, own in steps}
    if others := sorted(names - {"ScaleByAdamState", "scale_by_adam"}):
      raise ValueError(f"the optimizer has {', '.join(others)}, which is not Adam: use optax.adam or optax.adamw")
    if found and state is not optimizer and not steps:
      said = "the constants of the optimizer are hidden (by optax.inject_hyperparams or jax.jit): give its opt_state,"
      raise ValueError(f"{said} and set adam_b1, adam_b2 and adam_eps of the engine's configuration to them")
    constants = frozenset(tuple(float(own[name]) for name in ("b1", "b2", "eps")) for _, own in steps)
    state = AdamW().read(state, count=count, clip_factor=clip_factor)
    return cls(state.arrays["second_moment"], state.count, state.clip_factor, state.arrays["first_moment"], constants)

  def rule_state(self, rule: UpdateRule | None = None) -> RuleState:
    """Raises ValueError for constants that are not those of `rule`, and for a rule that is not Adam's."""
    if self.constants and not (rule is None or rule.identity or isinstance(rule, AdamW)):
      raise ValueError(f"the optimizer is Adam, but the engine's cfg has opt_type={rule.name}: give state= of its own")
    if isinstance(rule, AdamW) and (others := self.constants - {own := (rule.b1, rule.b2, rule.eps)}):
      said = f"(b1, b2, eps) of the optimizer are {', '.join(map(str, sorted(others)))}, but those of the engine {own}"
      raise ValueError(f"{said}: set adam_b1, adam_b2 and adam_eps of its configuration to the optimizer's")
    first = {} if self.first_moments is None else {"first_moment": self.first_moments}
    return RuleState({"second_moment": self.second_moments} | first, self.count, self.clip_factor)


# Transformations of optax that run others, and those around Adam that leave its response to the gradient as it is.
_WRAPPERS = ("chain", "named_chain", "masked", "partition", "flatten", "conditionally_transform", "inject_hyperparams")
_BEFORE = ("clip_by_global_norm", "identity", "zero_nans")
_AFTER = ("add_decayed_weights", "add_noise", "identity", "reduce_on_plateau", "scale", "scale_by_schedule")


def _changing(steps: list) -> list:
  """Adam and the steps that change its response; in a chain without Adam, those whose state looks like Adam's."""
  first = next((i for i, (name, _) in enumerate(steps) if name == "scale_by_adam"), None)
  if first is None:
    return [step for step in steps if step[0].startswith("scale_by_") and step[0] not in _AFTER]
  before = [step for step in steps[:first] if step[0] not in _BEFORE]
  named = [(f"{name} before Adam" if name in _AFTER else name, own) for name, own in before]
  return named + [step for step in steps[first:] if step[0] not in _AFTER]


def _steps(x: Any, seen: list) -> list[tuple[str, Any]]:
  """(name, what it closes over) of each step in an optax update, in order; in groups of parameters, the `_changing`."""
  if any(x is one for one in seen):
    return []
  seen.append(x)
  found, inner = [], vars(x.__self__) if isinstance(x, types.MethodType) else x  # optax.MultiSteps
  if isinstance(x, types.FunctionType):
    name, inner = x.__qualname__.split(".")[0], inspect.getclosurevars(x).nonlocals
    found = [(name, inner)] if x.__name__ == "update_fn" and name not in _WRAPPERS else []
    if not f"{x.__module__}.".startswith(("optax.", "maxghost.")):  # the user's: a schedule or mask has one argument
      found, inner = [(name, {})] if x.__code__.co_argcount - len(x.__defaults__ or ()) > 1 else [], {}
  inner = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, (tuple, list)) else ()
  parts = [_steps(one, seen) for one in inner]
  return found + [step for part in parts for step in (_changing(part) if isinstance(x, dict) else part)]
