"""Teaches a byte-level model to add two-digit numbers from reward alone (GRPO), in about 15 minutes on two CPU cores.

  pip install .                             # in the folder of the repository
  python examples/grpo_addition.py          # runs/addition-form, then runs/addition, and its report

The model first learns the form of an answer from random numbers in place of sums, so it is right only by chance. After
that it gets no correct answers, only rewards for its own answers: half a point for each right digit. A quarter of the
sums measures how much each answer taught. Another 160, which no run reads, measure what the model has learned. Settings
of configs/base.yml may follow, such as steps=500.
"""

import json
import random
import sys
from pathlib import Path

from maxghost import config, load_model, train
from maxghost.data.tokenizers import ByteTokenizer
from maxghost.report import main as report
from maxghost.serving import Generator

FOLDER = Path("corpora/addition")
MODEL = {
  "base_emb_dim": 64, "base_mlp_dim": 256, "base_num_decoder_layers": 2, "base_num_query_heads": 4,
  "base_num_kv_heads": 4, "head_dim": 16, "max_target_length": 9, "packing": "none", "dataset_type": "text",
  "ghost_val_sets": "[sums]", "ghost_val_batch_size": 64, "adam_weight_decay": 0.0, "eval_interval": -1,
  "lr_schedule_type": "constant", "warmup_steps_fraction": 0.02, "enable_tensorboard": "false", "log_period": 50,
}  # fmt: skip


def right_digits(completions, completion, **_):
  """Half a point for each right digit of a sum of two, a quarter less for an answer of another length."""
  pairs = zip(completions, completion, strict=True)
  return [sum(a == b for a, b in zip(answer, gold)) / 2 - (len(answer) != 2) / 4 for answer, gold in pairs]  # noqa: B905


def write(path: Path, answer) -> list[tuple[int, int]]:
  """Writes sums of two numbers from 10 to 49 as JSON lines, in random order; returns the rest. answer: of a, b."""
  rng = random.Random(0)
  pairs = [(a, b) for a in range(10, 50) for b in range(10, 50)]
  rng.shuffle(pairs)
  lines = [json.dumps({"prompt": f"{a}+{b}=", "completion": str(answer(a, b, rng))}) for a, b in pairs[160:]]
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("\n".join(lines) + "\n", encoding="utf-8")
  return pairs[:160]


def share_right(run_dir: Path, pairs: list[tuple[int, int]]) -> float:
  """The share of sums for which the model's likeliest answer is right."""
  place, cfg = load_model.find(str(run_dir))
  graphdef, state = load_model.load(place, cfg)
  tokenizer = ByteTokenizer()
  prompts = [[tokenizer.bos_id, *ids] for ids in tokenizer.encode([f"{a}+{b}=".encode() for a, b in pairs])]
  found = Generator(graphdef, cache_size=10, stop_ids=[tokenizer.eos_id]).generate(state, prompts, 3)
  said = [tokenizer.decode(found.row(i)[:2]).decode("utf-8", "replace") for i in range(len(pairs))]
  return sum(text == str(a + b) for text, (a, b) in zip(said, pairs, strict=True)) / len(pairs)


def command(name: str, *more: str, **keys) -> list[str]:
  """The arguments of the run of this name."""
  return ["configs/base.yml", f"run_name={name}", *(f"{key}={value}" for key, value in (MODEL | keys).items()), *more]


def run(arguments: list[str]) -> None:
  if code := train.main(arguments):
    sys.exit(code)


def mean_reward(run_dir: Path) -> tuple[float, float]:
  """Mean reward of the first and of the last tenth of a run."""
  lines = (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
  rewards = [value for value in (json.loads(line).get("rollout/reward") for line in lines) if value is not None]
  tenth = max(len(rewards) // 10, 1)
  return sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth


def main(arguments: list[str]) -> None:
  if {"-h", "--help"} & set(arguments):
    return print(__doc__)
  form = command(
      "addition-form", dataset_files=f"[sums={FOLDER / 'form.jsonl'}]", objective="sft", steps=150, learning_rate=2e-3,
      per_device_batch_size=128, ghost_enabled="false", checkpoint_period=150)  # fmt: skip
  reward = command(
      "addition", *arguments, dataset_files=f"[sums={FOLDER / 'sums.jsonl'}]", objective="grpo",
      load_parameters_path="runs/addition-form", reward_functions=f"[{Path(__file__).resolve()}:right_digits]",
      num_generations=16, per_device_batch_size=512, max_completion_length=3, scale_rewards="none", grpo_beta=0.04,
      learning_rate=1e-3, steps=2500, checkpoint_period=1000, ghost_detail="total", ghost_every=10)  # fmt: skip
  try:
    cfg = config.load(*reward).run
  except config.ConfigError:
    return run(reward)  # says what is wrong, before the first run
  write(FOLDER / "form.jsonl", lambda a, b, rng: rng.randrange(20, 99))
  unseen = write(FOLDER / "sums.jsonl", lambda a, b, rng: a + b)
  run(form)
  run(reward)
  trained = Path(cfg.base_output_directory, cfg.run_name)  # of the settings that may follow
  first, last = mean_reward(trained)
  print(f"mean reward: {first:.3f} in the first tenth of the steps, {last:.3f} in the last")
  before, after = (share_right(run_dir, unseen) for run_dir in (Path("runs/addition-form"), trained))
  print(f"right answers to {len(unseen)} sums that no run has read: {before:.1%} before, {after:.1%} after")
  report([str(trained)])


if __name__ == "__main__":
  main(sys.argv[1:])
