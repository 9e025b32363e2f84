"""Texts sampled from the model during training, always with the same prompt and random draws."""

from flax import nnx

from maxghost import models
from maxghost.config import Config, ConfigError
from maxghost.data.tokenizers import Tokenizer
from maxghost.generation import Generator, Sampling

NUM_TOKENS = 64
TEMPERATURE = 0.7


class Sampler:
  """Continues sample_prompt by up to NUM_TOKENS tokens. Raises ConfigError for a prompt without tokens."""

  def __init__(self, cfg: Config, tokenizer: Tokenizer):
    begin = [tokenizer.bos_id] if cfg.data.add_bos and tokenizer.bos_id is not None else []
    (ids,) = tokenizer.encode([cfg.run.sample_prompt.encode()])
    self._prompt = begin + ids.tolist()
    if not self._prompt:
      raise ConfigError("sample_prompt is empty, and no begin-of-document token is put before it; give a text")
    self._text, self._tokenizer, self._num_new = cfg.run.sample_prompt, tokenizer, NUM_TOKENS
    cache_size = len(self._prompt) + self._num_new
    most = cfg.model.trainable_position_size
    if 0 < most < cache_size:
      raise ConfigError(
        f"sample_prompt has {len(self._prompt)} tokens, and {self._num_new} are sampled behind it: the model has only "
        f"{most} positions; use a shorter prompt, or sample_every=0 and `maxghost generate` on a checkpoint"
      )
    self._stop_ids = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    graphdef = nnx.graphdef(models.create_abstract(cfg))
    sampling = Sampling(temperature=TEMPERATURE)
    self._generator = Generator(graphdef, cache_size, sampling=sampling, stop_ids=self._stop_ids)

  def __call__(self, state: nnx.State) -> str:
    """The prompt with its continuation by the model of a train state."""
    ids = self._generator.generate(state["model"], [self._prompt], self._num_new).row(0)
    if len(ids) and int(ids[-1]) in self._stop_ids:
      ids = ids[:-1]
    return self._text + self._tokenizer.decode(ids).decode("utf-8", errors="replace")
