"""How long, and for how much: from what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from windlass.core.model import Frozen

EXAMPLES = (50, 164)
"""A look, and HumanEval."""
PROMPT_TOKENS, ANSWER_TOKENS = 512, 256
"""Of an example whose task is not named."""


class Line(Frozen):
    """seconds = fixed + each * n"""

    fixed: float
    each: float

    def at(self, number: int) -> float:
        return self.fixed + self.each * number


def line_through(small: tuple[int, float], large: tuple[int, float]) -> Line:
    """Two runs of different length: what a start costs, and what each example adds."""
    each = max((large[1] - small[1]) / max(large[0] - small[0], 1), 0.0)
    return Line(fixed=max(small[1] - each * small[0], 0.0), each=each)


class ShortRun(Frozen):
    """An evaluation of a few examples."""

    examples: int
    seconds: float
    """From the command to its end."""
    asking_seconds: float
    """Of them, from the first question to the last answer."""


def line_of_runs(small: ShortRun, large: ShortRun) -> Line:
    """Asking grows with the number of examples. A start does not, and varies more than some examples take: it is taken out first."""
    asking = line_through((small.examples, small.asking_seconds), (large.examples, large.asking_seconds))
    starts = [max(run.seconds - run.asking_seconds, 0.0) for run in (small, large)]
    return Line(fixed=sum(starts) / len(starts) + asking.fixed, each=asking.each)


def example_seconds(
    prefill: float, decode: float, prompt_tokens: int = PROMPT_TOKENS, answer_tokens: int = ANSWER_TOKENS
) -> float:
    """One after another; tokens per second."""
    return (prompt_tokens / prefill if prefill else 0.0) + (answer_tokens / decode if decode else 0.0)


def evaluation_times(line: Line, numbers: Sequence[int], usd_per_hour: float) -> dict[str, Any]:
    return {
        str(number): {"seconds": line.at(number), "usd": line.at(number) / 3600 * usd_per_hour}
        for number in dict.fromkeys([*EXAMPLES, *numbers])
    }


class TrainingTimes(Frozen):
    """Of a short run of the same recipe."""

    start_seconds: float
    """From the command to the first step, and the end."""
    step_seconds: tuple[float, ...]
    checkpoint_seconds: float = 0.0
    validation_seconds: float = 0.0


def training_seconds(times: TrainingTimes, steps: int, checkpoints: int, validations: int) -> float:
    """The first step compiles and allocates, so the median of the others counts."""
    later = times.step_seconds[1:] or times.step_seconds
    each = median(later) if later else 0.0
    first = times.step_seconds[0] if times.step_seconds else 0.0
    return (
        times.start_seconds
        + first
        + each * max(steps - 1, 0)
        + checkpoints * times.checkpoint_seconds
        + validations * times.validation_seconds
    )


def times_from_log(lines: Sequence[Mapping[str, Any]], wall_seconds: float) -> TrainingTimes:
    """`lines`: of a run's log.jsonl."""
    steps = [float(line["seconds"]) for line in lines if "seconds" in line and "loss" in line]
    return TrainingTimes(start_seconds=max(wall_seconds - sum(steps), 0.0), step_seconds=tuple(steps))
