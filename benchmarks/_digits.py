"""The small exact world of the quality suite: a foreign nnx model (digits MLP), scored by the engine in every step.

N training images, V validation images, B images of a batch, S steps, K = 2 validation directions: first and second
order.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxghost.ghost import DirectionSpec, ledger
from maxghost.ghost.attach import prepare_twin
from maxghost.ghost.directions import direction_parts
from maxghost.ghost.schedules import Model, passes, per_example
from maxghost.optimizers import AdamW, Sgd, by_label
from maxghost.parallel.shardings import slash_path

NUM_TRAIN, NUM_VAL, CORRUPT = 1000, 100, 0.1
B1, B2, EPS = 0.9, 0.95, 1e-8


class DigitsMLP(nnx.Module):
  """64-64-10 with ReLU; weights N(0, 1/64), zero biases."""

  def __init__(self, rngs: nnx.Rngs):
    init = nnx.with_metadata(nnx.initializers.normal(1 / 8), matrix=(1, 1))  # a matrix, for Muon
    self.hidden = nnx.Linear(64, 64, kernel_init=init, rngs=rngs)
    self.out = nnx.Linear(64, 10, kernel_init=init, rngs=rngs)

  def __call__(self, x):
    return self.out(nnx.relu(self.hidden(x)))


def classification_loss(model, batch):
  """(losses [n], weights [n])."""
  losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
  return losses, batch["weight"]


@dataclasses.dataclass(frozen=True)
class Problem:
  """Images in [0, 1], labels with a share of wrong ones, and which these are."""

  train: dict
  val: dict
  wrong_N: np.ndarray
  seed: int

  def model(self) -> nnx.Module:
    return DigitsMLP(nnx.Rngs(self.seed))

  def order(self, steps: int, batch_size: int) -> np.ndarray:
    """int64[S, B]: the images of each step, epoch after epoch in a new order."""
    rng = np.random.default_rng((self.seed, 1))
    epochs = math.ceil(steps * batch_size / NUM_TRAIN)
    return np.concatenate([rng.permutation(NUM_TRAIN) for _ in range(epochs)])[: steps * batch_size].reshape(steps, -1)


def make_problem(seed: int) -> Problem:
  from sklearn.datasets import load_digits

  images, labels = load_digits(return_X_y=True)
  rng = np.random.default_rng((seed, 0))
  chosen = rng.permutation(len(images))[: NUM_TRAIN + NUM_VAL]
  images, labels = (images[chosen] / 16).astype(np.float32), labels[chosen].astype(np.int32)
  wrong = np.zeros(NUM_TRAIN, bool)
  wrong[rng.permutation(NUM_TRAIN)[: int(CORRUPT * NUM_TRAIN)]] = True
  given = labels.copy()
  given[:NUM_TRAIN][wrong] = (labels[:NUM_TRAIN][wrong] + rng.integers(1, 10, wrong.sum())) % 10
  ones = np.ones(len(images), np.float32)
  both = {"image": images, "label": given, "weight": ones}
  train = {name: jnp.asarray(v[:NUM_TRAIN]) for name, v in both.items()}
  return Problem(train, {name: jnp.asarray(v[NUM_TRAIN:]) for name, v in both.items()}, wrong, seed)


class Trainer:
  """The digits problem with an optimizer: plain steps, and steps in which the engine scores every image."""

  def __init__(
    self, problem: Problem, batch_size: int, learning_rate: float, *, adam: bool = False, decay: float = 0.0
  ):
    self.problem, self.learning_rate = problem, learning_rate
    self.graphdef, self.params, self.rest = nnx.split(problem.model(), nnx.Param, ...)
    self.rule = AdamW(B1, B2, EPS, decay) if adam else Sgd()
    self.spec = DirectionSpec(self.rule)
    self.tx = self.rule.transformation(optax.constant_schedule(learning_rate))
    example = jax.tree.map(lambda x: x[:batch_size], problem.train)
    self.twins = {
      spec: prepare_twin(
        problem.model(), example, classification_loss, num_sets=2, num_positions=None, spec=spec, num_val=NUM_VAL
      )
      for spec in {self.spec, DirectionSpec()}
    }

  def start(self):
    """(params, optimizer state, steps taken)."""
    return self.params, self.tx.init(self.params), jnp.zeros((), jnp.int32)

  def batch(self, rows_B) -> dict:
    return jax.tree.map(lambda x: x[rows_B], self.problem.train)

  def val_loss(self, params):
    return passes.mean_loss(*classification_loss(nnx.merge(self.graphdef, params, self.rest), self.problem.val))

  def update(self, state, grads):
    """(new state, update of the parameters)."""
    params, opt_state, count = state
    delta, opt_state = self.tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, delta), opt_state, count + 1), delta

  def plain_step(self, state, batch):
    grads = passes.train_pass(Model(self.graphdef, state[0], self.rest), classification_loss, batch).grads
    return self.update(state, grads)[0]

  def scored_step(self, state, rows_B, spec: DirectionSpec | None = None):
    """(new state, facts of the step): contributions [K, B] in nats, losses [B], val_loss, ledger columns [K]."""
    spec = spec or self.spec
    twin, batch = self.twins[spec], self.batch(rows_B)
    params, opt_state, count = state
    model = Model(self.graphdef, params, self.rest)
    grads = passes.train_pass(model, classification_loss, batch).grads
    new_state, delta = self.update(state, grads)
    val = (self.problem.val,)
    val_loss, gradients = passes.validation_gradients(model, classification_loss, val)
    curved = passes.second_order_gradients(model, classification_loss, val, gradients, delta)
    labelled = [by_label(g) for g in (*gradients, *curved)]
    before = self.rule.read(opt_state, count=count)
    parts, _ = direction_parts(twin.scored, labelled, before)
    passed = passes.train_pass(model, classification_loss, batch, twin, twin.direction_state(parts))
    additive_KB = sum(passed.scores.values())
    out = {"contribution_KB": self.learning_rate * additive_KB, "loss_B": passed.losses, "val_loss": val_loss[0]}
    if spec == self.spec:
      grads, params = by_label(grads), by_label(params)
      sums = ledger.sums(self.rule, before, twin.parameters, params, grads, labelled, set(passed.scores))
      scales = self.rule.column_scales(self.learning_rate, 1.0)
      out["examples"] = out["contribution_KB"].sum(1)
      out |= {name.replace("_", " "): scales[name] * sums[name] for name in self.rule.columns}
      size_K = jnp.abs(additive_KB).sum(1)
      out["check_rel_err"] = jnp.abs(additive_KB.sum(1) - sums["exact"]) / size_K
    return new_state, out

  def run(self, rows_SB: np.ndarray):
    """(final state, facts of every step stacked [S, ...])."""
    return jax.jit(lambda rows: jax.lax.scan(self.scored_step, self.start(), rows))(jnp.asarray(rows_SB))

  def per_example_gradients(self, params, batch) -> dict:
    """{label: [n, *parameter]}, each example's share of the batch gradient."""
    return per_example.gradients_of(Model(self.graphdef, params, self.rest), classification_loss, batch)

  def state_like(self, labelled: dict) -> nnx.State:
    """A State of the parameters' paths from {label: array}."""
    flat = [(path, v.replace(labelled[slash_path(path)])) for path, v in nnx.to_flat_state(self.params)]
    return nnx.from_flat_state(flat)


def totals(contribution_SB, rows_SB) -> np.ndarray:
  """Contribution of each training image over a run, [N]."""
  return np.bincount(rows_SB.ravel(), np.asarray(contribution_SB, np.float64).ravel(), NUM_TRAIN)


def telescoping(seed: int, learning_rate: float, steps: int) -> dict:
  """One SGD run: predictions of both orders beside the measured drop, and wrong-label detection by total value."""
  problem = make_problem(seed)
  trainer, rows = Trainer(problem, 50, learning_rate), problem.order(steps, 50)
  state, facts = trainer.run(rows)
  drop = float(facts["val_loss"][0] - trainer.val_loss(state[0]))
  first, second = (totals(facts["contribution_KB"][:, k], rows) for k in range(2))
  seen = np.maximum(np.bincount(rows.ravel(), minlength=NUM_TRAIN), 1)
  mean_loss = np.bincount(rows.ravel(), np.asarray(facts["loss_B"]).ravel(), NUM_TRAIN) / seen
  gradients = trainer.per_example_gradients(state[0], problem.train)
  gradients = np.concatenate([np.asarray(g).reshape(NUM_TRAIN, -1) for g in gradients.values()], 1)
  val_gradient = jax.grad(trainer.val_loss)(state[0])
  val_gradient = np.concatenate([np.asarray(v).ravel() for v in by_label(val_gradient).values()])
  random = np.random.default_rng((seed, 2)).random(NUM_TRAIN)
  signals = {
    "first order": -first,
    "second order": -second,
    "final-checkpoint dot": -gradients @ val_gradient,
    "loss during the run": mean_loss,
    "gradient norm at the end": np.linalg.norm(gradients, axis=1),
    "random": random,
  }
  return {
    "learning rate": learning_rate,
    "steps": steps,
    "drop": drop,
    "first": float(first.sum()),
    "second": float(second.sum()),
    "auroc": {name: auroc(signal, problem.wrong_N) for name, signal in signals.items()},
    "check_rel_err": float(np.max(facts["check_rel_err"])),
    "values": {"first order": first, "second order": second, "final-checkpoint dot": gradients @ val_gradient},
  }


def datamodel_score(seed: int, learning_rate: float, steps: int, values: dict, num_subsets: int) -> dict:
  """Linear datamodelling score: Spearman over half subsets between summed values and the retrained drop."""
  problem = make_problem(seed)
  trainer, rows = Trainer(problem, 50, learning_rate), jnp.asarray(problem.order(steps, 50))
  rng = np.random.default_rng((seed, 3))
  members_MN = np.zeros((num_subsets, NUM_TRAIN), np.float32)
  for row in members_MN:
    row[rng.permutation(NUM_TRAIN)[: NUM_TRAIN // 2]] = 1

  @jax.jit
  @jax.vmap
  def drop(member_N):
    def step(state, rows_B):
      return trainer.plain_step(state, trainer.batch(rows_B) | {"weight": member_N[rows_B]}), None

    state, _ = jax.lax.scan(step, trainer.start(), rows)
    return trainer.val_loss(trainer.params) - trainer.val_loss(state[0])

  drops_M = np.concatenate([drop(part) for part in np.split(jnp.asarray(members_MN), max(1, num_subsets // 16))])
  return {name: spearman(members_MN @ value, drops_M) for name, value in values.items()}


def adam_columns(seed: int, learning_rate: float = 1e-3, steps: int = 300) -> dict:
  """One AdamW run: the ledger's columns of both orders beside the measured drop."""
  problem = make_problem(seed)
  trainer = Trainer(problem, 50, learning_rate, adam=True, decay=0.1)
  state, facts = trainer.run(problem.order(steps, 50))
  drop = float(facts["val_loss"][0] - trainer.val_loss(state[0]))
  names = ("examples", "momentum", "weight decay")
  sums = {name: np.asarray(facts[name], np.float64).sum(0) for name in names}
  orders = {order: {name: float(sums[name][k]) for name in names} for k, order in enumerate(("first", "second"))}
  return {"drop": drop, **orders, "check_rel_err": float(np.max(facts["check_rel_err"]))}


def leave_one_out(seed: int, steps: tuple[int, ...], learning_rate: float = 1e-3, batch_size: int = 32) -> dict:
  """{name: [Pearson at each of `steps`]} of three scores with the effect on the validation loss of leaving one image
  out of the batch of that Adam step: SGD direction, Adam direction, and Adam direction of second order.

  The effect is that of the real step, in which the second moment changes too; "frozen state" is the Adam direction
  against the effect with the step's preconditioner held fixed, which is what contributions are defined by.
  Steps count from 1.
  """
  problem = make_problem(seed)
  trainer = Trainer(problem, batch_size, learning_rate, adam=True)
  rows_SB = jnp.asarray(problem.order(max(steps), batch_size))

  @jax.jit
  def advance(state, start, stop):
    return jax.lax.fori_loop(start, stop, lambda i, s: trainer.plain_step(s, trainer.batch(rows_SB[i])), state)

  @jax.jit
  def measure(state, rows_B):
    shares = trainer.per_example_gradients(state[0], trainer.batch(rows_B))
    whole = {label: g.sum(0) for label, g in shares.items()}
    rule, views = trainer.rule, trainer.twins[trainer.spec].parameters
    before = rule.read(state[1], count=state[2])
    after = trainer.update(state, trainer.state_like(whole))[0][0]

    def real(left_out):
      grads = trainer.state_like({label: g - left_out[label] for label, g in whole.items()})
      return trainer.val_loss(trainer.update(state, grads)[0][0])

    def frozen(left_out):
      scalars, moved = rule.scalars(before.count, before.clip_factor), {}
      for label, g in left_out.items():
        response = rule.response(views[label], whole[label], before.of(label), scalars)
        moved[label] = learning_rate * response.transpose(g)
      return trainer.val_loss(jax.tree.map(jnp.add, after, trainer.state_like(moved)))

    loss = trainer.val_loss(after)
    sgd, adam = (trainer.scored_step(state, rows_B, s)[1]["contribution_KB"] for s in (DirectionSpec(), trainer.spec))
    return jax.lax.map(real, shares) - loss, jax.lax.map(frozen, shares) - loss, sgd[0], adam[0], adam[1]

  state, done, out = trainer.start(), 0, {name: [] for name in ("sgd", "adam", "adam, second order", "frozen state")}
  for step in steps:
    state, done = advance(state, done, step - 1), step - 1
    effect, frozen, sgd, adam, curved = (np.asarray(x, np.float64) for x in measure(state, rows_SB[step - 1]))
    for name, a, b in zip(out, (sgd, adam, curved, adam), (effect, effect, effect, frozen), strict=True):
      out[name].append(float(np.corrcoef(a, b)[0, 1]))
  return out


def exact_shapley(seed: int, learning_rate: float, warm_steps: int = 20, batch_size: int = 8) -> dict:
  """Shapley values of one SGD step over all subsets of its batch, beside the engine's scores of both orders."""
  problem = make_problem(seed)
  trainer = Trainer(problem, batch_size, learning_rate)
  rows = jnp.asarray(problem.order(warm_steps + 1, batch_size))
  state, _ = jax.lax.scan(lambda s, r: (trainer.plain_step(s, trainer.batch(r)), None), trainer.start(), rows[:-1])
  shares = trainer.per_example_gradients(state[0], trainer.batch(rows[-1]))
  subsets = np.array(list(itertools.product((0.0, 1.0), repeat=batch_size)), np.float32)

  def worth(member_B):
    grads = {label: jnp.tensordot(member_B, g, 1) for label, g in shares.items()}
    after = trainer.update(state, trainer.state_like(grads))[0]
    return trainer.val_loss(state[0]) - trainer.val_loss(after[0])

  worth_M = np.asarray(jax.jit(jax.vmap(worth))(jnp.asarray(subsets)), np.float64)
  values = shapley_values(worth_M, subsets)
  scores = np.asarray(jax.jit(trainer.scored_step)(state, rows[-1])[1]["contribution_KB"], np.float64)
  errors = [float(np.abs(score - values).max() / np.abs(values).max()) for score in scores]
  ranks = [spearman(score, values) for score in scores]
  return {"first": (errors[0], ranks[0]), "second": (errors[1], ranks[1])}


def shapley_values(worth_M, subsets_MB) -> np.ndarray:
  """Exact Shapley values [B] from the worth of every subset, in the order of itertools.product((0, 1), repeat=B)."""
  batch_size, sizes = subsets_MB.shape[1], subsets_MB.sum(1).astype(int)
  values = np.zeros(batch_size)
  for example in range(batch_size):
    without = np.flatnonzero(subsets_MB[:, example] == 0)
    joined = without + 2 ** (batch_size - 1 - example)
    factor = np.array([math.factorial(s) * math.factorial(batch_size - s - 1) for s in sizes[without]])
    values[example] = np.sum(factor * (worth_M[joined] - worth_M[without])) / math.factorial(batch_size)
  return values


def auroc(signal, positive) -> float:
  """Probability that a positive has the larger signal; ties count half."""
  rank = average_ranks(np.asarray(signal, np.float64))
  num = int(positive.sum())
  return float((rank[positive].sum() - num * (num - 1) / 2) / (num * (len(positive) - num)))


def average_ranks(x) -> np.ndarray:
  """Ranks from 0; equal values share the mean of theirs."""
  _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
  return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


def spearman(a, b) -> float:
  """Rank correlation."""
  return float(np.corrcoef(average_ranks(np.asarray(a)), average_ranks(np.asarray(b)))[0, 1])
