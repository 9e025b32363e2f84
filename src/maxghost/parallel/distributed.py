"""Several processes: starting together, exchanging values, detecting a lost one. A single process uses no network."""

import itertools
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxghost.config import Config, ConfigError, ParallelConfig
from maxghost.config.values import first_line
from maxghost.parallel import rendezvous

# Environment variables that say there are others unless they are 1 (of Open MPI, MPICH, torchrun), and by which JAX
# finds the other processes of a job.
TOLD = ("JAX_COORDINATOR_ADDRESS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")
HINTS = (*TOLD, "SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST", "TPU_WORKER_HOSTNAMES",
         "TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "MEGASCALE_COORDINATOR_ADDRESS")  # fmt: skip
ALONE = {"SLURM_NTASKS": "1", "OMPI_COMM_WORLD_SIZE": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
PATIENCE_MS = 1_800_000  # for another live process; a dead one is detected by its missing heartbeats
MOST_SKEW = 10.0  # seconds between two clocks that are not reported

# Error messages for a lost peer: a status code of the coordination service (also from Orbax' barriers), a connection
# lost by Gloo or NCCL, missing heartbeats. Others, such as INTERNAL: NCCL ... out of memory, are of this process.
_LOST = re.compile(
  r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED): "
  r"|\b(gloo|nccl)\b.*(connection (closed|reset|refused)|closed by peer|remote process exited|remote error|timed? ?out)"
  r"|heartbeat (request )?time(d )?out|missing heartbeats|\btasks? .*(died|crashed|unhealthy)",
  re.IGNORECASE | re.DOTALL,
)

_exchanges = itertools.count()


def start(cfg: ParallelConfig) -> None:
  """Joins the processes of a job, if there are several. Call this before JAX makes its first array.

  Raises ConfigError if requested processes are not found, not all start in time, or the port is in use.
  """
  if cfg.jax_distributed == "off" or jax.distributed.is_initialized():
    return
  names = ("coordinator_address", "process_id", "num_processes")
  hinted = bool(cfg.processes) or any(name in os.environ for name in HINTS) or Path("/dev/accel0").exists()
  alone = not cfg.processes and any(os.environ.get(name) == value for name, value in ALONE.items())
  if not hinted or alone:
    if cfg.jax_distributed == "on":
      said = "jax_distributed=on: no other processes are known; start with srun, mpirun or on a TPU pod"
      raise ConfigError(f"{said}, or give jax_distributed=HOST:PORT,K/N to process K of N")
    return
  timeout, heartbeat = cfg.jax_distributed_timeouts
  given: dict[str, Any] = dict(zip(names, cfg.processes or rendezvous.of_launcher() or (), strict=False))
  if given:
    if not cfg.processes:  # a host may know its own name as that of its loopback interface
      port = given["coordinator_address"].rpartition(":")[2]
      os.environ.setdefault("JAX_COORDINATOR_BIND_ADDRESS", f"0.0.0.0:{port}")
    rendezvous.meet(given["coordinator_address"], given["num_processes"], given["process_id"], timeout)
    given["coordinator_bind_address"] = rendezvous.bind_address(given["coordinator_address"])
  # JAX's handler of SIGTERM would replace ours, which asks all processes to stop (`StopFlag`).
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(**given, initialization_timeout=timeout, heartbeat_timeout_seconds=heartbeat)
  except Exception as error:  # a package that JAX asks, such as kubernetes, raises kinds of its own
    told = any(os.environ.get(name, "1") != "1" for name in TOLD)
    if told or given or cfg.jax_distributed == "on" or not isinstance(error, ValueError):  # else JAX has found no job
      where = f"{given.get('coordinator_address', 'the address that JAX detected')} within {timeout} s"
      where = where if given or not isinstance(error, ValueError) else "any address, as JAX does not find what it needs"
      said = f"the processes of the run did not all meet at {where} ({type(error).__name__}: {first_line(error)})"
      ways = "give jax_distributed=HOST:PORT,K/N to process K of N, the same address and N to all, or off to one alone"
      raise ConfigError(f"jax_distributed: {said}; {ways}") from error


index, count = jax.process_index, jax.process_count


def is_first() -> bool:
  """Whether this is the process that prints and writes what all processes have in common."""
  return jax.process_index() == 0


def store() -> Any:
  """The key-value store of jax.distributed, to which JAX itself has no public way."""
  from orbax.checkpoint import multihost

  return multihost.get_jax_distributed_client()


def gather(value: Any) -> list:
  """The JSON values of all processes, in their order. Every process must call it, each from one thread; waits for all.

  By the coordination service: a process may come minutes after the others, and Gloo waits only half a minute.
  """
  if count() == 1:
    return [value]
  client, name = store(), f"maxghost/{next(_exchanges)}"
  client.key_value_set(f"{name}/{index()}", json.dumps(value))
  texts = [client.blocking_key_value_get(f"{name}/{process}", PATIENCE_MS) for process in range(count())]
  client.wait_at_barrier(name, PATIENCE_MS)
  client.key_value_delete(f"{name}/{index()}")
  return [json.loads(text) for text in texts]


def check_same_config(cfg: Config) -> None:
  """Raises ConfigError on every process, naming the keys whose values differ. Prints a note if the clocks differ."""
  # Process 0's values are used after a round trip through JSON, like the others'. jax_distributed may differ.
  said = gather([time.time(), {k: v for k, v in cfg.flat().items() if k != "jax_distributed"}])
  clocks, (first, *others) = zip(*said, strict=True)
  unlike = ((i, key, x) for i, other in enumerate(others, 1) for key, x in other.items() if x != first.get(key))
  if problems := [f"{key}={x} in process {i}, {first.get(key)} in process 0" for i, key, x in unlike]:
    raise ConfigError(*(f"{problem}; start all with the same keys" for problem in problems[:8]))
  if is_first() and (skew := max(clocks) - min(clocks)) > MOST_SKEW:
    late = f"maxghost: note: the clock of process {int(np.argmin(clocks))} is {skew:.0f} s behind"
    print(f"{late}; times in files will not agree", file=sys.stderr)


class Digest:
  """A checksum of arrays that each process reads by itself, of 9 entries, or all, along the leading axis of each."""

  def __init__(self):
    self._crc = 0

  def add(self, array: np.ndarray) -> None:
    if count() > 1:
      entries = np.atleast_1d(array)
      sample = entries[np.unique(np.linspace(0, len(entries) - 1, 9).astype(int))]
      self._crc = zlib.crc32(sample.tobytes(), self._crc)

  def check(self, said: str) -> None:
    """Raises ConfigError on every process, naming one that has read other arrays than process 0. Waits for all."""
    found = gather(self._crc)
    if unlike := [process for process, crc in enumerate(found) if crc != found[0]]:
      raise ConfigError(f"{said}: process {unlike[0]} reads other arrays than process 0; give all the same files")


class Exchange:
  """What every process gives, on all of them; queued on the devices, so that nobody waits for a running step.

  Every process must send arrays of the same shape in the same order.
  """

  def __init__(self):
    self._programs: dict[int, Any] = {}

  def send(self, values: np.ndarray) -> Callable[[], np.ndarray]:
    """values: [n] of 4 or 8 bytes each. The function returned waits, and gives [processes, n] of the same type."""
    if count() == 1:
      return lambda: values[None]
    words, devices = np.ascontiguousarray(values).view(np.uint32), jax.devices()
    mesh = jax.sharding.Mesh(np.asarray(devices), ("all",))
    rows, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)) for axis in ("all", None))
    if words.size not in self._programs:
      shape = jax.ShapeDtypeStruct((len(devices), words.size), np.uint32, sharding=rows)
      self._programs[words.size] = jax.jit(lambda words: words, out_shardings=whole).lower(shape).compile()
      gather(None)  # a barrier, since devices do not wait long for those of another process
    local = np.tile(words, (jax.local_device_count(), 1))
    sent = self._programs[words.size](jax.make_array_from_process_local_data(rows, local, (len(devices), words.size)))
    first = [[device.process_index for device in devices].index(process) for process in range(count())]
    return lambda: np.asarray(sent.addressable_data(0))[first].view(values.dtype)


class StopFlag:
  """Whether any process wants to stop, the same answer on all, without waiting for a running step.

  Each call starts an exchange and reads the previous one's result, which was queued before the step that runs now.
  """

  def __init__(self):
    self._exchange, self._pending = Exchange(), None

  def any(self, wish: bool) -> bool:
    if count() == 1:
      return wish
    before, self._pending = self._pending, self._exchange.send(np.array([wish], np.int32))
    return before is not None and bool(before().any())


def is_lost_peer(error: BaseException) -> bool:
  """Whether an error of the runtime means that another process is gone."""
  return count() > 1 and _LOST.search(str(error)) is not None


def exit_at_once(code: int) -> None:
  """Ends the process without waiting for threads or, as JAX does at exit, for the other processes."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)
