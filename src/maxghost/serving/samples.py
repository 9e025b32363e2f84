"""Prompts as token ids, and texts sampled from the model during training."""

from collections.abc import Sequence

from flax import nnx

from maxghost import adapters
from maxghost.config import Config, ConfigError
from maxghost.data.tokenizers import Tokenizer
from maxghost.serving.batcher import Row
from maxghost.serving.generator import Generator
from maxghost.serving.sampling import Sampling

NUM_TOKENS, TEMPERATURE = 64, 0.7


def encode(texts: Sequence[str], tokenizer: Tokenizer, cfg: Config, name: str = "the prompt") -> list[list[int]]:
  """Ids of each text, with the begin token if the model was trained with one. Raises ConfigError."""
  if tokenizer.vocab_size > cfg.model.vocab_size:
    said = f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, the model's vocabulary"
    raise ConfigError(f"{said} {cfg.model.vocab_size}: they do not belong together")
  begin = [tokenizer.bos_id] if cfg.data.add_bos and tokenizer.bos_id is not None else []
  prompts = [begin + ids.tolist() for ids in tokenizer.encode([utf8(text, name) for text in texts])]
  for text, prompt in zip(texts, prompts, strict=True):
    if not prompt:
      raise ConfigError(f"{name} {text!r} has no token, and this model has no begin token; write something")
  return prompts


def utf8(text: str, name: str = "the prompt") -> bytes:
  """Raises ConfigError for a text with lone surrogates, as arguments have them whose bytes are no UTF-8."""
  try:
    return text.encode()
  except UnicodeEncodeError as error:
    raise ConfigError(f"{name} {text[:40]!r} is no valid Unicode: {error.reason} at place {error.start}") from error


class Sampler:
  """Continues sample_prompt by up to NUM_TOKENS tokens, always with the same random draws. Raises ConfigError."""

  def __init__(self, cfg: Config, tokenizer: Tokenizer):
    self._text, self._tokenizer = cfg.run.sample_prompt, tokenizer
    self._prompts = encode([self._text], tokenizer, cfg, "sample_prompt")
    size, most = len(self._prompts[0]) + NUM_TOKENS, cfg.model.trainable_position_size
    if 0 < most < size:
      said = f"sample_prompt has {size - NUM_TOKENS} tokens, and {NUM_TOKENS} are sampled behind it: the model has only"
      fix = "use a shorter prompt, or sample_every=0 and `maxghost generate` on a checkpoint"
      raise ConfigError(f"{said} {most} positions; {fix}")
    self._stop_ids = sorted(tokenizer.stop_ids)
    model, sampling = nnx.graphdef(adapters.create_abstract(cfg)), Sampling(TEMPERATURE)
    self._generator = Generator(model, size, sampling=sampling, stop_ids=self._stop_ids)

  def __call__(self, state: nnx.State) -> str:
    ids = self._generator.generate(state["model"], self._prompts, NUM_TOKENS).row(0).tolist()
    return self._text + Row(self._tokenizer, self._stop_ids, (), self._prompts[0]).take(ids, last=True)
