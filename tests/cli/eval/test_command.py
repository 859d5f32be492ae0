"""`windlass eval` as a user runs it: JSON, resuming, comparing, and everything that is refused in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from answering import AnsweringServer

from waiting import HUNG_SECONDS, until
from windlass.cli import execute
from windlass.cli.eval import run as run_module
from windlass.cli.eval.models import OpenModel
from windlass.cli.eval.options import EvalOptions
from windlass.core.launch import Launch
from windlass.tasks.evaluate.run.estimate import Speed
from windlass.tasks.evaluate.run.settings import Wanted

pytestmark = pytest.mark.pure


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert execute(["eval", *words, "--json"]) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert execute(["eval", *words]) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("windlass: ") and "Traceback" not in lines[0], lines
    return lines[0]


def test_results_have_the_stable_keys(
    server: AnsweringServer, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluated(
        capsys, server.url, "--tasks", str(task), "--results-dir", str(tmp_path / "r"), "--price", "1,2", "--watts", "100"
    )
    (row,) = found["results"]
    keys = "model task category num_examples num_correct num_failed_requests num_truncated accuracy interval pass_at seconds tokens joules kg_co2 usd"
    assert set(keys.split()) <= set(row)
    assert (row["model"], row["task"], row["num_examples"], row["num_correct"], row["accuracy"]) == ("adder", "sums", 30, 30, 1.0)
    assert (
        row["tokens"] == {"prompt": 120, "answer": 120}
        and row["usd"] == pytest.approx(360e-6)
        and row["joules"] > 0
        and row["kg_co2"] > 0
    )
    assert Path(found["journal"]["adder"]).is_file() and found["comparisons"] == []
    assert {"report.json", "report.md", "report.html", "measured.json", "settings.json"} <= {
        path.name for path in (tmp_path / "r").iterdir()
    }


def test_several_models_are_compared(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with AnsweringServer(model="right") as one, AnsweringServer(model="wrong", off_by=1) as other:
        found = evaluated(capsys, one.url, other.url, "--tasks", str(task), "--results-dir", str(tmp_path / "r"))
    assert [(row["model"], row["accuracy"]) for row in found["results"]] == [("right", 1.0), ("wrong", 0.0)]
    (pair,) = found["comparisons"]
    assert {"a", "b", "task", "difference", "interval", "p"} <= set(pair) and pair["difference"] == -1.0 and pair["p"] < 1e-6


def test_servers_of_one_name_are_kept_apart(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with AnsweringServer() as one, AnsweringServer(off_by=1) as other:
        found = evaluated(
            capsys, one.url, other.url, "--tasks", str(task), "--num-examples", "4", "--results-dir", str(tmp_path / "r")
        )
    assert len(set(found["journal"].values())) == 2 and [row["accuracy"] for row in found["results"]] == [1.0, 0.0]


def test_an_evaluation_is_not_started_twice_but_resumed(
    server: AnsweringServer, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "r")
    words = (server.url, "--tasks", str(task), "--num-examples", "10", "--results-dir", folder)
    first = evaluated(capsys, *words)
    assert "add --resume" in refused(capsys, *words)
    assert evaluated(capsys, "--resume", "--results-dir", folder)["results"] == first["results"]
    assert sum(server.asked.values()) == 10
    assert "--num-examples 10, not 11" in refused(capsys, *words[:3], "--num-examples", "11", "--results-dir", folder, "--resume")
    task.write_text(task.read_text().replace("{a} + {b} =", "What is {a} + {b} =?"))
    assert "different task sums" in refused(capsys, "--resume", "--results-dir", folder)
    assert evaluated_journal(Path(folder)) == 10


def test_a_resumed_model_computes_as_it_did(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that change answers are kept or refused; those that change none are taken as given."""
    seen: list[Launch] = []

    async def no_run(wanted: Wanted, tasks: object, folder: Path, options: EvalOptions) -> int:
        seen.append(options.launch)
        return 0

    monkeypatch.setattr(run_module, "_evaluate", no_run)
    folder = ("--results-dir", str(tmp_path / "r"))
    words = ("--quant", "int8", "--kv", "fp32", "--context", "4k", "--device", "cpu")
    assert execute(["eval", "m", "--tasks", str(task), *folder, *words]) == 0
    assert execute(["eval", "--resume", *folder, "--device", "cuda"]) == 0
    first, again = seen
    assert (again.quant, again.kv, again.context_tokens, again.device) == ("int8", "fp32", first.context_tokens, "cuda")
    capsys.readouterr()
    assert "--quant int8, not int4" in refused(capsys, "--resume", *folder, "--quant", "int4")
    for option in ("--exact", "--deterministic"):
        assert f"{option} left to its default" in refused(capsys, "--resume", *folder, option)


@pytest.mark.parametrize(("url", "quant"), [("", "int4"), ("http://h:1", None)])
def test_a_journal_knows_how_a_local_model_computes(url: str, quant: str | None) -> None:
    model = OpenModel(
        client=None,
        info=None,
        label="m",
        weights="",
        concurrency=1,
        top=1,
        speed=Speed(),
        url=url,  # type: ignore[arg-type]
    )
    found = run_module.settings_of("m", model, Wanted(quant="int4"), ())
    assert found.fingerprint()["quant"] == quant


def evaluated_journal(folder: Path) -> int:
    (journal,) = folder.glob("*/journal.jsonl")
    return len(journal.read_text().splitlines()) - 1


def test_compare_reads_journals(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, off_by in (("a", 0), ("b", 1)):
        with AnsweringServer(model=name, off_by=off_by) as server:
            evaluated(capsys, server.url, "--tasks", str(task), "--results-dir", str(tmp_path / name))
    assert execute(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    shown = capsys.readouterr().out
    assert "b over a" in shown and "-100" in shown and "a is better" in shown
    (pair,) = evaluated(capsys, "compare", str(tmp_path / "a"), str(tmp_path / "b"))["comparisons"]
    assert pair["num_questions"] == 30
    assert "name at least two" in refused(capsys, "compare", str(tmp_path / "a"))
    assert "holds no journal" in refused(capsys, "compare", str(tmp_path), str(tmp_path / "none"))


def test_failures_are_retried(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.tasks.evaluate.run import retry

    monkeypatch.setattr(retry, "FIRST_DELAY_SECONDS", 0.0)
    with AnsweringServer(fails=2) as server:
        found = evaluated(capsys, server.url, "--tasks", str(task), "--num-examples", "5", "--results-dir", str(tmp_path / "r"))
    assert found["results"][0]["num_correct"] == 5 and found["results"][0]["num_failed_requests"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["URL", "--tasks", "gsm9k"], "did you mean gsm8k"),
        (["URL", "--tasks", "TASK", "--prompt", "chatty"], "did you mean chat"),
        (["URL", "--tasks", "TASK", "--budget", "much"], "5usd, 2h or 30min"),
        (["URL", "--tasks", "TASK", "--budget", "5usd"], "needs a price"),
        (["URL", "--tasks", "TASK", "--price", "free"], "dollars per million"),
        (["URL", "--tasks", "TASK", "--samples", "3", "--temperature", "0"], "are all the same"),
        (["URL", "--tasks", "TASK", "--shots", "99"], "leave no question"),
        (["URL", "--tasks", "TASK", "--region", "Atlantis"], "unknown region"),
        (["URL", "--tasks", "TASK", "--export", "excel"], "unknown export layout"),
        (["URL", "--tasks", "TASK", "--concurrency", "0"], "at least 1"),
        (["URL", "URL", "--tasks", "TASK"], "named twice"),
        (["--tasks", "TASK"], "name at least one model"),
        (["http://127.0.0.1:9", "--tasks", "TASK"], "unreachable"),
        (["URL", "--tasks", "broken.toml"], "not valid TOML"),
        (["URL", "--tasks", "TASK", "--skip-execution", "--execute-anyway"], "contradict"),
        (["no-such-model-x", "--tasks", "TASK"], "unknown model"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    words: list[str],
    said: str,
    server: AnsweringServer,
    task: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "broken.toml").write_text("name = ")
    monkeypatch.chdir(tmp_path)
    given = [{"URL": server.url, "TASK": str(task)}.get(word, word).replace("broken.toml", "./broken.toml") for word in words]
    assert said in refused(capsys, *given)
    assert sum(server.asked.values()) == 0


def test_a_server_without_logprobs_is_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "q.jsonl").write_text('{"q": "x", "a": "A"}\n')
    (tmp_path / "letters.toml").write_text(
        'name = "letters"\ncategory = "knowledge"\nsource.file = "q.jsonl"\nprompt.chat = "{q}\\nAnswer:"\nanswer = " {a}"\n'
        'choices = [" A", " B", " C", " D"]\ngrader = "choice"'
    )
    words = ("--tasks", str(tmp_path / "letters.toml"), "--results-dir", str(tmp_path / "r"))
    with AnsweringServer(logprobs=False) as server:
        assert "returns no log-probabilities, which task letters needs" in refused(capsys, server.url, *words)
    with AnsweringServer() as server:
        (row,) = evaluated(capsys, server.url, *words)["results"]
    assert row["accuracy"] == 1.0 and row["num_truncated"] == 0


def test_a_full_disk_is_one_line_and_loses_nothing(
    server: AnsweringServer, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.model.formats.disk import journal

    folder, write, written = tmp_path / "r", os.write, [0]

    def full(descriptor: int, line: bytes) -> int:
        written[0] += 1
        if written[0] > 8:
            raise OSError(28, "No space left on device")
        return write(descriptor, line)

    with monkeypatch.context() as patched:
        patched.setattr(journal.os, "write", full)
        assert "disk full" in refused(capsys, server.url, "--tasks", str(task), "--results-dir", str(folder), "--json")
    kept = evaluated_journal(folder)
    assert kept == 7
    found = evaluated(capsys, "--resume", "--results-dir", str(folder))
    assert found["results"][0]["num_correct"] == 30


def test_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["eval", "tasks", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"humaneval", "arithmetic"} <= {row["name"] for row in rows} and all(row["licence"] for row in rows)


@pytest.mark.multi
def test_killed_and_resumed_it_reports_the_same(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL while answers are under way; bench/evaluate/kills.py does it a hundred times."""
    with AnsweringServer() as server:
        evaluated(capsys, server.url, "--tasks", str(task), "--results-dir", str(tmp_path / "whole"))
    with AnsweringServer(seconds=0.05) as server:
        words = ["eval", server.url, "--tasks", str(task), "--results-dir", str(tmp_path / "killed"), "--concurrency", "2"]
        process = subprocess.Popen(
            [sys.executable, "-m", "windlass", *words], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        until(lambda: sum(server.delivered.values()) >= 8 or process.poll() is not None, "no answer came")
        process.send_signal(signal.SIGKILL)
        process.wait(HUNG_SECONDS)
        evaluated(capsys, "--resume", "--results-dir", str(tmp_path / "killed"))
        assert sum(server.asked.values()) <= 32  # thirty, and the two that were under way
    for name in ("report.json", "report.md"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


@pytest.mark.multi
def test_ctrl_c_says_where_the_answers_are(task: Path, tmp_path: Path) -> None:
    with AnsweringServer(seconds=0.05) as server:
        words = ["eval", server.url, "--tasks", str(task), "--results-dir", str(tmp_path / "r"), "--concurrency", "2", "--json"]
        process = subprocess.Popen(
            [sys.executable, "-m", "windlass", *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        until(lambda: sum(server.delivered.values()) >= 3 or process.poll() is not None, "no answer came")
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=HUNG_SECONDS)
    assert process.returncode == 130 and out == ""
    assert said == f"what came is in {tmp_path / 'r'}; --resume goes on\nwindlass: interrupted\n"
    assert evaluated_journal(tmp_path / "r") >= 2
