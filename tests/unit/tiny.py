"""Small models and batches with pairwise different sizes, and weights that hide nothing.

B=7 rows, T=13 positions, S=5 documents in a row at most, D=20 embed dim, H=8 query heads, K=2 key/value heads, h=6 head
width, F=36 feed-forward width, L=3 layers, V=263 vocabulary; also H*h=48, K*h=12, H/K=4, 5 validation rows.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxghost import adapters, config, models

ROWS, VAL_ROWS, POSITIONS, SEGMENTS, VOCAB = 7, 5, 13, 5, 263
SIZES = {
  "base_emb_dim": 20,
  "base_num_query_heads": 8,
  "base_num_kv_heads": 2,
  "head_dim": 6,
  "base_mlp_dim": 36,
  "base_num_decoder_layers": 3,
  "vocab_size": VOCAB,
  "max_target_length": POSITIONS,
  "per_device_batch_size": ROWS,
  "rope_max_timescale": 700.0,
  "normalization_layer_epsilon": 3e-3,
  "attention": "dot_product",  # compiles fastest
  "remat_policy": "minimal",  # auto has no loop over the layers, which takes longer to compile
}
# Lengths of the documents of each row. Row 4 is empty; the last document of row 5 has no target that counts.
UNPACKED = ((13,), (9,), (11,), (2,), (), (6,), (12,))
PACKED = ((4, 5, 3), (13,), (2, 6), (1, 1, 7, 2, 2), (), (8, 5), (3, 9))
VALIDATION = ((6, 6), (13,), (4,), (1, 9), (12,))


def make_config(**changes) -> config.Config:
  return config.replace(config.load(), **(SIZES | changes))


@contextlib.contextmanager
def cheap_compilation(cheap: bool = True):
  """Compiles without XLA's optimizations, or with them: three times faster, the same mathematics."""
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", cheap)
  try:
    yield
  finally:
    jax.config.update("jax_disable_most_optimizations", before)


@contextlib.contextmanager
def few_devices(count: int):
  """Commands see the first of the virtual devices only."""
  every, jax.devices = jax.devices, lambda *platform: every(*platform)[:count]
  try:
    yield
  finally:
    jax.devices = every


def one_device():
  """A step without a mesh compiles faster."""
  return few_devices(1)


@nnx.jit
def _logits(model, *inputs):
  return model(*inputs)


def logits(model: nnx.Module, batch, *more) -> jax.Array:
  """The model's logits of a batch, or of tokens, by one compiled program for each kind of model."""
  names = ("inputs", "inputs_position", "inputs_segmentation")
  inputs = [batch[name] for name in names] if isinstance(batch, dict) else [batch]
  with cheap_compilation():
    return _logits(model, *inputs, *more)


def by_label(tree) -> dict:
  """{slash path: numpy array} of the Params of a model or of a State of gradients."""
  state = nnx.state(tree, nnx.Param) if isinstance(tree, nnx.Module) else tree
  return {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(state)}


def random_values(templates: dict, seed: int) -> dict:
  """{label: float32 values} for {label: shape}: norm scales around 1, and matrices so small that float32 rounding, that
  of any correct computation, stays below 2e-6 of a score (with deviation 0.25 it reaches 1e-5)."""
  rng = np.random.default_rng(seed)
  values = {}
  for label in sorted(templates):
    normal = rng.normal(size=templates[label]).astype(np.float32)
    values[label] = 1 + np.float32(0.3) * normal if label.endswith("scale") else np.float32(0.1) * normal
  return values


def make_model(cfg, seed: int = 0) -> nnx.Module:
  """A model with random weights. They depend on the seed alone, not on scan_layers, remat or dtype."""
  stacked = nnx.merge(*abstract_split(config.replace(cfg, scan_layers=True)))
  values = random_values({label: v.shape for label, v in abstract_by_label(stacked).items()}, seed)
  model = with_values(nnx.merge(*abstract_split(cfg)), values)
  return adapted(model, cfg, seed) if cfg.adapter.lora_rank else model


def adapted(model: nnx.Module, cfg, seed: int = 0) -> nnx.Module:
  """The model with adapters whose `b` is not zero: zeros would hide a dropped term."""
  if cfg.adapter.lora_weight_qtype:
    model = attached(model, cfg.adapter, seed)
  else:
    adapters.attach(model, cfg.adapter, seed)
  rng = np.random.default_rng(seed + 7)
  for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
    variable[...] = jnp.asarray(0.15 * rng.normal(size=variable.shape), variable.dtype)
  return model


def attached(model: nnx.Module, cfg, seed: int) -> nnx.Module:
  """`adapters.attach` by one program: matrices in few bits take many operations."""
  graphdef, state = nnx.split(model)
  made = []

  @jax.jit
  def attach(state):
    graphdef_after, state = nnx.split(adapters.attach(nnx.merge(graphdef, state), cfg, seed))
    made.append(graphdef_after)
    return state

  with cheap_compilation():
    state = attach(state)
  return nnx.merge(made[0], state)


def abstract_split(cfg):
  """(graphdef, state) of `models.create_abstract(cfg)`, traced once for each model."""
  return _abstract_split(cfg.model, jax.config.read("jax_enable_x64"))


@functools.cache
def _abstract_split(model_cfg, wide: bool):
  return nnx.split(models.create_abstract(model_cfg))


def abstract_by_label(model) -> dict:
  return {"/".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def with_values(abstract_model, values: dict) -> nnx.Module:
  """The model with {label: stacked value}; an unrolled layer takes its slice of the leading layer axis."""
  graphdef, state = nnx.split(abstract_model)
  flat = []
  for path, variable in nnx.to_flat_state(state):
    value = stacked_value(values, path)
    assert value.shape == variable.shape, (path, value.shape, variable.shape)
    flat.append((path, variable.replace(jnp.asarray(value, variable.dtype))))
  return nnx.merge(graphdef, nnx.from_flat_state(flat))


def stacked_value(values: dict, path: tuple) -> np.ndarray:
  """The value of a parameter at `path`, from values by stacked label."""
  label = "/".join(map(str, path))
  if label in values:
    return values[label]
  index = int(next(str(part).removeprefix("layers_") for part in path if str(part).startswith("layers_")))
  cycle = len({name.split("/")[2] for name in values if name.startswith("decoder/layers/layers_")})
  if cycle:  # unlike layers: the stacked ones are layers/layers_0, layers/layers_1, ...
    return values[label.replace(f"layers_{index}", f"layers/layers_{index % cycle}")][index // cycle]
  return values[label.replace(f"layers_{index}", "layers")][index]


def stack_layers(values: dict, num_layers: int) -> dict:
  """{stacked label: value} from the parameters (gradients, scores) of an unrolled model; others stay as they are."""
  out = {label: v for label, v in values.items() if "/layers_" not in label}
  for label in values:
    if "/layers_0/" in label:
      layers = [values[label.replace("layers_0", f"layers_{i}")] for i in range(num_layers)]
      out[label.replace("layers_0", "layers")] = np.stack(layers)
  return out


def make_batch(rows, seed: int, *, num_positions: int = POSITIONS, mask: float = 0.2) -> dict:
  """A MaxText-style batch of random tokens. rows: lengths of each row's documents; the rest of a row is padding.

  A share `mask` of the targets does not count, and neither does any target of the last document of row 5.
  """
  rng = np.random.default_rng(seed)
  shape = (len(rows), num_positions)
  names = ("inputs", "inputs_position", "inputs_segmentation", "targets", "targets_position", "targets_segmentation")
  batch = {name: np.zeros(shape, np.int32) for name in names}
  for row, lengths in enumerate(rows):
    start = 0
    for segment, length in enumerate(lengths, 1):
      here = (row, slice(start, start + length))
      document = rng.integers(0, VOCAB, length + 1)
      counts = rng.random(length) >= mask
      counts[0] = True
      if row == 5 and segment == len(lengths):
        counts[:] = False
      batch["inputs"][here], batch["targets"][here] = document[:-1], document[1:]
      batch["inputs_position"][here] = batch["targets_position"][here] = np.arange(length)
      batch["inputs_segmentation"][here] = segment
      batch["targets_segmentation"][here] = np.where(counts, segment, 0)
      start += length
  return batch


def alone(batch: dict, row: int, segment: int) -> dict:
  """One document of a packed row as a row [T] of its own: moved to the front, segment 1, padding behind."""
  where = np.flatnonzero(batch["inputs_segmentation"][row] == segment)
  out = {name: np.zeros_like(v[row]) for name, v in batch.items()}
  for name, v in batch.items():
    out[name][: len(where)] = v[row, where]
  for name in ("inputs_segmentation", "targets_segmentation"):
    out[name] = np.minimum(out[name], 1)
  return out


def stack_rows(rows: list[dict]) -> dict:
  return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def documents(batch: dict) -> list[tuple[int, int]]:
  """(row, segment) of every document."""
  return [(r, int(s)) for r, ids in enumerate(batch["inputs_segmentation"]) for s in np.unique(ids[ids > 0])]


def equations(jaxpr):
  """Every equation of a jaxpr, those inside scans, remat and custom derivatives included."""
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    yield equation
    for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
      if hasattr(inner, "eqns"):
        yield from equations(inner)


def rounded_products(jaxpr) -> list[str]:
  """The float32 products of a jaxpr whose operands a device may round: a TPU to bfloat16, a GPU to TF32."""
  products = [e for e in equations(jaxpr) if "precision" in e.params and len(e.invars) > 1]
  wide = [e for e in products if all(v.aval.dtype == "float32" for v in e.invars[:2])]
  assert len(wide) > 1, "nothing is checked"
  return [str(e) for e in wide if {str(p) for p in e.params["precision"] or (None,)} != {"HIGHEST"}]


def num_carried(scan) -> int:
  """How many outputs of a scan's equation are its carry: those that are not stacked over the steps."""
  body = scan.params["jaxpr"].jaxpr
  return sum(a.aval.shape == b.aval.shape for a, b in zip(body.outvars, scan.outvars, strict=True))
