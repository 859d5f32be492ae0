from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from routing import NAME, SUM, Clock, Model, chat, collect, routed

from windlass.core.client import Busy, Late, Unavailable
from windlass.core.request import GREEDY, Request, Sampling
from windlass.errors import BadInput, UnknownName
from windlass.tasks.route.operate.breakers import BreakerSettings
from windlass.tasks.route.operate.log import LogLine, replay
from windlass.tasks.route.operate.settings import CascadeSettings
from windlass.tasks.route.tables.answers import read_file

pytestmark = pytest.mark.pure


def gone(number: int) -> Unavailable:
    return Unavailable(f"gone {number}")


def ask(client, *requests: Request) -> list[tuple[str, dict[str, str]]]:  # type: ignore[no-untyped-def]
    async def run() -> list[tuple[str, dict[str, str]]]:
        try:
            return [await collect(client, request) for request in requests]
        finally:
            await client.close()

    return asyncio.run(run())


def test_each_prompt_goes_to_the_model_that_is_good_at_it() -> None:
    small, large = Model("small"), Model("large")
    (sums, first), (names, second) = ask(routed(small, large), chat(SUM), chat(NAME))
    assert sums.startswith("small says") and names.startswith("large says")
    assert first["windlass-route-model"] == "small" and second["windlass-route-how"] == "decided"
    assert small.closed == large.closed == 1


def test_variants_and_names() -> None:
    small, large = Model("small"), Model("large")
    found = ask(routed(small, large), chat(NAME, model="auto:cheap"), chat(SUM, model="large"), chat(NAME, model="auto:best"))
    assert [notes["windlass-route-model"] for _, notes in found] == ["small", "large", "large"]
    assert found[1][1]["windlass-route-how"] == "named"
    with pytest.raises(UnknownName, match="auto:best"):
        ask(routed(small, large), chat(SUM, model="auto:bset"))


def test_another_model_answers_when_one_is_gone_and_its_breaker_opens() -> None:
    small, large, clock = Model("small", fails=gone), Model("large"), Clock()
    client = routed(small, large, clock, breaker=BreakerSettings(failures=2, open_seconds=5.0))
    found = ask(client, *[chat(f"What is {i} + 25 for case 3?") for i in range(10, 16)])
    assert all(text.startswith("large says") for text, _ in found)
    assert found[0][1]["windlass-route-instead-of"] == "small"
    assert len(small.requests) == 2 and client.counters.fallbacks == 2 and client.counters.failures["small"] == 2
    assert client.counters.lost == 0


def test_a_breaker_lets_one_request_try_again_after_its_pause() -> None:
    small, clock = Model("small", fails=lambda number: gone(number) if number < 3 else None), Clock()
    client = routed(small, Model("large"), clock, breaker=BreakerSettings(failures=2, open_seconds=5.0))

    async def run() -> list[str]:
        said: list[str] = []
        for place in range(8):
            said.append((await collect(client, chat(f"What is {place} + 25 for case 3?")))[0].split()[0])
            clock.now += 2.0
        return said

    assert asyncio.run(run()) == ["large"] * 4 + ["small"] * 4


def test_a_busy_model_says_when_to_come_back() -> None:
    busy = Busy("429")
    busy.retry_after_seconds = 30.0  # type: ignore[attr-defined]
    small = Model("small", fails=lambda number: busy)
    ask(routed(small, Model("large")), *[chat(f"What is {i} + 25 for case 3?") for i in range(5)])
    assert len(small.requests) == 1


def test_a_silent_model_is_given_up() -> None:
    small = Model("small", hesitates=lambda number: True)
    ((text, _),) = ask(routed(small, Model("large"), first_token_seconds=0.05), chat(SUM))
    assert text.startswith("large says")


def test_an_answer_that_breaks_off_is_continued_by_another_model() -> None:
    small, large = Model("small", fails=gone, fails_after=2), Model("large", answer="and so on")
    client = routed(small, large)
    ((text, _),) = ask(client, chat(SUM))
    assert text == "small saysand so on" and client.counters.resumed == 1
    continued = large.requests[0]
    assert continued.continues_answer and continued.messages is not None
    assert continued.messages[-1] == {"role": "assistant", "content": "small says"}


def test_what_is_wrong_with_the_request_is_not_tried_elsewhere() -> None:
    large = Model("large")
    with pytest.raises(BadInput, match="bad"):
        ask(routed(Model("small", fails=lambda number: BadInput("bad")), large), chat(SUM))
    assert large.requests == []


def test_none_answers() -> None:
    client = routed(Model("small", fails=gone), Model("large", fails=gone))
    with pytest.raises((Unavailable, Late)):
        ask(client, chat(SUM, deadline_seconds=0.2))
    assert client.counters.lost == 1


# --- memory


def test_a_conversation_keeps_its_model_unless_asked_or_gone() -> None:
    small, large = Model("small"), Model("large")
    client = routed(small, large)
    turn = {"role": "user", "content": SUM}
    later = (turn, {"role": "assistant", "content": "42"}, {"role": "user", "content": NAME})
    again = Request(messages=later, sampling=GREEDY)
    first, second, third = ask(client, chat(SUM), again, msgspec.structs.replace(again, model="auto:best"))
    assert first[1]["windlass-route-model"] == second[1]["windlass-route-model"] == "small"
    assert second[1]["windlass-route-how"] == "sticky" and third[1]["windlass-route-how"] == "decided"
    other = routed(small, large, sticky=False)
    assert ask(other, chat(SUM), again)[1][1]["windlass-route-how"] == "decided"


def test_exact_repeats_are_answered_from_memory_but_not_those_that_are_sampled() -> None:
    small, clock = Model("small"), Clock()
    client = routed(small, Model("large"), clock, cache_entries=10, cache_seconds=60.0)
    sampled = Request(messages=({"role": "user", "content": SUM},), sampling=Sampling(temperature=0.5))
    found = ask(client, chat(SUM), chat(SUM, owner="other"), sampled, sampled, chat(SUM, cache_salt="mine"))
    assert len({text for text, _ in found}) == 1 and len(small.requests) == 4
    assert client.counters.requests["small", "cached"] == 1


# --- cascade


def cascading(small: Model, large: Model, rule: bool = True, **settings: object):  # type: ignore[no-untyped-def]
    from windlass.tasks.route.decide.router_file import Confident

    client = routed(small, large, cascade=CascadeSettings(**settings))  # type: ignore[arg-type]
    if rule:
        client._rules = {"small": Confident(model="small", weights={"mean": 2.0}, bias=2.0, threshold=0.5, low=0.1, high=0.9)}
    return client


def test_a_confident_answer_is_kept_and_another_is_passed_on() -> None:
    kept, passed = cascading(Model("small"), Model("large")), cascading(Model("small", logprob=-4.0), Model("large"))
    assert ask(kept, chat(SUM))[0][0].startswith("small says")
    text, notes = ask(passed, chat(SUM))[0]
    assert text.startswith("large says") and notes["windlass-route-instead-of"] == "small" and passed.counters.passed_on == 1


def test_log_probabilities_that_were_not_asked_for_are_not_shown() -> None:
    client = cascading(Model("small"), Model("large"))

    async def run() -> int:
        return sum([len(delta.logprobs) async for delta in client.generate(chat(SUM))])

    assert asyncio.run(run()) == 0


def test_a_stream_is_held_back_only_as_long_as_needed() -> None:
    small = Model("small", answer=" ".join(["word"] * 40))
    client = cascading(small, Model("large"), hold_tokens=10)

    async def run() -> int:
        stream = client.generate(chat(SUM))
        await anext(stream)
        await stream.aclose()
        return len(small.requests)

    assert asyncio.run(run()) == 1


def test_an_answer_that_was_passed_on_is_better_than_none() -> None:
    client = cascading(Model("small", logprob=-4.0), Model("large", fails=gone))
    assert ask(client, chat(SUM))[0][0].startswith("small says")


def test_checks_agreement_and_verifier_pass_on() -> None:
    from windlass.core.request import Constraint

    schema = Constraint(kind="json_schema", value='{"type": "object", "required": ["a"]}')
    bad, good = Model("small", answer='{"b": 1}'), Model("large", answer='{"a": 1}')
    assert ask(cascading(bad, good, rule=False), chat(SUM, constraint=schema))[0][0] == '{"a": 1}'
    no = Model("large", answer="No")
    assert ask(cascading(Model("small"), no, rule=False, verifier="large"), chat(SUM))[0][0] == "No"
    yes = Model("large", answer="Yes")
    assert ask(cascading(Model("small"), yes, rule=False, verifier="large"), chat(SUM))[0][0].startswith("small")


# --- recording


def test_shadow_mode_only_records(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    small, large = Model("small"), Model("large")
    found = ask(routed(small, large, log=log, shadow="large"), chat(SUM))
    assert found[0][0].startswith("large says") and small.requests == []
    line = msgspec.json.decode(log.read_bytes(), type=LogLine)
    assert line.decision == "shadow" and line.chosen == "small" and line.model == "large" and line.prompt is None


def test_logged_decisions_are_replayed_to_the_same(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    client = routed(Model("small", fails=lambda n: gone(n) if n % 3 == 0 else None), Model("large"), log=log, log_prompts=True)
    prompts = [f"What is {i} + {i} for case 3?" for i in range(20)] + [NAME, "Zwölf Boxkämpfer jagen Viktor"]
    ask(client, *map(chat, prompts))
    lines = log.read_bytes().splitlines()
    assert len(lines) == len(prompts) and all(msgspec.json.decode(line, type=LogLine).model for line in lines)
    found = replay(lines, "log")
    assert found.num_decisions == found.num_same == len(prompts)
    line = msgspec.json.decode(lines[0])
    line["chosen"] = "small" if line["chosen"] == "large" else "large"
    assert replay([msgspec.json.encode(line)], "log").num_same == 0
    with pytest.raises(BadInput, match="line 1"):
        replay([b"{"], "log")


def test_a_log_with_scores_is_a_table(tmp_path: Path) -> None:
    from windlass.core.request import Constraint

    log = tmp_path / "log.jsonl"
    client = routed(Model("small", answer='{"a": 1}'), Model("large"), log=log, log_prompts=True, cascade=CascadeSettings())
    ask(client, chat(SUM, constraint=Constraint(kind="json_object")), chat(SUM + " Now."))
    found = read_file(log)
    assert [(one.model, one.score) for one in found] == [("small", 1.0)]


def test_drift_raises_an_alarm_once() -> None:
    said: list[str] = []
    client = routed(Model("small"), Model("large"))
    client._notify = said.append
    odd = [chat(f"Zwölf Boxkämpfer jagen Viktor quer über den Deich {i}") for i in range(80)]
    ask(client, *odd)
    assert client.drift.standing().is_alarm and len([line for line in said if "drift" in line]) == 1
    assert client.counters.abstained == 80


def test_info_is_of_those_that_answer() -> None:
    client = routed(Model("small", fails=gone), Model("large"))
    info = asyncio.run(client.info())
    assert info.model == "auto" and info.context_tokens == 1000
    with pytest.raises(Unavailable):
        asyncio.run(routed(Model("small", fails=gone), Model("large", fails=gone)).info())


def test_routers_are_nested() -> None:
    inner = routed(Model("small"), Model("large"))
    outer = routed(Model("small"), inner)  # type: ignore[arg-type]
    text, _ = ask(outer, chat(NAME))[0]
    assert text.startswith("large says")
