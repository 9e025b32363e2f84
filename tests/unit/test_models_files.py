"""configs/models: each file loads, and its model has the published number of parameters."""

import math

import pytest
import tiny

from maxghost import config, models

PARAMETERS = {
  "gpt2-small": 124_439_808,
  "llama2-7b": 6_738_415_616,
  "llama3-8b": 8_030_261_248,
  "llama3.1-8b": 8_030_261_248,
  "llama3-70b": 70_553_706_496,
  "mistral-7b": 7_241_732_096,
  "mixtral-8x7b": 46_702_792_704,
  "qwen3-0.6b": 596_049_920,
  "qwen3-8b": 8_190_735_360,
  "qwen3-30b-a3b": 30_532_122_624,
  "gpt-oss-20b": 20_914_757_184,
  "gpt-oss-120b": 116_829_156_672,
}


def test_every_file_is_tested():
  names = {path.stem for path in (config.config_dir() / "models").glob("*.yml")}
  assert names == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_as_many_as_published(name):
  shapes = tiny.abstract_by_label(models.create_abstract(config.load(f"model_name={name}")))
  assert sum(math.prod(v.shape) for v in shapes.values()) == PARAMETERS[name]
