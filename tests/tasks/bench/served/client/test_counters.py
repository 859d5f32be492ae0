"""Engine steps from the counters of our server and of vLLM."""

from __future__ import annotations

import pytest

from windlass.tasks.bench.served.client.counters import read_counters, steps_between
from windlass.tasks.bench.served.record import EngineSteps

pytestmark = pytest.mark.pure

OURS = """# HELP windlass_engine_steps_total Engine steps.
windlass_engine_steps_total {steps}
windlass_generation_tokens_total {output}
windlass_prompt_tokens_total 1e+03
windlass_num_preemptions_total 0.0
"""
VLLM = """vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {steps}
vllm:iteration_tokens_total_bucket{{engine="0",le="1.0",model_name="m"}} 7.0
vllm:generation_tokens_total{{engine="0",model_name="m"}} {output}
vllm:generation_tokens_total{{engine="1",model_name="m"}} 5.0
"""


@pytest.mark.parametrize("page", [OURS, VLLM])
def test_steps(page: str) -> None:
    before, after = read_counters(page.format(steps=10.0, output=100.0)), read_counters(page.format(steps=30.0, output=900.0))
    found = steps_between(before, after)
    assert found == EngineSteps(steps=20, output_tokens=800) and found.output_tokens_per_step == 40


def test_without_steps() -> None:
    page = read_counters(OURS.format(steps=10, output=100))
    assert steps_between({}, page) is None and steps_between(page, {}) is None
    assert steps_between(page, page) is None, "no step was made"
    assert steps_between(page, read_counters(OURS.format(steps=2, output=100))) is None, "a new engine counts from zero"
    assert read_counters("<html>") == {}
