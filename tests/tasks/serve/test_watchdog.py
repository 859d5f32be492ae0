"""Signals, event loops that see them or do not, and how the process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from subprocesses import started
from waiting import HUNG_SECONDS, until
from windlass.tasks.serve import watchdog
from windlass.tasks.serve.watchdog import OVER, Watchdog

pytestmark = pytest.mark.pure

TERM, NEVER = signal.SIGTERM, 3600.0
STUCK = """
import asyncio, signal, sys
sys.path.insert(0, {folder!r})
from fake import FakeClient
from windlass.tasks.serve import watchdog
from windlass.tasks.serve.app import make_app
from windlass.tasks.serve.server import Server, bind, serve
from windlass.tasks.serve.settings import ServerSettings

watchdog.SECONDS_TO_NOTICE = {seconds}
for number in (signal.SIGHUP, signal.SIGINT):  # ignored in the background, and under nohup
    signal.signal(number, signal.SIG_DFL)

def stuck():
    {first}
    print("stuck", flush=True)
    while True:
        pass

settings = ServerSettings(port=0)
serve(make_app(FakeClient(), settings), settings, bind(settings), lambda _: asyncio.get_running_loop().call_later(0.1, stuck))
"""


def ended(
    numbers: list[int], is_noticed: bool, monkeypatch: pytest.MonkeyPatch, notice: float = NEVER, end: float = NEVER
) -> list[int]:
    """The exit codes of a process that gets these signals: at most one."""
    monkeypatch.setattr(watchdog, "SECONDS_TO_NOTICE", notice)
    monkeypatch.setattr(watchdog, "SECONDS_TO_END", end)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda _: None)
    codes: list[int] = []
    dog = Watchdog(codes.append)
    dog.is_noticed = is_noticed
    for number in numbers:
        dog.signal(number)
    thread = threading.Thread(target=dog.watch, daemon=True)
    thread.start()
    thread.join(HUNG_SECONDS)
    assert not thread.is_alive()
    return codes


def test_a_server_that_ends_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended([OVER], is_noticed=False, monkeypatch=monkeypatch) == []
    assert ended([TERM, OVER], is_noticed=True, monkeypatch=monkeypatch) == []
    assert ended([TERM, TERM, OVER], is_noticed=True, monkeypatch=monkeypatch) == []


def test_a_loop_that_does_not_see_the_signal_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended([TERM], is_noticed=False, monkeypatch=monkeypatch, notice=0.01) == [143]
    assert ended([TERM, TERM], is_noticed=False, monkeypatch=monkeypatch) == [143], "the second one ends at once"


def test_a_second_signal_leaves_seconds_and_a_third_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended([TERM, TERM], is_noticed=True, monkeypatch=monkeypatch, end=0.01) == [143]
    assert ended([TERM, TERM, TERM], is_noticed=True, monkeypatch=monkeypatch) == [143]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("seconds", "times"), [(0.1, 1), (NEVER, 2)])
def test_a_server_stuck_in_python_ends(
    number: signal.Signals, seconds: float, times: int, request: pytest.FixtureRequest
) -> None:
    code = STUCK.format(folder=str(request.path.parent), seconds=seconds, first="")
    with started([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"stuck\n"
        process.send_signal(number)
        if times > 1:
            until(lambda: process.send_signal(number) or process.poll() is not None)
        assert process.wait(HUNG_SECONDS) == 128 + number
        assert b"in stuck" in process.stderr.read()


FULL = """import os
    os.set_blocking(2, False)
    try:
        while os.write(2, bytes(4096)): pass
    except BlockingIOError: os.set_blocking(2, True)"""


@pytest.mark.parametrize("first", [FULL, "sys.stderr = None", "sys.stderr.close()"], ids=["full", "none", "closed"])
def test_one_that_cannot_say_where_it_is_stuck_ends(first: str, request: pytest.FixtureRequest) -> None:
    code = STUCK.format(folder=str(request.path.parent), seconds=0.1, first=first)
    with started([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stuck\n"
        process.send_signal(TERM)
        assert process.wait(HUNG_SECONDS) == 143
