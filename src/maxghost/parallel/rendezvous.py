"""Checks that every process reaches process 0 before jax.distributed starts; JAX would abort with a core dump.

Process 0 listens at the coordinator's address; each other process sends its number and how many processes it expects,
and all get the same answer. The port is then released for JAX's own service.
"""

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time

from maxghost.config.values import ConfigError, listed

_RETRY_SECONDS = 0.2
_LATECOMERS_SECONDS = 2.0
waits = threading.Event()  # whether this process waits for others
_FIX = "start all of them, with the same address and number of processes, or raise jax_distributed_timeouts"


def meet(address: str, num_processes: int, process_id: int, timeout: float) -> None:
  """Returns in every process once all are connected.

  Raises ConfigError on every connected process if one is missing after `timeout` seconds, two have the same number or
  they expect different numbers of processes; on process 0 also if the port is in use.
  """
  arguments = (address, num_processes, timeout)
  waits.set()
  try:
    problem = _follow(process_id, *arguments) if process_id else _lead(*arguments)
  finally:
    waits.clear()
  if problem:
    raise ConfigError(problem)


def of_launcher() -> tuple[str, int, int] | None:
  """(address of process 0, number of this process, how many there are) under srun or mpirun, as JAX finds them."""
  env = os.environ
  if "SLURM_STEP_NODELIST" in env:
    host = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"]).partition(",")[0]  # node[01-04,7] is node01
    job, number, count = (env[f"SLURM_{name}"] for name in ("JOB_ID", "PROCID", "NTASKS"))
  elif found := re.match(r"(\d+)\..*tcp://([^,:;]+)", env.get("OMPI_MCA_orte_hnp_uri", "")):
    job, host = found.groups()
    number, count = (env[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "SIZE"))
  else:
    return None
  port = env.get("JAX_COORDINATOR_PORT") or str(int(job) % 2**12 + 61440)
  if not port.isdecimal() or not 0 < int(port) < 2**16:
    raise ConfigError(f"JAX_COORDINATOR_PORT={port} is no port; give a number from 1 to 65535")
  return f"{host}:{port}", int(number), int(count)


def bind_address(address: str) -> str:
  """Where process 0 listens: at the coordinator's address alone, unless JAX's own variable names another."""
  return os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", address)


def listen(address: str) -> socket.socket:
  """A listening socket at `bind_address`. Raises ConfigError if it is not of this machine, or the port is in use."""
  host, _, port = (given := bind_address(address)).rpartition(":")
  try:
    family, *_, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    return socket.create_server(place, family=family, backlog=1024)
  except (OSError, ValueError) as error:
    problem = f"port {port} of this machine is in use; use another, the same for all processes"
    if not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:
      problem = f"{given} is no address of this machine, HOST:PORT, on which process 0 runs; give one, or set JAX_"
      problem += f"COORDINATOR_BIND_ADDRESS=0.0.0.0:{address.rpartition(':')[2]} where it is forwarded to this machine"
    raise ConfigError(f"jax_distributed={address}: {problem}") from error


def _lead(address: str, expected: int, timeout: float) -> str:
  """Process 0: waits for the others and tells them the result; returns the error message or ''."""
  end = time.monotonic() + timeout
  came: dict[int, socket.socket] = {}
  problem = ""
  with contextlib.ExitStack() as stack:
    server = stack.enter_context(listen(address))
    while len(came) < expected - 1:
      server.settimeout(max(end - time.monotonic(), 0.01))
      try:
        connection = stack.enter_context(server.accept()[0])
      except TimeoutError:
        missing = [str(number) for number in range(1, expected) if number not in came]
        problem = problem or (
          f"jax_distributed: the processes of the run did not all meet at {address} within {timeout:g} s: of "
          f"{expected} {'these are' if len(missing) > 1 else 'this one is'} missing: {listed(missing, 8)}; {_FIX}"
        )
        break
      said = _receive(connection, 10)
      number, theirs = said.get("process"), said.get("of")
      if type(number) is not int or type(theirs) is not int or not 0 < number < theirs:
        continue  # not a process of a run
      if theirs != expected:
        named = f"{theirs} processes in process {number}, {expected} in process 0"
        problem = f"jax_distributed names {named}; start all with the same number"
      elif number in came:
        problem = f"jax_distributed: number {number} is given to two processes; give each of the {expected} its own"
      if problem:  # wait a little, so that processes about to connect get the message too
        end = min(end, time.monotonic() + _LATECOMERS_SECONDS)
      came[len(came) + expected if number in came else number] = connection
    for connection in came.values():
      with contextlib.suppress(OSError):
        connection.sendall(json.dumps({"problem": problem}).encode() + b"\n")
  return problem


def _follow(number: int, address: str, expected: int, timeout: float) -> str:
  """Another process: returns the error message of process 0 or ''."""
  host, _, port = address.rpartition(":")
  end, reason = time.monotonic() + timeout, "no answer"
  while time.monotonic() < end:
    try:
      with socket.create_connection((host.strip("[]"), int(port)), timeout=5) as connection:
        connection.sendall(json.dumps({"process": number, "of": expected}).encode() + b"\n")
        # Process 0 may have started to wait later than this one, and answers when its own timeout ends.
        problem = _receive(connection, 2 * timeout + 10).get("problem")
      if isinstance(problem, str):
        return problem
      reason = "what answers there is not process 0 of a run"
    except OSError as error:
      reason = error.strerror or str(error) or reason
    time.sleep(_RETRY_SECONDS)
  missed = f"process {number} did not meet process 0 at {address} within {timeout:g} s ({reason})"
  return f"jax_distributed: {missed}; {_FIX}"


def _receive(connection: socket.socket, seconds: float) -> dict:
  """The JSON object of one line; empty if anything else or nothing arrives."""
  connection.settimeout(seconds)
  try:
    with connection.makefile("rb") as lines:
      said = json.loads(lines.readline(4096))
  except (OSError, ValueError, RecursionError):
    return {}
  return said if isinstance(said, dict) else {}
