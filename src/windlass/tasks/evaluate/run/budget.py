"""`--budget`: dollars or time, and whether another question may be asked. Pure."""

from __future__ import annotations

import re

from windlass.core.model import Frozen
from windlass.errors import BadInput

_TIME = {"h": 3600.0, "hour": 3600.0, "hours": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0, "sec": 1.0}
_MONEY = ("usd", "$", "dollars")


class Budget(Frozen):
    seconds: float | None = None
    usd: float | None = None


class Price(Frozen):
    """What answers cost: tokens of a paid API, or hours of a machine."""

    usd_per_million_prompt: float = 0.0
    usd_per_million_answer: float = 0.0
    usd_per_hour: float = 0.0

    @property
    def is_known(self) -> bool:
        return bool(self.usd_per_million_prompt or self.usd_per_million_answer or self.usd_per_hour)

    def usd(self, prompt_tokens: float, answer_tokens: float, seconds: float) -> float:
        by_token = prompt_tokens * self.usd_per_million_prompt + answer_tokens * self.usd_per_million_answer
        return by_token / 1e6 + self.usd_per_hour * seconds / 3600


class Spent(Frozen):
    seconds: float = 0.0
    usd: float = 0.0
    num_answers: int = 0
    longest_seconds: float = 0.0
    """Of one answer so far."""
    expected_usd: float = 0.0
    """Of one answer, until the first came."""


def parse_budget(text: str) -> Budget:
    """`5usd`, `$5`, `2h`, `30min`; a number alone is hours."""
    match = re.fullmatch(r"\s*(\$?)\s*(\d+(?:\.\d+)?)\s*([a-zA-Z$]*)\s*", text)
    unit = match[3].lower() if match else ""
    if match is None or float(match[2]) <= 0 or (unit and unit not in _TIME and unit not in _MONEY):
        raise BadInput(f"--budget {text!r} is neither money nor time; write it like 5usd, 2h or 30min")
    if match[1] or unit in _MONEY:
        return Budget(usd=float(match[2]))
    return Budget(seconds=float(match[2]) * _TIME.get(unit, 3600.0))


def parse_price(text: str) -> Price:
    """`0.5,1.5`: dollars per million prompt and answer tokens; `2.5/h`: dollars per hour."""
    by_hour = re.fullmatch(r"\s*\$?(\d+(?:\.\d+)?)\s*(?:usd)?\s*/\s*h\s*", text)
    by_token = re.fullmatch(r"\s*\$?(\d+(?:\.\d+)?)\s*,\s*\$?(\d+(?:\.\d+)?)\s*", text)
    if by_hour:
        return Price(usd_per_hour=float(by_hour[1]))
    if by_token:
        return Price(usd_per_million_prompt=float(by_token[1]), usd_per_million_answer=float(by_token[2]))
    raise BadInput(f"--price {text!r} is not understood; write 0.5,1.5 (dollars per million prompt and answer tokens) or 2.5/h")


def may_ask(budget: Budget, spent: Spent, num_in_flight: int) -> bool:
    """Whether one more answer, and those under way, are likely to fit: at the mean price, within the longest time so far."""
    if budget.seconds is not None and spent.seconds + spent.longest_seconds >= budget.seconds:
        return False
    if budget.usd is None:
        return True
    if not spent.num_answers and not num_in_flight:
        return budget.usd > 0  # one answer, to learn what they cost
    each = spent.usd / spent.num_answers if spent.num_answers else spent.expected_usd
    return spent.usd + each * (num_in_flight + 1) <= budget.usd


def left_of(budget: Budget, seconds: float, usd: float) -> Budget:
    """For the next model, when those before took so much."""
    return Budget(
        seconds=None if budget.seconds is None else max(budget.seconds - seconds, 0.0),
        usd=None if budget.usd is None else max(budget.usd - usd, 0.0),
    )
