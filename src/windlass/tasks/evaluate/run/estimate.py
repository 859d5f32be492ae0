"""What a run will take, before it starts and from its first answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.core.hardware.energy import co2_kg, energy_kwh, grid
from windlass.core.model import Frozen
from windlass.tasks.evaluate.run.budget import Price
from windlass.tasks.evaluate.run.items import Item
from windlass.tasks.evaluate.tasks.task import Task

CHARACTERS_PER_TOKEN = 4.0
"""Of English, in vocabularies of 30 to 200 thousand tokens; only until answers say how many there are."""
BYTES_PER_ANSWER = 1_500
"""Of journal and page, beside the texts themselves."""


class Speed(Frozen):
    """Predicted by a plan; zeros: unknown."""

    prompt_tokens_per_second: float = 0.0
    answer_tokens_per_second: float = 0.0
    watts: float | None = None
    usd_per_hour: float = 0.0
    memory_bytes: int = 0
    source: str = ""


class Estimate(Frozen):
    num_requests: int
    prompt_tokens: int
    answer_tokens: int
    disk_bytes: int
    seconds: float | None
    joules: float | None
    kg_co2: float | None
    usd: float | None
    memory_bytes: int
    source: str


def estimate(items: Sequence[Item], tasks: dict[str, Task], speed: Speed, price: Price, region: str = "world") -> Estimate:
    characters = sum(len(item.question.text) for item in items)
    prompt = round(characters / CHARACTERS_PER_TOKEN)
    answer = sum(tasks[item.question.task].typical_tokens for item in items)
    seconds = _seconds(prompt, answer, speed)
    joules = None if seconds is None or speed.watts is None else seconds * speed.watts
    kwh = None if joules is None else energy_kwh(1.0, joules / 3600)
    return Estimate(
        num_requests=len(items),
        prompt_tokens=prompt,
        answer_tokens=answer,
        disk_bytes=round(2 * (characters + answer * CHARACTERS_PER_TOKEN) + BYTES_PER_ANSWER * len(items)),
        seconds=seconds,
        joules=joules,
        kg_co2=None if kwh is None else co2_kg(kwh, grid(region).grams_per_kwh),
        usd=price.usd(prompt, answer, seconds or 0.0)
        if price.is_known and (seconds is not None or not price.usd_per_hour)
        else None,
        memory_bytes=speed.memory_bytes,
        source=speed.source,
    )


def _seconds(prompt: int, answer: int, speed: Speed) -> float | None:
    if not speed.prompt_tokens_per_second or not speed.answer_tokens_per_second:
        return None
    return prompt / speed.prompt_tokens_per_second + answer / speed.answer_tokens_per_second
