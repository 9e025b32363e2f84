"""Stacks of equal layers, which run by a scan over layers or over segments of layers.

A stack is one nnx module whose Variables have a leading layer axis; the `axes` metadata of its Params begins with
"layers".
"""

from collections.abc import Callable

import jax
from flax import nnx

from maxghost.models import pipeline, rounding, segments, streaming
from maxghost.parallel import shardings

_SHORT = 8  # layers at most that a CPU runs without a loop; more take longer to compile
_MINIMAL = jax.checkpoint_policies.save_from_both_policies(
  jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
  jax.checkpoint_policies.save_only_these_names(rounding.PRODUCT),
)
_POLICIES = {"auto": _MINIMAL, "minimal": _MINIMAL, "full": jax.checkpoint_policies.nothing_saveable}


def create(make_layer: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
  """Builds `num_layers` layers as one module with a leading layer axis on every Variable."""
  layers = nnx.split_rngs(splits=num_layers)(nnx.vmap(make_layer))(rngs)
  for _, variable in nnx.iter_graph(layers):
    if isinstance(variable, nnx.Param) and "axes" in variable.get_metadata():
      variable.set_metadata(axes=("layers", *variable.get_metadata()["axes"]))
  return layers


def run(layers, x, layer_inputs: tuple, *, remat_policy: str, dropout_key=None, segment_lengths: tuple = ()):
  """Runs x, a pytree of arrays, through stacked `layers`; returns the last one's output, with shapes and dtypes of x.

  Each layer is called as layer(x, *layer_inputs, key), key being dropout_key folded with the layer's index, or None.
  remat_policy: auto | none | minimal | full, inside each layer; see `resolve`. segment_lengths: see `segments.scan`.
  """
  graphdef, state = nnx.split(layers)
  num_layers = jax.tree.leaves(state)[0].shape[0]
  remat_policy = resolve(remat_policy, num_layers, bool(segment_lengths))
  apply = remat(lambda x, state, inputs, key: nnx.merge(graphdef, state)(x, *inputs, key), remat_policy)

  def body(x, scanned, shared):
    (state, index), (layer_inputs, dropout_key) = scanned, shared
    key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
    return apply(x, state, layer_inputs, key)

  scanned, shared = (state, jax.numpy.arange(num_layers)), (layer_inputs, dropout_key)
  if pipeline.current() is not None:
    return pipeline.run(lambda x, layer, inputs: body(x, layer, (inputs, dropout_key)), x, scanned, layer_inputs)
  if streaming.any_on_host(state):
    return streaming.scan(body, x, scanned, shared, segment_lengths)
  # Without a loop, a short stack is faster on CPU and needs less memory; under remat, XLA would undo the recomputation.
  unroll = remat_policy == resolve("auto", num_layers, bool(segment_lengths)) == "none"
  return segments.scan(lambda x, scanned: (body(x, scanned, shared), None), x, scanned, segment_lengths, unroll)[0]


def resolve(remat_policy: str, num_layers: int, apart: bool = False) -> str:
  """'auto' is none for at most 8 layers on a CPU, where memory is cheap and time is not, and minimal otherwise, also
  for layers that run `apart`: in segments, or one by one."""
  plain = num_layers <= _SHORT and not apart and shardings.platform() == "cpu"
  return remat_policy if remat_policy != "auto" else "none" if plain else "minimal"


def run_once(layer: nnx.Module, remat_policy: str, *args):
  """layer(*args) of a layer that is not stacked, by its remat policy; auto is minimal."""
  graphdef, state = nnx.split(layer)
  return remat(lambda state, *args: nnx.merge(graphdef, state)(*args), remat_policy)(state, *args)


def remat(function: Callable, policy: str) -> Callable:
  """`function` under jax.checkpoint with the named policy; unchanged for 'none'."""
  if policy == "none":
    return function
  if policy not in _POLICIES:
    raise ValueError(f"remat_policy={policy}: use auto, none, minimal or full")
  return jax.checkpoint(function, policy=_POLICIES[policy], prevent_cse=False)
