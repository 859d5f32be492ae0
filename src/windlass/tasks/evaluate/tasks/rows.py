"""Files of a data set to rows, which are dictionaries of texts: the few lines of Python that TOML cannot say."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from windlass.errors import BadInput

Row = dict[str, Any]
Reader = Callable[[bytes, str, str], list[Row]]
"""(content, file name, part) -> rows. A part is `test` or, for worked examples, `dev`."""


def text_of(content: bytes) -> str:
    return (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()


def json_rows(content: bytes, name: str) -> list[Row]:
    """JSON lines, or one JSON list."""
    try:
        text = text_of(content)
        if text.lstrip().startswith("["):
            found: list[Any] = json.loads(text)
        else:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise BadInput(f"{name} is not JSON lines: {error}") from None
    bad = next((number for number, row in enumerate(found) if not isinstance(row, dict)), None)
    if bad is not None:
        raise BadInput(f"{name}: row {bad + 1} is no JSON object")
    return found


def plain(content: bytes, name: str, part: str) -> list[Row]:
    return json_rows(content, name)


def gsm8k(content: bytes, name: str, part: str) -> list[Row]:
    """The solution and, after ####, its number."""
    rows: list[Row] = []
    for row in json_rows(content, name):
        solution, _, number = str(row["answer"]).rpartition("####")
        solution = re.sub(r"<<[^>]*>>", "", solution).strip()  # notes to a calculator
        rows.append({"question": row["question"], "solution": solution, "number": number.strip().replace(",", "")})
    return rows


def humaneval(content: bytes, name: str, part: str) -> list[Row]:
    return [
        {**row, "tests": f"{row['test']}\ncheck({row['entry_point']})\n", "name": str(row["task_id"])}
        for row in json_rows(content, name)
    ]


def mbpp(content: bytes, name: str, part: str) -> list[Row]:
    """The sanitized set calls the text `prompt`, the full one `text`; the full one may set something up first."""
    return [_mbpp_row(row) for row in json_rows(content, name)]


def _mbpp_row(row: Row) -> Row:
    lines = [*row.get("test_imports", []), *str(row.get("test_setup_code", "")).splitlines()]
    tests = [str(test) for test in row["test_list"]]
    return {
        "name": str(row["task_id"]),
        "text": row.get("prompt") or row["text"],
        "shown_tests": "\n".join(tests),
        "tests": "\n".join([*lines, *tests]),
        "code": str(row["code"]).replace("\r\n", "\n"),
    }


def mmlu(content: bytes, name: str, part: str) -> list[Row]:
    """A tar of `test/SUBJECT_test.csv` and `dev/SUBJECT_dev.csv`: question, four choices, letter."""
    rows: list[Row] = []
    for subject, text in _subjects(content, name, part):
        for number, cells in enumerate(csv.reader(io.StringIO(text))):
            if len(cells) != 6 or cells[5] not in "ABCD":
                raise BadInput(f"{name}: {subject}, row {number + 1} is not a question, four choices and a letter")
            choices = dict(zip("abcd", cells[1:5], strict=True))
            rows.append(
                {
                    "name": f"{subject}/{number}",
                    "subject": subject,
                    "topic": subject.replace("_", " "),
                    "question": cells[0].strip(),
                    "letter": cells[5],
                    **choices,
                }
            )
    return rows


def _subjects(content: bytes, name: str, part: str) -> Iterator[tuple[str, str]]:
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            wanted = sorted(
                (Path(member.name).stem.removesuffix(f"_{part}"), member)
                for member in archive.getmembers()
                if member.isfile() and member.name.endswith(f"_{part}.csv")
            )
            for subject, member in wanted:
                stream = archive.extractfile(member)
                assert stream is not None
                yield subject, stream.read().decode()
    except (tarfile.TarError, EOFError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise BadInput(f"{name} is no tar of CSV files: {error}") from None


def generated(names: Iterable[str], count: int) -> list[Row]:
    """Held-out problems, as tests of the bundled model count them: `count` of each, seed 0."""
    from windlass.model.bundled.tasks import held_out

    problems = held_out(count, 0, tuple(names))
    return [
        {"name": f"{problem.task}/{number}", "subject": problem.task, "question": problem.prompt, "answer": problem.answer}
        for number, problem in enumerate(problems)
    ]


READERS: dict[str, Reader] = {"plain": plain, "gsm8k": gsm8k, "humaneval": humaneval, "mbpp": mbpp, "mmlu": mmlu}
