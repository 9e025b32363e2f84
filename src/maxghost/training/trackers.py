"""Where the records of metrics.jsonl go besides: TensorBoard, experiment trackers, and the profiler, which counts them.

Each has `append(record)` and `close()`. An experiment tracker is a package that is installed apart, and finds its
server and project by its own settings, such as WANDB_PROJECT or MLFLOW_TRACKING_URI.
"""

import contextlib
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from maxghost.config import Config, ConfigError
from maxghost.config.values import first_line
from maxghost.training.metrics import SAMPLE


class Tracker:
  """The numbers of each record to a library. Raises OSError for all that fails there."""

  def __init__(self, name: str, cfg: Config, path: Path):
    named = _named(name)
    library = named(importlib.import_module)(name)
    self._log, self.close = map(named, named(_OPEN[name])(library, cfg, path))

  def append(self, record: Mapping[str, Any]) -> None:
    self._log(_numbers(record), step=record["step"])


class TensorBoard:
  """Event files for TensorBoard. Entries of earlier files from `first_step` on are purged. Writes at once:
  tensorboardX's SummaryWriter has a thread, and waits for ever for one that an error has ended."""

  def __init__(self, path: Path, first_step: int):
    # 0.4 s of import, not needed where TensorBoard is off.
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]

    self._summary, self._event = summary, Event
    path.mkdir(parents=True, exist_ok=True)
    # The name of an event file has the time in whole seconds; a restart within one must not overwrite the file.
    self._writer = EventsWriter(str(path / "events"), f".{first_step}.{os.getpid()}")
    self._writer.write_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
    self.close = self._writer.close

  def append(self, record: Mapping[str, Any]) -> None:
    summaries = [self._summary.scalar(name, value) for name, value in _numbers(record).items()]
    if SAMPLE in record:
      summaries.append(self._summary.text(SAMPLE, record[SAMPLE]))
    for value in summaries:
      self._writer.write_event(self._event(wall_time=time.time(), step=record["step"], summary=value))
    self._writer.flush()


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
  return {n: v for n, v in record.items() if isinstance(v, (int, float)) and math.isfinite(v) and n != "step"}


class Profile:
  """Traces steps with JAX's profiler (`profiler=xplane`): from one record on to another, for whole steps."""

  def __init__(self, folder: Path, skip: int, steps: int):
    self._folder, self._first, self._last, self._seen = str(folder), skip + 1, skip + steps + 1, 0
    self._running = contextlib.ExitStack()
    self.close = self._running.close

  def append(self, record: Mapping[str, Any]) -> None:
    import jax

    self._seen += 1
    if self._seen == self._first:  # the step after this record runs already: the trace begins inside of it
      jax.profiler.start_trace(self._folder)
      self._running.callback(jax.profiler.stop_trace)
    elif self._seen == self._last:
      self.close()


def check(cfg: Config) -> None:
  """Raises ConfigError for a tracker that is not installed; imports none."""
  asked = {f"trackers={name}": name for name in cfg.run.trackers}
  if cfg.run.enable_tensorboard:
    asked["enable_tensorboard=true"] = "tensorboardX"
  for key, name in asked.items():
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:  # a folder of that name is no package
      raise ConfigError(f"{key} needs the package {name}; install it with: pip install {name}")


def open_all(cfg: Config, path: Path, first_step: int) -> tuple:
  """All that a configuration asks for. path: of the run; its name is that of the tracker's run too."""
  opened: list = [Tracker(name, cfg, path) for name in cfg.run.trackers]
  if cfg.run.enable_tensorboard:
    opened.append(TensorBoard(path / "tensorboard", first_step))
  if cfg.run.profiler:
    opened.append(Profile(path / "profile", cfg.run.skip_first_n_steps_for_profiler, cfg.run.profiler_steps))
  return tuple(opened)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
  """As a decorator: one line with the tracker's name for what a function of its library raises."""
  try:
    yield
  except Exception as error:  # of the library's own types
    said = f"trackers={name} failed ({type(error).__name__}: {first_line(error)})"
    raise OSError(f"{said}; set it up, or leave it out of trackers") from error


def _wandb(library: Any, cfg: Config, path: Path) -> tuple[Callable, Callable]:
  """Of wandb, and of trackio, which has its functions."""
  name, own = library.__name__, {"id": path.name, "dir": str(path)}
  project = os.environ.get(f"{name.upper()}_PROJECT", "maxghost")
  library.init(project=project, name=path.name, resume="allow", config=cfg.flat(), **(own if name == "wandb" else {}))
  return library.log, library.finish


def _mlflow(mlflow: Any, cfg: Config, path: Path) -> tuple[Callable, Callable]:
  mlflow.start_run(run_name=path.name)
  mlflow.log_params({key: str(value)[:500] for key, value in cfg.flat().items()})
  return mlflow.log_metrics, mlflow.end_run


_OPEN: dict[str, Callable] = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _wandb}
