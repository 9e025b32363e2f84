"""Query a run's score log into a pandas DataFrame: python examples/query_scores.py runs/base"""

import sys

import pandas as pd

from maxghost import attribution, config

try:
  log = attribution.load(sys.argv[1] if len(sys.argv) > 1 else "runs/base")
except config.ConfigError as error:  # such as a folder that does not exist
  sys.exit(str(error))

# Sums, intervals and units by a query, as `maxghost scores` makes them; the log is read in blocks.
answer = attribution.ask(log, attribution.Query(by="domain"))
domains = pd.DataFrame(answer.columns).set_index("domain")
print(domains[["tokens", "contribution", "per_million_tokens"]].round(4))

# The rows themselves, block by block; here the mean score by step and domain of the first validation set.
names = ["step", "domain", "tokens", "contribution"]
blocks = [
  pd.DataFrame({name: rows[name][:, 0] if rows[name].ndim > 1 else rows[name] for name in names})
  .assign(domain=shard.texts("domain")[rows["domain"]])
  .groupby(["step", "domain"], as_index=False)
  .sum()
  for shard, rows in log.blocks()
]
table = pd.concat(blocks).groupby(["step", "domain"]).sum().unstack()
print((table["contribution"] / table["tokens"] * 1e6).tail().round(2))
