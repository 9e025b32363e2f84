"""The HTTP server under load: many clients at once, some of which leave; slots, memory and texts afterwards.

  python benchmarks/serving_load.py [--requests 1000] [--clients 50] [--slots 8] [key=value ...]

A model with random weights (configs/base.yml; key=value arguments change it) is served by `maxghost serve` in a process
of its own. Every client asks for one of 40 prompts of unequal length after the other, greedily, every second time as a
stream; one of ten leaves in the middle of its answer. Every text is compared with that of the same request alone.
"""

import concurrent.futures
import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _measure
import numpy as np
from _measure import Figure
from flax import nnx

from maxghost import config as configuration
from maxghost import models
from maxghost.checkpoint.manager import CheckpointManager
from maxghost.training.state import to_tree

WARM = 300  # requests before the memory is read first


class Client:
  def __init__(self, port: int, seconds: float = 600.0):
    self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)

  def ask(self, body: dict) -> http.client.HTTPResponse:
    self._connection.request("POST", "/v1/completions", json.dumps(body))
    return self._connection.getresponse()

  def text(self, body: dict) -> str:
    """The whole text. Raises RuntimeError."""
    reply = self.ask(body)
    raw = reply.read().decode()
    if reply.status != 200:
      raise RuntimeError(f"{reply.status}: {raw}")
    if not body.get("stream"):
      return json.loads(raw)["choices"][0]["text"]
    events = [json.loads(line) for line in re.findall(r"^data: (\{.*)$", raw, re.M)]
    if not raw.endswith("data: [DONE]\n\n"):
      raise RuntimeError(raw[-500:])
    return "".join(event["choices"][0]["text"] for event in events)

  def leave(self, body: dict) -> None:
    """Goes away, behind the first piece of a stream."""
    reply = self.ask(body) if body.get("stream") else None
    if reply:
      reply.readline()
      reply.close()
    else:
      self._connection.request("POST", "/v1/completions", json.dumps(body))
      time.sleep(0.05)
    self._connection.close()

  def metrics(self) -> dict[str, float]:
    self._connection.request("GET", "/metrics")
    text = self._connection.getresponse().read().decode()
    self._connection.close()  # the next request opens it again
    return {name: float(value) for name, value in re.findall(r"^(maxghost_\w+) (\S+)$", text, re.M)}


def bodies(count: int) -> list[dict]:
  rng = np.random.default_rng(0)
  made = []
  for _ in range(40):
    prompt = [256, *rng.integers(32, 127, int(rng.integers(1, 120))).tolist()]
    made.append({"prompt": prompt, "max_tokens": int(rng.integers(4, 40)), "temperature": 0, "ignore_eos": True})
  return [made[i % len(made)] | {"stream": bool(i // len(made) % 2)} for i in range(count)]


def memory(process: subprocess.Popen) -> float:
  """MB in use."""
  status = Path(f"/proc/{process.pid}/status").read_text()
  return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1e3


def load(port: int, process: subprocess.Popen, given) -> dict[str, float]:
  asked, alone, client = bodies(given.requests), {}, Client(port)
  for body in asked[:40]:
    alone[tuple(body["prompt"])] = client.text(body)
  before = client.metrics()

  def one(number: int) -> str:
    body, client = asked[number], Client(port)
    if number % 10 == 9:
      client.leave(body | {"max_tokens": 300})
      return "left"
    return "same" if client.text(body) == alone[tuple(body["prompt"])] else "other"

  begin = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor(given.clients) as clients:
    outcomes = list(clients.map(one, range(WARM)))
    first = memory(process)
    outcomes += list(clients.map(one, range(WARM, given.requests)))
  seconds = time.perf_counter() - begin
  while (after := client.metrics())["maxghost_requests_running"] + after["maxghost_requests_waiting"]:
    time.sleep(0.05)
  last = memory(process)
  new = {name: after[name] - before[name] for name in after}
  with concurrent.futures.ThreadPoolExecutor(given.slots) as clients:  # every slot can still be taken
    long = {"prompt": [256, 65], "max_tokens": 300, "stream": True, "ignore_eos": True, "temperature": 0}
    futures = [clients.submit(Client(port).text, long) for _ in range(given.slots)]
    most = 0.0
    while not all(future.done() for future in futures):
      most = max(most, client.metrics()["maxghost_requests_running"])
      time.sleep(0.02)
  return {
    "requests": len(outcomes), "left": outcomes.count("left"), "other texts": outcomes.count("other"),
    "done": new["maxghost_requests_done_total"], "cancelled": new["maxghost_requests_cancelled_total"],
    "failed": new["maxghost_requests_failed_total"], "slots at once": most, "MB, warm": first, "MB, end": last,
    "tokens/s": new["maxghost_generated_tokens_total"] / seconds, "seconds": seconds,
  }  # fmt: skip


def main() -> int:
  given = _measure.arguments(__doc__, requests=1000, clients=50, slots=8)
  cfg = configuration.load(str(_measure.BASE), *given.overrides)
  with tempfile.TemporaryDirectory() as folder:
    run = Path(folder) / "run"
    run.mkdir()
    configuration.save(cfg, run / "config.yml")
    manager = CheckpointManager(run / "checkpoints", asynchronous=False)
    manager.save(1, {"model": to_tree(nnx.state(models.create(cfg, rngs=nnx.Rngs(0))))}, {})
    manager.close()
    command = [sys.executable, "-m", "maxghost.serve", str(run), "--port", "0", "--cache", "512"]
    with subprocess.Popen(
      [*command, "--slots", str(given.slots), "--queue", str(2 * given.clients)], stdout=subprocess.PIPE, text=True
    ) as process:
      try:
        port = int(re.search(r":(\d+)/", process.stdout.readline())[1])
        row = load(port, process, given)
        process.terminate()
        row["exit code"] = process.wait(60)
      finally:
        process.kill()
  lost = row["requests"] - row["done"] - row["cancelled"]
  figures = [
    Figure("requests that neither ended nor were cancelled", lost + row["failed"], 0),
    Figure("slots that can be taken at once afterwards", row["slots at once"], given.slots, above=True),
    Figure("texts other than those of the same request alone", row["other texts"], 0),
    Figure(f"memory at the end over that after {WARM} requests", row["MB, end"] / row["MB, warm"], 1.02),
    Figure("exit code", row["exit code"], 0),
  ]
  return _measure.publish("serving_load", [row], figures, path=given.json)


if __name__ == "__main__":
  sys.exit(_measure.run(main))
