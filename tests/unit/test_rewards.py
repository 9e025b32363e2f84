"""Rewards of answers: the functions, their sum, and advantages over a group."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from maxghost.config import ConfigError
from maxghost.data import rewards


def test_advantages():
  reward = np.array([1.0, 0, 0, 1, 0.5, 0.5, 0.5, 0.5])
  group = rewards.advantages(reward, 4, "group")
  np.testing.assert_allclose(group[:4], np.array([1, -1, -1, 1]) * 0.5 / (np.sqrt(1 / 3) + 1e-4))
  assert (group[4:] == 0).all()
  np.testing.assert_allclose(rewards.advantages(reward, 4, "none")[:4], [0.5, -0.5, -0.5, 0.5])
  np.testing.assert_allclose(rewards.advantages(reward, 4, "batch")[0], 0.5 / (reward.std(ddof=1) + 1e-4))
  np.testing.assert_allclose(np.abs(rewards.advantages(np.array([3.0, 4.0]), 2, "group")), 0.5**0.5, rtol=1e-3)
  assert (rewards.advantages(np.repeat([0.1, 0.7], 3), 3, "group") == 0).all()  # whose means are rounded
  by_name = {"a": np.array([1.0, np.nan]), "b": np.array([0.5, 2.0])}
  np.testing.assert_allclose(rewards.combined(by_name, (2.0, 1.0)), [2.5, 2.0])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_answer_that_no_function_judges_counts_in_no_mean(scale):
  judged = rewards.combined({"a": np.array([1.0, np.nan, 0, np.nan, np.nan, np.nan]), "b": np.full(6, np.nan)})
  np.testing.assert_array_equal(judged, [1, np.nan, 0, np.nan, np.nan, np.nan])
  found = rewards.advantages(judged, 3, scale)
  np.testing.assert_array_equal(found[[1, 3, 4, 5]], 0)
  np.testing.assert_array_equal(found[[0, 2]], rewards.advantages(judged[[0, 2]], 2, scale))


def test_built_in_rewards():
  gold = {"completion": ["46", "1,046", "-3.5", "7"]}
  assert rewards.arithmetic(["it is 46.", "1046", "3.5", "none"], **gold) == [1, 1, 0, 0]
  long = ["9007199254740993", "9" * 400, "1.50"]  # the first two are equal to the next one's as floats
  assert rewards.arithmetic(long, ["9007199254740992", "8" * 400, "1.5"]) == [0, 0, 1]
  texts = ["x = 1", "```python\nx = (1\n```", "Here:\n```python\nf(2)\n```", "a b", ""]
  assert rewards.python_parses(texts) == [1, 0, 1, 0, 0]
  judged = rewards.judge({"given": lambda **_: np.array([True, False])}, ["a"] * 2, ["b"] * 2, {})
  assert judged["given"].tolist() == [1, 0]
  popping = {name: lambda year, **_: [year.pop()] for name in ("one", "two")}
  assert [float(x[0]) for x in rewards.judge(popping, ["a"], ["b"], {"year": [7]}).values()] == [7, 7]
  for value in (10**400, -1e300, float("inf"), "1", np.complex64(1)):  # the first: a distance of long answers
    with pytest.raises(rewards.RolloutError, match="no finite number and not None; prompt 'a', answer 'b'"):
      rewards.judge({"given": lambda value=value, **_: [value]}, ["a"], ["b"], {})


@pytest.mark.parametrize(
  ("made", "said"),
  [
    ({0: 1.0, 1: 2.0}, "gave a dict; give a list"),
    ({1.0, 2.0}, "gave a set; give a list"),
    (b"ab", "gave a bytes; give a list"),
    (SystemExit(0), "reward own failed: SystemExit: 0; prompt 'p'"),
  ],
)
def test_what_has_no_order_and_an_exit_are_no_rewards(made, said):
  """A dict would give its keys, and the exit would end the run as if all had gone well."""

  def own(**_):
    if isinstance(made, BaseException):
      raise made
    return made

  with pytest.raises(rewards.RolloutError, match=said):
    rewards.judge({"own": own}, ["p", "p"], ["a", "b"], {})


@pytest.mark.parametrize(
  ("line", "said"),
  [
    ("assert not prompts", "AssertionError: ;"),
    ("yield 1 / 0", "ZeroDivisionError: division by zero;"),  # raised outside of the call
    (r"raise ValueError('\n 1 error for Answer\n')", "ValueError: 1 error for Answer;"),
    ("return float('x')", "ValueError: could not convert"),
    ("return json.loads('(')", "JSONDecodeError: Expecting value"),  # the line of the file, not of the library
  ],
)
def test_the_place_of_a_failure_is_told(tmp_path, line, said):
  file = tmp_path / "own.py"
  file.write_text(f"import json\n\n\ndef own(prompts, **_):\n  {line}\n")
  with pytest.raises(rewards.RolloutError, match=rf"reward own failed: {said}.* answer 'b'; at {file}:5$"):
    rewards.judge({"own": rewards.load(f"{file}:own")}, ["p"], ["b"], {})


@pytest.mark.parametrize("array", [functools.partial(np.array, dtype=np.float16), jnp.array, np.longdouble])
def test_numbers_of_arrays_are_rewards_and_their_infinity_is_not(array, recwarn):
  for value in (2.5, np.inf, np.nan):
    made = [array(value), array(1)] if array is jnp.array else array([value, 1.0])
    judge = functools.partial(rewards.judge, {"own": lambda made=made, **_: made}, ["p", "p"], ["a", "b"], {})
    if value == 2.5:
      assert judge()["own"].tolist() == [2.5, 1.0]
    else:
      with pytest.raises(rewards.RolloutError, match=f"reward own is .*{value}.*, no finite number"):
        judge()
  assert not recwarn


def test_a_file_of_rewards_is_named_with_what_it_has(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "own.py").write_text("def near(**_):\n  return []\n")
  (tmp_path / "exits.py").write_text("raise SystemExit(0)\n")
  assert rewards.load("~/own.py:near")() == []
  with pytest.raises(ConfigError, match=r"own\.py has no function zzz; it has near"):
    rewards.load(f"{tmp_path}/own.py:zzz")
  with pytest.raises(ConfigError, match=r"exits\.py cannot be imported: SystemExit: 0"):
    rewards.load(f"{tmp_path}/exits.py:near")


def test_a_file_that_registers_its_rewards_gives_several(tmp_path):
  functions = "".join(f"@register\ndef own_{name}(**_):\n  runs.append(1)\n  return runs\n" for name in "ab")
  (tmp_path / "own.py").write_text(f"from maxghost.data.rewards import register\nruns = []\n{functions}")
  try:
    assert [len(rewards.load(f"{tmp_path}/own.py:own_{name}")()) for name in "ab"] == [1, 2]
  finally:
    for name in ("own_a", "own_b"):
      rewards.REWARDS.pop(name, None)
