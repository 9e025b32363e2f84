"""Seconds and memory of a question to an index of 10^5 chunks, beyond the generation of the answer.

  python benchmarks/asking.py [--folder DIR] [--chunks 100000] [--answer 32] [--rounds 5] [key=value ...]

A run of one step of the default configuration, an index of a few of its documents, and then that index with as many
chunks as asked for: random sketches, and texts of 250 bytes with Zipf-distributed words. A process of its own opens it
and asks; its first question compiles. "search" is the part that grows with the index: ranking, the words and the texts.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import _measure
import numpy as np

from maxghost import ask

WORDS, IN_CHUNK = 30_000, 42


def prepare(folder: Path, chunks: int, overrides: list[str]) -> Path:
  """The run, with an index of `chunks` chunks in RUN/index."""
  from maxghost import attribute, train  # here: the process that is measured has no use for them

  run, place = folder / "run", folder / "run" / "index"
  if (folder / f"{chunks}").is_file():
    return run
  folder.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(0)
  vocabulary = ["".join(chr(97 + c) for c in rng.integers(0, 26, size)) for size in rng.integers(2, 9, WORDS)]
  with open(folder / "corpus.jsonl", "w") as file:
    for _ in range(chunks):
      drawn = np.minimum(rng.zipf(1.3, IN_CHUNK), WORDS) - 1
      file.write(json.dumps({"text": " ".join(vocabulary[i] for i in drawn)}) + "\n")
  few = (folder / "corpus.jsonl").read_text().splitlines(keepends=True)[:64]
  (folder / "few.jsonl").write_text("".join(few))
  made = ["run_name=run", f"base_output_directory={folder}", "steps=1", "checkpoint_period=1", "eval_interval=-1"]
  if train.main([*made, "enable_tensorboard=false", *overrides]):
    sys.exit(2)
  if attribute.main([f"{run}/checkpoints/1", "--data", f"notes={folder}/few.jsonl", "--index", str(place)]):
    sys.exit(2)
  _enlarge(folder, place, chunks)
  (folder / f"{chunks}").touch()
  return run


def _enlarge(folder: Path, place: Path, chunks: int) -> None:
  from maxghost import attribute, config
  from maxghost.attribution import words
  from maxghost.attribution.corpus import END
  from maxghost.attribution.index import ENDS, files_of
  from maxghost.config.files import check_seal, sealed
  from maxghost.data.hashing import sha256

  rng, about = np.random.default_rng(1), check_seal(json.loads((place / "index.json").read_text()))
  sketch, blocks = (place / name for name in files_of(1))
  shape, more = np.load(sketch, mmap_mode="r").shape, dict(np.load(blocks))
  drawn = np.lib.format.open_memmap(sketch, "w+", np.int8, (chunks, *shape[1:]))
  for start in range(0, chunks, 4096):
    part = drawn[start : start + 4096]
    part[:] = np.clip(np.rint(rng.standard_normal(part.shape, np.float32) * 127 / 8), -127, 127)
  drawn.flush()
  norm_NM = rng.lognormal(0, 1, (chunks, shape[1])).astype(np.float32)
  np.savez(blocks, norm_NM=norm_NM, inverse_MRR=more["inverse_MRR"])
  offset, texts, ids = 0, [], []
  for line in (folder / "corpus.jsonl").read_bytes().splitlines(keepends=True):
    texts.append(json.loads(line)["text"])
    ids.append(json.dumps(["notes", "corpus.jsonl", offset, 0, 250]) + "\n")
    offset += len(line)
  (place / "ids.jsonl").write_text("".join(ids))
  words.write(place, enumerate(texts), chunks)
  np.save(place / ENDS, np.full(chunks, END))
  cfg = config.load(str(place / "config.yml"))
  config.save(attribute.as_run(cfg, [f"notes={folder}/corpus.jsonl"], ("notes",)), place / "config.yml")
  about |= {"chunks": chunks, "files": {name: sha256(place / name) for name in about["files"]}}
  about.pop("checksum", None)
  (place / "index.json").write_text(json.dumps(sealed(about)))


def measure(run: Path, answer: int, rounds: int) -> None:
  """Prints one line of JSON."""
  begin = time.perf_counter()
  sources = ask.open_sources(*ask.opened(run, None))
  opened, begin = time.perf_counter() - begin, time.perf_counter()
  sources.warm_up(64)
  warm, before, rng = time.perf_counter() - begin, _measure.peak_bytes(), np.random.default_rng(2)
  found, searched, cpu = [], [], []
  texts = [line[2] for line in sources.index.ids]
  for number in range(rounds + 1):
    prompt, own = rng.integers(97, 123, 30), rng.integers(97, 123, answer)
    if number == 0:
      prompt = np.frombuffer(b"which text is like this one? ", np.uint8)
    used = time.process_time()
    seconds = sources.of_answer(prompt.tolist(), own.tolist())["seconds"]
    cpu.append(time.process_time() - used)
    begin = time.perf_counter()
    sources._asked(np.concatenate([prompt, own]), answer)
    found.append(seconds)
    searched.append(seconds - (time.perf_counter() - begin))
  size = sum(path.stat().st_size for path in (run / "index").iterdir())
  print(json.dumps({
    "chunks": len(texts), "answer tokens": answer, "open, s": opened, "compile, s": warm, "first, s": found[0],
    "question, s": float(np.median(found[1:])), "question, CPU s": float(np.median(cpu[1:])),
    "of it search, s": float(np.median(searched[1:])),
    "index, MB": size / 1e6, "peak, MB": _measure.peak_bytes() / 1e6, "before questions, MB": before / 1e6,
  }))  # fmt: skip


def main() -> int:
  args = _measure.arguments(__doc__, folder="runs/asking", chunks=100_000, answer=32, rounds=5, child=False)
  if args.child:
    measure(Path(args.folder) / "run", args.answer, args.rounds)
    return 0
  prepare(Path(args.folder), args.chunks, args.overrides)
  given = [f"--{name}={getattr(args, name)}" for name in ("folder", "chunks", "answer", "rounds")]
  done = subprocess.run([sys.executable, __file__, "--child", *given], check=True, capture_output=True, text=True)
  row = json.loads(done.stdout.splitlines()[-1])
  for name, value in row.items():
    print(f"{name:22s} {value:,.3f}" if isinstance(value, float) else f"{name:22s} {value:,}")
  if args.json:
    with args.json.open("a") as file:
      file.write(json.dumps({"benchmark": "asking"} | row | _measure.machine()) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(_measure.run(main))
