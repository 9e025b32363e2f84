"""Mesh sizes, logical axis rules, topologies, rows of processes: right where they fit, one clear line where not."""

import contextlib
import dataclasses
import re
import socket
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import PartitionSpec
from meshes import make_config

from maxghost import config
from maxghost.checkpoint import checksum
from maxghost.config import ConfigError
from maxghost.parallel import collectives, distributed, rendezvous, topologies
from maxghost.parallel import mesh as meshes
from maxghost.parallel.axis_rules import DEFAULT_RULES, make_rules, unused_axes
from maxghost.parallel.shardings import Layout, check_rules, check_spread, own_rows, spread
from maxghost.serving import Engine, Generator
from maxghost.training import devices, state
from maxghost.training.plan import Plan

WITHOUT_STAGES = tuple((name, tuple(axis for axis in axes if axis != "stage")) for name, axes in DEFAULT_RULES)
SIZES = {"data": 2, "stage": 1, "fsdp": 3, "expert": 5, "context": 1, "tensor": 4}


def parallel(*keys):
  return config.load(*keys).parallel


def test_one_open_size_takes_what_is_left():
  ici, dcn = meshes.mesh_shape(parallel("ici_tensor_parallelism=4"), 24, 2)
  assert (ici["fsdp"], ici["tensor"], dcn["data"]) == (3, 4, 2)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    (["ici_tensor_parallelism=3"], r"ici_tensor_parallelism=3 = 3 does not divide the 8 devices; use .*=2"),
    (["ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"],
     r"ici_fsdp_parallelism=2 x ici_tensor_parallelism=2 = 4 is not the 8 devices; use ici_fsdp_parallelism=4"),
    (["ici_fsdp_parallelism=1"], r"all ici_\*_parallelism are 1.*ici_data_parallelism=-1"),
    (["dcn_data_parallelism=2"], r"dcn_data_parallelism=2 = 2 is not the 1 slice"),
    (["ici_stage_parallelism=4", "ici_fsdp_parallelism=1"], r"use ici_stage_parallelism=8, or ici_data_parallelism=-1"),
  ],
)  # fmt: skip
def test_products_that_do_not_fit_name_settings_that_do(keys, message):
  with pytest.raises(ConfigError, match=message):
    meshes.mesh_shape(parallel(*keys), 8, 1)


def test_slices_are_outermost_along_every_axis():
  """2 slices of 4 devices, an axis over both: its first half is slice 0. On TPU the library gets (ici, dcn)."""
  cfg = parallel(
    "dcn_data_parallelism=2", "ici_data_parallelism=2", "ici_tensor_parallelism=2", "ici_fsdp_parallelism=1"
  )
  mesh = meshes.make_mesh(cfg, jax.devices()[:8])
  assert dict(mesh.shape) == {**dict.fromkeys(meshes.MESH_AXES, 1), "data": 4, "tensor": 2}
  ids = np.vectorize(lambda device: device.id)(mesh.devices)
  assert ids.squeeze().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_sizes_within_and_between_slices_are_told_apart_on_tpu(monkeypatch):
  called = []
  monkeypatch.setattr(mesh_utils, "create_hybrid_device_mesh", lambda *args, **options: called.append(args))
  chips = [types.SimpleNamespace(platform="tpu")] * 12
  meshes._arranged(chips, (3, 2), (1, 2))
  assert called == [((3, 2), (1, 2), chips)]


def test_slices_that_do_not_divide_the_devices_name_numbers_that_do():
  cfg = parallel("dcn_data_parallelism=3", "dcn_expert_parallelism=2")
  message = r"dcn_data_parallelism=3 x dcn_expert_parallelism=2 = 6 does not divide the 32 devices; use dcn_.*=2"
  with pytest.raises(ConfigError, match=message):
    meshes.mesh_shape(cfg, 32, 6)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    (["ici_data_parallelism=0"], "ici_data_parallelism=0 leaves no devices"),
    (["ici_data_parallelism=-1"], "ici_data_parallelism=-1 and ici_fsdp_parallelism=-1: only one key"),
    (["ici_fsdp_parallelism=-2"], "below the least"),
  ],
)
def test_sizes_that_no_mesh_has_are_refused_before_jax(keys, message):
  with pytest.raises(ConfigError, match=message):
    config.load(*keys)


def test_rules_are_read_in_order_and_no_mesh_axis_is_spent_twice():
  rules = make_rules((), False, SIZES)
  assert rules.assign(("layers", "embed", "mlp"), (7, 30, 8), "w") == ((), ("fsdp", "expert"), ("tensor",))
  assert rules.assign(("exp", "embed", "mlp"), (5, 6, 8), "w") == (("expert",), ("fsdp",), ("tensor",))
  assert rules.assign(("activation_batch", None), (6, 9), "x") == (("data", "fsdp"), ())  # 6 rows: not over expert too
  own = make_rules((("embed", ("data",)),), False, SIZES)
  assert own.assign(("embed", "kv"), (8, 9), "w") == (("data",), ())
  assert make_rules((("embed", ()),), True, SIZES).names == ("embed",)


@pytest.mark.parametrize(
  ("axes", "shape", "message"),
  [
    (("mpl",), (8,), r"axis 'mpl' of a/b has no rule; did you mean 'mlp'\?; add \[mpl"),
    (("mlp", "heads"), (8, 8), r"a/b with axes \(mlp, heads\): axis 'heads' wants mesh axes tensor, which another"),
    (("mlp",), (6,), r"a/b: axis 'mlp' of size 6 does not divide over tensor 4 = 4 devices; use at most 2"),
    (
      ("vocab",),
      (259,),
      "axis 'vocab' of size 259 .* tensor 4 = 4 devices; use vocab_size=260, at most 1 of them there",
    ),
    (("mlp",), (6, 4), r"a/b has shape \(6, 4\), but 1 logical axes"),
  ],
)
def test_a_tensor_that_cannot_be_split_is_named(axes, shape, message):
  with pytest.raises(ConfigError, match=message):
    make_rules((), False, SIZES).assign(axes, shape, "a/b")


@pytest.mark.parametrize(
  ("row", "message"),
  [
    (("embed", ("fsp",)), r"row of 'embed', which model/decoder/\S+ needs, names mesh axis 'fsp'; did you mean 'fsdp'"),
    (("activation_batch", ("dta",)), r"row of 'activation_batch', which every batch needs, names mesh axis 'dta'"),
    (("exp", ("expret",)), r"row of 'exp' names mesh axis 'expret'; did you mean 'expert'"),  # of no tensor here
    (("embd", ("fsdp",)), r"no tensor has axis 'embd'; did you mean 'embed'\?; the axes of .* are embed, heads, kv,"),
    (("activation_bach", ("fsdp",)), r"no tensor has axis 'activation_bach'; did you mean 'activation_batch'"),
    (("mlp", ("fsdp",)), r"model/decoder/\S+mlp/w\S+ with axes \(layers, .*axis 'embed' wants mesh axes fsdp, context"),
    (("embed", ("fsdp", "fsdp")), "row of 'embed' names a mesh axis twice: fsdp, fsdp"),
  ],
)
def test_rules_that_say_nothing_right_are_refused_with_the_tensor(row, message):
  cfg = make_config({"ici_fsdp_parallelism": 8}, logical_axis_rules=(row,))
  with pytest.raises(ConfigError, match=message):
    Plan.of(cfg, Layout.of(cfg.parallel, jax.devices()[:8]))


def test_rules_for_axes_of_a_models_own_are_taken():
  own = (("activation_memory", ("fsdp",)), ("exp", ("expert",)))
  cfg = make_config({"ici_fsdp_parallelism": 8}, logical_axis_rules=own)
  layout = Layout.of(cfg.parallel, jax.devices()[:8])
  check_rules(layout.abstract(state.abstract_split(cfg)[1]), layout)


def test_mesh_axes_that_no_rule_names_are_found():
  assert unused_axes(make_rules(WITHOUT_STAGES, True, SIZES | {"stage": 2})) == ["stage"]


def test_logical_axes_survive_split_optimizer_and_abstract_state():
  cfg = make_config({"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}, ghost_val_every=2,
                    shard_optimizer_over_data=True)  # fmt: skip
  layout = Layout.of(cfg.parallel, jax.devices()[:8])
  _, abstract = state.abstract_split(cfg)
  found = {"/".join(map(str, p)): v for p, v in nnx.to_flat_state(abstract)}
  kernel = "decoder/layers/mlp/wi_0/kernel"
  for path in (f"model/{kernel}", f"optimizer/opt_state/0/mu/{kernel}"):
    assert found[path].get_metadata()["axes"] == ("layers", "embed", "mlp")
    assert layout.variable_spec(tuple(path.split("/")), found[path]) == PartitionSpec(None, "fsdp", "tensor")
  stored = [v for path, v in found.items() if path.startswith("stored_gradients")]
  assert {v.get_metadata()["axes"] for v in stored} >= {("layers", "embed", "mlp"), ("norm",)}
  assert not any("rngs" in path for path in found)  # randomness is a function of seed and step, no leaf


def test_zero_1_splits_moments_over_data_and_weights_not():
  cfg = make_config({"ici_fsdp_parallelism": 2, "ici_data_parallelism": 4}, shard_optimizer_over_data=True)
  layout = Layout.of(cfg.parallel, jax.devices()[:8])
  flat = nnx.to_flat_state(layout.shardings(state.abstract_split(cfg)[1]))
  shardings = {"/".join(map(str, path)): v.get_value().spec for path, v in flat}
  kernel = "decoder/layers/mlp/wi_0/kernel"  # [2, 24, 40]
  assert shardings[f"model/{kernel}"] == PartitionSpec(None, "fsdp")
  assert shardings[f"optimizer/opt_state/0/nu/{kernel}"] == PartitionSpec(None, "fsdp", "data")


def test_a_run_says_whether_experts_are_balanced():
  experts = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2}
  for weight, said in ((0.0, "is left out"), (0.01, "is added, times 0.01")):
    cfg = make_config({"ici_fsdp_parallelism": 8}, load_balance_loss_weight=weight, **experts)
    lines = Plan.of(cfg, devices.open_layout(cfg)).lines()
    assert lines[-1].startswith("Per train step")
    (count,) = (line.removeprefix("number parameters: ") for line in lines if line.startswith("number parameters"))
    assert count.replace(",", "").isdecimal(), "a small model is not of 0.000 billion"
    assert f"training loss: the load-balancing loss of the experts {said} (load_balance_loss_weight)" in lines


def test_weights_kept_whole_are_named():
  cfg = make_config({"ici_fsdp_parallelism": 8})
  layout = Layout.of(cfg.parallel, jax.devices()[:8])
  abstract = layout.abstract(state.abstract_split(cfg)[1])
  assert "an even split is 12.50%" in check_spread(abstract, layout, 1.0)
  with pytest.raises(ConfigError, match=r"sharding_tolerance=0.001.*largest parameter kept whole is .*norm/scale"):
    check_spread(abstract, layout, 0.001)


@pytest.mark.parametrize(
  ("mesh", "changes", "message"),
  [
    (
      {"ici_stage_parallelism": 2},
      {"logical_axis_rules": WITHOUT_STAGES, "override_logical_axis_rules": True},
      "mesh axis 'stage' has 2 devices, but no row",
    ),
    (
      {"ici_stage_parallelism": 2, "ici_tensor_parallelism": -1, "ici_fsdp_parallelism": 1},
      {"num_pipeline_microbatches": 3},
      "makes 8 rows for 8 devices .* into 3 .* use num_pipeline_microbatches=2",
    ),
    ({"ici_context_parallelism": 8}, {"max_target_length": 20}, "max_target_length=20 does not divide over context 8"),
    ({"ici_fsdp_parallelism": 8}, {"ghost_schedule": "concat"}, "ghost_schedule=concat appends"),
    ({"ici_fsdp_parallelism": 8}, {"ghost_select": "topk", "ghost_select_fraction": 0.3}, "use ghost_select_fraction"),
  ],
)
def test_runs_that_a_mesh_does_not_fit_are_refused(mesh, changes, message):
  cfg = make_config(mesh | ({} if "ici_fsdp_parallelism" in mesh else {"ici_fsdp_parallelism": -1}), **changes)
  with pytest.raises(ConfigError, match=message):
    devices.check_layout(cfg, Layout.of(cfg.parallel, jax.devices()[:8]))


def test_processes_hold_equal_parts_of_the_rows():
  sharding = _Sharding({_Device(i, i // 4): (slice(2 * i, 2 * i + 2),) for i in range(8)})
  assert [dataclasses.astuple(own_rows(sharding, 16, p)) for p in (0, 1)] == [(2, 0, True), (2, 1, True)]
  same = _Sharding({_Device(i, i // 2): (slice(8 * (i % 2), 8 * (i % 2) + 8),) for i in range(4)})
  assert [dataclasses.astuple(own_rows(same, 16, p)) for p in (0, 1)] == [(1, 0, True), (1, 0, False)]
  mixed = _Sharding({_Device(0, 0): (slice(0, 8),), _Device(1, 0): (slice(8, 12),), _Device(2, 1): (slice(8, 16),)})
  with pytest.raises(ConfigError, match="overlap"):
    own_rows(mixed, 16, 0)


@dataclasses.dataclass(frozen=True)
class _Device:
  id: int
  process_index: int


class _Sharding:
  def __init__(self, rows):
    self._rows = rows

  def devices_indices_map(self, shape):
    return self._rows


def test_unknown_topologies_name_their_neighbours():
  assert topologies.parse("v5p-256") == ("v5p", 256) and topologies.parse("cpu-12") == ("cpu", 12)
  assert topologies.FAMILIES["v5p"].slices[256] == (4, 4, 8)  # 128 chips
  with pytest.raises(ConfigError, match=r"v5p-100 is no topology; nearest are v5p-128, v5p-64"):
    topologies.parse("v5p-100")
  with pytest.raises(ConfigError, match=r"nearest are v5p-16, v5e-16"):
    topologies.parse("v5-16")
  with pytest.raises(ConfigError, match="compile_topology is missing"):
    topologies.parse("")


def test_without_libtpu_one_line_says_what_to_install(monkeypatch):
  monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ConfigError, match=r"pip install 'maxghost\[tpu\]'; compile_topology=cpu-8"):
    topologies.open_devices("v5e-16")


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    (["jax_distributed=on"], "no other processes are known"),
    (["jax_distributed=a:1"], "is not auto, on, off or HOST:PORT,K/N"),
    (["jax_distributed=here,0/2"], "is not auto, on, off or HOST:PORT,K/N"),
    (["jax_distributed=a:0,0/2"], "is not auto, on, off or HOST:PORT,K/N"),
    (["jax_distributed=a:65536,0/2"], "is not auto, on, off or HOST:PORT,K/N"),
    (["jax_distributed=a:1,0/0"], "is not auto, on, off or HOST:PORT,K/N"),
    (["jax_distributed=a:1,2/2"], "the numbers are 0 to 1"),
  ],
)  # fmt: skip
def test_processes_that_cannot_meet_are_refused(keys, message, monkeypatch):
  for name in distributed.HINTS:
    monkeypatch.delenv(name, raising=False)
  with pytest.raises(ConfigError, match=message):
    distributed.start(parallel(*keys))


@pytest.mark.parametrize(
  ("setting", "problem", "alone"),
  [
    ("JAX_COORDINATOR_ADDRESS=10.0.0.1:1234", ValueError("Number of processes must be defined."), False),
    ("WORLD_SIZE=2", ValueError("coordinator_address should be defined."), False),  # torchrun, Open MPI 5
    ("WORLD_SIZE=1", ValueError("coordinator_address should be defined."), True),
    ("KUBERNETES_SERVICE_HOST=10.0.0.1", ValueError("coordinator_address should be defined."), True),
    ("KUBERNETES_SERVICE_HOST=10.0.0.1", LookupError("Service token file does not exist."), False),  # of its package
  ],
)
def test_processes_that_jax_does_not_find(setting, problem, alone, monkeypatch):
  """One that is told of a coordinator does not train alone; a pod without JAX's package for Kubernetes does."""

  def initialize(**_):
    raise problem

  for hint in distributed.HINTS:
    monkeypatch.delenv(hint, raising=False)
  monkeypatch.setenv(*setting.split("="))
  monkeypatch.setattr(distributed.jax.distributed, "initialize", initialize)
  where = "what it needs" if type(problem) is ValueError else "300 s"
  said = rf"{where} \({type(problem).__name__}: {problem}\); give jax_distributed=HOST:PORT,K/N .* off to one alone"
  with contextlib.nullcontext() if alone else pytest.raises(ConfigError, match=said):
    distributed.start(parallel())


def test_a_port_in_use_is_named():
  with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as taken:
    taken.bind(("", 0))
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port} of this machine is in use"):
      distributed.start(parallel(
        f"jax_distributed=localhost:{port},0/2"
      ))  # fmt: skip


@pytest.mark.parametrize(
  ("said", "message"),
  [
    ([(1, 2), (2, 3)], r"jax_distributed names 2 processes in process 1, 3 in process 0"),
    ([(1, 3), (1, 3)], r"jax_distributed: number 1 is given to two processes; give each of the 3 its own"),
    ([(1, 3)], r"did not all meet at 127.0.0.1:\d+ within 2 s: of 3 this one is missing: 2; start all"),
  ],
)
def test_processes_that_do_not_meet_are_told_alike(said, message):
  """Process 0 of three, and others that say (which they are, of how many)."""
  problems = gathering([(0, 3), *said])
  assert len(set(problems)) == 1 and len(problems) == len(said) + 1
  assert re.search(message, problems[0])


def test_processes_that_meet_leave_the_port_free():
  address = free_address()
  assert gathering([(0, 3), (2, 3), (1, 3)], address) == ["", "", ""]
  rendezvous.listen(address).close()


@pytest.mark.parametrize(
  ("nodes", "first"),
  [
    ("node001", "node001"), ("a,b", "a"), ("node[001-0015],a", "node001"), ("n[7,9-11]-ib", "n7-ib"), ("n[5]", "n5"),
  ],
)  # fmt: skip
def test_the_address_under_slurm(nodes, first, monkeypatch):
  named = {"STEP_NODELIST": nodes, "JOB_ID": "70001", "PROCID": "3", "NTASKS": "11"}
  for name, value in named.items():
    monkeypatch.setenv(f"SLURM_{name}", value)
  assert rendezvous.of_launcher() == (f"{first}:{61440 + 70001 % 4096}", 3, 11)
  monkeypatch.setenv("JAX_COORDINATOR_PORT", "1234")
  assert rendezvous.of_launcher() == (f"{first}:1234", 3, 11)


def test_a_first_process_that_is_missing_under_slurm_is_named(monkeypatch):
  address = free_address()
  named = {"STEP_NODELIST": "127.0.0.1", "JOB_ID": "7", "PROCID": "1", "NTASKS": "2"}
  for name, value in named.items():
    monkeypatch.setenv(f"SLURM_{name}", value)
  monkeypatch.setenv("JAX_COORDINATOR_PORT", address.rpartition(":")[2])
  monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", address)
  with pytest.raises(ConfigError, match=f"process 1 did not meet process 0 at {address} within 1 s"):
    distributed.start(parallel("jax_distributed_timeouts=1,10"))


def test_the_address_under_open_mpi(monkeypatch):
  monkeypatch.delenv("SLURM_STEP_NODELIST", raising=False)
  assert rendezvous.of_launcher() is None
  monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911")
  monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
  monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "5")
  assert rendezvous.of_launcher() == (f"10.96.0.1:{61440 + 1531576320 % 4096}", 2, 5)


def test_a_process_without_a_first_one_says_so():
  address = free_address()
  with pytest.raises(ConfigError, match=rf"process 1 did not meet process 0 at {address} within 0.5 s \(Connection"):
    rendezvous.meet(address, 2, 1, 0.5)


def test_what_is_no_process_is_not_counted():
  """Something else connects first and says something else."""
  address = free_address()
  port = int(address.rpartition(":")[2])
  with ThreadPoolExecutor(2) as pool:
    first = pool.submit(rendezvous.meet, address, 2, 0, 20)
    while True:
      try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
          stranger.sendall(b"GET / HTTP/1.1\r\n\r\n\n")
        break
      except ConnectionRefusedError:
        time.sleep(0.05)
    rendezvous.meet(address, 2, 1, 20)
    assert first.result() is None


@pytest.mark.parametrize(
  "said",
  [
    b'{"process": "1", "of": 2}', b'{"process": 1}', b'{"process": true, "of": 2}', b"[1]", b'{"process": 7, "of": 2}',
    b"[" * 4000, b'{"process": 1, "of": null}',
  ],
)  # fmt: skip
def test_a_message_of_wrong_types_is_ignored(said):
  address = free_address()
  with ThreadPoolExecutor(2) as pool:
    first = pool.submit(rendezvous.meet, address, 2, 0, 20)
    while True:
      try:
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5) as stranger:
          stranger.sendall(said + b"\n")
        break
      except ConnectionRefusedError:
        time.sleep(0.02)
    rendezvous.meet(address, 2, 1, 20)
    assert first.result() is None


def test_process_0_listens_at_its_address_alone(monkeypatch):
  monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
  with rendezvous.listen("127.0.0.1:0") as server:
    assert server.getsockname()[0] == "127.0.0.1"
  for address in ("192.0.2.7:1234", "no-such-host.invalid:1234"):
    with pytest.raises(ConfigError, match=r"is no address of this machine, .*_BIND_ADDRESS=0.0.0.0:1234"):
      rendezvous.listen(address)
  monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "0.0.0.0:0")
  with rendezvous.listen("192.0.2.7:1234") as server:
    assert server.getsockname()[0] == "0.0.0.0"


def free_address() -> str:
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{probe.getsockname()[1]}"


def gathering(processes: list[tuple[int, int]], address: str | None = None) -> list[str]:
  """What each (process, of how many) is told, '' where all is well."""
  address = address or free_address()

  def meet(process: int, count: int) -> str:
    try:
      rendezvous.meet(address, count, process, 2)
    except ConfigError as error:
      return str(error)
    return ""

  with ThreadPoolExecutor(len(processes)) as pool:
    return list(pool.map(lambda pair: meet(*pair), processes))


HLO = """
%body (p: (s32[], f32[4,6])) -> (s32[], f32[4,6]) {
  %g = f32[4,24]{1,0} all-gather(%x), channel_id=1, replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={1}
  %r = bf16[4,6]{1,0} reduce-scatter(%g), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={1}, to_apply=%add
}
%condition (p: (s32[], /*index=1*/f32[4,6])) -> pred[] {
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}
%beside (q: f32[4,6]) -> f32[4,24] {
  ROOT %g2 = f32[4,24]{1,0} all-gather(%q), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={1}
}
ENTRY %main (a: f32[4,6]) -> f32[] {
  %w = (s32[], f32[4,6]) while(%t), condition=%condition, body=%body
  %f = f32[4,24] fusion(%a), kind=kLoop, calls=%beside
  %p = f32[3]{0} collective-permute-start(%a), channel_id=7, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %h = (f32[5,7], u32[], token[]) send(%a, %t), frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %i = (f32[5,7], u32[], token[]) recv(%t), frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %s = (f32[], f32[10]) all-reduce(%a, %b), channel_id=3, replica_groups={}, to_apply=%add
}
"""


def test_collectives_are_counted_as_often_as_they_run():
  every = collectives.read(HLO, {"fsdp": 4, "tensor": 2}, ("data",))
  crossing = [one for one in every if one.axes == ("data",)]
  assert [(one.kind, one.shape, one.count, one.num_bytes) for one in crossing] == [("all-reduce", "f32[5,7]", 1, 140)]
  found = {one.kind: one for one in every if one not in crossing}
  assert len(found) == 4 and len(every) == 5
  gather, scatter, whole = (found[kind] for kind in ("all-gather", "reduce-scatter", "all-reduce"))
  assert (gather.axes, gather.count, gather.num_bytes) == (("fsdp",), 5, 4 * 24 * 4)  # once, though written twice
  assert (scatter.axes, scatter.count, scatter.num_bytes) == (("fsdp",), 5, 4 * 6 * 2 * 4)
  assert (whole.axes, whole.count, whole.num_bytes) == (("fsdp", "tensor"), 1, 4 + 40)
  assert found["collective-permute"].axes == ("tensor",)


@pytest.mark.parametrize(
  ("message", "lost"),
  [
    ("UNAVAILABLE: failed to connect to all addresses; last error: Connection refused", True),
    ("DEADLINE_EXCEEDED: Barrier timed out. Id: maxghost/3. 1/2 tasks already at the barrier.", True),
    ("ABORTED: /job:jax_worker/replica:0/task:1 unexpectedly tried to connect with a different incarnation.", True),
    ("INTERNAL: [gloo/transport/tcp/pair.cc:547] Gloo AllReduce failed: Connection closed by peer [127.0.0.1]:4", True),
    (
      "FAILED_PRECONDITION: Buffer Definition Event: Gloo all-reduce failed:\nRead error: Connection reset by peer",
      True,
    ),
    ("INTERNAL: NCCL operation ncclAllReduce failed: remote process exited or there was a network error", True),
    ("INTERNAL: /job:jax_worker/replica:0/task:1 heartbeat timeout. This indicates that the remote task failed", True),
    ("UNIMPLEMENTED: optimization_barrier is not implemented on this backend", False),
    ("INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled cuda error: out of memory", False),
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes; peer access is off", False),
    ("INVALID_ARGUMENT: Gloo: unsupported reduction of complex64", False),
    ("gloo, nccl, barrier, heartbeat", False),
  ],
)
def test_a_lost_peer_is_known_by_status_code_and_lost_connection(message, lost, monkeypatch):
  monkeypatch.setattr(distributed, "count", lambda: 2)
  assert distributed.is_lost_peer(RuntimeError(message)) is lost
  monkeypatch.setattr(distributed, "count", lambda: 1)
  assert not distributed.is_lost_peer(RuntimeError(message))


@pytest.mark.parametrize(
  ("devices", "slices", "keys"),
  [
    (1, 2, ["enable_diloco=true", "dcn_data_parallelism=2"]),
    (3, 2, ["enable_diloco=true", "dcn_data_parallelism=2"]),
    (2, 1, ["enable_diloco=true", "dcn_data_parallelism=2"]),
    (6, 3, ["enable_diloco=true", "dcn_data_parallelism=4", "dcn_expert_parallelism=2"]),
    (8, 6, ["dcn_fsdp_parallelism=2", "dcn_tensor_parallelism=3", "dcn_data_parallelism=1"]),
    (8, 1, ["ici_fsdp_parallelism=3", "ici_tensor_parallelism=5"]),
    (8, 1, ["ici_context_parallelism=3", "ici_tensor_parallelism=5"]),
  ],
)
def test_every_way_out_that_a_wrong_product_names_works(devices, slices, keys):
  with pytest.raises(config.ConfigError) as refused:
    meshes.mesh_shape(parallel(*keys), devices, slices)
  ways = str(refused.value).partition("; use ")[2]
  for way in re.split(", or |, (?=ici|dcn)", ways.replace(", which takes what is left", "")):
    changed = parallel(*keys, *way.split())
    if (not changed.enable_diloco and slices == 1) or "dcn" not in way:  # slices of the hardware; else of the keys
      meshes.mesh_shape(changed, devices, slices)
    else:
      meshes.mesh_shape(changed, devices, meshes.num_slices(changed, jax.devices()))


def test_programs_of_several_cpu_devices_are_compiled_with_few_collectives_at_once(monkeypatch):
  """`test_virtual_devices_do_not_wait_for_each_other_forever` has a run that does not end without the option."""
  several, one = (Layout.of(parallel(), jax.devices()[:count]) for count in (2, 1))
  for few in (False, True):
    monkeypatch.setattr(jax.config, "read", lambda name, few=few: few)
    assert "xla_cpu_scheduler_type" in devices.compiler_options(several)
    assert "xla_cpu_scheduler_type" not in devices.compiler_options(one)
    assert devices.compiler_options() == devices.compiler_options(one)
    assert devices.compiler_options(dataclasses.replace(several, abstract_platform="tpu")) == {}


@pytest.mark.parametrize("count", [1, 2])
def test_what_serving_and_checkpoints_compile_on_a_mesh_has_few_collectives_at_once(count, monkeypatch):
  """As the steps of a run, see `test_virtual_devices_do_not_wait_for_each_other_forever`."""
  cfg = make_config({})
  graphdef, state = nnx.split(tiny.make_model(cfg))
  layout, options = Layout.of(parallel(), jax.devices()[:count]), []
  state = jax.device_put(state, layout.shardings(state))
  compile_it, jit = jax.stages.Lowered.compile, jax.jit
  noted = lambda self, compiler_options=None: options.append(compiler_options) or compile_it(self, compiler_options)  # noqa: E731
  monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
  Generator(graphdef, 24).generate(state, [[5, 6], [7]], 2)
  assert len(options) == 2
  engine = Engine(graphdef, slots=2, cache_size=24, layout=layout)
  engine.insert(engine.prefill(engine.load_params(state), [5, 6]), engine.init_decode_state(), 0)
  assert len(options) == 7
  monkeypatch.setattr(jax, "jit", lambda f, **given: options.append(given.get("compiler_options")) or jit(f, **given))
  checksum.checksums(jax.tree.leaves(state))
  assert options == [{"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if count > 1 else {}] * 8


def test_an_array_of_several_processes_is_spread_without_bringing_it_to_each_device(monkeypatch):
  """`jax.device_put` would put it there whole, once for every process, to compare them."""
  value, elsewhere = np.arange(6.0).reshape(3, 2), types.SimpleNamespace(is_fully_addressable=False)
  monkeypatch.setattr(jax, "device_put", None)
  monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, where, part: (shape, where, part(np.s_[1:2, :])))
  shape, where, part = spread(value, elsewhere)
  assert shape == (3, 2) and where is elsewhere and part.tolist() == [[2, 3]]


def test_processes_that_read_other_arrays_are_told_apart(monkeypatch):
  one, other = np.arange(40.0).reshape(20, 2), np.arange(40.0).reshape(20, 2)
  other[-1, 1] = 0
  monkeypatch.setattr(distributed, "count", lambda: 3)
  digests = [distributed.Digest() for _ in range(3)]
  for digest, arrays in zip(digests, ([one, np.float32(2)], [one, np.float32(2)], [other, np.float32(2)]), strict=True):
    for array in arrays:
      digest.add(array)
  crcs = [digest._crc for digest in digests]
  monkeypatch.setattr(distributed, "gather", lambda _: crcs[:2])
  digests[0].check("model")
  monkeypatch.setattr(distributed, "gather", lambda _: crcs)
  with pytest.raises(
    ConfigError, match=r"^model: process 2 reads other arrays than process 0; give all the same files$"
  ):
    digests[0].check("model")
