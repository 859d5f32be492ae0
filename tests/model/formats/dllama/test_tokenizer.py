"""The `.t` file to the byte, both ways, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadCheckpoint, BadInput
from windlass.model.formats.dllama.tokenizer import DllamaTokenizer, read_tokenizer, tokenizer_bytes, write_tokenizer

pytestmark = pytest.mark.cpu

TOKENIZER = DllamaTokenizer(
    vocabulary=[b"a", b"\xc3", "é".encode(), b"<bos>", b"<end>"],
    scores=[0.0, -1.0, -2.0, -3.0, -4.5],
    bos_id=3,
    eos_ids=(4, 3),
    chat_template="<|im_start|> ü",
    add_bos=False,
)


def _by_hand() -> bytes:
    """The format as documented, without a loop of ours."""
    template = "<|im_start|> ü".encode()
    pairs = [(3, 3), (0, 1), (1, 5), (2, 5), (7, len(template)), (9, 2), (10, 0)]
    data = struct.pack("<ii", 0x567124, 8 + 8 * len(pairs)) + b"".join(struct.pack("<ii", *pair) for pair in pairs)
    data += template + struct.pack("<ii", 4, 3)
    data += struct.pack("<fI", 0.0, 1) + b"a" + struct.pack("<fI", -1.0, 1) + b"\xc3" + struct.pack("<fI", -2.0, 2) + b"\xc3\xa9"
    return data + struct.pack("<fI", -3.0, 5) + b"<bos>" + struct.pack("<fI", -4.5, 5) + b"<end>"


def _read(folder: Path, data: bytes) -> DllamaTokenizer:
    path = folder / "x.t"
    path.write_bytes(data)
    return read_tokenizer(path)


def test_bytes_are_as_documented(tmp_path: Path) -> None:
    assert tokenizer_bytes(TOKENIZER) == _by_hand()
    assert write_tokenizer(tmp_path / "y.t", TOKENIZER) == len(_by_hand()) == (tmp_path / "y.t").stat().st_size
    assert [path.name for path in tmp_path.iterdir()] == ["y.t"]


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    back = _read(tmp_path, _by_hand())
    assert back.vocabulary == TOKENIZER.vocabulary and back.scores == TOKENIZER.scores
    assert (back.bos_id, back.eos_ids, back.add_bos, back.max_token_length) == (3, (4, 3), False, 5)
    assert back.chat_template == TOKENIZER.chat_template
    assert tokenizer_bytes(back) == _by_hand()


def test_no_bos_and_no_template(tmp_path: Path) -> None:
    tokenizer = DllamaTokenizer(vocabulary=[b"a"], scores=[-0.5], bos_id=None, eos_ids=())
    back = _read(tmp_path, tokenizer_bytes(tokenizer))
    assert (back.bos_id, back.eos_ids, back.chat_template, back.add_bos) == (None, (), "", True)


def test_older_files_are_read(tmp_path: Path) -> None:
    tokens = struct.pack("<fI", -1.0, 1) + b"a" + struct.pack("<fI", -2.0, 2) + b"bc"
    old = _read(tmp_path, struct.pack("<iiiiii", 0x567123, 2, 2, 0, 1, -1) + tokens)
    assert (old.vocabulary, old.bos_id, old.eos_ids) == ([b"a", b"bc"], 0, (1,))
    pairs = [(3, 0), (4, 1), (6, 0), (5, -1), (0, 1), (1, 2), (2, 2), (7, 3), (8, 4)]
    data = struct.pack("<ii", 0x567124, 8 + 8 * len(pairs)) + b"".join(struct.pack("<ii", *pair) for pair in pairs)
    middle = _read(tmp_path, data + b"tpl" + b"stop" + tokens)
    assert (middle.eos_ids, middle.chat_template, middle.vocabulary) == ((1, 0), "tpl", [b"a", b"bc"])


@pytest.mark.parametrize("cut", range(0, len(_by_hand()), 3))
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    with pytest.raises(BadCheckpoint, match=r"x\.t, byte \d+: "):
        _read(tmp_path, _by_hand()[:cut])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (struct.pack("<i", 0x567124), b"abcd", "not a Distributed Llama tokenizer"),
        (struct.pack("<ii", 0, 1), struct.pack("<ii", 0, 0), "version 0 is not supported"),
        (struct.pack("<ii", 9, 2), struct.pack("<ii", 11, 2), "byte 48: unknown header key 11"),
        (struct.pack("<ii", 9, 2), struct.pack("<ii", 9, -2), "byte 52: header key 9"),
        (struct.pack("<ii", 1, 5), struct.pack("<ii", 1, 2**31 - 1), "a vocabulary of 2147483647 does not fit"),
        (struct.pack("<ii", 1, 5), struct.pack("<ii", 1, 4), "13 bytes follow the last token"),
        (struct.pack("<ii", 2, 5), struct.pack("<ii", 2, 4), "a token has 5 bytes, more than the header's 4"),
        (struct.pack("<ii", 3, 3), struct.pack("<ii", 3, 99), "bos id 99 is outside the vocabulary of 5"),
        (struct.pack("<fI", -1.0, 1), struct.pack("<fI", -1.0, 0), "token 1 is empty"),
        (struct.pack("<fI", -1.0, 1), struct.pack("<fI", -1.0, 2**32 - 1), "4294967295 bytes needed"),
        ("ü".encode(), b"\xff\xff", "the chat template is not UTF-8"),
    ],
)
def test_damage_is_refused(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    assert old in _by_hand()
    with pytest.raises(BadCheckpoint, match=message):
        _read(tmp_path, _by_hand().replace(old, new, 1))


@given(st.binary(max_size=120))
def test_no_bytes_make_it_fail_otherwise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for candidate in (data, struct.pack("<ii", 0x567124, 8 + len(data) // 8 * 8) + data, struct.pack("<i", 0x567123) + data):
        try:
            _read(folder, candidate)
        except BadCheckpoint as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary": [b"", b"b"], "scores": [0.0, 0.0]}, "token 0 is empty"),
        ({"scores": [0.0]}, "it has 5 tokens and 1 scores"),
        ({"eos_ids": (5,)}, "eos id 5"),
        ({"bos_id": -1}, "bos id -1"),
    ],
)
def test_what_cannot_be_written_is_refused(change: dict[str, object], message: str) -> None:
    import msgspec

    with pytest.raises(BadInput, match=message):
        tokenizer_bytes(msgspec.structs.replace(TOKENIZER, **change))
