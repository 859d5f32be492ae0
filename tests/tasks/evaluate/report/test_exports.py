"""Results in other tools' layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from scripted import settings_for, sums

from windlass.errors import BadInput
from windlass.tasks.evaluate.report import inspect_log
from windlass.tasks.evaluate.report.inspect_log import write_inspect_logs
from windlass.tasks.evaluate.report.lm_eval import lm_eval_files
from windlass.tasks.evaluate.report.page import page
from windlass.tasks.evaluate.report.report import ModelRun, build, measure
from windlass.tasks.evaluate.run.records import Record, Tokens

pytestmark = pytest.mark.pure


def run_of(folder: Path) -> ModelRun:
    prepared = sums(folder, 4)
    verdicts = ("correct", "wrong", "correct", "failed")
    records = [
        Record(
            task="sums", id=str(n), verdict=verdict, answer=f"It is {n}", flexible=str(n), strict_passed=False,
            flexible_passed=verdict == "correct", why="because", tokens=Tokens(prompt=5, answer=3),
        )
        for n, verdict in enumerate(verdicts)
    ]  # fmt: skip
    return ModelRun(settings=settings_for(prepared), prepared=(prepared,), records={one.key: one for one in records})


@pytest.mark.parametrize("word", ["@MEASURED@", "@REPORT@"])
def test_an_answer_with_words_of_the_template_does_not_harm_the_page(tmp_path: Path, word: str) -> None:
    run = run_of(tmp_path)
    records = {key: msgspec.structs.replace(one, answer=f"It is {word}") for key, one in run.records.items()}
    run = msgspec.structs.replace(run, records=records)
    text = page(build([run]), measure([run], "world"), [run]).decode()
    parts = {name: re.search(f'id="{name}">(.*?)</script>', text, re.DOTALL) for name in ("report", "measured")}
    found = {name: json.loads(part[1]) for name, part in parts.items() if part}
    assert found["report"]["examples"][0]["answer"] == f"It is {word}" and len(found["measured"]["seconds"]) == 4


def test_lm_eval_layout(tmp_path: Path) -> None:
    """The keys that lm-evaluation-harness 0.4.13 writes and its readers look for."""
    run = run_of(tmp_path)
    made = lm_eval_files(build([run]), [run], "2026-11-16T06-00-00", "0.1")
    assert set(made) == {"scripted/results_2026-11-16T06-00-00.json", "scripted/samples_sums_2026-11-16T06-00-00.jsonl"}
    results = json.loads(made["scripted/results_2026-11-16T06-00-00.json"])
    assert {"results", "configs", "versions", "n-shot", "n-samples", "higher_is_better", "config", "model_name"} <= set(results)
    metrics = results["results"]["sums"]
    assert metrics["exact_match,flexible-extract"] == pytest.approx(2 / 3) and metrics["exact_match,strict-match"] == 0.0
    assert metrics["exact_match_stderr,flexible-extract"] > 0 and results["n-samples"]["sums"] == {"original": 4, "effective": 4}
    samples = [json.loads(line) for line in made["scripted/samples_sums_2026-11-16T06-00-00.jsonl"].splitlines()]
    assert [sample["exact_match"] for sample in samples] == [1.0, 0.0, 1.0, 0.0]
    assert samples[0]["resps"] == [["It is 0"]] and samples[0]["filtered_resps"] == ["0"] and samples[0]["target"] == "7"


def test_inspect_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_log, "find_spec", lambda name: None)
    run = run_of(tmp_path)
    with pytest.raises(BadInput, match="pip install inspect-ai"):
        write_inspect_logs(build([run]), [run], tmp_path, "2026-11-16T06:00:00+00:00")


def test_inspect_reads_its_own_log(tmp_path: Path) -> None:
    log = pytest.importorskip("inspect_ai.log")
    run = run_of(tmp_path)
    (path,) = write_inspect_logs(build([run]), [run], tmp_path, "2026-11-16T06:00:00+00:00")
    found = log.read_eval_log(str(path))
    assert found.status == "success" and found.results.scores[0].metrics["accuracy"].value == pytest.approx(2 / 3)
    assert [sample.scores["windlass"].value for sample in found.samples] == ["C", "I", "C"]
