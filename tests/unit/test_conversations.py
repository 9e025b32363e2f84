"""Conversations: read, rendered by chat templates, weighted where the assistant speaks, packed, refused by place."""

import dataclasses
import functools
import gzip
import importlib.util
import json
import pickle
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from maxghost import config, data
from maxghost.attribution.corpus import Corpus
from maxghost.config import ConfigError
from maxghost.data import chat, tokenizer_files
from maxghost.data.conversations import ConversationUnits, Rendering
from maxghost.data.tokenizers import ByteTokenizer, load_tokenizer

WORDS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
SPECIAL = {"<|bos|>": "^", "<|eos|>": "$"}  # as the tests show them
BASE = dataclasses.replace(
  config.load().data, dataset_type="text", max_target_length=96, per_device_batch_size=2, ghost_val_sets=("sums",),
  shuffle_window_bytes=900,
)  # fmt: skip
# A template of ChatML's form; marked: with the blocks that say what the assistant says.
PLAIN = (
  "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token + '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
MARKED = (
  "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}"
  "{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] + eos_token }}{% endif %}{{ '\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ALPHABET = tokenizers.pre_tokenizers.ByteLevel.alphabet()
TURNS = [
  {"role": "system", "content": "short é"},
  {"role": "user", "content": "1+1?"},
  {"role": "assistant", "content": "two ü"},
  {"role": "user", "content": "2+2?"},
  {"role": "assistant", "content": "four"},
]


@functools.cache
def tokenizer_file() -> str:
  """A folder with a tokenizer of bytes that reads special tokens."""
  folder = tempfile.mkdtemp()
  inner = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(sorted(ALPHABET))}, []))
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()
  inner.add_special_tokens([*SPECIAL, "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>"])
  inner.save(f"{folder}/tokenizer.json")
  return folder


def rendering(source: str | None = None, **changes) -> Rendering:
  template = chat.Template("t.jinja", source, tuple(WORDS.items())) if source else None
  tokenizer = load_tokenizer("huggingface", tokenizer_file()) if source else ByteTokenizer()
  return Rendering(tokenizer, template, **{"completion_only": True, "add_bos": True, "add_eos": True, **changes})


def encode(made: Rendering, **record) -> tuple[list[int], str]:
  """The ids, and the trained ones as text, the end token as $."""
  ids, weights = made.encode(json.dumps(record).encode())
  assert set(weights.tolist()) <= {0.0, 1.0} and len(ids) == len(weights)
  signs = {made.tokenizer.bos_id: b"^", made.tokenizer.eos_id: b"$"}
  whole, trained = (
    b"".join(signs.get(i) or made.tokenizer.decode([i]) for i in some) for some in (ids, ids[weights > 0])
  )
  return whole.decode(), trained.decode()


def test_what_is_trained():
  """Every turn of the assistant with its end token, by blocks of the template and by prefixes, and nothing else."""
  text = "<system>short é$\n<user>1+1?$\n<assistant>two ü$\n<user>2+2?$\n<assistant>four$\n"
  assert encode(rendering(MARKED), messages=TURNS) == (text, "two ü$four$")
  assert encode(rendering(PLAIN), messages=TURNS) == (text, "two ü$\nfour$\n")  # all that is written for the turn
  whole, trained = encode(rendering(), messages=TURNS)
  assert whole == "^system: short é\nuser: 1+1?\nassistant: two ü$\nuser: 2+2?\nassistant: four$"
  assert trained == " two ü$ four$"
  for made in (rendering(MARKED), rendering(PLAIN), rendering()):
    whole, trained = encode(made, prompt=TURNS[:4], completion=TURNS[4:])
    assert whole == encode(made, messages=TURNS)[0] and trained.strip() in ("four$", "four$\n")
    ids, weights = made.encode(json.dumps({"messages": TURNS[1:3]}).encode())
    first = np.flatnonzero(weights)[0] + (made.template is None)  # behind the space between role and content
    assert made.prompt("1+1?") == ids[:first].tolist()
    answer = [*made.tokenizer.encode([b"two \xc3\xbc"])[0]]
    again = made.prompt([*TURNS[1:2], {"role": "assistant", "content": "two ü"}, {"role": "user", "content": "?"}])
    assert again[: first + len(answer)] == [*made.prompt("1+1?"), *answer], "an answer comes back as it was generated"
    assert made.end_ids() == dataclasses.replace(made, completion_only=False).end_ids() == {made.tokenizer.eos_id}
  assert encode(rendering(PLAIN), prompt="1+1=", completion="2") == ("^1+1=2$", "2$")
  assert encode(rendering(add_bos=False, add_eos=False), prompt="1+1=", completion="2")[1] == "2"
  assert rendering(PLAIN, completion_only=False).encode(json.dumps({"messages": TURNS}).encode())[1].all()


def test_every_character_is_kept():
  """Those for private use too, which fonts give icons."""
  icons = "\U000f0000\U000f0001\ufffe"
  turns = [{"role": "user", "content": icons}, {"role": "assistant", "content": icons}]
  for made in (rendering(MARKED), rendering(PLAIN), rendering()):
    whole, trained = encode(made, messages=turns)
    assert whole.count(icons) == 2 and trained.count(icons) == 1
    assert icons.encode() in made.tokenizer.decode(made.prompt(icons))
    with pytest.raises(ValueError, match="surrogates not allowed"):
      made.prompt("\ud800")


def test_special_tokens_before_the_text_of_an_answer_do_not_end_it():
  """gpt-oss begins an answer with `<|channel|>final<|message|>`, all behind the prompt `<|start|>assistant`."""
  header = PLAIN.replace("m['content'] +", "('<s>final</s>' if m['role'] == 'assistant' else '') + m['content'] +")
  made = rendering(header)
  whole, trained = encode(made, messages=TURNS[:3])
  assert (whole, trained) == ("<system>short é$\n<user>1+1?$\n<assistant>finaltwo ü$\n", "finaltwo ü$\n")
  assert made.end_ids() == {made.tokenizer.eos_id}
  always = PLAIN.replace("{% if add_generation_prompt %}", "").replace("<assistant>' }}{% endif %}", "<s>assistant' }}")
  always = always.replace("{{ '<' + m['role'] + '>'", "{{ '<s>' + m['role']")  # as Llama 3 was published first
  assert made.tokenizer.eos_id in rendering(always).end_ids(), "whatever the template writes behind it"
  thinking = rendering(PLAIN.replace("{{ '<assistant>' }}", "{{ '<assistant><think>' }}"))
  assert thinking.end_ids() == {made.tokenizer.eos_id}, "DeepSeek R1's cannot be trained on, and yet asks"
  assert thinking.tokenizer.decode(thinking.prompt("1+1?")).decode() == "<user>1+1?\n<assistant><think>"
  with pytest.raises(ValueError, match="leaves out what the assistant says"):
    rendering(PLAIN.replace("m['content'] +", "m['content'] | upper +")).end_ids()


def test_a_tokenizer_that_begins_texts_with_a_space(tmp_path):
  """As in TRL, prompt and completion are one text, and trained from where its tokens are not the prompt's alone."""
  letters = {letter: n for n, letter in enumerate(["<unk>", "<s>", "</s>", *"▁+=36!:yea.", "▁y", "▁ye"])}
  inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, [("▁", "y"), ("▁y", "e")], unk_token="<unk>"))
  change = tokenizers.normalizers
  as_llama_2 = [change.Prepend("▁"), change.Replace(" ", "▁")]
  inner.normalizer = change.Sequence([change.Replace("\n", " "), *as_llama_2])
  back = tokenizers.decoders
  inner.decoder = back.Sequence([back.Replace("▁", " "), back.Fuse(), back.Strip(" ", 1, 0)])
  inner.add_special_tokens(["<s>", "</s>"])
  inner.save(str(tmp_path / "tokenizer.json"))
  tokenizer = load_tokenizer("huggingface", str(tmp_path))
  made = Rendering(tokenizer, None, completion_only=True, add_bos=True, add_eos=True)

  def spelled(ids, weights) -> str:
    words = [tokenizer._spelled(number) for number in ids.tolist()]
    return " ".join([*words[: weights.argmax()], "|", *words[weights.argmax() :]])

  for prompt, completion, wanted in [
    ("3+3=", "6", "<s> ▁ 3 + 3 = | 6 </s>"),
    ("3:", " ye", "<s> ▁ 3 : | ▁ye </s>"),
    ("3: ", "ye", "<s> ▁ 3 : | ▁ye </s>"),
    ("", "6", "<s> | ▁ 6 </s>"),
  ]:
    record = json.dumps({"prompt": prompt, "completion": completion})
    assert spelled(*made.encode(record.encode())) == wanted
  for text, wanted in (("6", "6"), (" ye", "▁ye"), ("ye", "y e"), ("6\nye", "6 ▁ye"), ("", "")):  # answers to a prompt
    assert " ".join(map(tokenizer._spelled, tokenizer.encode_behind(text.encode()).tolist())) == wanted
  pair = {"prompt": "3: ", "chosen": "ye", "rejected": "!"}
  write(tmp_path / "p.jsonl", [pair] * 16)
  cfg = dataclasses.replace(
    BASE, max_target_length=16, ghost_val_sets=("p",), tokenizer_type="huggingface", tokenizer_path=f"{tmp_path}",
    dataset_files=(f"p={tmp_path}/p.jsonl",),
  )  # fmt: skip
  (part,) = data.load_dataset(cfg, 0, batch_size=2, records="pairs").parts
  # Both responses begin behind the colon: the probability of the rejected one contains that of its space.
  sides = part.sides(json.dumps(pair).encode())
  assert [spelled(*side) for side in sides] == ["<s> ▁ 3 : | ▁ye </s>", "<s> ▁ 3 : | ▁ ! </s>"]


def test_what_a_record_tells_its_template():
  """`chat_template_kwargs` are names that the template knows, as in TRL."""
  source = "{% if mode is defined %}{{ mode }} {{ more }}\n{% endif %}" + PLAIN
  own = {"chat_template_kwargs": {"mode": "brief", "more": 2}}
  for turns in ({"messages": TURNS}, {"prompt": TURNS[:4], "completion": TURNS[4:]}):
    whole, trained = encode(rendering(source), **turns)
    assert encode(rendering(source), **turns, **own) == ("brief 2\n" + whole, trained)
  assert (
    encode(rendering(source), messages=TURNS, chat_template_kwargs=None)[0]
    == encode(rendering(PLAIN), messages=TURNS)[0]
  )


def test_conversations_with_tools_have_a_template_of_their_own(tmp_path):
  """As in transformers, where a tokenizer names a template `tool_use`."""
  shutil.copy(Path(tokenizer_file()) / "tokenizer.json", tmp_path)
  named = {"default": MARKED, "tool_use": "{{ tools | tojson }}" + MARKED}
  settings = WORDS | {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  keys = {"tokenizer_type": "huggingface", "tokenizer_path": str(tmp_path)}
  made = Rendering.of(dataclasses.replace(BASE, **keys), load_tokenizer(*keys.values()))
  whole, trained = encode(made, messages=TURNS)
  assert encode(made, messages=TURNS, tools=[{"a": 1}]) == ('[{"a": 1}]' + whole, trained)
  write(tmp_path / "a.jsonl", sums(30))
  files = (f"sums={tmp_path}/a.jsonl",)
  before = dataset_of(BASE, **keys, dataset_files=files).train.state()["fingerprint"]
  settings["chat_template"][1]["template"] = "{{ tools }}" + MARKED
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  assert dataset_of(BASE, **keys, dataset_files=files).train.state()["fingerprint"] != before


def test_a_template_for_tools_in_a_file_of_its_own_is_read_and_kept(tmp_path):
  """Where transformers 5 saves it; a run's own template takes the place of both."""
  named = {"default": MARKED, "tool_use": "{{ tools | tojson }}" + MARKED}
  settings = WORDS | {"chat_template": [{"name": name, "template": "old"} for name in named]}
  saved, copied, replaced = (tmp_path / name for name in ("saved", "copied", "replaced"))
  (saved / "additional_chat_templates").mkdir(parents=True)
  shutil.copy(Path(tokenizer_file()) / "tokenizer.json", saved)
  (saved / "tokenizer_config.json").write_text(json.dumps(settings))
  (saved / "chat_template.jinja").write_text(named["default"])
  kind, tools = "huggingface", [{"a": 1}]
  load = lambda folder: Rendering.of(BASE, load_tokenizer(kind, str(folder)))  # noqa: E731
  assert encode(load(saved), messages=TURNS, tools=tools) == encode(load(saved), messages=TURNS)
  (saved / "additional_chat_templates" / "tool_use.jinja").write_text(named["tool_use"])
  tokenizer_files.save(load_tokenizer(kind, str(saved)), kind, copied)
  for folder in (saved, copied):
    whole, trained = encode(load(folder), messages=TURNS)
    assert encode(load(folder), messages=TURNS, tools=tools) == ('[{"a": 1}]' + whole, trained)
  (tmp_path / "own.jinja").write_text("own" + MARKED)
  tokenizer_files.save(load_tokenizer(kind, str(saved)), kind, replaced, str(tmp_path / "own.jinja"))
  assert encode(load(replaced), messages=TURNS, tools=tools) == ("own" + whole, trained)


def test_what_templates_may_use():
  source = "{{ messages[0] | tojson }}{{ tools | tojson(indent=1) }}{% for m in messages %}{% break %}{% endfor %}"
  template = chat.Template("t", source + "{{ strftime_now('%Y') }}\n    {% if true %}\nx{% endif %}")
  assert template.render([{"role": "user", "content": "<é>"}], [{"a": 1}]).startswith(
    '{"role": "user", "content": "<é>"}[\n {\n  "a": 1\n }\n]20'
  )
  for unsafe in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no system') }}"):
    with pytest.raises(ValueError, match="chat template t fails"):
      chat.Template("t", unsafe).render([{"role": "user", "content": "x"}])
  with pytest.raises(ConfigError, match="t, line 2"):
    chat._compiled("t", "a\n{% if %}")


@pytest.mark.parametrize("source", [None, PLAIN])
def test_the_form_of_sharegpt_says_the_same_as_messages(source):
  names = {"user": "human", "assistant": "gpt", "system": "system"}
  turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]
  for name in ("conversations", "messages"):
    ours, theirs = (
      rendering(source).encode(json.dumps(record).encode()) for record in ({name: turns}, {"messages": TURNS})
    )
    for mine, wanted in zip(ours, theirs, strict=True):
      np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize(
  ("record", "source", "said"),
  [
    ({"conversations": [{"from": "humam", "value": "x"}]}, None, r"conversations\[0\] has the role 'humam'"),
    ({"conversations": [{"from": "human", "content": "x"}]}, None, r"conversations\[0\] \(user\) has no text"),
    ({"messages": TURNS[:2]}, None, "no turn of the assistant"),
    ({"messages": []}, None, "messages is no list of messages"),
    ({"messages": [{"role": "human", "content": "x"}]}, None, r"messages\[0\] has the role 'human'.*use user"),
    ({"messages": [{"role": "asistant", "content": "x"}]}, None, "did you mean 'assistant'"),
    ({"messages": [{"role": "user"}]}, None, r"messages\[0\] \(user\) has no text"),
    ({"messages": ["x"]}, None, r"messages\[0\] is no object"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, None, r"messages\[0\] has the role \['user'\]; roles are"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, None, r"messages\[0\] \(user\) has no text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, None, r"\[0\] \(user\) has no text"),
    ({"prompt": "x", "completion": ""}, None, "the completion is empty"),
    ({"prompt": "x", "completion": TURNS}, None, "prompt is no list of messages"),
    ({"prompt": "x", "completion": None}, None, "it has no completion"),
    ({"prompt": None, "completion": "x"}, None, "completion is a text, but its prompt is none; write both"),
    ({"prompt": "x", "completion": 5}, None, "completion is no list of messages"),
    ({"text": "x"}, None, "it has no messages"),
    ({"prompt": TURNS[:2], "completion": TURNS[1:2]}, None, "no turn of the assistant"),
    ({"messages": TURNS, "tools": [{"name": "f"}]}, None, "tools, which need a chat template"),
    ({"messages": TURNS, "chat_template_kwargs": {"a": 1}}, None, "chat_template_kwargs, which need a chat template"),
    ({"messages": TURNS, "chat_template_kwargs": [1]}, PLAIN, "chat_template_kwargs are no object"),
    ({"messages": TURNS, "chat_template_kwargs": {"tools": 1}}, PLAIN, "t.jinja fails.*'tools'"),
    ({"messages": [TURNS[1], {"role": "assistant", "tool_calls": [{}]}]}, None, "tool_calls, which need"),
    ({"messages": TURNS}, "{{ raise_exception('no system') }}", "t.jinja fails: no system"),
    ({"messages": TURNS}, "{{ messages[9]['role'].x.y }}", "t.jinja fails"),
    ({"messages": TURNS}, "{{ messages[2]['content'] }}{# endgeneration #}", "t.jinja gives no token"),
    ({"messages": TURNS}, "{% if add_generation_prompt %}>{% endif %}x", "does not begin turn 3 with its prompt"),
    ({"messages": TURNS}, "{% for m in messages %}{{ loop.length }}{% endfor %}", "begin turn 3 with its prompt"),
    (
      {"messages": TURNS},
      "{% for m in messages %}x{% endfor %}{{ eos_token }}",
      "begin turn 3 with|turn 3 otherwise where",
    ),
    (
      {"messages": TURNS},
      PLAIN.replace("m['content']", "(m['content'] if m['role'] == 'user' else '')"),
      "show what the assistant says in turn 3",
    ),
    (
      {"messages": TURNS},
      MARKED.replace("m['content']", "(m['content'] if m['role'] == 'user' else '')"),
      "show what the assistant says in turn 3",
    ),
    (
      {"messages": TURNS},
      MARKED.replace("m['content']", "(m['content'] if m['role'] == 'assistant' else '')"),
      "show what the user says in turn 2",
    ),
    (
      {"prompt": TURNS[:2], "completion": TURNS[2:]},
      MARKED.replace("{% for", "{{ messages | length }}{% for"),
      "does not begin the text with the prompt",
    ),
  ],
)
def test_what_is_refused(record, source, said):
  with pytest.raises(ValueError, match=said) as caught:
    rendering(source).encode(json.dumps(record, ensure_ascii=False).encode())
  assert "\n" not in str(caught.value)


def sums(count: int, first: int = 0) -> list[dict]:
  return [
    {"id": f"s{n}", "messages": [TURNS[1] | {"content": f"{n}+{n}?"}, {"role": "assistant", "content": f"{2 * n}"}]}
    for n in range(first, first + count)
  ]


def write(path, records) -> None:
  path.write_text("".join(json.dumps(record) + "\n" for record in records))


def dataset_of(cfg, **changes):
  return data.load_dataset(dataclasses.replace(cfg, **changes), 3, records="conversations")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  """One file with domains by record, one compressed, and one of Parquet with prompts and completions."""
  folder = tmp_path_factory.mktemp("chat")
  mixed = sums(20) + [one | {"id": f"w{n}", "domain": "words"} for n, one in enumerate(sums(6, 50))]
  write(folder / "a.jsonl", [record | {"kind": "x"} for record in mixed])
  (folder / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps(sums(1, 30)[0]).encode()))
  rows = [[{"role": "user", "content": f"{n}*2?"}] for n in range(7)]
  answers = [[{"role": "assistant", "content": f"{2 * n}", "tool_calls": None}] for n in range(7)]
  pq.write_table(pa.table({"id": list(range(7)), "prompt": rows, "completion": answers}), folder / "c.parquet")
  files = (f"sums={folder}/[ab].jsonl*", f"twice={folder}/c.parquet")
  return dataclasses.replace(BASE, dataset_files=files)


@pytest.mark.parametrize("kind", ["text", "hf"])
def test_a_struct_of_a_table_has_no_fields_of_other_rows(kind, tmp_path):
  """Arrow fills them with null, which a template would show in the arguments of a call."""
  calls = [{"name": name, "arguments": {name: n}} for n, name in enumerate("xyxyxy")]
  turns = [{"role": "assistant", "content": "", "tool_calls": [{"function": call}]} for call in calls]
  rows = [{"messages": [{"role": "user", "content": "?"}, turn]} for turn in turns]
  pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
  if kind == "hf":
    pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(tmp_path / "c")
  files = (f"c={tmp_path}/c" + (".parquet" if kind == "text" else ""),)
  source = dataset_of(
    BASE, dataset_type=kind, dataset_files=files, ghost_val_sets=("c",), ghost_val_fraction=0.5
  ).source
  assert [json.loads(text) for text in source.texts(np.arange(6))] == rows


def test_a_corpus_and_its_batches(corpus):
  """Domains of records, ids, weights under exactly the trained tokens, each pair once an epoch, exact resume."""
  dataset = dataset_of(corpus)
  assert dataset.source.domains == ("sums", "words", "twice") and dataset.source.fields == ("id",)
  assert [entry.documents for entry in dataset.summary()] == [21, 6, 7]
  assert {dataset.document_record(n)[3] for n in range(len(dataset.source))} >= {"s0", "w0", "0", "s30"}
  assert dataset.parts[0].cutter(33)(0, 99) == "user: 6*2?\nassistant: 12"
  empty = {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]}
  assert ConversationUnits.shown(None, json.dumps(empty).encode()) == b"user: \nassistant: x"
  made, seen = Rendering.of(corpus, ByteTokenizer()), []
  state = json.loads(json.dumps(dataset.train.state()))
  batches = [next(dataset.train) for _ in range(9)]
  for batch in batches:
    arrays = batch.arrays
    assert arrays["targets_weights"].dtype == np.float32
    assert not arrays["targets_weights"][arrays["targets_segmentation"] == 0].any()
    for b, s in np.argwhere((batch.document_BS >= 0) & (batch.epoch_B == 0)[:, None]):
      here = arrays["inputs_segmentation"][b] == s + 1
      ids, weights = made.encode(dataset.document(batch.document_BS[b, s]).text)
      assert (arrays["inputs"][b, here] == ids[:-1]).all() and (arrays["targets"][b, here] == ids[1:]).all()
      assert (arrays["targets_weights"][b, here] == weights[1:]).all() and weights[1:].any()
      seen.append(int(batch.document_BS[b, s]))
  assert max(batch.epoch_B.max() for batch in batches) > 0
  held_out = dataset.parts[0].split.held_out(np.arange(34))
  assert sorted(seen) == np.flatnonzero(~held_out).tolist() and held_out.any()
  again = dataset_of(corpus)
  again.train.restore(state)
  assert all((next(again.train).arrays["inputs"] == batch.arrays["inputs"]).all() for batch in batches)
  assert pickle.loads(pickle.dumps(dataset.parts[0])).settings == dataset.parts[0].settings
  with pytest.raises(ConfigError, match="changed"):
    dataset_of(corpus, sft_train_on_completion_only=False).train.restore(state)
  val = dataset.validation_batch(0, 2, "sums").arrays
  assert 0 < val["targets_weights"].sum() < (val["targets_segmentation"] > 0).sum()
  one = dataset_of(corpus, packing="none", dataset_domains=("twice", "words"), ghost_val_sets=("words",))
  assert one.source.domains == ("words", "twice") and next(one.train).document_BS.shape == (2, 1)


def test_sets_mixtures_and_exclusion(corpus, tmp_path):
  write(tmp_path / "target.jsonl", [record | {"domain": "other"} for record in sums(5, 70)])
  write(tmp_path / "out.jsonl", [{"id": "s3"}, {"id": "w1"}])
  shares = ("sums=0.5", "words=0.25", "twice=0.25")
  cfg = dataclasses.replace(corpus, ghost_val_sets=(f"goal={tmp_path}/target.jsonl",), dataset_mixture=shares)
  dataset = dataset_of(cfg, dataset_exclude_file=str(tmp_path / "out.jsonl"))
  names = {dataset.document_id(n).domain for n in dataset.validation_batch(0, 2).document_BS.ravel() if n >= 0}
  assert names == {"goal"}
  batches = [next(dataset.train) for _ in range(12)]
  records = {dataset.document_record(n)[3] for batch in batches for n in batch.document_BS.ravel() if n >= 0}
  assert not records & {"s3", "w1"} and {"s4", "w2", "0"} <= records
  with pytest.raises(ConfigError, match="did you mean 'words'"):
    dataset_of(cfg, dataset_domains=("word",))


def test_the_cap_of_a_domain_is_of_the_one_that_records_name(corpus, tmp_path):
  write(tmp_path / "in.jsonl", [*sums(20), *({**one, "domain": "words"} for one in sums(6))])
  size, num = len((tmp_path / "in.jsonl").read_bytes()), 26
  cfg = dataclasses.replace(corpus, dataset_files=(f"sums={tmp_path}/in.jsonl",), dataset_domain_bytes=size // num * 4)
  assert [(entry.domain, entry.documents) for entry in dataset_of(cfg).summary()] == [("sums", 4), ("words", 3)]


def test_worker_processes_make_the_same_batches(corpus):
  one, other = dataset_of(corpus), dataset_of(corpus, grain_worker_count=1)
  for _ in range(3):
    mine, theirs = next(one.train).arrays, next(other.train).arrays
    assert all((mine[name] == theirs[name]).all() for name in mine)


@pytest.mark.parametrize("kind", ["sft", "margin"])
def test_records_of_a_validation_set_stay_whole_where_text_is_cut(kind, tmp_path):
  """A run on text that is cut at row ends; the template is that of the set alone, and a position depends on it."""
  write(tmp_path / "web.jsonl", [{"text": f"text {n} " * 40} for n in range(20)])
  pair = {"prompt": TURNS[1:2], "chosen": TURNS[2:3], "rejected": TURNS[4:5]}
  write(tmp_path / "talks.jsonl", sums(9) if kind == "sft" else [pair] * 9)
  (tmp_path / "chat.jinja").write_text(template := MARKED.replace("eos_token", "'$'"))
  keys = {
    "tokenizer_type": "huggingface", "tokenizer_path": tokenizer_file(), "add_bos": False, "add_eos": False,
    "chat_template_path": f"{tmp_path}/chat.jinja", "dataset_files": (f"web={tmp_path}/web.jsonl",),
    "ghost_val_sets": ("web", f"talks={tmp_path}/talks.jsonl@{kind}"),
  }  # fmt: skip

  def made(packing: str):
    return data.load_dataset(dataclasses.replace(BASE, **keys, packing=packing), 3)

  fitted, cut = made("first_fit"), made("concat_then_split")
  for name, array in fitted.validation_batch(0, 4, "talks").arrays.items():
    assert np.array_equal(cut.validation_batch(0, 4, "talks").arrays[name], array)
  (tmp_path / "chat.jinja").write_text(template + "!")
  assert made("concat_then_split").train.state()["fingerprint"] != cut.train.state()["fingerprint"]


def test_files_of_one_name_in_one_domain_are_refused(tmp_path):
  """Their documents would have the same ids."""
  for folder in ("a", "b"):
    (tmp_path / folder).mkdir()
    write(tmp_path / folder / "x.jsonl", [record | {"domain": "sums"} for record in sums(9)])
  with pytest.raises(ConfigError, match=r"2 sources of domain 'sums' are named 'x.jsonl' in the ids"):
    dataset_of(BASE, dataset_files=tuple(f"{name}={tmp_path}/{name}/x.jsonl" for name in "ab"))
  source = dataset_of(BASE, dataset_files=(f"all={tmp_path}/*/x.jsonl",)).source
  assert len({source.document_id(n) for n in range(len(source))}) == 18


def test_long_conversations(corpus, tmp_path):
  """Cut ones keep their beginning and are counted; one without any of its answers is refused, or left out."""
  long = [TURNS[1], {"role": "assistant", "content": "y" * 200}]
  lost = [{"role": "user", "content": "z" * 200}, TURNS[2]]
  write(tmp_path / "a.jsonl", [*sums(4), {"messages": long}, {"messages": lost}])
  cfg = dataclasses.replace(corpus, dataset_files=(f"a={tmp_path}/a.jsonl", *corpus.dataset_files[:1]))
  with pytest.raises(
    ConfigError, match=r"a\.jsonl at byte \d+, line 6: its first answer begins behind max_target_length=96"
  ):
    dataset_of(cfg).notes()
  dataset = dataset_of(cfg, on_corrupt="skip")
  notes = " ".join(dataset.notes())
  assert "1 are left out" in notes and "1 lose a part of their answers to max_target_length=96" in notes
  found = [next(dataset.train) for _ in range(8)]
  (b,) = next(np.flatnonzero((batch.document_BS == 4).any(1)) for batch in found if (batch.document_BS == 4).any())
  row = next(batch.arrays for batch in found if (batch.document_BS == 4).any())
  assert row["targets_weights"][b].sum() > 70 and not any((batch.document_BS == 5).any() for batch in found)
  assert "cut off by the length of a row: 1" in dataset.train.describe() and "corrupt 1;" in dataset.train.describe()


def test_special_tokens_in_plain_texts_are_told(tmp_path):
  """TRL reads them as special tokens; only a template can write them here. A conversation's template may hold some."""
  said = "of the first 3 conversations, 1 spell special tokens"
  plain = {"prompt": "<|im_start|>user", "completion": "2<|im_end|>"}
  write(
    tmp_path / "a.jsonl",
    [plain, {"prompt": "<im>", "completion": "|"}, {"messages": [TURNS[1], TURNS[2] | {"content": "</s>"}]}],
  )
  write(tmp_path / "t.jsonl", sums(2))
  (tmp_path / "t.jinja").write_text(PLAIN.replace("eos_token", "'</s>'"))
  cfg = dataclasses.replace(
    BASE, dataset_files=(f"a={tmp_path}/a.jsonl",), ghost_val_sets=(f"t={tmp_path}/t.jsonl",), add_bos=False,
    tokenizer_type="huggingface", tokenizer_path=tokenizer_file(), chat_template_path=f"{tmp_path}/t.jinja",
    add_eos=False,
  )  # fmt: skip
  (note,) = (note for note in dataset_of(cfg).notes() if "spell" in note)
  assert note.startswith(said)
  bytes_alone = dataset_of(cfg, tokenizer_type="byte", tokenizer_path="", chat_template_path="")
  assert not [note for note in bytes_alone.notes() if "spell" in note]


def test_bad_files_are_named_with_their_line(corpus, tmp_path):
  def said(lines: str, **changes) -> str:
    (tmp_path / "x.jsonl").write_text(lines)
    cfg = dataclasses.replace(corpus, dataset_files=(f"x={tmp_path}/x.jsonl", *corpus.dataset_files[:1]), **changes)
    with pytest.raises(ConfigError) as caught:
      dataset_of(cfg).notes()
    return str(caught.value)

  good = json.dumps(sums(1)[0]) + "\n"
  assert f"x.jsonl at byte {len(good)}, line 2: not a line of JSON" in said(good + "{bad\n")
  assert "line 2: it has no turn of the assistant" in said(good + json.dumps({"messages": TURNS[:2]}) + "\n")
  assert "line 2: it has no messages" in said(good + '{"text": "x"}\n')
  deep = "(maximum recursion depth|Stack overflow)"  # from Python 3.14 on the latter
  assert re.search(rf"line 2: not a line of JSON \({deep}", said(good + "[" * 100_000 + "\n"))
  assert re.search(f"line 2: {deep}", said(good + json.dumps(sums(1)[0] | {"tools": "[" * 100_000}) + "\n"))
  steering = json.dumps(sums(1)[0] | {"domain": "a\x1b[2J"})
  assert "line 2: the domain 'a\\x1b[2J' holds control characters" in said(good + steering + "\n")
  assert "x.jsonl has text" in said('{"text": "x"}\n')
  assert "did you mean 'messages'" in said(good, train_data_columns=("message",))
  (tmp_path / "y.txt").write_text("x")
  with pytest.raises(ConfigError, match="is plain text, but the objective reads records"):
    dataset_of(corpus, dataset_files=(f"a={tmp_path}/y.txt",))
  (tmp_path / "none.jsonl").touch()
  with pytest.raises(ConfigError, match=r"none.jsonl at byte 0, line 1: the domain 'a\\x01' holds control characters"):
    dataset_of(corpus, dataset_files=(f"a\x01={tmp_path}/none.jsonl",))
  (tmp_path / "bad.jinja").write_text("{% for %}")
  for path, reason in ((tmp_path / "bad.jinja", "line 1"), (tmp_path / "none.jinja", "cannot be read")):
    with pytest.raises(ConfigError, match=reason):
      dataset_of(corpus, chat_template_path=str(path))
  with pytest.raises(ConfigError, match="is plain text, but the objective reads records"):
    dataset_of(corpus, dataset_type="synthetic", dataset_files=())


def test_what_goes_together():
  assert (
    config.load("use_sft=true").optimizer.objective == "sft" and config.load("objective=sft").records == "conversations"
  )
  with pytest.raises(ConfigError, match="keeps them whole; use packing=first_fit"):
    config.load("objective=sft", "packing=concat_then_split")
  with pytest.raises(ConfigError, match="use packing=none") as error:
    config.load("objective=grpo", "reward_functions=exact_match", "packing=concat_then_split")
  assert "first_fit" not in str(error.value)  # which is refused too
  with pytest.raises(ConfigError, match="next_token reads plain text"):
    config.load("chat_template_path=x.jinja")
  asked = config.load("chat_template_path=x.jinja", "ghost_val_sets=[web=web, talks=talks.jsonl@sft]")
  assert asked.data.chat_template_path and asked.records == "text"  # the template is that of the set's conversations


@pytest.mark.hf
def test_ids_and_masks_are_those_of_transformers(tmp_path):
  """Every template of the TRL wheel that takes plain text; masks where the template marks what the assistant says."""
  transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
  trl = importlib.util.find_spec("trl") or pytest.skip("trl, which brings the templates, is not installed")
  inner = tokenizers.Tokenizer.from_file(f"{tokenizer_file()}/tokenizer.json")
  inner.save(str(tmp_path / "tokenizer.json"))
  words = {"bos_token": "<s>", "eos_token": "</s>"}
  theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **words)
  cfg = dataclasses.replace(BASE, tokenizer_type="huggingface", tokenizer_path=str(tmp_path))
  # Behind a last character of several tokens, transformers' mask ends with the first of them.
  whole = [turn | {"content": turn["content"] + "."} for turn in TURNS[1:]]
  masked = refused = 0
  for path in sorted(Path(trl.submodule_search_locations[0], "chat_templates").glob("*.jinja")):
    source = path.read_text("utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words | {"chat_template": source}))
    made = Rendering.of(cfg, load_tokenizer("huggingface", str(tmp_path)))
    for turns in (whole, whole[:2]):
      try:
        ids, weights = made.encode(json.dumps({"messages": turns}).encode())
      except ValueError as error:
        assert (
          "endgeneration" not in made.template.source
          or re.search("does not show what the (assistant|user) says", str(error))
          or "llava" in path.stem
        ), path
        refused += 1
        continue
      told = theirs.apply_chat_template(
        turns,
        chat_template=source,
        return_dict=True,
        return_assistant_tokens_mask="endgeneration" in made.template.source,
      )
      assert ids.tolist() == told["input_ids"], path
      if "endgeneration" in made.template.source:
        masked += 1
        assert weights.tolist() == told["assistant_masks"], path
      prompt = theirs.apply_chat_template(turns[:1], chat_template=source, add_generation_prompt=True)
      assert made.prompt(turns[0]["content"]) == prompt["input_ids"], path
  assert masked > 50 and refused < 40, (masked, refused)


@pytest.mark.parametrize("records", ["text", "conversations"])
def test_a_damaged_line_is_named_without_a_key_that_the_command_has_not(records, tmp_path):
  (tmp_path / "a.jsonl").write_text('{"text": "one", "messages": []}\n{"text": two}\n')
  corpus = Corpus((f"a={tmp_path}/a.jsonl",), config.load().data, "--data", records)
  with pytest.raises(ConfigError, match=r"a.jsonl.*; repair or remove it$"):
    next(corpus.batches(1))
