"""Plans put right by runs and limits of this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from windlass.core.hardware.measured import MeasuredLimits, MeasuredRun
from windlass.core.hardware.parse import parse_hardware
from windlass.core.plan import Plan
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.measured import with_limits
from windlass.tasks.plan.inference.search.request import PlanRequest

pytestmark = pytest.mark.pure

RUN = MeasuredRun(
    machine="here", model="Llama-3.1-8B", engine="windlass", scheme="int4", batch=1, prompt_tokens=128, new_tokens=128,
    decode_tokens_per_second=9.0, prefill_tokens_per_second=40.0, date="2026-11-16",
)  # fmt: skip


def plan(*runs: MeasuredRun, **changes: Any) -> Plan:
    known = find("Llama-3.1-8B")
    assert known is not None
    spec = spec_of(known)
    asked = PlanRequest(
        spec=spec, rules=rules(spec), hardware=parse_hardware("cpu:8,ram=32GB"), context_tokens=256, quant="int4", prompt_tokens=128,
        new_tokens=128, measured=runs,
    )  # fmt: skip
    return make_plan(replace(asked, **changes))


def test_the_same_work_is_predicted_as_it_was_measured() -> None:
    made = plan(RUN)
    assert made.speed is not None and made.speed.decode_tokens_per_second == pytest.approx(9.0, rel=0.01)
    assert made.speed.prefill_tokens_per_second == pytest.approx(40.0, rel=0.01)
    assert made.speed.decode_range[0] < 9.0 < made.speed.decode_range[1]
    assert made.speed.basis == "measured on this machine"
    assert [reason.choice for reason in made.reasons if "2026-11-16" in reason.why] == ["measured here"]


@pytest.mark.parametrize("change", [{"model": "Qwen3-8B"}, {"engine": "vllm"}, {"scheme": "int8"}])
def test_other_work_is_not_touched(change: dict[str, str]) -> None:
    assert plan(msgspec.structs.replace(RUN, **change)).speed == plan().speed


def test_a_far_batch_or_an_absurd_figure_says_nothing() -> None:
    assert plan(msgspec.structs.replace(RUN, batch=64)).speed == plan().speed
    assert plan(msgspec.structs.replace(RUN, decode_tokens_per_second=9000.0)).speed == plan().speed


def test_limits_replace_the_catalogs_figures() -> None:
    limits = MeasuredLimits(
        read_bytes_per_second=10e9,
        matmul_flops=1e11,
        date="2026-11-16",
        disk_bytes_per_second=1e9,
        host_read_bytes_per_second=10e9,
    )
    found = with_limits(parse_hardware("cpu:8,ram=32GB"), limits)
    (device,) = found.devices
    assert (device.measured_bandwidth, device.matmul_flops("bf16")) == (10e9, 1e11)
    assert (found.nodes[0].disk_bandwidth, found.nodes[0].ram_bandwidth) == (1e9, 10e9)
    slow, usual = plan(hardware=found).speed, plan().speed
    assert slow is not None and usual is not None and slow.decode_tokens_per_second < usual.decode_tokens_per_second / 2
