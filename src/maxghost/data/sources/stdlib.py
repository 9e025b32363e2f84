"""The running Python's standard library as a corpus of labelled documents, read from disk: no download, no dependency.

Domain `code` holds each module's source without its docstrings, `docstrings` each docstring, with its byte offset in
the module, `manual` each topic of the language reference as `pydoc` shows it, `tables` the generated data modules.
Modules are in the order of their path below the library's root, tests excluded.
"""

import importlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from maxghost.config import ConfigError
from maxghost.data.sources.base import DocumentList, check_known, take
from maxghost.data.types import Document

DOMAINS = ("code", "docstrings", "manual", "tables")
_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3",
                    "distutils", "pydoc_data", "turtledemo", "ensurepip"}  # fmt: skip
_TABLE_MODULES = {"html/entities.py", "stringprep.py", "tkinter/constants.py"}
# A triple-quoted string that opens a module or stands on the first line of code after one that ends with a colon.
_DOCSTRING = re.compile(
  rb"""((?:\A|:[ \t]*(?:\#[^\n]*)?\n)(?:[ \t]*(?:\#[^\n]*)?\n)*[ \t]*[rRuU]?)(\"{3}|'{3})(.*?)(?<!\\)\2""", re.S | re.X
)
_SHORTEST_DOCSTRING = 24  # bytes; below, there is nothing to learn from


def load(domains: tuple[str, ...] = (), domain_bytes: int = 0, root: str | os.PathLike | None = None) -> DocumentList:
  """Documents of the library in `root` (default: the running Python's); as `synthetic.load`. Raises ConfigError."""
  chosen = tuple(domains) or DOMAINS
  check_known("dataset_domains", chosen, DOMAINS, "dataset_type=stdlib")
  library = Path(root if root is not None else sysconfig.get_path("stdlib"))
  paths = _modules(library)
  tables = [path for path in paths if path.startswith("encodings/") or path in _TABLE_MODULES]
  modules = [path for path in paths if path not in tables]
  readers = {"code": lambda: _whole("code", library, modules), "docstrings": lambda: _docstrings(library, modules),
             "manual": _manual, "tables": lambda: _whole("tables", library, tables)}  # fmt: skip
  documents: list[Document] = []
  for domain in chosen:
    if not (taken := take(readers[domain](), domain_bytes, domain, lambda one: len(one.text))):
      others = [name for name in chosen if name != domain]
      fix = f"use dataset_domains=[{','.join(others)}]" if others else "name another domain"
      what = "pydoc_data.topics" if domain == "manual" else "source files (*.py)"
      said = f"dataset_domains has '{domain}', but this Python ({sys.version.split()[0]}, library in {library}) has no"
      raise ConfigError(f"{said} {what}; {fix}, or run a Python that brings its library's source")
    documents.extend(taken)
  return DocumentList(documents, chosen)


def _modules(library: Path) -> list[str]:
  """Paths of the modules relative to the library, sorted, with `/` between the parts."""
  found = []
  for folder, subfolders, files in os.walk(library):
    subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and "site-packages" not in name]
    names = (name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
    found.extend(Path(folder, name).relative_to(library).as_posix() for name in names)
  return sorted(found)


def _read(library: Path, path: str) -> bytes:
  """A module's bytes; empty where it is not UTF-8, so that every document is valid text."""
  raw = (library / path).read_bytes()
  return raw if raw.decode("utf-8", "ignore").encode() == raw else b""


def _whole(domain: str, library: Path, modules: Iterable[str]) -> Iterator[Document]:
  for path in modules:
    text = _read(library, path)
    text = _DOCSTRING.sub(rb"\1\2\2", text) if domain == "code" else text
    if text.strip():
      yield Document(domain, path, 0, text)


def _docstrings(library: Path, modules: Iterable[str]) -> Iterator[Document]:
  for path in modules:
    for match in _DOCSTRING.finditer(_read(library, path)):
      if len(match[3]) >= _SHORTEST_DOCSTRING:
        yield Document("docstrings", path, match.start(3), match[3])


def _manual() -> Iterator[Document]:
  try:
    topics = importlib.import_module("pydoc_data.topics").topics
  except ImportError:
    return
  for topic in sorted(topics):
    yield Document("manual", f"pydoc_data/topics.py:{topic}", 0, topics[topic].encode("utf-8"))
