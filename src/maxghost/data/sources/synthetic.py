"""Made-up documents: several domains of unlike statistics, a function of the seed alone. For tests and timings."""

import numpy as np

from maxghost.config import ConfigError, did_you_mean
from maxghost.data.hashing import combine, text_hash
from maxghost.data.sources.base import DocumentList
from maxghost.data.types import Document

DOMAINS = ("words", "digits", "brackets", "noise")
_DOCUMENTS_PER_DOMAIN = 256
_SHORTEST, _LONGEST = 40, 1500  # bytes
_WORDS = (b"ghost", b"light", b"river", b"stone", b"under", b"the", b"a", b"of", b"and", b"moves", b"keeps", b"slowly")


def load(domains: tuple[str, ...] = (), domain_bytes: int = 0, seed: int = 0) -> DocumentList:
  """`words` repeats a small lexicon, `digits` counts upwards, `brackets` nests, `noise` is random ASCII.

  domain_bytes: stop a domain before this many bytes; 0 = 256 documents each.
  """
  chosen = tuple(domains) or DOMAINS
  for domain in chosen:
    if domain not in DOMAINS:
      hint = did_you_mean(domain, DOMAINS) or f"; the synthetic data has {', '.join(DOMAINS)}"
      raise ConfigError(f"dataset_domains has '{domain}', which dataset_type=synthetic does not know{hint}")
  documents = []
  for domain in chosen:
    size = 0
    for number in range(_DOCUMENTS_PER_DOMAIN):
      text = _text(domain, number, seed)
      size += len(text)
      if domain_bytes and size > domain_bytes:
        if not number:
          raise ConfigError(
            f"dataset_domain_bytes={domain_bytes} is below the first document of domain '{domain}', which has {size} "
            f"bytes; use {size} or more, or 0 for no cap"
          )
        break
      documents.append(Document(domain, f"synthetic/{domain}", number, text))
  return DocumentList(documents, chosen)


def _text(domain: str, number: int, seed: int) -> bytes:
  key = combine(text_hash(domain), seed, number)
  draws = combine(key, np.arange(_LONGEST))
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
