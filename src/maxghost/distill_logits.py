"""`maxghost distill-logits configs/base.yml objective=distill distill_teacher=T offline_data_dir=DIR [key=value ...]`.

Reads the rows that `maxghost train` reads with the same keys, and all rows of the validation sets, runs the teacher on
them, and writes its distill_top_k largest logits (0 = all) with their true log-sum over the vocabulary. Training with
offline_data_dir=DIR then needs no teacher. Exit codes: 0 done, 2 wrong input; nothing is left there then.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from maxghost import cli, left_with
from maxghost.config import Config, ConfigError, plugins
from maxghost.data.teacher_logits import IDS, LOG_SUM, LOGITS, Writer, settings


def main(argv: list[str] | None = None) -> int:
  """Runs the command and returns the exit code."""
  return cli.run_command(_run, argv, "distill-logits")


def _run(cfg: Config) -> int:
  folder, keys = cfg.data.offline_data_dir, cfg.optimizer
  if not folder or not keys.distill_teacher:
    raise ConfigError("distill-logits writes the logits of distill_teacher into offline_data_dir; give both")
  if Path(folder).exists():
    raise ConfigError(f"offline_data_dir={folder} is there already; give a new folder, or remove it")
  from maxghost import data, load_model
  from maxghost.data import build

  teacher = load_model.teacher(cfg, offline=True)
  assert teacher is not None, "the configuration has a teacher"
  corpus = build.open_all(cfg.data, cfg.run.data_shuffle_seed, cfg.model.vocab_size, cfg.records)
  from maxghost.interop.convert import new_folder
  from maxghost.parallel import distributed
  from maxghost.training import devices

  layout = devices.open_layout(cfg)
  if distributed.count() > 1:
    raise ConfigError(f"distill-logits runs in one process, not in {distributed.count()}; its folder serves any number")
  rows, top_k = devices.rows_per_step(cfg, layout.num_devices), keys.distill_top_k or cfg.model.vocab_size
  kind = {"batch_size": rows, "tokenizer": corpus[1], "records": cfg.records}
  dataset = data.make_dataset(corpus[0], cfg.data, cfg.run.data_shuffle_seed, **kind)
  at_once, position = cfg.data.per_device_batch_size * layout.num_devices, dataset.train.state()
  about = {"steps": cfg.run.steps, "rows": rows, "entries": top_k, "settings": settings(cfg)}
  about["data"] = {name: position[name] for name in ("fingerprint", "files")}
  look, dtype, checksum = _open_teacher(cfg, layout, teacher, top_k, at_once)
  with new_folder(Path(folder)) as temporary:
    writer = Writer(temporary, top_k, cfg.model.vocab_size, dtype)
    for arrays in _rows(cfg, dataset, at_once):
      if writer.lacks(arrays):
        writer.add(arrays, look(arrays))
    about |= {"teacher": str(Path(keys.distill_teacher).resolve()), "teacher_checksum": checksum}
    count, size = writer.close(about)
  print(f"wrote the {top_k} largest logits of the tokens of {count:,} segments, {size / 1e6:.1f} MB: {folder}")
  print(f"they are of {about['steps']} steps of {rows} rows, and of the validation sets; train with the same keys")
  return 0


def _rows(cfg: Config, dataset, at_once: int) -> Iterator[Mapping[str, np.ndarray]]:
  """The arrays of `at_once` rows at a time: of the validation sets that ask the teacher, then of every step."""
  taught = {name for name, one in plugins.OBJECTIVES.items() if one.reference == "teacher"}
  sets = zip(cfg.data.validation_sets.values(), cfg.set_objectives, strict=True)
  empty = {entry.domain for entry in dataset.summary() if entry.held_out == 0}  # only runs without scores allow that
  for domain in dict.fromkeys(name for name, objective in sets if objective in taught and name not in empty):
    for index in range(-(-len(dataset.validation_rows(domain)) // at_once)):
      yield dataset.validation_batch(index, at_once, domain).arrays
  for _ in range(cfg.run.steps if cfg.optimizer.objective in taught else 0):
    arrays = next(dataset.train).arrays
    for first in range(0, len(arrays["inputs"]), at_once):
      yield {name: values[first : first + at_once] for name, values in arrays.items()}


def _open_teacher(cfg: Config, layout, teacher: tuple, top_k: int, num_rows: int):
  """(function from arrays of rows to the teacher's on the host, dtype of its logits, checksum of its parameters)."""
  import jax
  import jax.numpy as jnp
  from flax import nnx

  from maxghost import models, objectives
  from maxghost.checkpoint.checksum import checksums
  from maxghost.data.hashing import text_hash
  from maxghost.parallel.shardings import use
  from maxghost.training import devices, state

  graphdef, abstract = nnx.split(models.create_abstract(teacher[0]))
  abstract, dtype = layout.abstract(abstract), jnp.promote_types(teacher[0].dtype, jnp.float32)
  params = state.from_tree(teacher[1](state.to_tree(abstract))()["model"], abstract)
  objective = dataclasses.replace(objectives.create(cfg, "distill"), top_k=top_k)

  def logits(params, batch):
    found = objective.from_reference(nnx.merge(graphdef, params), batch)
    return {IDS: found[IDS]} | {name: found[name].astype(dtype) for name in (LOGITS, LOG_SUM)}

  compiled = jax.jit(logits, compiler_options=devices.compiler_options(layout))

  def look(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    with use(layout):
      return jax.device_get(compiled(params, layout.put(dict(arrays), num_rows)))

  return look, dtype, f"{text_hash(*map(str, checksums(jax.tree.leaves(params)))):016x}"


if __name__ == "__main__":
  sys.exit(left_with(main()))
