"""Device-hours, energy and checkpoints of published runs, as facts derive them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from windlass.core.count import count_parameters
from windlass.core.hardware.energy import co2_kg, energy_kwh
from windlass.core.hardware.parse import parse_hardware
from windlass.core.layout import training_groups
from windlass.core.model import ModelSpec
from windlass.core.recipe.sections import CheckpointSection
from windlass.core.rule import Rule
from windlass.tasks.plan.training.checkpoint import (
    SHORTEST_INTERVAL_SECONDS,
    CheckpointPlan,
    checkpoint_bytes,
    goodput,
    mean_seconds_between_failures,
    plan_checkpoints,
    young_daly_seconds,
)
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.time.rates import device_hours, flops_per_token
from windlass.units import TIB

pytestmark = pytest.mark.pure

Model = Callable[[str], tuple[ModelSpec, tuple[Rule, ...]]]
ONE = TrainingJob(groups=training_groups(1), sequence_tokens=4096, global_batch=1, micro_batch=1)


def test_llama_3_hours(model: Model) -> None:
    """15.6T tokens at 400 TFLOP/s are 27.3M hours; the card's 30.84M are a goodput of 0.89 (arXiv 2407.21783 and the model card)."""
    spec, rules = model("meta-llama--Meta-Llama-3.1-405B")
    hours = device_hours(flops_per_token(spec, rules, 8192).model * 15.6e12, 400e12)
    assert hours == pytest.approx(27.3e6, rel=0.003)
    assert hours / 30.84e6 == pytest.approx(0.89, abs=0.005)
    assert flops_per_token(spec, rules, 8192).model * 15.6e12 == pytest.approx(3.8e25, rel=0.04)


def test_deepseek_hours(model: Model) -> None:
    """180K H800-hours per 10^12 tokens: 3.7 days on 2,048, 1,543 tokens/s each, 386 TFLOP/s with 250 GFLOP a token (arXiv 2412.19437)."""
    spec, rules = model("deepseek-ai--DeepSeek-V3")
    per_token = flops_per_token(spec, rules, 4096).model
    assert per_token == pytest.approx(250e9, rel=0.01)
    assert device_hours(per_token * 1e12, 386e12) == pytest.approx(180e3, rel=0.01)
    assert pytest.approx(3.7, abs=0.05) == 180e3 / 2048 / 24
    assert pytest.approx(1543, abs=1) == 1e12 / 180e3 / 3600


def test_llama_65b_energy() -> None:
    kwh = energy_kwh(1_022_362, 400, 1.1)
    assert kwh / 1e3 == pytest.approx(449.8, abs=0.1)
    assert co2_kg(kwh, 385) / 1e3 == pytest.approx(173.2, abs=0.1)


def test_bloom_checkpoint(model: Model) -> None:
    """2.3 TB by `du`, which rounds up in TiB, and 329 GB of 16-bit weights."""
    spec, rules = model("bigscience--bloom")
    total = count_parameters(spec, rules).total
    size = checkpoint_bytes(total, ONE) / TIB
    assert 2.2 < size <= 2.3
    assert 328 < 2 * total / 2**30 <= 329


def test_failures_scale_with_devices() -> None:
    assert mean_seconds_between_failures(16_384) / 3600 == pytest.approx(3.1, abs=0.01)
    assert mean_seconds_between_failures(8_192) == 2 * mean_seconds_between_failures(16_384)


def test_young_daly_is_where_waste_is_least() -> None:
    pause, failures = 30.0, 40_000.0
    best = young_daly_seconds(pause, failures)
    at_best = goodput(pause, best, failures, 0)
    assert all(goodput(pause, best * factor, failures, 0) < at_best for factor in (0.5, 0.8, 1.25, 2))


def test_asynchronous_saving_pauses_less() -> None:
    hardware = parse_hardware("128x(8xH100-80GB)@400Gb")
    fast, slow = (plan_checkpoints(5 * 10**12, hardware, CheckpointSection(asynchronous=way)) for way in (True, False))
    assert fast.pause_seconds < slow.pause_seconds
    assert fast.goodput > slow.goodput


def saving(on: str, num_bytes: float = 5e12, **wanted: float) -> CheckpointPlan:
    return plan_checkpoints(round(num_bytes), parse_hardware(on), msgspec.convert(wanted, CheckpointSection))


def test_the_store_is_shared() -> None:
    """2 TB/s for 16,384 devices (arXiv 2407.21783, 3.3.1), the same per device for fewer; a single node has its disk."""
    assert saving("2048x(8xH100-80GB)@400Gb").write_bandwidth == 2e12
    assert saving("4096x(8xH100-80GB)@400Gb").write_bandwidth == 2e12
    assert saving("128x(8xH100-80GB)@400Gb").write_bandwidth == pytest.approx(125e9)
    assert saving("8xH100-80GB").write_bandwidth == parse_hardware("8xH100-80GB").nodes[0].disk_bandwidth
    assert saving("128x(8xH100-80GB)@400Gb", bandwidth=200e9).write_seconds == pytest.approx(25)


def test_intervals_have_a_floor() -> None:
    """Young and Daly alone would save 405B every 12 seconds."""
    often = saving("2048x(8xH100-80GB)@400Gb", 5.68e12)
    assert often.young_daly_seconds < 15
    assert (often.interval_seconds, often.limited_by) == (SHORTEST_INTERVAL_SECONDS, "floor")
    assert often.goodput == pytest.approx(
        1 / (1 + (150 + 600 + often.write_seconds) / often.mean_seconds_between_failures), rel=1e-3
    )
    slow = saving("128x(8xH100-80GB)@400Gb", bandwidth=1e9)
    assert (slow.interval_seconds, slow.limited_by) == (5000, "write")
    rare = saving("1xH100-80GB", 1e11)
    assert (rare.interval_seconds, rare.limited_by) == (rare.young_daly_seconds, "young_daly")


def test_a_pinned_interval_is_kept_unless_a_write_takes_longer() -> None:
    on = "128x(8xH100-80GB)@400Gb"
    assert saving(on, interval_minutes=1).interval_seconds == 60
    assert saving(on, interval_minutes=1).limited_by == "recipe"
    assert saving(on, interval_minutes=0.1).interval_seconds == pytest.approx(40)
