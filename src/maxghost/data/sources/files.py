"""Files of a corpus: globs with a domain each, names relative to the corpus's folder, and fingerprints."""

import functools
import glob
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxghost.config.values import ConfigError, naming, print_problem, reading
from maxghost.data.hashing import text_hash
from maxghost.data.sources.base import check_known

# By dataset_type.
_EXAMPLES = {"text": "/data/wiki/**/*.jsonl", "hf": "/data/wiki", "grain": "/data/wiki/*.array_record",
             "tfds": "lm1b:1.1.0"}  # fmt: skip
_SAMPLE = 1 << 16  # bytes of a file's beginning, middle and end that go into its fingerprint


class CorpusFile(NamedTuple):
  """One file. name: its path below the folder that the domain's globs share; part of the document ids."""

  domain: str
  path: str
  name: str
  fingerprint: str


def expand(key: str, patterns: Sequence[str], domains: tuple[str, ...] = (), kind: str = "text") -> list[CorpusFile]:
  """The files of `domain=glob` patterns (`**` matches any number of folders), by domain as given, then by name.
  domains: the wanted ones; empty = all. key, kind: the setting and the dataset_type, for ConfigErrors."""
  by_domain: dict[str, list[str]] = {}
  for domain, pattern in labelled(key, patterns, domains, lambda _: "text", kind):
    by_domain.setdefault(domain, []).append(os.path.expanduser(pattern))
  found: list[CorpusFile] = []
  real = functools.cache(os.path.realpath)
  for domain, globs in by_domain.items():
    paths: dict[tuple[str, str], str] = {}  # a folder to which links lead too counts once, by its shortest path
    for pattern in globs:
      _note_unread(pattern)
      matches = glob.glob(pattern, recursive=True) or [pattern]  # a file's own name may hold brackets
      if not (files := {os.path.abspath(path) for path in matches if os.path.isfile(path)}):
        why = _of_folder(pattern, kind) if os.path.isdir(pattern) else f"no file matches {pattern}"
        raise ConfigError(f"{key}: domain '{domain}' has no documents: {why}")
      for path in sorted(files, key=lambda path: (path.count(os.sep), path)):
        paths.setdefault((real(os.path.dirname(path)), os.path.basename(path)), path)
    base = os.path.commonpath([_fixed_part(pattern) for pattern in globs])
    for name, path in sorted((os.path.relpath(path, base).replace(os.sep, "/"), path) for path in paths.values()):
      with naming(key, f"{domain}={path}"):
        found.append(CorpusFile(domain, path, name, fingerprint(path)))
  return found


def _note_unread(pattern: str) -> None:
  """Names the folders below `**` that cannot be listed, which `glob` leaves out silently."""

  def tell(error: OSError) -> None:
    print_problem(f"note: left out: {error.filename} cannot be listed: {error.strerror}")

  above, recursive, _ = pattern.partition("**")
  for base in glob.glob(above or ".") if recursive else ():
    for _, folders, _ in os.walk(base, onerror=tell):
      folders[:] = [name for name in folders if not name.startswith(".")]  # `glob` leaves these out


def _of_folder(folder: str, kind: str) -> str:
  """What to write for a folder: a pattern of the most frequent kind of its files that can be read."""
  known = (".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".parquet")
  known = known if kind == "text" else (".array_record", ".parquet")
  names = [name for _, _, files in os.walk(folder) for name in files]
  ending = max(known, key=lambda ending: sum(name.endswith(ending) for name in names))
  return f"{folder} is a folder; write {os.path.join(folder, '**', '*' + ending)}"


def labelled(key: str, items: Sequence[str], domains: Sequence[str], default_domain: Callable, kind: str) -> list:
  """(domain, rest) of `domain=rest` items, or of rest and `default_domain`, as `domains` (empty = all). ConfigError."""
  if not items:
    raise ConfigError(f"{key} is empty, but dataset_type={kind} asks for it; give {key}=[domain={_EXAMPLES[kind]}]")
  pairs = []
  for item in items:
    domain, separator, rest = item.partition("=")
    domain, rest = (domain.strip(), rest.strip()) if separator else (default_domain(item.strip()), item.strip())
    if not domain or not rest:
      raise ConfigError(f"{key} has '{item}', which is not of the form domain={_EXAMPLES[kind]}")
    pairs.append((domain, rest))
  known = dict.fromkeys(domain for domain, _ in pairs)
  check_known("dataset_domains", domains, known, key)
  return [pair for domain in domains or known for pair in pairs if pair[0] == domain]


def _fixed_part(pattern: str) -> str:
  """The folder above a glob's first part with a wildcard; the folder of a plain path."""
  parts = os.path.abspath(pattern).split(os.sep)
  magic = (number for number, part in enumerate(parts) if glob.has_magic(part))
  return os.sep.join(parts[: next(magic, len(parts) - 1)]) or os.sep


def fingerprint(path: str) -> str:
  """A hash of a file's size, beginning, middle and end; not of its modification time. Raises ConfigError."""
  with reading(path), open(path, "rb") as file:
    size = os.path.getsize(path)
    places = sorted({0, max(0, size // 2 - _SAMPLE // 2), max(0, size - _SAMPLE)})
    samples = [os.pread(file.fileno(), _SAMPLE, place) for place in places]
  return f"{text_hash(str(size), *samples):016x}"
