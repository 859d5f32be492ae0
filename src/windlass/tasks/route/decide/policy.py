"""Which model answers: predictions, prices, latencies and what is loaded -> a decision with its reason. Pure, so logs can be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.route.decide.path import ALWAYS_BEST, ALWAYS_CHEAPEST
from windlass.tasks.route.decide.router_file import PathPoint

PolicyName = Literal["floor", "best", "cheap", "budget", "latency", "co2"]
SECONDS_A_MONTH = 30 * 86400.0


class Policy(Frozen):
    """`floor`: the cheapest that keeps the calibrated floor; `co2`: the same, by grams; `best`: the best chance; `cheap`: the cheapest;
    `budget`: the best mix that the money allows; `latency`: the best chance among those that are fast enough."""

    kind: PolicyName = "floor"
    usd_per_request: float | None = None
    usd_per_month: float | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.kind == "budget" and self.usd_per_request is None and self.usd_per_month is None:
            raise BadInput("policy budget needs usd_per_request or usd_per_month")
        if self.kind == "latency" and self.max_seconds is None:
            raise BadInput("policy latency needs max_seconds")


class Candidate(Frozen):
    """A model as it is now."""

    name: str
    chance: float
    cost: float
    """Of one answer, in the unit of the router's path."""
    seconds: float = 0.0
    """Expected time of an answer."""
    grams: float = 0.0
    """CO2 of an answer."""
    is_available: bool = True
    """Its breaker is closed."""
    is_loaded: bool = True
    load_seconds: float = 0.0
    load_cost: float = 0.0
    load_grams: float = 0.0
    """Of swapping it in, already divided by the answers that share the swap."""


class Situation(Frozen):
    """Everything a decision depends on. It is what the log keeps."""

    candidates: tuple[Candidate, ...]
    """Cheapest first, as in the router."""
    best: int
    """The best single model."""
    tolerance: float
    policy: Policy
    is_unlike: bool = False
    allowed_cost: float | None = None
    """Of one request, where there is a budget."""


class Decision(Frozen):
    model: str
    reason: str
    then: tuple[str, ...] = ()
    """Whom to ask if it fails, in this order."""
    is_abstained: bool = False


def decide(situation: Situation) -> Decision:
    candidates = situation.candidates
    available = [place for place, one in enumerate(candidates) if one.is_available] or list(range(len(candidates)))
    chosen, reason = _choose(situation, available)
    rest = sorted(
        (place for place in range(len(candidates)) if place != chosen), key=lambda place: _fallback_order(situation, place)
    )
    return Decision(
        model=candidates[chosen].name,
        reason=reason,
        then=tuple(candidates[place].name for place in rest),
        is_abstained=situation.is_unlike and situation.policy.kind not in ("cheap",),
    )


def _fallback_order(situation: Situation, place: int) -> tuple[bool, float, int]:
    """Those that answer first, then the best chance."""
    one = situation.candidates[place]
    return not one.is_available, -one.chance, place


def _choose(situation: Situation, available: Sequence[int]) -> tuple[int, str]:
    policy, candidates = situation.policy, situation.candidates
    if policy.kind == "cheap":
        place = min(available, key=lambda one: (_cost(candidates[one], "cost"), one))
        return place, "cheapest"
    if situation.is_unlike:
        place = situation.best if situation.best in available else max(available, key=lambda one: candidates[one].chance)
        return place, "prompt unlike the data, so the best single model"
    if policy.kind == "latency":
        return _fast_enough(situation, available)
    by = "grams" if policy.kind == "co2" else "cost"
    return _within(situation, available, by)


def _cost(one: Candidate, by: Literal["cost", "grams"]) -> float:
    """With what swapping it in costs."""
    extra = 0.0 if one.is_loaded else (one.load_cost if by == "cost" else one.load_grams)
    return getattr(one, by) + extra


def _within(situation: Situation, available: Sequence[int], by: Literal["cost", "grams"]) -> tuple[int, str]:
    """The cheapest whose chance is within the tolerance of the best one's (`decide/path.py`, for one prompt)."""
    tolerance, candidates = situation.tolerance, situation.candidates
    if tolerance <= ALWAYS_BEST and situation.best in available:
        return situation.best, "always the best single model: nothing cheaper was shown to keep the floor"
    bonus = max(-tolerance, 0.0)
    chances = {place: candidates[place].chance + (bonus if place == situation.best else 0.0) for place in available}
    top = max(chances.values())
    enough = [place for place in available if top - chances[place] <= max(tolerance, 0.0)]
    chosen = min(enough, key=lambda place: (_cost(candidates[place], by), place))
    likeliest = max(available, key=lambda place: candidates[place].chance)
    shown = f"chance {min(max(candidates[chosen].chance, 0.0), 1.0):.2f}"
    if chosen == likeliest:
        return chosen, f"{shown}, the best"
    behind = candidates[likeliest].chance - candidates[chosen].chance
    return chosen, f"{shown}, {behind:.2f} below {candidates[likeliest].name}, tolerance {tolerance:.2f}"


def _fast_enough(situation: Situation, available: Sequence[int]) -> tuple[int, str]:
    candidates, limit = situation.candidates, situation.policy.max_seconds or 0.0

    def seconds(place: int) -> float:
        one = candidates[place]
        return one.seconds + (0.0 if one.is_loaded else one.load_seconds)

    fast = [place for place in available if seconds(place) <= limit]
    if not fast:
        place = min(available, key=seconds)
        return place, f"none answers within {limit:g} s; the fastest takes about {seconds(place):.2g} s"
    place = max(fast, key=lambda one: (candidates[one].chance, -seconds(one)))
    return place, f"best chance of those within {limit:g} s"


# --- which tolerance -------------------------------------------------------------------------------------------------


def tolerance_for(policy: Policy, calibrated: float, path: Sequence[PathPoint], allowed_cost: float | None) -> float:
    """Of a budget: the mix with the best held-out score that it pays for."""
    if policy.kind == "best":
        return max(path, key=lambda point: (point.score, -point.cost)).tolerance if path else 0.0
    if policy.kind == "cheap":
        return ALWAYS_CHEAPEST
    if policy.kind != "budget" or allowed_cost is None:
        return calibrated
    paid = [point for point in path if point.cost <= allowed_cost]
    return max(paid, key=lambda point: (point.score, -point.cost)).tolerance if paid else ALWAYS_CHEAPEST


def allowed_cost(policy: Policy, spent: float, num_requests: int, elapsed_seconds: float) -> float | None:
    """Of the next request. A month's budget is spread over the requests that are still to be expected, at the rate so far."""
    allowed = policy.usd_per_request
    if policy.usd_per_month is not None:
        left = max(policy.usd_per_month - spent, 0.0)
        elapsed = max(elapsed_seconds, 3600.0)  # the first minutes say little about a month
        expected = max(num_requests, 1) / elapsed * max(SECONDS_A_MONTH - elapsed_seconds, 1.0)
        monthly = left / max(expected, 1.0)
        allowed = monthly if allowed is None else min(allowed, monthly)
    return allowed
