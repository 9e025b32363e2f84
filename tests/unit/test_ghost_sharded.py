"""Scores on eight devices: the same numbers on every mesh, and no activation that moves because of them.

B rows, T positions, K validation sets, L layers. Meshes have the axes data, fsdp and tensor.
"""

import collections
import re

import foreign
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxghost import ghost
from maxghost.ghost import engine
from maxghost.ghost.attach import prepare_twin
from maxghost.ghost.schedules import Model, passes
from maxghost.objectives import LanguageModelLoss

SIZES = {
  "base_emb_dim": 24, "base_num_query_heads": 8, "base_num_kv_heads": 4, "head_dim": 6, "base_mlp_dim": 40,
  "base_num_decoder_layers": 2, "vocab_size": 272, "remat_policy": "none",
}  # fmt: skip
MESHES = {"data": (8, 1, 1), "fsdp": (1, 8, 1), "tensor": (1, 1, 8), "mixed": (2, 2, 2)}
TENSOR = {"mlp": "tensor", "vocab": "tensor", "q_heads": "tensor", "heads": "tensor"}
AXES = {"data": {}, "tensor": TENSOR, "mixed": {**TENSOR, "kv_heads": "tensor", "embed": "fsdp"}}
BATCH_AXES = {"data": ("data",), "fsdp": ("fsdp",), "tensor": (), "mixed": ("data", "fsdp")}
ROWS = (*tiny.PACKED, (7, 5))


class Placed:
  """The model and its batches on one mesh. mesh None: on one device."""

  def __init__(self, name: str | None):
    self.name = name
    self.cfg = tiny.make_config(**SIZES)
    self.model = tiny.make_model(self.cfg)
    self.train, self.val = tiny.make_batch(ROWS, seed=1), tiny.make_batch(ROWS[::-1], seed=2)
    if name is None:
      return
    axes = ("data", "fsdp", "tensor")
    self.mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(MESHES[name]), axes, axis_types=(AxisType.Auto,) * len(axes))
    graphdef, state = nnx.split(self.model)
    flat = nnx.to_flat_state(state)
    self.specs = {"/".join(map(str, path)): self.param_spec(v) for path, v in flat}
    self.model = nnx.merge(
      graphdef, nnx.from_flat_state([(p, v.replace(self.put(v[...], self.specs["/".join(p)]))) for p, v in flat])
    )
    rows = P(BATCH_AXES[name] or None)
    self.train, self.val = ({k: self.put(v, rows) for k, v in b.items()} for b in (self.train, self.val))

  def param_spec(self, variable) -> P:
    """By the names of the axes; fsdp: the largest axis of a layer that eight divides."""
    axes = variable.get_metadata()["axes"]
    if self.name != "fsdp":
      return P(*(AXES[self.name].get(a) for a in axes))
    own = [i for i, a in enumerate(axes) if a != "layers" and variable.shape[i] % 8 == 0]
    largest = max(own, key=lambda i: variable.shape[i])
    return P(*("fsdp" if i == largest else None for i in range(len(axes))))

  def put(self, x, spec: P):
    return jax.device_put(x, NamedSharding(self.mesh, spec))


def run(placed: Placed, direction: str, schedule: str = "two_pass", rank: int = 0):
  adam = None
  if direction == "adam":
    rng = np.random.default_rng(7)
    values = {label: 1e-4 * rng.random(v.shape) ** 2 + 1e-8 for label, v in sorted(tiny.by_label(placed.model).items())}
    moments = {label: jnp.asarray(v, jnp.float32) for label, v in values.items()}
    if placed.name:
      moments = {label: placed.put(v, placed.specs[label]) for label, v in moments.items()}
    adam = ghost.AdamState(moments, 5, 0.8)
  engine = ghost.GhostEngine(placed.cfg, direction=direction, schedule=schedule, rank=rank)
  with tiny.cheap_compilation():
    return engine.score(placed.model, placed.train, [placed.val], state=adam)


@pytest.fixture(scope="module")
def on_one_device():
  made, placed = {}, Placed(None)

  def get(direction, rank):
    if (direction, rank) not in made:
      made[direction, rank] = run(placed, direction, rank=rank)
    return made[direction, rank]

  return get


@pytest.mark.parametrize(
  ("name", "direction", "schedule", "rank", "tolerance"),
  [
    pytest.param("data", "sgd", "two_pass", 0, 1e-5, marks=pytest.mark.slow),
    # The factors of a direction of full rank round more.
    pytest.param("fsdp", "sgd", "two_pass", 4, 1e-4, marks=pytest.mark.slow),
    pytest.param("tensor", "sgd", "reverse_scan", 0, 1e-5, marks=pytest.mark.slow),
    ("tensor", "adam", "reverse_scan", 0, 1e-5),
    ("mixed", "adam", "two_pass", 0, 1e-5),
  ],
)
def test_every_mesh_gives_the_numbers_of_one_device(name, direction, schedule, rank, tolerance, on_one_device):
  """Parameters and batches are placed, nothing else is said to the compiler."""
  placed, expected = Placed(name), on_one_device(direction, rank)
  actual = run(placed, direction, schedule, rank)
  assert oracles.relative_error(actual.dot, expected.dot) < tolerance
  ours, theirs = (
    {label: np.asarray(v).squeeze(-2) for label, v in result.per_param.items()} for result in (actual, expected)
  )
  foreign.assert_scores(ours, theirs, tolerance)
  for label, g in tiny.by_label(expected.grads).items():
    assert oracles.relative_error(tiny.by_label(actual.grads)[label], g) < 1e-5, label
  if name == "data":
    assert actual.dot.sharding.spec == P(None, "data")


def collectives(compiled) -> collections.Counter:
  """{(operation, shape): how often} in the compiled program, of what moves arrays between devices."""
  found = re.findall(r"= (\S+?)(?:\{\S*)? (all-gather|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text())
  return collections.Counter((operation, shape) for shape, operation in found)


class Gathering(LanguageModelLoss):
  """The loss with parameters and directions gathered over data and fsdp before use, as in fully sharded training."""

  def __init__(self, placed: Placed):
    super().__init__()
    object.__setattr__(self, "placed", placed)

  def measured(self, model, batch):
    graphdef, state = nnx.split(model)
    flat = []
    for path, variable in nnx.to_flat_state(state):
      spec = self.spec(path, variable)
      if spec is not None:
        sharding = NamedSharding(self.placed.mesh, P(*(axis if axis == "tensor" else None for axis in spec)))
        variable = variable.replace(jax.lax.with_sharding_constraint(variable[...], sharding))
      flat.append((path, variable))
    return super().measured(nnx.merge(graphdef, nnx.from_flat_state(flat)), batch)

  def spec(self, path, variable):
    for suffix in ("_gradient", "_second_moment"):
      name = path[-1].removeprefix("ghost_").removesuffix(suffix)
      label = "/".join((*path[:-1], name))
      if path[-1].endswith(suffix) and label in self.placed.specs:
        return direction_spec(self.placed.specs[label], path, variable.shape if suffix == "_gradient" else None)
    return self.placed.specs.get("/".join(path))


def direction_spec(spec: P, path, shape) -> P:
  """A direction's spec: its parameter's, with an axis for K after the layers' (shape None: without)."""
  if shape is None:
    return spec
  stack, full = int("layers" in path), [*spec] + [None] * (len(shape) - 1 - len(spec))
  return P(*full[:stack], None, *full[stack:])


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    pytest.param("data", "adam", marks=pytest.mark.slow),
    ("fsdp", "adam"),
    ("tensor", "sgd"),
    pytest.param("mixed", "adam", marks=pytest.mark.slow),
  ],
)
def test_no_activation_moves_because_of_scores(name, kind):
  """What the scored pass gathers beyond the plain one are directions and Adam's moments; the scores stay where their
  rows are, and nothing goes from all to all."""
  placed = Placed(name)
  loss = LanguageModelLoss() if name in ("data", "tensor") else Gathering(placed)
  graphdef, params, rest = nnx.split(placed.model, nnx.Param, ...)
  twin = prepare_twin(
    placed.model,
    placed.train,
    LanguageModelLoss(),
    num_sets=1,
    num_positions=None,
    spec=engine.direction_spec(tiny.make_config(), kind),
  )
  parts, allowed = {}, set()  # shapes of directions, moments, parameters: none has 13 positions
  for path, v in nnx.to_flat_state(params):
    label, stack = "/".join(path), int("layers" in path)
    shape = (*v.shape[:stack], 1, *v.shape[stack:])
    gradient = placed.put(jnp.zeros(shape), direction_spec(placed.specs[label], path, shape))
    moment = placed.put(jnp.zeros(v.shape), placed.specs[label])
    parts[label] = (gradient,) if kind == "sgd" else (gradient, moment, jnp.ones((*v.shape[:stack], 3)))
    local = local_shape(v.shape, placed.specs[label], placed.mesh.shape["tensor"])
    allowed |= {local, (*local[:stack], 1, *local[stack:])}
  directions = twin.direction_state(parts)
  plain = jax.jit(lambda p, b: passes.train_pass(Model(graphdef, p, rest), loss, b)).lower(params, placed.train)
  scored = jax.jit(lambda p, b, d: passes.train_pass(Model(graphdef, p, rest), loss, b, twin, d))
  with tiny.cheap_compilation():  # the same collectives: what is left out is LLVM's work
    plain, scored = plain.compile(), scored.lower(params, placed.train, directions).compile()
  before, after = collectives(plain), collectives(scored)
  assert not before - after
  moved = {(operation, tuple(map(int, re.findall(r"\d+", shape.split("[")[1])))) for operation, shape in after - before}
  assert {operation for operation, _ in moved} == ({"all-gather"} if name in ("fsdp", "mixed") else set())
  assert {shape for _, shape in moved} <= allowed
  for sharding in jax.tree.leaves(scored.output_shardings.scores):
    last = sharding.spec[-1] if len(sharding.spec) else None
    assert last == {"data": "data", "fsdp": "fsdp", "tensor": None, "mixed": ("data", "fsdp")}[name]


def local_shape(shape, spec: P, tensor: int) -> tuple:
  """What one device holds of a parameter that is split over the tensor axis alone."""
  axes = [*spec] + [None] * (len(shape) - len(spec))
  return tuple(d // tensor if axis == "tensor" else d for d, axis in zip(shape, axes, strict=True))
