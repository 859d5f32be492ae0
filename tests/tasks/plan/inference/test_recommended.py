"""What is recommended where several answers fit: found by reading the sixty questions of docs/reference/plan-questions.md."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.core.plan import Plan
from windlass.open.resolve import describe_model
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.search.request import LoadRequest, PlanRequest

pytestmark = pytest.mark.pure


def planned(model: str, on: str, **changes: Any) -> Plan:
    found = describe_model(model)
    given: dict[str, Any] = {"context_tokens": 8192, **changes}
    return make_plan(PlanRequest(spec=found.spec, rules=found.rules, hardware=parse_hardware(on), **given))


def reason(plan: Plan, choice: str) -> str:
    return next(one.why for one in plan.reasons if one.choice == choice)


def test_one_user_of_a_gaming_card_gets_the_quickest_engine() -> None:
    plan = planned("gpt-oss-20b", "1xRTX-4080")
    other = planned("gpt-oss-20b", "1xRTX-4080", engine="vllm")
    assert plan.engine == "llama.cpp" and plan.speed is not None and other.speed is not None
    assert plan.speed.decode_tokens_per_second > 1.3 * other.speed.decode_tokens_per_second
    assert "fastest" in reason(plan, "engine")


def test_many_users_of_it_get_a_server() -> None:
    assert planned("gpt-oss-20b", "1xRTX-4090", concurrency=64, context_tokens=2048).engine == "vllm"


def test_output_counts_more_than_the_last_bit() -> None:
    many = planned("Llama-3.3-70B-Instruct", "2xH100", goal="throughput", context_tokens=4096)
    assert many.scheme.name == "fp8"
    assert planned("Llama-3.3-70B-Instruct", "2xA100", goal="throughput", context_tokens=4096).scheme.name != "fp8"
    assert planned("Llama-3.3-70B-Instruct", "2xH200").scheme.name == "bf16"


def test_no_fewer_bits_for_the_last_of_many_sequences() -> None:
    plan = planned("GLM-4.6", "4xH200", concurrency=32, context_tokens=16384)
    assert plan.scheme.name == "fp8" and plan.workload.concurrency == 32
    assert "not all fit at full length" in reason(plan, "concurrency")
    strict = planned("GLM-4.6", "4xH200", concurrency=32, context_tokens=16384, waits=False)
    assert strict.scheme.bits < 8


def test_offload_is_recommended_where_it_runs_today() -> None:
    assert planned("GLM-4.6", "1xH100,ram=512GB", quant="fp8").engine == "ktransformers"
    assert planned("GLM-4.6", "1xH200,ram=125GB", quant="int4").engine == "windlass"


def test_a_rate_chooses_the_layout_that_serves_most_within_its_limits() -> None:
    load = LoadRequest(5.0, 1.0, 0.05)
    plan = planned("GLM-4.5-Air", "4xH100", goal="throughput", load=load)
    assert plan.load is not None and plan.load.within and plan.load.most_requests_per_second > 5
    pinned = planned("GLM-4.5-Air", "4xH100", goal="throughput", load=load, pins={"tp": 1, "pp": 4}, quant=plan.scheme.name)
    assert pinned.load is not None and pinned.load.most_requests_per_second <= plan.load.most_requests_per_second


def test_reasons_name_what_is_true_of_the_device() -> None:
    assert "only run on Hopper" not in reason(planned("gpt-oss-120b", "1xH100"), "engine")
    assert "fp16" in reason(planned("Llama-3.3-70B-Instruct", "8xV100-32GB"), "quantization")
    assert "4-bit" not in reason(planned("Llama-3.1-8B", "cpu:16,ram=64GB", quant="q8_0"), "engine")
