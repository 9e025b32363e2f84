"""Pairs as records: their rows, what is refused, and a run that is logged and continues bit for bit.

B = 2 U rows, T positions, S segments of a row.
"""

import json
import re

import jax
import numpy as np
import pytest
import run_copies
import tiny
from train_steps import Run

from maxghost import config, data, scorelog, train
from maxghost.attribution import html, report_text, summary
from maxghost.config import ConfigError

SAID = [{"role": "assistant", "content": "b"}]
WORDS = "the old road to town is long and it rains on every hill but no one minds".split()  # noqa: SIM905


def pairs(count: int, seed: int = 0) -> list[dict]:
  rng = np.random.default_rng(seed)
  say = lambda: " ".join(rng.choice(WORDS, rng.integers(2, 6)))  # noqa: E731
  return [{"id": f"n{i}", "prompt": say(), "chosen": f" {say()}!", "rejected": f" {say()}?"} for i in range(count)]


def write(path, records):
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  return path


def dataset(path, **changes):
  keys = {
    "objective": "dpo", "dataset_type": "text", "dataset_files": (f"p={path}",), "ghost_val_sets": ("p",),
    "max_target_length": 96, "per_device_batch_size": 4, "max_segments_per_seq": 3, "ghost_val_fraction": 0.3,
  }  # fmt: skip
  cfg = config.replace(config.load(), **(keys | changes))
  return data.load_dataset(cfg.data, cfg.run.data_shuffle_seed, records=cfg.records), cfg


def text_of(arrays, row: int, segment: int, weighted: bool) -> bytes:
  here = (arrays["targets_segmentation"][row] == segment) & ((arrays["targets_weights"][row] > 0) | (not weighted))
  ids = arrays["targets"][row][here]
  return bytes(ids[ids < 256].astype(np.uint8))


@pytest.mark.parametrize("form", ["prompt", "no prompt", "messages", "messages without prompt"])
def test_both_responses_are_in_the_same_slot_of_adjacent_rows(tmp_path, form):
  """Only the response has weight, its end token included; together all pairs come once in an epoch."""
  records = pairs(40)
  told = [dict(record) for record in records]
  for record in told:
    if form == "no prompt":
      before = record.pop("prompt") + "\n>"
      record |= {side: before + record[side] for side in ("chosen", "rejected")}
    if form.startswith("messages"):
      asked = [{"role": "user", "content": record.pop("prompt")}]
      answers = {s: [{"role": "assistant", "content": record[s].strip()}] for s in ("chosen", "rejected")}
      record |= {"prompt": asked} | answers if form == "messages" else {s: asked + a for s, a in answers.items()}
  made, _ = dataset(write(tmp_path / "p.jsonl", told))
  seen = set()
  for _ in range(16):
    batch = next(made.train)
    np.testing.assert_array_equal(batch.document_BS[::2], batch.document_BS[1::2])
    for row, slot in np.argwhere(batch.document_BS >= 0):
      record = records[batch.document_BS[row, slot]]
      response = record["rejected" if row % 2 else "chosen"]
      text = text_of(batch.arrays, row, slot + 1, weighted=True).decode()
      if form == "no prompt":
        assert response.endswith(text) and text  # both may begin with the same words
      else:
        assert text == response
      whole = text_of(batch.arrays, row, slot + 1, weighted=False).decode()
      assert whole.endswith(response) and record["prompt"] in whole
      assert batch.arrays["targets"][row][batch.arrays["targets_segmentation"][row] == slot + 1][-1] == 257
      seen.add(int(batch.document_BS[row, slot]))
  held_out = set(made.parts[0].split.pool("p", 99).tolist())
  assert seen == set(range(40)) - held_out
  rows, counts = made.train._streams[0].make(0, 0, 0)
  arrays = data.packing.fill([(rows, n, 0) for n in range(len(rows))], made.layout, 257).arrays
  assert counts["rows"] == len(arrays["targets"]) == 2 * len(rows)
  assert counts["tokens"] == np.count_nonzero(arrays["targets_segmentation"])
  val = made.validation_batch(0, 4)
  assert len(val.document_BS) == 4 and set(val.document_BS[val.document_BS >= 0].tolist()) <= held_out


@pytest.mark.parametrize(("beta", "algo", "kept"), [(0.1, "simpo", "start"), (0.0, "simpo", ""), (0.0, "ipo", "start")])
def test_answers_keep_their_reference_beside_pairs_that_need_none(beta, algo, kept):
  """Without it the divergence would be that of the model from itself."""
  keys = {"objective": "grpo", "packing": "none", "ghost_val_sets": ("manual", "pairs=pairs.jsonl@dpo")}
  cfg = config.replace(config.load(), **keys, grpo_beta=beta, dpo_algo=algo)
  assert cfg.reference == kept


@pytest.mark.parametrize("others", [("prompt", "chosen", "rejected"), ()])
def test_log_probabilities_of_the_reference_may_come_with_the_data(tmp_path, others):
  """Named beside the other columns, or alone."""
  records = [r | {"ref_chosen_logps": -i - 0.5, "ref_rejected_logps": -2.0 * i} for i, r in enumerate(pairs(20))]
  columns = (*others, "ref_chosen_logps", "ref_rejected_logps")
  made, cfg = dataset(write(tmp_path / "p.jsonl", records), train_data_columns=columns)
  assert cfg.reference == ""
  batch = next(made.train)
  known = batch.arrays["reference_logps"]
  assert known.shape == (4, 3) and known.dtype == np.float32
  for row, slot in np.argwhere(batch.document_BS >= 0):
    wanted = records[batch.document_BS[row, slot]]["ref_rejected_logps" if row % 2 else "ref_chosen_logps"]
    assert known[row, slot] == wanted


@pytest.mark.parametrize(
  ("value", "shown"), [("x", "'x'"), (None, "None"), ([1], r"\[1\]"), (float("nan"), "nan"), (1e999, "inf")]
)
def test_log_probabilities_that_are_unusable_are_refused_with_file_and_line(tmp_path, value, shown):
  records = [r | {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2.5} for r in pairs(20)]
  records[4]["ref_rejected_logps"] = value
  columns = ("prompt", "chosen", "rejected", "ref_chosen_logps", "ref_rejected_logps")
  made, _ = dataset(write(tmp_path / "p.jsonl", records), train_data_columns=columns)
  with pytest.raises(ConfigError, match=rf"p.jsonl.*line 5: its ref_rejected_logps is {shown}, no finite number"):
    made.notes()
  records[4] |= {"ref_rejected_logps": -2.5, "chosen": " and so on" * 20}  # of which the policy would see a part
  made, _ = dataset(write(tmp_path / "p.jsonl", records), train_data_columns=columns)
  with pytest.raises(ConfigError, match=r"line 5: its ref_chosen_logps is of the whole response, which max_target_len"):
    made.notes()


@pytest.mark.parametrize(
  ("record", "message"),
  [
    ({"prompt": "a", "chosen": "b"}, r"p.jsonl.*3.*no rejected response"),
    ({"prompt": "a", "chosen": "b", "rejected": ""}, r"p.jsonl.*3.*no rejected response"),
    ({"prompt": "a", "chosen": 5, "rejected": "c"}, r"p.jsonl.*3.*no chosen response, a text or a list of messages"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, r"p.jsonl.*3.*responses are the same"),
    ({"prompt": "a" * 300, "chosen": "b", "rejected": "c"}, r"p.jsonl.*3.*the same up to max_target_length=96"),
    ({"prompt": "a" * 95, "chosen": "bc", "rejected": "bd" * 9}, r"p.jsonl.*3.*same up to max_target_length=96"),
    ({"prompt": "a", "chosen": SAID, "rejected": "c"}, r"p.jsonl.*3.*not all texts or all lists of messages"),
    ({"chosen": "assistant: b", "rejected": SAID}, r"p.jsonl.*3.*not all texts or all lists of messages"),
  ],
)
def test_bad_pairs_are_refused_with_file_and_line(tmp_path, record, message):
  records = pairs(20)
  records[2] = record
  with pytest.raises(ConfigError, match=message):
    made, _ = dataset(write(tmp_path / "p.jsonl", records))
    made.notes()
    made.validation_batch(0, 4)


@pytest.mark.parametrize("value", [10**400, -1e300, float("nan"), "-1", None])
def test_a_log_probability_that_is_no_number_is_named(tmp_path, value):
  records = [pair | {"ref_chosen_logps": -1.0, "ref_rejected_logps": -2} for pair in pairs(20)]
  records[2]["ref_rejected_logps"] = value
  columns = ("prompt", "chosen", "rejected", "ref_chosen_logps", "ref_rejected_logps")
  with pytest.raises(ConfigError, match=r"p.jsonl.*line 3: its ref_rejected_logps is .{1,60}, no finite number"):
    made, _ = dataset(write(tmp_path / "p.jsonl", records), train_data_columns=columns)
    made.notes()
    made.validation_batch(0, 4)


def test_a_response_that_is_cut_off_is_counted_and_said(tmp_path):
  records = pairs(20)
  records[4]["rejected"] = " x" * 90
  made, _ = dataset(write(tmp_path / "p.jsonl", records), ghost_val_fraction=0.05)
  assert any("1 lose a part of their answers to max_target_length=96" in note for note in made.notes())


RUN = {
  "objective": "dpo", "dpo_beta": 0.5, "opt_type": "adamw", "per_device_batch_size": 2, "ghost_val_batch_size": 2,
  "max_target_length": 96, "max_segments_per_seq": 2, "ici_data_parallelism": 8, "ici_fsdp_parallelism": 1,
  "base_emb_dim": 20, "base_num_query_heads": 4, "base_num_kv_heads": 2, "head_dim": 6, "base_mlp_dim": 36,
  "base_num_decoder_layers": 2, "lr_schedule_type": "constant", "warmup_steps_fraction": 0.0, "eval_interval": 4,
  "eval_steps": 1, "steps": 4, "checkpoint_period": 2, "max_num_checkpoints_to_keep": 0, "async_checkpointing": False,
  "enable_tensorboard": False, "run_name": "run", "remat_policy": "none", "dataset_type": "text",
}  # fmt: skip


def trained(folder, source, *more) -> int:
  arguments = [f"{key}={value}" for key, value in RUN.items()]
  sets = f"[pairs,margin=pairs@margin,said={source.parent}/said.jsonl@sft]"
  files = [f"dataset_files=pairs={source}", f"ghost_val_sets={sets}", f"base_output_directory={folder}"]
  with tiny.cheap_compilation():
    return train.main([*arguments, *files, *more])


def test_a_run_on_pairs_is_logged_and_continues_bit_for_bit(tmp_path, capsys):
  """On eight devices, against its own objective, the margin, and the answers of a file of conversations."""
  source = write(tmp_path / "pairs.jsonl", pairs(60))
  write(tmp_path / "said.jsonl", [{"prompt": f"{r['prompt']}:", "completion": r["chosen"]} for r in pairs(6, seed=9)])
  assert trained(tmp_path / "whole", source) == 0
  run_copies.interrupted(tmp_path / "whole", tmp_path / "parts")
  assert trained(tmp_path / "parts", source) == 0
  assert "Continuing after 2 completed steps" in capsys.readouterr().out
  whole, parts = (scorelog.load(tmp_path / name / "run") for name in ("whole", "parts"))
  assert whole.objective == "dpo" and whole.parts == ("chosen", "rejected") and whole.val_sets[1] == "margin"
  by_part = [whole[f"contribution_{part}"] for part in whole.parts]
  np.testing.assert_allclose(sum(by_part), whole["contribution"], rtol=1e-5, atol=1e-9)
  assert np.abs(by_part[0]).min() > 0
  shares = np.bincount(whole["step"], whole["share"])
  np.testing.assert_allclose(shares, 1, rtol=1e-5)
  for step in range(4):  # each pair the same
    np.testing.assert_allclose(np.ptp(whole["share"][whole["step"] == step]), 0, atol=1e-6)
  for name in ("contribution", "contribution_rejected", "loss", "id"):
    np.testing.assert_array_equal(whole[name], parts[name], err_msg=name)
  first, *_, last = map(json.loads, (tmp_path / "whole" / "run" / "metrics.jsonl").read_text().splitlines())
  told = summary.summarize(whole)
  assert [part.ledger.unit for part in told.sets] == ["pair", "pair", "token"]
  assert re.fullmatch(r"The pairs validation loss (fell|rose) \S+ nats per pair\.", report_text.headline(told.sets[0]))
  page = html.render(told)
  assert "nats per pair, first and last" in page and "nats per token, first" not in page
  assert first["learning/loss"] == pytest.approx(np.log(2), rel=1e-5)
  assert first["rewards/accuracies"] == first["rewards/margins"] == 0
  assert first["logps/chosen"] < 0 and last["rewards/margins"] != 0
  assert first["ghost/val_loss/pairs"] == pytest.approx(np.log(2), rel=1e-5)
  assert first["ghost/val_loss/said"] == pytest.approx(np.log(259), rel=0.2)
  assert last["eval/avg_loss"] < 1
  saved = list((tmp_path / "whole" / "run" / "checkpoints" / "2").rglob("*"))
  assert saved and not any("reference_model" in str(path) for path in saved)
  run_copies.interrupted(tmp_path / "whole", tmp_path / "other")
  text = (tmp_path / "other" / "run" / "config.yml").read_text()
  (tmp_path / "other" / "run" / "config.yml").write_text(text.replace("init_weights_seed: 0", "init_weights_seed: 1"))
  assert trained(tmp_path / "other", source, "init_weights_seed=1") != 0


def test_adapters_of_another_run_are_part_of_the_reference(tmp_path, capsys):
  """A run that begins with trained adapters begins at a loss of ln 2, though the base alone would give another one.

  They may move before it continues, but not change.
  """
  source = write(tmp_path / "pairs.jsonl", pairs(60))
  write(tmp_path / "said.jsonl", [{"prompt": f"{r['prompt']}:", "completion": r["chosen"]} for r in pairs(6, seed=9)])
  keys = ("lora_rank=3", "adam_weight_decay=0.0", "learning_rate=0.03", "ghost_val_sets=[pairs]", "eval_interval=-1")
  assert trained(tmp_path / "first", source, *keys, "ghost_enabled=false") == 0
  warm = (*keys, f"lora_restore_path={tmp_path / 'first' / 'run'}")
  assert trained(tmp_path / "whole", source, *warm) == 0
  run_copies.interrupted(tmp_path / "whole", tmp_path / "parts")
  (tmp_path / "first").rename(tmp_path / "moved")
  assert trained(tmp_path / "parts", source, *keys, f"lora_restore_path={(other := tmp_path / 'whole' / 'run')}") == 1
  assert f"maxghost: {other} gives other frozen arrays than the run" in capsys.readouterr().err
  assert trained(tmp_path / "parts", source, *keys, f"lora_restore_path={tmp_path / 'moved' / 'run'}") == 0
  before, whole, parts = (
    [json.loads(line) for line in (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("moved", "whole", "parts")
  )
  assert whole[0]["learning/loss"] == pytest.approx(np.log(2), rel=1e-5)
  assert whole[0]["rewards/margins"] == 0 and before[-1]["rewards/margins"] != 0
  assert abs(whole[0]["logps/chosen"] - before[0]["logps/chosen"]) > 0.1
  assert whole[-1]["rewards/margins"] == parts[-1]["rewards/margins"] != 0
  logs = [scorelog.load(tmp_path / name / "run") for name in ("whole", "parts")]
  np.testing.assert_array_equal(*(log["contribution"] for log in logs))


def test_sets_of_other_records_need_files(tmp_path):
  with pytest.raises(ConfigError, match=r"words=text@sft.*conversations.*name=glob"):
    tiny.make_config(ghost_val_sets=("words=text@sft",))


def test_a_step_with_the_log_probabilities_of_the_data_needs_no_second_model():
  keys = {"objective": "dpo", "per_device_batch_size": 2, "ghost_val_batch_size": 2, "max_segments_per_seq": 2}
  columns = ("prompt", "chosen", "rejected", "ref_chosen_logps", "ref_rejected_logps")
  rows = tiny.make_batch(((4, 5), (6, 3)), seed=3, mask=0.0)
  known = {"targets_weights": np.ones((2, 13), np.float32), "reference_logps": np.full((2, 2), -30, np.float32)}
  run = Run(batch=rows | known, train_data_columns=columns, ghost_enabled=False, **keys)
  out = run.step(rows | known)
  assert np.isfinite(out["loss"]) and "reference_model" not in str(jax.tree.structure(run.state))


@pytest.mark.slow
def test_scores_do_not_depend_on_the_mesh(tmp_path):
  """Rows over eight devices; and over four, each of which is two that share the matrices.

  Under SGD: AdamW's first step divides gradients by their own size, also those that are rounding.
  """
  source = write(tmp_path / "pairs.jsonl", pairs(60))
  write(tmp_path / "said.jsonl", [{"prompt": f"{r['prompt']}:", "completion": r["chosen"]} for r in pairs(6, seed=9)])
  more = ("eval_interval=-1", "vocab_size=264", "sharding_tolerance=1.0", "opt_type=sgd")
  keys = ("ici_data_parallelism=1", "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2", *more)
  assert trained(tmp_path / "rows", source, *more) == 0
  assert trained(tmp_path / "both", source, *keys) == 0
  rows, both = (scorelog.load(tmp_path / name / "run") for name in ("rows", "both"))
  np.testing.assert_array_equal(rows["id"], both["id"])
  first = rows["step"] == 0
  for name in ("contribution", "contribution_chosen", "contribution_rejected", "loss"):
    found, wanted = both[name][first], rows[name][first]
    assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max(), name
