"""Bursts, loads, drafts and prefix caches: orders and limits that hold whatever the constants are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.core.hardware.parse import parse_hardware
from windlass.core.plan import Plan
from windlass.core.workload import workload
from windlass.errors import BadInput
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.plan.engines.profile import Rates
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.search.request import LoadRequest, PlanRequest
from windlass.tasks.plan.speed.network import distinct
from windlass.tasks.plan.speed.work import Work

pytestmark = pytest.mark.pure


def plan(model: str, hardware: str, **changes: Any) -> Plan:
    known = find(model)
    assert known is not None
    spec = spec_of(known)
    asked = PlanRequest(spec=spec, rules=rules(spec), hardware=parse_hardware(hardware), context_tokens=4096)
    return make_plan(replace(asked, **changes))


SERVED = {"engine": "vllm", "goal": "throughput", "prompt_tokens": 219, "new_tokens": 201, "quant": "bf16"}


def test_a_burst_is_slower_than_a_stream_and_a_spread_one_slower_still() -> None:
    stream = plan("Llama-3.1-8B", "1xH100-80GB", **SERVED).speed
    equal = plan("Llama-3.1-8B", "1xH100-80GB", requests=1000, **SERVED).speed
    chat = plan("Llama-3.1-8B", "1xH100-80GB", requests=1000, spread=True, **SERVED).speed
    assert stream is not None and equal is not None and chat is not None
    assert stream.sustained_tokens_per_second > equal.sustained_tokens_per_second > chat.sustained_tokens_per_second
    long = plan("Llama-3.1-8B", "1xH100-80GB", requests=10**6, spread=True, **SERVED).speed
    assert long is not None and long.sustained_tokens_per_second == pytest.approx(stream.sustained_tokens_per_second, rel=0.02)


def test_more_than_memory_holds_waits_for_its_turn() -> None:
    """NIM served 100 at once on two H100s where full contexts of 46 fit."""
    asked = {
        "engine": "tensorrt-llm",
        "quant": "fp8",
        "pins": {"tp": 2},
        "context_tokens": 5500,
        "prompt_tokens": 5000,
        "new_tokens": 500,
    }
    made = plan("Llama-3.1-70B", "2xH100-80GB", concurrency=100, **asked)
    assert made.fits and made.workload.waiting == 100 - made.workload.concurrency > 0
    assert any(reason.choice == "concurrency" and "wait" in reason.why for reason in made.reasons)
    assert plan("Llama-3.1-70B", "2xH100-80GB", concurrency=5, **asked).workload.waiting == 0


def test_loads() -> None:
    common = {"quant": "int4", "prompt_tokens": 1024, "new_tokens": 256}
    low, high, absurd = (
        plan("GLM-4.5-Air", "1xH200", load=LoadRequest(rate, 2.0, 0.05), **common).load for rate in (0.5, 2.0, 500.0)
    )
    assert low is not None and high is not None and absurd is not None
    assert low.within and low.in_flight < high.in_flight and low.time_per_token_seconds < high.time_per_token_seconds
    assert low.most_requests_per_second == high.most_requests_per_second > 2
    assert not absurd.within and absurd.utilisation == 1.0
    none = plan("GLM-4.5-Air", "1xH200", load=LoadRequest(1.0, 1e-6, 1e-6), **common).load
    assert none is not None and not none.within and none.most_requests_per_second == pytest.approx(0, abs=1e-6)


def test_drafts_pay_by_their_acceptance() -> None:
    plain = plan("GLM-4.5-Air", "4xH100-80GB", quant="bf16").speed
    good, bad = (
        plan("GLM-4.5-Air", "4xH100-80GB", quant="bf16", draft_tokens=2, acceptance=chance).speed for chance in (0.9, 0.0)
    )
    assert plain is not None and good is not None and bad is not None
    assert good.decode_tokens_per_second > plain.decode_tokens_per_second > bad.decode_tokens_per_second
    with pytest.raises(BadInput):
        plan("GLM-4.5-Air", "4xH100-80GB", draft_tokens=99)


@given(st.integers(0, 16), st.floats(0, 1))
def test_tokens_of_a_step_with_drafts(drafts: int, chance: float) -> None:
    import msgspec

    work = msgspec.structs.replace(workload(4096, 1), draft_tokens=drafts, acceptance=chance)
    assert 1 <= work.tokens_per_step <= 1 + drafts


def test_a_cached_prefix_is_not_computed() -> None:
    plain = plan("Llama-3.1-8B", "1xH100-80GB", engine="vllm", prompt_tokens=2048).speed
    cached = plan("Llama-3.1-8B", "1xH100-80GB", engine="vllm", prompt_tokens=2048, cached_prefix=0.9).speed
    assert plain is not None and cached is not None
    assert cached.time_to_first_token_seconds < plain.time_to_first_token_seconds / 2


def test_the_step_is_the_sum_of_its_parts() -> None:
    for model, hardware, changes in (
        ("GLM-4.5-Air", "1xH200", {"quant": "int4"}),
        ("DeepSeek-V3", "1xRTX-4090,ram=768GB", {"quant": "int4"}),
        ("Llama-3.1-70B", "8xMI300X", {"quant": "fp8", "pins": {"tp": 8}}),
    ):
        made = plan(model, hardware, explain=True, **changes)
        assert made.speed is not None and made.step and all(part.waits for part in made.step)
        assert sum(part.seconds for part in made.step) == pytest.approx(made.speed.step_seconds, rel=0.05)


sizes = st.floats(1e6, 1e12)


@settings(max_examples=50)
@given(sizes, sizes, sizes, st.floats(1, 500), st.floats(0.1, 1), st.floats(0.1, 1))
def test_no_engine_beats_the_floor(dense: float, experts: float, flops: float, rows: float, read: float, product: float) -> None:
    work = Work(
        dense_bytes=dense, expert_bytes=experts, cache_bytes=1e6, dense_flops=flops, expert_flops=flops, score_flops=1e6,
        rows_per_expert=rows, one_expert=1e7, latent=False,
    )  # fmt: skip
    rates = Rates(read=read, expert_read=read, cache=read, product=product, expert_product=product, half_rows=16, half_expert=1e6)
    assert sum(work.seconds(1e12, 1e14, rates)) >= sum(work.floor(1e12, 1e14)) * (1 - 1e-9)


@given(st.floats(1, 100), st.floats(0.01, 64))
def test_places_that_draws_fall_into(places: float, picks: float) -> None:
    assert 0 < distinct(places, picks) <= min(places, max(picks, 1.0)) * (1 + 1e-9) + 1e-9


# --- CPUs ------------------------------------------------------------------------------------------------------------


def _decode(on: str, engine: str = "llama.cpp", quant: str = "q4_k_m", model: str = "Llama-3.1-8B") -> float:
    found = plan(model, on, engine=engine, quant=quant, context_tokens=2048).speed
    assert found is not None
    return found.decode_tokens_per_second


def test_few_cores_unpack_slower_than_fast_memory_reads() -> None:
    memory = "ram=64GB,bw=300GB,isa=avx2"
    assert _decode(f"cpu:4,{memory}") < 0.5 * _decode(f"cpu:32,{memory}")
    slow = "ram=64GB,bw=30GB,isa=avx2"
    assert _decode(f"cpu:16,{slow}") == pytest.approx(_decode(f"cpu:32,{slow}"), rel=0.1)


def test_types_with_grids_are_bound_by_their_lookups() -> None:
    """IQ2_XS has half the bytes of Q4_K_M, and few cores are slower with it."""
    few = "cpu:4,ram=64GB,bw=300GB,isa=avx2"
    assert _decode(few, quant="iq2_xs") < _decode(few)
    many = "cpu:64,ram=64GB,bw=60GB,isa=avx2"
    assert _decode(many, quant="iq2_xs") > _decode(many)


def test_more_machines_over_ethernet_stop_helping() -> None:
    def pis(number: int, latency: str) -> float:
        found = plan(
            "Llama-3.1-8B",
            f"{number}x(cpu:4,ram=16GB,bw=9GB)@1Gb,latency={latency}",
            engine="windlass",
            quant="q4_0",
            pins={"tp": number},
        ).speed
        assert found is not None
        return found.decode_tokens_per_second

    assert pis(4, "50us") > pis(2, "50us")
    assert pis(8, "50us") < 1.5 * pis(4, "50us")
    assert pis(8, "5us") > 1.5 * pis(4, "5us")
