"""Vocabularies of GGUF files give the tokens that their publishers' tokenizers give."""

from __future__ import annotations

import random
import re
import sysconfig
from pathlib import Path
from typing import Any

import msgspec
import pytest

from windlass.errors import BadInput, UnknownName
from windlass.model.formats.gguf.header import read_header
from windlass.model.text.tokenize.gguf_tokenizer import tokenizer_files, write_tokenizer
from windlass.model.text.tokenize.pretokenizers import pre_tokenizers
from windlass.model.text.tokenize.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.cpu

tokenizers = pytest.importorskip("tokenizers")


def backend(metadata: dict[str, Any]) -> Any:
    return tokenizers.Tokenizer.from_str(msgspec.json.encode(tokenizer_files(metadata)["tokenizer.json"]).decode())


# --- llama.cpp's own texts


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "starcoder"])
def test_tokens_equal_llama_cpp(vocabularies: Path, name: str) -> None:
    tokenizer = backend(read_header(vocabularies / f"{name}.gguf").metadata)
    texts = (vocabularies / f"{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    expected = [[int(token) for token in line.split()] for line in (vocabularies / f"{name}.gguf.out").read_text().splitlines()]
    assert len(texts) == len(expected) == 46
    for text, tokens in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == tokens
        assert tokenizer.decode(tokens) == text


def test_sentencepiece_sets_bos_before_a_text(vocabularies: Path) -> None:
    tokenizer = backend(read_header(vocabularies / "llama-spm.gguf").metadata)
    assert tokenizer.encode("Hello world").tokens == ["<s>", "▁Hello", "▁world"]
    assert tokenizer.encode("a</s>b", add_special_tokens=False).tokens == ["▁a", "</s>", "▁b"]


# --- SmolLM2 against transformers


def corpus() -> list[str]:
    """Code of the standard library (every third line), sentences in 21 languages, and noise: the same on every machine with this Python."""
    lines = (Path(__file__).parents[1] / "sentences.txt").read_text(encoding="utf-8").splitlines()
    for name in ("argparse", "ast", "datetime", "heapq", "json/decoder", "textwrap", "typing", "turtle"):
        source = Path(sysconfig.get_paths()["stdlib"], f"{name}.py").read_text(encoding="utf-8")
        lines += source.splitlines(keepends=True)[::3]
    chance = random.Random(11)
    scripts = (
        (0x20, 0x7F),
        (0xA0, 0x250),
        (0x370, 0x700),
        (0x900, 0xE00),
        (0x3040, 0x3100),
        (0x4E00, 0x9FA0),
        (0x1F300, 0x1F700),
    )
    for _ in range(400):
        spans = [chance.choice(scripts) for _ in range(40)]
        lines.append("".join(chr(chance.randrange(*span)) for span in spans))
    lines += ["".join(chance.choice(" \t\n\r  12ab'.,é你") for _ in range(40)) for _ in range(400)]
    return lines


def cut_differently(line: str) -> bool:
    """transformers' GGUF reader does not know this file's pre-tokenizer and leaves out its first step, which takes every digit
    apart. That shows where a run of white space stands before a digit, and in digits of other scripts, which it lets merge."""
    return bool(re.search(r"\s\s\d", line)) or any(mark.isnumeric() and not mark.isascii() for mark in line)


@pytest.fixture(scope="module")
def written(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2")
    write_tokenizer(read_header(smollm2).metadata, directory)
    return directory


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


def test_smollm2_tokens_equal_transformers(written: Path, theirs: Any) -> None:
    ours, lines = load_tokenizer(written), corpus()
    alike = [line for line in lines if not cut_differently(line)]
    assert len(alike) > 4000
    expected = theirs(alike, add_special_tokens=False)["input_ids"]
    assert [ours.encode(line) for line in alike] == expected
    assert [line for line in lines if ours.decode(ours.encode(line), skip_special=False) != line] == []


def test_smollm2_tokens_equal_the_published_pre_tokenizer(written: Path, theirs: Any) -> None:
    """On every line, with the two steps of the published tokenizer.json put in place of the one that transformers assumes."""
    steps = [
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    published = tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    published.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    ours, lines = load_tokenizer(written), corpus()
    assert len(lines) > 6000
    expected = [encoding.ids for encoding in published.encode_batch(lines, add_special_tokens=False)]
    assert [ours.encode(line) for line in lines] == expected


def test_transformers_loads_what_is_written(written: Path, theirs: Any) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(written)
    assert loaded.special_tokens_map == theirs.special_tokens_map
    assert loaded.chat_template == theirs.chat_template
    assert loaded.model_max_length == 8192
    assert loaded("<|im_start|>user\nHi 42<|im_end|>")["input_ids"] == theirs("<|im_start|>user\nHi 42<|im_end|>")["input_ids"]
    assert loaded.decode([1, 2, 19556], skip_special_tokens=True) == "Hello"


# --- the table


def test_every_pattern_is_understood_by_the_library() -> None:
    assert len(pre_tokenizers()) > 40
    for name, pre in pre_tokenizers().items():
        for pattern in pre.patterns:
            step = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
            assert "".join(piece for piece, _ in step.pre_tokenize_str("It's 2024,  été!\n 你好")) == "It's 2024,  été!\n 你好", (
                name
            )


CUTS = {
    "gpt-2": ["I", "'ve", "Ġ1234", "Ġ", "Ġx"],
    "smollm": ["I", "'ve", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"],
    "llama-bpe": ["I", "'ve", "Ġ", "123", "4", "Ġ", "Ġx"],
    "glm4": ["I", "'ve", "Ġ", "123", "4", "Ġ", "Ġx"],
    "qwen2": ["I", "'ve", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"],
    "falcon": ["I", "'", "ve", "Ġ", "123", "4", "Ġ", "Ġx"],
}


def small(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary of single letters and a few merges."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*letters, "ab", "abc", "<|end|>", "<think>", "[PAD]"],
        "token_type": [1] * (len(letters) + 2) + [3, 4, 5],
        "merges": ["a b", "ab c"],
        "eos_token_id": len(letters) + 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


@pytest.mark.parametrize("name", CUTS)
def test_text_is_cut_as_named(name: str) -> None:
    pieces = backend(small(pre=name)).pre_tokenizer.pre_tokenize_str("I've 1234  x")
    assert [piece for piece, _ in pieces] == CUTS[name]


def test_types_of_tokens() -> None:
    """Control and user-defined tokens are matched whole; only control ones vanish from text; unused ones are left out."""
    tokenizer = backend(small())
    tokens = tokenizer.encode("abc<|end|><think>")
    assert tokens.tokens == ["abc", "<|end|>", "<think>"]
    assert tokenizer.decode(tokens.ids) == "abc<think>"
    assert tokenizer.token_to_id("[PAD]") is None


def test_bos_and_eos_as_the_file_says() -> None:
    tokenizer = backend(small(bos_token_id=258, add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("abc").tokens == ["<|end|>", "abc", "<|end|>"]
    assert backend(small(bos_token_id=258)).encode("abc").tokens == ["abc"]
    assert backend(small(bos_token_id=258, pre="llama-bpe")).encode("abc").tokens == ["<|end|>", "abc"]


def test_normalization_is_part_of_the_table() -> None:
    decomposed = "e\u0301"
    assert backend(small(pre="qwen2")).encode(decomposed).ids == backend(small()).encode("é").ids
    assert backend(small()).encode(decomposed).ids != backend(small()).encode("é").ids


def test_named_chat_templates_become_a_list() -> None:
    metadata = small() | {"tokenizer.chat_template": "a", "tokenizer.chat_template.rag": "b"}
    templates = tokenizer_files(metadata)["tokenizer_config.json"]["chat_template"]
    assert templates == [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "no vocabulary"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"token_type": [1]}, "one for each token"),
        ({"token_type": ["x"] * 261}, "token_type"),
        ({"merges": ["ab"]}, "merges"),
        ({"merges": 3}, "merges"),
        ({"eos_token_id": 10**6}, "eos_token_id"),
        ({"add_bos_token": 1}, "add_bos_token"),
        ({"pre": 5}, "pre"),
        ({"model": "llama"}, "scores"),
    ],
)
def test_damage_is_one_clear_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        tokenizer_files(small(**changes))


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownName, match="llama-bpe"):
        tokenizer_files(small(pre="llama-bpee"))
    with pytest.raises(UnknownName, match="gpt2"):
        tokenizer_files(small(model="t5"))


def test_wrapping_is_thin(written: Path) -> None:
    tokenizer = load_tokenizer(written)
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.token_id("<|im_end|>") == 2
