"""Checkpoints for the tests of the converter and the comparator: MaxText's own, and synthetic ones written by Orbax."""

import tarfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from maxghost.checkpoint.layouts import LINEN, NNX, ReadOptions, read_checkpoint
from maxghost.checkpoint.layouts_layers import LayerReader
from maxghost.checkpoint.layouts_store import nested, tree_from_memory
from maxghost.interop.convert import read_block
from maxghost.interop.convert_plan import Target, make_plan

FIXTURES = Path(__file__).parents[1] / "fixtures" / "maxtext"
REAL = ("linen_scanned", "linen_unscanned", "nnx_scanned", "nnx_unscanned", "linen_moe_scanned", "nnx_muon_scanned")
# Pairwise different: layers, embed, mlp, heads, width, vocabulary, experts.
L, E, M, H, D, V, X = 3, 5, 7, 2, 4, 11, 6


def unpack(name: str, folder: Path) -> Path:
  """The step folder `2` of a real MaxText checkpoint."""
  with tarfile.open(FIXTURES / f"{name}.tar.gz") as tar:
    tar.extractall(folder / name, filter="data")
  return folder / name / "2"


def save(folder: Path, tree, **custom_metadata) -> Path:
  """Writes `tree` as one item folder with Orbax."""
  with ocp.PyTreeCheckpointer(use_ocdbt=True, use_zarr3=True) as checkpointer:
    checkpointer.save(folder, tree, custom_metadata=custom_metadata or None)
  return folder


def convert_tree(tree: Any, to: str = "", *, read: ReadOptions | None = None, **wishes: Any) -> dict:
  """A tree in memory (dicts, lists, tuples, optax NamedTuples, nnx.State) in layout `to`, as nested dicts and lists.

  Random keys come back as typed keys where they went in as such.
  """
  checkpoint = read_checkpoint(tree_from_memory(tree), read, strict=True)
  plan = make_plan(checkpoint, Target(to or (NNX if checkpoint.layout == LINEN else LINEN), **wishes))
  empties = {"Dict": dict, "List": list, "Tuple": tuple}
  flat: dict[tuple, Any] = {path: empties.get(empty.kind, lambda: None)() for path, empty in plan.empties}
  reader = LayerReader(1 << 31)
  for leaf in plan.leaves:
    words = read_block(reader, leaf)
    is_key = leaf.key_impl is not None
    flat[leaf.path] = jax.random.wrap_key_data(jnp.asarray(words), impl=leaf.key_impl) if is_key else words
  return _with_lists(nested(flat))


def _with_lists(tree: Any) -> Any:
  """Lists in place of the dicts whose keys are all integers."""
  if not isinstance(tree, dict) or not tree:
    return tree
  held = {key: _with_lists(child) for key, child in tree.items()}
  return [held[i] for i in sorted(held)] if all(isinstance(key, int) for key in held) else held


def orbax_leaves(folder: Path) -> dict[tuple, np.ndarray | None]:
  """Every leaf by path as Orbax itself reads it: arrays, the words of random keys, None for what is empty."""
  import jax

  folder = folder / "items" if (folder / "items").is_dir() else folder

  def is_leaf(node):
    return node is None or (isinstance(node, (dict, list, tuple)) and not node)

  with ocp.PyTreeCheckpointer() as checkpointer:
    tree = checkpointer.metadata(folder).item_metadata.tree
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree, is_leaf=is_leaf)
    restored = checkpointer.restore(folder, restore_args=args)
  flat = jax.tree_util.tree_flatten_with_path(restored, is_leaf=is_leaf)[0]
  leaves = {}
  for path, leaf in flat:
    key = tuple(k.idx if hasattr(k, "idx") else k.key for k in path)
    leaves[key] = None if is_leaf(leaf) else np.asarray(leaf)
  return leaves


def same_bytes(a: dict, b: dict) -> None:
  """Asserts equal paths, shapes, dtypes and bytes."""
  assert a.keys() == b.keys(), sorted(map(str, a.keys() ^ b.keys()))[:8]
  for path, x in a.items():
    y = b[path]
    if x is None or y is None:
      assert x is None and y is None, path
      continue
    assert (x.shape, x.dtype) == (y.shape, y.dtype), path
    assert x.tobytes() == y.tobytes(), path


class Numbers:
  """Random arrays, different on every call."""

  def __init__(self, seed: int = 0):
    self._rng = np.random.default_rng(seed)

  def __call__(self, *shape, dtype=np.float32):
    return np.asarray(self._rng.normal(size=shape)).astype(dtype)


def moe_layer(numbers: Numbers, lead=(), axis=0) -> dict:
  """One mixture-of-experts layer; `lead` = (L,) puts the layer axis at `axis` of every leaf, at most last."""

  def leaf(*shape):
    at = min(axis, len(shape))
    return numbers(*shape[:at], *lead, *shape[at:])

  return {
    "self_attention": {
      "query": {"kernel": leaf(E, H, D)},
      "out": {"kernel": leaf(H, D, E)},
    },
    "MoeBlock_0": {"gate": {"kernel": leaf(E, X)}, "wi_0": leaf(X, E, M), "wi_1": leaf(X, E, M), "wo": leaf(X, M, E)},
    "norm": {"scale": leaf(E)},
    "temperature": leaf(),
  }


def model(numbers: Numbers, *, form: str, axis: int = 1, container: str = "layers") -> dict:
  """A parameter tree whose layers are 'scanned', 'unscanned' or 'integer'."""
  decoder: dict = {"decoder_norm": {"scale": numbers(E)}}
  if form == "scanned":
    decoder[container] = moe_layer(numbers, (L,), axis)
  elif form == "unscanned":
    decoder |= {f"{container}_{i}": moe_layer(numbers) for i in range(L)}
  else:
    decoder[container] = {str(i): moe_layer(numbers) for i in range(L)}
  return {"token_embedder": {"embedding": numbers(V, E)}, "decoder": decoder}


def linen(form: str = "scanned", *, seed: int = 0, **about) -> dict:
  numbers = Numbers(seed)

  def tree():
    return model(numbers, form=form, **about)

  return {
    "params": {"params": tree()},
    "opt_state": [
      {"count": np.int32(9), "mu": {"params": tree()}, "nu": {"params": tree()}},
      None,
      {"count": np.int32(9)},
    ],
    "step": np.int32(9),
  }


def nnx(form: str = "scanned", *, seed: int = 0, **about) -> dict:
  """The same values as `linen` of the same seed and form, in the NNX layout."""
  source = linen(form, seed=seed, **about)
  adam = source["opt_state"][0]
  return {
    "model": source["params"]["params"],
    "optimizer": {
      "opt_state": {
        "0": {"count": adam["count"], "mu": adam["mu"]["params"], "nu": adam["nu"]["params"]},
        "2": source["opt_state"][2],
      },
      "step": np.uint32(9),
    },
  }


def wrap(tree, key: str = "value"):
  return {name: wrap(child, key) for name, child in tree.items()} if isinstance(tree, dict) else {key: tree}
