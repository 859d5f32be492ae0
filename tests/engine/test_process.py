"""The engine in a process of its own: what is left when something dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_decoder import FakeDecoder
from fake_text import ids, model_text, words

from windlass.core.client import Late, SyncClient, Unavailable
from windlass.core.launch import Launch, RankJob
from windlass.core.request import GREEDY, Request, ScoreRequest
from windlass.engine.client.client import LocalClient
from windlass.engine.client.transport import ProcessTransport
from windlass.errors import DoesNotFit

pytestmark = [pytest.mark.multi, pytest.mark.usefixtures("importable")]

DECODER = FakeDecoder()
HERE = Path(__file__).parent


def launch(model: str = "fake") -> Launch:
    return Launch(model=model, loader="fake_decoder:load")


class Watched(LocalClient):
    """Remembers the processes it started."""

    def __init__(self, model: str = "fake", progress: Any = None) -> None:
        super().__init__(launch(model), model_text(), progress)
        self.ports: list[ProcessTransport] = []
        self._requests._make_transport = self._port

    def _port(self) -> ProcessTransport:
        self.ports.append(ProcessTransport(RankJob(launch=launch(self.model))))
        return self.ports[-1]

    model = "fake"

    @property
    def pid(self) -> int:
        found = self.ports[-1].pid
        assert found is not None
        return found


class Slow(Watched):
    model = "slow"


class Crashing(Watched):
    model = "crashing"


def is_running(pid: int) -> bool:
    """A zombie is over, whoever ought to bury it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def text_of(client: SyncClient, prompt: str, max_tokens: int) -> str:
    request = Request(prompt=prompt, sampling=GREEDY, max_tokens=max_tokens)
    return "".join(delta.content for delta in client.generate(request))


def test_answers_and_progress_come_from_the_other_process() -> None:
    progress: list[tuple[int, int]] = []
    inner = Watched(progress=lambda done, total: progress.append((done, total)))
    with SyncClient(inner) as client:
        assert text_of(client, "hello", 20) == words(DECODER.greedy(ids("hello"), 20))
        info = client.info()
        assert info.model == "fake"
        assert info.stats is not None
        assert info.stats.finished == 1
        scores = client.score(ScoreRequest(prompt="hello", top=2))
        assert [entry.logprob for entry in scores.logprobs if entry] == pytest.approx(DECODER.logprobs(ids("hello")), abs=1e-4)
        pid = inner.pid
        assert pid != os.getpid()
        assert inner.is_alive
    assert progress[0] == (0, 100)
    assert progress[-1] == (100, 100)
    assert not is_running(pid)
    assert not inner.is_alive


def test_a_killed_engine_is_followed_by_another_that_goes_on() -> None:
    """Who waits sees a pause: a third of the answer came from the first engine. Killed once more, it is given up: requests may be what kills."""
    inner = Slow()

    async def run() -> None:
        async def ask(prompt: str, max_tokens: int) -> str:
            request = Request(prompt=prompt, sampling=GREEDY, max_tokens=max_tokens)
            return "".join([delta.content async for delta in inner.generate(request)])

        await ask("warm", 2)
        undisturbed = [await ask(f"number {number}", 60) for number in range(3)]
        first = inner.pid
        tasks = [asyncio.create_task(ask(f"number {number}", 60)) for number in range(3)]
        await asyncio.sleep(0.3)
        os.kill(first, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == undisturbed
        assert inner.pid != first
        tasks = [asyncio.create_task(ask(f"number {number}", 200)) for number in range(3)]
        for count in (2, 3):
            await asyncio.sleep(0.2)
            os.kill(inner.pid, signal.SIGKILL)
            while len(inner.ports) < count + 1 and not tasks[0].done():
                await asyncio.sleep(0.02)
            if count == 2:
                await inner.ready()
        for task in tasks:
            with pytest.raises(Unavailable, match="SIGKILL"):
                await task
        assert await ask("again", 3)
        await inner.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not any(is_running(port.pid or 0) for port in inner.ports)


def test_twenty_requests_outlive_their_engine() -> None:
    """Some running, most waiting, some with a deadline; none is left hanging, none fails."""
    inner = Slow()

    async def run() -> None:
        async def ask(number: int) -> int:
            deadline = 50.0 if number % 2 else None
            request = Request(token_ids=(number + 1,) * 9, sampling=GREEDY, max_tokens=40, deadline_seconds=deadline)
            return len([token async for delta in inner.generate(request) for token in delta.token_ids])

        first = (await inner.ready()).stats
        assert first is not None
        assert first.process_bytes > 1_000_000
        pid = inner.pid
        tasks = [asyncio.create_task(ask(number)) for number in range(20)]
        await asyncio.sleep(0.3)
        assert inner.is_alive
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*tasks) == [40] * 20
        assert inner.pid != pid
        await inner.close()
        assert not inner.is_alive

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_stuck_engine_is_told_from_a_busy_one_and_can_be_replaced() -> None:
    inner = Slow()

    async def run() -> None:
        request = Request(prompt="hello", sampling=GREEDY, max_tokens=200)

        async def ask() -> int:
            return len([token async for delta in inner.generate(request) for token in delta.token_ids])

        loading = asyncio.create_task(inner.ready())
        await asyncio.sleep(0)
        assert not inner.is_alive
        await loading
        task = asyncio.create_task(ask())
        await asyncio.sleep(0.1)
        await inner.info()
        stuck = inner.pid
        os.kill(stuck, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(inner.info(), 0.2)
        assert inner.is_alive, "its process is there"
        os.kill(stuck, signal.SIGCONT)
        await inner.info()
        os.kill(stuck, signal.SIGSTOP)
        began = time.monotonic()
        late = Request(prompt="hello", deadline_seconds=0.2)
        with pytest.raises(Late, match=r"timed out after 0\.2 s"):
            await anext(inner.generate(late))
        assert time.monotonic() - began < 5
        await inner.restart()
        assert not is_running(stuck)
        assert not inner.is_alive
        assert await task == 200, "the next engine goes on with it"
        assert inner.is_alive
        await inner.restart()
        assert not inner.is_alive
        await inner.ready()
        assert inner.is_alive
        await inner.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_loading_makes_requests_late_too() -> None:
    """It goes on being loaded, and the next one finds it."""

    async def run() -> None:
        inner = Watched()
        with pytest.raises(Late):
            await anext(inner.generate(Request(prompt="hello", deadline_seconds=0.01)))
        assert (await inner.ready()).model == "fake"
        await inner.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_crash_in_a_step_is_survived() -> None:
    """By everybody but the request that causes it, twice."""
    with SyncClient(Crashing()) as client:
        with pytest.raises(Unavailable, match="SIGABRT"):
            list(client.generate(Request(token_ids=(13,), max_tokens=2)))
        with pytest.raises(Unavailable, match=r"RuntimeError: the device caught fire$"):
            list(client.generate(Request(token_ids=(14,), max_tokens=2)))
        assert len(text_of(client, "fine", 5)) == 5


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [("too large", DoesNotFit, "5 bytes short"), ("dies while loading", Unavailable, "exited with status 3")],
)
def test_a_model_that_does_not_load_says_why(model: str, error: type[Exception], message: str) -> None:
    with SyncClient(LocalClient(launch(model), model_text())) as client:
        with pytest.raises(error, match=message) as caught:
            list(client.generate(Request(prompt="hello", max_tokens=2)))
        if isinstance(caught.value, DoesNotFit):
            assert caught.value.short_bytes == 5
        with pytest.raises(error, match=message):
            client.info()


def test_closing_while_loading_leaves_nothing() -> None:
    inner = Watched()

    async def run() -> None:
        task = asyncio.create_task(inner.ready())
        await asyncio.sleep(0.05)
        await inner.close()
        with pytest.raises(Unavailable, match="closed"):
            await task

    asyncio.run(asyncio.wait_for(run(), 60))
    assert not is_running(inner.pid)


def test_nothing_stays_open() -> None:
    def num_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    counts: list[int] = []
    for _ in range(3):
        with SyncClient(Watched()) as client:
            text_of(client, "hello", 1)
        counts.append(num_open())
    assert counts[0] == counts[-1]


PROGRAM = f"""
import sys, os, time
sys.path.insert(0, {str(HERE)!r})
from fake_text import model_text
from windlass.core.client import SyncClient
from windlass.core.request import GREEDY, Request
from windlass.engine.client.client import LocalClient
from windlass.core.launch import Launch
assert "torch" not in sys.modules and "numpy" not in sys.modules
inner = LocalClient(Launch(model="slow", loader="fake_decoder:load"), model_text())
ports = []
make = inner._requests._make_transport
inner._requests._make_transport = lambda: ports.append(make()) or ports[-1]
client = SyncClient(inner)
client.info()
print(ports[0].pid, flush=True)
while True:
    try:
        for delta in client.generate(Request(prompt="hello", sampling=GREEDY, max_tokens=200)):
            print("token", flush=True)
        print("finished", flush=True)
    except KeyboardInterrupt:
        stats = client.info().stats
        print("cancelled", stats.cancelled, "running", stats.running, flush=True)
"""


def start_program() -> tuple[subprocess.Popen[str], int]:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert program.stdout is not None
    pid = int(program.stdout.readline())
    assert is_running(pid)
    assert program.stdout.readline() == "token\n"
    return program, pid


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_ends_with_the_program(how: signal.Signals) -> None:
    program, pid = start_program()
    program.send_signal(how)
    program.communicate()
    assert until(lambda: not is_running(pid))


def test_ctrl_c_stops_the_answer_and_not_the_engine() -> None:
    """As a terminal sends it: to every process of the group."""
    program, pid = start_program()
    assert program.stdout is not None
    os.killpg(program.pid, signal.SIGINT)
    lines = iter(program.stdout.readline, "")
    assert next(line for line in lines if line != "token\n") == "cancelled 1 running 0\n"
    assert next(lines) == "token\n"
    assert is_running(pid)
    program.kill()
    program.communicate()
    assert until(lambda: not is_running(pid))


def test_the_client_needs_no_torch() -> None:
    script = "import sys, windlass.engine.client, windlass.weights.text.files; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
