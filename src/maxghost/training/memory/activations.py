"""Closed forms of the memory of the backward passes of a layer and of the output head.

B rows, T positions, N = B T tokens on one device; D embed dim, F feed-forward width, H query and K key/value heads,
h head width, L layers, V vocabulary. Calibrated against the TPU compiler (benchmarks/memory.py), which fuses
elementwise operations.
"""

from maxghost.training.memory.device import Device, Held
from maxghost.training.memory.table import Row, Tensor

# Numbers of arrays that exist at once while a layer's backward pass runs.
LIVE_HIDDEN = 2  # of [N, D]: the layer's input and a cotangent
LIVE_FEED_FORWARD = 1  # of [N, F] beyond the output of each branch, if there are several: their product's cotangent
LIVE_HEADS = 4  # of [N, H h], and of [N, K h] for keys and values
LINEAR_FROM = 1024  # positions from which blockwise attention forms no scores of a whole row


class Activations:
  """Activations of the rows that pass through the model at once. walks_back, in_turn: see `directions.Directions`."""

  def __init__(self, device: Device, walks_back: bool, in_turn: bool):
    self.cfg, self.model, self.device = device.cfg, device.cfg.model, device
    self.walks_back, self.in_turn = walks_back, in_turn
    m, self.compute = self.model, self.model.dtype
    self.rows, self.embed = device.rows, m.base_emb_dim
    if device.num_sets and device.cfg.ghost.ghost_schedule == "concat":
      self.rows += device.val_rows
    self.tokens = self.rows * device.length
    self.num_heads = device.part(m.base_num_query_heads, "activation_heads")
    self.heads = self.num_heads * m.head_dim
    self.kv = device.part(m.base_num_kv_heads, "activation_kv_heads") * m.head_dim
    width = m.base_mlp_dim
    if m.num_experts > 1:  # each token passes through several experts
      width = (m.base_moe_mlp_dim if m.base_moe_mlp_dim > 0 else width) * m.num_experts_per_tok
    self.feed_forward = device.part(width, "activation_mlp")

  @property
  def layers_at_once(self) -> int:
    """Number of layers that are differentiated without recomputing their inputs."""
    return self.model.segment_lengths[-1] if self.model.segment_lengths else self.model.base_num_decoder_layers

  def layer_runs(self) -> list[tuple[int, str]]:
    """(number of layer inputs kept, why) level by level."""
    runs, outer = [], self.device.num_layers
    for length in self.model.segment_lengths:
      runs.append((outer // length, f"inputs of the segments of {length} layers"))
      outer = length
    return [*runs, (outer, f"inputs of the {outer} layers of one segment" if runs else f"inputs of all {outer} layers")]

  def in_layers(self) -> list[Row]:
    """Boundary carries, and the arrays of the backward pass of one layer or segment."""
    n, device = self.tokens, self.device
    *outer, (inner, within) = self.layer_runs()
    widest = max(n, device.num_sets * device.val_rows * device.length) if self.in_turn else n
    carries = [
      Tensor((count, tokens, self.embed), self.compute, f"{why}, kept for the backward pass")
      for count, tokens, why in [*((count, n, why) for count, why in outer), (inner, widest, within)]
    ]
    layers, policy = self.layers_at_once, self.model.remat_policy
    kept = [
      Tensor((layers, n, width), dtype, f"{name} of {layers} layers, kept because remat_policy={policy}")
      for name, width, dtype in self.kept_per_token()
    ]
    return [Row("boundary carries", tuple(carries)), Row(WITHIN, (*kept, *self.working()))]

  def kept_per_token(self) -> list[tuple[str, int, str]]:
    """(name, width, dtype) of the arrays that the remat policy keeps of every layer."""
    m, c, heads, kv, f, d = self.model, self.compute, self.heads, self.kv, self.feed_forward, self.embed
    if m.remat_policy == "full":
      return []
    products = [("attention queries", heads, c), ("attention keys", kv, c), ("attention values", kv, c)]
    products += [("attention output projection", d, c)]
    products += [(f"mlp wi_{i} output", f, c) for i in range(len(m.mlp_activations))]
    if m.remat_policy == "minimal":
      return products
    extra = [("rotated queries and keys", heads + kv, c), ("attention output", heads, c), ("norm inputs", 2 * d, c)]
    extra += [("mlp activations", 2 * f, c)]
    if not self.linear_attention:
      extra.append(("attention weights", self.device.length * self.num_heads, "float32"))
    return products + extra

  @property
  def linear_attention(self) -> bool:
    """Whether the memory of attention is linear in T."""
    attention = self.model.attention
    blocks = attention in ("blockwise", "autoselected") and self.device.length > LINEAR_FROM
    return attention == "flash" or blocks

  def working(self) -> list[Tensor]:
    """Arrays that exist while one layer is recomputed and differentiated.

    By default the compiler defers weight gradients, and keeps their inputs, to the end of the layer. Schedule
    reverse_scan computes them in order where it recomputes layers (`models.autodiff.gradients_in_order`): attention is
    differentiated after the feed-forward arrays are freed.
    """
    n, c, branches = self.tokens, self.compute, len(self.model.mlp_activations)
    hidden = Tensor((n, self.embed), c, "hidden states and their cotangents in one layer", LIVE_HIDDEN)
    live = branches + (LIVE_FEED_FORWARD if branches > 1 else 0)
    feed_forward = Tensor((n, self.feed_forward), c, "mlp activations and their cotangents in one layer", live)
    if not any("heads" in v.axes for v in self.device.params.values()):  # a stack without attention
      return [hidden, feed_forward]
    differentiated = self._attention(LIVE_HEADS, " and their cotangents")
    if not (self.walks_back and self.model.segment_lengths):
      return [hidden, feed_forward, *differentiated]
    turns = [hidden, feed_forward, *self._attention(LIVE_HEADS // 2, "")], [hidden, *differentiated]
    return max(turns, key=lambda tensors: sum(tensor.bytes for tensor in tensors))

  def _attention(self, count: int, and_cotangents: str) -> list[Tensor]:
    length = self.device.length
    tensors = [
      Tensor((self.tokens, self.heads), self.compute, f"queries, attention output{and_cotangents} in one layer", count),
      Tensor((self.tokens, self.kv), self.compute, f"keys, values{and_cotangents} in one layer", count),
    ]
    if not self.linear_attention:
      scores = (self.rows, self.num_heads, length, length)
      tensors.append(Tensor(scores, "float32", f"attention scores of one layer (attention={self.model.attention})", 2))
    return tensors

  def in_head(self, table: Held) -> list[Row]:
    """Carries, logits and the head's gradient."""
    m, n, d, c = self.model, self.tokens, self.embed, self.compute
    vocab, tiles = self.device.part(m.vocab_size, "activation_vocab"), m.num_vocab_tiling
    carries, why = self.layer_runs()[0]
    tile = "logits" if tiles == 1 else f"one of {tiles} tiles of the logits"
    wide = "float64" if c == "float64" else "float32"
    logits = Tensor((-(-n // tiles), vocab), c, f"{tile}, or their cotangent (num_vocab_tiling={tiles})")
    head = [Tensor(table.shape, table.dtype, "gradient of the output table")]
    hidden = [Tensor((n, d), c, "last hidden states", 2)]
    if tiles > 1 and m.vocab_tiling_axis == "vocab":
      # The blocks are interleaved, so the table is transposed to cut them, and their gradients to join them.
      head += [
        Tensor(table.shape, c, f"blocks of the output table (num_vocab_tiling={tiles})"),
        Tensor(table.shape, table.dtype, "their gradients"),
        Tensor(table.shape, table.dtype, "a table half turned around"),
      ]
      hidden = [
        Tensor((n, d), c, "last hidden states"),
        Tensor((n, d), wide, "sum of their gradient over the blocks"),
      ]
    elif tiles > 1 and table.dtype != wide:
      head.append(Tensor(table.shape, wide, "sum of the output table's gradient over the tiles"))
    return [
      Row("gradients", tuple(head)),
      Row("boundary carries", (Tensor((carries, n, d), c, why),)),
      Row(WITHIN, tuple(hidden)),
      Row("logits", (logits,)),
    ]


WITHIN = "within-segment activations"
