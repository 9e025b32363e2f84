"""Independent oracles: the transformer in numpy, per-example gradients one by one, Adam's direction by its formula.

None of them uses the engine, the project's loss or its attention kernels (the gradients differentiate the model's own
forward pass, which `reference_logits` checks).

n examples, T positions, D embed dim, H query heads, K key/value heads, h head width, L layers, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ACTIVATIONS = {
  "silu": lambda x: x / (1 + np.exp(-x)),
  "relu": lambda x: np.maximum(x, 0),
  "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
  "linear": lambda x: x,
}


def reference_logits(values: dict, model_config, tokens_BT, positions_BT, segments_BT):
  """float64 logits [B, T, V] of the llama-style transformer, written with loops over rows, heads and positions.

  values: {label: array} with stacked layers. A padding position (segment 0) has NaN.
  """
  values = {label: np.asarray(v, np.float64) for label, v in values.items()}
  out = np.full((*tokens_BT.shape, model_config.vocab_size), np.nan)
  for row, segments in enumerate(segments_BT):
    for segment in np.unique(segments[segments > 0]):
      at = np.flatnonzero(segments == segment)
      out[row, at] = _document_logits(values, model_config, tokens_BT[row, at], positions_BT[row, at])
  return out


def _document_logits(values, cfg, tokens, positions):
  return head_logits(document_hidden(values, cfg, tokens, positions), values, cfg)


def document_hidden(values, cfg, tokens, positions):
  """The output of the last layer, before the final norm, float64 [T, D]."""
  x_TD = values["token_embedder/embedding"][tokens]
  for i in range(cfg.base_num_decoder_layers):
    layer = {label: v[i] for label, v in values.items() if label.startswith("decoder/layers/")}
    x_TD = layer_output(x_TD, layer, "decoder/layers/", positions, cfg)
  return x_TD


def layer_output(x_TD, values, layer: str, positions, cfg):
  """One layer. layer: what the names of its weights begin with."""
  y_TD = rms(x_TD, values[layer + "pre_self_attention_layer_norm/scale"], cfg)
  weights = {name: values[f"{layer}self_attention/{name}/kernel"] for name in ("query", "key", "value", "out")}
  x_TD = x_TD + _attention(y_TD, positions, weights, cfg)
  y_TD = rms(x_TD, values[layer + "post_self_attention_layer_norm/scale"], cfg)
  h_TF = 1.0
  for j, name in enumerate(cfg.mlp_activations):
    branch = "wi" if len(cfg.mlp_activations) == 1 else f"wi_{j}"
    h_TF = h_TF * ACTIVATIONS[name](y_TD @ values[f"{layer}mlp/{branch}/kernel"])
  return x_TD + h_TF @ values[layer + "mlp/wo/kernel"]


def head_logits(x_TD, values, cfg):
  x_TD = rms(x_TD, values["decoder/decoder_norm/scale"], cfg)
  if cfg.logits_via_embedding:
    return x_TD @ values["token_embedder/embedding"].T
  return x_TD @ values["decoder/logits_dense/kernel"]


def rms(x_TD, scale_D, cfg):
  return x_TD / np.sqrt(np.mean(x_TD**2, -1, keepdims=True) + cfg.normalization_layer_epsilon) * scale_D


def _attention(x_TD, positions, weights, cfg):
  out_TD = np.zeros_like(x_TD)
  per_group = cfg.base_num_query_heads // cfg.base_num_kv_heads
  for head in range(cfg.base_num_query_heads):
    kv = head // per_group
    q_Th = _rotate(x_TD @ weights["query"][:, head], positions, cfg)
    k_Th = _rotate(x_TD @ weights["key"][:, kv], positions, cfg)
    v_Th = x_TD @ weights["value"][:, kv]
    for t in range(len(x_TD)):
      scores = k_Th[: t + 1] @ q_Th[t] / np.sqrt(cfg.head_dim)
      p = np.exp(scores - scores.max())
      out_TD[t] += (p / p.sum()) @ v_Th[: t + 1] @ weights["out"][head]
  return out_TD


def _rotate(x_Th, positions, cfg):
  """Pair (i, i + h/2) as one complex number, turned by its position."""
  half = cfg.head_dim // 2
  frequency = cfg.rope_max_timescale ** (-2.0 * np.arange(half) / cfg.head_dim)
  turned = (x_Th[:, :half] + 1j * x_Th[:, half:]) * np.exp(1j * positions[:, None] * frequency)
  return np.concatenate([turned.real, turned.imag], axis=1)


def softmax_losses(logits_TV, targets_T, z_loss: float = 0.0):
  """Cross-entropy [T] from log_softmax and a one-hot product, plus z-loss."""
  log_p = jax.nn.log_softmax(logits_TV)
  losses = -(jax.nn.one_hot(targets_T, logits_TV.shape[-1], dtype=logits_TV.dtype) * log_p).sum(-1)
  return losses + z_loss * jax.scipy.special.logsumexp(logits_TV, axis=-1) ** 2


class ExampleGradients:
  """Gradient of each row's summed loss over its counting tokens, one row at a time through the whole model.

  ExampleGradients(model)(rows) -> {label: [n, *parameter]} in the model's dtype, as numpy. Compiled once for up to 16
  rows; the loss is log_softmax and one-hot, not the project's.
  """

  def __init__(self, model: nnx.Module, z_loss: float = 0.0):
    self.graphdef, self.params, self.rest = nnx.split(model, nnx.Param, ...)

    def loss(params, row):
      row = {name: v[None] for name, v in row.items()}
      model = nnx.merge(self.graphdef, params, self.rest)
      logits = model(row["inputs"], row["inputs_position"], row["inputs_segmentation"])
      losses = softmax_losses(logits[0], row["targets"][0], z_loss)
      return jnp.sum(jnp.where(row["targets_segmentation"][0] != 0, losses, 0))

    self._gradients = jax.jit(jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0)))

  def __call__(self, rows: dict, values: dict | None = None) -> dict:
    return self.with_losses(rows, values)[1]

  def with_losses(self, rows: dict, values: dict | None = None) -> tuple[np.ndarray, dict]:
    """(summed losses [n], gradients), at the parameters {label: array} `values` in place of the model's own."""
    params = self.params
    if values is not None:
      flat = [("/".join(map(str, path)), path, v) for path, v in nnx.to_flat_state(params)]
      params = nnx.from_flat_state([(path, v.replace(jnp.asarray(values[k], v.dtype))) for k, path, v in flat])
    number = len(rows["inputs"])
    losses, gradients = self._gradients(params, with_padding(rows))
    flat = {"/".join(map(str, path)): np.asarray(v[...])[:number] for path, v in nnx.to_flat_state(gradients)}
    return np.asarray(losses)[:number], flat


def with_padding(rows: dict) -> dict:
  """The rows with rows of padding behind them, up to a multiple of 16, so that one program serves several batches."""
  missing = -len(rows["inputs"]) % 16
  return {name: np.pad(v, [(0, missing)] + [(0, 0)] * (v.ndim - 1)) for name, v in rows.items()}


def token_counts(rows: dict) -> np.ndarray:
  return (np.asarray(rows["targets_segmentation"]) != 0).sum(1)


def batch_gradient(gradients: dict, rows: dict) -> dict:
  """Gradient of the mean loss over all counting tokens, float64."""
  return {label: g.astype(np.float64).sum(0) / token_counts(rows).sum() for label, g in gradients.items()}


def adam_direction(G: dict, g: dict, v: dict, *, count, kappa, b1, b2, eps) -> dict:
  """P_t G with the second moment that holds this step's (clipped) gradient g. count: steps taken before this one."""
  t = count + 1
  out = {}
  for label in G:
    v_hat = (b2 * v[label] + (1 - b2) * (kappa * g[label]) ** 2) / (1 - b2**t)
    out[label] = (1 - b1) / (1 - b1**t) / (np.sqrt(v_hat) + eps) * G[label]
  return out


def dots(gradients: dict, u: dict, stacked: int = 0) -> dict:
  """{label: [n]} (or [L, n] for the labels of stacked layers, L = stacked > 0): <gradient_i, u>, in float64."""
  out = {}
  for label, g in gradients.items():
    product = g.astype(np.float64) * np.asarray(u[label], np.float64)
    if stacked and "/layers/" in label:
      out[label] = product.reshape(len(g), stacked, -1).sum(-1).T
    else:
      out[label] = product.reshape(len(g), -1).sum(-1)
  return out


def relative_error(actual, expected) -> float:
  """Largest difference over the largest expected value; over 1e-30 when nothing is expected."""
  actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
  assert actual.shape == expected.shape, (actual.shape, expected.shape)
  return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))
