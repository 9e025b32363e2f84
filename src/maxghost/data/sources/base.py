"""The interface of a data source: random access to documents by number, and what the reader asks beyond the text."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from maxghost.config import ConfigError, did_you_mean
from maxghost.config.plugins import REFERENCE_COLUMNS
from maxghost.data.hashing import combine, content_hashes, text_hash
from maxghost.data.types import Document, DocumentId

T = TypeVar("T")
_REPAIR = "repair or remove it"
# Columns of documents that are no plain text, by `config.plugins.Objective.records`.
COLUMNS = {"conversations": ("messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs"),
           "pairs": ("prompt", "chosen", "rejected", "tools", "chat_template_kwargs", *REFERENCE_COLUMNS)}  # fmt: skip


class Kept(tuple[str, ...]):
  """Columns of records that are no plain text: a document is a JSON object of those columns that its record has."""


class CorruptError(ValueError):
  """A document or file cannot be read. The text is one line: the file, the place in it and the reason. where: returns
  the place, if `said` is only the reason. It is called when the text is shown or leaves the process, because finding
  the line number of a document takes as long as reading the file."""

  def __init__(self, said: str, where: Callable[[], str] | None = None):
    super().__init__(said, where)

  def __str__(self) -> str:
    said, where = self.args
    return " ".join((f"{where()}: {said}" if where else said).split())

  def __reduce__(self):
    return type(self), (str(self),)  # another process may lack what `where` needs


class Source(Protocol):
  """Random access to documents; has the shape of `grain.sources.RandomAccessDataSource`.

  domains: names in a fixed order. fingerprint: changes when the data behind the source changes. files: fingerprint of
  each file; empty for a source without files of its own. num_bytes: of all text (an estimate where the format does not
  record them). notes: lines to show the user. fields: what the score log keeps of each record (`document_fields`).
  """

  domains: tuple[str, ...]
  fingerprint: str
  files: dict[str, str]
  num_bytes: int
  notes: tuple[str, ...] = ()
  fields: tuple[str, ...] = ()

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Document:
    (text,) = self.texts(np.array([index]))
    return Document(*self.document_id(index), text)

  def document_id(self, index: int) -> DocumentId:
    """The id of a document, without reading its text where the format allows that."""
    ...

  def place(self, index: int) -> str:
    """The file of a document and its place there, for a message."""
    return self.document_id(index).shown

  def document_fields(self, index: int) -> tuple[str, ...]:
    """The texts of `fields` of a document. Raises ConfigError for one that cannot be read, or gives empty ones."""
    return ("",) * len(self.fields)

  def domain_numbers(self, indices: np.ndarray) -> np.ndarray:
    """int64[n]: the place in `domains` of each document."""
    ...

  def id_hashes(self, indices: np.ndarray) -> np.ndarray:
    """uint64[n]: a hash of each document's id; decides the split."""
    ...

  def texts(self, indices: np.ndarray) -> list[bytes]:
    """The documents' texts. Raises CorruptError."""
    ...

  def sizes(self, indices: np.ndarray) -> np.ndarray | None:
    """int64[n]: bytes of the texts; None where the texts have to be read for that."""
    return None

  def content_hashes(self, indices: np.ndarray) -> np.ndarray:
    """uint64[n]: `hashing.content_hashes` of the texts. Raises CorruptError."""
    return content_hashes(self.texts(indices))


def id_hash(domain: str, path: str, offset: int | np.ndarray) -> np.ndarray:
  """uint64 hash of ids that share domain and path."""
  return combine(text_hash(domain, path), offset)


def refusal(error: ValueError | str, on_corrupt: str, fix: str = _REPAIR) -> ConfigError:
  """The error of what on_corrupt=error or stop does not leave out; stop: the reader cannot set the key."""
  return ConfigError(f"{error}; {fix}{', or use on_corrupt=skip' if on_corrupt == 'error' else ''}")


def left_out(error: CorruptError, on_corrupt: str) -> str:
  """The note that a file is left out. Raises ConfigError unless on_corrupt=skip."""
  if on_corrupt != "skip":
    raise refusal(error, on_corrupt) from error
  return f"left out: {error}"


def read_or_skip(read: Callable[[np.ndarray], Iterable[T]], indices: np.ndarray, on_corrupt: str = "skip",
                 fix: str = _REPAIR) -> list[T | None]:  # fmt: skip
  """The results of `read`, one for each index; None for a corrupt one. Unless on_corrupt=skip, ConfigError names it."""
  try:
    return [*read(indices)]
  except CorruptError as error:
    if on_corrupt != "skip":
      raise refusal(error, on_corrupt, fix) from error
  out: list[T | None] = []
  for index in indices:
    try:
      out.extend(read(np.array([index])))
    except CorruptError:
      out.append(None)
  return out


def read_all(read: Callable[[list[int]], list[T]], records: list[int], errors: Any, where: str) -> list[T]:
  """What a library's `read` gives. Where it raises one of `errors`, CorruptError names the record."""
  try:
    return read(records)
  except errors:
    for record in records:
      try:
        read([record])
      except errors as error:
        raise CorruptError(f"{where}, record {record}: {error}") from error
    raise


class DocumentList(Source):
  """A source whose documents are in memory. Raises ConfigError for what is no document of one of the domains."""

  def __init__(self, documents: Iterable[Document], domains: tuple[str, ...]):
    form = f"Document(domain, path, offset, text), with a domain of {domains}, a whole offset, and the text in bytes"
    for d in (documents := [*documents]):
      fits = isinstance(d, Document) and isinstance(d.offset, int | np.integer) and isinstance(d.text, bytes)
      if not fits or d.domain not in domains:
        raise ConfigError(f"a document of the list is {d!r:.100}; give {form}")
    self.documents, self.domains, self.files = documents, domains, {}
    self._sizes = np.array([len(d.text) for d in documents], np.int64)
    self.num_bytes = int(self._sizes.sum())
    parts = (part for d in documents for part in (d.domain, d.path, str(d.offset), d.text))
    self.fingerprint = f"{text_hash(*parts):016x}"
    self._domain_numbers = np.array([domains.index(d.domain) for d in documents], np.int64)
    paths = np.array([text_hash(d.domain, d.path) for d in documents], np.uint64)
    self._id_hashes = combine(paths, np.array([d.offset for d in documents], np.int64))

  def __len__(self) -> int:
    return len(self.documents)

  def document_id(self, index: int) -> DocumentId:
    return self.documents[index].id

  def domain_numbers(self, indices: np.ndarray) -> np.ndarray:
    return self._domain_numbers[indices]

  def id_hashes(self, indices: np.ndarray) -> np.ndarray:
    return self._id_hashes[indices]

  def texts(self, indices: np.ndarray) -> list[bytes]:
    return [self.documents[index].text for index in indices.tolist()]

  def sizes(self, indices: np.ndarray) -> np.ndarray:
    return self._sizes[indices]


def take(items: Iterable[T], cap: int, domain: str, size: Callable[[T], int]) -> list[T]:
  """The first of some documents, up to `cap` bytes together (0 = no cap). Raises ConfigError for too low a cap."""
  taken, total = [], 0
  for item in items:
    if cap and (total := total + size(item)) > cap:
      if taken:
        break
      raise too_low_cap(cap, domain, total)
    taken.append(item)
  return taken


def too_low_cap(cap: int, domain: str, first_bytes: int) -> ConfigError:
  said = f"dataset_domain_bytes={cap} is below the first document of domain '{domain}', which has {first_bytes} bytes"
  return ConfigError(f"{said}; use {first_bytes} or more, or 0 for no cap")


def check_known(key: str, names: Iterable[str], known: Iterable[str], owner: str) -> None:
  """Raises ConfigError for the first name in the value of `key` that `owner` does not have. known: those it has."""
  known = tuple(known)
  for name in names:
    if name not in known:
      hint = did_you_mean(name, known, f"{owner} has")
      raise ConfigError(f"{key} has '{name}', which {owner} does not have{hint}")


def utf8(path: str, offset: int, raw: bytes) -> bytes:
  """`raw` when it is UTF-8. Raises CorruptError naming the byte."""
  try:
    raw.decode("utf-8")
  except UnicodeDecodeError as error:
    raise CorruptError(f"{path} at byte {offset + error.start}: not UTF-8 ({error.reason})") from error
  return raw


def columns_of(columns: Sequence[str], known: Collection[str], owner: str) -> tuple[str, ...]:
  """Those of `train_data_columns` to read from `owner`, which has the columns `known`. Raises ConfigError."""
  found = tuple(name for name in columns if name in known)
  if not isinstance(columns, Kept):
    check_known("train_data_columns", columns, known, owner)
  elif not found:
    needed = ", ".join(columns).partition(", tools")[0]  # what follows are additions
    raise ConfigError(f"{owner} has {', '.join(known) or 'no fields'}; its records need one of {needed}")
  return found


def join_columns(where: Callable[[], str], record: Any, columns: Sequence[str]) -> bytes:
  """A record's text columns joined by line ends, null as empty; of `Kept` columns their JSON. where: gives the place
  of the record for a message, which may take as long as reading the file. Raises CorruptError."""
  values, record = [], record if isinstance(record, dict) else {}
  if isinstance(columns, Kept):
    kept = {column: record[column] for column in columns if record.get(column) is not None}
    values, columns = [json.dumps(kept, ensure_ascii=False, default=as_text)], ()
  for column in columns:
    if (value := record.get(column, 0)) is None:
      value = ""
    if isinstance(value, bytes):
      value = utf8(f"{where()}, column {column}", 0, value).decode("utf-8")
    if not isinstance(value, str):
      raise CorruptError(f"no text in column '{column}'", where)
    values.append(value)
  try:
    return "\n".join(values).encode("utf-8")
  except UnicodeEncodeError as error:
    raise CorruptError(f"half of a surrogate pair in the text ({error.reason})", where) from error


def wanted_fields(asked: Sequence[str]) -> dict[str, str]:
  """{name in the log: field of the records} of `document_fields`; empty = `id`."""
  return {name: field or name for name, _, field in (text.partition("=") for text in asked or ("id",))}


def without_nulls(value: Any) -> Any:
  """A value of an Arrow table without the nulls of its structs, each of which has the fields of all rows."""
  if isinstance(value, dict):
    return {name: without_nulls(one) for name, one in value.items() if one is not None}
  return [without_nulls(one) for one in value] if isinstance(value, list) else value


def as_text(value: Any) -> str:
  """The value of a field as the score log keeps it: a text as it is, nothing as an empty text, else JSON."""
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, bytes):
    value = value.decode("utf-8", errors="replace")
  return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
