"""The state of a run: `TrainStateNNX`, which a step changes, and `Position`, the rest of a checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from maxghost import adapters, models
from maxghost.config.schema import Config, ModelConfig
from maxghost.data import merge_states
from maxghost.ghost.attach import matching
from maxghost.ghost.schedules.base import of_each_set
from maxghost.objectives import Objective
from maxghost.optimizers import make_optimizer
from maxghost.parallel import distributed
from maxghost.parallel.shardings import Layout, map_state, slash_path, use
from maxghost.training import host_memory
from maxghost.training.devices import compiler_options

REFERENCE = "reference_model"  # of a train state
Split = tuple[nnx.GraphDef, nnx.State]


class TrainStateNNX(nnx.Module):
  """Model, optimizer and the clipping factor of the previous step."""

  def __init__(self, model: nnx.Module, tx: optax.GradientTransformation | None = None, *,
               trainable: nnx.filterlib.Filter = nnx.Param, num_stored: int = 0, carries: bool = False,
               reference_model: nnx.Module | None = None):  # fmt: skip
    """trainable: the Params that the optimizer changes. num_stored: number of validation gradients that later steps
    need, to score against them (ghost_val_every > 1) or to measure the curvature (ghost_curvature=secant). carries: see
    `carry`. reference_model: one that no step changes; it may share untrained Variables."""
    self.model, self.reference_model = model, reference_model
    self.optimizer = None if tx is None else nnx.Optimizer(model, tx, wrt=trainable)
    self.clip_factor = nnx.Variable(jnp.ones((), float))
    if num_stored:
      params = [v for _, v in nnx.to_flat_state(nnx.state(model, trainable))] * num_stored
      zeros = [nnx.Variable(jnp.zeros(v.shape, v.dtype), axes=v.get_metadata().get("axes")) for v in params]
      self.stored_gradients = nnx.List(zeros)
    self.carried = nnx.Variable(jnp.zeros((), float)) if carries else None

  def apply_gradients(self, grads) -> None:
    """Updates the parameters. grads: State with their paths. Raises RuntimeError for a state without an optimizer."""
    if self.optimizer is None:
      raise RuntimeError("this train state was made without an optimizer; it cannot apply gradients")
    self.optimizer.update(self.model, grads)

  @property
  def step(self):
    """Steps taken, uint32."""
    assert self.optimizer is not None, "only a state that is trained counts steps"
    return self.optimizer.step[...]


def create(cfg: Config, teacher: ModelConfig | None = None) -> TrainStateNNX:
  """A fresh state: weights from init_weights_seed, zero moments, step 0. teacher: the reference, if another model."""
  model, num_stored = adapters.create(cfg), len(cfg.val_sets) * cfg.ghost.num_stored
  trained = trainable(cfg, model)
  tx = make_optimizer(cfg.optimizer, cfg.run.steps, nnx.state(model, trained))
  carries = bool(num_stored) and cfg.ghost.carries_curvature
  start = adapters.create(cfg) if cfg.reference == "start" else None
  frozen = models.create(teacher, rngs=nnx.Rngs(0)) if teacher else start
  return TrainStateNNX(model, tx, trainable=trained, num_stored=num_stored, carries=carries, reference_model=frozen)


def referenced(objective: Objective | tuple[Objective, ...], train_state: TrainStateNNX, *batches) -> tuple:
  """The batches with what each objective reads from `reference_model`, else from the model without its adapters."""
  pairs = [*zip(of_each_set(objective, batches), batches, strict=True)]
  if not any(one.reference for one, _ in pairs):
    return batches
  reference = train_state.reference_model or adapters.disabled(train_state.model)
  return tuple(one.from_reference(reference, batch) for one, batch in pairs)


def carry(state: nnx.State, turned: list[jax.Array]) -> nnx.State:
  """The state before a step that draws new validation rows, with the curvature measured on the old rows. turned: the
  gradients of the old rows before the last step minus those after it (`step.make_closing`), which replace the stored
  gradients; `carried` is 1 until the step is done."""

  def leaf(path, v):
    if path[0] == "stored_gradients":
      return jax.device_put(turned[int(str(path[1]))], v.get_value().sharding)
    return jnp.ones_like(v.get_value()) if path[0] == "carried" else v.get_value()

  return map_state(state, leaf)


def trainable(cfg: Config, model: nnx.Module) -> nnx.filterlib.Filter:
  """The filter of trained Params: adapters, else `trainable_parameters_mask`. Raises ConfigError without a match."""
  if cfg.adapter.lora_rank:
    return nnx.LoRAParam
  if not cfg.optimizer.trainable_parameters_mask:
    return nnx.Param
  paths = {slash_path(path): path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
  found = matching(paths, cfg.optimizer.trainable_parameters_mask, "trainable_parameters_mask")
  return nnx.filterlib.PathIn(*(paths[label] for label in found))


def create_split(cfg: Config, layout: Layout | None = None, teacher: ModelConfig | None = None,
                 without: Callable[[tuple[str, ...]], bool] = lambda path: False) -> Split:  # fmt: skip
  """(graphdef, state) of a fresh train state, created in `layout` by one compiled call. The layout changes no value.
  without: whether the state lacks the array of a path as in `to_tree`, and nothing computes it."""
  graphdef, abstract = abstract_split(cfg, teacher)

  def kept(path: tuple, _) -> bool:
    return not without(tuple(map(str, path)))

  def init():
    with use(layout):
      return nnx.filter_state(host_memory.put(cfg, nnx.state(create(cfg, teacher))), kept)

  shardings = None if layout is None else layout.shardings(nnx.filter_state(abstract, kept))
  return graphdef, jax.jit(init, compiler_options=compiler_options(layout), out_shardings=shardings)()


def abstract_split(cfg: Config, teacher: ModelConfig | None = None) -> Split:
  """(graphdef, state) with `jax.ShapeDtypeStruct` leaves, without allocation."""
  graphdef, state = nnx.split(nnx.eval_shape(lambda: create(cfg, teacher)))
  return graphdef, host_memory.abstract(cfg, state)


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
  """The run after `completed_steps` steps. All parts belong to the same moment, although batches are read ahead.

  data: position of the training iterator after the last trained batch; None at the start.
  metrics_bytes: length of metrics.jsonl. metrics_crc: its CRC-32, None in a checkpoint of an earlier version.
  pending: the record of the last step, which waits for the validation loss after it; None at the start.
  open_loss: the last measured validation loss, [K], which opens the account of the following steps.
  scores: position of the score log, or a list with one for each of several processes; None without a log.
  reweighting: state of the domains' shares, None if they are constant. rollouts: `Rollouts.position`, if any.
  rows: of each step over all devices, 0: unknown.
  closing: outputs of `step.make_closing` for the last step, if an outer step (DiLoCo) came after it.
  """

  completed_steps: int = 0
  data: dict | None = None
  metrics_bytes: int = 0
  metrics_crc: int | None = None
  pending: dict[str, Any] | None = None
  open_loss: list[float] | None = None
  scores: dict | list | None = None
  reweighting: dict | None = None
  rollouts: dict | None = None
  rows: int = 0
  closing: dict[str, list] | None = None

  def scores_of(self, process: int) -> dict | None:
    """The position of a process's score log; only the step, if the checkpoint has none of this process."""
    known = self.scores if isinstance(self.scores, list) else [self.scores]
    if process < len(known) and known[process] is not None:
      return known[process]
    steps = [one["step"] for one in known if one is not None]
    return {"step": max(steps)} if steps else None

  def of_all_processes(self) -> "Position":
    """The position for a checkpoint, with the data and score-log positions of all processes."""
    if distributed.count() == 1:
      return self
    said = distributed.gather({"data": self.data, "scores": self.scores})
    data, scores = ([one[name] for one in said] for name in ("data", "scores"))
    return dataclasses.replace(self, data=merge_states(data), scores=scores)

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "Position":
    return cls(**{field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values})


def saved_parts(state: nnx.State) -> tuple[dict, dict]:
  """`to_tree` in two parts: (saved in checkpoints; frozen: a reference model and weights below adapters, not saved)."""
  flat = {tuple(map(str, path)): v for path, v in nnx.to_flat_state(state)}
  adapted, saved, frozen = any(isinstance(v, nnx.LoRAParam) for v in flat.values()), {}, {}
  for path, v in flat.items():
    below = adapted and path[0] == "model" and not isinstance(v, nnx.LoRAParam)
    (frozen if below or path[0] == REFERENCE else saved)[path] = v.get_value()
  return unflatten_dict(saved), unflatten_dict(frozen)


def merged(tree: Mapping, other: Mapping) -> dict:
  """A tree with all arrays of both; at paths that both have, those of the second."""
  return unflatten_dict(flatten_dict(tree) | flatten_dict(other))


def to_tree(state: nnx.State) -> dict:
  """A train state as a nested dict of arrays with text keys, {"model": {...}, "optimizer": {...}, ...}."""
  return unflatten_dict({tuple(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(state)})


def completed(given: Mapping, cfg: Config, layout: Layout | None = None, teacher: ModelConfig | None = None) -> dict:
  """A train state's tree: the arrays of `given`, and fresh ones where it has none; of a reference model only those."""
  known = flatten_dict(given)
  _, fresh = create_split(cfg, layout, teacher, without=lambda path: path in known or path[0] == REFERENCE)
  return merged(to_tree(fresh), given)


def chosen(tree: Mapping, wanted: Mapping) -> dict:
  """The arrays of a tree at the paths of another."""
  flat: dict[Any, Any] = flatten_dict(tree)
  return unflatten_dict({path: flat[path] for path in flatten_dict(wanted)})


def from_tree(tree: Mapping, like: nnx.State) -> nnx.State:
  """The inverse of `to_tree`: `like` (which may be abstract) with the arrays of a tree of the same paths."""
  arrays = flatten_dict(tree)
  return map_state(like, lambda path, _: arrays[tuple(map(str, path))])


def abstract_arrays(state: nnx.State) -> nnx.State:
  """The state with shapes, dtypes and shardings in place of arrays; abstract leaves go to the first device."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or place), state)
