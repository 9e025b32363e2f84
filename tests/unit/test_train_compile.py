"""The command train_compile: what it prints, what it saves, what it refuses; on virtual devices, and for TPU slices."""

import contextlib
import io
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import meshes
import numpy as np
import oracles
import pytest
import tiny
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load
from jax.sharding import AxisType

from maxghost import config, train_compile
from maxghost.config.validate import MESH_AXES
from maxghost.parallel.axis_rules import make_rules
from maxghost.parallel.shardings import Layout, use
from maxghost.training import aot, compiled_steps, state
from maxghost.training.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
TINY = {name: value for name, value in meshes.SIZES.items() if name != "steps"} | {"remat_policy": "none"}


def keys(**changes) -> list[str]:
  return [f"{name}={value}" for name, value in (TINY | changes).items()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
  """(exit code, lines, file) of the scored step for eight CPU devices."""
  path = tmp_path_factory.mktemp("compiled") / "step.pkl"
  cache = jax.config.values["jax_compilation_cache_dir"]
  jax.config.update("jax_compilation_cache_dir", str(path.parent / "programs"))
  compilation_cache.reset_cache()
  try:
    with tiny.cheap_compilation(), contextlib.redirect_stdout(printed := io.StringIO()):
      code = train_compile.main(
        keys(compile_topology="cpu-8", per_device_batch_size=1, base_num_decoder_layers=1, compiled_trainstep_file=path)
      )
  finally:
    jax.config.update("jax_compilation_cache_dir", cache)
    compilation_cache.reset_cache()
  return code, printed.getvalue().splitlines(), path


def test_it_prints_what_a_step_is_made_of_needs_and_moves(compiled):
  code, lines, path = compiled
  assert code == 0
  text = "\n".join(lines)
  cfg = one_layer()
  _, abstract = state.abstract_split(cfg)
  count = sum(x.size for x in jax.tree.leaves(abstract["model"]))
  for expected in (
    "compiling for cpu-8",
    r"mesh: fsdp 8 \(8 devices\); a device holds 1\d\.\d\d% of the parameters, an even split is 12.50%",
    r"batch: 8 rows \(per_device_batch_size 1 x 8 devices\) of 16 tokens = 128 tokens per step",
    "validation: 4 rows, each computed by 8 groups of devices alike",
    rf"number parameters: {count:,}\n",
    r"compiled in \d+\.\d s",
    "memory of one device:",
    r"  total +\d+\.\d{3} GB",
    r"FLOPs per token: \d+\.\d+ G by shapes; XLA counts \d+\.\d+ G",
    "collectives of a step, on each device:",
    r"  all-gather +over fsdp +\d+ times +\d+\.\d MB",
    r"  all-reduce +over fsdp +\d+ times +\d+\.\d MB",
    rf"saved {re.escape(str(path))}: \d+\.\d MB",
  ):
    assert re.search(f"^{expected}", text, re.M), expected


def test_the_step_is_not_taken_from_a_cache(compiled):
  """Of an executable that JAX's persistent cache gave back, the file would lack functions."""
  assert list(compiled[2].parent.glob("programs/*step*")) == []


def test_what_it_saves_is_the_train_step(compiled):
  """Its losses are those of the model without a mesh."""
  cfg = one_layer()
  layout = meshes.make_layout(cfg, 8)
  graphdef, abstract = state.abstract_split(cfg)
  with tiny.cheap_compilation():
    train_state = meshes.place(cfg, graphdef, layout.abstract(abstract), layout)
  step = deserialize_and_load(*pickle.loads(compiled[2].read_bytes()))
  rows, validation = meshes.BATCHES[0], meshes.VAL_BATCH
  _, out = step(train_state, layout.put(rows, 8), (layout.put(validation),))
  with use(None), tiny.cheap_compilation():
    model = tiny.make_model(cfg)
    run = jax.jit(lambda model, targets, *inputs: oracles.softmax_losses(model.logits(model.hidden(*inputs)), targets))
    both = {name: np.concatenate([rows[name], validation[name]]) for name in rows}
    every = run(model, both["targets"], *(both[f"inputs{part}"] for part in ("", "_position", "_segmentation")))
    parts = np.split(np.asarray(every), [len(rows["inputs"])])
    for name, batch, losses in zip(("loss", "val_loss"), (rows, validation), parts, strict=True):
      counts = batch["targets_segmentation"] != 0
      assert float(np.squeeze(out[name])) == pytest.approx((losses * counts).sum() / counts.sum(), rel=1e-5)
  assert np.abs(np.asarray(out["contribution_BSK"])).max() > 0


def test_the_lines_of_the_memory_add_up_to_what_must_fit():
  plan = Plan.of(one_layer(), meshes.make_layout(one_layer(), 8))
  sizes = {"argument": plan.memory.arguments, "output": 3e9, "alias": 1e9, "temp": 1e10, "generated_code": 1e9}
  memory = SimpleNamespace(**{f"{name}_size_in_bytes": int(size) for name, size in sizes.items()})
  executable = SimpleNamespace(memory_analysis=lambda: memory, cost_analysis=dict)
  lines, fits = aot.report_lines(aot.Compiled(plan, executable, 1.0), "v5e-1")
  shown = {found[1]: float(found[2]) for line in lines if (found := re.fullmatch(r"  (\S.*?) +([\d.]+) GB", line))}
  assert shown.pop("total") == pytest.approx(sum(shown.values()), abs=0.002) and shown["program"] == 1
  assert fits and "memory: needs 13.00 of 16.91 GB: fits, 3.91 GB to spare" in lines


def one_layer() -> config.Config:
  return meshes.make_config(meshes.MESHES["fsdp 8"], base_num_decoder_layers=1, remat_policy="none")


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"compile_topology": "v5p-100"}, "compile_topology=v5p-100 is no topology; nearest are v5p-128, v5p-64"),
    ({"compile_topology": "cpu-0"}, "compile_topology=cpu-0 is no topology"),
    ({"compile_topology": "cpu-²"}, "compile_topology=cpu-² is no topology"),
    ({}, "compile_topology is missing"),
    ({"compile_topology": "cpu-8", "ici_tensor_parallelism": 3}, "ici_tensor_parallelism=3 = 3 does not divide the 8"),
    ({"compile_topology": "0xcpu-8"}, "compile_topology=0xcpu-8"),
    ({"compile_topology": "2xcpu-4", "dcn_data_parallelism": 4}, "dcn_data_parallelism=4 = 4 is not the 2 slices"),
    ({"compile_topology": "2xcpu-4", "dcn_data_parallelism": 1}, "all dcn_*_parallelism are 1, which is not the 2"),
    ({"compile_topology": "cpu-8", "compiled_trainstep_file": "/dev/null/x"}, "file=/dev/null/x cannot be written"),
    ({"compile_topology": "cpu-8", "ici_tensor_parallelism": 8}, "axis 'kv_heads' of size 4 does not divide over tens"),
    ({"compile_topology": "cpu-8", "logical_axis_rules": "[[embd,[fsdp]]]"}, "no tensor has axis 'embd'; did you mean"),
  ],
)
def test_wrong_input_is_one_line_and_code_2(changes, message, capsys):
  assert train_compile.main(keys(**changes)) == 2
  said = capsys.readouterr()
  assert said.err.startswith("maxghost: ") and message in said.err and said.err.count("\n") == 1
  assert "compiled in" not in said.out


def test_virtual_devices_are_slices_as_the_topology_says(monkeypatch, capsys):
  monkeypatch.setattr(aot, "compile_step", lambda plan: aot.Compiled(plan, None, 0.0))
  train_compile.main(keys(compile_topology="2xcpu-4", per_device_batch_size=1))
  assert "mesh: data 2 x fsdp 4 (8 devices)" in capsys.readouterr().out


def test_the_abstract_path_of_a_70b_model_is_short():
  """In a fresh process: under 20 seconds of work, under 2 GB of host memory. Nothing of its 282 GB is made."""
  command = [sys.executable, str(ROOT / "benchmarks" / "topologies.py"), "--one", "llama3-70b", "0", ""]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  assert done.returncode == 0, done.stderr[-2000:]
  found = json.loads(done.stdout.splitlines()[-1])
  assert found["parameters"] == 70_553_706_496
  assert found["gb"] < 2 and found["cpu_seconds"] < 20


@pytest.mark.tpu_aot
def test_two_slices_are_compiled_for():
  """Rows, and with them gradients, cross between the slices; weights stay within one."""
  done = in_process("compile_topology=2xv5e-4", "dcn_data_parallelism=2")
  text = done.stdout
  assert done.returncode == 0, done.stderr[-2000:]
  assert "compiling for 2 x v5e-4" in text and "mesh: data 2 x fsdp 4 (8 devices)" in text
  lines = re.findall(r"^  ([a-z-]+) +over (\S.*?) +([\d,]+) times +(\S+) MB", text, re.M)
  moved = {(kind, axes): (int(times), float(size)) for kind, axes, times, size in lines}
  assert moved["all-reduce", "data"][0] > 9 and moved["all-gather", "fsdp"][0] > 2 * 14
  assert moved.get(("all-gather", "data"), (0, 0))[1] < 0.05  # token numbers
  others = moved.keys() - {("all-reduce", "data"), ("all-gather", "data")}
  assert not any("data" in axes for _, axes in others)
  assert re.search(r"needs .* of 16\.91 GB: fits", text)


@pytest.mark.tpu_aot
def test_slices_that_the_keys_do_not_mention_are_refused():
  done = in_process("compile_topology=2xv5e-4", "dcn_data_parallelism=1")
  assert done.returncode == 2 and "all dcn_*_parallelism are 1, which is not the 2 slices" in done.stderr


@pytest.mark.tpu_aot
def test_a_step_that_does_not_fit_says_by_how_much():
  """Logits of 2 million tokens."""
  done = in_process(
    "compile_topology=v5e-1", "per_device_batch_size=512", "max_target_length=4096", "vocab_size=32768",
    "ghost_enabled=false", "attention=flash",
  )  # fmt: skip
  assert done.returncode == 1, done.stderr[-2000:]
  assert "does not fit" in done.stdout and "cheapest settings" in done.stdout


def in_process(*changes: str) -> subprocess.CompletedProcess:
  """The command as a user starts it: libtpu is loaded once in a process."""
  size = keys(base_num_decoder_layers=2, per_device_batch_size=1, attention="dot_product", dtype="bfloat16")
  command = [sys.executable, "-m", "maxghost.train_compile", *size, *changes]
  return subprocess.run(command, capture_output=True, text=True, timeout=550)


def test_the_twin_is_made_with_the_kernels_of_the_topology():
  """attention=flash has no kernel on this machine's CPU, but one on the TPU that is compiled for."""
  cfg = config.replace(
    config.load(), base_emb_dim=256, base_num_query_heads=4, base_num_kv_heads=4, head_dim=128, base_mlp_dim=384,
    base_num_decoder_layers=2, max_target_length=128, vocab_size=512, attention="flash", per_device_batch_size=1,
  )  # fmt: skip
  sizes = tuple(4 if axis == "fsdp" else 1 for axis in MESH_AXES)
  mesh = jax.sharding.AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
  rules = make_rules((), False, dict(zip(MESH_AXES, sizes, strict=True)))
  for platform in "tpu", "cpu":
    plan = Plan.of(cfg, Layout(mesh, rules, abstract_platform=platform))
    if platform == "tpu":
      assert callable(compiled_steps.train_step(plan)[0])
    else:
      with pytest.raises(config.ConfigError, match="attention=flash has no kernel on cpu"):
        compiled_steps.train_step(plan)
