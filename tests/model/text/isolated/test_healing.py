"""Processes that are killed or stopped in any state, and whose fault that is."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("llguidance")

from model.text.isolated.opened_pool import HELLO, opened, parents, schema, vocabulary
from subprocesses import children, environment, kill, until_gone
from windlass.core.client import Broken, Busy, Unavailable
from windlass.model.text.isolated import process as processes
from windlass.model.text.isolated import workers as all_workers
from windlass.model.text.isolated.jobs import Compilation, Rendering, Task
from windlass.model.text.isolated.pool import IsolatedPool
from windlass.model.text.isolated.workers import Lost, Worker, Workers

pytestmark = pytest.mark.multi

HELLO_TEMPLATE = "{{ messages[0].content }}"


async def started(pool: IsolatedPool) -> int:
    """The process for grammars, before the first of them."""
    workers = await pool._grammar_workers()
    if not workers.is_started:
        workers.start()
    assert workers._process is not None
    return workers._process.pid


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_is_killed_before_the_first_grammar_is_no_fault_of_the_tokenizer(number: signal.Signals) -> None:
    async def run() -> None:
        async with opened() as pool:
            for _ in range(all_workers.MOST_OWN_ENDS + 1):
                parent = await started(pool)
                os.kill(parent, number)
                until_gone(parent)
                pool._grammars._send(processes.QUICK, 0)  # type: ignore[union-attr]  # as for another worker
            parent = await started(pool)
            os.kill(parent, number)
            await pool.check_grammar(schema({"type": "integer"}))

    asyncio.run(run())


def test_a_tokenizer_that_ends_its_process_twice_is_given_up_and_chats_go_on() -> None:
    async def run() -> None:
        async with opened() as pool:
            for _ in range(all_workers.MOST_OWN_ENDS):
                parent = await started(pool)
                os.kill(parent, signal.SIGPROF)  # as at the limit of its time
                until_gone(parent)
                pool._grammars._send(processes.QUICK, 0)  # type: ignore[union-attr]
            with pytest.raises(Broken, match="tokenizer could not be prepared"):
                await pool.check_grammar(schema({"type": "integer"}))
            assert await pool.render(HELLO_TEMPLATE, HELLO) == "hello"

    asyncio.run(run())


def test_one_that_is_killed_while_it_is_asked_is_asked_again() -> None:
    """It has not begun: it is stopped, and then killed."""

    async def run() -> None:
        async with opened() as pool:
            parent = await started(pool)
            os.kill(parent, signal.SIGSTOP)
            asked = asyncio.create_task(pool.check_grammar(schema({"type": "integer"})))
            for _ in range(20):
                await asyncio.sleep(0)
            kill([parent])
            await asked

    asyncio.run(run())


def test_chats_do_not_wait_while_the_tokenizer_is_prepared() -> None:
    async def run() -> None:
        async with opened() as pool:
            parent = await started(pool)
            os.kill(parent, signal.SIGSTOP)
            asked = asyncio.create_task(pool.check_grammar(schema({"type": "integer"})))
            assert await pool.render(HELLO_TEMPLATE, HELLO) == "hello"
            assert not asked.done()
            os.kill(parent, signal.SIGCONT)
            await asked

    asyncio.run(run())


def test_one_that_does_not_listen_holds_nobody_up() -> None:
    """Its socket is full: the event loop must not wait for it."""
    workers = Workers()
    try:
        workers.start()
        assert workers._process is not None
        os.kill(workers._process.pid, signal.SIGSTOP)
        with pytest.raises(Busy):
            for _ in range(100_000):
                workers.another(is_slow=False).close()
        assert workers.is_started, "it has not ended"
    finally:
        workers.close()


def test_where_no_process_can_be_started_it_is_said_to_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(all_workers.subprocess, "Popen", none)
    with pytest.raises(Busy, match="temporarily"):
        Workers().another(is_slow=False)


def test_a_parent_that_cannot_fork_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(processes.os, "fork", none)
    ours, theirs = processes.socket.socketpair()
    with ours, theirs:
        processes._fork(theirs, os.dup(theirs.fileno()), None, is_slow=False)
        theirs.close()
        assert ours.recv(1) == b"", "who asked sees that there is no worker"


def test_a_worker_gets_its_job_when_it_can_be_killed() -> None:
    """Not before it has said its number: whoever leaves meanwhile could not end it."""

    async def run() -> None:
        ours, theirs = processes.socket.socketpair()
        theirs.setblocking(False)
        workers = Workers()
        try:
            workers.start()
            assert workers._process is not None
            worker = Worker(ours, workers._process)
            asked = asyncio.create_task(worker.ask(Task(job=Compilation(grammar="x"), cpu_seconds=1.0)))
            for _ in range(20):
                await asyncio.sleep(0)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
            theirs.close()
            with pytest.raises(Lost):
                await asked
        finally:
            ours.close()
            theirs.close()
            workers.close()

    asyncio.run(run())


def test_who_waits_when_it_is_closed_starts_nothing() -> None:
    async def run() -> None:
        async with opened() as pool:
            jobs = [asyncio.create_task(pool.render("{% for _ in range(99999) %}{% endfor %}", HELLO)) for _ in range(5)]
            while len(parents(pool)) == 0:
                await asyncio.sleep(0)
            pool.close()
            ended = await asyncio.gather(*jobs, return_exceptions=True)
            assert all(isinstance(one, str | Unavailable) for one in ended), ended
            assert any(isinstance(one, Unavailable) for one in ended) and parents(pool) == []

    asyncio.run(run())


def test_processes_do_not_get_what_is_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")

    async def run() -> None:
        async with opened(vocabulary) as pool:
            await pool.check_grammar(schema({"type": "integer"}))
            assert await pool.render(HELLO_TEMPLATE, HELLO) == "hello"
            for parent in parents(pool):
                for pid in (parent, *children(parent)):
                    found = environment(pid)
                    assert found["TZ"] == "Asia/Tokyo" and "secret" not in found.values()

    asyncio.run(run())


def test_a_template_is_compiled_outside_of_a_chats_time(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    monkeypatch.setattr(processes.signal, "setitimer", lambda _, seconds: events.append(seconds))
    monkeypatch.setattr(processes, "prepare", lambda _: events.append("prepared"))
    answer = processes._answer(Task(job=Rendering(template=HELLO_TEMPLATE, values=HELLO), cpu_seconds=0.05), None)
    assert answer.text == "hello"
    assert events == [processes.PREPARED_SECONDS, "prepared", 0, 0.05, 0]
