"""Tokenizers of strangers: whatever the library does with them, a panic too, is one short line of ours; a prompt is never cut or padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from windlass.core.client import Broken
from windlass.errors import BadInput
from windlass.model.text.tokenize.build import build_tokenizer, check_tokenizer, library_reason
from windlass.model.text.tokenize.tokenizer import LONG_CHARACTERS, Tokenizer

pytestmark = pytest.mark.cpu

tokenizers = pytest.importorskip("tokenizers")

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def bytes_json(**changes: Any) -> bytes:
    values = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": {letter: number for number, letter in enumerate(LETTERS)}, "merges": []},
    }
    return msgspec.json.encode(values | changes)


def frame(ids: list[int]) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"]}},
    }


WITHOUT_UNKNOWN = {"type": "WordLevel", "vocab": {"hello": 0}, "unk_token": "[UNK]"}
"""The library fails on every word that is not in it."""


def test_a_whole_tokenizer_passes() -> None:
    check_tokenizer(build_tokenizer(bytes_json(), "here"))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": 1}', b"[" * 100_000, bytes_json(model={"type": "Nothing"})]
)
def test_what_is_no_tokenizer(content: bytes) -> None:
    with pytest.raises(BadInput, match=r"^some\.json is not a tokenizer: ") as caught:
        build_tokenizer(content, "some.json")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_one_that_fails_on_simple_texts() -> None:
    backend = build_tokenizer(bytes_json(model=WITHOUT_UNKNOWN, pre_tokenizer={"type": "Whitespace"}), "here")
    with pytest.raises(BadInput, match="fails on simple texts"):
        check_tokenizer(backend)


@pytest.mark.parametrize("do", [lambda one: one.encode("zebra"), lambda one: one.encode("zebra " * LONG_CHARACTERS)])
def test_a_text_that_the_tokenizer_fails_on(do: Callable[[Tokenizer], object]) -> None:
    values = bytes_json(model=WITHOUT_UNKNOWN, pre_tokenizer={"type": "Whitespace"})
    with pytest.raises(Broken, match="tokenizer cannot encode this text"):
        do(Tokenizer(build_tokenizer(values, "here"), {}))


PADDED = {
    "strategy": {"Fixed": 40},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "!",
}
CUT = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}


@pytest.mark.parametrize("changes", [{"padding": PADDED}, {"truncation": CUT}, {"truncation": CUT | {"stride": 7}}], ids=str)
def test_prompts_are_neither_cut_nor_padded(changes: dict[str, Any]) -> None:
    """With a stride over the length the library would panic; with `Fixed: 10**12` it would ask for that much memory and end the process."""
    backend = build_tokenizer(bytes_json(**changes), "here")
    assert len(backend.encode("abcdefgh").ids) == 8


class PanicException(BaseException):
    pass


class Panicking:
    """As the library behaves: PyO3's exception is a BaseException."""

    def encode(self, *_: object, **__: object) -> Any:
        raise PanicException("index out of bounds: the len is 1\nand more \x1b[31m")

    encode_batch_fast = decode = decode_batch = encode


@pytest.mark.parametrize("count", [1, LONG_CHARACTERS + 1])
def test_panics_are_errors(count: int) -> None:
    tokenizer = Tokenizer(Panicking(), {})  # type: ignore[arg-type]
    with pytest.raises(Broken, match=r"index out of bounds: the len is 1$"):
        tokenizer.encode("a" * count)
    with pytest.raises(Broken, match="cannot decode these tokens"):
        tokenizer.decode([0] * count)


def test_a_real_panic_is_an_error() -> None:
    """Of a tokenizer that was not built by `build_tokenizer`, which turns truncation off."""
    values = bytes_json(truncation=CUT | {"max_length": 1, "stride": 5})
    with pytest.raises(Broken, match="stride"):
        Tokenizer(tokenizers.Tokenizer.from_buffer(values), {}).encode("abcdefgh")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_is_no_error_of_a_library_goes_on(error: BaseException) -> None:
    with pytest.raises(type(error)):
        library_reason(error)


def test_a_frame_with_an_unknown_token() -> None:
    """Encoded or refused, and nothing else."""
    for ids in ([], [10**9]):
        try:
            check_tokenizer(build_tokenizer(bytes_json(post_processor=frame(ids)), "here"))
        except BadInput as error:
            assert str(error).isprintable()
