"""Runs of TRL beside runs with the keys that docs/from-trl.md names, step by step (extra `hf`, trl and peft)."""

import json
import re
import subprocess
import sys
import types

import hf_models
import numpy as np
import pytest

from maxghost import config
from maxghost.data import rewards

pytestmark = pytest.mark.hf
STEPS, RATE = 5, 1e-2
CONVERSATIONS = [
  {"prompt": "ab", "completion": "cde"}, {"prompt": "bcda", "completion": "h"}, {"prompt": "i", "completion": "klmno"},
]  # fmt: skip
PAIRS = [
  {"prompt": "ab", "chosen": "cde", "rejected": "fg"}, {"prompt": "bcda", "chosen": "h", "rejected": "ijkl"},
  {"prompt": "i", "chosen": "klmno", "rejected": "n"},
]  # fmt: skip
RANK = 2
VOCABULARY = ["A", "B", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
GENERATIONS, MOST = 4, 7  # answers to a prompt, and tokens of an answer
# A reward function, of texts that the tokenizer decodes with a space between letters.
VOWELS = """
def vowels(prompts, completions, **columns):
  return [float(sum(letter in "aeiou" for letter in text)) - 0.1 * len(text.replace(" ", "")) for text in completions]
"""


@pytest.fixture(scope="module")
def libraries():
  names = ("trl", "peft", "torch", "transformers", "tokenizers", "datasets")
  return types.SimpleNamespace(**{name: pytest.importorskip(name, reason=f"{name} is not installed") for name in names})


def documented_keys() -> list[str]:
  """The keys of the optimizer in the page's command, for this test's rate and number of steps."""
  page = (config.config_dir().parent / "docs" / "from-trl.md").read_text()
  (command,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
  given = dict(word.split("=", 1) for word in re.findall(r"\b[a-z_0-9]+=[\w.-]+", command))
  assert float(given["learning_rate_final_fraction"]) == 1 / int(given["steps"])
  given |= {"learning_rate": str(RATE), "steps": str(STEPS), "learning_rate_final_fraction": str(1 / STEPS)}
  left_out = ("objective", "dataset_type", "max_target_length", "per_device_batch_size", "mine", "target")
  return [f"{key}={value}" for key, value in given.items() if key not in left_out]


def model_and_tokenizer(libraries, folder):
  """The fixture, with a token for each letter of `VOCABULARY`, saved in the folder."""
  model = libraries.transformers.AutoModelForCausalLM.from_pretrained(
    hf_models.FOLDER / "llama3", dtype=libraries.torch.float32
  )
  vocab = {text: i for i, text in enumerate(VOCABULARY)}
  letters = libraries.tokenizers.Tokenizer(libraries.tokenizers.models.WordLevel(vocab, unk_token="A"))
  letters.pre_tokenizer = libraries.tokenizers.pre_tokenizers.Split(libraries.tokenizers.Regex("."), "isolated")
  tokenizer = libraries.transformers.PreTrainedTokenizerFast(
    tokenizer_object=letters, pad_token="<eos>", eos_token="<eos>"
  )
  for part in (model, tokenizer):
    part.save_pretrained(folder)
  return model, tokenizer


def losses_of_trl(libraries, model, tokenizer, records, kind: str, folder, *, rows=0, also=(), **keys) -> list[float]:
  """rows: of a batch, by default all records. also: further arguments of the trainer. keys: of its settings."""
  settings = getattr(libraries.trl, f"{kind}Config")(
    output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
    per_device_train_batch_size=rows or len(records), max_steps=STEPS, learning_rate=RATE, logging_steps=1, **keys,
  )  # fmt: skip
  trainer = getattr(libraries.trl, f"{kind}Trainer")(
    model, args=settings, train_dataset=libraries.datasets.Dataset.from_list(records), processing_class=tokenizer,
    **dict(also),
  )  # fmt: skip
  trainer.train()
  return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def losses_here(folder, records, *keys: str) -> list[float]:
  data = folder / "records.jsonl"
  data.write_text("".join(json.dumps(record) + "\n" for record in records))
  maxghost = [sys.executable, "-m", "maxghost"]
  subprocess.run([*maxghost, "checkpoint", "hf", "import", folder / "source", folder / "base"], check=True)
  subprocess.run(
    [
      *maxghost, "train", folder / "base" / "config.yml", f"base_output_directory={folder}", "run_name=run",
      "dataset_type=text", f"dataset_files=[mine={data}]", f"ghost_val_sets=[target={data}]", "ghost_val_copies=keep",
      "max_target_length=32", "eval_interval=-1", *documented_keys(), *keys,
    ],
    check=True,
  )  # fmt: skip
  lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
  return [line["learning/loss"] for line in map(json.loads, lines) if "learning/loss" in line]


@pytest.mark.parametrize(
  ("kind", "records", "keys"),
  [
    ("SFT", CONVERSATIONS, ("objective=sft", "per_device_batch_size=3")),
    ("DPO", PAIRS, ("objective=dpo", "per_device_batch_size=6")),
  ],
)
def test_losses_are_those_of_trl(libraries, tmp_path, kind, records, keys):
  model, tokenizer = model_and_tokenizer(libraries, tmp_path / "source")
  theirs = losses_of_trl(libraries, model, tokenizer, records, kind, tmp_path / "trl")
  assert len(theirs) == STEPS and theirs[-1] < 0.6 * theirs[0]
  np.testing.assert_allclose(losses_here(tmp_path, records, *keys), theirs, rtol=1e-5)


def test_losses_with_adapters_are_those_of_trl_with_peft(libraries, tmp_path):
  plain, tokenizer = model_and_tokenizer(libraries, tmp_path / "source")
  settings = libraries.peft.LoraConfig(r=RANK, lora_alpha=3, task_type="CAUSAL_LM")
  model = libraries.peft.get_peft_model(plain, settings)
  model.save_pretrained(tmp_path / "adapter")
  assert set(json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]) == {
    "q_proj", "v_proj"
  }  # fmt: skip
  theirs = losses_of_trl(libraries, model, tokenizer, CONVERSATIONS, "SFT", tmp_path / "trl")
  lora = (f"lora_rank={RANK}", "lora_alpha=3", "lora_module_path=.*/(query|value)")
  ours = losses_here(
    tmp_path, CONVERSATIONS, "objective=sft", "per_device_batch_size=3", *lora,
    f"lora_restore_path={tmp_path / 'adapter'}",
  )  # fmt: skip
  assert theirs[-1] < theirs[0]
  np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def replayed(path):
  """A function for TRL that gives it the answers of a finished run, one sampling after the other."""
  lines = iter((path / "rollouts.jsonl").read_text().splitlines())

  def roll_out(prompts, trainer):
    left = {said["prompt"].replace(" ", ""): iter(said["answers"]) for said in json.loads(next(lines))["prompts"]}
    found: dict = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for prompt in prompts:
      answer = next(left[prompt])
      ids = [*map(VOCABULARY.index, answer["text"].replace(" ", "")), *[VOCABULARY.index("<eos>")] * answer["ended"]]
      assert len(ids) == answer["tokens"]
      found["prompt_ids"].append([*map(VOCABULARY.index, prompt)])
      found["completion_ids"].append(ids)
      found["logprobs"].append([0.0] * len(ids))  # of a sampler of its own, which this one is not
    return found

  return roll_out


@pytest.mark.parametrize(
  ("ours", "theirs"),
  [
    ((), {}),
    (
      ("grpo_beta=0.2", "num_iterations=3", "grpo_loss_type=dr_grpo", "scale_rewards=none",
       "decode_sampling_temperature=0.8", "grpo_epsilon=[0.1,0.05]"),
      {"beta": 0.2, "num_iterations": 3, "loss_type": "dr_grpo", "scale_rewards": "none", "temperature": 0.8,
       "epsilon": 0.1, "epsilon_high": 0.05, "use_bias_correction_kl": True},
    ),
    (
      ("grpo_beta=0.2", "num_iterations=2", "grpo_loss_type=grpo", "scale_rewards=batch",
       "mask_truncated_completions=true"),
      {"beta": 0.2, "num_iterations": 2, "loss_type": "grpo", "scale_rewards": "batch",
       "mask_truncated_completions": True, "use_bias_correction_kl": True},
    ),
  ],
)  # fmt: skip
def test_losses_on_the_same_answers_are_those_of_trl(libraries, tmp_path, monkeypatch, ours, theirs):
  monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
  model, tokenizer = model_and_tokenizer(libraries, tmp_path / "source")
  (tmp_path / "judge.py").write_text(VOWELS)
  judge = f"{tmp_path / 'judge.py'}:vowels"
  rows = GENERATIONS * len(CONVERSATIONS)
  found = losses_here(
    tmp_path, CONVERSATIONS, "objective=grpo", f"per_device_batch_size={rows}", f"num_generations={GENERATIONS}",
    f"max_completion_length={MOST}", f"reward_functions=[{judge}]", *ours,
  )  # fmt: skip
  wanted = losses_of_trl(
    libraries, model, tokenizer, [{"prompt": record["prompt"]} for record in CONVERSATIONS], "GRPO", tmp_path / "trl",
    rows=rows, also={"reward_funcs": rewards.load(judge), "rollout_func": replayed(tmp_path / "run")},
    num_generations=GENERATIONS, max_completion_length=MOST, **theirs,
  )  # fmt: skip
  assert len(set(wanted)) == STEPS
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
