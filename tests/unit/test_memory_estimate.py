"""The closed-form memory estimate: against real shapes, its scaling, and the verdict's advice."""

import math

import jax
import pytest
import routed
import tiny
from flax import nnx

from maxghost import config, ghost, models
from maxghost.parallel import memory_estimate
from maxghost.parallel.memory_estimate import Tensor, decoder_parameters, estimate
from maxghost.parallel.memory_verdict import largest, remedies, verdict
from maxghost.training import memory_report, state

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
V5E = int(15.75 * 2**30)


def long(**changes):
  return estimate(config.replace(config.load(), **(LONG | changes)))


def row(estimated, name: str) -> int:
  return sum(r.bytes for r in estimated.rows if r.name == name)


@pytest.mark.parametrize("changes", [{}, {"logits_via_embedding": True}, {"mlp_activations": ("gelu",)}])
def test_parameters_in_closed_form_are_those_of_the_model(changes):
  cfg = tiny.make_config(**changes)
  flat = nnx.to_flat_state(nnx.state(models.create_abstract(cfg), nnx.Param))
  real = {"/".join(map(str, path)): (v.shape, v.get_metadata()["axes"]) for path, v in flat}
  assert decoder_parameters(cfg) == real


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
  """Weights cut out of the stack and gradients that go there; with streaming the next segment's weights as well."""
  plain = long()
  stacked = 2 * sum(size for label, size in sizes(plain).items() if "/layers/" in label)
  outer = 2 * sum(sizes(plain).values()) - stacked
  assert row(plain, "gradients") == outer + stacked
  assert row(long(segment_lengths=(6,)), "gradients") == outer + stacked + 2 * stacked // 8
  assert row(long(segment_lengths=(12, 4)), "gradients") == outer + stacked + 2 * stacked // 4 + 2 * stacked // 12
  assert row(long(segment_lengths=(6,), offload_to_host=("weights",)), "gradients") == outer + 3 * stacked // 8


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


def sizes(estimated) -> dict[str, int]:
  out = {}
  for label, (shape, _) in decoder_parameters(estimated.cfg).items():
    total = 1
    for n in shape:
      total *= n
    out[label] = total
  return out


def test_the_mesh_divides_weights_and_tokens():
  one, many = estimate(long().cfg), estimate(long().cfg, {"data": 2, "fsdp": 4, "tensor": 2})
  assert row(many, "parameters") == pytest.approx(row(one, "parameters") / 8, rel=1e-3)
  assert many.tokens == 2 * 65_536  # rows are per device: those of both devices of a tensor pair
  wide = estimate(long().cfg, {"context": 4})
  assert wide.tokens == 65_536


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
  assert verdict(estimated, V5E).startswith("memory: needs ")
  assert "to spare" in verdict(estimated, V5E) and "\n" not in verdict(estimated, V5E)


def test_the_verdict_names_the_largest_tensors_and_settings_that_make_it_fit():
  estimated = long(remat_policy="none", attention="dot_product", max_target_length=8192)
  text = verdict(estimated, V5E)
  assert "does not fit" in text
  assert "tokens per device: 8,192 = 1 rows of 8192 tokens" in text
  assert largest(estimated, 1)[0].describe() in text
  steps = remedies(estimated, V5E)
  assert steps[-1][2].total <= V5E < estimated.total
  assert [after.total for _, _, after in steps] == sorted((after.total for _, _, after in steps), reverse=True)
  for keys, _, after in steps:
    assert f"{keys} -> {memory_estimate.shown(after.total)}" in text
  changes = dict(pair.split("=") for keys, _, _ in steps for pair in keys.split())
  written = config.replace(estimated.cfg, **{k: int(v) if v.isdigit() else v for k, v in changes.items()})
  assert estimate(written).total == steps[-1][2].total  # what is printed can be typed


def test_no_setting_is_advised_that_is_not_needed():
  estimated = long(remat_policy="none", max_target_length=8192, attention="blockwise")
  steps = remedies(estimated, estimated.total - 1)
  assert len(steps) == 1


def test_a_model_that_cannot_fit_is_told_so():
  text = verdict(long(), 10**9)
  assert "too much: use more devices, or a smaller model" in text


def test_the_trainers_estimate_is_of_its_own_parameters():
  cfg = tiny.make_config(base_num_decoder_layers=2)
  _, abstract = state.abstract_split(cfg)
  assert memory_report.estimate_of(cfg, abstract).total == estimate(cfg).total
  assert any(line.split()[0] == "parameters" for line in memory_report.start_lines(estimate(cfg), None))


def test_an_allocation_that_failed_becomes_advice():
  error = RuntimeError("RESOURCE_EXHAUSTED: out\nthe total memory required (16.28G) exceeds available HBM (15.75G)")
  text = memory_report.too_large(error, long(), V5E)
  assert text.startswith("out of device memory: the total memory required (16.28G) exceeds available HBM (15.75G)\n")
  assert "does not fit" in text and "segment_lengths=" in text
  small = memory_report.too_large(error, long(segment_lengths=(6,), max_target_length=1024), 2 * V5E)
  assert "to need a fifth less:" in small and "cheapest settings first" in small


def test_the_closed_form_stands_beside_the_compilers():
  estimated = estimate(tiny.make_config())
  line = estimated.beside({"arguments": estimated.arguments, "temporaries": 2 * estimated.temporaries})
  assert f"({estimated.total / (estimated.total + estimated.temporaries) - 1:+.1%})" in line


@pytest.mark.parametrize("rank", [4, 5])
def test_factors_of_experts_are_those_of_the_twin(rank):
  """At rank 5 matrices of 20 x 14 keep their directions whole. On a mesh each device has its part."""
  cfg = tiny.make_config(**routed.MIXTRAL, ghost_rank=rank, ghost_direction="sgd")
  model = models.create_abstract(cfg)
  twin = ghost.attach(model, num_examples=3, spec=ghost.DirectionSpec(rank=rank))
  parts = {p.label: p.spec.part_shapes(p.stack_shape, 1, p.shape) for p in twin.scored if p.spec.low_rank}
  assert ("decoder/layers/MoeBlock_0/wi_0" in parts) == (rank == 4)
  expected = 4 * sum(math.prod(shape) for shapes in parts.values() for shape in shapes.values())
  _, abstract = state.abstract_split(cfg)
  for mesh, devices in ({}, 1), ({"fsdp": 2, "expert": 2}, 4):
    estimated = memory_report.estimate_of(cfg, abstract, mesh)
    tensors = [t for r in estimated.rows for t in r.tensors if t.why == f"directions of rank {rank}"]
    assert sum(t.bytes for t in tensors) == pytest.approx(expected / devices, rel=0.01)
