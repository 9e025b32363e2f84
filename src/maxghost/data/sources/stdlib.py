"""The running Python's standard library as a corpus of labelled documents, read from disk: no download, no dependency.

code: module source with its docstrings cut out (they are a domain of their own); one document per module.
docstrings: each docstring, with its byte offset in the module.
manual: the language reference as `pydoc` shows it; one document per topic.
tables: generated data modules (character encodings, entities, constants).
Modules are taken in the order of their path relative to the library's root, tests excluded.
"""

import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from maxghost.config import ConfigError, did_you_mean
from maxghost.data.sources.base import DocumentList
from maxghost.data.types import Document

DOMAINS = ("code", "docstrings", "manual", "tables")
_SKIPPED_FOLDERS = {
  "__pycache__",
  "site-packages",
  "dist-packages",
  "test",
  "tests",
  "idle_test",
  "idlelib",
  "lib2to3",
  "distutils",
  "pydoc_data",
  "turtledemo",
  "ensurepip",
}
_TABLE_MODULES = {"html/entities.py", "stringprep.py", "tkinter/constants.py"}
# A triple-quoted string that opens a module or stands on the first line of code after one that ends with a colon.
_DOCSTRING = re.compile(
  rb"""(?:\A|:[ \t]*(?:\#[^\n]*)?\n)(?:[ \t]*(?:\#[^\n]*)?\n)*[ \t]*[rRuU]?(\"{3}|'{3})(.*?)(?<!\\)\1""", re.S | re.X
)
_SHORTEST_DOCSTRING = 24  # bytes; below, there is nothing to learn from


def load(domains: tuple[str, ...] = (), domain_bytes: int = 0, root: str | os.PathLike | None = None) -> DocumentList:
  """Documents of the standard library in `root` (default: the running Python's).

  domains: which to read, in this order; empty = all. domain_bytes: whole documents are taken up to this many bytes per
  domain; 0 = no cap. Raises ConfigError for an unknown domain, one this Python has no text for, or a cap below the
  first document.
  """
  chosen = tuple(domains) or DOMAINS
  for domain in chosen:
    if domain not in DOMAINS:
      hint = did_you_mean(domain, DOMAINS) or f"; the standard library has {', '.join(DOMAINS)}"
      raise ConfigError(f"dataset_domains has '{domain}', which dataset_type=stdlib does not know{hint}")
  library = Path(root if root is not None else sysconfig.get_path("stdlib"))
  readers = {"code": _code, "docstrings": _docstrings, "manual": _manual, "tables": _tables}
  modules = _modules(library)
  documents: list[Document] = []
  for domain in chosen:
    taken = _take(readers[domain](library, modules), domain_bytes, domain)
    if not taken:
      raise ConfigError(_missing(domain, library, chosen))
    documents.extend(taken)
  return DocumentList(documents, chosen)


def _take(found: Iterator[Document], cap: int, domain: str) -> list[Document]:
  taken, size = [], 0
  for document in found:
    size += len(document.text)
    if cap and size > cap:
      if not taken:
        raise ConfigError(
          f"dataset_domain_bytes={cap} is below the first document of domain '{domain}', which has {size} bytes; "
          f"use {size} or more, or 0 for no cap"
        )
      break
    taken.append(document)
  return taken


def _missing(domain: str, library: Path, chosen: tuple[str, ...]) -> str:
  others = [name for name in chosen if name != domain]
  fix = f"use dataset_domains=[{','.join(others)}]" if others else "name another domain"
  what = "pydoc_data.topics" if domain == "manual" else "source files (*.py)"
  return (
    f"dataset_domains has '{domain}', but this Python ({sys.version.split()[0]}, library in {library}) has no {what}; "
    f"{fix}, or run a Python that brings its library's source"
  )


def _modules(library: Path) -> list[str]:
  """Paths of the modules relative to the library, sorted, with `/` between the parts."""
  found = []
  for folder, subfolders, files in os.walk(library):
    subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and "site-packages" not in name]
    here = Path(folder).relative_to(library).as_posix()
    prefix = "" if here == "." else here + "/"
    found.extend(prefix + name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
  return sorted(found)


def _is_table(path: str) -> bool:
  return path.startswith("encodings/") or path in _TABLE_MODULES


def _read(library: Path, path: str) -> bytes:
  """A module's bytes; empty where it is not UTF-8, so that every document is valid text."""
  raw = (library / path).read_bytes()
  try:
    raw.decode("utf-8")
  except UnicodeDecodeError:
    return b""
  return raw


def _code(library: Path, modules: list[str]) -> Iterator[Document]:
  for path in modules:
    if not _is_table(path):
      text = _DOCSTRING.sub(_without_body, _read(library, path))
      if text.strip():
        yield Document("code", path, 0, text)


def _without_body(match: re.Match) -> bytes:
  start, stop = match.span(2)
  whole = match.group(0)
  return whole[: start - match.start()] + whole[stop - match.start() :]


def _docstrings(library: Path, modules: list[str]) -> Iterator[Document]:
  for path in modules:
    if not _is_table(path):
      for match in _DOCSTRING.finditer(_read(library, path)):
        if len(match.group(2)) >= _SHORTEST_DOCSTRING:
          yield Document("docstrings", path, match.start(2), match.group(2))


def _manual(library: Path, modules: list[str]) -> Iterator[Document]:
  try:
    topics = importlib.import_module("pydoc_data.topics").topics
  except ImportError:
    return
  for topic in sorted(topics):
    yield Document("manual", f"pydoc_data/topics.py:{topic}", 0, topics[topic].encode("utf-8"))


def _tables(library: Path, modules: list[str]) -> Iterator[Document]:
  for path in modules:
    if _is_table(path):
      text = _read(library, path)
      if text.strip():
        yield Document("tables", path, 0, text)
