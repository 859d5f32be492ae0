"""How many drafts to verify: as many as raise the expected tokens per second, by measured step times and acceptance. Pure, no torch, no clock.

A draft that follows `depth` others is used if all of them are accepted: rate ** depth is what it adds to a step, in tokens. What it costs is one
more row, by the measured time of steps of so many rows. Where that never pays, nothing is drafted but for a probe now and then, and probes
become rarer while they fail.
"""

from __future__ import annotations

from collections.abc import Sequence

from windlass.core.model import Frozen

PRIOR_RATE = 0.6
"""Acceptance of a draft before any was verified."""
RATE_WEIGHT, SECONDS_WEIGHT = 0.12, 0.15
"""Of a new measurement in the moving averages."""
GUESSED_ROW_COST = 0.2
"""Of a step's time, for a row more, before one was measured."""
LEAST_GAIN = 1.08
"""Drafts that gain less are left out."""
LEAST_CHANCE = 0.35
FIRST_PROBE, LAST_PROBE = 48, 1536
"""Steps without drafts between probes: at first, and at most."""
PLAIN_EVERY = 40
"""With drafts, so often a step without, so that their gain is still known."""


class StepCosts(Frozen):
    """Moving averages of the seconds of decode steps, by number of rows."""

    seconds: tuple[tuple[int, float], ...] = ()

    def with_step(self, rows: int, seconds: float) -> StepCosts:
        known = dict(self.seconds)
        before = known.get(rows)
        known[rows] = seconds if before is None else before + SECONDS_WEIGHT * (min(seconds, 3 * before) - before)
        return StepCosts(seconds=tuple(sorted(known.items())))

    def of(self, rows: int, num_sequences: int) -> float | None:
        """Interpolated; beyond what was measured, a row costs as much as the ones before. None: steps without drafts were not measured."""
        known = dict(self.seconds)
        plain = known.get(num_sequences)
        if plain is None or rows == num_sequences:
            return plain
        above = [(count, max(seconds, plain)) for count, seconds in self.seconds if count > num_sequences]
        if not above:
            return plain * (1 + GUESSED_ROW_COST * (rows - num_sequences) / num_sequences)
        left = (num_sequences, plain)
        for right in above:
            if rows <= right[0]:
                break
            left = right
        else:
            left, right = (num_sequences, plain), above[-1]
        slope = (right[1] - left[1]) / (right[0] - left[0])
        return left[1] + slope * (rows - left[0])


class Control(Frozen):
    """All that is known; `auto` may leave drafts out."""

    auto: bool = True
    max_drafts: int = 8
    costs: StepCosts = StepCosts()
    rate: float = PRIOR_RATE
    """Of drafts whose predecessors were accepted: over all sequences."""
    idle_steps: int = 0
    """Steps since drafts were verified, though there were some."""
    probe_after: int = FIRST_PROBE
    busy_steps: int = 0
    """Steps with drafts since one without."""
    is_probing: bool = False

    @property
    def is_plain_next(self) -> bool:
        """Whether, after one step more with drafts, there is one without."""
        return self.auto and self.busy_steps + 1 >= PLAIN_EVERY


def counts(control: Control, rates: Sequence[float], num_rows: int, draft_seconds: float = 0.0) -> tuple[int, ...]:
    """Drafts of each sequence with an acceptance `rate`; `num_rows` sequences decode in all. `draft_seconds`: what a draft takes to make."""
    if control.busy_steps >= PLAIN_EVERY and control.auto:
        return (0,) * len(rates)
    chosen = _best(control, rates, num_rows, draft_seconds)
    if any(chosen) or (control.auto and control.idle_steps < control.probe_after):
        return chosen
    return (min(2 if control.auto else 1, control.max_drafts),) * len(rates)


def _best(control: Control, rates: Sequence[float], num_rows: int, draft_seconds: float) -> tuple[int, ...]:
    """Rows are added in order of what they bring, up to the most tokens per second."""
    plain = control.costs.of(num_rows, num_rows)
    if plain is None:
        return (0,) * len(rates) if control.auto else tuple(_likely(rate, control.max_drafts) for rate in rates)
    offers = sorted(
        ((rate**depth, place) for place, rate in enumerate(rates) for depth in range(1, control.max_drafts + 1)), reverse=True
    )
    tokens, best, taken, length = float(num_rows), num_rows / plain * LEAST_GAIN, 0, 0
    for number, (gain, _) in enumerate(offers, 1):
        tokens += gain
        seconds = control.costs.of(num_rows + number, num_rows)
        assert seconds is not None
        length = max(length, -(-number // len(rates)))
        if tokens / (seconds + draft_seconds * length) > best:
            best, taken = tokens / (seconds + draft_seconds * length), number
    chosen = [0] * len(rates)
    for _, place in offers[:taken]:
        chosen[place] += 1
    return tuple(chosen)


def _likely(rate: float, most: int) -> int:
    """Where nothing is known of costs: drafts that are used more often than LEAST_CHANCE."""
    return max(1, sum(1 for depth in range(1, most + 1) if rate**depth >= LEAST_CHANCE))


def after_step(
    control: Control, *, rows: int, sequences: int, seconds: float, drafted: int, accepted: int, offered: bool
) -> Control:
    """A decode step took `seconds`. `drafted`: drafts verified; `offered`: whether there were any to verify."""
    costs = control.costs.with_step(rows, seconds)
    if not drafted:
        idle = control.idle_steps + 1 if offered else control.idle_steps
        return _changed(control, costs=costs, idle_steps=idle, busy_steps=0)
    plain = costs.of(sequences, sequences)
    paid = plain is None or (sequences + accepted) / seconds > sequences / plain
    probe = FIRST_PROBE if paid else min(control.probe_after * (2 if control.idle_steps else 1), LAST_PROBE)
    return _changed(control, costs=costs, idle_steps=0, busy_steps=control.busy_steps + 1, probe_after=probe)


def with_verdict(rate: float, drafted: int, accepted: int) -> float:
    """A moving average over drafts that were judged: those accepted, and the first that was not."""
    for _ in range(accepted):
        rate += RATE_WEIGHT * (1 - rate)
    return rate if accepted == drafted else rate - RATE_WEIGHT * rate


def _changed(control: Control, **changes: object) -> Control:
    from msgspec.structs import replace

    return replace(control, **changes)
