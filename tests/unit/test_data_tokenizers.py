"""Tokenizers: text comes back, and the bytes behind every token are known."""

import base64
import dataclasses
import io
import json
import os
import pickle
import shutil
import unicodedata
from pathlib import Path

import hf_models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_fakes import EchoBatcher, served

from maxghost import config, data
from maxghost.config import ConfigError
from maxghost.data import chat, duplicates, tokenizer_files
from maxghost.data.conversations import Rendering
from maxghost.data.prepare import train_bpe
from maxghost.data.sources import synthetic
from maxghost.data.tokenizers import check_specials, load_tokenizer
from maxghost.data.types import Document
from maxghost.interop import hf_checkpoint
from maxghost.serving.batcher import Piece, Row
from maxghost.serving.http import Answer

TEXTS = ["the river keeps under the stone", "  Grüße, 漢字 & 🙂\n\tend ", "", "<|eos|> spelled out <|bos|>", "x"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """Path by tokenizer_type, of small tokenizers trained or written here."""
  folder = tmp_path_factory.mktemp("tokenizers")
  train_bpe(synthetic.load(("words", "digits")), 300, str(folder / "bpe" / "tokenizer.json"))
  return {"huggingface": str(folder / "bpe"), "sentencepiece": sentencepiece_model(folder), "tiktoken": ranks(folder)}


def sentencepiece_model(folder) -> str:
  import sentencepiece

  out = io.BytesIO()
  lines = [d.text.decode() for d in synthetic.load(("words", "digits")).documents]
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_writer=out, vocab_size=330, byte_fallback=True, minloglevel=2
  )
  (folder / "sp.model").write_bytes(out.getvalue())
  return str(folder / "sp.model")


def ranks(folder) -> str:
  pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"er", b"\xe6\xbc"]
  lines = [base64.b64encode(piece) + b" " + str(rank).encode() for rank, piece in enumerate(pieces)]
  (folder / "small.tiktoken").write_bytes(b"\n".join(lines))
  return str(folder / "small.tiktoken")


def load(made, kind):
  return load_tokenizer(kind, made.get(kind, ""))


@pytest.mark.parametrize(
  "text",
  ["{", "[]", "\udcff", '{"bos_token": 7}', '{"eos_token": ["</s>"]}', '{"pad_token": {"special": true}}', "[" * 99999],
)
def test_damaged_settings_of_a_tokenizer_are_named(text, made, tmp_path):
  shutil.copytree(made["huggingface"], tmp_path / "t")
  (tmp_path / "t" / "tokenizer_config.json").write_text(text, errors="surrogateescape")
  with pytest.raises(ConfigError, match=rf"^tokenizer_path={tmp_path}/t: .*config.json is damaged: ") as caught:
    load_tokenizer("huggingface", str(tmp_path / "t"))
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", [7, {"x": 1}, [{"name": "default", "template": 7}], [{"name": "default"}]])
def test_a_chat_template_of_another_type_is_named(template, made, tmp_path):
  shutil.copytree(made["huggingface"], tmp_path / "t")
  (tmp_path / "t" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
  with pytest.raises(ConfigError, match="its chat_template is no text"):
    chat.load("", load_tokenizer("huggingface", str(tmp_path / "t")))
  (tmp_path / "t" / "tokenizer_config.json").unlink()
  with pytest.raises(ConfigError, match=r"^chat_template_path=gone.jinja: .* cannot be read"):
    chat.load("gone.jinja", load_tokenizer("huggingface", str(tmp_path / "t")))


@pytest.mark.parametrize("kind", ["byte", "huggingface", "tiktoken"])
def test_lossless_tokenizers_give_the_text_back(kind, made):
  tokenizer = load(made, kind)
  raw = [text.encode() for text in TEXTS]
  encoded = tokenizer.encode(raw)
  assert [tokenizer.decode(ids) for ids in encoded] == raw
  for ids, text in zip(encoded, raw, strict=True):
    assert int(tokenizer.byte_table[ids].sum()) == len(text)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist()), "text never yields a special token"
    assert tokenizer.decode(ids[3:]) == text[int(tokenizer.byte_table[ids[:3]].sum()) :]
  assert max(ids.max() for ids in encoded if len(ids)) < tokenizer.vocab_size
  if kind != "byte":
    assert len(encoded[0]) < len(raw[0])


@pytest.mark.parametrize("kind", ["byte", "huggingface", "sentencepiece", "tiktoken"])
def test_bytes_behind_the_tokens(kind, made):
  tokenizer = load(made, kind)
  for text in TEXTS:
    ((ids, sizes),) = tokenizer.encode_bytes([text.encode()])
    assert (ids == tokenizer.encode([text.encode()])[0]).all()
    assert sizes.sum() == (len(text.encode()) if len(ids) else 0) and (sizes >= 0).all()
  again = pickle.loads(pickle.dumps(tokenizer))
  assert (again.encode([b"the river"])[0] == tokenizer.encode([b"the river"])[0]).all()
  assert again.fingerprint == tokenizer.fingerprint


def like_llama2(folder) -> str:
  """A tokenizer.json that, as Llama 2's, drops the first space of what it decodes; an answer has a space at its end."""
  import tokenizers
  from tokenizers import decoders, models, normalizers

  names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehirtv"]
  merges = [("▁", "r")]
  vocab = {name: number for number, name in enumerate([*names, "▁r"])}
  made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
  made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
  made.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
  )
  made.add_special_tokens(names[:3])
  made.save(str(folder / "tokenizer.json"))
  template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[{{ m['content'] }}]{% else %}"
  template += " {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
  words = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
  (folder / "tokenizer_config.json").write_text(json.dumps(words))
  return str(folder)


@pytest.mark.parametrize("kind", ["byte", "huggingface", "sentencepiece", "tiktoken", "like_llama2"])
def test_pieces_keep_their_spaces_and_bytes(kind, made, tmp_path):
  like = kind == "like_llama2"
  tokenizer = load_tokenizer("huggingface", like_llama2(tmp_path)) if like else load(made, kind)
  prompt, whole = (tokenizer.encode([text.encode()])[0].tolist() for text in ("the river", "the river r漢 the"))
  answer = whole[len(prompt) :]
  assert whole[: len(prompt)] == prompt
  assert b"".join(map(tokenizer.piece, answer)) == " r漢 the".encode()
  row = Row(tokenizer, {tokenizer.eos_id}, (), prompt)
  assert "".join(row.take(answer[: n + 1], last=False) for n in range(len(answer))) == " r漢 the"
  assert tokenizer.piece(tokenizer.eos_id) == tokenizer.piece(tokenizer.vocab_size) == b""
  tokenizer.encode = None  # a fixed text is not encoded for every token
  assert b" r".startswith(tokenizer.piece(answer[0]))


def test_an_answer_behind_characters_that_are_bytes_is_whole(tmp_path):
  """The last ids of the prompt begin inside a character, which spoils all the bytes behind it."""
  tokenizer = load_tokenizer("huggingface", like_llama2(tmp_path))
  for before, text in (("漢漢漢", "漢漢 the漢"), ("the 漢漢漢漢", " 漢 r漢")):
    prompt, whole = (tokenizer.encode([one.encode()])[0].tolist() for one in (before, before + text))
    row, answer = Row(tokenizer, (), (), prompt), whole[len(prompt) :]
    ends = range(1, len(answer) + 1)
    assert "".join(row.take(answer[:end], last=end == len(answer)) for end in ends) == row.text == text


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece", "like_llama2"])
def test_offsets_of_an_answer_behind_no_text(kind, made, tmp_path):
  """The last two kinds drop the space of its first token: the later ones begin a place earlier."""
  like = kind == "like_llama2"
  tokenizer = load_tokenizer("huggingface", like_llama2(tmp_path)) if like else load(made, kind)
  text = "the" if kind == "huggingface" else " the"
  for prompt in ([tokenizer.bos_id], [tokenizer.bos_id, *tokenizer.encode([b"x"])[0].tolist()]):
    ids = tokenizer.encode_behind(f"{text} r漢 the".encode()).tolist()
    ids = [tokenizer.bos_id, *ids] if len(prompt) == 1 else ids
    whole = Row(tokenizer, (), (), prompt).take(ids, last=True)
    assert whole == f"{text} r漢 the".removeprefix(" " if len(prompt) == 1 else "")
    logps = (-0.5,) * len(ids)
    answer = Answer(served(EchoBatcher(), tokenizer=tokenizer), {"stream": False, "logprobs": 0}, [prompt], 1)
    offsets = answer._logprobs(0, Piece(whole, tuple(ids), logps))["text_offset"]
    starts = zip(offsets, map(tokenizer.piece, ids), strict=True)
    shown = [(place, piece.decode()) for place, piece in starts if piece.isascii() and piece]
    assert [whole[place:][: len(piece)] for place, piece in shown[1:]] == [piece for _, piece in shown[1:]]


def test_a_space_does_not_end_an_answer(tmp_path):
  tokenizer = load_tokenizer("huggingface", like_llama2(tmp_path))
  assert Rendering.of(config.DataConfig(), tokenizer).end_ids() == {tokenizer.eos_id}


def test_messages_that_are_no_unicode_are_told(tmp_path):
  """JSON can spell half of a character; the library has a TypeError for such a text."""
  rendering = Rendering.of(config.DataConfig(), load_tokenizer("huggingface", like_llama2(tmp_path)))
  turns = [{"role": "user", "content": "a\ud800"}, {"role": "assistant", "content": "b"}]
  for read in (lambda: rendering.prompt(turns[:1]), lambda: rendering.encode(json.dumps({"messages": turns}).encode())):
    with pytest.raises(ValueError, match="surrogates not allowed"):
      read()


@pytest.mark.parametrize("kind", ["byte", "huggingface", "sentencepiece", "tiktoken"])
def test_ids_of_a_padded_vocabulary_have_no_text(kind, made):
  tokenizer = load(made, kind)
  ids = tokenizer.encode([b"the river"])[0].tolist()
  beyond = [tokenizer.vocab_size, tokenizer.vocab_size + 7]
  assert tokenizer.decode(np.array(beyond)) == b""
  assert tokenizer.decode(np.array([beyond[0], *ids, beyond[1]])) == tokenizer.decode(np.array(ids))


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives_the_trained_bpe(text, made):
  tokenizer = load(made, "huggingface")
  (ids,) = tokenizer.encode([text.encode()])
  assert tokenizer.decode(ids) == text.encode() and tokenizer.byte_table[ids].sum() == len(text.encode())


def test_sentencepiece_knows_where_tokens_begin(made):
  tokenizer = load(made, "sentencepiece")
  ((ids, sizes),) = tokenizer.encode_bytes(["the  é river".encode()])
  starts = np.cumsum(sizes) - sizes
  pieces = dict(zip(starts.tolist(), [tokenizer.decode(ids[n : n + 1]) for n in range(len(ids))], strict=False))
  assert tokenizer.byte_table is None and {0, 3, 5} <= set(pieces)


@pytest.mark.parametrize("kind", ["byte", "huggingface", "sentencepiece", "tiktoken"])
def test_a_saved_tokenizer_is_the_same(made, kind, tmp_path):
  original, folder = load(made, kind), tmp_path / "tokenizer"
  tokenizer_files.save(original, kind, folder)
  tokenizer_files.save(original, kind, folder)  # a run that goes on
  path = tokenizer_files.saved_path(kind, folder)
  assert (path is None) == (kind == "byte") == (not folder.exists())
  if path is None:
    return
  saved = load_tokenizer(kind, path)
  for name in ("vocab_size", "bos_id", "eos_id", "pad_id", "fingerprint"):
    assert getattr(saved, name) == getattr(original, name), name
  for text in TEXTS:
    (before,), (after,) = original.encode([text.encode()]), saved.encode([text.encode()])
    np.testing.assert_array_equal(before, after)
    assert saved.decode(after) == original.decode(before)


@pytest.mark.parametrize(("kind", "name"), [("huggingface", "tokenizer.json"), ("sentencepiece", "tokenizer.model")])
def test_an_export_has_the_tokenizer_by_the_name_that_transformers_reads(kind, name, made, tmp_path):
  """Also of one whose file has another name, beside the file of another one."""
  own = shutil.copyfile(load(made, kind).path, tmp_path / "own.x")
  (tmp_path / name).write_text("of another one")
  target = tmp_path / "out"
  target.mkdir()
  tokenizer_files.export(kind, tmp_path / "own.x", target)
  assert (target / name).read_bytes() == own.read_bytes()


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece"])
def test_a_tokenizer_of_which_a_full_disk_took_a_part_is_saved_whole_next_time(made, kind, tmp_path):
  resource, original = pytest.importorskip("resource"), load(made, kind)
  template, (_, most) = tmp_path / "given.jinja", resource.getrlimit(resource.RLIMIT_FSIZE)
  template.write_text("kept")
  resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
  try:
    with pytest.raises(OSError, match="tokenizer/"):
      tokenizer_files.save(original, kind, tmp_path / "tokenizer", str(template))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
  tokenizer_files.save(original, kind, tmp_path / "tokenizer", str(template))
  saved = load_tokenizer(kind, tokenizer_files.saved_path(kind, tmp_path / "tokenizer"))
  assert saved.fingerprint == original.fingerprint
  assert (tmp_path / "tokenizer" / tokenizer_files.TEMPLATE).read_text() == "kept"


def test_a_run_on_bytes_keeps_its_chat_template(tmp_path):
  for text in ("first", "changed since"):
    (tmp_path / "given.jinja").write_text(text)
    tokenizer_files.save(load_tokenizer("byte"), "byte", tmp_path / "tokenizer", str(tmp_path / "given.jinja"))
  assert (tmp_path / "tokenizer" / tokenizer_files.TEMPLATE).read_text() == "first"


@pytest.mark.parametrize("add_bos", [True, False])
def test_the_byte_tokenizer_in_files_of_hugging_face_has_the_same_ids(add_bos, tmp_path):
  import tokenizers

  original = load_tokenizer("byte")
  tokenizer_files.write_bytes(tmp_path, add_bos)
  written = load_tokenizer("huggingface", str(tmp_path))
  for name in ("vocab_size", "bos_id", "eos_id", "pad_id"):
    assert getattr(written, name) == getattr(original, name), name
  outside = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  outside.encode_special_tokens = True  # texts that spell a special token
  for text in [*TEXTS, "  two  spaces\n\n\ttab 漢字 👍🏽", "".join(map(chr, range(1, 256)))]:
    ids = original.encode([text.encode()])[0].tolist()
    assert written.encode([text.encode()])[0].tolist() == ids and written.decode(ids) == text.encode()
    assert outside.encode(text).ids == [original.bos_id] * add_bos + ids and outside.decode(ids) == text


def test_a_tiktoken_encoding_with_rules_of_its_own_keeps_them(made, tmp_path):
  """Split into letters before the merges; specials that are not Llama's. Two have one id, as in o200k_harmony."""
  special_tokens = {"<|bos|>": 300, "<|odd|>": 301, "<|same|>": 301}
  content = {"ranks": "small.tiktoken", "split": "(?s:.)", "special_tokens": special_tokens}
  file = tmp_path / "own.encoding.json"
  file.write_text(json.dumps(content))
  (tmp_path / "small.tiktoken").write_bytes(Path(made["tiktoken"]).read_bytes())
  own = load_tokenizer("tiktoken", str(file))
  assert own.encode([b"the"])[0].tolist() == list(b"the") and (own.bos_id, own.vocab_size) == (300, 302)
  tokenizer_files.save(own, "tiktoken", tmp_path / "kept")
  kept = load_tokenizer("tiktoken", tokenizer_files.saved_path("tiktoken", tmp_path / "kept"))
  assert kept.encode([b"the"])[0].tolist() == list(b"the") and (kept.bos_id, kept.vocab_size) == (300, 302)
  specials = ({"special_tokens": given} for given in ([1], {"a": "x"}, {"a": -1}))
  for wrong in ({}, [], content | {"ranks": 5}, content | {"split": 5}, *(content | one for one in specials)):
    file.write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match="is no tiktoken file"):
      load_tokenizer("tiktoken", str(file))


def test_a_changed_file_of_ranks_is_read_again(tmp_path, monkeypatch):
  """tiktoken keeps what it once read from a path, also for another folder's file of the same relative path."""
  monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
  monkeypatch.chdir(tmp_path)
  for more in ([b"ab"], [b"cd", b"ab"]):
    pieces = [*(bytes([n]) for n in range(256)), *more]
    lines = [base64.b64encode(piece) + b" %d\n" % n for n, piece in enumerate(pieces)]
    (tmp_path / "t.tiktoken").write_bytes(b"".join(lines))
    made = load_tokenizer("tiktoken", "t.tiktoken")
    assert made.vocab_size == len(pieces) + 2 and made.encode([b"ab"])[0].tolist() == [len(pieces) - 1]
  for wrong in ([b"no ranks here\n"], lines[1:], [*lines, base64.b64encode(b"ef") + b" 3\n"]):
    (tmp_path / "t.tiktoken").write_bytes(b"".join(wrong))
    with pytest.raises(ConfigError, match="is no tiktoken file"):
      load_tokenizer("tiktoken", "t.tiktoken")


@pytest.mark.parametrize("kind", ["huggingface", "sentencepiece", "tiktoken"])
def test_segments_of_any_tokenizer_lead_to_their_bytes(kind, made):
  tokenizer = load(made, kind)
  documents = [
    Document("a" if n % 3 else "b", f"f{n}", 0, (f"the river {n} keeps é 漢 under stones " * (n % 7 + 1)).encode())
    for n in range(40)
  ]
  source = data.DocumentList(sorted(documents, key=lambda d: d.domain), ("a", "b"))
  cfg = dataclasses.replace(
    config.load().data,
    ghost_val_sets=("b",),
    max_target_length=16,
    add_bos=tokenizer.bos_id is not None,
    add_eos=tokenizer.eos_id is not None,
  )
  dataset = data.make_dataset(source, cfg, tokenizer=tokenizer)
  batch = next(dataset.train)
  for row, slot in np.argwhere(batch.offset_BS > 0):
    here = batch.arrays["inputs"][row][batch.arrays["inputs_segmentation"][row] == slot + 1]
    rest = dataset.document(batch.document_BS[row, slot]).text[batch.offset_BS[row, slot] :]
    if tokenizer.byte_table is not None:
      assert rest.startswith(tokenizer.decode(here))
      continue
    ours = tokenizer.decode(here).decode().replace("\ufffd", "").replace(" ", "")
    assert ours and ours[:9] in rest.decode(errors="ignore").replace(" ", "")[:12]


def test_segments_of_text_that_a_tokenizer_composes_lead_to_their_bytes(made, tmp_path):
  """NFC, as Qwen's tokenizers have it: a letter and its combining mark become one letter, of fewer bytes."""
  content = json.loads((Path(made["huggingface"]) / "tokenizer.json").read_text())
  (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"normalizer": {"type": "NFC"}}))
  tokenizer = load_tokenizer("huggingface", str(tmp_path))
  texts = [unicodedata.normalize("NFD", f"Grüße, {n} cafés mögen é ü " * 99).encode() for n in range(9)]
  source = data.DocumentList([Document("a", f"f{n}", 0, text) for n, text in enumerate(texts)], ("a",))
  cfg = dataclasses.replace(config.load().data, ghost_val_sets=("a",), max_target_length=32, per_device_batch_size=64)
  batch, found = next(data.make_dataset(source, cfg, tokenizer=tokenizer).train), 0
  for row, slot in np.argwhere(batch.offset_BS > 0):
    here = batch.arrays["inputs"][row][batch.arrays["inputs_segmentation"][row] == slot + 1]
    rest = texts[batch.document_BS[row, slot]][batch.offset_BS[row, slot] :].decode(errors="replace")
    said = tokenizer.decode(here)
    found += said[0] < 0x80  # begins with a whole letter
    assert said[0] >= 0x80 or unicodedata.normalize("NFC", rest).encode().startswith(said)
  assert found > 9


def test_specials(made, tmp_path):
  bpe = load(made, "huggingface")
  assert (bpe.bos_id, bpe.eos_id, bpe.pad_id, bpe.vocab_size) == (0, 1, 2, 300)
  for kind in ("huggingface", "tiktoken", "sentencepiece"):
    tokenizer = load(made, kind)
    assert {tokenizer.bos_id, tokenizer.eos_id} <= {*tokenizer.specials.values()}, kind
    assert not any(map(tokenizer.piece, tokenizer.specials.values())), kind
  llama = load(made, "tiktoken")
  assert (llama.bos_id, llama.eos_id, llama.vocab_size) == (261, 262, 263)
  (tmp_path / "tokenizer.json").write_bytes((Path(made["huggingface"]) / "tokenizer.json").read_bytes())
  (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<|eos|>"}, "eos_token": "none"}')
  named = load_tokenizer("huggingface", str(tmp_path))
  assert (named.bos_id, named.eos_id) == (1, None)
  with pytest.raises(ConfigError, match=r"add_eos=true, but the tokenizer .* has no end-of-document token"):
    check_specials(named, True, True)
  check_specials(named, True, False)


def test_wrong_settings_are_named(made, tmp_path):
  def refused(kind, path=""):
    with pytest.raises(ConfigError) as caught:
      load_tokenizer(kind, path)
    return str(caught.value)

  assert "tokenizer_type=huggingface needs tokenizer_path" in refused("huggingface")
  assert "tokenizer_type=byte reads no file" in refused("byte", "x")
  assert "cannot be read: No such file" in refused("huggingface", str(tmp_path))
  (tmp_path / "junk").write_bytes(b"junk")
  for kind in ("huggingface", "sentencepiece", "tiktoken"):
    assert f"tokenizer_path={tmp_path}/junk is no" in refused(kind, str(tmp_path / "junk"))
  empty = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}
  (tmp_path / "empty").write_text(json.dumps(empty))
  assert f"tokenizer_path={tmp_path}/empty is no tokenizer.json: max() " in refused("huggingface", f"{tmp_path}/empty")
  assert "did you mean 'o200k_base'" in refused("tiktoken", "o200k_bas")
  cfg = dataclasses.replace(config.load().data, tokenizer_type="huggingface", tokenizer_path=made["huggingface"])
  with pytest.raises(ConfigError, match="vocab_size=259 is smaller than the 300 ids"):
    data.load_dataset(cfg, vocab_size=259)


def test_the_home_folder_is_known_by_its_sign(made, monkeypatch):
  for kind, path in made.items():
    monkeypatch.setenv("HOME", str(Path(path).parent))
    assert load_tokenizer(kind, f"~/{Path(path).name}").fingerprint == load_tokenizer(kind, path).fingerprint


def test_files_without_an_end_are_refused(made, tmp_path):
  """A pipe would be read forever."""
  os.mkfifo(pipe := tmp_path / "pipe")
  tokenizer = load(made, "huggingface")
  for read in (
    *(lambda kind=kind: load_tokenizer(kind, str(pipe)) for kind in ("huggingface", "sentencepiece")),
    lambda: chat.load(str(pipe), tokenizer),
    lambda: duplicates.read_ids(str(pipe), synthetic.load(("words",))),
  ):
    with pytest.raises(ConfigError, match=r"pipe cannot be read: .*it is no regular file"):
      read()


def test_an_empty_file_is_no_sentencepiece_model(tmp_path):
  (tmp_path / "empty.model").write_bytes(b"")
  with pytest.raises(ConfigError, match=r"empty\.model is no SentencePiece model: it has no pieces"):
    load_tokenizer("sentencepiece", str(tmp_path / "empty.model"))


@pytest.mark.parametrize("files", ["", "tokenizer_config.json", "tokenizer_config.json chat_template.jinja vocab.json"])
def test_files_of_a_tokenizer_that_only_transformers_reads_come_along(files, tmp_path):
  """Through an import and straight from the folder; with or without one, the tokens that end a text."""
  names = [
    *files.split(),
    *["merges.txt", "additional_chat_templates/rag.jinja"] * bool(files),
    "generation_config.json",
  ]
  llama = Path(shutil.copytree(hf_models.FOLDER / "llama2", tmp_path / "llama2"))
  (llama / "additional_chat_templates").mkdir()
  for name in names:
    (llama / name).write_text(json.dumps({"of": name}))
  hf_checkpoint.import_model(llama, tmp_path / "in", say=lambda line: None)
  for source, target in ((llama, "straight"), (tmp_path / "in", "out")):
    hf_checkpoint.export_model(source, tmp_path / target, say=lambda line: None)
    assert {name: (tmp_path / target / name).read_text() for name in names} == {
      name: (llama / name).read_text() for name in names
    }
