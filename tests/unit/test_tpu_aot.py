"""Attention, the tiled head, factors and streamed layers through the real TPU compiler, on a machine without a TPU."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxghost import config
from maxghost.adapters import quantized
from maxghost.ghost import ledger, low_rank
from maxghost.models import attention
from maxghost.objectives import tiled, tiled_losses
from maxghost.parallel import shardings
from maxghost.training import state

pytestmark = pytest.mark.tpu_aot
ENVIRONMENT = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}


@pytest.fixture(scope="module")
def compiled_for_tpu():
  """function, arguments (shapes) -> its compilation for one v5e chip."""
  from jax.experimental import topologies

  with pytest.MonkeyPatch.context() as patch:
    for name, value in ENVIRONMENT.items():
      patch.setenv(name, value)
    topology = topologies.get_topology_desc(
      platform="tpu", topology_name="v5e:1x1", chip_config_name="default", chips_per_host_bounds=(1, 1, 1), num_slices=1
    )
  sharding = NamedSharding(Mesh(np.array(topology.devices), ("device",)), PartitionSpec())

  def placed(x):
    kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.with_memory_kind(kind) if kind else sharding)

  def run(function, *arguments, donate=()):
    with shardings.tracing_for("tpu"):
      return jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(placed, arguments)).compile()

  return run


@pytest.fixture(scope="module")
def compile_for_tpu(compiled_for_tpu):
  """function, shapes -> the bytes of temporaries of its compilation for one v5e chip."""
  return lambda *arguments: compiled_for_tpu(*arguments).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("stack", "rank"), [((), 32), ((12,), 32), ((2, 3), 11), ((3,), 128)])
def test_the_factors_of_a_direction_need_no_loop(stack, rank, compiled_for_tpu):
  run = lambda u: low_rank.factor(u, rank, "u")  # noqa: E731
  text = compiled_for_tpu(run, jax.ShapeDtypeStruct((*stack, 512, 384), jnp.float32)).as_text()
  assert "ghost_eliminate" in text
  assert " while(" not in text


def test_sums_of_scores_stay_out_of_a_product(compiled_for_tpu):
  """They are summed from the scores of tokens, not once more from the terms of these over features."""

  def run(g, w, x, u_K):
    b = jnp.einsum("nto,io->nti", g, w)
    score = ((b * x)[None] * u_K[:, None, None]).astype(jnp.float32).sum(-1)
    return b, score, ledger.score_sums([SimpleNamespace(label="scale", stack_shape=())], {"scale": score})

  shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 512, 640), (384, 640), (8, 512, 384), (2, 384))]
  sums = re.findall(r" reduce\(.*dimensions=\{([\d,]+)\}", compiled_for_tpu(run, *shapes).as_text())
  assert "1,2" in sums
  assert all(axes.count(",") < 2 for axes in sums)


OPTIONS = {
  "segments": {},
  "window": {"window": 300},
  "soft_cap_sinks": {"soft_cap": 30.0, "sinks_H": True},
  "sinks_per_token": {"window": 128, "sinks_H": "tokens"},
}


@pytest.mark.parametrize(("width", "values"), [(128, 128), (64, 64), (96, 96), (20, 12), (192, 128)])
def test_flash_takes_head_dims(width, values, compile_for_tpu):
  length = 4096
  temporaries = compile_for_tpu(attention_gradient("flash", {}), *attention_shapes(length, width, values))
  assert temporaries < 2 * length * length  # one bfloat16 score of one head


@pytest.mark.parametrize("name", OPTIONS)
def test_flash_takes_every_option_in_linear_memory(name, compile_for_tpu):
  length = 4096
  temporaries = compile_for_tpu(attention_gradient("flash", OPTIONS[name]), *attention_shapes(length, 128, 128))
  assert temporaries < 2 * length * length  # one bfloat16 score of one head


def test_blockwise_is_linear_in_memory(compile_for_tpu):
  small, large = (
    compile_for_tpu(attention_gradient("blockwise", {}), *attention_shapes(length, 128, 128)) for length in (4096, 8192)
  )
  assert large < 2.2 * small


def test_flash_on_a_mesh_of_four_chips():
  """Rows over fsdp, heads over tensor: each chip runs the kernel on its own, and nothing is sent."""
  from maxghost.parallel import topologies
  from maxghost.parallel.shardings import Layout, use

  cfg = config.replace(config.load(), ici_tensor_parallelism=2)
  layout = Layout.of(cfg.parallel, topologies.open_devices("v5e-4", 1))
  heads = ("activation_batch", "activation_length", "activation_heads", "activation_kv")
  shapes = [
    jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=layout.sharding(layout.spec(heads, s, "heads")))
    for s in ((4, 2048, 4, 128), (4, 2048, 2, 128), (4, 2048, 2, 128))
  ]
  total = jax.grad(lambda *x: attention.attend(*x, kernel="flash").astype(jnp.float32).sum(), argnums=(0, 1, 2))
  with use(layout):
    text = jax.jit(total).lower(*shapes).compile().as_text()
  assert "all-gather" not in text and "all-reduce" not in text and "custom-call" in text


def attention_shapes(length, width, values):
  shapes = ((1, length, 4, width), (1, length, 2, width), (1, length, 2, values), (1, length), (4,))
  return [
    jax.ShapeDtypeStruct(shape, jnp.int32 if len(shape) == 2 else jnp.bfloat16) for shape in shapes
  ]  # fmt: skip


def attention_gradient(kernel, options):
  others = {name: value for name, value in options.items() if name != "sinks_H"}

  def total(q, k, v, segments, sinks):
    if "sinks_H" in options:
      others["sinks_H"] = jnp.broadcast_to(sinks, (*q.shape[:2], 4)) if options["sinks_H"] == "tokens" else sinks
    return attention.attend(q, k, v, segments, kernel=kernel, **others).astype(jnp.float32).sum()

  return jax.grad(total, argnums=(0, 1, 2, 4))


@pytest.mark.parametrize("axis", tiled.AXES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_tiled_head_with_bfloat16_weights(axis, tied, compile_for_tpu):
  """1/n of the logits and two tables in float32, and no more."""
  tokens, width, vocab, n = 4096, 256, 32_768, 8
  head = tiled.Head(n, axis, tied, jnp.dtype("bfloat16"), z_loss=1e-4)
  shapes = ((1, tokens, width), (vocab, width) if tied else (width, vocab))
  x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
  targets = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
  gradient = jax.grad(lambda x, w, targets: tiled_losses(head, x, w, targets).mean(), argnums=(0, 1))
  assert compile_for_tpu(gradient, x, w, targets) < 4 * tokens * vocab / n + 2 * 4 * width * vocab


STREAMED = (
  "base_emb_dim=512", "base_mlp_dim=1024", "base_num_decoder_layers=12", "base_num_query_heads=4",
  "base_num_kv_heads=2", "head_dim=128", "vocab_size=2048", "max_target_length=2048", "per_device_batch_size=1",
  "dtype=bfloat16", "weight_dtype=bfloat16", "remat_policy=full", "attention=flash", "dataset_type=synthetic",
  "ghost_val_sets=words", "ghost_enabled=false", "segment_lengths=3", "offload_to_host=weights,optimizer",
)  # fmt: skip


def test_what_the_next_segment_needs_comes_while_this_one_is_computed(compiled_for_tpu):
  """In the compiler's schedule, copies from the host begin before a segment's loops over its layers and end after them,
  in the forward and in the backward pass; in the update most run beside the arithmetic."""
  num_arrays = 9  # the parameters of a layer
  bodies = loop_bodies(compiled_step_text(compiled_for_tpu, STREAMED))
  passes = [body for body in bodies if body.loops]
  assert len(passes) == 2  # forward, backward
  for body in passes:
    first, last = min(body.loops), max(body.loops)
    beside = [t for t in body.transfers if t.start < first and last < t.end]
    assert len(beside) == len(body.transfers) == num_arrays
  update = max(bodies, key=lambda body: len(body.transfers))
  assert len(update.transfers) == 4 * num_arrays  # weights, gradients, two moments
  beside = [t for t in update.transfers if any(t.start < place < t.end for place in update.arithmetic)]
  assert len(beside) > len(update.transfers) / 2


@dataclasses.dataclass
class Transfer:
  """A copy of a slice from the host: where it starts and ends in the schedule."""

  start: int
  end: int


@dataclasses.dataclass
class Body:
  """The schedule of one computation: its transfers, and the places of its loops and of its arithmetic."""

  transfers: list[Transfer]
  loops: list[int]
  arithmetic: list[int]


def loop_bodies(text: str) -> list[Body]:
  bodies = []
  for computation in re.split(r"\n\n", text):
    lines = computation.splitlines()
    started = {}
    body = Body([], [], [])
    for place, line in enumerate(lines):
      found = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line)
      if not found:
        continue
      if " dynamic-slice-start(" in line and "S(5)" in line:
        started[found[1]] = place
      elif " dynamic-slice-done(" in line:
        source = re.search(r"dynamic-slice-done\(.*?%?([\w.-]+)\)", line)[1]
        if source in started:
          body.transfers.append(Transfer(started[source], place))
      elif " while(" in line:
        body.loops.append(place)
      elif " fusion(" in line:
        body.arithmetic.append(place)
    if body.transfers and not lines[0].startswith("ENTRY"):
      bodies.append(body)
  return bodies


def test_the_ledger_and_the_update_read_each_moment_once(compiled_for_tpu):
  keys = (
    "base_emb_dim=512", "base_mlp_dim=2048", "base_num_query_heads=4", "base_num_kv_heads=4", "head_dim=128",
    "base_num_decoder_layers=2", "vocab_size=16384", "max_target_length=256", "dtype=bfloat16", "ghost_rank=16",
    "ghost_direction=sgd",
  )  # fmt: skip
  text = compiled_step_text(compiled_for_tpu, keys)
  entry = text[text.index("\nENTRY ") :].splitlines()
  moments = re.findall(r"([\w.-]+) = f32\[(?:16384,512|2,512,2048)\]\S* parameter\(.*\b[mn]u\W", "\n".join(entry))
  readers = [[line for line in entry if re.search(rf"[(,] ?%?{re.escape(name)}[,)]", line)] for name in moments]
  assert len(moments) == 6 and all(len(lines) == 1 and " fusion(" in lines[0] for lines in readers)


@pytest.mark.parametrize("quantization", ["int8", "fp8_stochastic"])
def test_the_estimate_of_a_step_of_rounded_products_is_near_the_compilers(quantization, compiled_for_tpu):
  from maxghost.training.memory import estimate

  keys = (
    "base_emb_dim=1024", "base_mlp_dim=4096", "base_num_query_heads=8", "base_num_kv_heads=8", "head_dim=128",
    "base_num_decoder_layers=4", "vocab_size=8192", "num_vocab_tiling=8", "max_target_length=8192", "attention=flash",
    "per_device_batch_size=1", "dtype=bfloat16", "weight_dtype=bfloat16", "remat_policy=full", "ghost_enabled=false",
  )  # fmt: skip
  memory = compiled_step(compiled_for_tpu, (*keys, f"quantization={quantization}")).memory_analysis()
  has = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
  has -= memory.alias_size_in_bytes
  given, plain = (estimate(config.load("configs/base.yml", *keys, f"quantization={q}")) for q in (quantization, ""))
  assert plain.total < given.total and abs(given.total / has - 1) < 0.1


@pytest.mark.parametrize("scored", [False, True], ids=["plain", "two_pass"])
def test_the_estimate_with_float32_weights_is_near_the_compilers(scored):
  """bfloat16 products: the compiler keeps the weights of the loops, and what the scores read of a tied table, twice."""
  from maxghost.parallel import topologies
  from maxghost.training import aot
  from maxghost.training.memory_report import compiled_sizes
  from maxghost.training.plan import Plan

  keys = (
    "base_emb_dim=1024", "base_mlp_dim=4096", "base_num_query_heads=8", "base_num_kv_heads=8", "head_dim=128",
    "base_num_decoder_layers=4", "vocab_size=32000", "num_vocab_tiling=8", "max_target_length=1024",
    "per_device_batch_size=4", "dtype=bfloat16", "weight_dtype=float32", "remat_policy=full",
    "logits_via_embedding=true", "ghost_schedule=two_pass", f"ghost_enabled={str(scored).lower()}",
  )  # fmt: skip
  cfg = config.load("configs/base.yml", *keys)
  plan = Plan.of(cfg, shardings.Layout.of(cfg.parallel, topologies.open_devices("v5e-1", 1)))
  has = sum(compiled_sizes(aot.compile_step(plan).executable.memory_analysis()).values())
  assert abs(plan.memory.total / has - 1) < 0.05


def compiled_step_text(compiled_for_tpu, keys) -> str:
  return compiled_step(compiled_for_tpu, keys).as_text()


def compiled_step(compiled_for_tpu, keys):
  from maxghost.training import state
  from maxghost.training.step import make_train_step

  cfg = config.load("configs/base.yml", *keys)
  shape = jax.ShapeDtypeStruct((1, cfg.data.max_target_length), jnp.int32)
  batch = {f"{n}{part}": shape for n in ("inputs", "targets") for part in ("", "_position", "_segmentation")}
  graphdef, abstract = state.abstract_split(cfg)
  val_batches = (batch,) * len(cfg.val_sets) if cfg.ghost.ghost_enabled else ()
  with shardings.tracing_for("tpu"):
    step, _ = make_train_step(cfg, graphdef, abstract, batch, num_segments=1, num_sets=max(len(val_batches), 1))
  return compiled_for_tpu(step, abstract, batch, val_batches, donate=(0,))


def test_a_start_on_nf4_fits_where_its_steps_do(compiled_for_tpu):
  """llama3-8b on 16 GB: what a run does not read is made without the rest, and a base is narrowed layer by layer."""
  cfg = config.load(None, "model_name=llama3-8b", "weight_dtype=bfloat16", "lora_rank=16", "lora_weight_qtype=nf4")
  flat = traverse_util.flatten_dict(state.to_tree(state.abstract_split(cfg)[1]))
  read = {path for path in flat if path[0] == "model" and "lora" not in path}

  def made(_):
    return nnx.filter_state(nnx.state(state.create(cfg)), lambda path, _: tuple(map(str, path)) not in read)

  def narrowed(layer):
    return quantized.quantize(layer, "nf4", 0, 1)

  layer = jax.ShapeDtypeStruct((4096, 14336), jnp.bfloat16)
  for run, argument in ((made, jax.ShapeDtypeStruct((), jnp.float32)), (narrowed, layer)):
    sizes = compiled_for_tpu(run, argument).memory_analysis()
    assert sizes.temp_size_in_bytes + sizes.output_size_in_bytes < 1e9
