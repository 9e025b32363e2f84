"""Rewards of sampled answers: functions by name, and how the rewards of a group become advantages.

A reward function is called as f(prompts=..., completions=..., **columns) with lists of equal length: the texts of the
prompts and of the answers without their end token, and a list for every column of the records (`completion`, the gold
answer, if there is one, and document_fields). It returns a number for each answer, or None if it does not judge it.

P prompts, G answers to each, B = P G rows, F functions.
"""

import ast
import copy
import decimal
import functools
import importlib
import math
import os
import re
import runpy
from collections.abc import Callable, Sequence, Set
from traceback import extract_tb
from typing import Any

import numpy as np

from maxghost.config.values import ConfigError, did_you_mean, printable

Reward = Callable[..., Any]  # -> Sequence[float | None]
FILE = "rollouts.jsonl"  # of a run directory: the answers of each sampling and their rewards
LARGEST = float(np.finfo(np.float32).max)  # reward; an int may be too large even for a float
EPSILON = 1e-4  # added to standard deviations, as in TRL
UNTAUGHT = 2.0**-40  # the advantage of an answer that has none, so that its score is known all the same
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_run = functools.cache(runpy.run_path)  # a file runs once for all of its functions, which it may register


class RolloutError(RuntimeError):
  """A reward function failed, or gave something that is no reward."""


def arithmetic(completions: Sequence[str], completion: Sequence[str], **_: Any) -> list[float]:
  """1 where the last number of the answer is that of the gold answer (the column `completion`), else 0."""
  pairs = zip(map(_last, completions), map(_last, completion), strict=True)
  return [float(answer is not None and answer == gold) for answer, gold in pairs]


def python_parses(completions: Sequence[str], **_: Any) -> list[float]:
  """1 where the answer, or the code block in it, is Python that parses, else 0. Nothing is run."""
  return [float(_parses(text)) for text in completions]


def _last(text: str) -> decimal.Decimal | None:
  found = _NUMBER.findall(text)
  return decimal.Decimal(found[-1].replace(",", "")) if found else None  # exact: floats of long numbers are equal


def _parses(text: str) -> bool:
  block = re.search(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
  code = block[1] if block else text
  try:
    ast.parse(code)
  except (SyntaxError, ValueError, MemoryError, RecursionError):
    return False
  return bool(code.strip())


REWARDS: dict[str, Reward] = {"arithmetic": arithmetic, "python_parses": python_parses}


def register(function: Reward) -> Reward:
  """Registers a reward function by its name; usable as a decorator. Raises ValueError for a name that is taken."""
  if REWARDS.setdefault(function.__name__, function) is not function:
    raise ValueError(f"reward {function.__name__} is already registered; give the other one a name of its own")
  return function


@functools.cache
def load(name: str, key: str = "reward_functions") -> Reward:
  """A registered function, or that of FILE.py:FUNCTION or MODULE:FUNCTION. Raises ConfigError that names `key`."""
  place, _, function = name.rpartition(":")
  if not place and name in REWARDS:
    return REWARDS[name]
  if not place:
    known = f"{', '.join(REWARDS)}, or FILE.py:FUNCTION{did_you_mean(name, REWARDS)}"
    raise ConfigError(f"{key}={name}: use {known}")
  try:
    file = os.path.abspath(os.path.expanduser(place))
    there = _run(file) if place.endswith(".py") else vars(importlib.import_module(place))
  except (Exception, SystemExit) as error:  # whatever the user's file does
    raise ConfigError(f"{key}={name}: {place} cannot be imported: {_said(error)}") from error
  if not callable(found := there.get(function)):
    known = [other for other, value in there.items() if callable(value) and not other.startswith("_")]
    raise ConfigError(f"{key}={name}: {place} has no function {function}{did_you_mean(function, known, 'it has')}")
  return found


def judge(functions: dict[str, Reward], prompts: list[str], completions: list[str], columns: dict) -> dict[str, Any]:
  """{name: rewards float64 [B], NaN for None} of the functions. Raises RolloutError with the prompt and the answer."""
  found = {}
  for name, function in functions.items():
    try:
      made = function(prompts=list(prompts), completions=list(completions), **copy.deepcopy(columns))
      given = [x.item() if getattr(x, "ndim", None) == 0 else x for x in made]  # of NumPy, JAX or PyTorch
    except (Exception, SystemExit) as error:  # whatever the user's function does
      at = (f"; at {x.filename}:{x.lineno}" for x in extract_tb(error.__traceback__) if x.filename != __file__)
      said = f"reward {name} failed: {_said(error)}; {_shown(prompts, completions, 0)}"
      raise RolloutError(said + next(at, "")) from error  # with the line of the function, not one deeper
    if isinstance(made, dict | Set | str | bytes):
      raise RolloutError(f"reward {name} gave a {type(made).__name__}; give a list with a reward for each answer")
    if len(given) != len(completions):
      raise RolloutError(f"reward {name} gave {len(given)} rewards for {len(completions)} answers; give one for each")
    for i, value in enumerate(given):
      is_real = isinstance(value, int | float | np.floating)
      if value is not None and not (is_real and abs(value) <= LARGEST):
        said = f"reward {name} is {value!r:.60}, no finite number and not None"
        raise RolloutError(f"{said}; {_shown(prompts, completions, i)}")
    found[name] = np.array([math.nan if value is None else float(value) for value in given])
  return found


def combined(by_name: dict[str, np.ndarray], weights: Sequence[float] = ()) -> np.ndarray:
  """[B]: the weighted sum of the functions that judge an answer, NaN where none does. weights: () for 1."""
  return (np.ma.masked_invalid(np.stack([*by_name.values()], 1)) * (weights or 1.0)).sum(1).filled(np.nan)


def first_numbers(prompts: Sequence[Any], num_generations: int) -> list[int]:
  """The number of the first answer in each prompt's group. A mixture may draw a prompt several times in a step: the
  answers of its second group have further numbers, and so other random keys and places in the score log."""
  return [prompts[:i].count(prompt) * num_generations for i, prompt in enumerate(prompts)]


def advantages(reward_B: np.ndarray, num_generations: int, scale: str) -> np.ndarray:
  """[B]: (r - mean of the group) / (s + 1e-4), s the deviation (of n - 1) that `scale` names; 0 for equal rewards, and
  for an answer without one (NaN), which counts in no mean and no deviation."""
  groups_PG = np.ma.masked_invalid(np.asarray(reward_B, np.float64).reshape(-1, num_generations))
  above_PG = groups_PG - groups_PG.mean(1, keepdims=True)
  if scale != "none":
    above_PG /= groups_PG.std(1 if scale == "group" else None, ddof=1, keepdims=True) + EPSILON
  return np.where(groups_PG.ptp(1, keepdims=True).filled(0) > 0, above_PG.filled(0), 0).reshape(-1)


def _said(error: BaseException) -> str:
  return printable(f"{type(error).__name__}: {next(filter(str.strip, str(error).splitlines()), '').strip()}")


def _shown(prompts: Sequence[str], completions: Sequence[str], i: int) -> str:
  return printable(f"prompt {prompts[i][-200:]!r}, answer {completions[i][:200]!r}")
