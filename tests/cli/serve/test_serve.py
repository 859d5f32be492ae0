"""`windlass serve`: what is refused before anything starts, and the whole program with a real model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from free_ports import free_port
from waiting import HUNG_SECONDS
from windlass.cli import execute as run
from windlass.errors import BadInput

pytest.importorskip("starlette")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run(["serve", *words])
    return code, capsys.readouterr().err


@pytest.mark.pure
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["x", "--engine", "other"], "--engine is windlass or vllm"),
        (["x", "--workers", "a,b"], "--workers needs --secret-file"),
        (["x", "--port", "70000"], "port is 70000"),
        (["x", "--tls-cert", "a.pem"], "needs both --tls-cert and --tls-key"),
        (["x", "--tls-cert", "a.pem", "--tls-key", "b.pem"], "should be PEM files that belong together"),
        (["x", "--max-waiting", "-1"], "max_waiting is -1"),
        (["x", "--max-running", "0"], "--max-running is 0"),
        (["x", "--max-body", "big"], "is not a size"),
        (["x", "--deadline", "0"], "deadline_seconds is 0"),
        (["x", "--deadline", "inf"], "deadline_seconds is inf"),
        (["x", "--drain=-1"], "drain_seconds is -1"),
        (["x", "--drain", "nan"], "drain_seconds is nan"),
        (["x", "--api-key", "keys.txt"], "looks like a file"),
        (["x", "--api-key", ""], "--api-key is empty"),
        (["x", "--api-key", "two words", "--port", "0"], "unknown"),
        (["x", "--host", "999.1.1.1"], "cannot listen on 999.1.1.1"),
        (["./nothing.gguf", "--port", "0"], "does not exist"),
    ],
)
def test_what_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    code, line = told(capsys, *words)
    assert code == 2 and expected in line and line.count("\n") == 1


@pytest.mark.pure
def test_a_port_that_is_taken_is_known_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, line = told(capsys, "./nothing.gguf", "--port", str(taken.getsockname()[1]))
    assert code == 2 and "cannot listen" in line and "windlass ps" in line and "--port" in line


@pytest.mark.pure
def test_keys_and_limits_reach_the_settings(tmp_path: Path) -> None:
    from windlass.cli.serve.options import ServeOptions
    from windlass.cli.serve.run import settings_of

    (tmp_path / "keys").write_text("alpha\nbeta\n")
    found = settings_of(
        ServeOptions(models=("x",), api_key=str(tmp_path / "keys"), max_body="1MiB", name="m", allow_host=("a.example",))
    )
    assert found.api_keys == ("alpha", "beta") and found.max_body_bytes == 2**20 and found.model == "m"
    with pytest.raises(BadInput):
        settings_of(ServeOptions(models=("x",), api_key=str(tmp_path / "keys"), max_body="nothing"))


class Program:
    """`windlass serve` as users start it."""

    def __init__(self, model: str, *words: str, stdout: Any = subprocess.DEVNULL, stderr: Any = None) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "windlass", "serve", model, "--port", str(self.port), "--context", "512", *words]
        self.process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=HUNG_SECONDS) as answer:
            return json.loads(answer.read())

    def ready(self) -> None:
        end = time.monotonic() + HUNG_SECONDS
        while self.process.poll() is None:
            try:
                self.ask("/ready")
                return
            except OSError:
                assert time.monotonic() < end, "hung: it does not become ready"
                time.sleep(0.1)
        pytest.fail(f"it ended with {self.process.returncode} before it was ready")

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code. It ends here in any case, and its engine with it."""
        try:
            self.process.send_signal(number)
            return self.process.wait(HUNG_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.mark.cpu
@pytest.mark.multi
def test_from_the_command_line_to_an_answer_and_the_end(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    log = tmp_path / "log"
    with log.open("w") as err:
        program = Program("tiny-glm", "--name", "small", stderr=err)
        try:
            program.ready()
            assert program.ask("/v1/chat/completions", CHAT)["model"] == "small"
        finally:
            code = program.end(signal.SIGINT)
    assert code == 0
    words = log.read_text()
    assert f"http://127.0.0.1:{program.port}" in words and "no API key" in words and "small" in words
    assert (
        re.search(r"POST /v1/chat/completions 200 [\d.]+ s, \d+ \+ 4 tokens", words)
        and "Hi" not in words.split("draining")[0].split("POST")[1]
    )
    assert "draining: 0 requests in flight" in words and "Traceback" not in words


@pytest.mark.cpu
@pytest.mark.multi
def test_a_closed_output_and_a_full_disk_do_not_stop_it() -> None:
    pytest.importorskip("torch")
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") as full:
        program = Program("tiny-glm", stdout=writer, stderr=full)
    os.close(writer)
    try:
        program.ready()
        for _ in range(3):
            assert program.ask("/v1/chat/completions", CHAT)["usage"]["completion_tokens"] == 4
    finally:
        code = program.end()
    assert code == 0


@pytest.mark.cpu
@pytest.mark.multi
def test_a_model_that_cannot_be_loaded_ends_the_program_with_its_reason(tmp_path: Path, smollm2: Path) -> None:
    pytest.importorskip("torch")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2.read_bytes()[: 2**22])
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "serve", str(broken), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=HUNG_SECONDS,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("check: ")]
    assert done.returncode == 2 and said[0].startswith("windlass: ") and "Traceback" not in done.stderr
