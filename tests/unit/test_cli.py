"""The commands: arguments, exit codes, one line per problem, no JAX before the configuration is valid."""

import io
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time

import jax
import meshes
import pytest

import maxghost
from maxghost import attribute, cli, config, generate, train
from maxghost.config import values
from maxghost.config.values import guard
from maxghost.training import devices


def command(*argv):
  ran = []
  code = cli.run_command(ran.append, argv, "train")
  return code, ran


def test_command_hands_the_configuration_over(tmp_path, capsys):
  path = tmp_path / "a.yml"
  path.write_text("log_period: 7\n", encoding="utf-8")
  code, ran = command(str(path), "steps=9")
  assert code == 0 and ran == [config.load("log_period=7", "steps=9")]
  assert command("steps=9") == (0, [config.load("steps=9")]) and command() == (0, [config.load()])
  (tmp_path / "lr=0.1").mkdir()
  in_run = path.rename(tmp_path / "lr=0.1" / "config.yml")
  assert command(str(in_run), "steps=9") == (0, [config.load("log_period=7", "steps=9")])
  assert cli.run_command(lambda cfg: cfg.run.steps, ["steps=6"]) == 6
  assert capsys.readouterr() == ("", "")


def test_command_reports_one_line_per_problem_and_exits_2(capsys):
  assert command("stepz=9", "head_dim=3") == (2, [])
  assert capsys.readouterr().err.splitlines() == [
    "maxghost: unknown key 'stepz' (command line); did you mean 'steps'?",
    "maxghost: head_dim=3 is odd, but the rotary embedding turns pairs; use 4",
  ]


def test_problems_found_later_by_the_command_exit_2_too(capsys):
  def work(cfg):
    raise config.ConfigError("run_name=base: exists", "steps: differ")

  assert cli.run_command(work, []) == 2
  assert capsys.readouterr().err == "maxghost: run_name=base: exists\nmaxghost: steps: differ\n"
  with pytest.raises(ZeroDivisionError):  # a defect of ours keeps its traceback
    guard(lambda: 1 // 0)


@pytest.mark.parametrize(
  ("argv", "told"),
  [
    (["--steps", "7"], "'--steps': keys are written without dashes: steps=VALUE"),
    (["--log-period=7"], "'--log-period=7': keys are written without dashes: log_period=7"),
    (["--print-conifg"], "unknown flag '--print-conifg'; did you mean 'print_config'?"),
    (["a.yml", "b.yml"], "more than one config file: a.yml, b.yml; give one, and key=value for the rest"),
    (["--help", "stepz"], "unknown key 'stepz'; did you mean 'steps'?"),
  ],
)
def test_wrong_arguments(argv, told, capsys):
  assert command(*argv) == (2, [])
  assert capsys.readouterr().err.splitlines()[0] == f"maxghost: {told}"


@pytest.mark.parametrize(
  "typed",
  [
    "load_parameters_path=gs://bucket/run", "load_parameters_path=nowhere", "load_full_state_path=nowhere",
    "distill_teacher=nowhere objective=distill", "offline_data_dir=nowhere objective=distill",
    "tokenizer_path=nowhere tokenizer_type=huggingface", "dataset_exclude_file=nowhere", "dataset_include_file=nowhere",
    "dataset_files=a=nowhere dataset_type=text ghost_val_sets=a", "base_output_directory=gs://bucket",
  ],
)  # fmt: skip
def test_a_path_is_named_with_the_key_that_gave_it(typed, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  keys = typed.split()
  assert train.main(["dataset_type=synthetic", "ghost_val_sets=words", *reversed(keys)]) == 2
  said = [line for line in capsys.readouterr().err.splitlines() if ": note: " not in line]
  key, _, value = keys[0].partition("=")
  assert len(said) == 1 and said[0].startswith(f"maxghost: {key}") and value.rpartition("=")[2] in said[0], said
  assert key == "dataset_files" or said[0].startswith(f"maxghost: {keys[0]}"), said
  assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_is_named_with_its_key():
  with pytest.raises(OSError, match="gone") as caught, values.naming("tokenizer_path", "t"):
    raise FileNotFoundError(2, "it is gone", "t/x.json")
  assert caught.value.filename == "tokenizer_path=t: t/x.json"


def test_help_and_print_config_run_nothing(capsys):
  assert command("--help") == (0, [])
  text = capsys.readouterr().out
  assert text.startswith("usage: maxghost train [config.yml]") and "ghost_val_refresh_steps" in text
  for argv in (["--help", "steps"], ["--help", "steps=3"], ["--help=steps"], ["-h", "steps"], ["help", "steps"]):
    assert command(*argv) == (0, [])
    assert capsys.readouterr().out.startswith("steps\n  total training steps\n")
  assert command("steps=11", "--print_config") == (0, [])
  assert any(line.split() == ["steps:", "11", "#", "command", "line"] for line in capsys.readouterr().out.splitlines())


def test_overridden_values_are_told(capsys):
  assert command("steps=9", "steps=8")[0] == 0
  assert capsys.readouterr().err == "maxghost: note: steps=9 (command line) is overridden by the later steps=8\n"


def test_a_verb_is_imported_when_it_runs(tmp_path, monkeypatch, capsys):
  """Of the two, the module that fails when it is imported is not."""
  (tmp_path / "ghost_fake_one.py").write_text("def main(argv=None):\n  print('one', argv)\n  return 5\n")
  (tmp_path / "ghost_fake_two.py").write_text("raise RuntimeError('imported to find out')\n")
  monkeypatch.syspath_prepend(tmp_path)
  verbs = {"first": ("ghost_fake_one", "does one thing"), "second": ("ghost_fake_two", "does another")}
  monkeypatch.setattr(cli, "VERBS", verbs)
  assert cli.main(["first", "a", "b=1"]) == 5
  assert capsys.readouterr().out == "one ['a', 'b=1']\n"
  assert cli.main(["frist"]) == 2 and cli.main(["third"]) == 2
  assert capsys.readouterr().err.splitlines() == [
    "maxghost: unknown command 'frist'; did you mean 'first'?",
    "maxghost: unknown command 'third'; there are first, second",
  ]
  assert cli.main([]) == 2 and cli.main(["--help"]) == 0
  assert capsys.readouterr().out.count("  second  does another") == 2


SCRIPT = """
import sys
from maxghost import cli
def work(cfg):
  import jax
code = cli.run_command(work, sys.argv[1:], "train")
print("jax imported:", "jax" in sys.modules)
sys.exit(code)
"""


def test_first_error_comes_before_jax_and_soon(tmp_path):
  (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
  command = [sys.executable, str(tmp_path / "script.py")]
  start = time.monotonic()
  wrong = subprocess.run([*command, "stepz=1"], capture_output=True, text=True)
  seconds = time.monotonic() - start
  assert (wrong.returncode, wrong.stdout) == (2, "jax imported: False\n")
  assert wrong.stderr == "maxghost: unknown key 'stepz' (command line); did you mean 'steps'?\n"
  assert seconds < 5, "takes 0.1 s on an idle machine; importing JAX alone takes longer than that"
  assert subprocess.run([*command, "steps=1"], capture_output=True, text=True).stdout == "jax imported: True\n"


@pytest.mark.parametrize("verb", ["train", "train_compile"])
def test_real_commands_refuse_before_jax(verb, tmp_path):
  for argv in (["-m", cli.VERBS[verb][0]], ["-m", "maxghost.cli", verb]):
    command = [sys.executable, "-X", "importtime", *argv, "stepz=1"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    imported = {
      line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    said = [line for line in result.stderr.splitlines() if not line.startswith("import time:")]
    assert result.returncode == 2 and said == ["maxghost: unknown key 'stepz' (command line); did you mean 'steps'?"]
    assert "yaml" in imported and not imported & {"jax", "flax", "numpy"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["trainable_parameters_mask", "ghost_exclude"])
def test_a_pattern_that_matches_no_parameter_is_one_line(key, tmp_path, capsys):
  keys = [f"{name}={value}" for name, value in (meshes.SIZES | {"dataset_type": "synthetic"}).items()]
  assert train.main([*keys, f"{key}=['*norm*','*mlpp*']", f"base_output_directory={tmp_path}"]) == 2
  (said,) = capsys.readouterr().err.splitlines()
  assert f"{key} pattern '*mlpp*' matches no parameter (* is any text)" in said and not list(tmp_path.iterdir())


def test_output_closed_early_is_no_traceback():
  code = "import sys; from maxghost import cli; sys.exit(cli.run_command(print, ['--help'] * 1))"
  process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  process.stdout.close()
  assert (process.stderr.read(), process.wait()) == (b"", 0)
  process.stderr.close()


def test_a_run_says_that_its_output_was_closed(tmp_path):
  code = """
  import sys
  from maxghost import train
  from maxghost.training import devices

  def lines(cfg):
    while True:
      print("completed step", flush=True)

  devices.open_layout = lines
  sys.exit(train.main(sys.argv[1:]))
  """
  command = [sys.executable, "-c", textwrap.dedent(code), f"base_output_directory={tmp_path}"]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  process.stdout.readline()
  process.stdout.close()
  said = "maxghost: the output was closed; the same command continues from the last checkpoint\n"
  assert (process.stderr.read(), process.wait()) == (said, 1)
  process.stderr.close()


def test_output_closed_before_the_command_begins_is_no_traceback(tmp_path):
  python = f"{sys.executable} -m maxghost data"
  shown = f"{python} show dataset_type=synthetic max_target_length=64 >&- 2>{tmp_path / 'said'}"
  assert subprocess.run(shown, shell=True).returncode == 0 and (tmp_path / "said").read_text() == ""
  assert subprocess.run(f"{python} show stepz=9 >{tmp_path / 'out'} 2>&-", shell=True).returncode == 2
  assert (tmp_path / "out").read_text() == ""


def test_the_version_is_told_and_the_package_runs(capsys):
  assert cli.main(["--version"]) == 0
  assert capsys.readouterr().out == f"maxghost {maxghost.__version__}\n"
  done = subprocess.run([sys.executable, "-m", "maxghost", "--version"], capture_output=True, text=True, check=True)
  assert done.stdout == f"maxghost {maxghost.__version__}\n"


def test_a_command_within_another_is_named(capsys):
  assert cli.main(["compare", "a", "b"]) == 2 and cli.main(["prepare"]) == 2
  assert capsys.readouterr().err.splitlines() == [
    "maxghost: unknown command 'compare'; it is checkpoint compare",
    "maxghost: unknown command 'prepare'; it is data prepare",
  ]
  for outer, names in cli.WITHIN.items():
    for name in names:
      with pytest.raises(SystemExit):
        cli.main([outer, name, "--help"])
      assert capsys.readouterr().out.startswith(f"usage: maxghost {outer} {name}")


def test_a_command_has_flags_of_its_own(capsys):
  found = []

  def work(cfg, force, quick):
    found.append((cfg.run.steps, force, quick))

  switches = {"force": "does it anyway", "quick": "does it fast"}
  assert cli.run_command(work, ["steps=9", "--force"], "train", switches) == 0
  assert cli.run_command(work, ["steps=8"], "train", switches) == 0
  assert found == [(9, True, False), (8, False, False)]
  assert cli.run_command(work, ["--help", "steps"], "train", switches) == 0
  assert command("--force") == (2, [])
  assert "unknown flag '--force'" in capsys.readouterr().err


def test_a_ctrl_c_in_the_first_seconds_is_kept(monkeypatch):
  """JAX is not imported yet; in its imports a KeyboardInterrupt would be lost, or end in a traceback."""

  def run(work, argv, *rest):
    os.kill(os.getpid(), signal.SIGINT)
    return work.keywords["signals"].exit_code

  monkeypatch.setattr(cli, "run_command", run)
  assert train.main([]) == 130


def test_a_terminal_of_unknown_width_is_written_to(capsys, monkeypatch):
  monkeypatch.setenv("COLUMNS", "0")
  assert train.main(["--help"]) == 0
  assert "learning_rate" in capsys.readouterr().out


def test_a_value_of_several_lines_is_refused_in_one(capsys):
  assert train.main(["steps=1\n2"]) == 2
  assert capsys.readouterr().err == "maxghost: steps='1\\n2' (command line) is not of type int\n"


@pytest.mark.parametrize(
  "argv", [["steps=1e18"], ["head_dim=1e12"], ["base_num_decoder_layers=1e30 segment_lengths=7"]]
)
def test_a_run_of_absurd_size_is_refused_at_once(argv, capsys):
  begin = time.process_time()
  assert train.main(argv[0].split()) == 2
  assert time.process_time() - begin < 1 and capsys.readouterr().err.startswith("maxghost: ")


@pytest.mark.parametrize(
  ("argv", "said"),
  [
    ("report . --port 80", "--port has no effect without --watch; leave it out"),
    ("data shwo", "invalid choice: 'shwo'"),
    ("data show steps=1 --naer", "unknown argument '--naer'"),
    ("data duplicates --naer", "unknown argument '--naer'; did you mean '--near'?"),
    ("data verify a b", "unknown argument 'b'"),
    ("checkpoint convrt", "unknown tool 'convrt'; did you mean 'convert'?"),
    ("checkpoint frob", "unknown tool 'frob'; there are convert, compare, inspect, rescale, quantize, hf"),
    ("checkpoint convert --source_path a --target_path b --directoin auto", "did you mean '--direction'?"),
    ("checkpoint compare a", "the following arguments are required: B"),
    ("checkpoint hf export a b --shard_mb x", "argument --shard_mb: invalid megabytes value: 'x'"),
    ("checkpoint hf import a b --ram_mb inf", "argument --ram_mb: inf: a number of megabytes above 0"),
    ("checkpoint quantize a b --quantization int8w --ram_mb nan", "nan: a number of megabytes above 0"),
    ("checkpoint convert --source_path a --target_path b --ram_mb -1", "-1: a number of megabytes above 0"),
    ("checkpoint convert --source_path a --target_path b --layer_period -1", "--layer_period -1: at least 0"),
    ("checkpoint inspect \x1b[2J\u202e", r"there is no checkpoint folder \x1b[2J\u202e"),
  ],
)
def test_mistakes_with_arguments_are_one_line(argv, said, capsys):
  assert cli.main(argv.split(" ")) == 2
  error = capsys.readouterr().err
  assert said in error and error.count("\n") == 1 and error.replace("\n", "").isprintable()


@pytest.mark.parametrize("given", ["runs/bsae", "base"])
@pytest.mark.parametrize(
  "argv", ["report R", "scores R", "ask R x", "attribute R --data run --index i", "generate R --prompt x",
           "serve R --port 0", "checkpoint inspect R"]
)  # fmt: skip
def test_the_nearest_folder_of_a_run_is_suggested(given, argv, tmp_path, monkeypatch, capsys):
  """One that is spelt alike, or the run of a name without its folder."""
  monkeypatch.chdir(tmp_path)
  for folder in ("runs/base", "more/runs"):
    (tmp_path / folder).mkdir(parents=True)
  assert cli.main(argv.replace("R", given).split()) == 2
  error = capsys.readouterr().err
  assert error.endswith("; nearest is runs/base\n") and error.count("\n") == 1
  assert train.main(["runs"]) == 2 and capsys.readouterr().err == "maxghost: config file runs is a folder\n"


def test_the_command_that_writes_an_index_can_be_pasted(tmp_path, monkeypatch, capsys):
  run = tmp_path / "Ann's run"
  (run / "checkpoints" / "3").mkdir(parents=True)
  (run / "config.yml").touch()
  assert cli.main(["ask", str(run), "q"]) == 2
  command = shlex.split(capsys.readouterr().err.partition("write one: ")[2])
  expected = ["attribute", str(run / "checkpoints" / "3"), "--data", "NAME=GLOB", "--index", str(run / "index")]
  assert command == ["maxghost", *expected]


@pytest.mark.parametrize(
  ("module", "argv"), [("config", ""), ("ask", "ask runs/base x"), ("load_model", "generate runs/base --prompt x")]
)
def test_ctrl_c_while_commands_are_imported_ends_them_at_once(module, argv):
  """In a library in C a KeyboardInterrupt is lost, or becomes an ImportError."""
  code = f"""
    import os, signal, sys
    from maxghost import __main__

    class Interrupts:
      def find_spec(self, name, *rest):
        if name == "maxghost.{module}":
          os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits none
    sys.meta_path.insert(0, Interrupts())
    sys.argv[1:] = {argv.split()}
    __main__.main()
  """
  done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
  assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("argv", ["attribute run", "scores run", "train"])
def test_ctrl_c_in_a_computation_of_jax_does_not_wait_for_its_threads(argv):
  """They would still compute while the interpreter takes itself down, which crashed. Training ends between steps."""
  code = f"""
    import atexit, sys
    from types import ModuleType
    from maxghost import __main__, cli

    cli.main = lambda: print("interrupted", end="") or 130
    atexit.register(print, ", then the end of the interpreter", end="")
    sys.modules |= {{}} if "scores" in {argv!r} else {{"jax": ModuleType("jax")}}
    sys.argv[1:] = {argv.split()}
    sys.exit(__main__.main())
  """
  done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
  ended = "" if "attribute" in argv else ", then the end of the interpreter"
  assert (done.returncode, done.stdout, done.stderr) == (130, f"interrupted{ended}", "")


@pytest.mark.parametrize(
  "end", ["sys.exit(__main__.main())", "runpy.run_module('maxghost.train', run_name='__main__')"]
)
def test_ctrl_c_while_the_interpreter_ends_is_no_traceback(end):
  code = f"""
    import atexit, os, runpy, signal, sys
    from maxghost import __main__, cli

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits none
    cli.main = cli.run_command = lambda *_: 0
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
    {end}
  """
  done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("name", ["serve", "generate", "ask", "attribute"])
def test_ctrl_c_in_a_command_that_runs_as_a_module(name):
  code = f"""
    import atexit, runpy, sys
    from types import ModuleType
    from maxghost.config.arguments import Parser

    def interrupt(*_, **least):
      raise KeyboardInterrupt

    Parser.parse, sys.modules["jax"] = interrupt, ModuleType("jax")
    atexit.register(print, "the end of the interpreter")
    runpy.run_module("maxghost.{name}", run_name="__main__")
  """
  done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
  assert (done.returncode, done.stdout, done.stderr) == (130, "", "maxghost: interrupted\n")


@pytest.mark.parametrize(
  ("encoding", "seen"),
  [("ascii", "-0.01 +- 5 328. ??"), ("cp1252", "-0.01 ± 5 328… ??"), ("utf-8", "−0.01 ± 5\u202f328… 漢?")],
)
def test_a_number_keeps_its_sign_in_an_output_without_utf_8(monkeypatch, encoding, seen):
  written = io.BytesIO()
  monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
  assert guard(lambda: print("−0.01 ± 5\u202f328… 漢\ud800", end="")) == 0
  assert written.getvalue().decode(encoding) == seen


def test_windows_is_refused_in_one_sentence():
  code = "import sys; sys.platform = 'win32'; import maxghost"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert done.stderr.splitlines()[-1].endswith("on Windows, install it in WSL (`wsl --install`)")


def test_a_platform_that_jax_does_not_find_is_one_line(monkeypatch, capsys):
  code = "import sys, jax; from maxghost.config.values import guard; sys.exit(guard(jax.devices))"
  environment = os.environ | {"JAX_PLATFORMS": "nosuch"}
  done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
  assert done.returncode == 2 and done.stderr.count("\n") == 1
  assert done.stderr.startswith("maxghost: JAX_PLATFORMS=nosuch: JAX finds no such device here (Unable to init")
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")  # without its plug-in, this is an assertion of JAX's
  assert guard(lambda: exec(compile("assert None", "jax/_src/xla_bridge.py", "exec"))) == 2
  assert capsys.readouterr().err.startswith("maxghost: JAX_PLATFORMS=cuda: JAX finds no such device here; unset it")
  wrong = """raise ValueError("invalid truth value 'x' for environment 'JAX_ENABLE_X64'")"""
  assert guard(lambda: exec(compile(wrong, "jax/_src/config.py", "exec"))) == 2
  assert "an environment variable of JAX is wrong: invalid truth value 'x'" in capsys.readouterr().err
  with pytest.raises(AssertionError):
    guard(lambda: exec("assert None"))


def test_a_run_needs_compilation():
  jax.config.update("jax_disable_jit", True)
  try:
    for configure in (devices.open_layout, devices.configure_jax):  # of a run, and of the other commands
      with pytest.raises(config.ConfigError, match="JAX_DISABLE_JIT is set"):
        configure(config.Config())
  finally:
    jax.config.update("jax_disable_jit", False)


def test_a_repeated_flag_adds_to_its_list():
  given = ["run", "--data", "a=b", "--data", "c=d", "e=f", "--queries", "q=r", "--queries", "s=t", "--output", "new"]
  args = attribute.parse(given)
  assert (args.data, args.queries) == (["a=b", "c=d", "e=f"], ["q=r", "s=t"])
  args = generate.parse(["run", "--prompt", "a", "--prompt", "b", "--stop", "c", "--stop", "d"])
  assert (args.prompt, args.stop) == (["a", "b"], ["c", "d"])
  assert generate.parse(["load_parameters_path=run", "prompt=a", "prompt=b"]).prompt == ["a", "b"]


@pytest.mark.parametrize(("argv", "left"), [(["maxghost", "serve", "run"], [0]), (["maxghost", "report", "run"], [])])
def test_a_server_does_not_wait_for_a_question_that_nobody_waits_for(argv, left, monkeypatch):
  found, before = [], signal.getsignal(signal.SIGINT)
  monkeypatch.setattr(sys, "argv", argv)
  monkeypatch.setattr(os, "_exit", found.append)
  try:
    assert maxghost.left_with(0) == 0 and found == left
  finally:
    signal.signal(signal.SIGINT, before)
