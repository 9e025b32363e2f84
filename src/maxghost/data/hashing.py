"""Stable 64-bit hashes and pseudo-random orders: the same on every machine, process and NumPy version; checksums."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


def text_hash(*parts: str | bytes) -> int:
  """A 64-bit hash of the parts in order; ("ab", "c") and ("a", "bc") differ."""
  digest = hashlib.blake2b(digest_size=8)
  for part in parts:
    raw = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
    digest.update(len(raw).to_bytes(8, "little"))
    digest.update(raw)
  return int.from_bytes(digest.digest(), "little")


def content_hashes(texts: Iterable[bytes]) -> np.ndarray:
  """uint64[n]: a hash of each text; two different texts collide with probability 5e-20."""
  digests = [hashlib.blake2b(text, digest_size=8).digest() for text in texts]
  return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def mix(x: np.ndarray | int) -> np.ndarray:
  """SplitMix64's finalizer: a bijection of uint64 whose output bits each depend on all input bits. Source: Steele, Lea
  and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014."""
  with np.errstate(over="ignore"):
    x = np.asarray(x).astype(np.uint64) + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def combine(*values: np.ndarray | int) -> np.ndarray:
  """One uint64 hash of several integers (arrays broadcast)."""
  state: np.ndarray = np.asarray(np.uint64(0))
  for value in values:
    state = mix(np.asarray(value).astype(np.uint64) ^ state)
  return state


def permutation(size: int, *seeds: int) -> np.ndarray:
  """int64[size]: a pseudo-random permutation of 0..size-1, a function of the seeds."""
  return np.argsort(combine(*seeds, np.arange(size)), kind="stable")


def shuffled_index(positions: np.ndarray, size: int, *seeds: int) -> np.ndarray:
  """Elements at `positions` of a pseudo-random permutation of 0..size-1, without storing the permutation. A four-round
  Feistel network on the next even number of bits, repeated until the value is below `size` (fewer than four times on
  average). positions: int64[n], each in [0, size). Returns int64[n]."""
  half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
  mask, keys = np.uint64((1 << int(half)) - 1), [combine(*seeds, number) for number in range(4)]
  out = np.array(positions, np.uint64)
  todo = np.arange(out.size)
  while todo.size:
    left, right = out[todo] >> half, out[todo] & mask
    for round_key in keys:
      left, right = right, left ^ (mix(right ^ round_key) & mask)
    value = (left << half) | right
    out[todo] = value
    todo = todo[value >= np.uint64(size)]
  return out.astype(np.int64)


def changed_keys(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
  """Names with another fingerprint in one than in the other, sorted."""
  return sorted(name for name in {*then, *now} if then.get(name) != now.get(name))


def sha256(path: str | os.PathLike) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def changed_files(folder: Path, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
  """(name, sentence) of each file whose bytes have another SHA-256 than `known`, or that is missing."""
  for name, wanted in known.items():
    found = sha256(folder / name) if (folder / name).is_file() else "missing"
    if found != wanted:
      yield name, f"{folder / name}: checksum {found[:16]}, written as {wanted[:16]}"
