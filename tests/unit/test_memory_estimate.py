"""The closed-form memory estimate: against real shapes, its scaling, and the verdict's advice."""

import dataclasses
import functools
import math
import time

import jax
import jax.numpy as jnp
import meshes
import pytest
import routed
import tiny
from flax import nnx

from maxghost import config, ghost, models, train
from maxghost.config.schema import ParallelConfig
from maxghost.parallel.shardings import Layout, use
from maxghost.training import compiled_steps, state
from maxghost.training import memory_report as report
from maxghost.training.memory import estimate
from maxghost.training.memory_report import Tensor, remedies, shown, verdict
from maxghost.training.plan import Plan

LONG = {  # 48 layers of width 2048 at 65,536 tokens
  "base_emb_dim": 2048,
  "base_num_query_heads": 16,
  "base_num_kv_heads": 4,
  "head_dim": 128,
  "base_mlp_dim": 4096,
  "base_num_decoder_layers": 48,
  "vocab_size": 32_768,
  "num_vocab_tiling": 16,
  "max_target_length": 65_536,
  "per_device_batch_size": 1,
  "dtype": "bfloat16",
  "weight_dtype": "bfloat16",
  "attention": "flash",
  "remat_policy": "full",
  "ghost_enabled": False,
}
EMBEDDING = 32_768 * 2048
V5E = int(15.75 * 2**30)


def long(**changes):
  return estimate(config.replace(config.load(), **(LONG | changes)))


def on_tpu(**changes):
  """`long` with 2 layers of float32 weights, as if for one TPU chip."""
  cfg = config.replace(config.load(), **(LONG | {"weight_dtype": "float32", "base_num_decoder_layers": 2} | changes))
  one = Layout.of(ParallelConfig(), jax.devices()[:1])
  return estimate(cfg, dataclasses.replace(one, abstract_platform="tpu"))


def row(estimated, name: str) -> int:
  return report.num_bytes(estimated.rows.get(name, []))


def test_parameters_optimizer_and_gradients_are_exact():
  cfg = tiny.make_config(ghost_enabled=False)
  sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(models.create_abstract(cfg)))]
  estimated = estimate(cfg)
  assert row(estimated, "parameters") == 4 * sum(sizes)
  assert row(estimated, "optimizer") == 8 * sum(sizes)
  assert estimated.total == estimated.arguments + estimated.temporaries
  halved = estimate(config.replace(cfg, mu_dtype="bfloat16"))
  assert row(halved, "optimizer") == 6 * sum(sizes)
  assert row(estimate(config.replace(cfg, opt_type="sgd")), "optimizer") == 0


def test_a_state_without_an_optimizer_has_gradients_but_no_moments():
  def build(cfg):
    return nnx.split(nnx.eval_shape(lambda: state.TrainStateNNX(models.Transformer(cfg.model, rngs=nnx.Rngs(0)))))

  cfg = tiny.make_config(ghost_enabled=False)
  whole, alone = estimate(cfg), estimate(cfg, build=build)
  assert row(alone, "optimizer") == 0 < row(alone, "gradients") == row(whole, "gradients")


def test_what_the_mask_leaves_out_has_no_gradient():
  plain, masked = long(), long(trainable_parameters_mask=("*/query/*",))
  trained = 2 * sum(size for label, size in sizes(plain).items() if "/query/" in label)
  assert (row(masked, "gradients"), row(masked, "optimizer")) == (trained, 3 * trained)  # the first moments in float32
  halves = long(trainable_parameters_mask=("*/query/*",), segment_lengths=(6,), offload_to_host=("weights",))
  rest = 2 * sum(size for label, size in sizes(plain).items() if "/layers/" in label) - trained
  assert row(halves, "gradients") == (3 * trained + 2 * rest) // 8  # a segment, its gradients, and the next


def test_slices_that_train_apart_have_an_outer_state_of_what_they_train():
  """Two moments in flight of the trained parameters, and the global value of all."""
  masked = {"trainable_parameters_mask": ("*/query/*",), "num_communication_overlapping_steps": 2}
  cfg = tiny.make_config(enable_diloco=True, dcn_data_parallelism=2, diloco_sync_period=4, **masked)
  plan = Plan.of(cfg, Layout.of(cfg.parallel, jax.devices()[:2]))
  leaves = jax.tree.leaves(plan.state)
  held = [leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves]
  rows = report.num_bytes(plan.memory.resident["batch and validation rows"])
  assert plan.memory.arguments == sum(held) + rows


def test_a_tensor_says_what_it_is():
  tensor = Tensor((12, 131_072, 3072), "bfloat16", "mlp activations", 2)
  assert tensor.bytes == 12 * 131_072 * 3072 * 2 * 2
  assert tensor.describe() == "2 x bf16[12,131072,3072] 19.33 GB: mlp activations"


def test_carries_follow_the_segments():
  carry = 65_536 * 2048 * 2
  assert row(long(), "boundary carries") == 48 * carry
  assert row(long(segment_lengths=(6,)), "boundary carries") == (8 + 6) * carry
  assert row(long(segment_lengths=(12, 4)), "boundary carries") == (4 + 3 + 4) * carry


def test_what_the_remat_policy_keeps_is_kept_for_every_layer():
  kept = "within-segment activations"
  rows = {policy: row(long(remat_policy=policy), kept) for policy in ("full", "minimal", "none")}
  assert rows["full"] < rows["minimal"] < rows["none"]
  products = 65_536 * 2 * (16 * 128 + 2 * 4 * 128 + 2048 + 2 * 4096)  # queries, keys, values, out, wi_0, wi_1
  assert rows["minimal"] - rows["full"] == 48 * products
  short = long(remat_policy="minimal", segment_lengths=(6,))
  assert row(short, "within-segment activations") - rows["full"] == 6 * products


def test_streamed_weights_and_moments_live_in_host_memory():
  near, far = long(segment_lengths=(6,)), long(segment_lengths=(6,), offload_to_host=("weights", "optimizer"))
  stacked = sum(
    size for label, size in sizes(near).items() if "/layers/" in label
  )  # fmt: skip
  assert near.host == 0
  assert far.host == stacked * (2 + 2 + 4 + 2)  # weights, gradients, two moments
  assert near.arguments - far.arguments == stacked * (2 + 4 + 2)


def test_segments_at_work_are_beside_the_stack():
  """Weights cut out of the stack and gradients that go there; with streaming the next segment's weights as well. The
  embedding's gradient is formed after those of the layers."""
  plain = long()
  stacked = 2 * sum(size for label, size in sizes(plain).items() if "/layers/" in label)
  outer = 2 * (sum(sizes(plain).values()) - EMBEDDING) - stacked
  assert row(plain, "gradients") == outer + stacked
  assert row(long(segment_lengths=(6,)), "gradients") == outer + stacked + 2 * stacked // 8
  assert row(long(segment_lengths=(12, 4)), "gradients") == outer + stacked + 2 * stacked // 4 + 2 * stacked // 12
  assert row(long(segment_lengths=(6,), offload_to_host=("weights",)), "gradients") == outer + 3 * stacked // 8


def test_a_tpu_has_the_layers_weights_also_in_the_dtype_of_the_products():
  """In the walk of reverse_scan the ledger reads the weights themselves; a tied table is scored by both of its uses."""
  copies, scores = "weights of the products", {"ghost_enabled": True, "ghost_schedule": "two_pass"}
  stacked = sum(size for label, size in sizes(on_tpu()).items() if "/layers/" in label)
  assert row(on_tpu(), copies) == row(on_tpu(**scores), copies) == 2 * stacked
  tied = {"logits_via_embedding": True}
  assert row(on_tpu(**tied), copies) == 2 * stacked
  assert row(on_tpu(**tied, **scores), copies) == 2 * (stacked + EMBEDDING)
  assert row(on_tpu(**tied, **(scores | {"ghost_schedule": "reverse_scan"})), copies) == 2 * EMBEDDING
  for other in ({"dtype": "float32"}, {"weight_dtype": "bfloat16"}, scores | {"ghost_schedule": "reverse_scan"}):
    assert row(on_tpu(**other), copies) == 0
  assert row(long(weight_dtype="float32"), copies) == 0  # only a TPU's compiler makes them


@pytest.mark.parametrize("tiles", [1, 16])
def test_the_tables_validation_gradients_are_beside_their_directions(tiles):
  """In the dtype of the products, and summed over tiles in float32; with sgd gradients are directions."""
  scored = {"ghost_enabled": True, "ghost_schedule": "two_pass", "num_vocab_tiling": tiles}
  probes = "ghost directions and probes"
  adam, sgd = on_tpu(**scored), on_tpu(**scored, ghost_direction="sgd")
  assert row(adam, probes) - row(sgd, probes) == EMBEDDING * (2 + (4 if tiles > 1 else 2))


def test_the_cotangent_of_whole_logits_may_wait_for_the_layers():
  """Where it is larger than the gradient of the output table, which is then formed after the layers'."""
  whole, tiles = (long(num_vocab_tiling=n, max_target_length=4096, segment_lengths=()) for n in (1, 16))
  assert whole.moment == tiles.moment == "the backward pass of a layer"
  assert row(whole, "logits") == 4096 * 32_768 * 2 and row(tiles, "logits") == 0
  assert row(tiles, "gradients") - row(whole, "gradients") == 2 * EMBEDDING
  assert row(long(num_vocab_tiling=1, max_target_length=1024), "logits") == 0


def test_a_pipeline_has_the_gradients_of_an_iteration_beside_their_sum():
  keys = {"ghost_enabled": False, "base_num_decoder_layers": 4, "num_pipeline_microbatches": 2}
  for repeats in (1, 2):
    cfg = meshes.make_config({"ici_stage_parallelism": 2}, **keys, num_pipeline_repeats=repeats)
    found = estimate(cfg, meshes.make_layout(cfg, 2))
    layers = sum(t.bytes for t in found.resident["parameters"] if "/layers/" in t.why)
    (iteration,) = (t.bytes for held in found.rows.values() for t in held if "one iteration" in t.why)
    assert iteration == layers // repeats > 0


def test_the_rows_of_experts_are_counted():
  """Each token's hidden state, and a copy for each of its experts."""
  work, keys = "within-segment activations", {"mlp_activations": ("silu",), "max_target_length": 1024}
  dense, routed_rows = long(**keys, base_mlp_dim=8192), long(**keys, num_experts=4, num_experts_per_tok=2)
  assert row(routed_rows, work) - row(dense, work) == 2 * 2 * 1024 * 2048 * 2


def test_the_layers_of_a_cycle_are_gathered_together():
  cfg = meshes.make_config({"ici_fsdp_parallelism": 4}, ghost_enabled=False)
  turns = {"inhomogeneous_layer_cycle_interval": 2, "attention_type": ("local_sliding", "global")}
  both = config.replace(cfg, sliding_window_size=4, **turns)
  one, two = (row(estimate(each, meshes.make_layout(each, 4)), "collectives' buffers") for each in (cfg, both))
  assert two == 2 * one > 0


def test_attention_scores_are_in_float32_and_their_cotangents_in_the_dtype_of_the_products():
  work, keys = "within-segment activations", {"max_target_length": 1024}
  flash, whole = long(**keys), long(**keys, attention="dot_product")
  assert row(whole, work) - row(flash, work) == 16 * 1024**2 * (4 + 2)


def test_attention_and_feed_forward_layer_are_differentiated_one_after_the_other_where_layers_are_scored():
  work = "within-segment activations"
  hidden, width, heads, keys = (65_536 * 2 * n for n in (2048, 4096, 16 * 128, 4 * 128))
  scored = {"ghost_enabled": True, "ghost_schedule": "reverse_scan"}
  assert row(long(segment_lengths=(6,)), work) == 2 * hidden + 3 * width + 4 * (heads + keys)
  assert row(long(segment_lengths=(6,), **scored), work) == 2 * hidden + 3 * width + 2 * (heads + keys)
  assert row(long(segment_lengths=(6,), base_mlp_dim=512, **scored), work) == 2 * hidden + 4 * (heads + keys)
  assert row(long(**scored), work) == row(long(), work)
  single = row(long(segment_lengths=(6,), mlp_activations=("gelu",)), work)  # in place of what it is formed from
  assert single == 2 * hidden + width + 4 * (heads + keys)


def test_scores_that_take_turns_hold_one_batch_of_a_segments_inputs():
  """Beside what the plain step holds there are: the cotangent of the rows that wait, the validation gradients outside
  the stack, and the segment inputs of the validation rows, unless on the host. Those of a segment's weights are where
  the training gradients come."""
  keys = {
    "ghost_enabled": True, "ghost_schedule": "reverse_scan", "ghost_val_batch_size": 1, "segment_lengths": (6,),
    "ghost_direction": "sgd",
  }  # fmt: skip
  carry, plain = 65_536 * 2048 * 2, long(segment_lengths=(6,))
  stacked = sum(size for label, size in sizes(plain).items() if "/layers/" in label)
  outer = sum(sizes(plain).values()) - stacked
  probes = sum(48 if "/layers/" in label else 1 for label in sizes(plain)) * 65_536 * 4
  wanted = {(): 2 * outer + carry + probes + 8 * carry}
  wanted["carries",] = wanted[()] - 8 * carry
  for carries, size in wanted.items():
    scored = long(**keys, offload_to_host=carries)
    assert row(scored, "ghost directions and probes") == size
    assert row(scored, "boundary carries") == row(plain, "boundary carries") == (8 + 6) * carry
    assert "  validation and training rows take turns by segments of 6 layers" in scored.table()
  streamed = long(**keys, offload_to_host=("weights", "carries"))
  assert row(streamed, "ghost directions and probes") == wanted["carries",]
  assert row(long(**(keys | {"ghost_val_batch_size": 3})), "boundary carries") == (8 + 3 * 6) * carry
  short = long(**keys, max_target_length=1024)  # gradients are larger than inputs here
  assert "  validation and training rows take turns layer by layer" in short.table()
  assert row(short, "ghost directions and probes") == 2 * outer + 4 * stacked // 48 + (15 * carry + probes) // 64


@functools.cache
def _sizes(keys: tuple) -> dict[str, int]:
  cfg = config.replace(config.load(), **dict(keys))
  flat = nnx.to_flat_state(nnx.state(models.create_abstract(cfg), nnx.Param))
  return {"/".join(map(str, path)): v.get_value().size for path, v in flat}


def sizes(estimated) -> dict[str, int]:
  """{path: elements} of the model's parameters."""
  names = ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim", "base_mlp_dim", "vocab_size",
           "base_num_decoder_layers", "mlp_activations")  # fmt: skip
  return _sizes(tuple((name, getattr(estimated.cfg.model, name)) for name in names))


def over(cfg: config.Config, **sizes: int) -> Layout:
  """A layout over the test's devices. sizes: of mesh axes, the rest 1."""
  axes = {f"ici_{axis}_parallelism": size for axis, size in ({"fsdp": 1} | sizes).items()}
  return Layout.of(config.replace(cfg, **axes).parallel, jax.devices()[: math.prod(sizes.values())])


def test_the_mesh_divides_weights_and_tokens():
  cfg = long().cfg
  one, many = estimate(cfg), estimate(cfg, over(cfg, fsdp=4, tensor=2))
  assert row(many, "parameters") == pytest.approx(row(one, "parameters") / 8, rel=1e-3)
  assert many.tokens == 2 * 65_536  # rows are per device: those of both devices of a tensor pair
  wide = estimate(cfg, over(cfg, context=4))
  assert wide.tokens == 65_536


RULES = (
  {"embed": (), "mlp": ("fsdp",), "vocab": ("fsdp",), "heads": (), "q_heads": (), "kv_heads": ()},
  {"embed": ("tensor",), "mlp": ("fsdp",), "vocab": ("fsdp",), "heads": (), "q_heads": (), "kv_heads": ("fsdp",)},
  {"embed": ("tensor",), "mlp": (), "vocab": (), "heads": (), "q_heads": (), "kv_heads": (), "layers": ("fsdp",)},
)


@pytest.mark.parametrize("over_data", [False, True])
@pytest.mark.parametrize("rules", RULES)
def test_what_lives_between_steps_is_split_as_the_users_rules_say(rules, over_data):
  mesh = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
  rows = tuple(rules.items())
  cfg = meshes.make_config(mesh, logical_axis_rules=rows, shard_optimizer_over_data=over_data, ghost_enabled=False)
  layout = meshes.make_layout(cfg, 8)
  shape_of = layout.abstract(state.abstract_split(cfg)[1])
  wanted = {"parameters": 0, "optimizer": 0}
  for path, v in nnx.to_flat_state(shape_of):
    leaf = v.get_value()
    part = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    if leaf.shape:
      wanted["parameters" if path[0] == "model" else "optimizer"] += part
  estimated = estimate(cfg, layout)
  assert {name: row(estimated, name) for name in wanted} == wanted
  assert wanted["optimizer"] == pytest.approx(2 * wanted["parameters"] / (2 if over_data else 1), rel=0.02)
  copies = sum(t.bytes for held in estimated.rows.values() for t in held if t.why.startswith("weights, copied"))
  assert copies == (wanted["parameters"] if over_data else 0)  # XLA makes them: the new weights are gathered
  assert wanted["parameters"] < 0.9 * row(estimate(cfg, Layout.of(ParallelConfig(), jax.devices()[:1])), "parameters")


def test_weights_are_gathered_over_the_mesh_axes_that_split_the_batch():
  """By default embed is on fsdp, which splits rows; on tensor a layer computes with the part that is there."""
  cfg = meshes.make_config({"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}, ghost_enabled=False)
  own = {"embed": ("tensor",), "mlp": (), "vocab": (), "heads": (), "q_heads": (), "kv_heads": ()}
  layer = sum(size for label, size in _sizes(tuple(meshes.SIZES.items())).items() if "/layers/" in label) // 2
  for rules, elements in ({}, layer * 3 // 8), (own, 0):
    changed = config.replace(cfg, logical_axis_rules=tuple(rules.items()))
    found = row(estimate(changed, meshes.make_layout(changed, 8)), "collectives' buffers")
    assert found == pytest.approx(2 * 4 * elements, rel=0.02)
    narrow = estimate(config.replace(changed, dtype="bfloat16"), meshes.make_layout(changed, 8))
    assert row(narrow, "collectives' buffers") == found / 2


def test_layers_that_are_not_stacked_are_layers():
  cfg = tiny.make_config(ghost_enabled=False)
  apart = estimate(config.replace(cfg, scan_layers=False))
  assert row(apart, "parameters") == row(estimate(cfg), "parameters")
  assert row(apart, "boundary carries") == row(estimate(cfg), "boundary carries") > 0


def test_attention_under_another_name_is_attention():
  cfg = tiny.make_config(ghost_enabled=False, **routed.GPT_OSS)
  names = [t.why for held in estimate(cfg).rows.values() for t in held]
  assert any(name.startswith("queries, attention output") for name in names)


def test_tiles_divide_the_logits():
  def logits(n):
    return row(long(vocab_size=201_088, num_vocab_tiling=n, max_target_length=32_768, segment_lengths=(6,)), "logits")

  whole = 32_768 * 201_088 * 2
  assert logits(1) == whole
  assert logits(2) == whole / 2


def test_blocks_of_the_vocabulary_hold_the_table_in_blocks():
  """The table in blocks, their gradients and one copy on its way, in place of a float32 gradient of the table."""
  large = {"vocab_size": 201_088, "num_vocab_tiling": 8, "max_target_length": 32_768, "base_num_decoder_layers": 2}
  tokens, blocks = long(**large), long(**large, vocab_tiling_axis="vocab")
  table, hidden = 2 * 201_088 * 2048, 2 * 32_768 * 2048
  assert row(tokens, "gradients") == table + 2 * table
  assert row(blocks, "gradients") == table + 3 * table
  assert row(blocks, "within-segment activations") - row(tokens, "within-segment activations") == hidden
  assert row(blocks, "logits") == row(tokens, "logits")


def test_a_step_that_fits_has_one_line():
  estimated = estimate(config.load())
  (line,) = verdict(estimated, V5E)
  assert line.startswith("memory: needs ") and "to spare" in line


def test_the_verdict_names_the_largest_tensors_and_settings_that_make_it_fit():
  estimated = long(remat_policy="none", attention="dot_product", max_target_length=8192)
  text = "\n".join(verdict(estimated, V5E))
  assert "does not fit" in text
  assert "tokens per device: 8,192 = 1 rows of 8192 tokens" in text
  tensors = [tensor for held in estimated.rows.values() for tensor in held]
  assert max(tensors, key=lambda tensor: tensor.bytes).describe() in text
  begin = time.perf_counter()
  steps = remedies(estimated, V5E)
  assert steps[-1][2].total <= V5E < estimated.total
  assert [after.total for _, _, after in steps] == sorted((after.total for _, _, after in steps), reverse=True)
  for keys, _, after in steps:
    assert f"{keys} -> {shown(after.total)}" in text
  changes = dict(pair.split("=") for keys, _, _ in steps for pair in keys.split())
  written = config.replace(estimated.cfg, **{k: int(v) if v.isdigit() else v for k, v in changes.items()})
  assert estimate(written).total == steps[-1][2].total  # what is printed can be typed
  assert time.perf_counter() - begin < 10


@pytest.mark.parametrize(("axis", "rows"), [("tensor", 4), ("context", 2)])
def test_the_verdict_counts_the_rows_that_a_device_has(axis, rows):
  """Devices that share a matrix have the same rows."""
  keys = {f"ici_{axis}_parallelism": 2, "ici_data_parallelism": 1, "per_device_batch_size": 2, "vocab_size": 260}
  cfg = config.replace(config.load(), **({"ici_fsdp_parallelism": 1} | keys))
  estimated = estimate(cfg, Layout.of(cfg.parallel, jax.devices()[:2]))
  length = cfg.data.max_target_length
  lines = verdict(estimated, estimated.total - 1)
  assert f"tokens per device: {rows * length:,} = {rows} rows of {length} tokens" in lines[1]


def test_settings_that_need_each_other_are_all_printed():
  """Weights leave the device by segments: the line before that of the segments is not a step of its own."""
  given = ("model_name=gpt2-small", "max_target_length=1024", "per_device_batch_size=16", "mtp_num_layers=1")
  estimated = estimate(config.load(None, *given))
  capacity = int(0.3 * estimated.total)
  steps = remedies(estimated, capacity)
  typed = [key for keys, _, _ in steps for key in keys.split()]
  assert estimate(config.load(None, *given, *typed)).total == steps[-1][2].total <= capacity


def test_no_setting_is_advised_that_is_not_needed():
  estimated = long(remat_policy="none", max_target_length=8192, attention="blockwise")
  steps = remedies(estimated, estimated.total - 1)
  assert len(steps) == 1


def test_a_model_that_cannot_fit_is_told_so():
  text = "\n".join(verdict(long(), 10**9))
  assert "too much: use more devices, or a smaller model" in text


def test_settings_without_another_state_are_tried_on_the_same_one():
  """And what changes the state is estimated from a state of its own."""
  cfg, builds = tiny.make_config(), []

  def build(cfg):
    builds.append(cfg)
    return state.abstract_split(cfg)

  estimated = estimate(cfg, build=build)
  for keys in {"attention": "blockwise"}, {"remat_policy": "full"}, {"ghost_rank": 1}, {"segment_lengths": (1,)}:
    changed = estimated.change(**keys)
    assert changed.total == estimate(config.replace(cfg, **keys)).total
  assert len(builds) == 1
  assert row(estimated.change(mu_dtype="bfloat16"), "optimizer") == row(estimated, "optimizer") * 3 // 4
  assert len(builds) == 2
  assert estimated.change(ghost_rank=500) is None  # saves nothing: the trainer would refuse it


def test_no_setting_is_advised_that_the_devices_refuse():
  """Half of 8 rows is 4 for 8 devices to train on; 5 rows of validation do not join those of 8 devices."""
  keys = {"ghost_select": "topk", "ghost_select_fraction": 0.5, "per_device_batch_size": 2, "ghost_val_batch_size": 8}
  cfg = tiny.make_config(**keys)
  estimated = estimate(cfg, over(cfg, data=8))
  assert estimated.change(attention="blockwise") is not None
  assert estimated.change(per_device_batch_size=1) is None
  cfg = tiny.make_config(ghost_val_batch_size=5, per_device_batch_size=1)
  assert estimate(cfg, over(cfg, data=8)).change(ghost_schedule="concat") is None


def test_a_run_begins_with_the_table():
  estimated = estimate(tiny.make_config())
  assert any(line.split()[0] == "parameters" for line in estimated.table())


def test_an_allocation_that_failed_becomes_advice():
  error = RuntimeError("RESOURCE_EXHAUSTED: out\nthe total memory required (16.28G) exceeds available HBM (15.75G)")
  text = report.too_large(error, long(), V5E)
  assert text.startswith("out of device memory: the total memory required (16.28G) exceeds available HBM (15.75G)\n")
  assert "does not fit" in text and "segment_lengths=" in text
  small = report.too_large(error, long(segment_lengths=(6,), max_target_length=1024), 2 * V5E)
  assert "to need a fifth less:" in small and "cheapest settings first" in small


def test_the_closed_form_stands_beside_the_compilers():
  estimated = estimate(tiny.make_config())
  line = estimated.beside({"arguments": estimated.arguments, "temporaries": 2 * estimated.temporaries})
  assert f"({estimated.total / (estimated.total + estimated.temporaries) - 1:+.1%})" in line


@pytest.mark.parametrize("rank", [4, 5])
def test_factors_of_experts_are_those_of_the_twin(rank):
  """At rank 5 matrices of 20 x 14 keep their directions whole. On a mesh each device has its part."""
  cfg = tiny.make_config(**(routed.MIXTRAL | {"num_experts": 6}), ghost_rank=rank, ghost_direction="sgd")
  model = models.create_abstract(cfg)
  twin = ghost.attach(model, num_examples=3, spec=ghost.DirectionSpec(rank=rank))
  shapes = {p.label: p.part_shapes(1) for p in twin.scored}
  low_rank = [p.label for p in twin.scored if p.low_rank]
  assert ("decoder/layers/MoeBlock_0/wi_0" in low_rank) == (rank == 4)
  for layout in (None, over(cfg, fsdp=2, expert=2)):
    with use(layout):
      parts = jax.jit(lambda: twin.placed({k: tuple(map(jnp.zeros, v.values())) for k, v in shapes.items()}))()
    own = [x.addressable_shards[0].data.nbytes for label in low_rank for x in parts[label]]
    estimated = estimate(cfg, layout)
    tensors = [t for held in estimated.rows.values() for t in held if t.why == f"directions of rank {rank}"]
    assert sum(t.bytes for t in tensors) == sum(own)
    assert layout is None or sum(own) < 0.8 * 4 * sum(math.prod(s) for k in low_rank for s in shapes[k].values())


def test_a_step_that_cannot_fit_is_refused_with_the_keys_to_change():
  estimated = long(remat_policy="none", attention="dot_product", max_target_length=8192)
  report.check(estimated, None)
  report.check(estimated, int(estimated.total / 1.4))  # the estimate may be wrong
  with pytest.raises(config.ConfigError) as refused:
    report.check(estimated, V5E)
  keys, _, after = remedies(estimated, V5E)[-1]
  assert str(refused.value).startswith(f"the step is estimated to need {shown(estimated.total)} per device, which has ")
  assert f"{keys}, which is estimated to need {shown(after.total)}; --force starts it all the same" in str(
    refused.value
  )
  assert after.total <= V5E and "more devices" not in str(refused.value)
  with pytest.raises(config.ConfigError, match=r" GB, and more devices, or a smaller model; --force"):
    report.check(estimated, V5E // 50)  # all of the settings together are not enough


def test_a_batch_that_is_far_too_large_is_halved_in_one_line():
  estimated = long(per_device_batch_size=10_000_000, segment_lengths=(6,))
  steps = remedies(estimated, V5E)
  assert len({keys.partition("=")[0] for keys, _, _ in steps}) == len(steps)
  assert steps[-1][2].cfg.data.per_device_batch_size < 10


@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_training_refuses_before_anything_is_compiled_or_written(flags, tmp_path, monkeypatch, capsys):
  def compiled(*_):
    raise config.ConfigError("compiled")

  monkeypatch.setattr(report, "capacity", lambda device: 100_000)
  monkeypatch.setattr(compiled_steps, "build", compiled)
  keys = [f"{name}={value}" for name, value in (meshes.SIZES | {"dataset_type": "synthetic"}).items()]
  code = train.main([*keys, "run_name=large", f"base_output_directory={tmp_path}", *flags])
  said = capsys.readouterr().err.splitlines()
  assert code == 2 and len(said) == 1 and not list(tmp_path.iterdir())
  assert ("maxghost: compiled" if flags else "per device, which has 100.00 kB; use ") in said[0]


def test_the_default_run_is_not_refused():
  report.check(estimate(config.load()), 2**30)  # on a machine with 1 GiB


def test_further_tokens_are_counted():
  """Their modules in parameters, moments and gradients, to the byte."""
  cfg = config.replace(config.load(), mtp_num_layers=2)
  _, abstract = state.abstract_split(cfg)
  count, estimated = sum(x.size for x in jax.tree.leaves(abstract["model"])), estimate(cfg)
  assert row(estimated, "parameters") == row(estimated, "gradients") == 4 * count
  assert row(estimated, "optimizer") == 8 * count
