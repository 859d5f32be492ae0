"""`windlass bench --served`: mistakes are one line; servers are measured, saved and compared; a model is served, measured and stopped."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from windlass.cli import execute as cli
from windlass.cli.bench.served.run import ServedOptions, launch_words, make_setup
from windlass.cli.options import ROWS
from windlass.core.launch import Launch
from windlass.core.layout import Layout

for folder in (Path(__file__).parents[3], Path(__file__).parents[3] / "tasks" / "bench" / "served"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from fake_server import FakeServer  # noqa: E402

from waiting import HUNG_SECONDS  # noqa: E402

pytest.importorskip("httpx")

URL = "http://127.0.0.1:9"


@contextmanager
def serving(**behaviour: Any) -> Generator[FakeServer]:
    """In a thread of its own."""
    server, ready, over = FakeServer(**behaviour), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with server.listening():
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(HUNG_SECONDS), "hung"
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(HUNG_SECONDS)
        loop.close()


@pytest.mark.pure
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([URL, "--at-once", "x"], "--at-once"),
        ([URL, "--rate", "0"], "--rate"),
        ([URL, "--load", "chair"], "--load is table"),
        ([URL, "--load", "table", "--at-once", "3"], "no row for 3"),
        ([URL, "--requests", "3", "--seconds", "3"], "one of them"),
        ([URL, "--limit-first-token", "0"], "--limit-first-token"),
        ([URL, "--limit-between-tokens", "-1"], "--limit-between-tokens"),
        ([URL, "--rounds", "0"], "--rounds"),
        ([URL, "--new-tokens", "1"], "--new-tokens"),
        ([URL, "--tp", "2"], "--tp says how a model runs"),
        ([URL, "--batch", "8"], "--batch is for a benchmark without --served"),
        ([URL, "--random-weights"], "--random-weights is for a benchmark without --served"),
        ([URL, "--save", "/no/such/folder/x.json"], "does not exist"),
        ([URL, "--compare", "/no/such/file.json"], "cannot be read"),
        (["http://"], "is not a server URL"),
        (["--", "-x"], "neither a URL nor a model"),
        (["./none"], "does not exist"),
        (["GLM-4.5-Bair"], "GLM-4.5-Air"),
        (["localhost:8001"], "http://localhost:8001"),
        ([URL, "--group", "32"], "--group is for a benchmark without --served"),
        (["tiny-glm", "--name", "x"], "--name"),
    ],
)
def test_mistakes_are_one_line(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "--served", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and expected in printed.err and printed.err.count("\n") == 1


@pytest.mark.pure
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tiny-glm", "--rate", "1"], "--rate needs --served"),
        (["tiny-glm", "--at-once", "1"], "--at-once needs --served"),
        (["tiny-glm", "tiny-glm"], "more than one MODEL needs --served"),
        ([URL], "a URL needs --served"),
        (["tiny-glm", "--group", "32"], "--group needs --random-weights"),
    ],
)
def test_what_needs_served(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.cpu
def test_loads_that_nobody_asked_for_are_shortened_to_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert cli(["bench", "--served", server.url, "--at-once", "1", "--requests", "2", "--json"]) == 0
        loads = [result["load"] for target in json.loads(capsys.readouterr().out)["targets"] for result in target["results"]]
        assert [(load["prompt_tokens"], load["new_tokens"]) for load in loads] == [(409, 51)]  # 512 of 1,280
        assert cli(["bench", "--served", server.url, "--at-once", "1", "--requests", "2", "--prompt-tokens", "600"]) == 2
        assert "600 + 128 tokens do not fit into the 512 tokens" in capsys.readouterr().err


@pytest.mark.pure
def test_an_unreachable_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "--served", URL]) == 4
    assert capsys.readouterr().err.endswith("is unreachable; is a server running there?\n")


@pytest.mark.pure
def test_options_of_the_model_go_to_its_server() -> None:
    """Every one of them: a new row must be passed on too."""
    launch = Launch(
        device="cpu", kv="fp32", context_tokens=64, exact=True, secret_file="s", sync="int8", layout=Layout(tp=4, pp=2, ep=2),
        quant="int4", gpu_memory=(7, 9), host_memory=5, disk_folder="d", speculate="ngram", deterministic=True,
    )  # fmt: skip
    assert launch_words(Launch()) == (), "as it comes: nothing is set"
    words = launch_words(launch)
    assert "7,9" in words
    assert {word for word in words if word.startswith("--")} | {"--workers"} == {f"--{name.replace('_', '-')}" for name in ROWS}
    setup = make_setup(ServedOptions(targets=("tiny-glm --max-running 3",), launch=Launch(kv="fp32")))
    assert setup.targets[0].serve == ("tiny-glm", "--kv", "fp32", "--max-running", "3") and setup.rounds == 1


@pytest.mark.pure
def test_two_servers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "served.json"
    with serving() as one, serving() as other:
        words = ["bench", "--served", one.url, other.url, "--at-once", "1,2", "--requests", "6", "--prompt-tokens", "9"]
        words += ["--new-tokens", "4", "--limit-first-token", "60000", "--limit-between-tokens", "60000"]
        assert cli([*words, "--rounds", "2", "--save", str(saved)]) == 0
    printed = capsys.readouterr()
    for expected in (
        "first token within 60.0 s and at most 60.0 s between",
        "compared with the first",
        "us/token",
    ):
        assert expected in printed.out, expected
    assert printed.err.count(" tok/s") == 8, "a line for every load, server and round"
    report = json.loads(saved.read_text())
    assert [target["name"] for target in report["targets"]] == [one.url, other.url]
    for found in (found for target in report["targets"] for found in target["results"]):
        assert (found["requests"], found["answered"], found["errors"], found["within_limits"]) == (12, 12, {}, 1.0)
        assert found["prompt_tokens"] == 9 and found["output_tokens"] == 4 and len(found["rounds_tokens_per_second"]) == 2
        assert found["goodput_per_second"] == pytest.approx(found["requests_per_second"])

    with serving() as again:
        words = ["bench", "--served", again.url, "--at-once", "1", "--requests", "4", "--prompt-tokens", "9", "--new-tokens", "4"]
        assert cli([*words, "--compare", str(saved)]) == 0
        assert "compared with the first" in capsys.readouterr().out
        assert cli([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and json.loads(printed.out)["targets"][0]["results"][0]["answered"] == 4


@pytest.mark.pure
def test_a_load_without_an_answer_is_shown_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(break_at=set(range(1, 99))) as server:
        assert cli(["bench", "--served", server.url, "--at-once", "8", "--prompt-tokens", "9", "--new-tokens", "4"]) == 4
    assert "8 x connection lost" in capsys.readouterr().out


@pytest.mark.pure
@pytest.mark.multi
@pytest.mark.long
def test_a_server_that_cannot_start_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("starlette")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert cli(["bench", "--served", str(broken)]) == 2
    printed = capsys.readouterr()
    assert "broken.gguf" in printed.err and printed.err.count("\n") == 1


@pytest.mark.cpu
@pytest.mark.multi
@pytest.mark.long
def test_a_model_is_served_and_measured() -> None:
    """The bundled model, as it comes, in processes of its own; none is left."""
    pytest.importorskip("torch")
    words = ["bench", "--served", "tiny-glm", "--at-once", "2", "--requests", "6", "--prompt-tokens", "24", "--new-tokens", "4"]
    found = subprocess.run(
        [sys.executable, "-m", "windlass", *words, "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=3 * HUNG_SECONDS,
    )
    assert found.returncode == 0 and found.stderr == "", found.stderr
    (target,) = msgspec.json.decode(found.stdout)["targets"]
    assert target["owner"] == "windlass" and target["asked"] == "completions, prompts as token ids, ignore_eos"
    assert len(target["ready_seconds"]) == 1 and target["ready_seconds"][0] > 0
    (result,) = target["results"]
    assert (result["answered"], result["errors"], result["short_answers"], result["cached_tokens"]) == (6, {}, 0, 0)
    assert (result["prompt_tokens"], result["output_tokens"]) == (24, 4) and result["steps"]["steps"] >= 3
