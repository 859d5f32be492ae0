"""What a rule is: a condition with a name. Prometheus gets it as PromQL, our own evaluation computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from windlass.core.metrics.serving import FIRST_TOKEN_BUCKETS, TOKEN_BUCKETS
from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.observe.conditions.condition import Condition, Lasting, Operand

Severity = Literal["page", "ticket"]
"""Wake somebody; look at it in working hours."""
BY = ("job", "instance")


@dataclass(frozen=True)
class Recording:
    name: str
    condition: Operand
    help: str


@dataclass(frozen=True)
class Alert:
    name: str
    condition: Condition
    for_seconds: float
    severity: Severity
    summary: str
    """May use Prometheus' `{{ $labels.x }}` and `{{ $value }}`."""
    action: str
    """What to do."""


@dataclass(frozen=True)
class Group:
    name: str
    recordings: tuple[Recording, ...] = ()
    alerts: tuple[Alert, ...] = ()
    interval_seconds: float = 15.0


def page(name: str, condition: Condition | Lasting, summary: str, action: str) -> Alert:
    return _alert(name, condition, "page", summary, action)


def ticket(name: str, condition: Condition | Lasting, summary: str, action: str) -> Alert:
    return _alert(name, condition, "ticket", summary, action)


def _alert(name: str, condition: Condition | Lasting, severity: Severity, summary: str, action: str) -> Alert:
    held, seconds = condition if isinstance(condition, Lasting) else (condition, 0.0)
    return Alert(name, held, seconds, severity, summary, action)


class Objectives(Frozen):
    """What counts as good; a latency must be a bound of its histogram."""

    first_token_seconds: float = 2.5
    between_tokens_seconds: float = 0.2
    good_share: float = 0.99
    least_requests_an_hour: int = 100
    """Below it a burn rate is noise."""
    gpu_celsius: float = 85.0
    disk_share_left: float = 0.03

    def __post_init__(self) -> None:
        for name, bounds in (("first_token_seconds", FIRST_TOKEN_BUCKETS), ("between_tokens_seconds", TOKEN_BUCKETS)):
            if getattr(self, name) not in bounds:
                raise BadInput(f"{name} is {getattr(self, name):g}; choose a bound of the histogram: {_listed(bounds)}")
        if not 0.5 <= self.good_share < 1:
            raise BadInput(f"good_share is {self.good_share:g}; it should be at least 0.5 and below 1, such as 0.99")


def _listed(bounds: tuple[float, ...]) -> str:
    return ", ".join(f"{bound:g}" for bound in bounds)


def bound_text(seconds: float) -> str:
    """As the label `le` spells it: 1 -> `1.0`."""
    return repr(float(seconds))
