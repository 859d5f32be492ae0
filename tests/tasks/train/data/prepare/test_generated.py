"""Tasks as shards: what the template would write, only answers learned, and nothing held out among what is trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from windlass.errors import BadInput
from windlass.model.text.tokenize.tokenizer import load_tokenizer
from windlass.tasks.train.data.prepare import generated
from windlass.tasks.train.data.prepare.generated import ChatStyle, generate_tasks
from windlass.tasks.train.data.prepare.train_tokenizer import train_vocabulary
from windlass.tasks.train.data.shards import MANIFEST, find_damage, open_shards, read_manifest

pytestmark = pytest.mark.cpu

STYLE = ChatStyle(start="<s>", system="<u>", user="<u>", assistant="<a>", end="<e>", systems=("be brief",))


def texts(folder: Path, tokenizer: Path, split: Any) -> list[str]:
    text = load_tokenizer(tokenizer)
    found = []
    for shard in open_shards(folder, read_manifest(folder), split):
        for begin, end in pairwise(shard.documents.tolist()):
            found.append(text.decode(shard.read(begin, end).tolist(), skip_special=False))
    return found


@pytest.fixture(scope="module", autouse=True)
def few_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generated, "CHATS_AT_ONCE", 64)
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    generate_tasks(tokenizer, folder, STYLE, num_tokens=60_000, seed=4, jobs=1)
    return folder


def test_chats_are_as_the_template_writes_them(tasks: Path, tokenizer: Path) -> None:
    found = texts(tasks, tokenizer, "train")
    assert len(found) > 200
    assert all(re.fullmatch(r"<s>(<u>be brief)?(<u>[^<]+<a>[^<]+<e>){1,4}", text.replace(" < ", " ")) for text in found)
    assert (tasks / "tokenizer" / "tokenizer.json").is_file()


def test_only_answers_are_learned(tasks: Path, tokenizer: Path) -> None:
    text = load_tokenizer(tokenizer)
    (shard,) = open_shards(tasks, read_manifest(tasks), "train")
    assert shard.learned is not None
    for begin, end in shard.learned[:100].tolist():
        words = text.decode(shard.read(begin - 1, end).tolist(), skip_special=False)
        assert words.startswith("<a>") and words.endswith("<e>") and words.count("<") == 2


def test_held_out_problems_are_in_the_validation_shard_alone(tasks: Path, tokenizer: Path) -> None:
    def sums(split: str) -> set[frozenset[str]]:
        asked = re.findall(
            r"<u>(?:What is |Compute )?(\d+) ?\+ ?(\d+)(?: =|=|\?|\.)?<a>", "".join(texts(tasks, tokenizer, split))
        )
        return {frozenset(pair) for pair in asked}

    assert len(sums("validation")) > 3 and len(sums("train")) > 30
    assert not sums("validation") & sums("train")


def test_the_seed_decides(tasks: Path, tokenizer: Path, tmp_path: Path) -> None:
    manifests = [generate_tasks(tokenizer, tmp_path, STYLE, num_tokens=60_000, seed=seed, jobs=1) for seed in (4, 5)]
    assert manifests[0].fingerprint == read_manifest(tasks).fingerprint != manifests[1].fingerprint
    assert list(find_damage(tmp_path, read_manifest(tmp_path))) == []


def test_a_template_that_writes_otherwise_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    other = ChatStyle(start="<s>", system="<u>", user="<u> ", assistant="<a>", end="<e>")
    with pytest.raises(BadInput, match="the chat template writes"):
        generate_tasks(tokenizer, tmp_path, other, num_tokens=1000, jobs=1)
    assert not (tmp_path / MANIFEST).exists()


def test_digits_are_tokens_of_their_own(tokenizer: Path) -> None:
    text = load_tokenizer(tokenizer)
    assert len(text.encode("2026")) == 4
    assert text.decode(text.encode("naïve 日本語 12\x00\n\ttab")) == "naïve 日本語 12\x00\n\ttab"


@pytest.mark.parametrize(("size", "end", "why"), [(100, "<e>", "256 bytes"), (300, "<x>", "is not among")])
def test_vocabularies_that_cannot_be_are_refused(size: int, end: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        train_vocabulary(["text"], size, ("<e>",), end)
