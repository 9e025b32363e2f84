"""One small corpus written in every kind that `dataset_type` reads, for the checks of the data benchmark."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from maxghost.config import DataConfig
from maxghost.data import prepare
from maxghost.data.sources import synthetic


def every_type(folder: Path, base: DataConfig) -> dict[str, DataConfig]:
  """{name: configuration} of the six types, and of a prepared corpus. All but stdlib hold the synthetic documents."""
  base = dataclasses.replace(base, ghost_val_sets=("words",))
  source = synthetic.load(("words", "digits", "brackets"), 120_000)
  texts = {domain: [d.text.decode() for d in source.documents if d.domain == domain] for domain in source.domains}
  made = {
    "stdlib": dataclasses.replace(base, dataset_domain_bytes=400_000, ghost_val_sets=("manual",)),
    "synthetic": dataclasses.replace(base, dataset_type="synthetic", dataset_domain_bytes=120_000),
    "text": dataclasses.replace(base, dataset_type="text", dataset_files=_text(folder / "text", texts)),
    "tfds": dataclasses.replace(
      base, dataset_type="tfds", dataset_files=_tfds(folder / "tfds", texts), dataset_path=str(folder / "tfds")
    ),
    "grain": dataclasses.replace(base, dataset_type="grain", dataset_files=_records(folder / "records", texts)),
    "hf": dataclasses.replace(base, dataset_type="hf", dataset_files=_hf(folder / "hf", texts)),
  }
  prepare.prepare(source, base, str(folder / "prepared"), part_bytes=100_000)
  prepared = dataclasses.replace(base, dataset_type="grain", dataset_files=(str(folder / "prepared"),))
  return {**made, "grain, prepared": prepared}


def _text(folder: Path, texts: dict[str, list[str]]) -> tuple[str, ...]:
  folder.mkdir()
  for domain, entries in texts.items():
    lines = (json.dumps({"text": text}) + "\n" for text in entries)
    (folder / f"{domain}.jsonl").write_text("".join(lines), encoding="utf-8")
  return tuple(f"{domain}={folder}/{domain}.jsonl" for domain in texts)


def _records(folder: Path, texts: dict[str, list[str]]) -> tuple[str, ...]:
  from array_record.python import array_record_module

  folder.mkdir()
  for domain, entries in texts.items():
    for shard in range(2):
      writer = array_record_module.ArrayRecordWriter(str(folder / f"{domain}-{shard}.array_record"), "group_size:1")
      for text in entries[shard::2]:
        writer.write(text.encode())
      writer.close()
  return tuple(f"{domain}={folder}/{domain}-*.array_record" for domain in texts)


def _tfds(folder: Path, texts: dict[str, list[str]]) -> tuple[str, ...]:
  import tensorflow_datasets as tfds

  tfds.disable_progress_bar()
  for domain, entries in texts.items():
    _builder(tfds, domain, entries)(data_dir=folder, file_format="array_record").download_and_prepare()
  return tuple(f"{domain}=bench_{domain}" for domain in texts)


def _builder(tfds, domain: str, entries: list[str]):
  """A TFDS builder of one feature `text`."""

  class Texts(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    name = f"bench_{domain}"

    def _info(self):
      features = tfds.features.FeaturesDict({"text": tfds.features.Text(), "number": np.int32})
      return tfds.core.DatasetInfo(builder=self, description="written by a benchmark", features=features)

    def _split_generators(self, dl_manager):
      return {"train": ((number, {"text": text, "number": number}) for number, text in enumerate(entries))}

    def _generate_examples(self):
      yield from ()

  Texts.name = f"bench_{domain}"
  return Texts


def _hf(folder: Path, texts: dict[str, list[str]]) -> tuple[str, ...]:
  import datasets

  datasets.disable_progress_bars()
  for domain, entries in texts.items():
    datasets.Dataset.from_dict({"text": entries}).save_to_disk(folder / domain)
  return tuple(f"{domain}={folder}/{domain}" for domain in texts)
