"""Lines that cannot be written are lost, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake import FakeClient
from hypothesis import given
from hypothesis import strategies as st
from serving import HELLO

from windlass.tasks.serve.app import make_app, service_of
from windlass.tasks.serve.monitor.log import Log, LogHandler, access_line, strip_paths
from windlass.tasks.serve.settings import ServerSettings

pytestmark = pytest.mark.pure


def full_disk() -> Any:
    return Path("/dev/full").open("w")


def broken_pipe() -> Any:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def closed_file() -> Any:
    found = io.StringIO()
    found.close()
    return found


@pytest.mark.parametrize("make", [full_disk, broken_pipe, closed_file])
def test_a_server_whose_log_cannot_be_written_goes_on(make: Any) -> None:
    stream = make()

    async def ask() -> int:
        app = make_app(FakeClient(), ServerSettings(), log=Log(stream))
        async with app.router.lifespan_context(app):
            await service_of(app).supervisor.wait_ready()
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
                for _ in range(3):
                    assert (await http.post("/v1/chat/completions", json=HELLO)).status_code == 200
                lost = service_of(app).log.lost
                assert f"windlass_log_lines_lost_total {float(lost)}" in (await http.get("/metrics")).text
        return lost

    assert asyncio.run(ask()) >= 3
    with contextlib.suppress(OSError):  # what was buffered cannot be written now either
        stream.close()


def test_without_a_standard_error_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    log = Log()
    log.line("anything")
    log.show_status("anything")
    log.end_status()
    assert log.lost == 3


def test_a_status_stays_below_the_lines() -> None:
    out = io.StringIO()
    log = Log(out)
    log.show_status("3 running")
    log.line("one")
    log.end_status()
    log.line("two")
    text = out.getvalue()
    assert text.startswith("\r\x1b[K3 running\r\x1b[K") and "one\n3 running\r\x1b[K" in text and text.endswith("two\n")


@given(st.text())
def test_a_line_is_one_line_and_steers_no_terminal(text: str) -> None:
    out = io.StringIO()
    Log(out).line(text)
    assert out.getvalue().removesuffix("\n").isprintable()


def test_a_traceback_is_one_line_without_its_values() -> None:
    out = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(LogHandler(Log(out)))
    try:
        raise ValueError("the prompt")
    except ValueError:
        logger.error("Exception in ASGI application\n", exc_info=True)
    logger.error("%d %d", 1)
    assert "the prompt" not in out.getvalue() and "Exception in ASGI application: ValueError" in out.getvalue()


@pytest.mark.parametrize(
    ("last", "told"), [("ValueError: the prompt", "ValueError\n"), ("asyncio.exceptions.CancelledError", "")]
)
def test_a_traceback_that_is_a_message_is_what_was_raised(last: str, told: str) -> None:
    """As Starlette tells of a lifespan that failed, or that was not waited for."""
    out = io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(LogHandler(Log(out)))
    logger.error(f"Traceback (most recent call last):\n  File x\n{last}\n")
    assert out.getvalue().partition(" ")[2] == told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ended by SIGKILL: /home/me/models/x.gguf is gone", "ended by SIGKILL: x.gguf is gone"),
        ('File "/opt/a/b.py", line 3', 'File "b.py", line 3'),
        ("~/models/x.gguf: and ../x/y", "x.gguf: and y"),
        ("1/2 of it, and/or nothing", "1/2 of it, and/or nothing"),
    ],
)
def test_a_path_is_shown_by_its_last_part(text: str, expected: str) -> None:
    assert strip_paths(text) == expected


def test_an_access_line() -> None:
    assert (
        access_line("POST", "/v1/completions", 200, 1.23456, "3 + 4 tokens") == "POST /v1/completions 200 1.235 s, 3 + 4 tokens"
    )
