"""What a run's answers would have done under other rewards: read from the log, without training again.

The contribution of an answer is its advantage times a score per unit of advantage, since the loss of an answer is
linear in its advantage. Advantages of another reward, estimator or filter therefore give the first-order effect of the
steps that would have been taken, with the direction, the learning rate and clipping of the real ones. A token whose
ratio was clipped (num_iterations > 1) counts as it did. A step without any advantage has no direction, and is left out.

P prompts, G answers to each, N answers of the log.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from maxghost import config
from maxghost.attribution.numbers import number
from maxghost.attribution.texts import snippet
from maxghost.attribution.where import refuse_unknown
from maxghost.config import Config, ConfigError
from maxghost.config.values import printable
from maxghost.data import rewards
from maxghost.scorelog import ScoreLog

SHOWN = 10


@dataclasses.dataclass(frozen=True)
class WhatIf:
  """Of N answers: step, prompt, text, and the reward, the advantage and the contribution as trained and as asked.

  contribution: nats of the validation set. num_idle: steps that are left out.
  """

  steps_N: np.ndarray
  prompts: list[str]
  texts: list[str]
  reward_2N: np.ndarray
  advantage_2N: np.ndarray
  contribution_2N: np.ndarray
  num_idle: int


def ask(log: ScoreLog, asked: str, val_set: str = "") -> WhatIf:
  """asked: "reward=FUNCTION" with `scale_rewards=group|batch|none` after a comma, or one of the two.

  Raises ConfigError for a run without answers, one whose loss has other terms, or an unknown function.
  """
  cfg = config.load(log.run_dir / "config.yml")
  function, scale = _parsed(asked, cfg)
  val_set = val_set or log.val_sets[0]
  refuse_unknown(f"--set {val_set}: no validation set of this run", val_set, log.val_sets)
  columns = [log[name].tolist() for name in ("step", "domain", "path", "offset", "epoch", "chunk")]
  contribution = log["contribution"][:, log.val_sets.index(val_set)].tolist()
  score_of = dict(zip(zip(*columns, strict=True), contribution, strict=True))
  found, idle, masked = [], 0, cfg.rollout.mask_truncated_completions
  for record in _records(log.run_dir / rewards.FILE):
    answers = [answer for prompt in record["prompts"] for answer in prompt["answers"]]
    if any(answer["advantage"] and (answer["ended"] or not masked) for answer in answers):
      found += _answers(record, function, scale, cfg, score_of)
    else:
      idle += min(cfg.rollout.num_iterations, cfg.run.steps - record["step"])
  if not found:
    raise ConfigError(f"{log.run_dir}: none of its answers has a score, or no step had an answer with an advantage")
  steps, prompts, texts, *values = zip(*found, strict=True)
  rewarded, advanced, moved = np.array(values, np.float64).reshape(3, 2, -1)
  return WhatIf(np.array(steps), list(prompts), list(texts), rewarded, advanced, moved, idle)


def show(found: WhatIf, asked: str, val_set: str) -> list[str]:
  """Lines: the sums, and the answers whose contribution changes most."""
  then, now = found.contribution_2N.sum(1)
  idle = found.advantage_2N[0] == 0
  lines = [
    f"what if {asked}: {len(found.texts):,} answers in {len(np.unique(found.steps_N)):,} steps",
    f"examples' part of the drop of the loss of '{val_set}': {number(now, plus=True)} nats, as trained "
    f"{number(then, plus=True)} (first order, with the directions of the steps that were taken)",
    f"of {idle.sum():,} answers without an advantage, {(idle & (found.advantage_2N[1] != 0)).sum():,} would have one",
    *([f"left out: {found.num_idle:,} steps in which no answer had an advantage"] if found.num_idle else []),
    "answers whose contribution changes most (reward, advantage and nats, as trained -> asked):",
  ]
  for i in np.argsort(-np.abs(np.subtract(*found.contribution_2N)), kind="stable")[:SHOWN].tolist():
    pairs = (found.reward_2N, found.advantage_2N, found.contribution_2N)
    changes = "   ".join(f"{number(float(x[0, i]), plus=True)} -> {number(float(x[1, i]), plus=True)}" for x in pairs)
    text = printable(f"{snippet(found.prompts[i], 40)} {snippet(found.texts[i], 60)}")
    lines.append(f"  step {found.steps_N[i]}   {changes}   {text}")
  return lines


def _parsed(asked: str, cfg: Config) -> tuple[rewards.Reward | None, str]:
  """(reward function or None for that of the run, scale_rewards)."""
  if not cfg.samples:
    raise ConfigError(f"--what-if is for runs with objective=grpo, not {cfg.optimizer.objective}")
  balance = cfg.model.load_balance_loss_weight if cfg.model.num_experts > 1 else 0
  fixed = {"grpo_beta": cfg.rollout.grpo_beta, "load_balance_loss_weight": balance}
  fixed["gradient_clipping_threshold"] = cfg.counts_clipping and cfg.optimizer.gradient_clipping_threshold
  for key, value in fixed.items():
    if value:
      raise ConfigError(f"--what-if: {key}={value} adds what does not scale with the advantage; train with {key}=0.0")
  scales = config.fields()["scale_rewards"].metadata["choices"]
  parts = asked.split(",")
  given = {name: value for name, _, value in (part.partition("=") for part in parts)}
  if given.keys() - {"reward", "scale_rewards"} or len(given) < len(parts):
    raise ConfigError(f"--what-if {asked}: write reward=FUNCTION, scale_rewards={'|'.join(scales)}, or both, each once")
  scale = given.get("scale_rewards", cfg.rollout.scale_rewards)
  refuse_unknown(f"--what-if scale_rewards={scale}: unknown", scale, scales)
  return rewards.load(given["reward"], "--what-if reward") if "reward" in given else None, scale


def _records(path: Path) -> list[dict]:
  if not path.is_file():
    raise ConfigError(f"{path}: no such file; it has the answers of a run with objective=grpo")
  try:
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    for prompt in (prompt for record in records if record["step"] >= 0 for prompt in record["prompts"]):
      needed = [prompt[name] for name in ("prompt", "document", "epoch")]
      needed += [answer[name] for answer in prompt["answers"] for name in ("text", "ended", "reward", "advantage")]
  except (ValueError, KeyError, TypeError) as error:
    raise ConfigError(f"{path}: damaged ({type(error).__name__}: {error})") from error
  return records


def _answers(record: dict, function, scale: str, cfg: Config, score_of: dict) -> list[tuple]:
  """(step, prompt, answer, rewards, advantages and contributions then and now) of the scored answers of a sampling."""
  prompts, size = record["prompts"], len(record["prompts"][0]["answers"])
  firsts = rewards.first_numbers([(*prompt["document"], prompt["epoch"]) for prompt in prompts], size)
  pairs = [(p, *one) for p, first in zip(prompts, firsts, strict=True) for one in enumerate(p["answers"], first)]
  now_N = then_N = np.array([answer["reward"] for *_, answer in pairs], np.float64)  # NaN for null
  if function is not None:
    names = [name for name in prompts[0] if name not in ("document", "epoch", "prompt", "answers")]
    columns = {name: [prompt[name] for prompt, *_ in pairs] for name in names}
    texts = [answer["text"] for *_, answer in pairs]
    try:
      judged = rewards.judge({"--what-if": function}, [prompt["prompt"] for prompt, *_ in pairs], texts, columns)
    except rewards.RolloutError as error:
      raise ConfigError(str(error)) from error
    now_N = rewards.combined(judged)
  advantage_N, found = rewards.advantages(now_N, size, scale), []
  steps = range(record["step"], record["step"] + cfg.rollout.num_iterations)
  for (prompt, number_, answer), then, now, advantage in zip(pairs, then_N, now_N, advantage_N, strict=True):
    used = answer["advantage"] or rewards.UNTAUGHT
    texts_and_values = prompt["prompt"], answer["text"], then, now, answer["advantage"], advantage
    scores = {step: score_of.get((step, *prompt["document"], prompt["epoch"], number_)) for step in steps}
    found += [(step, *texts_and_values, x, x / used * advantage) for step, x in scores.items() if x is not None]
  return found
