"""The score log: what it holds, how it is written and read. Nothing in here imports JAX."""

from maxghost.scorelog.reader import ScoreLog, load
from maxghost.scorelog.writer import Writer

__all__ = ["ScoreLog", "Writer", "load"]
