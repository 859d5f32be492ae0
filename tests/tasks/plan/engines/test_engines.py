"""The engines' files: complete, with sources, found by every name; and what each refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from windlass.core.hardware.devices import device
from windlass.core.hardware.parse import parse_hardware
from windlass.core.plan import Plan
from windlass.errors import Impossible, UnknownName
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.plan.engines.classes import device_class
from windlass.tasks.plan.engines.load import ALIASES, FOLDER, NAMES, engine, knows, loads_scheme, rates_on
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.search.request import PlanRequest

pytestmark = pytest.mark.pure


def plan(model: str, hardware: str, **changes: Any) -> Plan:
    known = find(model)
    assert known is not None
    spec = spec_of(known)
    asked = PlanRequest(spec=spec, rules=rules(spec), hardware=parse_hardware(hardware), context_tokens=4096)
    return make_plan(replace(asked, **changes))


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name: str) -> None:
    found = engine(name)
    assert found.name == name and found.notes and all(note.source and note.date for note in found.notes)
    for kind, rates in found.rates.items():
        fractions = (rates.read, rates.expert_read, rates.cache, rates.latent_cache, rates.collective)
        assert all(0 < fraction <= 1 for fraction in fractions)
        # A CPU's rate is that of plain fp32 products: 8-bit ones are faster.
        assert 0 < rates.score <= (2 if kind.startswith("cpu") else 1)
        assert min(rates.product, rates.expert_product, rates.host_product, rates.host_stream) > 0


def test_every_file_is_an_engine() -> None:
    assert {file.stem for file in FOLDER.glob("*.toml")} == set(NAMES)
    assert {engine(alias).name for alias in ALIASES} <= set(NAMES)
    assert engine("Ollama") is not None and engine("Ollama").name == engine("LM Studio").name == "llama.cpp"
    with pytest.raises(UnknownName):
        engine("vlm")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H200", "hopper"), ("B200", "blackwell"), ("A100-80GB", "ampere"), ("RTX-4090", "consumer"), ("L40S", "consumer"),
        ("DGX-Spark", "unified"), ("MI300X", "cdna"), ("M3-Ultra", "metal"),
    ],
)  # fmt: skip
def test_classes_of_devices(name: str, found: str) -> None:
    assert device_class(device(name)) == found


def test_instruction_sets_are_classes_too() -> None:
    (wide,), (plain,) = parse_hardware("cpu:16,isa=avx512").devices, parse_hardware("cpu:16").devices
    assert (device_class(wide), device_class(plain)) == ("cpu-avx512", "cpu")
    ours = engine("ik_llama.cpp")
    assert rates_on(ours, wide).product > rates_on(ours, plain).product
    assert knows(ours, wide) and not knows(engine("mlx"), plain)


def test_schemes_by_pattern() -> None:
    assert loads_scheme(engine("llama.cpp"), "Q4_K_M") and not loads_scheme(engine("vllm"), "q4_k_m")
    assert not loads_scheme(engine("llama.cpp"), "fp8")


@pytest.mark.parametrize(
    ("hardware", "changes", "words"),
    [
        ("8xH100-80GB", {"engine": "llama.cpp", "pins": {"tp": 8}}, "llama.cpp does not split a model so; it splits by pp"),
        ("2xRTX-4090", {"engine": "ktransformers", "pins": {"tp": 2}}, "it runs on one device"),
        ("M3-Ultra", {"engine": "vllm"}, "does not support metal devices; use --engine mlx"),
        ("1xH200", {"engine": "mlx"}, "does not support cuda devices"),
        ("1xH200", {"engine": "llama.cpp", "quant": "fp8"}, "does not load fp8 files; use --engine windlass or vllm"),
    ],
)
def test_refusals_say_what_to_do(hardware: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Impossible) as refused:
        plan("Llama-3.1-8B", hardware, **changes)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("model", "hardware", "changes", "engine_name"),
    [
        ("GLM-4.5-Air", "1xH200", {"quant": "int4"}, "windlass"),
        ("GLM-4.5-Air", "8xH100-80GB", {}, "vllm"),
        ("Llama-3.1-70B", "8xMI300X", {}, "vllm"),
        ("Llama-3.1-8B", "1xA100-80GB", {}, "vllm"),
        ("DeepSeek-V3", "1xRTX-4090,ram=768GB", {"quant": "int4"}, "llama.cpp"),
        ("GLM-4.6", "1xH200,ram=128GB", {"quant": "int4"}, "windlass"),
        ("Llama-3.1-70B", "M3-Ultra", {}, "mlx"),
        ("Llama-3.1-8B", "cpu:16,ram=64GB", {}, "windlass"),
    ],
)  # fmt: skip
def test_auto_takes_one_that_runs_today(model: str, hardware: str, changes: dict[str, Any], engine_name: str) -> None:
    made = plan(model, hardware, **changes)
    assert made.engine == engine_name and made.fits and made.caution == ""


@pytest.mark.parametrize(
    ("hardware", "words"),
    [
        ("2xH200", "splitting over several"),
        ("1xA100-80GB", "A100"),
        ("1xMI300X", "AMD"),
        ("M3-Ultra", "no Metal backend"),
        ("1xRTX-4090,ram=64GB", "other than Hopper"),
        ("1xH200", ""),
        ("2x(cpu:16,ram=64GB)@10Gb", ""),
    ],
)
def test_paths_of_ours_that_were_never_run_are_said(hardware: str, words: str) -> None:
    made = plan("Llama-3.1-8B", hardware, engine="windlass")
    assert (words in made.caution) if words else made.caution == ""


def test_fp8_only_where_there_are_units_for_it() -> None:
    """A model that does not fit in bf16: fp8 on an H100, int8 on an A100."""
    assert plan("Qwen3-32B", "1xH100-80GB[48GB]").scheme.name == "fp8"
    assert plan("Qwen3-32B", "1xA100-80GB[48GB]").scheme.name == "int8"


def test_auto_says_how_others_would_do() -> None:
    (row,) = [reason for reason in plan("Llama-3.1-70B", "2xH100-80GB", quant="fp8").reasons if reason.choice == "other engines"]
    assert "sglang" in row.value and "tensorrt-llm" in row.value and "for latency" in row.why
    assert "llama.cpp" not in row.value  # it loads no fp8, and does not split by tp
    asked = plan("Llama-3.1-70B", "2xH100-80GB", quant="fp8", engine="vllm")
    assert not [reason for reason in asked.reasons if reason.choice == "other engines"]


def test_many_users_get_a_server() -> None:
    """int8 would fit llama.cpp's share of memory with 32 users; it is not an engine for them."""
    assert plan("GLM-4.6", "4xH200", concurrency=32, context_tokens=16384).engine == "vllm"


def test_a_raised_limit_of_a_mac_is_said() -> None:
    made = plan("DeepSeek-V3", "M3-Ultra", quant="q4_k_m")
    assert made.fits and any("iogpu.wired_limit_mb" in reason.value for reason in made.reasons)
