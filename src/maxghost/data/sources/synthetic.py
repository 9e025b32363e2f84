"""Generated documents in domains with different statistics, a function of the seed. For tests and timings."""

import numpy as np

from maxghost.data.hashing import combine, text_hash
from maxghost.data.sources.base import DocumentList, check_known, take
from maxghost.data.types import Document

DOMAINS = ("words", "digits", "brackets", "noise")
_DOCUMENTS_PER_DOMAIN = 256
_SHORTEST, _LONGEST = 40, 1500  # bytes
_WORDS = (b"ghost", b"light", b"river", b"stone", b"under", b"the", b"a", b"of", b"and", b"moves", b"keeps", b"slowly")


def load(domains: tuple[str, ...] = (), domain_bytes: int = 0, seed: int = 0) -> DocumentList:
  """`words` repeats a small lexicon, `digits` counts upwards, `brackets` nests, `noise` is random ASCII. domains: in
  this order; empty = all. domain_bytes: whole documents up to this many bytes each; 0 = 256 documents."""
  chosen = tuple(domains) or DOMAINS
  check_known("dataset_domains", chosen, DOMAINS, "dataset_type=synthetic")
  documents = []
  for domain in chosen:
    made = (Document(domain, f"synthetic/{domain}", n, _text(domain, n, seed)) for n in range(_DOCUMENTS_PER_DOMAIN))
    documents.extend(take(made, domain_bytes, domain, lambda one: len(one.text)))
  return DocumentList(documents, chosen)


def _text(domain: str, number: int, seed: int) -> bytes:
  draws = combine(combine(text_hash(domain), seed, number), np.arange(_LONGEST))
  length = _SHORTEST + int(draws[0] % np.uint64(_LONGEST - _SHORTEST))
  if domain == "words":
    text = b" ".join(_WORDS[int(draw) % len(_WORDS)] for draw in draws[: length // 4 + 1])
  elif domain == "digits":
    start = int(draws[1] % np.uint64(9000))
    text = b" ".join(str(start + step).encode() for step in range(length // 4 + 1))
  elif domain == "brackets":
    text = b"".join((b"(" * depth + b")" * depth) for depth in (int(draw) % 9 + 1 for draw in draws[: length // 8 + 1]))
  else:
    text = (draws[:length] % np.uint64(95) + np.uint64(32)).astype(np.uint8).tobytes()
  return text[:length]
