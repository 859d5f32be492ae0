"""Counts that add up, the same report from answers in any order, pages that hold what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from scripted import settings_for, sums

from windlass.tasks.evaluate.report.compare import compare
from windlass.tasks.evaluate.report.files import files
from windlass.tasks.evaluate.report.markdown import markdown
from windlass.tasks.evaluate.report.page import page
from windlass.tasks.evaluate.report.report import ModelRun, as_json, build, measure
from windlass.tasks.evaluate.report.results import pass_at, result
from windlass.tasks.evaluate.run.budget import Price
from windlass.tasks.evaluate.run.records import Record, Tokens

pytestmark = pytest.mark.pure

KEYS = "model task category num_examples num_correct num_failed_requests num_truncated accuracy interval pass_at seconds tokens joules kg_co2 usd"


def record(number: int, verdict: str, **fields: Any) -> Record:
    given: dict[str, Any] = {"strict_passed": False, "flexible_passed": verdict == "correct"} | fields
    return Record(
        task="sums", id=str(number), verdict=verdict, tokens=Tokens(prompt=10, answer=2), seconds=0.5, wall_seconds=0.1, **given
    )  # type: ignore[arg-type]


def run_of(folder: Path, records: list[Record], count: int = 12) -> ModelRun:
    prepared = sums(folder, count)
    return ModelRun(settings=settings_for(prepared), prepared=(prepared,), records={one.key: one for one in records})


MIXED = [
    *(record(n, "correct") for n in range(5)),
    *(record(n, "wrong", finish="length") for n in range(5, 8)),
    record(8, "failed", why="the server failed"),
    record(9, "pending"),
]


def test_counts_add_up(tmp_path: Path) -> None:
    (one,) = build([run_of(tmp_path, MIXED)]).results
    assert one.num_correct + one.num_wrong + one.num_pending == one.num_answers
    assert one.num_answers + one.num_failed_requests + one.num_not_asked == 12
    assert (one.num_correct, one.num_wrong, one.num_failed_requests, one.num_pending, one.num_truncated) == (5, 3, 1, 1, 3)
    assert one.accuracy == 5 / 8  # failed requests are no wrong answers
    assert (one.strict_accuracy, one.flexible_accuracy) == (0.0, 5 / 8)


def test_the_order_of_answers_does_not_matter(tmp_path: Path) -> None:
    shuffled = list(MIXED)
    Random(3).shuffle(shuffled)
    reports = [build([run_of(tmp_path, records)]) for records in (MIXED, shuffled)]
    assert reports[0] == reports[1] and markdown(reports[0]) == markdown(reports[1])


def test_samples_of_one_question_are_no_independent_answers(tmp_path: Path) -> None:
    task = sums(tmp_path).task
    records = [record(n, "correct" if n % 2 else "wrong", sample=sample) for n in range(10) for sample in range(20)]
    one = result("m", task, records, 10, 20)
    assert one.num_examples == 10 and one.interval[1] - one.interval[0] > 0.5  # of ten questions, not of 200
    assert one.pass_at["1"] == pytest.approx(0.5) and one.pass_at["20"] == 0.5 and set(one.pass_at) == {"1", "2", "5", "10", "20"}


def test_pass_at_k_needs_all_samples() -> None:
    assert pass_at([record(0, "correct"), record(0, "wrong", sample=1), record(1, "correct")], 2) == {"1": 0.5, "2": 1.0}


def test_json_has_the_stable_keys(tmp_path: Path) -> None:
    run = msgspec.structs.replace(run_of(tmp_path, MIXED), price=Price(usd_per_million_prompt=1.0))
    made = as_json(build([run]), measure([run], "world"), {"scripted": Path("j")})
    assert set(KEYS.split()) <= set(made["results"][0]) and {"results", "comparisons", "journal"} <= set(made)
    row = made["results"][0]
    assert row["tokens"] == {"prompt": 100, "answer": 20} and row["usd"] == pytest.approx(1e-4) and row["joules"] is None
    assert row["seconds"] == pytest.approx(1.0) and row["per_correct"]["seconds"] == pytest.approx(0.2)


def test_models_are_compared_on_the_questions_they_share() -> None:
    a = [record(n, "correct" if n < 20 else "wrong") for n in range(60)]
    b = [record(n, "correct" if n < 35 else "wrong") for n in range(10, 70)]
    (one,) = compare({"a": a, "b": b})
    assert (one.a, one.b, one.num_questions, one.difference) == ("a", "b", 50, 0.3)
    assert one.p < 0.001 and one.interval[0] > 0.1 and one.same_prompts


def test_failed_requests_are_not_compared() -> None:
    (one,) = compare({"a": [record(0, "correct"), record(1, "failed")], "b": [record(0, "wrong"), record(1, "correct")]})
    assert one.num_questions == 1


def test_markdown_says_what_is_missing(tmp_path: Path) -> None:
    text = markdown(build([run_of(tmp_path, MIXED)]))
    assert "1 programs were not run" in text and "2 questions were not asked" in text and "| 62 % | 31 to 86 |" in text


def embedded(html: bytes, name: str) -> Any:
    found = re.search(rb'id="%s">(.*?)</script>' % name.encode(), html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_page_holds_every_example_and_nothing_ends_its_script(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!-- \u2028"
    run = run_of(tmp_path, [record(0, "correct", answer=evil), *MIXED[1:]])
    html = page(build([run]), measure([run], "world"), [run])
    assert html.count(b"</script>") == 3 and b"<!--" not in html
    found = embedded(html, "report")
    assert len(found["examples"]) == len(MIXED) and found["examples"][0]["answer"] == evil
    assert found["prompts"][found["examples"][0]["prompt"]] == "[user]\n0 + 7 ="
    assert embedded(html, "measured")["seconds"] == [0.5] * len(MIXED)


def test_files_differ_only_in_what_clocks_said(tmp_path: Path) -> None:
    slower = [record(int(one.id), one.verdict, finish=one.finish, why=one.why) for one in MIXED]
    made: list[dict[str, bytes]] = []
    for records, seconds in ((MIXED, 0.1), (slower, 0.7)):
        run = run_of(tmp_path, [msgspec.structs.replace(one, wall_seconds=seconds) for one in records])
        made.append(files(build([run]), measure([run], "world"), [run]))
    clockless = [re.sub(rb'id="measured">.*?</script>', b"", one["report.html"]) for one in made]
    assert made[0]["report.json"] == made[1]["report.json"] and made[0]["report.md"] == made[1]["report.md"]
    assert clockless[0] == clockless[1] and made[0]["measured.json"] != made[1]["measured.json"]
