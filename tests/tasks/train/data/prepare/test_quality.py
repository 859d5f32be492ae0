"""The report on quality: what is wrong is found and counted, what is not is left alone."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from windlass.errors import BadInput
from windlass.tasks.train.data.prepare.near_duplicates import count_duplicates, signatures, text_hash
from windlass.tasks.train.data.prepare.prepare import QualityReport, check
from windlass.tasks.train.data.prepare.quality import QualityCounts, merge_counts, percentiles
from windlass.tasks.train.data.prepare.unit import PrepareSettings

pytestmark = pytest.mark.cpu

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["".join(Random(number).choices(LETTERS, k=6)) for number in range(500)]


def report_on(tmp_path: Path, tokenizer: Path, lines: list[Any], **values: Any) -> QualityReport:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return check([str(source)], PrepareSettings(tokenizer=str(tokenizer), **values), jobs=1)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a \ufffd b", "replacement"),
        ("cafÃ© au lait", "mojibake"),
        ("itâ€™s", "mojibake"),
        ("null \x00 byte", "control"),
        ("bell \x07", "control"),
        ("c1 \x85 next line", "control"),
    ],
)
def test_damage_is_found(tmp_path: Path, tokenizer: Path, text: str, what: str) -> None:
    counts = report_on(tmp_path, tokenizer, [{"text": "all is well"}, {"text": text}]).counts
    assert {name: getattr(counts, name) for name in ("replacement", "mojibake", "control")} == {
        name: int(name == what) for name in ("replacement", "mojibake", "control")
    }
    assert counts.examples[what][0].endswith("byte 24")


@pytest.mark.parametrize(
    "text", ["café naïve Ãlvaro Â", "tabs\tand\r\nlines\x0c", "日本語 “quoted” – dash", "\x1b[31mred\x1b[0m"]
)
def test_good_text_is_not_called_damaged(tmp_path: Path, tokenizer: Path, text: str) -> None:
    counts = report_on(tmp_path, tokenizer, [{"text": text}]).counts
    assert (counts.replacement, counts.mojibake, counts.control) == (0, 0, 0)


def test_empty_and_long_and_dumb_documents_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    dumb = {"messages": [{"role": "user", "content": "anyone there?"}]}
    lines = [{"text": ""}, {"text": " \n"}, {"messages": []}, {"text": "zq" * 100}, {"text": "short"}, dumb]
    counts = report_on(tmp_path, tokenizer, lines, longest=50).counts
    assert (counts.empty, counts.too_long, counts.unlearnable, counts.documents) == (3, 1, 1, 3)
    assert "201 tokens" in counts.examples["too_long"][0]


BAD = [
    (b"{not json\n", "not JSON"),
    (b"[1, 2]\n", "not an object"),
    (b'{"body": "x"}\n', "has no text or messages; its fields are body"),
    (b'{"text": 5}\n', "neither a string nor"),
    (b'{"messages": [{"content": "no role"}]}\n', "objects with a role"),
    (b'{"messages": [{"role": "user", "content": "\\ufdd0"}]}\n', "U+FDD0"),
    (b"\xff\xfe{}\n", "not JSON"),
]


@pytest.mark.parametrize(("line", "why"), BAD)
def test_bad_records_are_one_line_with_their_number(tmp_path: Path, tokenizer: Path, line: bytes, why: str) -> None:
    with pytest.raises(BadInput) as raised:
        report_on(tmp_path, tokenizer, [{"text": "good"}, {"text": "good"}, line])
    assert "in.jsonl, line 3: " in str(raised.value) and why in str(raised.value) and "\n" not in str(raised.value)


def test_bad_records_are_counted_where_asked(tmp_path: Path, tokenizer: Path) -> None:
    counts = report_on(tmp_path, tokenizer, [{"text": "good"}, *(line for line, _ in BAD)], skip_bad=True).counts
    assert (counts.bad, counts.documents) == (len(BAD), 1)
    assert len(counts.examples["bad"]) == 5 and "line 2" in counts.examples["bad"][0]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("in.parquet", b"PAR1 not really", "is not a valid Parquet file"),
        ("in.jsonl.gz", b"\x1f\x8bbroken", "cannot read"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, tokenizer: Path, name: str, content: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=why) as raised:
        check([str(tmp_path / name)], PrepareSettings(tokenizer=str(tokenizer)), jobs=1)
    assert "\n" not in str(raised.value)


def test_columns_that_are_not_there_are_named(tmp_path: Path, tokenizer: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"body": ["x"]}), tmp_path / "in.parquet")
    with pytest.raises(BadInput, match="no column messages or text or tools; it has body"):
        check([str(tmp_path / "in.parquet")], PrepareSettings(tokenizer=str(tokenizer)), jobs=1)


def test_sources_that_are_nothing_are_one_line(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source, why in ((tmp_path / "nowhere", "does not exist"), (tmp_path / "empty", "has no text")):
        with pytest.raises(BadInput, match=why):
            check([str(source)], PrepareSettings(tokenizer=str(tokenizer)), jobs=1)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(BadInput, match="occurs twice"):
        check([str(tmp_path / "a.txt"), str(tmp_path / "a.txt")], PrepareSettings(tokenizer=str(tokenizer)), jobs=1)
    with pytest.raises(BadInput, match=r"tokenizer\.json"):
        check([str(tmp_path / "a.txt")], PrepareSettings(tokenizer=str(tmp_path)), jobs=1)


def test_equal_and_nearly_equal_documents_are_found(tmp_path: Path, tokenizer: Path) -> None:
    random = Random(5)
    texts = [" ".join(random.choices(WORDS, k=120)) for _ in range(40)]
    changed = [text.replace(text.split(" ")[60], "other", 1) for text in texts[:10]]
    lines = [{"text": text} for text in [*texts, *texts[:7], *changed, "short one", "short two"]]
    found = report_on(tmp_path, tokenizer, lines).repeats
    assert (found.exact, found.compared) == (7, 59)
    assert 8 <= found.near <= 10


def test_near_duplicates_depend_on_what_is_common() -> None:
    """Of pairs with 90 % of their tokens in common nearly all are found; of pairs with half of them few; of strangers none."""
    random = np.random.default_rng(1)
    shares: dict[float, float] = {}
    for common in (0.98, 0.5, 0.0):
        pairs = []
        for _ in range(60):
            tokens = random.integers(0, 5000, 400).astype(np.uint32)
            other = tokens.copy()
            other[int(400 * common) :] = random.integers(0, 5000, 400 - int(400 * common))
            pairs += [tokens, other]
        shares[common] = count_duplicates(signatures(list(range(len(pairs))), pairs)).near / 60
    assert shares[0.98] > 0.9 and shares[0.5] < 0.3 and shares[0.0] == 0


def test_signatures_do_not_depend_on_the_neighbours() -> None:
    random = np.random.default_rng(2)
    documents = [random.integers(0, 50, length).astype(np.uint32) for length in (30, 400, 3, 26)]
    together = signatures([1, 2, 3, 4], documents)
    alone = np.concatenate([signatures([number], [tokens]) for number, tokens in enumerate(documents, 1)])
    np.testing.assert_array_equal(together, alone)
    assert (together[2, 1:] == 0).all()


def test_hashes_are_of_the_text() -> None:
    assert text_hash("a") == text_hash("a") != text_hash("b")
    assert text_hash("lone \ud800 surrogate") > 0


def test_counts_add_up() -> None:
    random = Random(3)
    lengths = [random.randrange(1, 5000) for _ in range(2000)]
    parts = []
    for begin in range(0, 2000, 500):
        part = QualityCounts(lengths={}, examples={})
        for length in lengths[begin : begin + 500]:
            part.count(length, length, False, 4000, "somewhere")
        parts.append(part)
    total = merge_counts(parts)
    assert (total.documents, total.tokens, total.shortest, total.longest) == (2000, sum(lengths), min(lengths), max(lengths))
    assert total.too_long == sum(length > 4000 for length in lengths) and len(total.examples["too_long"]) == 5
    for percent, tokens in percentiles(total).items():
        exact = sorted(lengths)[int(20 * percent) - 1]
        assert 0.9 * exact <= tokens <= 1.1 * exact + 1
