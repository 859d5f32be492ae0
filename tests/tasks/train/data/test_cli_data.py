"""`windlass train data` as a person meets it: one line for what is wrong, and nothing half done, whatever ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from subprocesses import children, until_gone
from waiting import HUNG_SECONDS, until
from windlass.cli import execute as run
from windlass.tasks.train.data.shards import read_manifest

pytestmark = pytest.mark.cpu


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number} of many"}) + "\n" for number in range(50)))
    return path


def test_prepare_then_verify(source: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["train", "data", str(source), str(out), "--tokenizer", str(tokenizer), "--validation", "0.1"]) == 0
    told = capsys.readouterr().out
    assert "documents   50" in told and "0 exact" in told and "held out" in told
    assert run(["train", "data", str(out), "--verify"]) == 0
    file = next(out.glob("train*.tokens.bin"))
    file.write_bytes(file.read_bytes()[::-1])
    assert run(["train", "data", str(out), "--verify"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_check_as_json(source: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with source.open("a") as file:
        file.write("not json\n")
    assert run(["train", "data", str(source), "--tokenizer", str(tokenizer), "--check", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["counts"]["documents"], report["counts"]["bad"]) == (50, 1)
    assert "line 51" in report["counts"]["examples"]["bad"][0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["SOURCE", "OUT"], "--tokenizer is required"),
        (["SOURCE", "--tokenizer", "T"], "give at least one source"),
        (["SOURCE", "OUT", "--tokenizer", "T", "--validation", "1.5"], "--validation is 1.5"),
        (["SOURCE", "OUT", "--tokenizer", "T", "--jobs", "-1"], "--jobs must be at least 0"),
        (["SOURCE", "OUT", "--tokenizer", "nowhere"], "nowhere"),
        (["gone.txt", "OUT", "--tokenizer", "T"], "gone.txt does not exist"),
        (["SOURCE", "OUT", "--tokenizer", "T", "--template", "gone"], "cannot read the chat template gone"),
        (["SOURCE", "OUT", "--tokenizer", "T", "--longest", "many"], "'many' is not a context length"),
        (["SOURCE", "--verify"], "has no token shards"),
        (["SOURCE", "--verify", "--check"], "cannot be combined"),
    ],
)
def test_bad_words_are_one_line(
    words: list[str], why: str, source: Path, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    meant = {"SOURCE": str(source), "OUT": str(tmp_path / "out"), "T": str(tokenizer)}
    assert run(["train", "data", *(meant.get(word, word) for word in words)]) == 2
    told = capsys.readouterr().err
    assert why in told and told.count("\n") == 1 and "Traceback" not in told


# Small units, of which those from the sixth on wait for as long as the file is there that the environment names.
LONG = """
import os, sys, time
from pathlib import Path
from windlass.cli import execute as run
from windlass.tasks.train.data.prepare import inputs
from windlass.tasks.train.data.prepare.processes import report_progress
from windlass.tasks.train.data.prepare.unit import UnitWork
inputs.SMALLEST_UNIT, inputs.UNITS = 20_000, 10**9
whole = UnitWork.run
def held(self, unit):
    while unit.number >= 5 and Path(os.environ["HOLD"]).exists():
        time.sleep(0.01)
        report_progress(0)
    return whole(self, unit)
UnitWork.run = held
if __name__ == "__main__":
    sys.exit(run(["train", "data", *sys.argv[1:], "--jobs", "2"]))
"""


DOCUMENTS = 500


@pytest.mark.multi
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_ended_in_the_middle_it_goes_on(sent: signal.Signals, tokenizer: Path, tmp_path: Path) -> None:
    source, out, script = tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "long.py"
    source.write_text(
        "".join(json.dumps({"text": f"document {number} " + "quick fox " * 40}) + "\n" for number in range(DOCUMENTS))
    )
    script.write_text(LONG)
    (hold := tmp_path / "hold").touch()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOLD": str(hold)}
    command = [sys.executable, str(script), str(source), str(out), "--tokenizer", str(tokenizer)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        until(
            lambda: (
                ((out / ".journal").exists() and len((out / ".journal").read_text().splitlines()) > 3)
                or process.poll() is not None
            )
        )
        workers = children(process.pid)
        process.send_signal(sent)
        _, told = process.communicate(timeout=HUNG_SECONDS)
    finally:
        process.kill()
        process.communicate()
        hold.unlink()
    assert process.returncode == (130 if sent == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in told
    assert sent == signal.SIGKILL or told == "windlass: interrupted\n"
    until_gone(*workers)
    assert not (out / "manifest.json").exists()
    journalled = [json.loads(line)["key"] for line in (out / ".journal").read_text().splitlines()[1:]]
    done = [out / f"train-{int(unit):05}.tokens.bin" for unit in journalled]
    written = [file.stat().st_mtime_ns for file in done]
    assert subprocess.run(command, capture_output=True, timeout=HUNG_SECONDS, env=environment).returncode == 0
    assert sum(shard.num_documents for shard in read_manifest(out).shards) == DOCUMENTS
    assert done and [file.stat().st_mtime_ns for file in done] == written
    assert not list(out.glob(".*"))
