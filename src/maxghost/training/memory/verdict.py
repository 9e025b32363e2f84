"""Advice for a step that does not fit: the largest tensors, and the cheapest settings that make it fit."""

from collections.abc import Iterable, Iterator

from maxghost.training.memory.table import MemoryEstimate, Tensor, shown


def verdict(estimate: MemoryEstimate, capacity_bytes: int) -> str:
  """One line if the step fits; else the largest tensors and the settings to change. capacity_bytes: of one device."""
  need, have = estimate.total, capacity_bytes
  if need <= have:
    return f"memory: needs {shown(need)} of {shown(have)} per device; {shown(have - need)} to spare"
  lines = [f"memory: does not fit: needs {shown(need)} per device, has {shown(have)}, {shown(need - have)} too much"]
  data, accumulated = estimate.cfg.data, estimate.cfg.optimizer.gradient_accumulation_steps
  lines.append(
    f"  tokens per device: {estimate.tokens:,} = {data.per_device_batch_size} rows of {data.max_target_length} tokens"
    + (f", in each of {accumulated} micro-batches" if accumulated > 1 else "")
  )
  lines += advice(estimate, capacity_bytes)
  return "\n".join(lines)


def advice(estimate: MemoryEstimate, capacity_bytes: int) -> list[str]:
  """The largest tensors, and the settings that bring the estimate to the capacity, or as near as possible."""
  lines = ["  largest:", *(f"    {tensor.describe()}" for tensor in largest(estimate, 5))]
  steps = remedies(estimate, capacity_bytes)
  if not steps:
    return [*lines, "  no setting helps; use more devices (ici_fsdp_parallelism), or a smaller model"]
  lines.append("  cheapest settings first, with the estimate after each:")
  lines += [f"    {text} -> {shown(after.total)} ({cost})" for text, cost, after in steps]
  left = steps[-1][2].total - capacity_bytes
  if left <= 0:
    return [*lines, f"  with all of these it fits, {shown(-left)} to spare"]
  return [*lines, f"  even then {shown(left)} too much: use more devices, or a smaller model"]


def largest(estimate: MemoryEstimate, count: int) -> list[Tensor]:
  tensors = [tensor for row in estimate.rows for tensor in row.tensors]
  return sorted(tensors, key=lambda tensor: -tensor.bytes)[:count]


def remedies(estimate: MemoryEstimate, capacity_bytes: int) -> list[tuple[str, str, MemoryEstimate]]:
  """[(keys as typed, their cost, estimate with them and the previous ones)], cheapest first, until it fits.

  Each saves at least two percent. Settings that later ones make unnecessary are left out.
  """
  taken: dict[tuple[str, ...], tuple[dict, str]] = {}  # by name: a later value replaces an earlier one
  current = estimate
  while current.total > capacity_bytes:
    for keys, cost in _candidates(current):
      found = current.change(**keys)
      if found is not None and found.total < 0.98 * current.total:
        taken.pop(tuple(keys), None)
        taken[tuple(keys)] = keys, cost
        current = found
        break
    else:
      break

  def after(steps: Iterable[tuple[dict, str]]) -> MemoryEstimate | None:
    return estimate.change(**{name: value for keys, _ in steps for name, value in keys.items()})

  if current.total <= capacity_bytes:
    for names in list(taken)[:-1]:
      rest = {other: step for other, step in taken.items() if other != names}
      if (found := after(rest.values())) is not None and found.total <= capacity_bytes:
        taken = rest
  out, steps = [], list(taken.values())
  for i, (keys, cost) in enumerate(steps):
    if (found := after(steps[: i + 1])) is not None:
      typed = {name: ",".join(map(str, v)) if isinstance(v, tuple) else v for name, v in keys.items()}
      out.append((" ".join(f"{name}={value}" for name, value in typed.items()), cost, found))
  return out


def _candidates(estimate: MemoryEstimate) -> Iterator[tuple[dict, str]]:
  """(keys, their cost), from those without cost to those that change the run."""
  cfg = estimate.cfg
  m, o, g = cfg.model, cfg.optimizer, cfg.ghost
  layers = m.base_num_decoder_layers
  if m.attention in ("dot_product", "autoselected"):
    yield {"attention": "blockwise"}, "about the same speed"
  if m.num_vocab_tiling < 64:
    yield {"num_vocab_tiling": max(2 * m.num_vocab_tiling, 4)}, "one more product of the head's size"
  if m.remat_policy == "none":
    yield {"remat_policy": "minimal"}, "recomputes what is elementwise, and attention"
  if o.mu_dtype == "float32":
    yield {"mu_dtype": "bfloat16"}, "first moments in 16 bits, 8 of them significant"
  if m.remat_policy != "full":
    yield {"remat_policy": "full"}, "one more forward pass of the layers"
  if m.scan_layers:
    divisors = [k for k in range(2, layers) if layers % k == 0]
    best = [(after.total, k) for k in divisors if (after := estimate.change(segment_lengths=(k,)))]
    if best and (lengths := (min(best)[1],)) != m.segment_lengths:
      yield {"segment_lengths": lengths}, "one more forward pass of the layers"
  if g.ghost_enabled and g.ghost_schedule == "two_pass":
    yield {"ghost_schedule": "reverse_scan"}, "the same scores, in one walk over the layers"
  batch, accumulated = cfg.data.per_device_batch_size, o.gradient_accumulation_steps
  if batch % 2 == 0:
    yield {"per_device_batch_size": batch // 2, "gradient_accumulation_steps": 2 * accumulated}, "smaller products"
  offloads = m.offload_to_host
  if m.segment_lengths and g.ghost_enabled and g.ghost_schedule == "reverse_scan" and "carries" not in offloads:
    yield {"offload_to_host": (*offloads, "carries")}, "traffic to the host in every step"
  if m.scan_layers and m.segment_lengths:
    host = {"ghost_schedule": "reverse_scan"} if g.ghost_enabled else {}
    for more in (("optimizer",), ("weights", "optimizer")):
      new = {"offload_to_host": tuple(dict.fromkeys((*more, *offloads))), **host}
      yield new, "traffic to the host in every step"
  if m.weight_dtype == "float32":
    yield {"weight_dtype": "bfloat16"}, "weights in 16 bits, 8 of them significant"
  if batch > 1:
    yield {"per_device_batch_size": batch // 2}, "half the tokens per step"
  yield {"max_target_length": cfg.data.max_target_length // 2}, "half the context"
