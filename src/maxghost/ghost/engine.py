"""`GhostEngine`: per-example scores of any nnx model. K validation sets, n examples, T positions."""

import collections
import contextlib
import copy
import dataclasses
import dis
import functools
import gc
import re
import sys
import types
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from maxghost.config import Config, plugins
from maxghost.config.values import did_you_mean
from maxghost.ghost import ledger, rules, schedules
from maxghost.ghost.attach import matching, parameters, prepare_twin
from maxghost.ghost.directions import DirectionSpec
from maxghost.ghost.schedules.forward_mode import refuse_custom_vjp
from maxghost.objectives import Objective, as_objective, create
from maxghost.objectives.base import refuse_loss
from maxghost.optimizers import AdamState, RuleState, by_label, direction_rule

MAX_COMPILED = 16  # programs that a GhostEngine keeps
_BOUND = (types.MethodType, types.CellType, functools.partial, property, staticmethod, classmethod)
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_LIBRARIES = sys.stdlib_module_names | {"flax", "jax", "maxghost", "numpy", "optax"}


@contextlib.contextmanager
def _own_names():
  """Errors name the arguments of GhostEngine, not keys of the trainer."""
  try:
    with refuse_custom_vjp():
      yield
  except ValueError as error:
    text = str(error).replace("ghost_schedule=forward_mode", "engine='jvp'")
    text = text.replace("ghost_schedule=two_pass", "engine='graddotprod' or 'perexample'")
    raise ValueError(re.sub(r"\bghost_(schedule|direction|rank|exclude)\b", r"\1", text)) from error


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GhostResult:
  """Scores of one batch. With several validation sets, arrays have a leading set axis, [K, n] for [n].

  dot: f32[n], <grad l_i, u> with l_i the weighted mean loss of example i (u = the gradient of the validation loss for
    direction 'sgd'). 0 for an example without weight.
  per_param: {path: [*stack(, K), n]}; the sum over paths and layers is dot. Engine perexample sums stacked layers:
    [n] or [K, n]. Empty for engine 'jvp'.
  share: f32[n], w_i, the example's share of the batch's weight; without a set axis.
  additive: f32[n], w_i * dot_i; can be summed over examples.
  per_position: like additive with a trailing position axis, or None. Engine graddotprod credits the position where a
    parameter was used, engine jvp the position of the loss.
  grads: State of the gradient of the batch loss, with the paths of nnx.Param.
  loss, val_loss: nats. captured: {path: [*stack(, K)]}, share of |u|^2 held by rank-r factors.
  """

  dot: jax.Array
  share: jax.Array
  additive: jax.Array
  per_param: dict
  per_position: jax.Array | None
  grads: nnx.State
  loss: jax.Array
  val_loss: jax.Array
  captured: dict


class GhostEngine:
  """Scores training examples by the dot product of their gradient with a validation direction.

  Arguments that are None are those of cfg, where ghost_direction=auto, the default, is 'sgd', which needs no state.
  Raises ValueError for an unknown name, an unsupported combination, and whatever `attach` raises for the model.

  Keeps the last MAX_COMPILED programs; docs/engine.md says which calls share one.
  """

  @_own_names()
  def __init__(self, cfg: Config | None = None, *, schedule: str | None = None, direction: str | None = None,
               rank: int | None = None, engine: str | None = None, exclude: Sequence[str] | None = None,
               per_position: bool = False):  # fmt: skip
    if not isinstance(cfg := cfg or Config(), Config):
      raise ValueError(f"cfg={cfg!r} is no configuration: give config.load(...), and direction= and others by name")
    self.schedule = _known("schedule", schedule or cfg.ghost.passes, plugins.SCHEDULES)
    self.engine = _known("engine", engine or cfg.ghost.engine, tuple(plugins.ENGINES))
    self._schedule = self.schedule if self.engine == "graddotprod" else plugins.ENGINES[self.engine]
    self.rank = cfg.ghost.ghost_rank if rank is None else rank
    curvature = "none" if direction else cfg.ghost.ghost_curvature
    direction = _known("direction", direction or cfg.ghost.ghost_direction.replace("auto", "sgd"), plugins.directions())
    direction, curvature = plugins.directed(direction, curvature)
    if curvature == "secant":
      raise ValueError("ghost_curvature=secant compares steps of a run; give a direction=, such as 'second_order'")
    self.spec = direction_spec(cfg, direction, self.rank, curvature)
    exclude = cfg.ghost.ghost_exclude if exclude is None else exclude
    self.exclude = (exclude,) if isinstance(exclude, str) or not isinstance(exclude, Iterable) else tuple(exclude)
    if wrong := [pattern for pattern in self.exclude if not isinstance(pattern, str)]:
      raise ValueError(f"exclude={wrong[0]!r}: give patterns of parameter paths, such as '*/bias'")
    self.per_position = per_position
    self.segment_lengths, self.remat_policy = cfg.model.stacked_segments, cfg.model.remat_policy
    self.default_loss = create(cfg).validation()
    self._refuse(
      schedule=(self.schedule != "two_pass", f"schedule={self.schedule}", "schedule=two_pass"),
      rank=(self.rank > 0, f"rank={self.rank}", "rank=0"),
      early_rank=(self.rank > 0 and not self.spec.in_backward, f"rank={self.rank}", "rank=0"),
      hessian=(self.spec.early, "direction=second_order", "direction=auto"),
      positions=(per_position, "per_position=True", "per_position=False"),
    )
    self._compiled: collections.OrderedDict = collections.OrderedDict()

  @_own_names()
  def score(self, model, train_batch, val_batch, *, loss_fn: Callable | None = None,
            state: RuleState | AdamState | None = None, delta: nnx.State | None = None) -> GhostResult:  # fmt: skip
    """Scores every example of `train_batch` against the gradient of the mean loss over `val_batch`.

    model: is not changed. train_batch, val_batch: pytrees of arrays with the example axis first; a list of val batches:
    K sets. loss_fn(model, batch) -> (losses, weights), each [n] or [n, T], or losses alone, whose weights are 1; by
    default next-token cross-entropy on MaxText-style batches. state: the optimizer's before this step, such as
    AdamState, for directions that depend on the optimizer. delta: for direction 'second_order', the step's update of
    the parameters as a State. Raises ValueError for any of these that is missing, needless or has another form, and for
    a validation batch that is empty or without weight.
    """
    many = isinstance(val_batch, list)
    val_batches = tuple(val_batch) if many else (val_batch,)
    check_batches(train_batch, val_batches, self._schedule)
    state = state.rule_state(self.spec.rule) if isinstance(state, AdamState) else state
    self._check_inputs(val_batches, state, delta)
    if loss_fn is None and not hasattr(type(model), "hidden"):  # a method; others may have a layer of that name
      raise ValueError("loss_fn= is missing; only models of maxghost have a default, next-token cross-entropy")
    if not callable(loss_fn := self.default_loss if loss_fn is None else loss_fn):
      raise ValueError(f"loss_fn={loss_fn!r} is no function: give loss_fn(model, batch) -> (losses, weights)")
    if self.engine == "perexample" and (unit := as_objective(loss_fn).rows_per_unit) > 1:
      raise ValueError(f"engine=perexample takes each row alone, but the loss has units of {unit} rows; use engine=jvp")
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((params, rest, train_batch, val_batch, state))):
      raise ValueError("score compiles its own program: call it outside of jax.jit, nnx.jit and other transformations")
    if delta is not None and _shapes(delta) != _shapes(params):
      raise ValueError("delta= needs the paths, shapes and dtypes of nnx.state(model, nnx.Param): give a State like it")
    if wrong := [label for label, x in by_label(params).items() if not jnp.issubdtype(x.dtype, jnp.floating)]:
      said = f"{', '.join(wrong)}: complex and integer Params have no scores. Keep real and imaginary parts"
      raise ValueError(f"{said} in Params of their own, integers in an nnx.Variable")
    identity, held = _identity(loss_fn, *dict.fromkeys(getattr(node, "type", None) for node in graphdef.nodes))
    all_rows = np.ones(jax.tree.leaves(train_batch)[0].shape[0], bool)
    key = (graphdef, identity, _shapes(train_batch), _shapes(val_batches), many, *rules.RULES.values())
    try:
      hash(key)
    except TypeError as error:
      raise ValueError(f"the model has a static attribute that cannot be hashed ({error}); make it a tuple") from error
    if key not in self._compiled:
      refuse_loss(model, as_objective(loss_fn), train_batch)
      program = self._compile(model, graphdef, as_objective(loss_fn), train_batch, val_batches, many)
      if self._schedule == "concat" and state is None:  # which holds no direction for `_refuse_incomplete`
        other = copy.copy(self)
        other.schedule, other._schedule, other._compiled = "two_pass", "two_pass", collections.OrderedDict()
        other.score(model, train_batch, val_batch, loss_fn=loss_fn)
      self._compiled[key] = program, held, set()
    self._compiled.move_to_end(key)
    while len(self._compiled) > MAX_COMPILED:
      self._compiled.popitem(last=False)
    program, _, checked = self._compiled[key]
    run = functools.partial(program, params, rest, train_batch, val_batches, state, delta)
    result, (total, weighted), largest, sums = run(all_rows)
    if total <= 0 and weighted:
      raise ValueError(f"the weights of train_batch add up to {total}: a mean loss needs a sum above 0")
    # A score that is 0 (below a head of zeros) or NaN would hide that rows read each other.
    if found := {label for label, (own, _) in largest.items() if label not in checked and 0 < own < np.inf}:
      unit = np.arange(len(all_rows)) // as_objective(loss_fn).rows_per_unit
      bits = int(unit[-1]).bit_length()  # any two units differ in a bit of their numbers
      for counted in (unit >> place & 1 == one for place in range(bits) for one in (0, 1)):
        _refuse_coupled(run(counted)[2])
    if sums.keys() - checked:
      _refuse_incomplete(jax.device_get(sums), checked)
    checked |= found
    if not jnp.isfinite(loss := result.val_loss).all():
      raise ValueError(f"validation loss is {loss}: a validation batch needs tokens that count, finite losses")
    return result

  def _check_inputs(self, val_batches, state, delta) -> None:
    if not val_batches:
      raise ValueError("val_batch is empty; give at least one row")
    direction = self.spec.rule.direction
    if self.spec.in_backward and not isinstance(state, RuleState):
      raise ValueError(f"direction '{direction}' needs state=AdamState.from_optax(optimizer) of before this step")
    if state is not None and not self.spec.in_backward:
      raise ValueError(f"direction '{direction}' reads no state such as AdamState; leave it out, or use 'adam'")
    if (delta is None) == self.spec.early:
      raise ValueError("direction 'second_order' needs delta=State of the step's update, and only it does")
    self._refuse(sets=(len(val_batches) > 1, f"val_batch of {len(val_batches)} sets", "one set"))

  def _refuse(self, **asked: tuple[bool, str, str]) -> None:
    """Raises ValueError for what the schedule does not support. asked: {what: (whether, argument, alternative)}."""
    names = {schedule: f"engine={name}" for name, schedule in plugins.ENGINES.items()}
    if self.engine == "graddotprod":
      names = {name: f"schedule={name}" for name in plugins.SCHEDULES}
    for problem in plugins.scoring_problems(self._schedule, names, asked):
      raise ValueError(problem)

  def _compile(self, model, graphdef, loss_fn, train_batch, val_batches, many: bool = True):
    twin, views = None, parameters(model)
    left_out, rule = matching(views, self.exclude), self.spec.rule
    narrow = any("float16" in str(getattr(x, "dtype", "")) for _, x in nnx.iter_graph(model))  # gradients may stall
    scored = tuple(label for label in views if label not in left_out)
    if self.engine == "graddotprod":
      leading, of_val = (jax.tree.leaves(batch)[0].shape for batch in (train_batch, val_batches[0]))
      if self.per_position and len(leading) < 2:
        raise ValueError(f"per_position=True needs arrays [n, T] in the batch; its first one has shape {leading}")
      of_batch = {"num_positions": leading[1] if self.per_position else None, "num_val": of_val[0]}
      of_self = {"spec": self.spec, "exclude": self.exclude, "schedule": self.schedule}
      twin = prepare_twin(model, train_batch, loss_fn, num_sets=len(val_batches), **of_batch, **of_self)

    def run(params, rest, train_batch, val_batches, state, delta, counted) -> tuple[GhostResult, tuple, dict, dict]:
      settings = schedules.Settings(segment_lengths=self.segment_lengths, remat_policy=self.remat_policy)
      shapes = {x: param.shape for x, param in by_label(params).items() if x in scored}
      fits = lambda x, name: getattr(state.of(x).get(name), "shape", None) == shapes[x]  # noqa: E731
      lacking = {x: [name for name in rule.reads(views[x]) if not fits(x, name)] for x in (shapes if state else ())}
      if names := " and ".join(sorted(set().union(*lacking.values()))):
        said = f"direction '{rule.direction}' needs fitting {names} in state=: AdamState.from_optax, or leave out with"
        raise ValueError(f"{said} ghost_exclude what its optimizer does: {', '.join(x for x in lacking if lacking[x])}")
      problem = schedules.Problem(
        schedule=self._schedule, model=schedules.Model(graphdef, params, rest),
        loss=_counting(loss_fn, counted) if twin else loss_fn, batch=train_batch, twin=twin,
        val_losses=(loss_fn,) * len(val_batches), val_batches=val_batches,
        parameters=views, scored=scored, rule=rule, state=state, update=lambda grads: (state, delta), settings=settings,
      )  # fmt: skip
      out = schedules.score(problem)
      masks = [rows[:, None] if self.per_position else rows for rows in (counted, ~counted)]
      scores = out.passed.scores if twin else {}
      largest = {label: [jnp.abs(jnp.where(m, v, 0)).max() for m in masks] for label, v in scores.items()}
      known = by_label(out.passed.grads), out.parts, out.passed.facts
      checkable = twin.scored if twin and any(known[1:]) and not narrow else ()
      sums = {p.label: (*ledger.score_sums((p,), scores), ledger.used((p,), *known)) for p in checkable}
      return self._result(out, many), (out.passed.weights.sum(), out.passed.weights.any()), largest, sums

    return jax.jit(run)

  def _result(self, scored: schedules.Scored, many: bool) -> GhostResult:
    out, per_param, additive = scored.passed, scored.passed.scores, scored.additive
    if self.per_position and additive.ndim < 3:
      found = f"per_position=True needs losses of each position, but those of the batch have shape {out.losses.shape}"
      raise ValueError(f"{found}: return losses [n, T], or use per_position=False")
    if with_positions := additive.ndim > 2:
      per_param, additive = {label: v.sum(-1) for label, v in per_param.items()}, additive.sum(-1)
    weights = out.weights.reshape(out.weights.shape[0], -1).sum(-1)
    share = weights / jnp.maximum(weights.sum(), jnp.finfo(weights.dtype).tiny)
    per_share = jnp.where(share != 0, 1 / jnp.where(share != 0, share, 1), 0)
    by_set = lambda x, axis=0: x if many else x.squeeze(axis)  # noqa: E731
    dot = {label: v * jnp.expand_dims(per_share, range(v.ndim - 1)) for label, v in per_param.items()}
    return GhostResult(
      dot=by_set(additive * per_share[None]), share=share, additive=by_set(additive),
      per_param={label: by_set(v, v.ndim - 2) for label, v in dot.items()},
      per_position=by_set(scored.additive) if self.per_position and with_positions else None, grads=out.grads,
      loss=out.loss, val_loss=by_set(scored.val_loss),
      captured={label: by_set(v, -1) for label, v in scored.captured.items()},
    )  # fmt: skip


def direction_spec(cfg: Config, direction: str, rank: int = 0, curvature: str = "none") -> DirectionSpec:
  """The DirectionSpec of a `ghost_direction`, with the optimizer's constants; 'auto' is the optimizer's own."""
  early = curvature == "hessian"  # which needs the whole step
  return DirectionSpec(direction_rule(cfg.optimizer, "sgd" if early else direction), rank, early=early)


def _known(name: str, value: str, choices: Sequence[str]) -> str:
  if value not in choices:
    raise ValueError(f"{name}={value}: use one of {', '.join(choices)}{did_you_mean(str(value), choices)}")
  return value


def check_batches(train_batch, val_batches: tuple = (), schedule: str = "two_pass") -> None:
  """Raises ValueError for batches that are no arrays of numbers with the examples along the first axis."""
  for name, batch in (("train_batch", train_batch), *(("val_batch", one) for one in val_batches)):
    if any(isinstance(batch, form) != isinstance(train_batch, form) for form in (list, tuple)):
      said = f"{name} is a {type(batch).__name__}, but train_batch a {type(train_batch).__name__}"
      raise ValueError(f"{said}: a list holds several validation batches, [first, second]; a tuple is one batch")
    leaves = jax.tree.leaves(batch)
    wrong = ["a scalar" if hasattr(x, "shape") else type(x).__name__ for x in leaves if not getattr(x, "shape", ())]
    wrong += [f"an array of {x.dtype}" for x in leaves if getattr(getattr(x, "dtype", None), "kind", "f") in "OSUMm"]
    rows = [] if wrong else sorted({x.shape[0] for x in leaves})
    if len(rows) != 1:
      found = wrong[0] if wrong else f"arrays of {' and '.join(map(str, rows))} rows" if rows else "nothing"
      raise ValueError(f"{name} must hold arrays of numbers with the examples along the first axis; it holds {found}")
    if not rows[0]:
      raise ValueError(f"{name} is empty; give at least one row")
    if schedule == "concat" and _shapes(batch, 1) != _shapes(train_batch, 1):
      raise ValueError("schedule=concat needs batches of equal arrays, dtypes and rows' shapes: use schedule=two_pass")


def _identity(*roots: object):
  """(key that identifies a loss function and the classes of a model by all that they read, objects to keep alive while
  the key is used)."""
  held, names, size = {id(root): root for root in roots}, {"__call__"}, None
  while size != (size := (len(held), len(names))):
    for x in [*held.values()]:
      held |= {id(part): part for part in _read(x, names)}
  places = {one: place for place, one in enumerate(held)}

  def of(x, parts: list):
    made_anew = parts and isinstance(x, (types.FunctionType, *_BOUND, *_CONTAINERS))
    own = type(x) if made_anew else id(x) if jax.tree_util.all_leaves([x]) else (type(x), jax.tree.structure(x))
    return own, x.tobytes() if isinstance(x, np.ndarray) else None, *(places[id(part)] for part in parts)

  return tuple(of(x, _read(x, names)) for x in held.values()), held


def _read(x, names: set) -> list:
  """What a program of a loss function holds of one of its objects. names: of attributes that code reads; it adds its
  own."""
  if isinstance(x, (Objective, jax.Array, np.ndarray)) or _of_library(x):
    return []
  if isinstance(x, types.CodeType):
    names.update(x.co_names, (name for name in x.co_consts if isinstance(name, str)))
    return [part for part in x.co_consts if isinstance(part, types.CodeType)]
  if isinstance(x, types.FunctionType):
    read = (x.__globals__[name] for name in _globals(x.__code__) if name in x.__globals__)
    return [x.__code__, x.__closure__, x.__defaults__, x.__kwdefaults__, *read]
  if isinstance(x, (*_BOUND, *_CONTAINERS)):
    return [*x, *x.values()] if isinstance(x, dict) else gc.get_referents(x)
  if not jax.tree_util.all_leaves([x]):  # such as a model, that changes in place
    return jax.tree.leaves(x)
  holders = x.__mro__ if isinstance(x, type) else (x, *type(x).__mro__)
  held = collections.ChainMap(*(dict(vars(x)) for x in holders if hasattr(x, "__dict__") and not _of_library(x)))
  read = sorted(names & held.keys())
  return [getattr(x, n, None) if isinstance(held[n], types.MemberDescriptorType) else held[n] for n in read]


def _of_library(x) -> bool:
  """Whether a function, a class or a module is not of the user's own files, and so stays as it is."""
  if not isinstance(x, (types.FunctionType, type, types.ModuleType)):
    return False
  top = str(x.__name__ if isinstance(x, types.ModuleType) else x.__module__).partition(".")[0]
  return top in _LIBRARIES or "-packages" in (getattr(sys.modules.get(top), "__file__", None) or "")


@functools.cache
def _globals(code: types.CodeType) -> list[str]:
  """Names of the globals that code loads; its `co_names` are also those of attributes."""
  inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _globals(part)]
  return [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"] + inner


def _counting(objective: Objective, counted) -> Objective:
  """The objective with weight 0 for some rows. counted: bool[n]; rows after these count ('concat': of validation)."""

  def measured(method: Callable, *args):
    losses, weights, metrics = method(*args)
    rows = jnp.pad(counted, (0, len(weights) - len(counted)), constant_values=True)
    return losses, jnp.where(rows if weights.ndim == 1 else rows[:, None], weights, 0), metrics

  part, names = copy.copy(objective), {"measured", "measured_head"} & set(dir(objective))
  vars(part).update({name: functools.partial(measured, getattr(objective, name)) for name in names})
  return part


def _refuse_coupled(largest: dict) -> None:
  """Raises ValueError if the losses of some rows score others. largest: {label: sizes of their scores, of others'}."""
  least = 1e-6 * np.nanmax([own for own, _ in largest.values()])
  if coupled := ", ".join(label for label, (_, other) in largest.items() if other > least):
    said = f"{coupled}: scores of a row depend on the losses of other rows. Give layers the batch axis first, and keep"
    said += " rows apart and in order (no BatchNorm in training mode, no negatives from the batch), or name these paths"
    raise ValueError(f"{said} in ghost_exclude, or use ghost_schedule=forward_mode")


def _refuse_incomplete(sums: dict, checked: set) -> None:
  """Raises ValueError where scores do not add up. sums: {label: (of scores, of their sizes, <g, u>)}, [K] each."""
  rest = 2e-3 * np.max(np.nan_to_num(np.abs([x[1:] for x in sums.values()])), initial=0)  # rounding, where g is 0
  near = {label: np.abs(x - used) <= 0.01 * size + rest for label, (x, size, used) in sums.items()}  # False for NaN
  far = [label for label, (*_, used) in sums.items() if np.any(np.isfinite(used) & ~near[label])]
  if labels := ", ".join(label for label in far if label not in checked):
    said = f"{labels}: scores do not add up to <gradient, direction>: the model differentiates the layer or sets its"
    raise ValueError(f"{said} state, or its rule is wrong. Use ghost_exclude, or ghost_schedule=forward_mode")


def _shapes(batch, first_axis: int = 0):
  leaves, tree = jax.tree.flatten(batch)
  return tree, tuple((jnp.shape(x)[first_axis:], jnp.result_type(x)) for x in leaves)
