"""The run directory: complaints come before anything is written; one process at a time; what may change on resume."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from maxghost import config, train
from maxghost.config import ConfigError
from maxghost.training import run_directory, session


def make_config(tmp_path, **changes):
  return config.replace(config.load(), base_output_directory=str(tmp_path / "runs"), run_name="one", **changes)


def start(cfg):
  run_directory.claim(run_directory.inspect(cfg), cfg).close()


def test_inspecting_a_new_run_writes_nothing(tmp_path):
  existing = run_directory.inspect(make_config(tmp_path))
  assert existing.is_new and existing.completed_steps == 0
  assert list(tmp_path.iterdir()) == []


def test_claiming_writes_the_resolved_config(tmp_path):
  cfg = make_config(tmp_path, steps=7)
  start(cfg)
  assert config.load(tmp_path / "runs" / "one" / "config.yml") == cfg
  existing = run_directory.inspect(cfg)
  assert not existing.is_new and existing.changed == {}


def test_all_differing_keys_are_named_with_both_values(tmp_path):
  start(make_config(tmp_path))
  changed = make_config(tmp_path, learning_rate=0.5, base_mlp_dim=64, log_period=9, load_parameters_path="a")
  with pytest.raises(ConfigError) as raised:
    run_directory.inspect(changed)
  message = str(raised.value)
  assert "learning_rate: the run has 0.001, the command 0.5" in message
  assert "base_mlp_dim: the run has 768, the command 64" in message
  assert "load_parameters_path: the run has '', the command a" in message
  assert "log_period" not in message and "\n" not in message


def test_a_run_that_has_recorded_no_step_is_new_with_any_config(tmp_path):
  """Its first batch may be what was wrong: the name stays free for a command that is mended."""
  start(make_config(tmp_path))
  metrics, other = tmp_path / "runs" / "one" / run_directory.METRICS_FILE, make_config(tmp_path, learning_rate=0.5)
  with pytest.raises(ConfigError, match="another config"):
    run_directory.inspect(other)  # nothing shows that config.yml is that of a run
  metrics.touch()
  (metrics.parent / "checkpoints" / "1").mkdir(parents=True)
  with pytest.raises(ConfigError, match="another config"):
    run_directory.inspect(other)
  (metrics.parent / "checkpoints" / "1").rmdir()
  assert run_directory.inspect(other).is_new
  start(other)  # a local checkpoint, which is not searched here, may still refuse the other config
  assert config.load(metrics.parent / "config.yml") == make_config(tmp_path)
  metrics.write_text("{}\n")
  with pytest.raises(ConfigError, match="another config"):
    run_directory.inspect(other)


def test_what_is_only_printed_or_saved_may_change(tmp_path):
  start(make_config(tmp_path))
  changes = dict(
    per_device_batch_size=3, log_period=9, checkpoint_period=11, eval_interval=-1, eval_steps=5, sample_every=7,
    sample_prompt="def", enable_tensorboard=False, jax_cache_dir="cache", max_num_checkpoints_to_keep=4,
    async_checkpointing=False,
  )  # fmt: skip
  assert set(run_directory.inspect(make_config(tmp_path, **changes)).changed) == set(changes)


def test_every_key_is_either_free_to_change_or_refused(tmp_path):
  """A new key is refused on resume unless it is listed on purpose."""
  keys = config.fields()
  assert keys.keys() >= run_directory.RESUMABLE_KEYS
  assert keys.keys() >= run_directory.LOCATION_KEYS


@pytest.mark.parametrize(
  ("keys", "moves", "stays"),
  [
    ({"lora_rank": 4}, "load_parameters_path", ""),
    ({"objective": "distill", "distill_teacher": "a"}, "distill_teacher", "load_parameters_path"),
    ({}, "", "load_parameters_path"),
  ],
)
def test_only_the_path_of_weights_that_are_compared_may_change(tmp_path, keys, moves, stays):
  """Those that no step changes. A student is not compared with what it began with."""
  start(make_config(tmp_path, **keys))
  for saved in (False, True):
    for name in filter(None, (moves, stays)):
      cfg = make_config(tmp_path, **(keys | {name: "b"}))
      if saved and name == moves:
        assert name in run_directory.inspect(cfg).changed
        continue
      with pytest.raises(ConfigError, match=f"{name}: the run has"):
        run_directory.inspect(cfg)
    (tmp_path / "runs" / "one" / "checkpoints" / "2").mkdir(parents=True, exist_ok=True)


def test_steps_may_grow_and_not_shrink(tmp_path):
  start(make_config(tmp_path, steps=10))
  assert run_directory.inspect(make_config(tmp_path, steps=12)).changed == {"steps": (10, 12)}
  with pytest.raises(ConfigError, match=r"steps: the run has 10, the command 9.*may only grow"):
    run_directory.inspect(make_config(tmp_path, steps=9))


def test_a_moved_run_is_still_the_run(tmp_path):
  start(make_config(tmp_path))
  os.rename(tmp_path / "runs" / "one", tmp_path / "runs" / "two")
  moved = config.replace(make_config(tmp_path), run_name="two")
  assert not run_directory.inspect(moved).is_new


def test_a_foreign_directory_is_refused(tmp_path):
  folder = tmp_path / "runs" / "one"
  folder.mkdir(parents=True)
  assert run_directory.inspect(make_config(tmp_path)).is_new
  (folder / "thesis.tex").write_text("important")
  with pytest.raises(ConfigError, match="not a run directory"):
    run_directory.inspect(make_config(tmp_path))


def test_the_traces_of_a_start_that_was_killed_do_not_count(tmp_path):
  folder = tmp_path / "runs" / "one"
  folder.mkdir(parents=True)
  (folder / run_directory.LOCK_FILE).write_text("12\n")
  (folder / ".config.yml.abc.tmp").write_text("steps: 1")
  assert run_directory.inspect(make_config(tmp_path)).is_new


@pytest.mark.parametrize("base", ["file/runs", "file", "/proc/runs"])
def test_a_place_that_cannot_be_written_is_one_line(tmp_path, base):
  (tmp_path / "file").write_text("")
  place = base if base.startswith("/") else str(tmp_path / base)
  cfg = config.replace(config.load(), base_output_directory=place)
  with pytest.raises(ConfigError, match=r"base_output_directory=.*cannot write") as raised:
    start(cfg)
  assert "\n" not in str(raised.value)


def test_a_place_for_checkpoints_that_is_none_is_told_before_the_first_step(tmp_path):
  cfg = make_config(tmp_path)
  start(cfg)
  (tmp_path / "runs" / "one" / "checkpoints").touch()
  with pytest.raises(ConfigError, match=r"cannot write .*checkpoints is not a directory"):
    run_directory.inspect(cfg)


def test_a_bucket_is_refused_before_anything_is_made(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(ConfigError, match=r"^base_output_directory=gs://bucket/runs: runs are written to"):
    run_directory.inspect(config.replace(config.load(), base_output_directory="gs://bucket/runs"))
  assert list(tmp_path.iterdir()) == []


def test_a_damaged_config_is_one_line(tmp_path):
  start(make_config(tmp_path))
  (tmp_path / "runs" / "one" / "config.yml").write_text("steps: [1")
  with pytest.raises(ConfigError, match=r"config\.yml"):
    run_directory.inspect(make_config(tmp_path))


def test_a_second_process_is_kept_out_until_the_first_ends(tmp_path):
  cfg = make_config(tmp_path)
  code = (
    "import sys\n"
    "from maxghost import config\n"
    "from maxghost.training import run_directory as r\n"
    "cfg = config.replace(config.load(), base_output_directory=sys.argv[1], run_name='one')\n"
    "held = r.claim(r.inspect(cfg), cfg)\n"
    "print('held', flush=True)\n"
    "sys.stdin.read()\n"
  )
  command = [sys.executable, "-c", code, cfg.run.base_output_directory]
  other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  try:
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ConfigError, match=f"process {other.pid} is training in"):
      start(cfg)
  finally:
    other.kill()
    other.communicate()
  start(cfg)  # the lock dies with its process


def test_a_run_is_complete_when_its_last_record_is_written(tmp_path):
  cfg = make_config(tmp_path, steps=3)
  start(cfg)
  log = tmp_path / "runs" / "one" / "metrics.jsonl"
  for step, complete in ((0, 0), (1, 0), (2, 3)):
    with open(log, "a") as file:
      file.write(json.dumps({"step": step}) + "\n")
    assert run_directory.inspect(cfg).completed_steps == complete
  with open(log, "a") as file:
    file.write('{"step": 7')  # cut off: does not count
  assert run_directory.inspect(cfg).completed_steps == 3
  longer = run_directory.inspect(make_config(tmp_path, steps=5))
  assert longer.completed_steps == 3 and longer.changed == {"steps": (3, 5)}


def test_a_refused_run_leaves_no_directory_unless_it_has_recorded_something(tmp_path):
  folder, cfg = tmp_path / "runs" / "one", make_config(tmp_path)
  start(cfg)
  (folder / "checkpoints" / "7").mkdir(parents=True)
  run_directory.withdraw(run_directory.inspect(cfg))
  assert config.load(folder / "config.yml") == cfg
  (folder / "checkpoints" / "7").rename(folder / "checkpoints" / "mine")
  run_directory.withdraw(run_directory.inspect(cfg))
  assert config.load(folder / "config.yml") == cfg
  (folder / "checkpoints" / "mine").rmdir()
  (folder / "metrics.jsonl").touch()
  run_directory.withdraw(run_directory.inspect(cfg))
  assert config.load(folder / "config.yml") == cfg
  (folder / "metrics.jsonl").unlink()
  run_directory.withdraw(run_directory.inspect(cfg))
  assert list((tmp_path / "runs").iterdir()) == []


def test_a_finished_run_without_checkpoints_is_not_begun_anew(tmp_path, capsys):
  start(make_config(tmp_path, steps=3))
  (tmp_path / "runs" / "one" / "metrics.jsonl").write_text('{"step": 2}\n')
  assert train.main([f"base_output_directory={tmp_path / 'runs'}", "run_name=one", "steps=5"]) == 2
  said = "maxghost: steps=5: after 3 steps there is no checkpoint to continue from, and the run in "
  assert capsys.readouterr().err.startswith(said)
  assert (tmp_path / "runs" / "one" / "metrics.jsonl").read_text() == '{"step": 2}\n'


def test_no_jax_is_imported():
  code = "import sys; from maxghost.training import run_directory; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_lock_that_is_a_link_is_refused_and_its_target_kept(tmp_path):
  folder = tmp_path / "runs" / "one"
  folder.mkdir(parents=True)
  (tmp_path / "thesis.tex").write_text("important")
  (folder / run_directory.LOCK_FILE).symlink_to(tmp_path / "thesis.tex")
  with pytest.raises(ConfigError, match="cannot write"):
    start(make_config(tmp_path))
  assert (tmp_path / "thesis.tex").read_text() == "important"


@pytest.mark.parametrize("name", ["../x", "a/b", "/x", "..", "a\nb", "a\x1b[2J", "a" * 256, "ü" * 128])
def test_a_run_stays_in_its_folder(tmp_path, name):
  cfg = config.replace(make_config(tmp_path), run_name=name)
  with pytest.raises(ConfigError, match=r"run_name='.*': must be the name of a folder in base_output_directory"):
    run_directory.inspect(cfg)
  run_directory.inspect(config.replace(cfg, run_name="ü 日" + "a" * 249))


def test_a_trainer_that_was_faster_is_not_overwritten(tmp_path):
  """Both look at the folder before one of them locks it."""
  mine, theirs = make_config(tmp_path, learning_rate=0.5), make_config(tmp_path)
  seen = run_directory.inspect(mine)
  start(theirs)
  with pytest.raises(ConfigError, match=r"learning_rate: the run has 0.001, the command 0.5"):
    run_directory.claim(seen, mine)
  assert config.load(tmp_path / "runs" / "one" / "config.yml") == theirs
  start(theirs)  # the lock is free again


def test_a_last_record_that_is_no_object_is_no_end(tmp_path):
  start(make_config(tmp_path))
  (tmp_path / "runs" / "one" / "metrics.jsonl").write_text("[]\n")
  assert run_directory.inspect(make_config(tmp_path)).completed_steps == 0


def test_a_config_that_was_changed_since_the_checkpoint_is_refused(tmp_path):
  saved = json.loads(json.dumps(make_config(tmp_path, steps=7).flat()))
  run_directory.check_saved(tmp_path, saved, make_config(tmp_path, steps=9, log_period=3))
  run_directory.check_saved(tmp_path, saved | {"gone": 1, "ghost_reweight": True}, make_config(tmp_path, steps=7))
  with pytest.raises(ConfigError, match=r"learning_rate: the run has 0.001, the command 0.002"):
    run_directory.check_saved(tmp_path, saved, make_config(tmp_path, steps=7, learning_rate=0.002))


@pytest.mark.parametrize(("rows", "advice"), [(6, "per_device_batch_size=3"), (7, "another number of devices")])
def test_a_run_goes_on_with_as_many_rows_in_a_step(tmp_path, monkeypatch, rows, advice):
  """Which key it is depends on the devices, so that the configurations alone do not tell."""
  before, cfg = (make_config(tmp_path, per_device_batch_size=size) for size in (3, 4))
  saved = json.loads(json.dumps(before.flat()))
  found = SimpleNamespace(positions={"rows": rows, "config": saved})
  begun = SimpleNamespace(
    _plan=SimpleNamespace(rows=8, state=None, layout=SimpleNamespace(num_devices=2)), _cfg=cfg, _path=tmp_path,
    _console=SimpleNamespace(line=print),
    _open_checkpoints=lambda *_, **__: SimpleNamespace(restore_latest=lambda own: found),
  )  # fmt: skip
  monkeypatch.setattr(session.state, "saved_parts", lambda state: (None, {}))
  said = f"size=4 on 2 devices is 8 rows per step, but .* was trained with {rows} .*; use {advice}, or another run_name"
  with pytest.raises(ConfigError, match=said):
    session.Session._restore(begun)
