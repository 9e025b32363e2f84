"""Trackers and the profiler, with stand-ins for the libraries."""

import importlib.machinery
import json
import math
import sys
import types

import jax
import pytest

from maxghost import config
from maxghost.config import ConfigError
from maxghost.training import trackers

RECORDS = [{"step": n, "learning/loss": 3.0 - n, "ghost/x": math.nan, "sample/text": "t"} for n in range(4)]


@pytest.fixture
def library(monkeypatch):
  """Stands in for a package: notes the calls of its functions."""

  def install(name):
    calls, module = [], types.ModuleType(name)

    def note(function):
      return lambda *args, **kwargs: calls.append((function, args, kwargs)) or module

    for function in ("init", "log", "finish", "start_run", "log_params", "log_metrics", "end_run"):
      setattr(module, function, note(function))
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="here")
    monkeypatch.setitem(sys.modules, name, module)
    return calls

  return install


@pytest.mark.parametrize(
  ("name", "functions"),
  [
    ("wandb", ("init", "log", "finish")),
    ("trackio", ("init", "log", "finish")),
    ("mlflow", ("start_run", "log_metrics", "end_run")),
  ],
)
def test_a_tracker_gets_the_numbers_of_every_record(name, functions, library, tmp_path):
  calls = library(name)
  cfg = config.load(None, f"trackers={name}", "run_name=mine", "enable_tensorboard=false")
  trackers.check(cfg)
  (tracker,) = trackers.open_all(cfg, tmp_path / "mine", 0)
  for record in RECORDS:
    tracker.append(record)
  tracker.close()
  began, *logged, ended = [call for call in calls if call[0] in functions]
  assert (began[0], ended[0]) == (functions[0], functions[2])
  assert "mine" in began[2].values() or began[2].get("run_name") == "mine"
  assert [(args[0], kwargs["step"]) for _, args, kwargs in logged] == [
    ({"learning/loss": 3.0 - n}, n) for n in range(4)
  ]
  held = next(
    kwargs.get("config") or args[0] for f, args, kwargs in calls if f in ("init", "log_params")
  )  # the configuration
  assert json.loads(json.dumps(held))["run_name"] == "mine"


@pytest.mark.parametrize("function", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_named_in_one_line(function, library, monkeypatch, tmp_path):
  library("wandb")

  def fail(*args, **kwargs):
    raise RuntimeError("api_key not configured\nTraceback")

  monkeypatch.setattr(sys.modules["wandb"], function, fail)
  with pytest.raises(OSError, match=r"^trackers=wandb failed \(RuntimeError: api_key not configured\); set it up, or"):
    (tracker,) = trackers.open_all(config.load(None, "trackers=wandb", "enable_tensorboard=false"), tmp_path, 0)
    tracker.append(RECORDS[0])
    tracker.close()


def test_a_tracker_that_is_not_installed_is_named_with_its_command():
  with pytest.raises(ConfigError, match=r"trackers=trackio needs the package trackio; .* pip install trackio"):
    trackers.check(config.load(None, "trackers=[trackio]"))
  with pytest.raises(ConfigError, match="wanddb"):
    config.load(None, "trackers=[wanddb]")
  assert config.load(None, "enable_wandb=true").run.trackers == ("wandb",)


def test_tensorboard_is_named_before_a_run_is_written(monkeypatch):
  monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
  trackers.check(config.load(None, "enable_tensorboard=false"))
  with pytest.raises(ConfigError, match=r"enable_tensorboard=true needs the package tensorboardX; .* tensorboardX"):
    trackers.check(config.load())


def test_the_profiler_traces_the_steps_asked_for(monkeypatch, tmp_path):
  calls = []
  monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(("start", folder, at)))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(("stop", at)))
  cfg = config.load(
    None, "profiler=xplane", "skip_first_n_steps_for_profiler=2", "profiler_steps=3", "enable_tensorboard=false"
  )
  for last in (9, 4):
    calls.clear()
    (profile,) = trackers.open_all(cfg, tmp_path, 0)
    for at in range(last):
      profile.append({"step": at})
    profile.close()
    assert calls == [("start", str(tmp_path / "profile"), 2), ("stop", min(5, last - 1))]
