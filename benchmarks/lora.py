"""What scores cost beside LoRA, and the memory of a QLoRA step.

  python benchmarks/lora.py [key=value ...]             FLOPs at the shapes of SmolLM2-135M, by XLA
  python benchmarks/lora.py --seconds [key=value ...]   also the time of both steps, in turns
  python benchmarks/lora.py --tpu [key=value ...]       llama3-8b on NF4, 2,048 tokens, on one TPU v5e (needs libtpu)

XLA counts the body of a loop once, so the FLOPs are counted with unrolled layers, of two and of four, and continued to
30 along a line. The validation rows take what a plain LoRA step of as many rows takes; the target is for the rest.
"""

import sys

import _measure
from _measure import Figure

SMOLLM2 = (
  "base_emb_dim=576", "base_num_query_heads=9", "base_num_kv_heads=3", "head_dim=64", "base_mlp_dim=1536",
  "base_num_decoder_layers=30", "vocab_size=49152", "logits_via_embedding=true", "rope_max_timescale=100000.0",
  "max_target_length=512", "per_device_batch_size=4", "ghost_val_batch_size=1", "ghost_detail=total",
)  # fmt: skip
LORA = ("lora_rank=8", "lora_alpha=16", "adam_weight_decay=0", "steps=10")
LLAMA3 = (
  "model_name=llama3-8b", "lora_rank=16", "lora_alpha=32", "lora_weight_qtype=nf4", "adam_weight_decay=0",
  "weight_dtype=bfloat16", "dtype=bfloat16", "max_target_length=2048", "per_device_batch_size=1", "remat_policy=full",
  "num_vocab_tiling=8", "steps=10", "attention=flash", "ghost_val_batch_size=1",
)  # fmt: skip
LAYERS, COUNTED, LIMIT = 30, (2, 4), 1.10
TOPOLOGY = "v5e-1"


def flops(*keys: str) -> float:
  """Of one step, by XLA."""
  import _steps

  from maxghost import config, objectives
  from maxghost.training import state

  counts = []
  for layers in COUNTED:
    more = ("scan_layers=false", "remat_policy=none", f"base_num_decoder_layers={layers}")
    cfg = config.load(str(_measure.BASE), *SMOLLM2, *LORA, *keys, *more)
    graphdef, abstract = state.abstract_split(cfg)
    sizes, length = (cfg.data.per_device_batch_size, cfg.ghost.ghost_val_batch_size), cfg.data.max_target_length
    batch, val = (objectives.create(cfg).batch_spec(rows, length) for rows in sizes)
    compiled = _steps.compile_step(cfg, graphdef, abstract, batch, (val,) * len(cfg.val_sets), 3)
    counts.append(compiled.cost_analysis()["flops"])
  slope = (counts[1] - counts[0]) / (COUNTED[1] - COUNTED[0])
  return counts[0] + (LAYERS - COUNTED[0]) * slope


def cost(overrides: list[str], seconds: bool) -> tuple[list[dict], list[Figure]]:
  from maxghost import config

  val_rows = config.load(str(_measure.BASE), *SMOLLM2, *overrides).ghost.ghost_val_batch_size
  off = ("ghost_enabled=false",)
  plain, scored = flops(*overrides, *off), flops(*overrides)
  validation = flops(*overrides, *off, f"per_device_batch_size={val_rows}")
  rows = [{"step": name, "GFLOP": x / 1e9, "of plain LoRA": x / plain} for name, x in (
    ("all weights, plain", flops(*overrides, *off, "lora_rank=0")), ("LoRA, plain", plain), ("LoRA, scored", scored),
    ("its validation rows", validation),
  )]  # fmt: skip
  figures = [Figure("FLOPs, scored without its validation rows over plain", (scored - validation) / plain, LIMIT)]
  if seconds:
    import _steps

    keys = {"plain": off, "scored": (), "validation": (*off, f"per_device_batch_size={val_rows}")}
    made = {
      name: _steps.make_step(config.load(str(_measure.BASE), *SMOLLM2, *LORA, *overrides, *more))
      for name, more in keys.items()
    }
    taken = _measure.take_turns({name: lambda step=step: step() for name, step in made.items()}, rounds=7)
    share = _measure.ratio(taken, "scored", "plain") - _measure.ratio(taken, "validation", "plain")
    figures.append(Figure("time, scored without its validation rows over plain", share, LIMIT))
  return rows, figures


def memory(overrides: list[str]) -> tuple[list[dict], list[Figure]]:
  from maxghost.parallel import topologies

  topologies.prepare_environment(TOPOLOGY)
  from maxghost import config
  from maxghost.parallel.shardings import Layout
  from maxghost.training import aot
  from maxghost.training.memory_report import compiled_sizes
  from maxghost.training.plan import Plan

  rows, most = [], topologies.hbm_bytes(TOPOLOGY) or 0
  for name, more in (("plain", "ghost_enabled=false"), ("scored", "ghost_schedule=two_pass")):
    cfg = config.load(str(_measure.BASE), *LLAMA3, *overrides, more)
    plan = Plan.of(cfg, Layout.of(cfg.parallel, topologies.open_devices(TOPOLOGY, 1)))
    found = aot.compile_step(plan)
    size = sum(compiled_sizes(found.executable.memory_analysis()).values()) if found.executable else float("nan")
    rows.append({"step": name, "GB": size / 1e9, "closed form, GB": plan.memory.total / 1e9, "device, GB": most / 1e9})
    print(rows[-1], found.problem, flush=True)
  return rows, [Figure(f"GB of a {row['step']} NF4 step of llama3-8b", row["GB"], most / 1e9) for row in rows]


def main() -> int:
  options = _measure.arguments(__doc__, seconds=False, tpu=False)
  rows, figures = memory(options.overrides) if options.tpu else cost(options.overrides, options.seconds)
  return _measure.publish("lora", rows, figures, path=options.json)


if __name__ == "__main__":
  sys.exit(_measure.run(main))
