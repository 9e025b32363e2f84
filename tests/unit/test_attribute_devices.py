"""`maxghost attribute` and `ask` with the weights split over several devices give what one device gives."""

import functools
import json

import jax
import numpy as np
import pytest
import tiny

from maxghost import ask, attribute, attribution, config, load_model, train
from maxghost.parallel import shardings

RUN = (
  "steps=3", "checkpoint_period=2", "max_num_checkpoints_to_keep=0", "async_checkpointing=false", "run_name=run",
  "base_emb_dim=32", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=6", "base_mlp_dim=36",
  "base_num_decoder_layers=2", "max_target_length=48", "per_device_batch_size=8", "dataset_type=synthetic",
  "ghost_enabled=false", "eval_interval=-1", "enable_tensorboard=false", "gradient_clipping_threshold=0.4",
  "remat_policy=none", "learning_rate=0.01", "warmup_steps_fraction=0.0",
)  # fmt: skip
KINDS = {
  "whole": ("logits_via_embedding=true",),
  "experts": (
    "decoder_block=mixtral", "num_experts=3", "num_experts_per_tok=2", "load_balance_loss_weight=0.1",
    "opt_type=muon",
  ),
  "adapters": ("lora_rank=2", "lora_weight_qtype=nf4"),
}  # fmt: skip
QUESTION, ANSWER = "It was late.", " Ulm lies on the river."


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """(folder, run) of a kind, with documents and a query in the folder."""

  @functools.cache
  def one(kind):
    folder = tmp_path_factory.mktemp(kind)
    for number, text in enumerate(("for i in range(7): print(i)", "It was late.", "a" * 60, "Ulm lies on the river.")):
      (folder / f"d{number}.txt").write_text(text)
    (folder / "q.jsonl").write_text(json.dumps({"text": "Late in Ulm."}))
    with tiny.cheap_compilation(), tiny.one_device():
      assert train.main([*RUN, *KINDS[kind], f"base_output_directory={folder}"]) == 0
    return folder, folder / "run"

  return one


def asked(folder, run, *more):
  with tiny.cheap_compilation():
    assert attribute.main([str(run / "checkpoints" / "2"), "--data", f"d={folder}/d*.txt", *more]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_one_device(kind, trained, tmp_path):
  folder, run = trained(kind)
  for num in ("1", "4"):
    asked(folder, run, "--queries", f"ask={folder}/q.jsonl", "--output", str(tmp_path / num), "--devices", num)
  one, four = (attribution.load(tmp_path / num) for num in ("1", "4"))
  assert len(one["dot"]) == 5
  for name in ("path", "offset", "chunk", "tokens"):
    np.testing.assert_array_equal(four[name], one[name])
  for name in ("loss", "dot", "contribution", "share"):
    np.testing.assert_allclose(four[name], one[name], rtol=1e-5, atol=1e-5 * np.abs(one[name]).max(), err_msg=name)
  assert np.abs(one["contribution"]).max() > 0


def test_a_device_holds_its_part_of_the_weights_and_moments(trained):
  _, run = trained("whole")
  _, paths = attribute.resolve([run / "checkpoints" / "2"])
  cfg = attribute.scoring_config(config.load(str(run / "config.yml")), paths)
  with shardings.use(load_model.layout_over(cfg, 4)):
    (point,) = attribute.points(cfg, paths)
  split = [x.size for x in jax.tree.leaves(point.state) for _ in range(x.ndim > 1)]
  held = [x.addressable_shards[0].data.size for x in jax.tree.leaves(point.state) if x.ndim > 1]
  assert 0 < sum(held) < 0.26 * sum(split), "all but the norms"


@pytest.mark.parametrize("kind", ["whole", "adapters"])
def test_an_index_and_its_answers_are_those_of_one_device(kind, trained, tmp_path):
  folder, run = trained(kind)
  found = []
  for num in ("1", "4"):
    index = ("--index", str(tmp_path / num), "--devices", num, "--directions", "8")
    asked(folder, run, *index)
    with tiny.cheap_compilation():
      _, cfg, paths, place = ask.opened(run / "checkpoints" / "2", tmp_path / num)
      with shardings.use(load_model.layout_over(cfg, int(num))):
        sources = ask.open_sources(run, cfg, paths, place)
      ids = [sources.tokenizer.encode([text.encode()])[0].tolist() for text in (QUESTION, ANSWER)]
      found.append(sources.of_answer(*ids))  # outside: a server's threads have no layout
  one, four = ({x["id"]: [*x["token_nats"], x["nats"]] for x in some["documents"]} for some in found)
  assert four.keys() == one.keys() and len(one) == 5
  for name, values in one.items():  # an index holds whole numbers up to 127, some of which round the other way
    np.testing.assert_allclose(four[name], values, rtol=1e-4, atol=2e-3 * np.abs([*one.values()]).max(), err_msg=name)
  np.testing.assert_allclose(*([x["logp"] for x in some["tokens"]] for some in found), rtol=1e-5)


def test_less_is_that_of_one_device(trained, tmp_path, capsys):
  folder, run = trained("whole")
  values = []
  for num in ("1", "4"):
    out = tmp_path / f"{num}.json"
    index = ("--index", str(tmp_path / num), "--devices", num, "--method", "less", "--directions", "0")
    asked(folder, run, *index, "--queries", f"ask={folder}/q.jsonl", "--output", str(out))
    values.append([(x["path"], x["contribution"]) for x in json.loads(out.read_text())["queries"]["ask"]])
  assert [x[0] for x in values[0]] == [x[0] for x in values[1]] and len(values[0]) == 5
  out = capsys.readouterr().out
  assert "(LESS, of whole gradients)" in out and "by nats" not in out
  np.testing.assert_allclose(*([x[1] for x in some] for some in values), rtol=1e-5, atol=1e-9)


def test_devices_that_do_not_fit_are_named(trained, tmp_path, capsys):
  folder, run = trained("whole")
  given = [
    str(run),
    "--data",
    f"d={folder}/d*.txt",
    "--queries",
    f"q={folder}/q.jsonl",
    "--output",
    str(tmp_path / "o"),
  ]
  said = {
    "0": "--devices 0: at least 1", "99": "--devices 99: this machine has 8; use --devices 8",
    "5": "--devices 5: the width 32 of the model does not divide over 5; use --devices 4",
  }  # fmt: skip
  for num, text in said.items():
    assert attribute.main([*given, "--devices", num]) == 2
    assert text in capsys.readouterr().err
  assert ask.main([str(run), "a", "--index", str(tmp_path), "--devices", "0"]) == 2
  assert "--devices 0: at least 1" in capsys.readouterr().err and not (tmp_path / "o").exists()
  with tiny.cheap_compilation():
    assert attribute.main([*given, "--devices", "4", "--rows", "6"]) == 0
  assert "6 rows do not divide over --devices 4: each computes all; use --rows 8" in capsys.readouterr().err
