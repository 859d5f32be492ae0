"""A server's own counters of engine steps, from its Prometheus text. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from windlass.tasks.bench.served.record import EngineSteps

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([0-9.eE+-]+)(?: \d+)?$", re.MULTILINE)
STEPS = ("windlass_engine_steps_total", "vllm:iteration_tokens_total_count")
OUTPUT = ("windlass_generation_tokens_total", "vllm:generation_tokens_total")
PROMPT = ("windlass_prompt_tokens_total", "vllm:prompt_tokens_total")
PREEMPTIONS = ("windlass_num_preemptions_total", "vllm:num_preemptions_total")


def read_counters(text: str) -> dict[str, float]:
    """Those used here; a counter with labels is summed over them."""
    wanted = {*STEPS, *OUTPUT, *PROMPT, *PREEMPTIONS}
    found: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        if name in wanted:
            with suppress(ValueError):
                found[name] = found.get(name, 0.0) + float(value)
    return found


def steps_between(before: Mapping[str, float], after: Mapping[str, float]) -> EngineSteps | None:
    """None where the server does not count steps, or began to count anew because its engine was restarted."""

    def grown(names: tuple[str, ...]) -> int | None:
        name = next((name for name in names if name in before and name in after), None)
        return None if name is None else round(after[name] - before[name])

    steps, output = grown(STEPS), grown(OUTPUT)
    if steps is None or output is None or steps <= 0 or output < 0:
        return None
    return EngineSteps(
        steps=steps, output_tokens=output, prompt_tokens=max(grown(PROMPT) or 0, 0), preemptions=max(grown(PREEMPTIONS) or 0, 0)
    )
