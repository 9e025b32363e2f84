"""Two processes under launchers as they are: SLURM's own daemons, two nodes on this machine, and Open MPI's mpirun.

Each launcher is installed by Debian's package of its name (slurmctld, slurmd, slurm-client; openmpi-bin).
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from test_processes import KEYS, free_port

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "examples/launchers/slurm.sbatch"
SHORT = ("jax_distributed_timeouts=8,20", "run_name=short")
# A process of number $1 that never starts; of the others each is the train command.
WITHOUT = '[ "${SLURM_PROCID-$OMPI_COMM_WORLD_RANK}" = "$1" ] && exit 0; shift; exec "$@"'
CONF = """\
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs=2
PartitionName=all Nodes=127.0.0.1,127.0.0.2 Default=YES State=UP
"""


def needs(*programs: str) -> None:
  for program in programs:
    if shutil.which(program) is None:
      pytest.skip(f"{program} is not part of this installation")


@pytest.fixture(scope="module")
def environment():
  """Of the commands that start jobs: one device to a process, and this interpreter as `python`."""
  return os.environ | {
    "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1",
  }  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, environment):
  needs("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "scancel")
  folder = tmp_path_factory.mktemp("slurm")
  own = {"host": socket.gethostname(), "user": Path.home().owner(), "folder": folder}
  (folder / "slurm.conf").write_text(CONF.format(ports=[free_port() for _ in range(3)], **own))
  environment = environment | {"SLURM_CONF": str(folder / "slurm.conf")}
  daemons = [["slurmctld"], *(["slurmd", "-N", f"127.0.0.{n}"] for n in (1, 2))]
  for command in daemons:
    subprocess.run(command, env=environment, check=True)
  pids = [folder / name for name in ("127.0.0.1.pid", "127.0.0.2.pid", "controller.pid")]
  yield environment
  for pid in pids:
    os.kill(int(pid.read_text()), signal.SIGTERM)


def keys(folder: Path, *more: str) -> list[str]:
  return [*KEYS, "per_device_batch_size=4", f"base_output_directory={folder}", *more]


def output(path: Path, text: str, seconds: float = 300) -> str:
  end = time.monotonic() + seconds
  while not path.is_file() or text not in path.read_text():
    assert time.monotonic() < end, path.read_text() if path.is_file() else "no output"
    time.sleep(0.2)
  return path.read_text()


def metrics(run: Path) -> list[tuple[int, float]]:
  records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
  return [(record["step"], record["learning/loss"]) for record in records]


def submit(environment: dict, run: Path, *more: str, options: tuple[str, ...] = ()) -> tuple[str, Path]:
  """(number of a job of the script, the file of what it says)."""
  said = run.with_suffix(".log")
  command = ["sbatch", "--parsable", *options, f"--chdir={SCRIPT.parents[2]}", f"--output={said}", str(SCRIPT)]
  arguments = [*command, *keys(run, *more)]
  return subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True).stdout.strip(), said


def test_the_script_trains_saves_when_it_is_preempted_and_goes_on(slurm, tmp_path):
  """A job that is queued again has the losses of one that nothing stops."""
  more = ("steps=600", "checkpoint_period=300", "eval_interval=-1", "log_period=100", "ghost_log_period=50")
  job, said = submit(slurm, tmp_path / "stopped", *more)
  output(said, "completed step: 100")
  subprocess.run(["scontrol", "requeue", job], env=slurm, check=True)
  assert "Stopped by SIGTERM" in output(said, "The same command continues it")
  time.sleep(5)
  update = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
  subprocess.run(update, env=slurm, check=True)
  output(said, "Training complete: 600 steps")
  whole = submit(slurm, tmp_path / "whole", *more)[1]
  assert "of 2 processes" in output(whole, "Training complete: 600 steps")
  assert metrics(tmp_path / "stopped/slurm") == metrics(tmp_path / "whole/slurm")


def test_a_job_that_its_time_limit_ends_is_queued_again(slurm, tmp_path):
  more = ("steps=100000", "checkpoint_period=50000", "eval_interval=-1", "log_period=100", "ghost_enabled=false")
  job, said = submit(slurm, tmp_path / "long", *more, options=("--time=2", "--signal=TERM@60"))
  try:
    assert "Stopped by SIGTERM" in output(said, "The same command continues it")
    output(said, "DUE TO JOB REQUEUE")
  finally:
    subprocess.run(["scancel", job], env=slurm, check=True)


@pytest.mark.parametrize(
  ("missing", "said"), [("1", "of 2 this one is missing: 1"), ("0", "process 1 did not meet process 0 at 127.0.0.1:")]
)
def test_a_missing_process_is_named_under_slurm(missing, said, slurm, tmp_path):
  train = ["python", "-m", "maxghost.train", *keys(tmp_path, *SHORT)]
  command = ["srun", "--nodes=2", "--ntasks=2", "--kill-on-bad-exit=0", "bash", "-c", WITHOUT, "-", missing, *train]
  found = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=200)
  assert found.returncode == 2 and said in found.stderr and "Traceback" not in found.stderr
  assert not (tmp_path / "short").exists()


def test_mpirun(environment, tmp_path):
  needs("mpirun")
  start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
  train = ["python", "-m", "maxghost.train", *keys(tmp_path, *SHORT, "steps=2")]
  command = [*start, "bash", "-c", WITHOUT, "-", "1", *train]
  found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
  assert found.returncode == 2 and "of 2 this one is missing: 1" in found.stderr
  found = subprocess.run([*start, *train], env=environment, capture_output=True, text=True, timeout=300)
  assert found.returncode == 0, found.stderr[-3000:]
  assert "of 2 processes" in found.stdout and len(metrics(tmp_path / "short")) == 2


def test_the_cloud_tpu_script_starts_its_command_on_every_worker(environment, tmp_path):
  """With a gcloud that starts the command as two workers of this machine."""
  (tmp_path / "maxghost").symlink_to(SCRIPT.parents[2])
  gcloud = tmp_path / "gcloud"
  gcloud.write_text(
    '#!/bin/bash\n[ "$1 $2 $3 $4 $5 $6 $7" = "compute tpus tpu-vm ssh my-tpu --zone=a --worker=all" ] || exit 9\n'
    f'for n in 0 1; do bash -c "${{8#--command=}} jax_distributed=127.0.0.1:{free_port()},$n/2" & done\n'
    "wait -n && wait -n\n"
  )
  gcloud.chmod(0o755)
  environment = environment | {"ZONE": "a", "PATH": f"{tmp_path}:{environment['PATH']}"}
  command = ["bash", str(SCRIPT.parent / "cloud_tpu.sh"), "my-tpu", *keys(tmp_path, "steps=2")]
  found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
  assert found.returncode == 0, found.stderr[-3000:]
  assert "of 2 processes" in found.stdout and len(metrics(tmp_path / "tpu")) == 2


def test_the_command_of_the_job_set(environment, tmp_path):
  """In two processes of this machine, with the variables of its pods; the address is that of this machine."""
  spec = yaml.safe_load((SCRIPT.parent / "jobset.yaml").read_text())["spec"]
  job = spec["replicatedJobs"][0]["template"]["spec"]
  assert job["completions"] == job["parallelism"] == 2 and job["completionMode"] == "Indexed"
  container = job["template"]["spec"]["containers"][0]
  own = {entry["name"]: entry["value"] for entry in container["env"]}
  port = free_port()
  assert "maxghost-slice-0-0.maxghost:8476" in container["command"][2] and own["JAX_COORDINATOR_BIND_ADDRESS"]
  script = container["command"][2].replace("maxghost-slice-0-0.maxghost:8476", f"127.0.0.1:{port}")
  script = f"{script.replace('/shared/runs', str(tmp_path))} {' '.join(keys(tmp_path, 'steps=2'))}"
  bound = {"JAX_COORDINATOR_BIND_ADDRESS": own["JAX_COORDINATOR_BIND_ADDRESS"].replace("8476", str(port))}
  pods = [
    subprocess.Popen(
      [*container["command"][:2], script], cwd=SCRIPT.parents[2],
      env=environment | bound | {"JOB_COMPLETION_INDEX": str(index)},
    )
    for index in range(2)
  ]  # fmt: skip
  assert [pod.wait(300) for pod in pods] == [0, 0]
  assert len(metrics(tmp_path / "gke")) == 2
