"""The generate command on a small model with byte tokens, and a run that starts from given parameters."""

import contextlib
import json
import os
import subprocess
import sys

import jax
import meshes
import pytest
import tiny
from flax import nnx

from maxghost import config, generate, load_model, serve, train
from maxghost.attribution.metrics import read_metrics
from maxghost.checkpoint.layouts import MAXGHOST, ReadOptions, read_checkpoint
from maxghost.checkpoint.layouts_store import tree_from_memory, write_json
from maxghost.checkpoint.manager import CheckpointManager
from maxghost.data.tokenizers import ByteTokenizer
from maxghost.interop import hf_checkpoint, huggingface, huggingface_config, safetensors_files
from maxghost.serving import Generator, Request, samples
from maxghost.serving.batcher import Row
from maxghost.serving.samples import Sampler
from maxghost.training.state import to_tree


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A Hugging Face folder of a tiny model with 263 ids, and the configuration that reads it with byte tokens."""
  path = tmp_path_factory.mktemp("model")
  cfg = tiny.make_config()
  tree = {"model": to_tree(nnx.state(tiny.make_model(cfg)))}
  checkpoint = read_checkpoint(tree_from_memory(tree), ReadOptions(layout=MAXGHOST, scan_axis=0))
  tensors = huggingface.planned_tensors(checkpoint, cfg.model)
  safetensors_files.write_tensors(path, tensors, 1 << 30)
  write_json(path / "config.json", huggingface_config.config_json(cfg.model, "float32", 64, {}))
  config.save(cfg, path / "byte.yml")
  return path


@pytest.fixture(scope="module", autouse=True)
def cheap():
  with tiny.cheap_compilation():
    yield


def run(folder, *arguments) -> int:
  return generate.main([str(folder), "--config", str(folder / "byte.yml"), *map(str, arguments)])


def test_the_command_prints_the_greedy_continuation(folder, capsysbinary, monkeypatch):
  assert run(folder, "--prompt", "ab", "--max_new_tokens", 5) == 0
  out, err = capsysbinary.readouterr()
  graphdef, state = load_model.load(*load_model.find(folder, folder / "byte.yml"))
  progress = Generator(graphdef, 40, stop_ids=[257]).generate(state, [[256, *b"ab"]], 5)
  ids = progress.row(0)
  assert out == b"ab" + bytes(ids[ids < 256].tolist()).decode("utf-8", "replace").encode() + b"\n"
  assert b"5 tokens for 1 prompt;" in err and b"tokens/s" in err
  monkeypatch.setattr(ByteTokenizer, "specials", {"<|turn|>": int(ids[2])})  # has no text in which it could be found
  assert run(folder, "--prompt", "ab", "--max_new_tokens", 5, "--stop", "<|turn|>") == 0
  assert capsysbinary.readouterr()[0] == b"ab" + bytes(ids[:2].tolist()).decode("utf-8", "replace").encode() + b"\n"


def test_the_slices_of_a_run_have_no_part_in_its_mesh():
  keys = {"ici_fsdp_parallelism": 2, "dcn_data_parallelism": 2}
  for more in ({}, {"enable_diloco": True}):
    layout = load_model.layout_of(meshes.make_config(keys | more))
    assert (layout.num_devices, layout.rules.sizes["fsdp"], layout.apart) == (2, 2, 1)


@pytest.mark.parametrize("name", ["tensor 4 x data 2", "fsdp 4 x tensor 2"])
def test_a_mesh_of_the_configuration_has_the_text_of_one_device(name, tmp_path, capsysbinary):
  """`generate` and `serve`: weights are split as they are read, and on one device both have the same text, which
  `generate` adds in two pieces."""
  plain, cfg = meshes.make_config({}), meshes.make_config(meshes.MESHES[name])
  folder = saved(cfg, tmp_path / "run")
  assert load_model.layout_of(plain) is None
  assert generate.main([str(folder), "--prompt", "ab", "xyz", "--max_new_tokens", "12"]) == 0
  out = capsysbinary.readouterr().out
  graphdef, state = load_model.load(*load_model.find(folder))
  prompts = [[256, *b"ab"], [256, *b"xyz"]]
  progress = Generator(graphdef, 40, stop_ids=[257]).generate(state, prompts, 12)
  texts = [ByteTokenizer().decode(progress.row(i)).decode("utf-8", "replace") for i in range(2)]
  assert out.decode() == f"ab{texts[0]}\n\nxyz{texts[1]}\n\n"
  split = load_model.load(*load_model.find(folder), layout=load_model.layout_of(cfg))[1]
  assert any(x.sharding.shard_shape(x.shape) != x.shape for x in jax.tree.leaves(split))
  with contextlib.closing(serve._open(serve.parse([str(folder), "--slots", "8", "--cache", "32"])).batcher) as batcher:
    jobs = [batcher.submit(Request(tuple(prompt), 12)) for prompt in prompts]
    found = [[token for piece in job for token in piece.ids] for job in jobs]
  assert found == [progress.row(i).tolist() for i in range(2)]
  assert any(x.sharding.shard_shape(x.shape) != x.shape for x in jax.tree.leaves(batcher._params))


def test_a_mesh_larger_than_the_machine_is_refused(tmp_path, capsys):
  folder = saved(
    config.replace(tiny.make_config(), ici_tensor_parallelism=16, ici_fsdp_parallelism=1), tmp_path / "run"
  )
  assert generate.main([str(folder), "--prompt", "ab"]) == 2
  assert "ici_tensor_parallelism=16 = 16 is not the 8 devices; use ici_tensor_parallelism=8" in capsys.readouterr().err


def saved(cfg, run):
  run.mkdir()
  config.save(cfg, run / "config.yml")
  manager = CheckpointManager(run / "checkpoints", asynchronous=False)
  manager.save(3, {"model": to_tree(nnx.state(tiny.make_model(cfg)))}, {})
  manager.close()
  return run


def test_a_question_is_asked_in_the_template_and_answered_on_a_line_of_its_own(folder, capsysbinary):
  assert run(folder, "--prompt", "1+1?", "--chat", "--max_new_tokens", 3) == 0
  out, _ = capsysbinary.readouterr()
  graphdef, state = load_model.load(*load_model.find(folder, folder / "byte.yml"))
  asked = [256, *b"user: 1+1?\nassistant: "]
  ids = Generator(graphdef, 64, stop_ids=[257]).generate(state, [asked], 3).row(0)
  assert out == b"1+1?\n" + bytes(ids[ids < 256].tolist()).decode("utf-8", "replace").encode() + b"\n"


def test_no_text_steers_the_terminal(folder, capsysbinary, monkeypatch):
  """Texts of a model are anything; a file or another program gets them as they are."""
  prompts = ("--prompt", "a\x1b[2Jb", "c\u202ed")
  for prompt in (prompts, prompts[:2]):
    assert run(folder, *prompt, "--max_new_tokens", 3) == 0
    assert b"\x1b[2J" in capsysbinary.readouterr().out
    with monkeypatch.context() as patched:
      patched.setattr(sys.stdout, "isatty", lambda: True)
      assert run(folder, *prompt, "--max_new_tokens", 3) == 0
    out = capsysbinary.readouterr().out.decode()
    assert "a\ufffd[2Jb" in out and not {"\x1b", "\u202e"} & {*out}


def test_several_prompts_come_one_below_the_other(folder, tmp_path, capsysbinary):
  (tmp_path / "prompts.txt").write_text("xyz\n\n")
  arguments = ["--prompt", "ab", "--prompts", tmp_path / "prompts.txt", "--max_new_tokens", 4]
  assert run(folder, *arguments, "--temperature", 1, "--top_k", 4, "--seed", 3) == 0
  out, _ = capsysbinary.readouterr()
  texts = out.split(b"\n\n")
  assert texts[0].startswith(b"ab") and any(text.startswith(b"xyz") for text in texts)
  assert run(folder, *arguments, "--temperature", 1, "--top_k", 4, "--seed", 3) == 0
  assert capsysbinary.readouterr()[0] == out


def test_only_line_feeds_end_the_prompts_of_a_file(tmp_path):
  (tmp_path / "prompts.txt").write_bytes("\ufeffa\x0cb\u2028c\x85d\r\n\ne".encode())  # begins as on Windows
  asked = generate.parse(["model", "--prompts", str(tmp_path / "prompts.txt")])
  assert generate._prompts(asked) == ["a\x0cb\u2028c\x85d", "", "e"]
  (tmp_path / "prompts.txt").write_text("")
  with pytest.raises(config.ConfigError, match="no prompt"):
    generate._prompts(asked)


class Letters:
  """A tokenizer for the test: an id is a byte."""

  specials = ()

  def decode(self, ids):
    return bytes(ids)


class Words(Letters):
  """An id is a word; a text's first space is dropped, and each id is decoded how often?"""

  def __init__(self):
    self.decoded = 0

  def decode(self, ids):
    self.decoded += len(ids)
    return "".join(f" w{i}" if i else "" for i in ids).removeprefix(" ").encode()


def test_a_row_keeps_the_spaces_of_its_words_and_decodes_each_a_few_times():
  tokenizer, ids = Words(), [3, 0, 0, 1, 5, 0, 2] * 30
  row = Row(tokenizer, {7}, [])
  shown = "".join(row.take(ids[:end], last=end == len(ids)) for end in range(len(ids) + 1))
  assert shown == row.text == Words().decode(ids).decode()
  assert tokenizer.decoded < 12 * len(ids)
  row = Row(Words(), {7}, [])
  assert "".join(row.take(ids[:end], last=False) for end in (1, 1, 2, 2, 4, 4, 9)) == "w3 w1 w5 w2 w3"


def test_a_row_holds_back_half_characters_and_what_may_be_a_stop_text():
  row = Row(Letters(), {7}, [])
  text = "aé漢".encode()
  pieces = [row.take(list(text[:end]), last=False) for end in range(1, 7)]
  assert pieces == ["a", "", "é", "", "", "漢"]
  row = Row(Letters(), {7}, ["END"])
  shown = "".join(row.take(list(b"so ENxEND more"[:end]), last=False) for end in range(1, 15))
  assert shown == "so ENx" and row.ended and row.text == "so ENx"
  row = Row(Letters(), {7}, ["### Question"])  # longer than the text before it is whole
  pieces = [row.take(list(b"### Question: a"[:end]), last=False) for end in range(1, 16)]
  assert pieces == [""] * 15 and row.ended
  row = Row(Letters(), {7}, ["END"])
  assert row.take(list(b"soE"), last=False) + row.take([*b"soEN", 7], last=True) == "soEN"


@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_stop_text_that_is_complete_first_counts_however_many_tokens_come_at_once(size):
  """`serve` adds one at a time, `generate` eight."""
  for stops, shown in ((["bcdef", "d"], "abc"), (["d", "bcdef"], "abc"), (["\ufffd"], "abcdefé")):
    row, whole = Row(Letters(), {7}, stops), list("abcdefé".encode())
    ends = [*range(size, len(whole), size), len(whole)]
    assert "".join(row.take(whole[:end], last=end == len(whole)) for end in ends) == row.text == shown


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--max_new_tokens", 3], "no prompt"),
    (["--prompt", "a", "--max_new_tokens", 0], "--max_new_tokens 0: at least 1"),
    (["--prompt", "a", "--stop", ""], "--stop '' would stop at once"),
    (["--prompt", "a", "--max_new_tokens", 10**13], "--max_new_tokens 10000000000000: at most 1000000000"),
    (["--prompt", "a", "--seed", 1 << 63], "--seed 9223372036854775808: at most"),
    (["--prompt", "a\udcff"], "the prompt 'a\\udcff' is no valid Unicode: surrogates not allowed at place 1"),
    (["--prompt", "a\udcff", "--chat"], "the prompt 'a\\udcff' is no valid Unicode"),
    (["--prompt", "a", "--cache", 9], "need 66"),
    (["--prompt", "a", "--top_p", 0.5], "no meaning at temperature=0"),
    (["--prompt", "a", "--temprature", 1], "unknown argument '--temprature'"),
    (["--prompts", "nowhere.txt"], "--prompts nowhere.txt cannot be read: No such file or directory\n"),
  ],
)
def test_wrong_arguments(folder, capsys, arguments, message):
  assert run(folder, *arguments) == 2
  assert message in capsys.readouterr().err


def test_a_wrong_flag_is_told_without_jax():
  code = "import sys\nfrom maxghost import cli\nassert cli.main(['generate', 'x', '--temprature', '1']) == 2\n"
  done = subprocess.run([sys.executable, "-c", f"{code}print('jax' in sys.modules)"], capture_output=True, text=True)
  assert (done.stdout, done.returncode) == ("False\n", 0) and "did you mean '--temperature'" in done.stderr


def test_models_that_cannot_be_used(folder, tmp_path, capsys):
  assert generate.main([str(tmp_path), "--prompt", "a"]) == 2
  assert "is no Orbax checkpoint" in capsys.readouterr().err
  assert generate.main([str(folder), "--prompt", "a"]) == 2
  assert "tokenizer_type=huggingface needs tokenizer_path" in capsys.readouterr().err
  config.save(config.replace(config.load(folder / "byte.yml"), base_mlp_dim=35), tmp_path / "other.yml")
  assert generate.main([str(folder), "--config", str(tmp_path / "other.yml"), "--prompt", "a"]) == 2
  assert "differ in base_mlp_dim" in capsys.readouterr().err


def test_a_path_that_is_no_utf8_is_told_in_one_line(tmp_path, capsys):
  name = os.fsdecode(b"bad\xff")
  (tmp_path / name).mkdir()
  assert generate.main([str(tmp_path / name), "--prompt", "a"]) == 2
  assert "bad\\udcff: this path is no UTF-8, and checkpoints need one that is" in capsys.readouterr().err


def test_weights_that_have_diverged_are_told(folder, capsys, monkeypatch):
  load = load_model.load

  def diverged(*arguments):
    graphdef, state = load(*arguments)
    return graphdef, jax.tree.map(lambda x: x * float("nan"), state)

  monkeypatch.setattr(load_model, "load", diverged)
  assert run(folder, "--prompt", "ab", "--max_new_tokens", 2) == 2
  assert "the log-probability of a token is NaN" in capsys.readouterr().err


def test_a_run_starts_from_a_hugging_face_folder_and_is_exported_again(folder, tmp_path, capsys, monkeypatch):
  """With a learning rate of 0 the parameters after a step are the given ones, bit by bit, and write the same texts."""
  monkeypatch.setattr(samples, "NUM_TOKENS", 5)
  monkeypatch.setattr(samples, "TEMPERATURE", 0.0)
  arguments = [
    str(folder / "byte.yml"), f"load_parameters_path={folder}", f"base_output_directory={tmp_path}", "run_name=fine",
    "steps=2", "per_device_batch_size=1", "ici_fsdp_parallelism=4", "ici_data_parallelism=2",
    "sample_every=1", "sample_prompt=ab", "learning_rate=0.0",
    "ghost_enabled=false", "eval_interval=-1", "dataset_domain_bytes=20000",
    "dataset_domains=manual", "enable_tensorboard=false", "async_checkpointing=false",
  ]  # fmt: skip
  assert train.main([*arguments, "base_mlp_dim=35"]) == 2
  assert "base_mlp_dim=36 there, 35 here" in capsys.readouterr().err
  assert not (tmp_path / "fine").exists()
  assert train.main(arguments) == 0
  assert f"Starting from the parameters of {folder}" in capsys.readouterr().out
  run(folder, "--prompt", "ab", "--max_new_tokens", 5)
  text = capsys.readouterr().out.removesuffix("\n")
  assert read_metrics(tmp_path / "fine" / "metrics.jsonl")[1] == [(0, text), (1, text)]
  config.save(config.load(), tmp_path / "base.yml")  # of another model; the run has its own
  typed = [str(tmp_path / "base.yml"), f"load_parameters_path={tmp_path / 'fine'}", "prompt=ab", "max_new_tokens=5"]
  assert generate.main(typed) == 0 and capsys.readouterr().out == text + "\n"
  hf_checkpoint.export_model(tmp_path / "fine", tmp_path / "out", say=lambda line: None)
  for name in ("model.safetensors", "config.json"):
    before, after = (f / name for f in (folder, tmp_path / "out"))
    if name == "config.json":
      kept = {"max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
      a, b = ({k: v for k, v in json.loads(f.read_text()).items() if k not in kept} for f in (before, after))
      assert a == b
    else:
      assert before.read_bytes() == after.read_bytes()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"add_bos": False}, "sample_prompt '' has no token"),
    ({"trainable_position_size": 64}, "has only 64 positions; use a shorter prompt"),
  ],
)
def test_samples_that_cannot_be_drawn_are_refused_at_the_start(changes, message):
  cfg = tiny.make_config(sample_every=2, **changes)
  with pytest.raises(config.ConfigError, match=message):
    Sampler(cfg, ByteTokenizer())


def test_generate_is_typed_as_training_too():
  typed = ["base.yml", "load_parameters_path=runs/base", "prompt=-a = b", "top_k=4"]
  assert generate.from_keys(typed) == ["runs/base", "--prompt=-a = b", "--top_k=4", "--otherwise=base.yml"]
  for prompt in ("-x", "--prompt", ""):
    assert generate.parse([*typed[:2], f"prompt={prompt}"]).prompt == [prompt]
  plain = ["runs/base", "--prompt", "load_parameters_path"]
  assert generate.from_keys(plain) == plain


@pytest.mark.parametrize(
  ("arguments", "told"),
  [
    (["base.yml", "prompt=a"], "load_parameters_path is missing"),
    (["base.yml", "load_parameters_path=x", "promt=a"], "'promt' is not a key of generate; did you mean 'prompt'"),
    (["load_parameters_path=x", "steps=3"], "'steps' is not a key of generate"),
    (["load_parameters_path=gs://b/x", "prompt=a"], "maxghost: load_parameters_path=gs://b/x: only local folders"),
  ],
)
def test_wrong_keys_of_generate(arguments, told, capsys):
  assert generate.main(arguments) == 2
  assert told in capsys.readouterr().err
