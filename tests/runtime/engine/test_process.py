"""The engine in a process of its own: what is left when something dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_decoder import FakeDecoder, GatedDecoder
from fake_text import ids, model_text, words
from hanging import finished

from subprocesses import is_running, until_gone
from windlass.core.client import Broken, Late, SyncClient, Unavailable
from windlass.core.launch import Launch, RankJob
from windlass.core.request import GREEDY, Request, ScoreRequest
from windlass.errors import DoesNotFit
from windlass.runtime.engine.client import transport
from windlass.runtime.engine.client.client import LocalClient
from windlass.runtime.engine.client.replay import KILLS_ALONE
from windlass.runtime.engine.client.transport import ProcessTransport, started_ahead

pytestmark = [pytest.mark.multi, pytest.mark.usefixtures("importable")]

DECODER = FakeDecoder()
HERE = Path(__file__).parent


def launch(model: str = "fake") -> Launch:
    return Launch(model=model, loader="fake_decoder:load")


class Watched(LocalClient):
    """Remembers the processes it started."""

    model = "fake"

    def __init__(self, progress: Any = None, model: str | None = None) -> None:
        self.model = model or self.model
        super().__init__(launch(self.model), model_text(), progress)
        self.ports: list[ProcessTransport] = []
        self._requests._make_transport = self._port

    def _port(self) -> ProcessTransport:
        self.ports.append(ProcessTransport(RankJob(launch=launch(self.model))))
        return self.ports[-1]

    @property
    def pid(self) -> int:
        found = self.ports[-1].pid
        assert found is not None
        return found


class Slow(Watched):
    model = "slow"


class Crashing(Watched):
    model = "crashing"


def text_of(client: SyncClient, prompt: str, max_tokens: int) -> str:
    request = Request(prompt=prompt, sampling=GREEDY, max_tokens=max_tokens)
    return "".join(delta.content for delta in client.generate(request))


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_answers_and_progress_come_from_the_other_process_and_nothing_stays_open() -> None:
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
    after_one = num_open()
    with SyncClient(Watched()) as client:
        text_of(client, "hello", 1)
    assert num_open() == after_one


def test_a_process_that_was_started_ahead_gets_the_first_job() -> None:
    with started_ahead():
        (waiting,) = transport._ahead
        inner = Watched()
        with SyncClient(inner) as client:
            assert text_of(client, "hello", 20) == words(DECODER.greedy(ids("hello"), 20))
            assert inner.pid == waiting.process.pid and not transport._ahead
    assert not is_running(waiting.process.pid)


def test_a_process_that_got_no_job_ends() -> None:
    before = num_open()
    with started_ahead():
        (waiting,) = transport._ahead
        assert is_running(waiting.process.pid)
    assert waiting.process.returncode is not None and not transport._ahead
    assert num_open() == before


class Asking:
    """An answer on its way, and whether it has begun."""

    def __init__(self, client: LocalClient, request: Request) -> None:
        self.tokens: list[int] = []
        self._begun = asyncio.Event()
        self._task = asyncio.create_task(self._read(client, request))

    async def _read(self, client: LocalClient, request: Request) -> list[int]:
        try:
            async for delta in client.generate(request):
                self.tokens += delta.token_ids
                if delta.token_ids:
                    self._begun.set()
        finally:
            self._begun.set()
        return self.tokens

    async def begun(self) -> None:
        await self._begun.wait()

    async def answer(self) -> list[int]:
        return await self._task


def test_a_killed_engine_is_followed_by_another_that_goes_on(tmp_path: Path) -> None:
    """Of twenty requests some run, most wait, some have a deadline: who waits sees a pause, none is left hanging, none fails, and some of the
    answers came from the first engine. Killed again and again while it has one request, it is given up: that may be what kills."""
    gate = tmp_path / "gate"
    inner = Watched(model=f"gated behind {gate}")
    assert GatedDecoder.FREE > 10, "they begin before the gate"

    def request(number: int) -> Request:
        deadline = 600.0 if number % 2 else None
        return Request(token_ids=(number + 1,) * 9, sampling=GREEDY, max_tokens=40, deadline_seconds=deadline)

    async def run() -> None:
        first = (await inner.ready()).stats
        assert first is not None and first.process_bytes > 1_000_000
        pid = inner.pid
        asking = [Asking(inner, request(number)) for number in range(20)]
        await asking[0].begun()
        assert inner.is_alive
        os.kill(pid, signal.SIGKILL)
        assert 0 < len(asking[0].tokens) < 40
        gate.touch()
        assert [await one.answer() for one in asking] == [DECODER.greedy([number + 1] * 9, 40) for number in range(20)]
        assert inner.pid != pid
        gate.unlink()
        last = Asking(inner, request(0))  # one: the gate holds up the whole engine, others might not have begun
        await last.begun()
        for number in range(3, 2 + KILLS_ALONE):
            os.kill(inner.pid, signal.SIGKILL)
            while len(inner.ports) < number:
                await asyncio.sleep(0.005)
            await inner._requests.ready()
        os.kill(inner.pid, signal.SIGKILL)
        with pytest.raises(Broken, match="SIGKILL"):
            await last.answer()
        assert len(await Asking(inner, Request(prompt="again", max_tokens=3)).answer()) == 3
        await inner.close()
        assert not inner.is_alive

    finished(run())
    assert not any(is_running(port.pid or 0) for port in inner.ports)


def test_a_stuck_engine_is_told_from_a_busy_one_and_can_be_replaced() -> None:
    inner = Slow()

    async def run() -> None:
        loading = asyncio.create_task(inner.ready())
        await asyncio.sleep(0)
        assert not inner.is_alive
        await loading
        asking = Asking(inner, Request(prompt="hello", sampling=GREEDY, max_tokens=200))
        await asking.begun()
        await inner.info()
        stuck = inner.pid
        os.kill(stuck, signal.SIGSTOP)
        with pytest.raises(TimeoutError):  # however long it is waited for
            await asyncio.wait_for(inner.info(), 0.2)
        assert inner.is_alive, "its process is there"
        os.kill(stuck, signal.SIGCONT)
        await inner.info()
        os.kill(stuck, signal.SIGSTOP)
        late = Request(prompt="hello", deadline_seconds=0.2)
        with pytest.raises(Late, match=r"timed out after 0\.2 s"):  # by who waits: who is stuck says nothing
            [delta async for delta in inner.generate(late)]
        await inner.restart()
        assert not is_running(stuck)
        assert not inner.is_alive
        assert len(await asking.answer()) == 200, "the next engine goes on with it"
        assert inner.is_alive
        await inner.restart()
        assert not inner.is_alive
        await inner.ready()
        assert inner.is_alive
        await inner.close()

    finished(run())


def test_loading_makes_requests_late_too(tmp_path: Path) -> None:
    """It goes on being loaded, and the next one finds it."""
    gate = tmp_path / "gate"

    async def run() -> None:
        inner = Watched(model=f"loaded behind {gate}")
        with pytest.raises(Late):
            [delta async for delta in inner.generate(Request(prompt="hello", deadline_seconds=0.01))]
        gate.touch()
        assert (await inner.ready()).model == inner.model
        assert len(inner.ports) == 1
        await inner.close()

    finished(run())


def test_a_crash_in_a_step_is_survived() -> None:
    """By everybody but the request that causes it, twice."""
    with SyncClient(Crashing()) as client:
        with pytest.raises(Broken, match="SIGABRT"):
            list(client.generate(Request(token_ids=(13,), max_tokens=2)))
        with pytest.raises(Broken, match=r"RuntimeError: the device caught fire"):
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
            with pytest.raises(error, match=message):  # of another engine; one of them is enough
                client.info()


def test_closing_while_loading_leaves_nothing() -> None:
    inner = Watched()

    async def run() -> None:
        task = asyncio.create_task(inner.ready())
        while not inner.ports:
            await asyncio.sleep(0)
        await inner.close()
        with pytest.raises(Unavailable, match="closed"):
            await task

    finished(run())
    assert not is_running(inner.pid)


PROGRAM = f"""
import sys, os, time
sys.path[:0] = {[str(HERE), str(HERE.parent)]!r}
from fake_text import model_text
from windlass.core.client import SyncClient
from windlass.core.request import GREEDY, Request
from windlass.runtime.engine.client import transport
from windlass.runtime.engine.client.client import LocalClient
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


@contextmanager
def program() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """In the middle of an answer; with the id of its engine."""
    mask = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, the program would inherit that
    started = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True)
    signal.signal(signal.SIGINT, mask)
    assert started.stdout is not None
    try:
        pid = int(started.stdout.readline())
        assert is_running(pid)
        assert started.stdout.readline() == "token\n"
        yield started, pid
    finally:
        started.kill()
        started.wait()
        started.stdout.close()
    until_gone(pid)


def test_ctrl_c_stops_the_answer_and_not_the_engine_and_a_kill_ends_both() -> None:
    """Ctrl-C as a terminal sends it: to every process of the group."""
    with program() as (started, pid):
        assert started.stdout is not None
        os.killpg(started.pid, signal.SIGINT)
        lines = iter(started.stdout.readline, "")
        assert next(line for line in lines if line not in ("token\n", "finished\n")) == "cancelled 1 running 0\n"
        assert next(lines) == "token\n"
        assert is_running(pid)
        started.send_signal(signal.SIGKILL)
        started.wait()
        until_gone(pid)


def test_the_engine_ends_with_the_program() -> None:
    with program() as (started, pid):
        started.send_signal(signal.SIGTERM)
        started.wait()
        until_gone(pid)


def test_the_client_needs_no_torch() -> None:
    modules = "windlass.runtime.engine.client, windlass.runtime.weights.text.files"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
