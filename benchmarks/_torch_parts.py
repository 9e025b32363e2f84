"""The parts of the default model's step in eager PyTorch: the contender of cpu_breakdown.py.

Started with the sizes as JSON; then for each name of a part on stdin it runs that part, forward and backward, and
answers with its seconds. Parts are those of cpu_breakdown.py, with the same shapes.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F


def leaf(*shape):
  return torch.randn(*shape, requires_grad=True)


def parts(sizes: dict) -> dict:
  """{name: function that runs it once}."""
  rows, length, dim, hidden, vocab = (sizes[name] for name in ("rows", "length", "dim", "hidden", "vocab"))
  heads, kv_heads, width, tokens = sizes["heads"], sizes["kv_heads"], sizes["width"], rows * length
  products = [(leaf(tokens, i), leaf(i, o), torch.randn(tokens, o)) for i, o in sizes["products"]]
  query, key, value = leaf(rows, heads, length, width), *(leaf(rows, kv_heads, length, width) for _ in range(2))
  causal = torch.ones(length, length, dtype=torch.bool).tril().expand(rows, 1, length, length)
  x, scale, x_cotangent = leaf(rows, length, dim), leaf(dim), torch.randn(rows, length, dim)
  gate, up, cotangent = leaf(tokens, hidden), leaf(tokens, hidden), torch.randn(tokens, hidden)
  table, targets = leaf(dim, vocab), torch.randint(vocab, (tokens,))
  weights = [torch.nn.Parameter(torch.randn(*shape) * 0.02) for shape in sizes["weights"]]
  for weight in weights:
    weight.grad = torch.randn_like(weight) * 1e-3
  optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)

  def matmuls():
    for inputs, weight, back in products:
      torch.autograd.grad(inputs @ weight, (inputs, weight), back)

  def attention():
    group = heads // kv_heads
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=causal)
    torch.autograd.grad(out, (query, key, value), query.detach())

  def norm():
    torch.autograd.grad(F.rms_norm(x, (dim,), scale), (x, scale), x_cotangent)

  def activation():
    torch.autograd.grad(F.silu(gate) * up, (gate, up), cotangent)

  def head():
    loss = F.cross_entropy(F.rms_norm(x, (dim,), scale).flatten(0, 1) @ table, targets)
    torch.autograd.grad(loss, (x, scale, table))

  def update():
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()

  return {"matrix products": matmuls, "attention": attention, "norm": norm, "activation": activation,
          "head and loss": head, "clipping and AdamW": update}  # fmt: skip


def main() -> None:
  run = parts(json.loads(sys.argv[1]))
  print("ready", flush=True)
  for line in sys.stdin:
    begin = time.perf_counter()
    run[line.strip()]()
    seconds = time.perf_counter() - begin
    time.sleep(0.03)  # threads of OpenMP wait busily for 10 ms after their work, at the cost of whoever runs next
    print(seconds, flush=True)


if __name__ == "__main__":
  main()
