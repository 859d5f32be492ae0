"""How many drafts to verify: as many as raise the expected tokens per second, by measured step times and acceptance. Pure, no torch, no clock.

A draft that follows `depth` others is used if all of them are accepted: rate ** depth is what it adds to a step, in tokens. What it costs is one
more row, by the measured time of steps of so many rows. Where that never pays, nothing is drafted but for a probe now and then, and probes
become rarer while they fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from windlass.core.model import Frozen

SECONDS_WEIGHT, MOST_RISE, LARGE = 0.15, 1.2, 1.5
"""Of a new measurement in the moving average of step times. What counts is the median of the last three steps, so that one which is slow for another
reason (a graph is captured) or seems fast says nothing; it counts as at most 1.2 times the average. Where it is 1.5 times
faster, or all three are so much slower, those before them were wrong."""
RECENT = 3
GUESSED_ROW_COST = 0.2
"""Of a step's time, for a row more, before one was measured."""
LEAST_CHANCE = 0.35
LAST_PROBE = 1536
"""Steps without drafts between probes, at most."""
PLAIN_EVERY = 40
"""With drafts, so often a step without, so that their gain is still known."""


class Acceptance(Frozen):
    """Of drafts whose predecessors were accepted."""

    rate: float
    weight: float
    """So many verdicts that it counts as, beside a new one."""
    memory: float
    """The most of them."""

    def judged(self, drafted: int, accepted: int) -> Acceptance:
        """By drafts that were judged: those accepted, and the first that was not."""
        found = self
        for verdict in (1.0,) * accepted + (0.0,) * (accepted < drafted):
            rate = found.rate + (verdict - found.rate) / (found.weight + 1)
            found = Acceptance(rate=rate, weight=min(found.weight + 1, self.memory), memory=self.memory)
        return found


class Trying(Frozen):
    """How drafts of one kind are tried, where that is left to the engine."""

    prior: Acceptance
    """Before any was verified."""
    sequence_weight: float
    sequence_memory: float
    """Of a sequence's own acceptance, which begins with that of all."""
    least_gain: float
    """Drafts that gain less are left out."""
    first_probe: int
    """Steps without drafts before the first probe."""
    trial: int = 0
    """So many steps have drafts before their gain decides; 0: a probe is one step."""
    passed: int = 0
    """A trial that goes on for so many steps was a success."""
    plain_every: int = PLAIN_EVERY
    """At most: steps with drafts between those without."""


LOOKUP = Trying(
    prior=Acceptance(rate=0.6, weight=16, memory=16),
    sequence_weight=22 / 3,
    sequence_memory=22 / 3,
    least_gain=1.08,
    first_probe=48,
)
"""It may draft in any step, or in none: what is learned counts for little and is soon forgotten."""
FOLLOWING = Trying(
    prior=Acceptance(rate=0.7, weight=24, memory=128), sequence_weight=48, sequence_memory=128, least_gain=1.02, first_probe=192,
    trial=3, passed=64, plain_every=640,
)  # fmt: skip
"""A model, which must have followed a sequence from its beginning: once it is left out, that sequence never has a draft again. So it begins with
confidence, is judged by many drafts, and goes on for a small gain. With a row that costs half a step, a rate of 0.2 is given up after 14
drafts; always drafting gains 7 % at 0.6 and 13 % at 0.7, this 5 % and 13 % (the test of a model that drafts where it pays, 30 seeds). A step
without drafts costs it more than one: the next one is not launched ahead, so there are few of them."""


class StepCosts(Frozen):
    """Moving averages of the seconds of decode steps, by number of rows."""

    seconds: tuple[tuple[int, float], ...] = ()
    recent: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """The last three of each."""

    def with_step(self, rows: int, seconds: float) -> StepCosts:
        known, recent = dict(self.seconds), dict(self.recent)
        last = recent[rows] = (*recent.get(rows, ()), seconds)[-RECENT:]
        usual, before = median_low(last), known.get(rows)
        if before is None or len(last) < RECENT or usual * LARGE < before or min(last) > LARGE * before:
            known[rows] = usual
        else:
            known[rows] = before + SECONDS_WEIGHT * (min(usual, MOST_RISE * before) - before)
        return StepCosts(seconds=tuple(sorted(known.items())), recent=tuple(sorted(recent.items())))

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
    """All that is known of one kind of drafts; `auto` may leave them out."""

    auto: bool = True
    max_drafts: int = 8
    trying: Trying = LOOKUP
    costs: StepCosts = StepCosts()
    acceptance: Acceptance = LOOKUP.prior
    """Over all sequences."""
    idle_steps: int = 0
    """Steps since drafts were verified, though there were some."""
    probe_after: int = LOOKUP.first_probe
    busy_steps: int = 0
    """Steps with drafts since one without."""
    tried: int = 0
    """Steps with drafts since the trial began."""
    plain_every: int = PLAIN_EVERY

    @property
    def is_plain_next(self) -> bool:
        """Whether, after one step more with drafts, there is one without."""
        return self.auto and self.busy_steps + 1 >= self.plain_every

    @property
    def is_due(self) -> bool:
        """Whether drafts were left out for so long that they are tried again."""
        return self.auto and self.idle_steps >= self.probe_after

    @property
    def of_sequence(self) -> Acceptance:
        """Of a sequence without verdicts of its own."""
        weight = min(self.acceptance.weight, self.trying.sequence_weight)
        return Acceptance(rate=self.acceptance.rate, weight=weight, memory=self.trying.sequence_memory)


def new_control(trying: Trying, *, auto: bool, max_drafts: int) -> Control:
    return Control(
        auto=auto, max_drafts=max_drafts, trying=trying, acceptance=trying.prior, probe_after=trying.first_probe
    )  # fmt: skip


def begun(control: Control) -> Control:
    """A trial begins, without prejudice; should it fail too, the next one is later."""
    probe_after = min(2 * control.probe_after, LAST_PROBE)
    return _changed(
        control, acceptance=control.trying.prior, idle_steps=0, busy_steps=0, tried=0, probe_after=probe_after,
        plain_every=PLAIN_EVERY,
    )  # fmt: skip


def is_measuring(control: Control, num_rows: int) -> bool:
    """Whether the next step has no drafts only because the time of such a step is not known, or not any more."""
    return control.auto and (control.busy_steps >= control.plain_every or control.costs.of(num_rows, num_rows) is None)


def counts(control: Control, rates: Sequence[float], num_rows: int, draft_seconds: float = 0.0) -> tuple[int, ...]:
    """Drafts of each sequence with an acceptance `rate`; `num_rows` sequences decode in all. `draft_seconds`: what a draft takes to make."""
    none = (0,) * len(rates)
    if is_measuring(control, num_rows):
        return none
    chosen = _best(control, rates, num_rows, draft_seconds)
    if any(chosen):
        return chosen
    if control.auto and not (control.tried < control.trying.trial or (control.is_due and not control.trying.trial)):
        return none
    return (min(2 if control.auto else 1, control.max_drafts),) * len(rates)


def _best(control: Control, rates: Sequence[float], num_rows: int, draft_seconds: float) -> tuple[int, ...]:
    """Rows are added in order of what they bring, up to the most tokens per second."""
    plain = control.costs.of(num_rows, num_rows)
    if plain is None:
        return tuple(_likely(rate, control.max_drafts) for rate in rates)
    offers = sorted(
        ((rate**depth, place) for place, rate in enumerate(rates) for depth in range(1, control.max_drafts + 1)), reverse=True
    )
    tokens, best, taken, length = float(num_rows), num_rows / plain * control.trying.least_gain, 0, 0
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


def as_ahead(seconds: float, waiting: float) -> float:
    """Of a step that was not launched ahead, as if it had been: `waiting` is what that takes more."""
    return max(seconds - waiting, seconds / 4)


def after_step(
    control: Control, *, rows: int, sequences: int, seconds: float, drafted: int, accepted: int, offered: bool
) -> Control:
    """A decode step took `seconds`. `drafted`: drafts verified; `offered`: whether there were any that were left out."""
    control = _changed(control, costs=control.costs.with_step(rows, seconds))
    if not drafted:
        rarer = control.busy_steps >= control.plain_every
        plain_every = min(2 * control.plain_every, control.trying.plain_every) if rarer else control.plain_every
        return _changed(control, idle_steps=control.idle_steps + offered, busy_steps=0, plain_every=plain_every)
    tried = control.tried + 1
    if control.trying.trial:
        probe = control.trying.first_probe if tried >= control.trying.passed else control.probe_after
    else:
        probe = _after_probe(control, sequences, seconds, accepted)
    return _changed(control, idle_steps=0, busy_steps=control.busy_steps + 1, tried=tried, probe_after=probe)


def _after_probe(control: Control, sequences: int, seconds: float, accepted: int) -> int:
    """Where a step is a probe: steps until the next one."""
    plain = control.costs.of(sequences, sequences)
    paid = plain is None or (sequences + accepted) / seconds > sequences / plain
    return control.trying.first_probe if paid else min(control.probe_after * (2 if control.idle_steps else 1), LAST_PROBE)


def _changed(control: Control, **changes: object) -> Control:
    from msgspec.structs import replace

    return replace(control, **changes)
