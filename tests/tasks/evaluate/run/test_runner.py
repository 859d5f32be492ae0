"""A run: every answer kept, nothing asked twice, failures counted as failures, budgets kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted import ScriptedClient, prepared_of, right, settings_for, sums

from windlass.core.client import Broken, Busy, Late, Unavailable
from windlass.errors import BadInput, Error
from windlass.model.formats.disk.journal import Journal
from windlass.tasks.evaluate.run import retry
from windlass.tasks.evaluate.run.budget import Budget, Price
from windlass.tasks.evaluate.run.items import Prepared
from windlass.tasks.evaluate.run.records import Record
from windlass.tasks.evaluate.run.runner import How, Runner
from windlass.tasks.evaluate.run.settings import Settings
from windlass.tasks.evaluate.sandbox.sandbox import Sandbox
from windlass.tasks.evaluate.tasks.task import parse_task

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(retry, "POLL_SECONDS", 0.0)


async def run(
    client: ScriptedClient,
    prepared: Prepared,
    path: Path,
    settings: Settings | None = None,
    sandbox: Sandbox | None = None,
    **how: Any,
) -> dict[str, Record]:
    settings = settings or settings_for(prepared)
    journal = Journal(path, settings.fingerprint())
    try:
        return dict(await Runner(client, [prepared], settings, journal, How(**how), sandbox).run())
    finally:
        journal.close()


def run_now(*arguments: Any, **how: Any) -> dict[str, Record]:
    return asyncio.run(run(*arguments, **how))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["payload"] for line in path.read_text().splitlines()[1:]]


def test_every_answer_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "j"
    client = ScriptedClient(right)
    records = run_now(client, sums(tmp_path), path, concurrency=4)
    assert len(records) == len(lines(path)) == 12 and all(count == 1 for count in client.asked.values())
    assert {one.verdict for one in records.values()} == {"correct"} and client.most_at_once == 4
    stable = {"task", "id", "prompt", "answer", "strict", "flexible", "verdict", "why", "tokens", "seconds"}
    assert all(stable <= set(line) for line in lines(path))


def test_resuming_asks_only_what_is_missing(tmp_path: Path) -> None:
    path, prepared = tmp_path / "j", sums(tmp_path)
    whole = run_now(ScriptedClient(right), prepared, path)
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:6]) + text[6][:20])  # five answers, and one that was being written
    client = ScriptedClient(right)
    again = run_now(client, prepared, path)
    assert sum(client.asked.values()) == 7 and again.keys() == whole.keys()
    assert [again[key].answer for key in whole] == [one.answer for one in whole.values()]


def test_other_settings_are_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    path, prepared = tmp_path / "j", sums(tmp_path)
    run_now(ScriptedClient(right), prepared, path)
    before = path.read_bytes()
    for changed in (settings_for(prepared, seed=1), settings_for(sums(tmp_path, max_tokens=7))):
        with pytest.raises(BadInput, match=r"different (seed|task sums)"):
            run_now(ScriptedClient(right), prepared, path, changed)
    assert path.read_bytes() == before


@pytest.mark.parametrize("error", [Late("late"), Broken("NaN")])
def test_a_failed_request_is_asked_again(tmp_path: Path, error: Error) -> None:
    client = ScriptedClient(lambda text, times: error if times < 3 else right(text, times))
    records = run_now(client, sums(tmp_path, 3), tmp_path / "j")
    assert all(one.verdict == "correct" and one.attempts == 3 for one in records.values())


def test_what_fails_every_time_is_failed_and_not_wrong(tmp_path: Path) -> None:
    client = ScriptedClient(lambda text, times: Late("late") if text.startswith("1 ") else right(text, times))
    records = run_now(client, sums(tmp_path, 3), tmp_path / "j")
    assert [one.verdict for one in records.values()].count("failed") == 1
    assert client.asked["1 + 7 ="] == retry.MAX_ATTEMPTS and records["sums\t1\t0"].why == "late"
    mended = ScriptedClient(right)
    again = run_now(mended, sums(tmp_path, 3), tmp_path / "j")
    assert dict(mended.asked) == {"1 + 7 =": 1} and again["sums\t1\t0"].verdict == "correct"


@pytest.mark.parametrize("finish", [None, "cancelled", "error"])
def test_an_answer_that_did_not_come_to_its_end_is_none(tmp_path: Path, finish: str | None) -> None:
    client = ScriptedClient(right, finish)
    records = run_now(client, sums(tmp_path, 2), tmp_path / "j")
    assert {(one.verdict, one.answer, one.attempts) for one in records.values()} == {("failed", "", retry.MAX_ATTEMPTS)}
    assert all("did not come to its end" in one.why for one in records.values())
    choice = sums(tmp_path, 2, grader="choice", choices=(" A", " B"))
    chosen = run_now(ScriptedClient(right, finish), choice, tmp_path / "k")
    assert all("did not come to its end" in one.why for one in chosen.values())


def test_answers_to_other_prompts_are_asked_for_again(tmp_path: Path) -> None:
    path, prepared = tmp_path / "j", sums(tmp_path, 3)
    settings = settings_for(prepared)
    run_now(ScriptedClient(right), prepared, path, settings)
    first, *others = prepared.questions
    changed = msgspec.structs.replace(first, messages=({"role": "user", "content": "40 + 2 ="},), digest="another")
    client = ScriptedClient(right)
    again = run_now(client, msgspec.structs.replace(prepared, questions=(changed, *others)), path, settings)
    assert dict(client.asked) == {"40 + 2 =": 1} and again[f"sums\t{first.id}\t0"].prompt == "another" and len(again) == 3


def test_a_busy_server_costs_no_attempt(tmp_path: Path) -> None:
    client = ScriptedClient(lambda text, times: Busy("busy") if times < 40 else right(text, times))
    records = run_now(client, sums(tmp_path, 3), tmp_path / "j")
    assert all(one.verdict == "correct" and one.attempts == 1 for one in records.values())
    gone = run_now(ScriptedClient(lambda text, times: Busy("busy")), sums(tmp_path, 3), tmp_path / "k", patience_seconds=0.0)
    assert all(one.verdict == "failed" and one.why == "busy" for one in gone.values())


def test_a_refused_request_is_not_repeated(tmp_path: Path) -> None:
    client = ScriptedClient(lambda text, times: BadInput("too long"))
    records = run_now(client, sums(tmp_path, 3), tmp_path / "j")
    assert all(one.verdict == "failed" for one in records.values()) and set(client.asked.values()) == {1}


def test_a_server_that_is_gone_is_waited_for(tmp_path: Path) -> None:
    client = ScriptedClient(right)
    answer = client._answer

    def dying(text: str, times: int) -> str | Error:
        if sum(client.asked.values()) == 5:
            client.is_down = True
        return Unavailable("gone") if client.is_down else answer(text, times)

    client._answer = dying

    async def both() -> dict[str, Record]:
        running = asyncio.create_task(run(client, sums(tmp_path), tmp_path / "j", concurrency=3))
        while client.num_infos < 3:
            await asyncio.sleep(0)
        client.is_down = False
        return await running

    records = asyncio.run(both())
    assert len(records) == 12 and all(one.verdict == "correct" for one in records.values())


def test_a_server_that_stays_away_ends_the_run_with_what_came(tmp_path: Path) -> None:
    client = ScriptedClient(right)
    client.is_down = True
    with pytest.raises(Unavailable, match="--resume"):
        run_now(client, sums(tmp_path), tmp_path / "j", patience_seconds=0.0)


def test_samples_have_seeds_of_their_own_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    prepared = sums(tmp_path, 3)
    settings = settings_for(prepared, samples=4, temperature=0.8)
    first, second = ScriptedClient(right), ScriptedClient(right)
    run_now(first, prepared, tmp_path / "a", settings)
    run_now(second, prepared, tmp_path / "b", settings, concurrency=1)
    seeds = [sorted(str(request.sampling.seed) for request in client.requests) for client in (first, second)]
    assert len(set(seeds[0])) == 12 and seeds[0] == seeds[1]


@pytest.mark.parametrize(
    ("budget", "price"),
    [(Budget(usd=0.005), Price(usd_per_million_answer=100.0)), (Budget(seconds=1e-9), Price())],
)
def test_a_budget_ends_a_run_with_what_it_has(tmp_path: Path, budget: Budget, price: Price) -> None:
    client = ScriptedClient(right)
    records = run_now(client, sums(tmp_path, 50), tmp_path / "j", concurrency=1, budget=budget, price=price)
    assert len(records) < 50 and all(one.verdict == "correct" for one in records.values())
    spent = price.usd(0, sum(one.tokens.answer for one in records.values()), 0)
    assert budget.usd is None or 0 < spent <= budget.usd
    whole = run_now(ScriptedClient(right), sums(tmp_path, 50), tmp_path / "j")
    assert len(whole) == 50


PROGRAMS = """
name = "programs"
category = "coding"
source.file = "sums.jsonl"
prompt.chat = "{a} + {b} ="
tests = "assert f() == {sum}"
grader = "python"
"""


def programs(folder: Path, count: int = 3) -> Prepared:
    sums(folder, count)
    return prepared_of(parse_task(PROGRAMS.encode(), "programs.toml", str(folder)))


def write_function(text: str, times: int) -> str:
    a, _, b, *_ = text.split()
    return f"```python\ndef f():\n    return {a} + {b if a != '1' else 0}\n```"


class FakeSandbox:
    """Counts; a real one is tested beside it."""

    layers = "fake"

    def __init__(self, passed: Callable[[str], bool]) -> None:
        self._passed, self.num_runs = passed, 0

    async def run(self, program: Any) -> Any:
        from windlass.tasks.evaluate.sandbox.sandbox import Outcome

        self.num_runs += 1
        await asyncio.sleep(0)
        return Outcome(passed=self._passed(program.source), why="fake")


def test_programs_that_were_not_run_wait_for_a_verdict_and_are_not_asked_again(tmp_path: Path) -> None:
    prepared, path = programs(tmp_path), tmp_path / "j"
    skipped = run_now(ScriptedClient(write_function), prepared, path)
    assert all(one.verdict == "pending" for one in skipped.values())
    client, sandbox = ScriptedClient(write_function), FakeSandbox(lambda source: "+ 7" in source)
    judged = run_now(client, prepared, path, None, sandbox)
    assert not client.asked and sandbox.num_runs == 3
    assert sorted(one.verdict for one in judged.values()) == ["correct", "correct", "wrong"]
    assert len(lines(path)) == 6  # an answer, and then its verdict
    assert all(one.seconds == skipped[key].seconds for key, one in judged.items())
