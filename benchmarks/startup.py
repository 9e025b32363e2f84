"""How long a user waits: for the first wrong key, for the imports, for the first training step.

  python benchmarks/startup.py [--rounds 5] [key=value ...]

Wall time of real commands, each started afresh; the median of the rounds. "First step" is the time from the start of
`python -m maxghost.train configs/base.yml` to the line of step 0, which is printed when step 1 is done too, since a
step's measured drop of the validation loss is known only then.
"""

import statistics
import subprocess
import sys
import tempfile
import time

import _measure
from _measure import Figure

TRAIN = [sys.executable, "-m", "maxghost.train", str(_measure.BASE)]
IMPORTS = {
  "import of the training modules": "import maxghost.train, maxghost.training.session",
  "import of jax, flax.nnx, optax alone": "import jax, flax.nnx, optax",
}
USER_ERROR = 2


def main() -> int:
  args = _measure.arguments(__doc__, rounds=5, first_steps=2)
  contenders = {
    "first config error": lambda: seconds_of([*TRAIN, "base_emb_dmi=128"], USER_ERROR),
    **{name: (lambda code=code: seconds_of([sys.executable, "-c", code])) for name, code in IMPORTS.items()},
    "bare Python": lambda: seconds_of([sys.executable, "-c", ""]),
  }
  seconds = _measure.take_turns(contenders, args.rounds)
  seconds["first step line"] = [first_step(args.overrides) for _ in range(args.first_steps)]
  middle = {name: statistics.median(values) for name, values in seconds.items()}
  rows = [{"what": name, "seconds": value, "fastest": min(seconds[name])} for name, value in middle.items()]
  figures = [
    Figure("seconds to the first config error", middle["first config error"], 1.0, form="{:.2f}"),
    Figure("seconds to the first step's line", middle["first step line"], 15.0, form="{:.1f}"),
    Figure("seconds to import the training modules", middle["import of the training modules"], form="{:.2f}"),
  ]
  return _measure.publish("startup", rows, figures, path=args.json)


def seconds_of(command: list[str], expected: int = 0) -> float:
  """Wall seconds of a command. Raises RuntimeError where it does not end with the expected code."""
  with tempfile.TemporaryDirectory() as folder:
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    seconds = time.perf_counter() - begin
  if done.returncode != expected:
    raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}, not {expected}: {done.stderr[-1000:]}")
  return seconds


def first_step(overrides) -> float:
  """Seconds to the line of step 0. The run is ended there."""
  with tempfile.TemporaryDirectory() as folder:
    begin = time.perf_counter()
    command = [*TRAIN, f"base_output_directory={folder}", *overrides]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
      printed = []
      for line in process.stdout:
        if line.startswith("completed step: 0"):
          seconds = time.perf_counter() - begin
          process.kill()
          return seconds
        printed.append(line)
  raise RuntimeError("no step was printed:\n" + "".join(printed[-20:]))


if __name__ == "__main__":
  sys.exit(_measure.run(main))
