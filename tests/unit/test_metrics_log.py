"""Metric names, metrics.jsonl, TensorBoard files, the step line, signals and the prefetcher."""

import contextlib
import errno
import io
import json
import math
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from maxghost import config, train
from maxghost.config import ConfigError
from maxghost.config.files import write_text
from maxghost.config.schema import ModelConfig
from maxghost.scorelog import selection
from maxghost.training import console, metrics, run_directory
from maxghost.training.batches import NUM_AHEAD, Prefetcher
from maxghost.training.console import Console, eval_line, step_line
from maxghost.training.loop import StopSignals
from maxghost.training.metrics import MetricsLog, NonFiniteMetricError
from maxghost.training.plan import Plan, step_flops
from maxghost.training.score_recorder import (
  QUEUE_LENGTH,
  ScoreLogError,
  ScoreRecorder,
  module_contributions,
  scored_rows,
)
from maxghost.training.session import Session
from maxghost.training.trackers import TensorBoard

OUTPUTS = {
  "loss": np.float32(2.5),
  "tokens": np.float32(96),
  "grad_norm": np.float32(3),
  "param_norm": np.float32(7),
  "learning_rate": np.float32(1e-3),
  "clip_factor": np.float32(0.5),
  "val_loss": np.array([2.0, 4.0], np.float32),
  "predicted_examples": np.array([0.5, 1.0]),
  "momentum": np.array([0.25, 2.0]),
  "weight_decay": np.array([-0.125, 4.0]),
  "unscored": np.array([0.0, 8.0]),
  "direction_residual": np.array([0.0625, 16.0]),
  "check_rel_err": np.array([1e-7, 2e-7]),
  "scored_ok": np.True_,
}


def test_names_are_maxtexts():
  record = metrics.learning_metrics(OUTPUTS)
  assert "learning/perplexity" not in metrics.learning_metrics(OUTPUTS, "dpo")
  assert record["learning/loss"] == 2.5 and record["learning/perplexity"] == pytest.approx(math.exp(2.5))
  assert record["learning/total_weights"] == 96 and record["learning/current_learning_rate"] == pytest.approx(1e-3)
  assert record["learning/grad_norm"] == 3 and record["learning/param_norm"] == 7


def test_predicted_drop_is_the_sum_of_its_columns_per_set():
  record = metrics.ghost_metrics(OUTPUTS, ("manual", "code"))
  assert record["ghost/predicted_drop/manual"] == pytest.approx(0.5 + 0.25 - 0.125 + 0.0625)
  assert record["ghost/predicted_drop/code"] == 31.0
  assert record["ghost/val_loss/manual"] == 2.0 and record["ghost/val_loss/code"] == 4.0
  assert record["ghost/scored"] == 1


def test_captured_energy_is_logged_per_layer(tmp_path):
  """As JSON, also where a validation gradient was not finite, so that the step is not scored."""
  captured = {"mlp/wi": np.array([[0.5], [0.75]], np.float32), "wo": np.array([[np.nan]], np.float32)}
  record = metrics.ghost_metrics(OUTPUTS | {"captured": captured}, ("manual",))
  assert record["ghost/captured/mlp/wi"] == [[0.5], [0.75]]
  MetricsLog(tmp_path / "metrics.jsonl").append(record)
  assert json.loads((tmp_path / "metrics.jsonl").read_text())["ghost/captured/wo"] == [[None]]


@pytest.mark.parametrize("name", ["loss", "grad_norm", "param_norm"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named(name, bad):
  with pytest.raises(NonFiniteMetricError, match=f"step 6: {name} is {bad}"):
    metrics.check_finite(6, OUTPUTS | {name: np.float32(bad)})
  metrics.check_finite(6, OUTPUTS)


def test_scores_that_are_not_finite_are_named():
  bad = OUTPUTS | {"scored_ok": np.False_}
  labels = {f"w{i}": i != 1 for i in range(7)}
  line = metrics.unscored_line(3, bad | {"nonfinite_scores": labels})
  assert line == "maxghost: step 3 is not scored: its scores are not finite in w0, w2, w3, w4 and 2 more"
  assert metrics.unscored_line(3, bad) == "maxghost: step 3 is not scored: its scores are not finite"  # forward_mode
  assert metrics.unscored_line(3, OUTPUTS) is None


def test_the_mean_over_evaluation_batches_weighs_tokens():
  record = metrics.eval_metrics([(np.float32(30), np.float32(10)), (np.float32(2), np.float32(6))])
  assert record == {"eval/avg_loss": 2.0, "eval/avg_perplexity": pytest.approx(math.exp(2)), "eval/total_weights": 16}
  many = metrics.eval_metrics([(np.float32(0), np.float32(2**24)), (np.float32(0), np.float32(1))])
  assert many["eval/total_weights"] == 2**24 + 1  # which float32 does not have


def test_the_log_goes_back_to_a_position(tmp_path):
  path = tmp_path / "metrics.jsonl"
  log = MetricsLog(path)
  log.append({"step": 0, "a": 0.1})
  position = log.position()
  log.append({"step": 1, "a": math.nan})
  log.close()
  again = MetricsLog(path)
  again.restore(position)
  again.append({"step": 1, "a": 0.3})
  again.close()
  assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 0, "a": 0.1}, {"step": 1, "a": 0.3}]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_directory_was_taken_away_writes_no_more(tmp_path, replaced):
  """Not even when its logs are closed: the directory may be that of another run by now."""
  path, closed = tmp_path / "run" / "metrics.jsonl", []
  path.parent.mkdir()
  log = MetricsLog(path)
  log.append({"step": 0})
  path.parent.rename(tmp_path / "elsewhere")
  if replaced:
    path.parent.mkdir()
    path.write_text('{"step": 10}\n')

  class Moved(Session):
    def __init__(self):
      pass

    def _claim(self):
      return contextlib.nullcontext()

    def _train(self, opened):
      opened.callback(closed.append, "a log")
      log.append({"step": 1})

  with pytest.raises(OSError, match="moved, removed or replaced") as caught:
    Moved().run()
  assert caught.value.errno == errno.ESTALE and caught.value.filename == str(path) and not closed
  assert not replaced or path.read_text() == '{"step": 10}\n'
  log.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no device that is always full")
def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path, monkeypatch):
  log, lines = MetricsLog("/dev/full"), tmp_path / selection.FILE
  lines.symlink_to("/dev/full")
  calls = [lambda: log.append({"step": 0}), log.close, lambda: selection.append(tmp_path, 0, 2, [1])]
  monkeypatch.setattr(os, "fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
  whole = tmp_path / "whole.json"
  for call, path in zip([*calls, lambda: write_text(whole, "x")], ["/dev/full"] * 2 + [lines, whole], strict=True):
    with pytest.raises(OSError, match="No space left") as caught:
      call()
    assert caught.value.filename == str(path)
  assert not whole.exists()


def test_a_log_that_lost_records_is_refused(tmp_path):
  log = MetricsLog(tmp_path / "metrics.jsonl")
  log.append({"step": 0})
  with pytest.raises(ConfigError, match=r"metrics\.jsonl has 12 bytes, .* had 99"):
    log.restore(99)


def test_a_value_that_json_does_not_have_becomes_null(tmp_path):
  log = MetricsLog(tmp_path / "metrics.jsonl")
  log.append({"step": 0, "check": math.nan})
  log.close()
  assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "check": null}\n'


def read_events(folder):
  """Scalars (tag, step, value) and purges of all event files in the order of writing: 8 + 4 + n + 4 bytes each."""
  from tensorboardX.proto.event_pb2 import Event

  found = []
  for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack("<Q", data[:8])
      event = Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]
      if event.HasField("session_log"):
        found.append(("purge", event.step, None))
      found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
  return found


def test_tensorboard_steps_are_not_doubled_by_a_restart(tmp_path):
  first = TensorBoard(tmp_path, 0)
  for step in range(4):
    first.append({"step": step, "learning/loss": 9.0 - step, "text": "ignored"})
  first.close()
  second = TensorBoard(tmp_path, 2)
  for step in range(2, 5):
    second.append({"step": step, "learning/loss": 19.0 - step})
  second.close()
  shown = {}
  for tag, step, value in read_events(tmp_path):
    if tag == "purge":
      shown = {key: v for key, v in shown.items() if key[1] < step}
    else:
      assert (tag, step) not in shown
      shown[tag, step] = value
  assert shown == {("learning/loss", s): v for s, v in enumerate([9.0, 8.0, 17.0, 16.0, 15.0])}


RECORD = {
  "step": 3,
  "perf/step_time_seconds": 0.0451,
  "perf/per_device_tflops_per_sec": 0.041,
  "perf/per_device_tokens_per_sec": 2845.33,
  "learning/total_weights": 128,
  "learning/loss": 7.259,
  "learning/perplexity": 1421.54,
  "learning/current_learning_rate": 3e-3,
  "learning/grad_norm": 1.5,
  "ghost/val_loss/manual": 5.5,
  "ghost/predicted_drop/manual": 0.0123,
  "ghost/actual_drop/manual": -0.004,
  "ghost/check_rel_err/manual": 2.2e-7,
  "ghost/contribution/manual/tables": 0.001,
  "ghost/contribution/manual/code": -0.002,
}


def test_the_step_line_is_maxtexts_in_short_with_ghosts_part_behind():
  start = "completed step: 3, seconds: 0.045, Tokens/s/device: 2845, loss: 7.259"
  assert step_line(RECORD) == start
  sampled = RECORD | {"rollout/mean_length": 3.0}
  assert step_line(sampled) == f"{start}, reward: none, as no function judged an answer"
  assert step_line(sampled | {"rollout/reward": 0.5}) == f"{start}, reward: 0.500"
  assert step_line(RECORD, ("manual",)) == f"{start}, val_loss: 5.500, drop: -0.00400, code: -0.00200"
  unmeasured = RECORD | {"ghost/val_loss/manual": math.nan}
  del unmeasured["ghost/actual_drop/manual"]
  assert step_line(unmeasured, ("manual",)) == f"{start}, code: -0.00200, tables: +0.00100"


def test_a_stopped_run_names_only_a_checkpoint_that_exists(tmp_path):
  """A run that goes on after the steps of another one and is stopped at once has saved nothing."""
  tmp_path /= "Ann's run"
  (tmp_path / "checkpoints" / "7").mkdir(parents=True)
  cfg = config.replace(config.load(), steps=9)
  saved, again = console.interrupted_lines(cfg, 7, tmp_path, "SIGTERM")
  assert saved == f"Stopped by SIGTERM after 7 of 9 steps; saved in {tmp_path / 'checkpoints' / '7'}"
  assert shlex.split(again.partition("or: ")[2])[-1] == str(tmp_path / "config.yml"), "it can be pasted"
  for completed in (0, 5):
    first, _ = console.interrupted_lines(cfg, completed, tmp_path, "Ctrl-C")
    assert first == f"Stopped by Ctrl-C after {completed} of 9 steps; nothing to save"
  off = config.replace(cfg, checkpoint_period=0)
  (only,) = console.interrupted_lines(off, 7, tmp_path, "SIGTERM")
  assert only.endswith("; not saved, because checkpoint_period=0")


def test_the_command_of_the_report_can_be_pasted(tmp_path, monkeypatch, capsys):
  (path := tmp_path / "Ann's run").mkdir()
  (path / "metrics.jsonl").write_text('{"learning/loss": 1.0, "learning/total_weights": 4}\n')
  cfg = config.load(None, "ghost_enabled=false")
  lines = console.end_lines(SimpleNamespace(cfg=cfg), [], path)
  monkeypatch.setattr(run_directory, "inspect", lambda cfg: run_directory.Existing(path, False, {}, cfg.run.steps))
  assert train._run(cfg, False, None) == 0  # of a run that is complete
  for line in (lines[-1], capsys.readouterr().out.splitlines()[-1]):
    assert shlex.split(line) == ["Report:", "python", "-m", "maxghost.report", str(path)]


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    ("objective=dpo", "2 steps, 12 pairs, "),
    ("objective=grpo packing=none grpo_loss_type=grpo", "2 steps, 12 answers, "),
    ("objective=grpo packing=none", "2 steps, 12 target tokens, "),
  ],
)
def test_the_last_lines_say_what_a_run_has_trained_on(keys, said, tmp_path):
  """Weights are sums in float32; those of a pair or an answer add up to 1."""
  line = '{"learning/loss": 1.0, "learning/total_weights": 5.999999880790710}\n'
  (tmp_path / "metrics.jsonl").write_text(2 * line)
  cfg = config.load(None, "ghost_enabled=false", *keys.split())
  assert console.end_lines(SimpleNamespace(cfg=cfg), [], tmp_path)[0].startswith(f"Training complete: {said}")
  record = {"eval/avg_loss": 0.5, "eval/total_weights": 5.999999880790710}
  assert eval_line(1, record).endswith(", total_weights=6.0")


@pytest.mark.parametrize(("loss", "said"), [("800.0", ["Held-out loss: 800.0000"]), ("null", [])])
def test_a_held_out_loss_that_has_no_perplexity_or_is_not_finite(loss, said, tmp_path):
  """The perplexity of a loss above 709 nats is no finite number, and null in metrics.jsonl."""
  record = f'"learning/loss": 1.0, "learning/total_weights": 4, "eval/avg_loss": {loss}, "eval/avg_perplexity": null'
  (tmp_path / "metrics.jsonl").write_text(f"{{{record}}}\n")
  lines = console.end_lines(SimpleNamespace(cfg=config.load(None, "ghost_enabled=false")), [], tmp_path)
  assert [line for line in lines if "Held-out" in line] == said


def test_a_step_line_has_at_most_120_characters():
  domains = {f"ghost/contribution/manual/{'domain' * n}": 7.0**n for n in range(12)}
  for scale in (1e-9, 1.0, 1e9):
    record = {name: value * scale if isinstance(value, float) else value for name, value in (RECORD | domains).items()}
    line = step_line(record | {"step": 10**9, "ghost/account_steps": 100}, ("manual", "code"))
    assert line.startswith("completed step: 1000000000, seconds: ") and len(line) <= 120


def test_the_eval_line_is_maxtexts():
  plain = metrics.eval_metrics([(np.float32(9), np.float32(4))], "distill")
  assert eval_line(79, plain) == "Completed eval after train step 79, loss=2.2500, total_weights=4"
  record = {"eval/avg_loss": 2.25, "eval/avg_perplexity": 9.488, "eval/total_weights": 640}
  assert eval_line(79, record) == "Completed eval after train step 79, loss=2.2500, perplexity=9.488, total_weights=640"


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize("stream, bar", [(io.StringIO(), False), (Terminal(), True)])
def test_a_progress_bar_on_a_terminal_only(stream, bar):
  console = Console(stream)
  console.start(10, 4)
  console.advance(5, 3.25)
  console.line("completed step: 4, [x]" + "y" * 200)
  console.stop()
  text = stream.getvalue()
  assert "completed step: 4, [x]" + "y" * 200 in text.replace("\r", "")
  assert ("5/10" in text) == bar and ("\x1b[" in text) == bar


def test_the_first_signal_asks_and_the_second_ctrl_c_aborts(capfd):
  before = signal.getsignal(signal.SIGINT)
  with StopSignals() as signals:
    assert signals.requested is None
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.requested == signal.SIGINT and signals.exit_code == 130 and signals.name == "Ctrl-C"
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.requested == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
  assert signal.getsignal(signal.SIGINT) is before
  assert "Ctrl-C received, finishing the step and saving, unless checkpoint_period=0;" in capfd.readouterr().err


def test_signals_are_answered_while_the_main_thread_is_inside_of_a_library():
  """As XLA is while it compiles: Python calls no handler before it returns."""
  code = "import hashlib; from maxghost.training import signals; signals._GRACE = 0.5\n"
  code += "with signals.StopSignals():\n  print(flush=True); hashlib.pbkdf2_hmac('sha256', b'a', b'b', 2**31 - 1)"
  process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  process.stdout.readline()
  time.sleep(1)  # else the signal may come before the call
  process.send_signal(signal.SIGINT)
  assert [process.stderr.readline(), process.stderr.readline()][1].startswith("maxghost: Ctrl-C received; XLA ends its")
  process.send_signal(signal.SIGINT)
  assert "stopped by the second Ctrl-C" in process.communicate(timeout=60)[1] and process.returncode == 130


def test_sigterm_is_a_request_that_succeeds():
  with StopSignals() as signals:
    for _ in range(3):
      os.kill(os.getpid(), signal.SIGTERM)
    assert signals.requested == signal.SIGTERM and signals.exit_code == 0


def test_a_signal_while_jax_is_imported_stops_before_anything_is_built(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(Plan, "of", None)
  cfg, signals = config.load(None, f"base_output_directory={tmp_path}"), StopSignals()
  signals.requested = signal.SIGINT
  assert train._train(cfg, run_directory.inspect(cfg), None, signals, None, False, (None, None)) == 130
  assert "before the first step; nothing was written" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "sent", "code"), [(0, signal.SIGTERM, 0), (1, signal.SIGINT, 130)])
def test_a_process_that_waits_for_others_stops_at_the_first_signal(tmp_path, capsys, number, sent, code):
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  place = (f"base_output_directory={tmp_path}", f"jax_distributed=127.0.0.1:{port},{number}/2")
  cfg = config.load(None, *place, "jax_distributed_timeouts=60,60")
  timer = threading.Timer(0.3, os.kill, (os.getpid(), sent))
  with StopSignals() as signals:
    timer.start()
    assert train._train(cfg, run_directory.inspect(cfg), None, signals, None, False, (None, None)) == code
  assert "before the first step; nothing was written" in capsys.readouterr().out and not list(tmp_path.iterdir())


class Counting:
  def __init__(self, fail_at=None):
    self.drawn, self.fail_at = 0, fail_at

  def __next__(self):
    if self.drawn == self.fail_at:
      raise ConfigError("the file is gone")
    self.drawn += 1

    class Batch:
      arrays = {"x": self.drawn}  # noqa: RUF012 - a value of this batch alone

    return Batch

  def state(self):
    return {"drawn": self.drawn}


def test_batches_are_fetched_ahead_and_carry_their_own_position():
  iterator = Counting()
  prefetcher = Prefetcher(iterator, lambda arrays: arrays["x"] * 10, num_batches=7)
  deadline = time.monotonic() + 10
  while iterator.drawn < NUM_AHEAD + 1 and time.monotonic() < deadline:
    time.sleep(0.01)
  for number in range(1, 8):
    fetched = next(prefetcher)
    assert (fetched.arrays, fetched.position) == (number * 10, {"drawn": number})
  prefetcher.close()
  assert iterator.drawn == 7


def test_a_reader_error_comes_after_the_batches_before_it():
  prefetcher = Prefetcher(Counting(fail_at=1), lambda arrays: arrays, num_batches=5)
  assert next(prefetcher).position == {"drawn": 1}
  with pytest.raises(ConfigError, match="the file is gone"):
    next(prefetcher)
  prefetcher.close()


def test_closing_the_prefetcher_ends_its_thread():
  prefetcher = Prefetcher(Counting(), lambda arrays: arrays, num_batches=1000)
  next(prefetcher)
  prefetcher.close()
  assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())


class Rows:
  """A batch of B=2 rows with S=3 segments; segment (0, 2) is empty, (1, 0) has no token that counts."""

  document_BS = np.array([[4, 9, -1], [5, 4, 6]])
  offset_BS = np.array([[10, 20, -1], [30, 40, 50]])
  epoch_B = np.array([0, 1])
  unit_BS = None


def rows_outputs(num_sets=2):
  rng = np.random.default_rng(0)
  return {
    "tokens_BS": np.array([[3, 2, 0], [0, 7, 1]], np.int32),
    "loss_BS": rng.normal(size=(2, 3)),
    "score_dot_BSK": rng.normal(size=(2, 3, num_sets)),
    "contribution_BSK": rng.normal(size=(2, 3, num_sets)),
  }


def test_rows_are_the_segments_with_a_document_and_tokens():
  outputs = rows_outputs()
  columns, documents = scored_rows(outputs, Rows)
  assert documents.tolist() == [4, 9, 4, 6]
  assert columns["chunk"].tolist() == [10, 20, 40, 50] and columns["tokens"].tolist() == [3, 2, 7, 1]
  assert columns["epoch"].tolist() == [0, 0, 1, 1]
  for n, (b, s) in enumerate([(0, 0), (0, 1), (1, 1), (1, 2)]):
    np.testing.assert_array_equal(columns["dot"][n], outputs["score_dot_BSK"][b, s])
    np.testing.assert_array_equal(columns["contribution"][n], outputs["contribution_BSK"][b, s])
    assert columns["loss"][n] == outputs["loss_BS"][b, s]


def test_contributions_by_module_add_up_over_the_documents_of_a_domain():
  rng = np.random.default_rng(1)
  scored_BS = np.array([[True, True, False], [False, True, True]])
  w, b = (rng.normal(size=(layers, 2, 3, 2)).astype(np.float32) for layers in (4, 1))
  sums = module_contributions({"w": w, "b": b}, scored_BS, np.array([2, 0, 2, 1]), 3)
  assert sums.shape == (2, 4, 3, 2)
  np.testing.assert_allclose(sums[0, :, 2], w[:, 0, 0] + w[:, 1, 1])
  np.testing.assert_allclose(sums[0, :, 1], w[:, 1, 2])
  np.testing.assert_allclose(sums[1, :1, 0], b[:, 0, 1])
  assert np.isnan(sums[1, 1:]).all() and not np.isnan(sums[1, :1]).any() and not np.isnan(sums[0]).any()


def test_an_error_of_the_score_writer_reaches_the_loop(tmp_path):
  class FullDisk:
    def append(self, *args, **kwargs):
      raise OSError("no space left")

    def close(self):
      pass

  recorder = ScoreRecorder(FullDisk(), lambda index: ("code", "x", 0), ("code",))
  recorder.record(3, None, np.zeros(1), None)
  for call in (recorder.position, lambda: recorder.record(4, None, None, None), recorder.close):
    with pytest.raises(ScoreLogError, match="no space left"):
      call()


def test_the_loop_waits_for_a_score_writer_that_is_far_behind(tmp_path):
  """Else the outputs of all steps since would fill the memory."""
  written, may_write = [], threading.Semaphore(0)

  class SlowDisk:
    ledger, parts = (), ()

    def append(self, record, *rows, **modules):
      assert may_write.acquire(timeout=10)
      written.append(record["step"])

    def close(self):
      pass

  recorder = ScoreRecorder(SlowDisk(), lambda index: ("code", "x", 0), ("code",))
  for step in range(QUEUE_LENGTH):
    recorder.record(step, None, None, None)
  further = threading.Thread(target=recorder.record, args=(QUEUE_LENGTH, None, None, None))
  further.start()
  further.join(0.1)
  assert further.is_alive()
  may_write.release()
  further.join(10)
  assert not further.is_alive() and written == [0]
  may_write.release(QUEUE_LENGTH)
  recorder.close()
  assert written == [*range(QUEUE_LENGTH + 1)]


def test_flops_of_a_step_by_hand():
  """D=20 H=10 K=2 h=16 F=36 L=3 V=67, T=13, 7 rows: products of the shapes, written out."""
  model = ModelConfig(
    base_emb_dim=20,
    base_num_query_heads=10,
    base_num_kv_heads=2,
    head_dim=16,
    base_mlp_dim=36,
    base_num_decoder_layers=3,
    vocab_size=67,
  )
  query, key_value, out, mlp = 20 * 160, 2 * 20 * 32, 160 * 20, 3 * 20 * 36
  per_token = 3 * (query + key_value + out + mlp) + 20 * 67
  flops = step_flops(model, 7, 13)
  assert flops.weights == 6 * per_token * 7 * 13
  assert flops.attention == 3 * 3 * (2 * 160 * 13 * 13) * 7  # two products of T x T x H h multiply-adds, half masked


def test_a_loss_that_rose_is_not_said_to_have_fallen():
  def line(*drops):
    records = [{"ghost/scored": True, "ghost/actual_drop/manual": drop} for drop in drops]
    return console.ghost_line(records, "manual")

  assert line(0.5, -2.45).startswith("Validation loss 'manual' rose by 1.9500 nats")
  assert line(0.5, 0.25, None).startswith("Validation loss 'manual' fell by 0.7500 nats")


def test_nothing_from_the_data_steers_the_terminal():
  """Domains may come from records, and samples from a model."""
  stream = io.StringIO()
  lines = console.Console(stream)
  lines.line("domain a\x1b[2J\u202e: 3 documents")
  lines.line("漢字\u3000x\n\ty")
  assert stream.getvalue() == "domain a\ufffd[2J\ufffd: 3 documents\n漢字\u3000x\n\ty\n"


def test_records_that_were_changed_are_named_at_every_resume(tmp_path, capsys):
  path = tmp_path / "metrics.jsonl"
  log = MetricsLog(path)
  for step in range(3):
    log.append({"step": step, "learning/loss": 1.25})
  position, checksum = log.position(), log.checksum
  log.close()
  again = MetricsLog(path)
  again.restore(position, checksum)
  assert again.checksum == checksum and capsys.readouterr().err == ""
  again.close()
  path.write_text(path.read_text().replace("1.25", "1.26", 1))
  for _ in range(2):
    again = MetricsLog(path)
    again.restore(position, checksum)
    assert "metrics.jsonl were changed since they were written" in capsys.readouterr().err
    position, checksum = again.position(), again.checksum
    again.close()


def test_tensorboard_raises_where_it_cannot_write(tmp_path):
  log = TensorBoard(tmp_path, 0)
  os.close(number := log._writer._py_recordio_writer._writer.fileno())
  with pytest.raises(OSError):
    log.append({"step": 0, "learning/loss": 1.0})
  os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # where the rest goes at the end


def test_a_terminal_that_is_gone_stops_the_run_unless_nohup(monkeypatch):
  before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
  try:
    with StopSignals() as signals:
      os.kill(os.getpid(), signal.SIGHUP)
      assert signals.requested == signal.SIGHUP and signals.exit_code == 129 and signals.name == "SIGHUP"
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals() as signals:
      os.kill(os.getpid(), signal.SIGHUP)
      assert signals.requested is None
  finally:
    signal.signal(signal.SIGHUP, before)
