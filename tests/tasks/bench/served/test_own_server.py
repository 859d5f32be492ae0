"""A server of our own: why it ended is said, and it never outlives who started it. A script stands in for `windlass serve`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from subprocesses import is_running, started, until_gone
from waiting import HUNG_SECONDS, until
from windlass.core.client import Unavailable
from windlass.tasks.bench.served.own_server import OwnServer

pytest.importorskip("httpx")
pytestmark = [pytest.mark.pure, pytest.mark.multi]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is run instead of Python; a test writes it."""
    file = tmp_path / "program"
    monkeypatch.setattr("windlass.tasks.bench.served.own_server.sys.executable", str(file))
    return file


def write(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)


@pytest.mark.parametrize(
    ("script", "message", "code"),
    [
        ("echo words; echo 'windlass: no room for 3 GiB' >&2; exit 3", "no room for 3 GiB", 3),
        ("echo 'windlass: unknown model' >&2; exit 2", "unknown model", 2),
        ("exit 7", "`windlass serve` exited with status 7 before it was ready", 4),
        ("kill -9 $$", "`windlass serve` was killed by SIGKILL (likely out of memory) before it was ready", 4),
    ],
)
def test_why_it_ended(script: str, message: str, code: int, program: Path) -> None:
    write(program, script)
    server = OwnServer(["m"])
    with pytest.raises(Unavailable) as found:
        asyncio.run(server.start())
    server.stop()
    assert (str(found.value), found.value.exit_code) == (message, code)


def test_its_words_and_environment(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it comes: the model, what was asked for, and the port."""
    monkeypatch.setenv("WINDLASS_API_KEY", "secret")
    write(program, f'echo "$* $WINDLASS_API_KEY" > "{tmp_path}/words"; exit 2')
    server = OwnServer(["m", "--kv", "fp32"])
    with pytest.raises(Unavailable):
        asyncio.run(server.start())
    server.stop()
    *words, port = (tmp_path / "words").read_text().split()
    assert words == "-P -m windlass serve m --kv fp32 --port".split() and port.isdigit()


def test_it_is_stopped_while_it_loads(program: Path, tmp_path: Path) -> None:
    write(program, f'echo $$ > "{tmp_path}/new"; mv "{tmp_path}/new" "{tmp_path}/pid"; exec sleep 1000')

    async def run() -> int:
        server = OwnServer(["m"])
        starting = asyncio.create_task(server.start())
        async with asyncio.timeout(HUNG_SECONDS):
            while not (tmp_path / "pid").exists():
                await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        number = int((tmp_path / "pid").read_text())
        assert is_running(number)
        server.stop()
        server.stop()
        return number

    assert not is_running(asyncio.run(run()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells children that their parent ended")
def test_it_ends_with_who_started_it(program: Path, tmp_path: Path) -> None:
    write(program, f'echo $$ > "{tmp_path}/new"; mv "{tmp_path}/new" "{tmp_path}/pid"; exec sleep 1000')
    code = (
        "import asyncio, sys; from windlass.tasks.bench.served.own_server import OwnServer; "
        f"sys.executable = {str(program)!r}; asyncio.run(OwnServer(['m']).start())"
    )
    with started([sys.orig_argv[0], "-c", code]):
        until((tmp_path / "pid").exists)
        number = int((tmp_path / "pid").read_text())
    until_gone(number)
