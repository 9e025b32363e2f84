"""`unread` of a key: with the values that it names, the key changes nothing that is computed."""

import functools

import jax
import numpy as np
import pytest

from maxghost import config
from maxghost.config import plugins
from maxghost.training import state
from maxghost.training.step import make_train_step

TINY = (
  "base_num_decoder_layers=1", "base_emb_dim=16", "base_mlp_dim=24", "base_num_query_heads=4", "base_num_kv_heads=2",
  "head_dim=8", "max_target_length=8", "per_device_batch_size=2", "ghost_enabled=false",
)  # fmt: skip
DRAWS = ("lora_dropout",)  # the step then makes a random key, which nothing reads
OTHERS = {
  "base_moe_mlp_dim": 40, "lora_module_path": "mlp", "reward_functions": "length", "mu_dtype": "bfloat16",
  "grpo_epsilon": "0.1,0.1", "reward_weights": "1.0", "num_communication_overlapping_steps": 1, "distill_top_k": 4,
}  # fmt: skip
NEEDS = {  # what a value of the other key needs
  "llama3.1": ("rope_factor=4",), "yarn": ("rope_factor=4",), "dpo": ("dpo_algo=simpo",),
  "grpo": ("packing=none",), "distill": ("distill_teacher=teacher",), "true": ("dcn_data_parallelism=2",),
}  # fmt: skip
REFUSED = {"sft_train_on_completion_only": {"grpo"}}  # pairs that a check refuses
MARKED = [
  (name, *mark.split("="))
  for name, field in config.fields().items()
  for mark in filter(None, field.metadata["unread"].split(";"))
]
TRACED = [
  (name, other, value)
  for name, other, text in MARKED
  for value in text.split("|")
  if other in ("rope_type", "use_qk_clip", "num_experts", "mtp_num_layers", "num_vocab_tiling",
                                "lr_schedule_type", "opt_type", "lora_rank") and name not in DRAWS
]  # fmt: skip


def other_value(name: str):
  """A valid value of a key that is not its default."""
  field = config.fields()[name]
  choices = [choice for choice in field.metadata["choices"] if choice != field.default]
  if name in OTHERS or choices:
    return OTHERS.get(name, choices[0] if choices else None)
  if isinstance(field.default, bool):
    return str(not field.default).lower()
  half = type(field.default)(field.default / 2)
  return (half if half >= field.metadata["minimum"] else field.default * 2) if field.default else 0.125


@functools.cache
def traced(*keys: str) -> str:
  """The train step as text."""
  cfg = config.load(*TINY, *keys)
  graphdef, abstract = state.abstract_split(cfg)
  shape = jax.ShapeDtypeStruct((2, 8), np.int32)
  batch = {f"{name}{suffix}": shape for name in ("inputs", "targets") for suffix in ("", "_position", "_segmentation")}
  step, _ = make_train_step(cfg, graphdef, abstract, batch, num_segments=1)
  return str(jax.make_jaxpr(step)(abstract, batch, ()))


@pytest.mark.parametrize(("name", "other", "value"), TRACED)
def test_the_step_is_the_same_with_another_value_of_an_unread_key(name, other, value):
  keys = (f"{other}={value}", *NEEDS.get(value, ()))
  keys = tuple(key for key in keys if not key.startswith(f"{name}="))
  assert traced(*keys, f"{name}={other_value(name)}") == traced(*keys)


@pytest.mark.parametrize(
  ("name", "keys"),
  [("rope_factor", ("rope_type=yarn", "rope_factor=4")), ("qk_clip_threshold", ("use_qk_clip=true",)),
   ("sgd_momentum", ("opt_type=sgd",)), ("muon_beta", ("opt_type=muon",)), ("adam_eps", ("opt_type=muon",)),
   ("wsd_decay_steps_fraction", ("lr_schedule_type=wsd",)), ("lora_alpha", ("lora_rank=2",))],
)  # fmt: skip
def test_the_step_changes_with_a_key_that_is_read(name, keys):
  assert traced(*keys, f"{name}={other_value(name)}") != traced(*keys)


@pytest.mark.parametrize(("name", "other", "text"), MARKED)
def test_marks_name_valid_values_and_other_ones_are_without_a_note(name, other, text):
  field, found = config.fields()[other], set(text.split("|"))
  choices = {False: {"true", "false"}, True: set(field.metadata["choices"])}[bool(field.metadata["choices"])]
  assert found <= choices or found == {"[]" if field.default == () else str(field.metadata["minimum"])}
  read = choices - found if found <= choices else {"[[mlp,tensor]]" if field.default == () else "2"}
  for value in read - set(plugins.OF_VALIDATION) - REFUSED.get(name, set()):
    notes = config.load_with_origins(f"{other}={value}", *NEEDS.get(value, ()), f"{name}={other_value(name)}").notes
    assert not any(note.startswith(f"{name}=") and f"is not read with {other}=" in note for note in notes)


@pytest.mark.parametrize(
  ("keys", "said"),
  [
    (("objective=dpo", "dpo_algo=orpo", "dpo_beta=0.3"), "dpo_beta=0.3 (command line) is not read with dpo_algo=orpo"),
    (("objective=dpo", "orpo_lambda=0.7"), "orpo_lambda=0.7 (command line) is not read with dpo_algo=sigmoid"),
    (
      ("objective=dpo", "dpo_algo=ipo", "simpo_gamma=1"),
      "simpo_gamma=1.0 (command line) is not read with dpo_algo=ipo",
    ),
    (("objective=grpo", "packing=none", "grpo_kl=k2"), "grpo_kl=k2 (command line) is not read with grpo_beta=0.0"),
    (("packing=none", "max_segments_per_seq=3"), "max_segments_per_seq=3 (command line) is not read with packing=none"),
    (("grpo_kl=k2",), "grpo_kl=k2 (command line) is not read with objective=next_token"),
  ],
)
def test_a_key_that_another_key_of_its_objective_turns_off_is_noted(keys, said):
  assert config.load_with_origins(*keys).notes == (said,)


def test_a_key_of_another_objective_is_noted():
  (note,) = config.load_with_origins("distill_top_k=4").notes
  assert note == "distill_top_k=4 (command line) is not read with objective=next_token"
