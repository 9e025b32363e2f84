"""The trainer's default model and step written by hand in eager PyTorch: the contender of step_speed.py.

Started with a file of weights, one batch and the sizes; then for each line on stdin it runs one step and answers
"seconds loss". Same architecture (RMSNorm, rotary, grouped-query attention within a document, gated SiLU MLP, untied
output), same loss, clipping and AdamW; PyTorch's own fused pieces where it has them (scaled_dot_product_attention,
rms_norm, cross_entropy, AdamW with fused=True).

B rows, T positions, D embed dim, H query heads, K key/value heads, h head width, F feed-forward width, L layers.
"""

import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
  """x + attention(norm x), then x + mlp(norm x); x [B, T, D]."""

  def __init__(self, dim, heads, kv_heads, width, hidden, eps):
    super().__init__()
    self.heads, self.kv_heads, self.width = heads, kv_heads, width
    self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)
    self.query = nn.Linear(dim, heads * width, bias=False)
    self.key = nn.Linear(dim, kv_heads * width, bias=False)
    self.value = nn.Linear(dim, kv_heads * width, bias=False)
    self.out = nn.Linear(heads * width, dim, bias=False)
    self.wi_0, self.wi_1 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
    self.wo = nn.Linear(hidden, dim, bias=False)

  def forward(self, x, cos, sin, mask):
    y = self.attention_norm(x)
    query = rotate(self._heads(self.query(y), self.heads), cos, sin)
    key = rotate(self._heads(self.key(y), self.kv_heads), cos, sin)
    value = self._heads(self.value(y), self.kv_heads)
    group = self.heads // self.kv_heads
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    x = x + self.out(attended.transpose(1, 2).flatten(2))
    y = self.mlp_norm(x)
    return x + self.wo(F.silu(self.wi_0(y)) * self.wi_1(y))

  def _heads(self, x, number):
    return x.unflatten(-1, (number, self.width)).transpose(1, 2)


def rotate(x, cos, sin):
  """Rotary embedding of x [B, heads, T, h]; cos, sin: [B, 1, T, h / 2]."""
  first, second = x.chunk(2, -1)
  return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Model(nn.Module):
  """Tokens to logits [B, T, V]."""

  def __init__(self, sizes):
    super().__init__()
    self.embed = nn.Embedding(sizes["vocab"], sizes["dim"])
    shape = [sizes[name] for name in ("dim", "heads", "kv_heads", "width", "hidden")]
    self.layers = nn.ModuleList(Layer(*shape, sizes["eps"]) for _ in range(sizes["layers"]))
    self.norm = nn.RMSNorm(sizes["dim"], sizes["eps"])
    self.head = nn.Linear(sizes["dim"], sizes["vocab"], bias=False)

  def forward(self, tokens, cos, sin, mask):
    x = self.embed(tokens)
    for layer in self.layers:
      x = layer(x, cos, sin, mask)
    return self.head(self.norm(x))


def load(model: Model, arrays) -> None:
  """Takes over the trainer's weights, so that both sides train the same model."""

  def kernel(name, layer=None):
    value = torch.from_numpy(arrays[f"{name}/kernel"] if layer is None else arrays[f"{name}/kernel"][layer].copy())
    return value

  with torch.no_grad():
    model.embed.weight.copy_(torch.from_numpy(arrays["token_embedder/embedding"]))
    model.norm.weight.copy_(torch.from_numpy(arrays["decoder/decoder_norm/scale"]))
    model.head.weight.copy_(kernel("decoder/logits_dense").T)
    for i, layer in enumerate(model.layers):
      for name in ("query", "key", "value"):
        weight = kernel(f"decoder/layers/self_attention/{name}", i)  # [D, heads, h]
        getattr(layer, name).weight.copy_(weight.flatten(1).T)
      layer.out.weight.copy_(kernel("decoder/layers/self_attention/out", i).flatten(0, 1).T)
      for name in ("wi_0", "wi_1", "wo"):
        getattr(layer, name).weight.copy_(kernel(f"decoder/layers/mlp/{name}", i).T)
      before, after = "pre_self_attention_layer_norm", "post_self_attention_layer_norm"
      layer.attention_norm.weight.copy_(torch.from_numpy(arrays[f"decoder/layers/{before}/scale"][i].copy()))
      layer.mlp_norm.weight.copy_(torch.from_numpy(arrays[f"decoder/layers/{after}/scale"][i].copy()))


def main() -> None:
  arrays = dict(np.load(sys.argv[1]))
  sizes = {name[6:]: value.item() for name, value in arrays.items() if name.startswith("sizes/")}
  model = Model(sizes)
  load(model, arrays)
  inputs, positions, segments, targets, target_segments = (
    torch.from_numpy(arrays[name].astype(np.int64))
    for name in ("inputs", "inputs_position", "inputs_segmentation", "targets", "targets_segmentation")
  )
  half = sizes["width"] // 2
  angle = positions[:, None, :, None] * sizes["timescale"] ** -(torch.arange(half) / half)
  cos, sin = angle.cos(), angle.sin()
  causal = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).tril()
  mask = causal & (segments[:, None, :, None] == segments[:, None, None, :])
  targets = torch.where(target_segments != 0, targets, -100)  # cross_entropy leaves -100 out
  settings = {"lr": sizes["lr"], "betas": (sizes["b1"], sizes["b2"]), "eps": sizes["adam_eps"]}
  optimizer = torch.optim.AdamW(model.parameters(), **settings, weight_decay=sizes["decay"], fused=True)
  print("ready", torch.__version__, torch.get_num_threads(), flush=True)
  for _ in sys.stdin:
    begin = time.perf_counter()
    logits = model(inputs, cos, sin, mask)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), sizes["clip"])
    optimizer.step()
    seconds = time.perf_counter() - begin
    time.sleep(0.03)  # threads of OpenMP wait busily for 10 ms after their work, at the cost of whoever runs next
    print(seconds, loss.item(), flush=True)


if __name__ == "__main__":
  main()
