"""Decoding token by token says what decoding at once says, and never half a character."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.model.formats.gguf.header import read_header
from windlass.model.text.tokenize.gguf_tokenizer import tokenizer_files, write_tokenizer
from windlass.model.text.tokenize.tokenizer import LONG_CHARACTERS, UNFINISHED, Tokenizer, load_tokenizer

pytestmark = pytest.mark.cpu

tokenizers = pytest.importorskip("tokenizers")

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=UNFINISHED), max_size=40)


def of_bytes() -> Tokenizer:
    """A token for every byte: characters are spread over as many tokens as can be."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*letters, "<|end|>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3],
    }
    content = msgspec.json.encode(tokenizer_files(metadata)["tokenizer.json"]).decode()
    return Tokenizer(tokenizers.Tokenizer.from_str(content), {})


def with_fallback() -> Tokenizer:
    """SentencePiece with a few letters; every other character is its bytes."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", *pieces, "▁", "a", "b", "▁a"],
        "tokenizer.ggml.scores": [0.0] * 258 + [-1.0, -2.0, -3.0, -0.5],
        "tokenizer.ggml.token_type": [2, 3] + [6] * 256 + [1] * 4,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    content = msgspec.json.encode(tokenizer_files(metadata)["tokenizer.json"]).decode()
    return Tokenizer(tokenizers.Tokenizer.from_str(content), {})


TOKENIZERS = {"bytes": of_bytes(), "fallback": with_fallback()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXTS)
def test_pieces_of_characters_have_their_bytes(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    words = [(token, tokenizer.decode([token], skip_special=False)) for token in tokenizer.encode(text, special=False)]
    found = b"".join(tokenizer.raw(token) if UNFINISHED in word else word.encode() for token, word in words)
    assert found.decode().replace(" ", "") == text.replace(" ", "")  # SentencePiece drops a first space
    assert any(UNFINISHED in word for _, word in words) or text.isascii()


def test_long_texts_go_there_and_back() -> None:
    for tokenizer in TOKENIZERS.values():
        text = "ab é" * LONG_CHARACTERS
        assert tokenizer.decode(tokenizer.encode(text, special=False)) == text
        assert len(tokenizer.known_ids) == tokenizer.vocab_size
        assert tokenizer.longest_token == max(map(len, tokenizer.backend.get_vocab()))


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXTS)
def test_pieces_make_the_whole(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text, special=False)
    decoder = tokenizer.incremental()
    pieces = [decoder.push(token) for token in tokens]
    assert UNFINISHED not in "".join(pieces)
    assert "".join(pieces) == tokenizer.decode(tokens) == text
    assert decoder.finish() == ""


@given(tokens=st.lists(st.integers(0, 256), max_size=60))
def test_damage_comes_out_in_the_end(tokens: list[int]) -> None:
    """Bytes that are no text: nothing is lost and nothing waits for long."""
    tokenizer = TOKENIZERS["bytes"]
    decoder = tokenizer.incremental()
    pieces = [decoder.push(token) for token in tokens]
    held = "".join(pieces)
    whole = tokenizer.decode(tokens)
    assert len(whole) - len(held) <= 8
    assert (held + decoder.finish()).replace(UNFINISHED, "") == whole.replace(UNFINISHED, "")


def test_text_after_damage_is_whole() -> None:
    tokenizer = TOKENIZERS["bytes"]
    first = tokenizer.encode("é", special=False)[0]
    tokens = [first] * 20 + tokenizer.encode("你好🚢", special=False)
    decoder = tokenizer.incremental()
    assert ("".join(decoder.push(token) for token in tokens) + decoder.finish()).endswith("你好🚢")


def test_what_follows_a_prompt_keeps_its_space() -> None:
    tokenizer = TOKENIZERS["fallback"]
    prompt, rest = tokenizer.encode("b", special=False), tokenizer.encode("a", special=False)
    assert tokenizer.incremental(prompt).push(rest[0]) == " a"
    assert tokenizer.incremental().push(rest[0]) == "a"


def test_special_tokens_are_silent_unless_asked_for() -> None:
    tokenizer = TOKENIZERS["bytes"]
    tokens = tokenizer.encode("é<|end|>!", special=False)
    silent, loud = tokenizer.incremental(), tokenizer.incremental(skip_special=False)
    assert "".join(map(silent.push, tokens)) == "é!"
    assert "".join(map(loud.push, tokens)) == "é<|end|>!"


def test_smollm2_streams_every_language(smollm2: Path, tmp_path: Path) -> None:
    write_tokenizer(read_header(smollm2).metadata, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for line in (Path(__file__).parents[1] / "sentences.txt").read_text(encoding="utf-8").splitlines():
        decoder = tokenizer.incremental()
        assert "".join(map(decoder.push, tokenizer.encode(line))) == line


def test_a_directory_without_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(BadInput, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
