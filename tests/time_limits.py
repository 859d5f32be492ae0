"""A pytest plugin: nothing hangs, and nothing is left running.

A test over its limit prints the stacks of all threads and the processes it has started; these are ended, and it fails. If that does not free
it, it is interrupted; if that does not either, its pytest process ends (xdist starts another one and goes on). The whole run has a limit too.

Not pytest-timeout: it ends either nothing but the main thread, which may then wait for a child in a `finally`, or the process of pytest
alone, whose children live on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator
from typing import Any, NoReturn

import pytest

from subprocesses import LASTING, Process, environment, everyone, kill

TEST_SECONDS = float(os.environ.get("WINDLASS_TEST_SECONDS", 600))
"""Of a test with its fixtures, for a machine that does much else: the slowest takes a thirtieth of it alone. No test judges speed by it."""
LONG_TEST_SECONDS = max(TEST_SECONDS, 3600.0)
"""Of one marked `long`."""
RUN_SECONDS = float(os.environ.get("WINDLASS_TEST_RUN_SECONDS", 3600))
"""Of `make test`: it takes a ninth of it alone. Not of runs that `long` tests are part of."""
GRACE_SECONDS = 20.0
"""Between one way to end a test and the next harder one."""
SECONDS_TO_PRINT = 0.5
OWNERS = "PYTEST_OWNERS"
"""In the environment of all that is started, whoever its parent is by now: the pytest processes that it belongs to, as `/12/34/`."""
RUNNERS = re.compile(r"/site-packages/(_pytest|pluggy|xdist|execnet)/|^<string>$")
"""Calls that are the same under every test."""
KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Python's own helpers, which live as long as the process that they help."""


def descendants() -> list[Process]:
    """What this process has started, directly or not, and is not over."""
    processes, own = everyone(), os.getpid()
    known = {own}
    while more := {one.pid for one in processes if one.parent in known} - known:
        known |= more
    ours = [one for one in processes if one.pid in known or f"/{own}/" in environment(one.pid).get(OWNERS, "")]
    return [one for one in ours if one.pid != own and not one.is_over and not _is_kept(one)]


def _is_kept(process: Process) -> bool:
    return any(name in word for name in KEPT for word in process.words)


def stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[str] = []
    for number, frame in sys._current_frames().items():
        calls = [call for call in traceback.extract_stack(frame) if not RUNNERS.search(call.filename)]
        if calls and number != threading.get_ident():
            found.append(f"--- thread {names.get(number, number)}\n{''.join(traceback.format_list(calls))}")
    return "\n".join(found)


def listed(processes: list[Process]) -> str:
    return "".join(f"  {one.pid} {one.state} {' '.join(one.words)[:300]}\n" for one in processes) or "  none\n"


class Watch:
    """A thread that looks at how long the current test takes. What it prints goes past pytest's capture."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self._test, self._limit, self._since = "", 0.0, 0.0
        self.report = ""
        """Why the current test was ended."""
        signal.signal(signal.SIGALRM, self._interrupt)
        threading.Thread(target=self._run, name="time limits", daemon=True).start()

    def begin(self, test: str, limit: float) -> None:
        with self._changed:
            self._test, self._limit, self._since, self.report = test, limit, time.monotonic(), ""
            self._changed.notify()
        # The last resort, which needs no Python lock: a C function may hold it for ever.
        faulthandler.dump_traceback_later(limit + 4 * GRACE_SECONDS, exit=True, file=self._stream)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        with self._changed:
            self._test = ""
            self._changed.notify()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._stream, text.encode())

    def _interrupt(self, _signal: int, _frame: Any) -> NoReturn:
        pytest.fail(f"over its limit of {self._limit:.0f} s", pytrace=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._test or (left := self._since + self._limit - time.monotonic()) > 0:
                    self._changed.wait(left if self._test else None)
                test, since = self._test, self._since
            self._end(test, since)

    def _end(self, test: str, since: float) -> None:
        started = [one for one in descendants() if _is_of(one, test)]
        self.report = (
            f"{test} is over its limit of {self._limit:.0f} s (WINDLASS_TEST_SECONDS).\n{stacks()}\n"
            f"Processes that it started, which are ended now:\n{listed(started)}"
        )
        self.say(f"\n{self.report}")
        kill(one.pid for one in started)
        if self._is_over(since):
            return
        self.say(f"\n{test} goes on without them: it is interrupted.\n")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        if self._is_over(since):
            return
        self.say(f"\n{test} cannot be interrupted: its pytest process ends.\n{stacks()}\n")
        kill(one.pid for one in descendants())
        os._exit(70)

    def _is_over(self, since: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._test == "" or self._since != since, GRACE_SECONDS)


def _is_of(process: Process, test: str) -> bool:
    """Not one that a fixture of several tests started (pytest sets this variable); one that was given another environment may be anybody's."""
    return environment(process.pid).get("PYTEST_CURRENT_TEST", test).startswith(test)


class RunLimit:
    """Of the whole run, in the process that was started by hand."""

    def __init__(self, stream: int) -> None:
        self._stream, self._running = stream, dict[str, float]()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="run limit", daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._running.pop(nodeid, None)

    def pytest_sessionfinish(self) -> None:
        self._over.set()

    def _run(self) -> None:
        if not self._over.wait(RUN_SECONDS):
            self.end()

    def end(self) -> None:
        now, processes = time.monotonic(), descendants()
        running = "".join(f"  {test}, for {now - since:.0f} s\n" for test, since in self._running.items()) or "  none\n"
        text = (
            f"\nThe run is over its limit of {RUN_SECONDS:.0f} s (WINDLASS_TEST_RUN_SECONDS) and ends. Tests that run:\n{running}"
            f"Processes that are ended:\n{listed(processes)}"
        )
        with contextlib.suppress(OSError):
            os.write(self._stream, text.encode())
        # Workers print their stacks (faulthandler.register below) before they end: one at a time, since they write it in small pieces.
        for one in processes:
            if one.parent == os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGUSR2)
                time.sleep(SECONDS_TO_PRINT)
        faulthandler.dump_traceback(self._stream)
        kill(one.pid for one in processes)
        os._exit(70)


# --- hooks -------------------------------------------------------------------------------------------------------------


WATCH = pytest.StashKey[Watch]()


def pytest_configure(config: pytest.Config) -> None:
    stream = os.dup(2)
    is_worker = hasattr(config, "workerinput")
    os.environ[OWNERS] = f"{os.environ.get(OWNERS, '')}/{os.getpid()}/"
    if is_worker or not getattr(config.option, "numprocesses", None):
        config.stash[WATCH] = Watch(stream)
    if is_worker:
        faulthandler.register(signal.SIGUSR2, file=stream)
    elif "long" not in (config.option.markexpr or "").replace("not long", ""):
        config.pluginmanager.register(RunLimit(stream), "run limit")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """What a pytest process left that ended in the middle of a test."""
    kill(one.pid for one in descendants())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    watch = item.config.stash.get(WATCH, None)
    if watch is None:
        return (yield)
    watch.begin(item.nodeid, LONG_TEST_SECONDS if item.get_closest_marker("long") else TEST_SECONDS)
    try:
        return (yield)
    finally:
        watch.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was ended has failed, even if it ended well then."""
    report = yield
    watch = item.config.stash.get(WATCH, None)
    if watch is not None and watch.report:
        report.outcome, report.longrepr = "failed", f"{watch.report}\n{report.longrepr or ''}"
        watch.report = ""  # said once: what its fixtures do after it may be well
    return report


LEFT_SECONDS = 10.0
"""For what was killed or told to end."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After the last test of a file nothing runs that its tests have started."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        end = time.monotonic() + LEFT_SECONDS
        while left := [one for one in descendants() if not LASTING.items() <= environment(one.pid).items()]:
            if time.monotonic() > end:
                kill(one.pid for one in left)
                pytest.fail(
                    f"tests of {item.path.name} leave processes behind, which are ended now:\n{listed(left)}", pytrace=False
                )
            time.sleep(0.05)
    return result
