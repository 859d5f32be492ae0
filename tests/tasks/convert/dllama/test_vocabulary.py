"""Hugging Face tokenizers as Distributed Llama's lists: real ones trained here on a few lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from windlass.errors import BadInput
from windlass.model.bundled.models import find_bundled
from windlass.model.formats.dllama.tokenizer import NEVER_MERGED, read_tokenizer, write_tokenizer
from windlass.model.text.chat.template import render_chat
from windlass.runtime.weights.text.dllama import tokenizer_json
from windlass.tasks.convert.dllama.vocabulary import read_hugging_face

pytestmark = pytest.mark.cpu

TEXT = [
    "the windlass lifts the anchor",
    "ein Schiff übt die Rückkehr",
    "привет мир",
    "日本語のテキスト",
    "def f(x):\n    return x",
] * 3
CHAT = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}"


def _byte_level(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜ü｜>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def _save(folder: Path, **files: dict[str, Any]) -> None:
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))


def test_byte_level_tokens_are_raw_bytes(tmp_path: Path) -> None:
    tokenizer = _byte_level(tmp_path)
    size = tokenizer.get_vocab_size()
    _save(
        tmp_path,
        tokenizer_config={
            "bos_token": "<|endoftext|>",
            "eos_token": {"content": "<|im_end|>"},
            "chat_template": TEMPLATE,
            "add_bos_token": False,
        },
        generation_config={"eos_token_id": [size - 2, size - 4]},
        config={"eos_token_id": 5},
    )
    found, notes = read_hugging_face(tmp_path)
    assert notes == ()
    assert len(found.vocabulary) == size and found.scores[: size - 4] == [-float(index) for index in range(size - 4)]
    assert set(found.scores[size - 4 :]) == {NEVER_MERGED}
    assert (found.bos_id, found.eos_ids, found.add_bos) == (size - 4, (size - 2, size - 4), False)
    assert found.own_template == TEMPLATE
    for line in TEXT:
        assert b"".join(found.vocabulary[index] for index in tokenizer.encode(line).ids) == line.encode()
    assert found.vocabulary[-1] == "<｜ü｜>".encode()
    assert {bytes([byte]) for byte in range(256)} <= set(found.vocabulary)


def test_written_and_read_back(tmp_path: Path) -> None:
    _byte_level(tmp_path)
    _save(tmp_path, tokenizer_config={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
    (tmp_path / "chat_template.jinja").write_text("no mark at all")
    found, notes = read_hugging_face(tmp_path)
    assert notes == ("Distributed Llama does not support this chat template: text completion works, chat does not",)
    write_tokenizer(tmp_path / "x.t", found)
    back = read_tokenizer(tmp_path / "x.t")
    assert (back.vocabulary, back.bos_id, back.eos_ids, back.own_template) == (
        found.vocabulary,
        found.bos_id,
        found.eos_ids,
        "no mark at all",
    )
    assert back.max_token_length == max(map(len, found.vocabulary)) and back.add_bos


def test_without_bos_the_first_special_id_stands_for_it(tmp_path: Path) -> None:
    """GLM has none; Distributed Llama needs to know where special tokens begin."""
    size = _byte_level(tmp_path).get_vocab_size()
    templates = [{"name": "tool", "template": "t"}, {"name": "default", "template": TEMPLATE}]
    _save(tmp_path, tokenizer_config={"chat_template": templates}, config={"eos_token_id": [size - 4, size - 2]})
    found, notes = read_hugging_face(tmp_path)
    assert (found.bos_id, found.add_bos, found.eos_ids) == (size - 4, False, (size - 4, size - 2))
    assert (found.own_template, notes) == (TEMPLATE, ())


def test_special_tokens_in_front_are_said(tmp_path: Path) -> None:
    """SmolLM2's come first; Distributed Llama then takes all text for special."""
    _byte_level(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["added_tokens"].append(values["added_tokens"][0] | {"id": 1, "content": "<first>"})
    _save(tmp_path, tokenizer=values, tokenizer_config={"bos_token": "<first>"})
    found, notes = read_hugging_face(tmp_path)
    assert found.bos_id == 1 and found.vocabulary[1] == b"<first>"
    assert len(notes) == 1 and "tokenize text wrongly" in notes[0]


def test_windlass_reads_the_ids_of_the_original(tmp_path: Path) -> None:
    """tiny-glm: special tokens come first and look like none ([gMASK]), digits are tokens of their own, spaces go with words."""
    source = find_bundled("tiny-glm")
    assert source is not None
    found, _ = read_hugging_face(source)
    write_tokenizer(tmp_path / "x.t", found)
    stored = read_tokenizer(tmp_path / "x.t")
    original = Tokenizer.from_file(str(source / "tokenizer.json"))
    back = Tokenizer.from_str(json.dumps(tokenizer_json(stored)))
    prompt = "[gMASK]<sop><|user|>Sort 9, 4, 7.<|assistant|>"
    assert back.encode(prompt).ids == original.encode(prompt).ids and len(original.encode(prompt).ids) == 14
    for line in [*TEXT, *Path(__file__).read_text().splitlines(), "a   b\t\tc  ", "#}  {# 12345'll", prompt[3:]]:
        assert back.encode(line).ids == original.encode(line).ids, line
    assert stored.own_template == (source / "chat_template.jinja").read_text()
    assert render_chat(stored.chat_template, CHAT) == render_chat(stored.own_template, CHAT), "a comment, for whoever renders it"


def test_a_comment_that_is_none_is_not_read(tmp_path: Path) -> None:
    _byte_level(tmp_path)
    found, _ = read_hugging_face(tmp_path)
    for text in ("{# windlass: {", "{# windlass: [1] #}", "{# windlass: " + "[" * 9999):
        broken = msgspec.structs.replace(found, chat_template=f"x{text}")
        assert broken.splitting == {} and broken.own_template == "x"


def test_sentence_piece_style_and_holes(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "▁the": 3, "é": 4, "x": 7}
    model = {"type": "BPE", "byte_fallback": True, "vocab": vocabulary, "merges": []}
    _save(tmp_path, tokenizer={"model": model, "added_tokens": [{"id": 1, "content": "<s>", "special": True}]})
    found, _ = read_hugging_face(tmp_path)
    assert found.vocabulary == [b"<unk>", b"<s>", b"\n", b" the", "é".encode(), b"<|unused_5|>", b"<|unused_6|>", b"x"]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, "not a BPE tokenizer"),
        ({}, "not a BPE tokenizer"),
        ({"model": {"type": "BPE", "vocab": {"a": "b"}}}, "token id is not an integer"),
        ({"model": {"type": "BPE", "vocab": {"a": 2**40}}}, "outside 0 to"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}}, "added_tokens": [{"id": []}]}, "added_tokens"),
    ],
)
def test_what_has_no_such_form_is_refused(tmp_path: Path, tokenizer: dict[str, Any], message: str) -> None:
    _save(tmp_path, tokenizer=tokenizer)
    with pytest.raises(BadInput, match=message):
        read_hugging_face(tmp_path)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no tokenizer\.json"):
        read_hugging_face(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="is not valid JSON"):
        read_hugging_face(tmp_path)
