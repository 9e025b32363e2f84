"""From scores to answers: queries over the score log, the report. Nothing in here imports JAX."""

from maxghost.attribution.query import Answer, Query, ask
from maxghost.scorelog import ScoreLog, load

__all__ = ["Answer", "Query", "ScoreLog", "ask", "load"]
