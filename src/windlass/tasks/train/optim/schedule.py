"""Learning-rate schedules. Pure."""

from __future__ import annotations

from math import cos, pi

from windlass.core.recipe.sections import ScheduleSection

DECAY_FRACTION = 0.1
"""Default fraction of steps for the final decay of `wsd` (arXiv 2404.06395, 4.3: a tenth is enough)."""


def lr_factor(section: ScheduleSection, step: int, num_steps: int) -> float:
    """Factor on the peak learning rate in step `step`, from 0; the first warmup step is above 0."""
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    return max(_after(section, step, num_steps), 0.0)


def _after(section: ScheduleSection, step: int, num_steps: int) -> float:
    if section.name == "constant":
        return 1.0
    first = section.warmup_steps
    if section.name == "wsd":
        first = max(first, num_steps - 1 - (section.decay_steps or max(round(DECAY_FRACTION * num_steps), 1)))
    gone = min(max((step - first) / max(num_steps - 1 - first, 1), 0.0), 1.0)
    left = (1 + cos(pi * gone)) / 2 if section.name == "cosine" else 1 - gone
    return section.final + (1 - section.final) * left
