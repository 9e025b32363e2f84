"""What rounding to few bits costs in accuracy, and the bytes that it saves.

  python benchmarks/quantization.py                       products and gradients of a layer at SmolLM2-135M's shapes
  python benchmarks/quantization.py --model models/smollm2  also the mean losses of that model (docs/huggingface.md)

Products and gradients are compared with float32's, relative to their largest size and as a root mean square. The mean
loss is that of two sentences and of two pages of the documentation, by the tokens of all four, beside float32's. No
times: CPUs multiply int8 slower than float32, and a speed-up needs the hardware that it is claimed for.
"""

import sys

import _measure
from _measure import Figure

TEXTS = (
  "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
  "times of the was worst, foolishness it wisdom age was best the of It was age the of times the of it was.",
)
PAGES, TOKENS = ("ghost.md", "training.md"), 512
KINDS = {
  "int8": None,
  "fp8": None,
  "int8w": 1.002,
  "int4w": 1.03,
  "~int4w": 1.03,
}  # the mean loss over float32's that is wanted
ORDERS = 3
SHAPE = (512, 576, 1536)  # tokens, inputs, outputs


def errors(kind: str) -> dict:
  """Of y = x W, of the gradient of x and of that of W, as numbers relative to float32's."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  from maxghost.models import dense
  from maxghost.models.rounding import Rounded

  rng = np.random.default_rng(0)
  x, w, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (SHAPE[:2], SHAPE[1:], SHAPE[::2]))
  dims = (((1,), (0,)), ((), ()))
  row: dict = {"products": kind}
  found = []
  for precision in (None, Rounded(kind)):
    y, pull = jax.vjp(lambda x, w, p=precision: dense.dot_general(x, w, dims, p), x, w)
    found.append((y, *pull(b)))
  for name, exact, rounded in zip(("y", "dx", "dW"), *found, strict=True):
    off = np.asarray(rounded) - np.asarray(exact)
    row[f"{name} rms"] = float(np.sqrt(np.square(off).mean() / np.square(exact).mean()))
    row[f"{name} largest"] = float(np.abs(off).max() / np.abs(exact).max())
  return row


def across(graphdef, state, kind: str, seed: int):
  """The state with the matrices that `kind` makes with their inputs in a random order, made whole again.

  The GGUF file of SmolLM2 holds blocks of 32 inputs in 4 bits, and a block of inputs from anywhere mixes several: a
  figure for weights that were not in few bits before.
  """
  import numpy as np
  from flax import nnx

  from maxghost.adapters import quantized

  model = nnx.merge(graphdef, state)
  for module, name, form in quantized.places(model, kind).values():
    kernel, axes = getattr(module, name), quantized.matrix_axes(module)
    depth = kernel.ndim - sum(axes)
    flat = kernel[...].reshape(*kernel.shape[:depth], -1, *kernel.shape[depth + axes[0] :])
    order = np.arange(flat.shape[depth])
    if form != "table":
      np.random.default_rng(seed).shuffle(order)
    mixed = flat.take(order, depth)
    held = quantized.dequantize(quantized.quantize(mixed, form, depth, 1), form, flat.dtype, depth)
    back = held.take(np.argsort(order), depth)
    setattr(module, name, kernel.replace(back.reshape(kernel.shape)))
  return nnx.state(model)


def losses(model: str, kind: str, seed: int = 0) -> tuple[float, int]:
  """(mean loss of all tokens in nats, bytes of the weights). kind: of KINDS, "" or one behind a `~` (`across`)."""
  import jax
  import numpy as np
  from flax import nnx

  from maxghost import load_model
  from maxghost.data.tokenizers import load_tokenizer
  from maxghost.objectives import token_losses

  place, cfg = load_model.find(model, quantization="" if kind[:1] == "~" else kind)
  tokenizer = load_tokenizer(cfg.data.tokenizer_type, cfg.data.tokenizer_path)
  graphdef, state = load_model.load(place, cfg, say=lambda _: None)
  if kind[:1] == "~":
    state = across(graphdef, state, kind[1:], seed)
  texts = [*TEXTS, *((_measure.ROOT / "docs" / name).read_text("utf-8") for name in PAGES)]
  run = jax.jit(lambda state, ids: nnx.merge(graphdef, state)(ids))
  found = []
  for ids in tokenizer.encode([text.encode() for text in texts]):
    row = np.asarray(ids)[None, :TOKENS]
    found.append(np.asarray(token_losses(run(state, row)[:, :-1], row[:, 1:]))[0])
  return float(np.concatenate(found).mean()), sum(x.nbytes for x in jax.tree.leaves(state))


def main() -> int:
  args = _measure.arguments(__doc__ or "", False, model="")
  rows, figures, notes = [errors(kind) for kind in ("int8", "fp8")], [], []
  for row in rows:
    figures += [Figure(f"{row['products']}: {name}", row[name], form="{:.4f}") for name in row if name.endswith("rms")]
  if args.model:
    base, whole = losses(args.model, "")
    notes.append(f"float32: {base:.4f} nats a token, {whole / 1e6:.0f} MB")
    for kind, limit in KINDS.items():
      found = [losses(args.model, kind, seed) for seed in range(ORDERS if kind[:1] == "~" else 1)]
      loss, size = max(found)
      notes.append(f"{kind}: {loss:.4f} nats a token, {size / 1e6:.0f} MB")
      name = kind.replace("~", f"worst of {ORDERS} orders of inputs, ")
      figures.append(Figure(f"{name}: mean loss over float32's", loss / base, limit, form="{:.4f}"))
  return _measure.publish("quantization", rows, figures, notes, path=args.json)


if __name__ == "__main__":
  sys.exit(_measure.run(main))
