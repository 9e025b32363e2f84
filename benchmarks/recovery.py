"""What durable and local checkpoints cost, and how long a restore takes when a machine's disk is lost.

  python benchmarks/recovery.py [--mb 400] [--rounds 5]

Two processes on this machine, each with a folder of its own in place of a disk, hold the halves of a state of --mb
megabytes (float32, split over all devices). `held` is the time for which a save keeps the next step waiting, `written`
that until it is on disk everywhere. Medians of the rounds, durable and local in turns.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _measure
from _measure import Figure


def main() -> int:
  if sys.argv[1:2] == ["--process"]:
    return one(*sys.argv[2:])
  args = _measure.arguments(__doc__, False, mb=400, rounds=5)
  with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
    probe.close()
    command = [sys.executable, __file__, "--process", address, folder, str(args.mb), str(args.rounds)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    started = [
      subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True) for i in range(2)
    ]
    out = [process.communicate()[0] for process in started]
  if any(process.returncode for process in started):
    raise SystemExit("a process failed")
  found = json.loads(out[0].splitlines()[-1])
  figures = [Figure(f"{name}, s", value, form="{:.2f}") for name, value in found.items()]
  ratio = found["local save, held"] / found["durable save, held"]
  figures.append(Figure("time for which a local save holds up the step, over a durable one's", ratio, form="{:.2f}"))
  return _measure.publish("recovery", [{"what": k, "seconds": v} for k, v in found.items()], figures, path=args.json)


def one(address: str, folder: str, mb: str, rounds: str, number: str) -> int:
  """The work of one process; the first one prints the seconds of each part as JSON."""
  import jax

  jax.distributed.initialize(address, num_processes=2, process_id=int(number))
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from maxghost.checkpoint.manager import CheckpointManager
  from maxghost.parallel import distributed

  near, shared = Path(folder) / f"machine_{number}", Path(folder) / "run" / "checkpoints"
  sharding = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec("fsdp"))
  shape = (8, int(mb) * 2**20 // 4 // 8 // 10)
  make = jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=sharding)
  tree = {"model": {f"w{i}": make(jax.random.key(i)) for i in range(10)}}
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
  seconds: dict[str, list[float]] = {}

  def timed(name: str, work) -> None:
    distributed.gather(None)
    begin = time.perf_counter()
    work()
    distributed.gather(None)
    seconds.setdefault(name, []).append(time.perf_counter() - begin)

  manager = CheckpointManager(shared, local=str(near), max_to_keep=1)
  manager.save(1, tree, {}, local=True)  # compiles what it needs
  for step in range(2, 2 + 2 * int(rounds), 2):
    for kind, here in (("durable", step), ("local", step + 1)):
      local = kind == "local"
      timed(f"{kind} save, held", lambda here=here, local=local: manager.save(here, tree, {}, local=local))
      timed(f"{kind} save, written", manager._local.wait if local else manager.wait)
  for name, lost in (("restore, all disks there", False), ("restore, one disk lost", True)):
    if lost and number == "0":
      shutil.rmtree(next(near.iterdir()))
    again = CheckpointManager(shared, local=str(near), max_to_keep=1)
    timed(name, lambda again=again: again.restore_latest(abstract))
  if number == "0":
    print(json.dumps({name: statistics.median(times) for name, times in seconds.items()}))
  return 0


if __name__ == "__main__":
  sys.exit(_measure.run(main))
