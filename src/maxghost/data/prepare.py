"""Writes a prepared corpus: several processes tokenize a source, part by part.

A part is a range of the source's documents and becomes one ArrayRecord shard. Its columns and its manifest (counts and
checksums) are written last; after an interrupt parts without them are written again. At the end, columns are joined.
"""

import contextlib
import json
import multiprocessing
import os
import signal
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxghost.config import ConfigError, DataConfig
from maxghost.config.files import check_seal, locked, sealed, write_text, write_whole
from maxghost.config.values import import_package, naming
from maxghost.data import prepared, tokenizer_files
from maxghost.data.hashing import changed_files, changed_keys, content_hashes, sha256, text_hash
from maxghost.data.packing import token_dtype
from maxghost.data.sources.base import Source, read_or_skip
from maxghost.data.split import scan
from maxghost.data.tokenizers import HUGGINGFACE, Tokenizer, load_tokenizer
from maxghost.data.windows import concatenated, end_with_parent

PART_BYTES = 64 << 20  # text of a part
BLOCK_TOKENS = 1 << 15  # tokens of a block, unless one document has more
_READ_BYTES = 4 << 20  # text read and tokenized together
_BPE_BYTES = 100 << 20  # text that a BPE is trained on
_Document = tuple[int, np.ndarray, np.ndarray]  # number of the domain, tokens, and source bytes of each
_JOB, _ELSEWHERE = "job.json", "give another --output, or remove this folder"
_OURS = ("tokenizer.json", ".tokenizer.json.", ".job.json.")  # left by a command that was killed before it had a job
_SHARD_OPTIONS = "group_size:1,uncompressed"  # random access; decompressing would cost more than reading


class Job(NamedTuple):
  """What the processes share."""

  source: Source
  tokenizer: Tokenizer
  cfg: DataConfig
  folder: Path
  part_documents: int
  num_parts: int


def prepare(source: Source, cfg: DataConfig, folder: str, *, num_workers: int = 1, part_bytes: int = PART_BYTES,
            progress: Callable[[dict], None] = lambda manifest: None) -> dict:  # fmt: skip
  """Tokenizes a source into a folder, whose complete parts are kept; returns the JSON part of the index.

  part_bytes: approximate text of a part. progress: called with the manifest of each complete part. Raises ConfigError
  when the folder holds another corpus, or a document is corrupt and on_corrupt is "error".
  """
  tokenizer = load_tokenizer(cfg.tokenizer_type, cfg.tokenizer_path)
  part_documents = max(1, part_bytes // max(1, source.num_bytes // len(source)))
  job = Job(source, tokenizer, cfg, Path(folder), part_documents, -(-len(source) // part_documents))
  with locked(job.folder):
    _claim(job)
    done = _write_parts(job, num_workers, progress)
    with naming("", job.folder):
      return _join(job, [done[part] for part in range(job.num_parts)])


def _write_parts(job: Job, num_workers: int, progress: Callable) -> dict[int, dict]:
  """Writes the parts that are missing; the manifests of all."""
  done = {part: manifest for part in range(job.num_parts) if (manifest := _manifest(job, part)) is not None}
  todo = [part for part in range(job.num_parts) if part not in done]
  for manifest in done.values():
    progress(manifest)
  if num_workers == 1:
    for part in todo:
      done[part] = _write_part(job, part)
      progress(done[part])
  elif todo:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_workers, len(todo)), context, _start_worker, (job,)) as pool:
      try:
        futures = {pool.submit(_work, part): part for part in todo}
        for future in as_completed(futures):
          done[futures[future]] = future.result()
          progress(future.result())
      except BrokenProcessPool as error:
        why = f"perhaps for want of memory: use fewer --workers than {num_workers}"
        raise OSError(f"a process was ended from outside, {why}; the same command continues") from error
      except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
  return done


def _manifest(job: Job, part: int) -> dict | None:
  """A part's manifest if its columns are as they were written, the shard has its full size, and on_corrupt allows what
  was skipped; else None."""
  base = job.folder / "parts" / f"{part:05d}"
  try:
    manifest = check_seal(json.loads(base.with_suffix(".json").read_text(encoding="utf-8")))
    same = (job.folder / "shards" / manifest["name"]).stat().st_size == manifest["size"]
    same &= manifest.get("columns", "") in ("", sha256(base.with_suffix(".npz")))  # "": of an earlier version
    same &= job.cfg.on_corrupt == "skip" or not manifest["corrupt"]
  except (KeyError, OSError, ValueError):
    return None
  return manifest if same else None


def verify(folder: str) -> list[str]:
  """A line for each file whose checksum differs; `prepare` writes these shards again."""
  try:
    meta = prepared.read_index(Path(folder))
  except ConfigError as error:
    return list(error.problems)
  problems = [sentence for _, sentence in changed_files(Path(folder) / "index", meta.get("index", {}))]
  shards = {shard["name"]: shard["sha256"] for shard in meta["shards"]}
  for name, sentence in changed_files(Path(folder) / "shards", shards):
    problems.append(sentence)
    (Path(folder) / "parts" / f"{list(shards).index(name):05d}.json").unlink(missing_ok=True)
  return [f"{problem}; prepare again to redo it" for problem in problems]


def check_folder(folder: Path) -> None:
  """Raises ConfigError for a folder with other files than those of `prepare`."""
  there = folder.iterdir() if folder.is_dir() and not (folder / _JOB).is_file() else ()
  if any(not entry.name.startswith(_OURS) for entry in there):
    raise ConfigError(f"{folder} is not empty and holds no prepared corpus; give another --output")


def _claim(job: Job) -> None:
  """Claims the folder for this job. Raises ConfigError when it holds another one that has written something."""
  folder, source, replaced = job.folder, job.source, False
  mine = {"source": source.fingerprint, "tokenizer": job.tokenizer.fingerprint, "part_documents": job.part_documents,
          "num_documents": len(source), "version": prepared.INDEX_VERSION, "files": source.files,
          **({"fields": [*source.fields]} if source.fields else {})}  # fmt: skip
  if (asked := (*job.cfg.train_data_columns, *job.cfg.document_fields)) != ("text",):
    mine["columns"] = [*asked]
  file = folder / _JOB
  check_folder(folder)
  if file.is_file():
    try:
      other = json.loads(file.read_text(encoding="utf-8"))
      changed = changed_keys(other.get("files", {}), source.files)
      other.pop("on_corrupt", None)  # of an earlier version
    except (ValueError, AttributeError) as error:
      raise ConfigError(f"{file} is damaged ({error}); {_ELSEWHERE}") from error
    if replaced := other != mine:  # as of a job that a corrupt document stopped in its first part
      written = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".tmp" and path != file)
      if "part_documents" not in other or any(written):
        what = ", ".join(changed[:5] or [key for key in {**mine, **other} if mine.get(key) != other.get(key)])
        raise ConfigError(f"{folder} holds a corpus prepared from other data or settings ({what}); {_ELSEWHERE}")
  try:
    if replaced or not file.is_file():
      write_text(file, json.dumps(mine, indent=1))
    for name in ("shards", "parts", "index"):
      (folder / name).mkdir(exist_ok=True)
    for partial in folder.glob("**/*.tmp"):
      partial.unlink()
  except OSError as error:
    raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error


_worker: dict[str, Job] = {}


def _start_worker(job: Job) -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C and ends the others
  end_with_parent()
  os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes run in parallel already
  _worker["job"] = job


def _work(part: int) -> dict:
  return _write_part(_worker["job"], part)


def _write_part(job: Job, part: int) -> dict:
  from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]  # compiled

  base = job.folder / "parts" / f"{part:05d}"
  shard = job.folder / "shards" / f"part-{part:05d}-of-{job.num_parts:05d}.array_record"
  scratch = shard.with_suffix(".tmp")
  names = [*prepared.DOCUMENT_COLUMNS, *prepared.BLOCK_COLUMNS]
  names += ["field", "field_length"] if job.source.fields else []  # all as one text, and the length of each
  columns: dict[str, list] = {name: [] for name in names if name != "token_end"}
  paths, counts = {}, dict.fromkeys(("empty", "corrupt"), 0)
  writer = array_record_module.ArrayRecordWriter(os.fsencode(scratch), _SHARD_OPTIONS)
  dtype, lengths = token_dtype(job.tokenizer.vocab_size), []
  for block in _blocks(_documents(job, part, columns, paths, counts)):
    columns["block_first"].append([len(lengths)])
    domains, tokens, sizes = zip(*block, strict=True)
    columns["block_domain"].append(domains[:1])
    ids, behind, table = np.concatenate(tokens), np.concatenate(sizes), job.tokenizer.byte_table
    known = table is not None and np.array_equal(table[ids], behind)
    raw = ids.astype(dtype).tobytes()
    writer.write(raw if known else raw + behind.astype(np.uint32).tobytes())
    lengths.extend(map(len, tokens))
  writer.close()
  arrays: dict[str, Any] = {name: concatenated(values) for name, values in columns.items()}
  arrays["length"] = np.array(lengths, np.int64)
  with write_whole(base.with_suffix(".npz")) as file:
    np.savez(file, **arrays, paths=np.array(json.dumps(list(paths))))
  os.replace(scratch, shard)
  manifest = {"name": shard.name, "sha256": sha256(shard), "size": shard.stat().st_size, "tokens": sum(lengths),
              "blocks": len(arrays["block_first"]), "documents": len(lengths), **counts,
              "bytes": int(arrays["num_bytes"].sum()), "columns": sha256(base.with_suffix(".npz"))}  # fmt: skip
  write_text(base.with_suffix(".json"), json.dumps(sealed(manifest)))
  return manifest


def _documents(job: Job, part: int, columns: dict[str, list], paths: dict, counts: dict) -> Iterator[_Document]:
  """A part's documents that hold text, read a few megabytes at a time. Adds to the columns, paths and counts."""
  source, tokenizer = job.source, job.tokenizer
  step = max(1, _READ_BYTES // max(1, source.num_bytes // len(source)))
  first, stop = part * job.part_documents, min((part + 1) * job.part_documents, len(source))
  for indices in scan(stop, step, first):
    read = read_or_skip(source.texts, indices, job.cfg.on_corrupt)
    counts["corrupt"] += sum(text is None for text in read)
    counts["empty"] += sum(text == b"" for text in read)
    numbers = indices[[bool(text) for text in read]]
    texts = [text for text in read if text]
    if not texts:
      continue
    ids = [source.document_id(index) for index in numbers.tolist()]
    columns["id_hash"].append(source.id_hashes(numbers))
    columns["content_hash"].append(content_hashes(texts))
    columns["num_bytes"].append([len(text) for text in texts])
    columns["offset"].append([one.offset for one in ids])
    columns["path"].append([paths.setdefault((one.domain, one.path), len(paths)) for one in ids])
    if source.fields:
      fields = [text.encode("utf-8", "replace") for n in numbers.tolist() for text in source.document_fields(n)]
      columns["field"].append(np.frombuffer(b"".join(fields), np.uint8))
      columns["field_length"].append([len(text) for text in fields])
    encoded = tokenizer.encode_bytes(texts)
    for domain, (tokens, sizes) in zip(source.domain_numbers(numbers).tolist(), encoded, strict=True):
      yield domain, tokens, sizes


def _blocks(documents: Iterator[_Document]) -> Iterator[list[_Document]]:
  """Consecutive documents of one domain, until they have enough tokens."""
  block, size = [], 0
  for document in documents:
    if block and (document[0] != block[0][0] or size >= BLOCK_TOKENS):
      yield block
      block, size = [], 0
    block.append(document)
    size += len(document[1])
  if block:
    yield block


def _join(job: Job, manifests: list[dict]) -> dict:
  """Joins the parts' columns into the index and writes its JSON last."""
  index, names, fields = job.folder / "index", job.source.domains, job.source.fields
  num_documents, num_blocks = (sum(manifest[key] for manifest in manifests) for key in ("documents", "blocks"))
  if not num_documents:
    raise ConfigError("there is nothing to prepare: every document is empty or corrupt")
  sizes = dict.fromkeys(prepared.DOCUMENT_COLUMNS, num_documents) | dict.fromkeys(prepared.BLOCK_COLUMNS, num_blocks)
  kinds = {**prepared.COLUMNS, prepared.FIELD_END: np.int64, "field": np.uint8}
  documents = tokens = field_bytes = 0
  totals = np.zeros((2, len(names)), np.int64)  # documents, bytes
  paths, path_end, path_domain = bytearray(), array("q"), array("H")  # flat: perhaps a path per document
  with contextlib.ExitStack() as stack:
    sizes |= {prepared.FIELD_END: num_documents * len(fields)} if fields else {}
    files = {name: stack.enter_context(open(index / f"{name}.npy", "wb")) for name in sizes}
    for name, size in sizes.items():
      header = {"descr": np.dtype(kinds[name]).str, "fortran_order": False, "shape": (size,)}
      np.lib.format.write_array_header_1_0(files[name], header)
    if fields:
      files["field"] = stack.enter_context(open(index / prepared.FIELD_TEXTS, "wb"))
    for part in range(job.num_parts):
      with np.load(job.folder / "parts" / f"{part:05d}.npz") as loaded:
        new = dict(loaded)
      if not len(new["path"]):
        continue
      new["path"] = new["path"] + len(path_end)
      for domain, path in json.loads(str(new.pop("paths"))):
        paths += path.encode("utf-8", "surrogateescape")
        path_end.append(len(paths))
        path_domain.append(names.index(domain))
      domains = np.frombuffer(path_domain, np.uint16)[new["path"]]
      totals[0] += np.bincount(domains, minlength=len(names))
      totals[1] += np.bincount(domains, new["num_bytes"], len(names)).astype(np.int64)
      new["token_end"] = tokens + np.cumsum(new.pop("length"))
      new["block_first"] = new["block_first"] + documents
      if fields:
        new[prepared.FIELD_END] = field_bytes + np.cumsum(new.pop("field_length"))
        field_bytes += len(new["field"])
      for name, values in new.items():
        files[name].write(values.astype(kinds[name]).tobytes())
      documents, tokens = documents + len(new["path"]), int(new["token_end"][-1])
  (index / "paths.bin").write_bytes(paths)
  for name, values in (("path_end", path_end), ("path_domain", path_domain)):
    np.save(index / f"{name}.npy", np.array(values, prepared.COLUMNS[name]))
  meta = {"version": prepared.INDEX_VERSION, "fingerprint": f"{text_hash(*(m['sha256'] for m in manifests)):016x}",
          "tokenizer": _copy_tokenizer(job), "domains": list(names), "fields": list(fields),
          "domain_documents": dict(zip(names, totals[0].tolist(), strict=True)),
          "domain_bytes": dict(zip(names, totals[1].tolist(), strict=True)), "tokens": tokens,
          "empty": sum(m["empty"] for m in manifests), "corrupt": sum(m["corrupt"] for m in manifests),
          "shards": [{key: m[key] for key in ("name", "sha256", "size", "blocks")} for m in manifests],
          "index": {path.name: sha256(path) for path in sorted(index.iterdir())}}  # fmt: skip
  write_text(job.folder / prepared.INDEX_FILE, json.dumps(sealed(meta), indent=1))
  return meta


def _copy_tokenizer(job: Job) -> dict:
  """The tokenizer's entry in the index; copies its files into the folder."""
  tokenizer, kind, path = job.tokenizer, job.cfg.tokenizer_type, job.cfg.tokenizer_path
  copied = tokenizer.path is not None and tokenizer.path.is_file()
  if copied:
    tokenizer_files.save(tokenizer, kind, job.folder)
    path = "tokenizer.json" if kind == HUGGINGFACE else Path(tokenizer_files.saved_path(kind, job.folder) or "").name
  return {"type": kind, "path": path, "copied": copied, "fingerprint": tokenizer.fingerprint,
          "vocab_size": tokenizer.vocab_size}  # fmt: skip


def train_bpe(source: Source, vocab_size: int, path: str) -> None:
  """Trains a byte-level BPE of `vocab_size` ids, specials first, and writes its tokenizer.json. Raises ConfigError."""
  tokenizers = import_package("tokenizers", "--train_bpe")
  if vocab_size < 259:
    raise ConfigError(f"--train_bpe {vocab_size} is below the 259 ids of bytes and specials; use 259 or more")
  inner, bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers.ByteLevel
  inner.pre_tokenizer, inner.decoder = bytes_only(add_prefix_space=False), tokenizers.decoders.ByteLevel()
  known = {"special_tokens": ["<|bos|>", "<|eos|>", "<|pad|>"], "initial_alphabet": bytes_only.alphabet()}
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **known)
  stride = max(1, source.num_bytes // _BPE_BYTES)

  def texts() -> Iterator[str]:
    for indices in scan(len(source)):
      for some in np.array_split(indices[::stride], max(1, len(indices) // stride // 256)):
        yield from (text.decode("utf-8") for text in read_or_skip(source.texts, some) if text)

  inner.train_from_iterator(texts(), trainer)
  Path(path).parent.mkdir(parents=True, exist_ok=True)
  write_text(Path(path), inner.to_str(pretty=False))
