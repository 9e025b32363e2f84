"""GB/s of saving and restoring a state by the trainer's own checkpoint manager, without a trainer.

  python benchmarks/checkpoint_speed.py [key=value ...]     a fresh state of this configuration
  python benchmarks/checkpoint_speed.py --folder /mnt/disk  on another disk than that of temporary files

Each turn saves, syncs, restores and compares every array; what the system keeps in memory of a file is read from there.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

import _measure
from _measure import Figure

SIZES = ("base_emb_dim=512", "base_mlp_dim=2048", "vocab_size=8192", "base_num_decoder_layers=8")


def main() -> int:
  args = _measure.arguments(__doc__, folder="", turns=3)
  import jax
  import numpy as np
  from flax import nnx

  from maxghost import config
  from maxghost.checkpoint.manager import CheckpointManager
  from maxghost.training import state

  cfg = config.load(str(_measure.BASE), *SIZES, *args.overrides)
  tree = state.to_tree(nnx.state(state.create(cfg)))
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
  size = sum(x.nbytes for x in jax.tree.leaves(tree))
  rows, folder = [], Path(tempfile.mkdtemp(dir=args.folder or None))
  try:
    for turn in range(args.turns):
      manager = CheckpointManager(folder / str(turn), asynchronous=False, say=lambda _: None)
      begin = time.perf_counter()
      manager.save(1, tree, {})
      manager.wait()
      saved = time.perf_counter()
      restored = manager.restore_latest(abstract)
      done = time.perf_counter()
      manager.close()
      assert restored is not None
      same = jax.tree.map(np.array_equal, restored.tree, tree)
      assert all(jax.tree.leaves(same)), "what was restored differs from what was saved"
      rows.append({"turn": turn, "MB": size / 1e6, "save GB/s": size / 1e9 / (saved - begin),
                   "restore GB/s": size / 1e9 / (done - saved)})  # fmt: skip
      shutil.rmtree(folder / str(turn))
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  best = {what: max(row[what] for row in rows) for what in ("save GB/s", "restore GB/s")}
  return _measure.publish(
    "checkpoint_speed", rows, [Figure(what, value) for what, value in best.items()], path=args.json
  )


if __name__ == "__main__":
  sys.exit(_measure.run(main))
