"""What a rule is. Expressions are PromQL; Prometheus and our own evaluation read the same."""

from __future__ import annotations

from typing import Literal

from windlass.core.metrics.serving import FIRST_TOKEN_BUCKETS, TOKEN_BUCKETS
from windlass.core.model import Frozen
from windlass.errors import BadInput

Severity = Literal["page", "ticket"]
"""Wake somebody; look at it in working hours."""
BY = "job, instance"


class Recording(Frozen):
    name: str
    expr: str
    help: str


class Alert(Frozen):
    name: str
    expr: str
    for_seconds: float
    severity: Severity
    summary: str
    """May use Prometheus' `{{ $labels.x }}` and `{{ $value }}`."""
    action: str
    """What to do."""


class Group(Frozen):
    name: str
    recordings: tuple[Recording, ...] = ()
    alerts: tuple[Alert, ...] = ()
    interval_seconds: float = 15.0


class Objectives(Frozen):
    """What counts as good; a latency must be a bound of its histogram."""

    first_token_seconds: float = 2.5
    between_tokens_seconds: float = 0.2
    good_share: float = 0.99
    least_requests_an_hour: int = 100
    """Below it a burn rate is noise."""
    gpu_celsius: float = 85.0
    disk_share_left: float = 0.03
    energy_watts: float = 0.0
    """0: no budget."""

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
