"""When vLLM is the better engine, as a table; and the line it makes in a plan."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.core.plan import Plan, encode_plan, load_plan
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.plan.inference.advice import AdviceInputs, advice_rows, advise
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.search.request import PlanRequest

pytestmark = pytest.mark.pure

ONE_GPU = AdviceInputs(
    engine="windlass",
    engines=("windlass", "vllm"),
    kinds=frozenset({"cuda"}),
    devices=frozenset({"H200"}),
    scheme="int4",
    has_experts=True,
    concurrency=1,
)


@pytest.mark.parametrize(
    ("changes", "engine", "words"),
    [
        ({}, "windlass", "4-bit experts"),
        ({"concurrency": 64}, "windlass", "4-bit experts"),
        ({"concurrency": 65}, "vllm", "64 concurrent sequences"),
        ({"concurrency": 64, "scheme": "bf16"}, "vllm", "64 concurrent sequences"),
        ({"scheme": "bf16"}, "vllm", "no fused kernels for bf16 on H200"),
        ({"devices": frozenset({"A100-80GB"})}, "vllm", "no fused kernels for int4 on A100-80GB"),
        ({"lacking": "experts of another form"}, "vllm", "no fused kernels for experts of another form on H200"),
        ({"devices": frozenset({"H100-80GB"}), "has_experts": False}, "windlass", "4-bit weights on this device"),
        ({"num_devices": 8}, "vllm", "over 8 GPUs"),
        ({"num_devices": 16, "num_nodes": 2}, "vllm", "2 nodes over NCCL"),
        ({"num_devices": 8, "is_even": False}, "llama.cpp", "splits by layers"),
        ({"num_devices": 2, "is_uniform": False}, "llama.cpp", "unequal devices"),
        ({"num_devices": 2, "spills": True}, "llama.cpp", "must be offloaded"),
        ({"spills": True}, "windlass", "twice llama.cpp's speed"),
        ({"spills": True, "scheme": "int8"}, "llama.cpp", "beside any GPU"),
        ({"kinds": frozenset({"cpu"}), "concurrency": 64}, "windlass", "16-bit weights only"),
        ({"kinds": frozenset({"cpu", "cuda"}), "num_devices": 2}, "llama.cpp", "unequal devices"),
        ({"kinds": frozenset({"metal"})}, "mlx", "no Metal backend"),
        ({"engines": ("vllm",), "kinds": frozenset({"cuda"})}, "vllm", "does not support this model yet"),
        ({"engines": ("windlass",), "concurrency": 64}, "windlass", "does not support this model"),
    ],
)
def test_which_and_why(changes: dict[str, object], engine: str, words: str) -> None:
    found = advise(msgspec.structs.replace(ONE_GPU, **changes))
    assert found.engine == engine and words in found.why


def test_a_line_only_where_another_would_be_better() -> None:
    assert advice_rows(ONE_GPU) == ()
    (row,) = advice_rows(msgspec.structs.replace(ONE_GPU, num_devices=8))
    assert (row.choice, row.value) == ("better engine", "vllm") and row.why.endswith("plan with --engine vllm")
    assert advice_rows(msgspec.structs.replace(ONE_GPU, num_devices=8, engine="vllm")) == ()
    assert advice_rows(msgspec.structs.replace(ONE_GPU, engines=("vllm",), engine="vllm")) == ()


def plan(model: str, hardware: str, **changes: object) -> Plan:
    known = find(model)
    assert known is not None
    spec = spec_of(known)
    asked = PlanRequest(spec=spec, rules=rules(spec), hardware=parse_hardware(hardware), context_tokens=4096)
    return make_plan(replace(asked, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "hardware", "changes", "better"),
    [
        ("GLM-4.5-Air", "1xH200", {"quant": "int4"}, []),
        ("GLM-4.5-Air", "8xH100-80GB", {"engine": "windlass"}, ["vllm"]),
        ("GLM-4.5-Air", "8xH100-80GB", {}, []),
        ("GLM-4.5-Air", "8xH100-80GB", {"engine": "vllm"}, []),
        ("GLM-4.6", "2x(8xH100-80GB)@400Gb", {"engine": "windlass"}, ["vllm"]),
        ("Llama-3.1-8B", "1xH100-80GB", {}, []),
        ("Llama-3.1-8B", "1xH100-80GB", {"quant": "int4"}, []),
        ("Mixtral-8x7B", "1xH100-80GB", {"quant": "int4"}, []),
        ("GLM-4.5-Air", "1xH200", {"quant": "int4", "kv": "fp8"}, []),
        ("Llama-2-70B", "6xA100-80GB", {"pins": {"tp": 6}}, ["llama.cpp"]),
        ("GLM-4.5-Air", "1x(cpu:16,ram=512GB)", {}, []),
        ("GLM-4.5-Air", "1x(cpu:16,ram=512GB)", {"engine": "vllm"}, ["windlass"]),
        ("Llama-3.1-405B", "2xA100-80GB,ram=200GB,disk=500GB", {}, []),
    ],
)
def test_plans_say_it(model: str, hardware: str, changes: dict[str, object], better: list[str]) -> None:
    """In the reasons, so in the table and in JSON alike."""
    made = load_plan(encode_plan(plan(model, hardware, **changes)))
    assert [row.value for row in made.reasons if row.choice == "better engine"] == better


def test_a_cpu_is_planned_for_vllm_only_where_asked() -> None:
    assert plan("GLM-4.5-Air", "1x(cpu:16,ram=512GB)", concurrency=128, goal="throughput").engine == "windlass"
    asked = plan("GLM-4.5-Air", "1x(cpu:16,ram=512GB)", engine="vllm")
    assert asked.engine == "vllm" and asked.scheme.name == "bf16" and asked.fits
