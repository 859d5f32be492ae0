"""Templates and grammars that would take the process with them, in the processes that they do take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("jinja2")

from model.text.isolated.opened_pool import HELLO, opened, parents, schema
from subprocesses import children, kill, until_gone
from waiting import until
from windlass.core.client import Broken, Slowed, Unavailable
from windlass.errors import BadInput
from windlass.model.text.isolated import pool as pools
from windlass.model.text.isolated.process import Vocabulary

pytestmark = pytest.mark.multi

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DEFINITIONS: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(3000)}
CHAIN = {"$ref": "#/$defs/d0", "$defs": DEFINITIONS | {"d3000": {"type": "integer"}}}
RULES = "start: r0\n" + "\n".join(f"r{number}: r{number + 1}" for number in range(5000)) + '\nr5000: "a"'


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


BOMBS = {
    "time": schema({"type": "integer", "multipleOf": 62615533}),
    "memory": lark(f"start: /{'a?' * 20_000}/"),
    "references": schema(CHAIN),
    "rules": lark(RULES),
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time enough for a worker's first import, and no more."""
    monkeypatch.setattr(pools, "QUICK_SECONDS", 0.1)
    monkeypatch.setattr(pools, "SLOW_SECONDS", 0.3)


def test_chats_are_rendered() -> None:
    async def run() -> None:
        async with opened() as pool:
            template = "{% for message in messages %}{{ message.content }}{% endfor %}{{ eos }}{{ 'x' if tools }}"
            values = HELLO | {"special_tokens": {"eos": "<e>"}, "tools": None}
            assert [await pool.render(template, values) for _ in range(3)] == ["hello<e>"] * 3
            with pytest.raises(BadInput, match="no roles") as found:
                await pool.render("{{ raise_exception('no roles') }}", HELLO)
            assert found.value.field == "messages"

    asyncio.run(run())


@pytest.mark.parametrize("template", [LOOPS, "{{ 'a' * 3000000000 }}"])
def test_templates_have_their_limits(template: str) -> None:
    async def run() -> None:
        async with opened() as pool:
            with pytest.raises(BadInput, match="s of CPU time or"):
                await pool.render(template, HELLO)
            assert await pool.render("{{ messages[0].content }}", HELLO) == "hello"

    asyncio.run(run())


@pytest.mark.parametrize("name", list(BOMBS))
def test_grammars_have_their_limits(name: str) -> None:
    pytest.importorskip("llguidance")

    async def run() -> None:
        async with opened() as pool:
            with pytest.raises(BadInput, match=r"needs more than|cannot be compiled"):
                await pool.check_grammar(BOMBS[name], "bad/")
            await pool.check_grammar(schema({"type": "integer"}), "good/")
            await pool.check_grammar(schema({"type": "string"}), "bad/")
            with pytest.raises(BadInput, match="greater than maximum"):
                await pool.check_grammar(schema({"type": "integer", "minimum": 5, "maximum": 3}))

    asyncio.run(run())


def test_a_group_that_goes_on_is_refused_and_others_are_not() -> None:
    pytest.importorskip("llguidance")

    async def run() -> None:
        async with opened() as pool:
            for number in range(pools.MOST_ENDED + 1):
                with pytest.raises(BadInput):
                    await pool.check_grammar(lark(RULES.replace('"a"', f'"{number}"')), "bad/any")
            with pytest.raises(Slowed):
                await pool.check_grammar(schema({"type": "boolean"}), "bad/other")
            await pool.check_grammar(schema({"type": "boolean"}), "good/any")
            await pool.check_grammar(schema({"type": "boolean"}), "bad/any")  # known to be harmless
            assert await pool.render("{{ messages[0].content }}", HELLO, "bad/any") == "hello"

    asyncio.run(run())


def test_the_same_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")

    async def run() -> None:
        async with opened() as pool:
            jobs: list[str] = []
            real = pool._quick.run
            monkeypatch.setattr(pool._quick, "run", lambda job, group: (jobs.append(group), real(job, group))[1])
            await asyncio.gather(*(pool.check_grammar(schema({"type": "null"}), f"{name}/") for name in "aabbcc"))
            await pool.check_grammar(schema({"type": "null"}), "d/")
            assert sorted(jobs) == ["a", "b", "c"], "once for each group, and never again"

    asyncio.run(run())


def test_who_leaves_takes_the_work_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "QUICK_SECONDS", 1000.0)

    async def run() -> None:
        async with opened() as pool:
            job = asyncio.create_task(pool.render(LOOPS, HELLO))
            while not pool._templates.is_started:
                await asyncio.sleep(0)
            [parent] = parents(pool)
            [worker] = await asyncio.to_thread(until, lambda: children(parent))
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            await asyncio.to_thread(until_gone, worker)

    asyncio.run(run())


@pytest.mark.parametrize("who", ["parents", "workers", "all"])
def test_processes_that_are_killed_are_replaced(who: str) -> None:
    pytest.importorskip("llguidance")

    async def run() -> None:
        async with opened() as pool:
            for number in range(3):
                await pool.check_grammar(schema({"const": number}))
                assert await pool.render("{{ messages[0].content }}", HELLO) == "hello"
                started = parents(pool)
                assert len(started) == 2
                workers = [worker for parent in started for worker in children(parent)]
                victims = {"parents": started, "workers": workers, "all": started + workers}[who]
                kill(victims)
                until_gone(*victims)

    asyncio.run(run())


def test_a_closed_one_starts_nothing() -> None:
    async def run() -> None:
        async with opened() as pool:
            pool.close()
            pool.start()
            for late in (pool.render("x", HELLO), pool.check_grammar(schema({}))):
                with pytest.raises(Unavailable, match="closed"):
                    await late
            assert parents(pool) == []

    asyncio.run(run())


def test_a_library_that_fails_is_nobodys_fault() -> None:
    async def run() -> None:
        async with opened() as pool:
            with pytest.raises(Broken, match="not expected"):
                await pool.render("{{ messages }}", {"unknown": 1})

    asyncio.run(run())


def test_a_tokenizer_that_llguidance_cannot_use_is_said() -> None:
    pytest.importorskip("llguidance")

    async def run() -> None:
        async with opened(lambda: Vocabulary("{}", [])) as pool:
            with pytest.raises(BadInput, match="tokenizer"):
                await pool.check_grammar(schema({"type": "integer"}))
            assert await pool.render("{{ messages[0].content }}", HELLO) == "hello"

    asyncio.run(run())
