"""How the learning rate goes from step to step. Pure."""

from __future__ import annotations

from math import cos, pi

from windlass.core.recipe.sections import ScheduleSection

DECAY_PART = 0.1
"""Of all steps go down at the end of `wsd`, where a recipe does not say (arXiv 2404.06395, 4.3: a tenth is enough)."""


def rate(section: ScheduleSection, step: int, num_steps: int) -> float:
    """What the highest rate is multiplied with in step number `step`, from 0; the first of a warm-up is above nought already."""
    if step < section.warmup_steps:
        return (step + 1) / section.warmup_steps
    return max(_after(section, step, num_steps), 0.0)


def _after(section: ScheduleSection, step: int, num_steps: int) -> float:
    if section.name == "constant":
        return 1.0
    first = section.warmup_steps
    if section.name == "wsd":
        first = max(first, num_steps - 1 - (section.decay_steps or max(round(DECAY_PART * num_steps), 1)))
    gone = min(max((step - first) / max(num_steps - 1 - first, 1), 0.0), 1.0)
    left = (1 + cos(pi * gone)) / 2 if section.name == "cosine" else 1 - gone
    return section.final + (1 - section.final) * left
