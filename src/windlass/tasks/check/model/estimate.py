"""How long, and for how much: from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import fmean, median, stdev, variance
from typing import Any

from windlass.core.model import Frozen

EXAMPLES = (50, 164)
"""A look, and HumanEval."""
PROMPT_TOKENS, ANSWER_TOKENS = 512, 256
"""Of an example whose task is not named."""
STEADY = 0.06
"""A machine that is left alone still differs by so much, as a share, from one minute to the next (two cores of a shared host)."""
WIDTH = 1.64
"""Of standard deviations for 80 % of the runs: Student's t for the three or four measurements that there are."""
NOTICED = 0.05
"""Of the CPUs: other programs that use more are mentioned beside an estimate."""
ONE_OFF = 3.0
"""A step that took longer than so many medians compiled or allocated something; it is counted once and not as the usual step."""


class Seconds(Frozen):
    """What something takes, and between what it lies in eight of ten runs."""

    seconds: float
    low: float
    high: float

    def as_json(self, usd_per_hour: float) -> dict[str, Any]:
        return {"seconds": self.seconds, "low": self.low, "high": self.high, "usd": self.seconds / 3600 * usd_per_hour}


def around(seconds: float, deviation: float) -> Seconds:
    """`deviation`: as a share. Times have no upper bound, so it is a factor."""
    factor = exp(WIDTH * deviation)
    return Seconds(seconds=seconds, low=seconds / factor, high=seconds * factor)


def drift(values: Sequence[float]) -> float:
    """How much the machine's speed changes, as a share, by the same thing measured some seconds apart."""
    logarithms = [log(value) for value in values if value > 0]
    return sqrt(STEADY**2 + variance(logarithms)) if len(logarithms) > 1 else 2 * STEADY


def of_others(share: float) -> str:
    """For the line below an estimate."""
    return f"; other programs used {share:.0%} of the CPUs meanwhile" if share > NOTICED else ""


# --- an evaluation


class Answer(Frozen):
    end_seconds: float
    """Since the first question was asked."""
    seconds: float
    """From question to answer."""
    work: float
    """What it would take alone; only ratios count."""


class Rehearsal(Frozen):
    """A short evaluation of the same kind."""

    seconds: float
    """From the command to its end."""
    answers: tuple[Answer, ...]

    @property
    def asking_seconds(self) -> float:
        return max((answer.end_seconds for answer in self.answers), default=0.0)

    @property
    def start_seconds(self) -> float:
        """Imports, the load, the report: what does not grow with the number of examples."""
        return max(self.seconds - self.asking_seconds, 0.0)


ROUNDING = 0.02
"""Of an answer's time: a place is taken again in the moment in which it becomes free, and clocks are rounded."""


def num_at_once(answers: Sequence[Answer]) -> int:
    """The largest number that were under way together."""
    begins = [(answer.end_seconds - (1 - ROUNDING) * answer.seconds, 1) for answer in answers]
    changes = sorted(begins + [(answer.end_seconds, -1) for answer in answers])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def slowdown(answers: Sequence[Answer]) -> float:
    """Seconds per unit of work while as many as possible are under way.

    When the last question is asked, `at once` answers are missing: those come faster and faster, and say nothing of a longer run."""
    ordered = sorted(answers, key=lambda answer: answer.end_seconds)
    full = ordered[: len(ordered) - num_at_once(ordered)] or ordered
    work = sum(answer.work for answer in full)
    return sum(answer.seconds for answer in full) / work if work else 0.0


def example_time(answers: Sequence[Answer]) -> float:
    """Seconds that one more example adds. The mean work is that of all answers: those that came early are the short ones."""
    return slowdown(answers) * fmean(answer.work for answer in answers) / max(num_at_once(answers), 1)


def evaluation_seconds(rehearsals: Sequence[Rehearsal], number: int, others: float = 0.0) -> Seconds:
    """By the longest rehearsal, and what more (or fewer) examples than it had add; starts are averaged.

    `others`: the share of the CPUs that other programs used meanwhile. They may end, or go on, or come back."""
    longest = max(rehearsals, key=lambda one: len(one.answers))
    answers, asked = longest.answers, len(longest.answers)
    each = example_time(answers)
    asking = max(longest.asking_seconds + (number - asked) * each, each * number)
    starts = [one.start_seconds for one in rehearsals]
    total = fmean(starts) + asking
    unseen = max(number - asked, 0)  # their lengths are drawn anew, and the mean of those seen is itself uncertain
    lengths = _spread([answer.work for answer in answers]) * sqrt(unseen + unseen**2 / asked) * each
    speeds = fmean(starts) * drift(starts) + asking * drift([slowdown(one.answers) for one in rehearsals])
    return around(total, sqrt((speeds**2 + lengths**2) / total**2 + others**2))


def _spread(values: Sequence[float]) -> float:
    """Standard deviation as a share of the mean; of few values nothing is known, and 1 is that of an exponential."""
    return stdev(values) / fmean(values) if len(values) > 2 and fmean(values) > 0 else 1.0


def one_after_another(
    load_seconds: float,
    prefill: float,
    decode: float,
    number: int,
    prompt_tokens: int = PROMPT_TOKENS,
    answer_tokens: int = ANSWER_TOKENS,
) -> Seconds:
    """Without a task: `prefill` and `decode` in tokens per second. Lengths are assumed, so the interval is that of the speed alone."""
    each = (prompt_tokens / prefill if prefill else 0.0) + (answer_tokens / decode if decode else 0.0)
    return around(load_seconds + number * each, 2 * STEADY)


# --- a training run


class TrainingTimes(Frozen):
    """Of a short run of the same recipe."""

    start_seconds: float
    """From the command to the first step, and the end. 0: not known, as of a run that was killed."""
    step_seconds: tuple[float, ...]
    checkpoint_seconds: tuple[float, ...] = ()
    validation_seconds: tuple[float, ...] = ()

    @property
    def usual_step(self) -> float:
        """The mean, which is what adds up; without the first, which compiles and allocates, and others that did."""
        later = self.step_seconds[1:] or self.step_seconds
        if not later:
            return 0.0
        return fmean(step for step in later if step <= ONE_OFF * median(later))


class Schedule(Frozen):
    """Of the whole run: how many steps, and how often it stops to save and to validate."""

    steps: int
    save_steps: int | None = None
    save_seconds: float | None = None
    validation_steps: int | None = None


def training_seconds(runs: Sequence[TrainingTimes], schedule: Schedule, others: float = 0.0) -> Seconds:
    """Steps are averaged by run, so that each look at the machine counts the same. `others`: as of an evaluation."""
    each = fmean(run.usual_step for run in runs if run.step_seconds)
    starts = [run.start_seconds for run in runs if run.start_seconds]
    first = max(fmean(run.step_seconds[0] for run in runs if run.step_seconds) - each, 0.0)
    steps = each * schedule.steps
    start, rest = fmean(starts or [0.0]), first + steps + _pauses(runs, schedule, steps)
    speeds = start * drift(starts) + rest * drift([run.usual_step for run in runs])
    return around(start + rest, sqrt((speeds / (start + rest)) ** 2 + others**2))


def _pauses(runs: Sequence[TrainingTimes], schedule: Schedule, seconds: float) -> float:
    """For checkpoints and validations. Those after the last step are part of every run's end, and so of what a start costs."""
    save = fmean([time for run in runs for time in run.checkpoint_seconds] or [0.0])
    validation = fmean([time for run in runs for time in run.validation_seconds] or [0.0])
    saves = _times(schedule, schedule.save_steps) + (seconds / schedule.save_seconds if schedule.save_seconds else 0)
    return saves * save + _times(schedule, schedule.validation_steps) * validation


def _times(schedule: Schedule, interval: int | None) -> int:
    return max(schedule.steps - 1, 0) // interval if interval else 0
