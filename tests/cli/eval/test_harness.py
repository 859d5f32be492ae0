"""`--harness lm-eval`: a stand-in for the harness that leaves its files, as the real one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from answering import AnsweringServer

from subprocesses import python_program
from windlass.cli import execute
from windlass.cli.eval.harness import harness_command, harness_rows

pytestmark = pytest.mark.pure

STAND_IN = """
import json, pathlib, sys
words = sys.argv[1:]
if "broken" in words:
    sys.exit("ValueError: no such task")
out = pathlib.Path(words[words.index("--output_path") + 1]) / "adder"
out.mkdir(parents=True)
(out / "words.json").write_text(json.dumps(words))
found = {"alias": "gsm8k", "exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.05}
(out / "results_2026.json").write_text(json.dumps({"results": {"gsm8k": found}}))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_LM_EVAL", str(python_program(tmp_path / "python", STAND_IN)))


@pytest.mark.usefixtures("stand_in")
def test_its_numbers_stand_beside_ours(
    server: AnsweringServer, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "eval",
        server.url,
        "--tasks",
        str(task),
        "--num-examples",
        "5",
        "--harness",
        "lm-eval",
        "gsm8k",
        "--results-dir",
        str(tmp_path / "r"),
    ]
    assert execute([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["harness"] == {"adder": {"gsm8k": {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.05}}}
    assert found["results"][0]["accuracy"] == 1.0
    (said,) = (tmp_path / "r").rglob("words.json")
    assert "local-chat-completions" in said.read_text() and '"--limit", "5"' in said.read_text()


@pytest.mark.usefixtures("stand_in")
def test_its_failure_is_one_line(server: AnsweringServer, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "eval",
        server.url,
        "--tasks",
        str(task),
        "--num-examples",
        "2",
        "--harness",
        "lm-eval",
        "broken",
        "--results-dir",
        str(tmp_path / "r"),
    ]
    assert execute([*words, "--json"]) == 4
    assert capsys.readouterr().err == "windlass: lm-evaluation-harness ended with status 1: ValueError: no such task\n"


@pytest.mark.usefixtures("stand_in")
def test_a_model_of_this_machine_needs_a_server(task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["eval", "tiny-glm", "--tasks", str(task), "--harness", "lm-eval", "gsm8k"]) == 2
    assert "start `windlass serve tiny-glm`" in capsys.readouterr().err


def test_completions_travel_as_text() -> None:
    words = harness_command("python", "http://h:1/v1", "m", "a,b", Path("out"), "completion", 4, None)
    assert (
        "local-completions" in words
        and "--apply_chat_template" not in words
        and words[words.index("--tasks") + 1 :][:2] == ["a", "b"]
    )
    assert "base_url=http://h:1/v1/completions,tokenizer_backend=None" in words[words.index("--model_args") + 1]


def test_rows_have_their_standard_errors() -> None:
    found = {"t": {"acc,none": 0.5, "acc_stderr,none": 0.01, "f1,none": 0.2}}
    assert harness_rows(found) == [["t", "acc", "none", "0.5", "0.01"], ["t", "f1", "none", "0.2", ""]]
