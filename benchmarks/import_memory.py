"""Host memory of an import from Hugging Face, an export back and a quantised copy, beside the size of the model.

  python benchmarks/import_memory.py [--layers 24] [--ram-mb 256]

A Llama of random bfloat16 weights is written, imported, exported and quantised, each in a process of its own, whose
peak of resident memory is compared with that of the same process on a model of one small layer. Reading maps the
source's file into memory: those pages, which the system may drop at any time, are not counted. Linux only.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import _measure
from _measure import Figure

CHILD = """
import sys, threading, time
from maxghost.interop import hf_checkpoint, quantize
peak, done = 0, False
def watch():
  global peak
  while not done:
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    peak = max(peak, sum(int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem")))
    time.sleep(0.002)
watcher = threading.Thread(target=watch)
watcher.start()
try:
  {verb}(sys.argv[1], sys.argv[2], {more}ram_bytes=int(sys.argv[3]), say=lambda line: None)
finally:
  done = True
  watcher.join()
print(peak)
"""

VERBS = {  # function, what else it is given, ends of the names of its source and its target
  "import": ("hf_checkpoint.import_model", "", "", "-in"),
  "export": ("hf_checkpoint.export_model", "", "-in", "-out"),
  "int8w": ("quantize.quantize_checkpoint", "'int8w', ", "-in", "-int8w"),
  "int4w": ("quantize.quantize_checkpoint", "'int4w', ", "-in", "-int4w"),
}


def main() -> int:
  args = _measure.arguments(__doc__, False, layers=24, ram_mb=256)
  with tempfile.TemporaryDirectory() as name:
    root, peaks = Path(name), {}
    for size, layers, width in (("small", 1, 64), ("large", args.layers, 1024)):
      total, largest = write_model(root / size, layers, width)
      for verb, (*_, source, target) in VERBS.items():
        source, target = (f"{size}{name}" for name in (source, target))
        peaks[size, verb] = peak(verb, root / source, root / target, args.ram_mb << 20)
  rows, figures = [], []
  for verb in VERBS:
    more = (peaks["large", verb] - peaks["small", verb]) / 1e6
    rows.append({"what": verb, "model MB": total / 1e6, "largest tensor MB": largest / 1e6, "own memory MB": more})
    times = 6 if verb.endswith("w") else 4
    bound = args.ram_mb * 1.048576 + times * largest / 1e6
    label = f"{verb}: MB above a tiny model's; at most --ram-mb and {times} of the largest tensor"
    figures.append(Figure(label, more, bound))
  return _measure.publish("import_memory", rows, figures, path=args.json)


def write_model(folder: Path, layers: int, width: int) -> tuple[int, int]:
  """A Llama folder as transformers writes it; (bytes of all tensors, of the largest)."""
  import ml_dtypes
  import numpy as np

  from maxghost.checkpoint.layouts_store import StoredArray
  from maxghost.interop import huggingface
  from maxghost.interop.safetensors_files import write_tensors

  folder.mkdir()
  content = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": 4 * width,
    "num_hidden_layers": layers, "num_attention_heads": width // 64, "num_key_value_heads": width // 64,
    "head_dim": 64, "vocab_size": 32 * width, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "dtype": "bfloat16",
  }  # fmt: skip
  (folder / "config.json").write_text(json.dumps(content))
  model = huggingface.model_config(folder).model
  rng = np.random.default_rng(0)
  planned = []
  for rule, _, _, name in huggingface.table(model):
    shape = rule.tensor_shape
    make = lambda _=None, shape=shape: rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)  # noqa: E731
    planned.append(StoredArray((name,), shape, np.dtype(ml_dtypes.bfloat16), make))
  write_tensors(folder, planned, 5_000_000_000)
  sizes = [tensor.nbytes for tensor in planned]
  return sum(sizes), max(sizes)


def peak(verb: str, source: Path, target: Path, ram: int) -> int:
  """Bytes of memory of its own that a process held at most, seen every 2 ms; pages of mapped files are not in it."""
  function, more, *_ = VERBS[verb]
  command = [sys.executable, "-c", CHILD.format(verb=function, more=more), str(source), str(target), str(ram)]
  return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


if __name__ == "__main__":
  sys.exit(_measure.run(main))
