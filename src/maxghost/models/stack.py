"""A stack of equal layers: how it is built, and how one scan runs it, or a scan over segments of layers.

L layers. A stacked layer is one nnx module whose Variables carry a leading layer axis; its Params' `axes` metadata
begins with "layers".
"""

from collections.abc import Callable

import jax
from flax import nnx

from maxghost.models import segments, streaming

_POLICIES = {
  "minimal": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
  "full": jax.checkpoint_policies.nothing_saveable,
}


def create(make_layer: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
  """Builds `num_layers` layers as one module with a leading layer axis on every Variable."""

  @nnx.split_rngs(splits=num_layers)
  @nnx.vmap(in_axes=0, out_axes=0)
  def build(layer_rngs):
    return make_layer(layer_rngs)

  layers = build(rngs)
  for _, variable in nnx.iter_graph(layers):
    if isinstance(variable, nnx.Param) and "axes" in variable.get_metadata():
      variable.set_metadata(axes=("layers", *variable.get_metadata()["axes"]))
  return layers


def run(
  layers: nnx.Module,
  x,
  layer_inputs: tuple,
  *,
  num_layers: int,
  remat_policy: str,
  dropout_key=None,
  segment_lengths: tuple[int, ...] = (),
):
  """Runs x through the stacked `layers`, the first one first.

  layers: a stacked module called as layer(x, *layer_inputs, key); x: an array or a pytree of arrays; layer_inputs:
  arrays every layer sees alike. remat_policy: none | minimal | full, inside each layer. dropout_key: a PRNG key folded
  with the layer's index, or None. segment_lengths: see `segments.scan`.
  Returns x after the last layer, with its shapes and dtypes unchanged.
  """
  graphdef, state = nnx.split(layers)

  def apply(x, state, layer_inputs, key):
    return nnx.merge(graphdef, state)(x, *layer_inputs, key)

  apply = remat(apply, remat_policy)

  def body(x, scanned, shared):
    (state, index), (layer_inputs, dropout_key) = scanned, shared
    key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
    return apply(x, state, layer_inputs, key)

  scanned, shared = (state, jax.numpy.arange(num_layers)), (layer_inputs, dropout_key)
  if streaming.any_on_host(state):
    return streaming.scan(body, x, scanned, shared, segment_lengths)
  x, _ = segments.scan(lambda x, scanned: (body(x, scanned, shared), None), x, scanned, segment_lengths)
  return x


def remat(function: Callable, policy: str) -> Callable:
  """`function` under jax.checkpoint with the named policy; 'none' returns it as it is."""
  if policy == "none":
    return function
  if policy not in _POLICIES:
    raise ValueError(f"remat_policy={policy}: use none, minimal or full")
  return jax.checkpoint(function, policy=_POLICIES[policy], prevent_cse=False)
