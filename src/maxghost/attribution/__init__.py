"""From scores to answers: the score log on disk, queries, the report. Nothing in here imports JAX."""

from maxghost.attribution.log import ScoreLog, load
from maxghost.attribution.store import ScoreWriter

__all__ = ["ScoreLog", "ScoreWriter", "load"]
