"""The error of a wrong configuration, how commands print it, and the search for the nearest valid name."""

import difflib
import os
import sys
from collections.abc import Iterable

_LONGEST = 2000  # characters of a line that is printed


class ConfigError(ValueError):
  """A mistake of the user: one clear line per problem (what is wrong, the value, the fix).

  `problems` holds the lines; the message is the lines joined. Commands print them and exit with code 2.
  """

  def __init__(self, *problems: str):
    self.problems = tuple(problems)
    super().__init__("\n".join(problems))


def print_problem(problem: str | BaseException, name: str = "maxghost") -> None:
  """Prints a line on stderr, in which control characters are escaped. A closed output (`| head`) is no problem."""
  if isinstance(problem, BrokenPipeError):
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed there at exit
    return
  text = str(problem)
  if isinstance(problem, OSError) and problem.strerror:
    text = f"{problem.filename}: {problem.strerror}" if problem.filename else problem.strerror
  text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
  shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
  print(f"{name}: {shown}", file=sys.stderr)


def nearest(name: str, valid: Iterable[str], limit: int = 3) -> list[str]:
  """The valid names most like `name`, best first: those spelt alike, then those that contain it as a whole word.

  Of the names spelt alike, the best is kept, and those exactly as good. Capitals and `-` against `_` do not count.
  When there are none at all, names that contain `name` anywhere are taken.
  """
  plain = {candidate.lower().replace("-", "_"): candidate for candidate in valid}
  wanted = name.lower().replace("-", "_")
  if wanted in plain:
    return [plain[wanted]]
  alike = difflib.get_close_matches(wanted, plain, n=len(plain) or 1)
  likeness = [difflib.SequenceMatcher(a=candidate, b=wanted).ratio() for candidate in alike]
  found = sorted(candidate for candidate, ratio in zip(alike, likeness, strict=True) if ratio == likeness[0])
  found += [candidate for candidate in plain if f"_{wanted}_" in f"_{candidate}_" and candidate not in found]
  if not found and len(wanted) >= 2:
    found = [candidate for candidate in plain if wanted in candidate]
  return [plain[candidate] for candidate in found[:limit]]


def did_you_mean(name: str, valid: Iterable[str]) -> str:
  """`; did you mean 'steps'?`, or nothing when no valid name is near."""
  names = [f"'{found}'" for found in nearest(name, valid)]
  if not names:
    return ""
  return "; did you mean " + " or ".join(filter(None, [", ".join(names[:-1]), names[-1]])) + "?"
