"""The pure parts of a run: budgets, prices, delays, settings, choices by log-probability, energy, estimates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scripted import ScriptedClient, sums

from windlass.core.client import Broken, Busy, Late, Unavailable
from windlass.core.request import Info, TokenLogprob
from windlass.errors import BadInput, Error
from windlass.tasks.evaluate.run.ask import among, score_choices
from windlass.tasks.evaluate.run.budget import Budget, Price, Spent, left_of, may_ask, parse_budget, parse_price
from windlass.tasks.evaluate.run.capacity import top_logprobs
from windlass.tasks.evaluate.run.energy import EnergyMeter
from windlass.tasks.evaluate.run.estimate import Speed, estimate
from windlass.tasks.evaluate.run.items import items
from windlass.tasks.evaluate.run.retry import MAX_DELAY_SECONDS, busy_delay_seconds, delay_seconds, kind_of
from windlass.tasks.evaluate.run.settings import SAVED, Wanted, check, encode_wanted, folder_name, resumed

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("5usd", Budget(usd=5)),
        ("$2.50", Budget(usd=2.5)),
        ("2h", Budget(seconds=7200)),
        ("30min", Budget(seconds=1800)),
        ("1.5", Budget(seconds=5400)),
    ],
)
def test_budgets(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "0h", "-1h", "5 euros", "two hours", "nan"])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="5usd, 2h or 30min"):
        parse_budget(text)


def test_prices() -> None:
    assert parse_price("0.5,1.5").usd(2e6, 1e6, 99) == 2.5 and parse_price("$3/h").usd(1, 1, 1800) == 1.5
    with pytest.raises(BadInput, match=r"0\.5,1\.5"):
        parse_price("cheap")


@pytest.mark.parametrize(
    ("budget", "spent", "in_flight", "may"),
    [
        (Budget(), Spent(seconds=1e9, usd=1e9), 99, True),
        (Budget(usd=1.0), Spent(usd=0.5, num_answers=10), 5, True),
        (Budget(usd=1.0), Spent(usd=0.5, num_answers=10), 10, False),
        (Budget(usd=1.0), Spent(expected_usd=0.3), 2, True),
        (Budget(usd=1.0), Spent(expected_usd=0.3), 3, False),
        (Budget(usd=0.0), Spent(), 0, False),
        (Budget(seconds=0.0), Spent(), 0, False),
        (Budget(seconds=100), Spent(seconds=90, longest_seconds=5), 0, True),
        (Budget(seconds=100), Spent(seconds=90, longest_seconds=20), 0, False),
    ],
)
def test_what_a_budget_allows(budget: Budget, spent: Spent, in_flight: int, may: bool) -> None:
    assert may_ask(budget, spent, in_flight) is may


def test_what_is_left_for_the_next_model() -> None:
    assert left_of(Budget(), 10, 10) == Budget()
    assert left_of(Budget(usd=3.0), 10, 1.0) == Budget(usd=2.0) and left_of(Budget(seconds=5.0), 10, 0) == Budget(seconds=0.0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(Busy("x"), "busy"), (Late("x"), "again"), (Broken("x"), "again"), (Unavailable("x"), "wait"), (BadInput("x"), "refused")],
)
def test_what_becomes_of_a_failure(error: Error, kind: str) -> None:
    assert kind_of(error) == kind


def test_delays_grow_and_keep_to_what_a_server_says() -> None:
    assert [delay_seconds(attempt, None, lambda: 0.5) for attempt in (1, 2, 3, 12)] == [0.5, 1.0, 2.0, MAX_DELAY_SECONDS]
    assert delay_seconds(1, 7.0, lambda: 0.5) == 7.0
    assert [busy_delay_seconds(times, None, lambda: 0.5) for times in (1, 9)] == [0.5, 4.0] and busy_delay_seconds(
        1, 2.0, lambda: 0.5
    ) == 1.5


def test_a_resumed_run_keeps_its_settings(tmp_path: Path) -> None:
    first = Wanted(models=("m",), tasks="gsm8k", num_examples=50, quant="int8", context=4096)
    (tmp_path / SAVED).write_bytes(encode_wanted(first))
    assert resumed(tmp_path, Wanted()) == first == resumed(tmp_path, Wanted(tasks="gsm8k"))
    for other, words in (
        (Wanted(num_examples=60), "--num-examples 50, not 60"),
        (Wanted(samples=4), "--samples left to its default, not 4"),
        (Wanted(quant="int4"), "--quant int8, not int4"),
        (Wanted(context=8192), "--context 4096, not 8192"),
        (Wanted(exact=True), "--exact left to its default, not True"),
    ):
        with pytest.raises(BadInput, match=words):
            resumed(tmp_path, other)


@pytest.mark.parametrize("bad", [{"num_examples": 0}, {"shots": -1}, {"samples": 0}, {"samples": 3, "temperature": 0.0}])
def test_settings_that_mean_nothing_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        check(Wanted(**bad))  # type: ignore[arg-type]


@pytest.mark.parametrize(("label", "name"), [("a/b c", "a-b-c"), ("../x", "x"), ("", "model"), ("GLM-4.5", "GLM-4.5")])
def test_labels_are_folders(label: str, name: str) -> None:
    assert folder_name(label) == name


def test_choices_among_the_most_likely_tokens() -> None:
    top = tuple(TokenLogprob(token_id=n, logprob=-n / 10, token=token) for n, token in enumerate((" A", " B", "C")))
    entry = TokenLogprob(token_id=9, logprob=-0.01, token=" D", top=top)
    assert among(entry, (" A", " B", " C", " D")) == {" A": 0.0, " B": -0.1, " D": -0.01}  # `C` is not ` C`


class Tokenizing(ScriptedClient):
    async def tokenize(self, text: str) -> list[int]:
        return [ord(char) for char in text]


@pytest.mark.parametrize("kind", [ScriptedClient, Tokenizing])
def test_choices_are_scored_behind_their_context(kind: type[ScriptedClient]) -> None:
    """With and without a tokenizer: `B` alone, as the blank before it is as likely for every choice."""
    found = asyncio.run(score_choices(kind(lambda text, times: ""), "Answer:", [" A", " B"], [" B"]))
    blank = ord(" ") if kind is ScriptedClient else 0  # common to all choices, so part of the context
    assert found == {" B": pytest.approx(-(blank + ord("B")) / 100)}


@pytest.mark.parametrize(("owner", "top"), [(None, 100), ("windlass", 20), ("vllm", 20), ("openai", 5)])
def test_servers_return_so_many_alternatives(owner: str | None, top: int) -> None:
    assert top_logprobs(Info(model="m", context_tokens=1, details={"owner": owner} if owner else {})) == top


def test_energy_by_counters_and_by_rated_power(tmp_path: Path) -> None:
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    (package / "energy_uj").write_text("1000000")
    counted, rated = EnergyMeter(None, folder=tmp_path), EnergyMeter(50.0, iter([0.0, 2.0]).__next__, tmp_path / "none")
    (package / "energy_uj").write_text("3500000")
    assert counted.lap() == 2.5 and counted.lap() == 0.0 and "RAPL" in counted.how
    assert rated.lap() == 100.0 and rated.how == "estimated at 50 W"
    assert EnergyMeter(None, folder=tmp_path / "none").lap() is None


def test_an_estimate_before_the_first_answer(tmp_path: Path) -> None:
    prepared = sums(tmp_path, 40)
    asked = items([prepared], 2, False)
    speed = Speed(prompt_tokens_per_second=100.0, answer_tokens_per_second=10.0, watts=20.0, source="the plan")
    found = estimate(asked, {"sums": prepared.task}, speed, Price(usd_per_million_answer=1.0))
    assert found.num_requests == 80 and found.answer_tokens == 8000
    assert found.seconds == pytest.approx(found.prompt_tokens / 100 + 800) and found.joules == pytest.approx(
        20 * (found.seconds or 0)
    )
    assert found.usd == pytest.approx(0.008) and found.disk_bytes > 80 * 1000
    assert estimate(asked, {"sums": prepared.task}, Speed(), Price()).seconds is None


def test_with_a_budget_tasks_take_turns(tmp_path: Path) -> None:
    one, other = sums(tmp_path, 3), sums(tmp_path, 2, name="others")
    assert [item.question.task for item in items([one, other], 1, True)] == ["sums", "others", "sums", "others", "sums"]
    assert [item.question.task for item in items([one, other], 1, False)] == ["sums"] * 3 + ["others"] * 2
