"""Documents of every format to shards and back; resuming; what is held out."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windlass.errors import BadInput
from windlass.model.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from windlass.tasks.train.data.prepare import inputs
from windlass.tasks.train.data.prepare.inputs import find_inputs
from windlass.tasks.train.data.prepare.prepare import check, prepare
from windlass.tasks.train.data.prepare.unit import PrepareSettings, UnitWork
from windlass.tasks.train.data.shards import MANIFEST, find_damage, open_shards, read_manifest

pytestmark = pytest.mark.cpu

TEXTS = ["the quick brown fox", "café 日本語\nand a second line", "x" * 300, "def f(x):\n    return 12\n"]


def turns(*words: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": word} for place, word in enumerate(words)]


CHATS = [turns("hi", "the fox"), turns("a", "b", "c", "日")]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def prepared(sources: list[Path], out: Path, tokenizer: Path, *, jobs: int = 1, **values: Any) -> Any:
    return prepare([str(source) for source in sources], out, PrepareSettings(tokenizer=str(tokenizer), **values), jobs=jobs)


def stored(out: Path, tokenizer: Path, split: Any = "train") -> list[tuple[str, list[str] | None]]:
    """Every document as text, and the texts of its runs that are learned."""
    text: Tokenizer = load_tokenizer(tokenizer)
    found: list[tuple[str, list[str] | None]] = []
    for shard in open_shards(out, read_manifest(out), split):
        for begin, end in zip(shard.documents[:-1].tolist(), shard.documents[1:].tolist(), strict=True):
            tokens = shard.read(begin, end).tolist()
            runs = shard.learned
            spans = None if runs is None else [(int(a), int(b)) for a, b in runs if begin <= a < end]
            words = None if spans is None else [text.decode(shard.read(a, b).tolist(), skip_special=False) for a, b in spans]
            found.append((text.decode(tokens, skip_special=False), words))
    return found


def test_text_files_are_a_document_each(tmp_path: Path, tokenizer: Path) -> None:
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    for place, text in enumerate(TEXTS):
        (source / "deep" / f"{place}.txt").write_text(text, encoding="utf-8")
    (source / "picture.png").write_bytes(b"\x89PNG")
    (source / ".hidden.txt").write_text("no")
    (source / "marked.md").write_bytes(b"\xef\xbb\xbfwith a mark")
    (source / "wide.py").write_bytes("wide é".encode("utf-16"))
    report = prepared([source], tmp_path / "out", tokenizer)
    assert [text for text, _ in stored(tmp_path / "out", tokenizer)] == [
        f"{text}<e>" for text in [*TEXTS, "with a mark", "wide é"]
    ]
    assert report.skipped == ((".png", 1),)
    assert report.counts.documents == 6 and report.counts.replacement == 0
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        MANIFEST, "quality.json", "tokenizer", "train-00000.blocks.bin", "train-00000.documents.bin", "train-00000.tokens.bin",
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet"])
def test_records_are_read_from_every_format(tmp_path: Path, tokenizer: Path, form: str) -> None:
    records = [{"text": text, "number": 3} for text in TEXTS]
    source = tmp_path / f"in.{form}"
    if form == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(records), source, row_group_size=2)
    elif form == "jsonl.gz":
        source.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
    else:
        write_jsonl(source, records)
    prepared([source], tmp_path / "out", tokenizer)
    assert [text for text, _ in stored(tmp_path / "out", tokenizer)] == [f"{text}<e>" for text in TEXTS]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_of_chats_the_assistants_words_are_learned(tmp_path: Path, tokenizer: Path, form: str) -> None:
    records = [{"messages": chat} for chat in CHATS]
    source = tmp_path / f"in.{form}"
    if form == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(records), source)
    else:
        write_jsonl(source, records)
    report = prepared([source], tmp_path / "out", tokenizer)
    assert stored(tmp_path / "out", tokenizer) == [
        ("<s><u>hi<a>the fox<e>", ["the fox<e>"]),
        ("<s><u>a<a>b<e><u>c<a>日<e>", ["b<e>", "日<e>"]),
    ]
    assert report.counts.chats == 2 and report.counts.learned_tokens == sum(
        shard.num_learned for shard in read_manifest(tmp_path / "out").shards
    )


def test_texts_and_chats_may_stand_together(tmp_path: Path, tokenizer: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "one"}, {"messages": CHATS[0]}, {"text": "two"}])
    prepared([source], tmp_path / "out", tokenizer)
    found = stored(tmp_path / "out", tokenizer)
    assert [text for text, _ in found] == ["one<e>", "<s><u>hi<a>the fox<e>", "two<e>"]
    assert found[0][1] == ["one<e>"] and found[1][1] == ["the fox<e>two<e>"]  # runs that touch are one


def test_what_looks_like_a_special_token_in_a_text_is_text(tmp_path: Path, tokenizer: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "a <e> b <u>"}])
    prepared([source], tmp_path / "out", tokenizer)
    (shard,) = open_shards(tmp_path / "out", read_manifest(tmp_path / "out"), "train")
    text = load_tokenizer(tokenizer)
    assert [token for token in shard.read(0, shard.shard.num_tokens).tolist() if token in text.special_ids] == [
        text.token_id("<e>")
    ]


def test_a_field_and_a_template_can_be_named(tmp_path: Path, tokenizer: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "no", "body": "yes"}, {"body": CHATS[0]}])
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    prepared([source], tmp_path / "out", tokenizer, field="body", template=template)
    assert [text for text, _ in stored(tmp_path / "out", tokenizer)] == ["yes<e>", "u:hi;a:the fox;"]
    assert (tmp_path / "out" / "tokenizer" / "chat_template.jinja").read_text() == template


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units of few bytes."""
    monkeypatch.setattr(inputs, "SMALLEST_UNIT", 200)
    monkeypatch.setattr(inputs, "UNITS", 10**9)


def many(tmp_path: Path, count: int = 60) -> Path:
    return write_jsonl(
        tmp_path / "many.jsonl", [{"text": f"document {number} " + "fox " * (number % 7)} for number in range(count)]
    )


@pytest.mark.usefixtures("small_units")
def test_units_cut_lines_nowhere(tmp_path: Path, tokenizer: Path) -> None:
    source = many(tmp_path)
    prepared([source], tmp_path / "out", tokenizer)
    expected = [json.loads(line)["text"] + "<e>" for line in source.read_text().splitlines()]
    assert len(read_manifest(tmp_path / "out").shards) > 10
    assert [text for text, _ in stored(tmp_path / "out", tokenizer)] == expected


@pytest.mark.usefixtures("small_units")
def test_interrupted_work_goes_on_and_gives_the_same(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = many(tmp_path)
    whole = prepared([source], tmp_path / "whole", tokenizer, validation=0.2)
    run, done = UnitWork.run, []

    def interrupted(self: UnitWork, unit: Any) -> Any:
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(unit.number)
        return run(self, unit)

    monkeypatch.setattr(UnitWork, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepared([source], tmp_path / "out", tokenizer, validation=0.2)
    with pytest.raises(BadInput, match="was not finished"):
        read_manifest(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.part"))
    with pytest.raises(BadInput, match="unfinished work with a different settings"):
        prepared([source], tmp_path / "out", tokenizer)
    (tmp_path / "out" / "train-00001.tokens.bin").unlink()  # what has gone is made again
    again: list[int] = []
    monkeypatch.setattr(UnitWork, "run", lambda self, unit: again.append(unit.number) or run(self, unit))
    report = prepared([source], tmp_path / "out", tokenizer, validation=0.2)
    assert 1 in again and not {0, 2, 3, 4} & set(again)
    assert read_manifest(tmp_path / "out").fingerprint == read_manifest(tmp_path / "whole").fingerprint
    assert (report.counts, report.repeats) == (whole.counts, whole.repeats)
    assert not list((tmp_path / "out").glob(".*"))
    with pytest.raises(BadInput, match="already has"):
        prepared([source], tmp_path / "out", tokenizer, validation=0.2)


@pytest.mark.multi
@pytest.mark.usefixtures("small_units")
def test_several_processes_give_the_same(tmp_path: Path, tokenizer: Path) -> None:
    source = many(tmp_path)
    one = prepared([source], tmp_path / "one", tokenizer, validation=0.1)
    told: list[int] = []
    settings = PrepareSettings(tokenizer=str(tokenizer), validation=0.1)
    two = prepare([str(source)], tmp_path / "two", settings, jobs=2, started=lambda total: lambda done: told.append(done))
    assert read_manifest(tmp_path / "one").fingerprint == read_manifest(tmp_path / "two").fingerprint
    assert (one.counts, one.repeats) == (two.counts, two.repeats)
    assert sum(told) <= source.stat().st_size


def test_what_is_held_out_depends_on_the_document_alone(tmp_path: Path, tokenizer: Path) -> None:
    source = many(tmp_path, 300)
    prepared([source], tmp_path / "out", tokenizer, validation=0.2)
    held = {text for text, _ in stored(tmp_path / "out", tokenizer, "validation")}
    trained = {text for text, _ in stored(tmp_path / "out", tokenizer)}
    assert 30 < len(held) < 90 and not held & trained and len(held | trained) == 300
    backwards = write_jsonl(tmp_path / "b.jsonl", [json.loads(line) for line in source.read_text().splitlines()[::-1]])
    prepared([backwards], tmp_path / "other", tokenizer, validation=0.2)
    assert {text for text, _ in stored(tmp_path / "other", tokenizer, "validation")} == held


def test_checking_writes_nothing(tmp_path: Path, tokenizer: Path) -> None:
    source = many(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    report = check([str(source)], PrepareSettings(tokenizer=str(tokenizer)), jobs=1)
    assert report.counts.documents == 60 and report.num_shards == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_every_changed_byte_is_found(tmp_path: Path, tokenizer: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": "one"}, {"messages": CHATS[0]}])
    prepared([source], tmp_path / "out", tokenizer)
    manifest = read_manifest(tmp_path / "out")
    assert list(find_damage(tmp_path / "out", manifest)) == []
    for file in (tmp_path / "out").glob("*.bin"):
        content = file.read_bytes()
        file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        (line,) = find_damage(tmp_path / "out", manifest)
        assert file.name in line and "checksum" in line and "\n" not in line
        file.write_bytes(content[:-1])
        (line,) = find_damage(tmp_path / "out", manifest)
        assert "bytes instead of" in line
        file.write_bytes(content)
    np.testing.assert_array_equal(open_shards(tmp_path / "out", manifest, "train")[0].documents[0], 0)


def test_the_output_stays_out_of_the_sources(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(BadInput, match="is inside the source"):
        prepared([tmp_path], tmp_path / "deep" / "out", tokenizer)
    assert not (tmp_path / "deep").exists()


def test_a_pipe_is_no_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="pipe is neither a file nor a directory"):
        find_inputs([str(tmp_path / "pipe")])
