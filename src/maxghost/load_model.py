"""A model from a path, for the commands that use one: a run, a checkpoint, an imported or a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path

from maxghost import config
from maxghost.config import Config, ConfigError
from maxghost.interop import model_keys, model_path, parameters


def find(
  path: str | Path, config_file: str | None = None, otherwise: str | None = None, **changes
) -> tuple[model_path.ModelPlace, Config]:
  """Where the model is, and its configuration. config_file: for a checkpoint that has none beside it, or to confirm
  that one; otherwise: read only where there is none. changes: keys of the configuration to replace. Raises ConfigError;
  nothing of the parameters has been read then."""
  place = model_path.find(path)
  if config_file is None and place.config is None:
    config_file = otherwise
  cfg = config.load(config_file) if config_file else place.config
  if cfg is None:
    raise ConfigError(f"{path}: no config.yml beside it says what model it is; name one with --config")
  if config_file and place.config:
    unlike = model_keys.differing(place.config.model, cfg.model)
    if unlike:
      raise ConfigError(f"--config {config_file} is another model than {path}: they differ in {', '.join(unlike)}")
  return place, config.replace(cfg, **changes)


def load(place: model_path.ModelPlace, cfg: Config, say: Callable[[str], None] = print):
  """(graphdef, state) of the model with its parameters. JAX is imported here. Raises ConfigError where they misfit."""
  from flax import nnx

  from maxghost import models
  from maxghost.training import resume
  from maxghost.training.devices import configure_jax

  configure_jax(cfg)
  graphdef, abstract = nnx.split(models.create_abstract(cfg))
  wanted = resume.to_tree(resume.abstract_arrays(abstract))
  tree = parameters.open_parameters(place, cfg, wanted, say)()
  return graphdef, resume.from_tree(tree, abstract)
