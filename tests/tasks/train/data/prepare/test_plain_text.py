"""What is text and what is not: files of every encoding, binary files under names of texts, records with control characters."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest

from windlass.cli import execute as windlass
from windlass.errors import BadInput
from windlass.tasks.train.data.prepare.plain_text import NotText, decoded, too_many_controls
from windlass.tasks.train.data.prepare.prepare import check
from windlass.tasks.train.data.prepare.unit import PrepareSettings

pytestmark = pytest.mark.cpu

WORDS = "the quick brown fox, café 日本語\n" * 20


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_text_of_every_encoding_is_read(encoding: str) -> None:
    assert decoded(WORDS.encode(encoding)) == WORDS


@pytest.mark.parametrize("text", ["", "\x1b[1mbold\x1b[0m\ttab\r\n\x0c", "bell \x07", "one \x85 in a longer line of text " * 8])
def test_odd_texts_are_texts(text: str) -> None:
    assert decoded(text.encode()) == text and too_many_controls(text) is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("a café".encode("latin-1"), "is not UTF-8 text: byte 5 is 0xe9"),
        (b"\xef\xbb\xbfgood \xff", "is not UTF-8 text: byte 8 is 0xff"),
        (b"good\x00bad", "byte 4 is NUL"),
        (WORDS.encode("utf-16-le"), "byte 1 is NUL (UTF-16 needs a byte order mark)"),
        (WORDS.encode("utf-16")[:-1], "is not UTF-16 text: byte"),
        ("ab\0".encode("utf-16"), "a NUL character at byte 6"),
        (b"good " + bytes(range(1, 9)) * 4, "control characters, the first at byte 5"),
        (gzip.compress(WORDS.encode(), mtime=0), "it begins like gzip data"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "it begins like PDF data"),
        (Random(1).randbytes(4000), "byte"),
    ],
)
def test_what_is_not_text_is_refused_with_its_place(content: bytes, why: str) -> None:
    with pytest.raises(NotText) as raised:
        decoded(content)
    assert why in str(raised.value) and "\n" not in str(raised.value)


def test_random_bytes_are_never_text() -> None:
    random = Random(7)
    for _ in range(500):
        content = random.randbytes(random.randrange(64, 4096))
        with pytest.raises(NotText):
            decoded(content)
        seven_bits = bytes(byte & 0x7F or 1 for byte in content * 4)
        with pytest.raises(NotText):
            decoded(seven_bits)


NOISE = Random(3).randbytes(3000)


def parquet(path: Path, values: list[bytes]) -> None:
    arrow, format = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = arrow.Array.from_buffers(arrow.string(), len(values), arrow.array(values, arrow.binary()).buffers())
    format.write_table(arrow.table({"text": column}), path)


def write(path: Path, kind: str) -> Path:
    good = json.dumps({"text": "good"}).encode() + b"\n"
    if kind == "parquet":
        parquet(path, [b"good", NOISE])
    elif kind == "escaped":
        path.write_bytes(good + json.dumps({"text": NOISE.decode("latin-1")}).encode() + b"\n")
    elif kind == "gzip":
        path.write_bytes(gzip.compress(NOISE))
    elif kind == "gzip without its name":
        path.write_bytes(gzip.compress(good))
    elif kind == "gzip that is cut":
        path.write_bytes(gzip.compress(good * 50)[:-10])
    elif kind == "gzip that is damaged":
        path.write_bytes(gzip.compress(b"", mtime=0)[:10] + zlib.compress(NOISE)[:20])
    else:
        path.write_bytes(NOISE)
    return path


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("in.txt", "raw", "byte "),
        ("in.py", "raw", "byte "),
        ("in.anything", "raw", "byte "),
        ("in.jsonl", "raw", "line 1: not JSON"),
        ("in.jsonl", "escaped", "line 2: is not text"),
        ("in.jsonl.gz", "gzip", "line 1: not JSON"),
        ("in.jsonl", "gzip without its name", "is gzip data, not JSON"),
        ("in.txt.gz", "gzip without its name", "it begins like gzip data"),
        ("in.jsonl.gz", "gzip that is cut", "cannot read"),
        ("in.jsonl.gz", "gzip that is damaged", "cannot read"),
        ("in.parquet", "parquet", "row 2: has text that is not UTF-8: byte"),
        ("in.parquet", "raw", "is not a valid Parquet file"),
    ],
)
def test_noise_becomes_no_shards(
    tmp_path: Path, tokenizer: Path, name: str, kind: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / name, kind)
    assert windlass(["train", "data", str(source), str(tmp_path / "out"), "--tokenizer", str(tokenizer)]) == 2
    told = capsys.readouterr().err
    assert name in told and why in told and told.count("\n") == 1 and "Traceback" not in told
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "kind", "documents"), [("in.jsonl", "escaped", 1), ("in.parquet", "parquet", 1), ("in.txt", "raw", 0)]
)
def test_noise_can_be_left_out(tmp_path: Path, tokenizer: Path, name: str, kind: str, documents: int) -> None:
    settings: Any = PrepareSettings(tokenizer=str(tokenizer), skip_bad=True)
    counts = check([str(write(tmp_path / name, kind))], settings, jobs=1).counts
    assert (counts.bad, counts.documents) == (1, documents)


def test_one_binary_file_among_texts_is_named(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    for place in range(5):
        (folder / f"{place}.txt").write_text(WORDS, encoding="utf-8")
    (folder / "deep" / "notes.md").write_bytes(NOISE)
    with pytest.raises(BadInput, match=r"notes\.md: is not .*text.*byte"):
        check([str(folder)], PrepareSettings(tokenizer=str(tokenizer)), jobs=1)
