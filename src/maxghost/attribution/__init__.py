"""From scores to answers: queries over the score log, the report. Nothing in here imports JAX."""

from maxghost.scorelog import ScoreLog, load

__all__ = ["ScoreLog", "load"]
