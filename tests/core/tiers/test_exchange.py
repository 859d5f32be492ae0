"""What a layer with experts in host memory beside a device waits for: the formulas, and steps that were measured."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.layout import Layout
from windlass.core.scheme import scheme
from windlass.core.tiers.demand import demand_of, planned_tensors
from windlass.core.tiers.exchange import (
    CACHED_BYTES,
    CACHED_SPEED,
    EXCHANGE_SECONDS,
    GUESS_SECONDS,
    PACKED_SPEED,
    HostReads,
    cpu_blocks,
    waiting_seconds,
)
from windlass.core.tiers.guesses import CARRIED_BYTES, GUESS_ROWS, GUESSED_RIGHT
from windlass.core.tiers.placement import predicted_seconds
from windlass.core.tiers.values import Demand, Speeds, TierPlacement
from windlass.open.resolve import describe_model
from windlass.tasks.plan.shards import ModelShards

pytestmark = pytest.mark.pure

SOME = HostReads(num_bytes=30e6, host=100e9, link=50e9, blocks=12, rows=1.0)
SPEEDS, BYTES, ROWS = st.floats(1e9, 400e9), st.floats(0, 1e9), st.sampled_from([0.0, 1.0, 4.0, 8.0, 9.0, 64.0])


def test_an_expert_is_cut_at_whole_blocks() -> None:
    assert [cpu_blocks(share, 11) for share in (0.0, 0.51, 0.683, 1.0)] == [0, 6, 8, 11]
    assert SOME.share == 8 / 12 and SOME._replace(blocks=11).share == 7 / 11
    assert SOME._replace(blocks=0).share == pytest.approx(2 / 3)


def test_the_slower_of_cpu_and_link_is_waited_for() -> None:
    """8 of 11 blocks: the CPU would end with 7.5."""
    reads = HostReads(num_bytes=55e6, host=106e9, link=49e9, blocks=11)
    assert reads.cpu_seconds == pytest.approx(40e6 / 106e9) and reads.link_seconds == pytest.approx(15e6 / 49e9)
    assert waiting_seconds(reads, 20e-6) == pytest.approx(EXCHANGE_SECONDS + 40e6 / 106e9)


def test_without_a_cpu_all_of_it_is_fetched() -> None:
    reads = SOME._replace(host=0.0)
    assert reads.cpu_seconds == 0.0 and reads.link_seconds == pytest.approx(30e6 / 50e9)


def test_guesses_save_what_caches_give_quicker_than_memory() -> None:
    """Idle for 120 us at 100 GB/s: 12 MB of the CPU's 20."""
    exchange = EXCHANGE_SECONDS + GUESS_SECONDS
    saved = GUESSED_RIGHT * 12e6 * (1 / 100e9 - 1 / CACHED_SPEED)
    assert waiting_seconds(SOME, 120e-6 - exchange) == pytest.approx(exchange + 20e6 / 100e9 - saved)


def test_caches_are_no_larger_than_they_are() -> None:
    large = SOME._replace(num_bytes=300e6)
    saved = GUESSED_RIGHT * CACHED_BYTES * (1 / 100e9 - 1 / CACHED_SPEED)
    assert waiting_seconds(large, 0.5) == pytest.approx(EXCHANGE_SECONDS + GUESS_SECONDS + 200e6 / 100e9 - saved)


def test_a_link_that_is_never_idle_is_the_limit() -> None:
    """One block of 12 is the CPU's: 55 MB at 50 GB/s are 1.1 ms of a layer, however early it begins."""
    reads = SOME._replace(num_bytes=60e6, host=6e9)
    assert 50e-6 + waiting_seconds(reads, 50e-6) == pytest.approx(reads.link_seconds)


def test_of_several_rows_the_link_fetches_ahead_what_it_carries_meanwhile() -> None:
    reads = SOME._replace(num_bytes=300e6, host=40e9, rows=4.0)
    carried = (1 - reads.share) * 300e6
    assert reads.link_seconds > reads.cpu_seconds
    rest = max(reads.link_seconds * (1 - CARRIED_BYTES / carried), reads.cpu_seconds - GUESSED_RIGHT * CACHED_BYTES / 40e9)
    assert waiting_seconds(reads, 400e-6) == pytest.approx(EXCHANGE_SECONDS + GUESS_SECONDS + rest)


def test_several_rows_take_the_cpu_longer() -> None:
    assert SOME._replace(rows=8.0).cpu_seconds == pytest.approx(20e6 / PACKED_SPEED)
    assert SOME._replace(rows=8.0, host=50e9, blocks=12).cpu_speed == 50e9


@given(BYTES, SPEEDS, SPEEDS, st.integers(0, 24), ROWS, st.floats(0, 1e-3))
def test_guesses_cost_no_more_than_making_them(
    num_bytes: float, host: float, link: float, blocks: int, rows: float, computing: float
) -> None:
    reads = HostReads(num_bytes, host, link, blocks, rows)
    on, off = (waiting_seconds(reads, computing, guesses=guesses) for guesses in (True, False))
    assert EXCHANGE_SECONDS <= on <= off + GUESS_SECONDS + 1e-12
    assert on == off or 0 < rows <= GUESS_ROWS
    assert computing + on >= 0.999 * reads.link_seconds


@functools.cache
def _demand(name: str, batch: int) -> Demand:
    found, how, layout = describe_model(name), scheme("int4"), Layout()
    placement = ModelShards(found.spec, found.rules).placement(layout, how, ())
    tensors = planned_tensors(found.rules, found.spec, placement, layout, how, 0, (0, found.spec.num_layers))
    return demand_of(tensors, found.spec, batch=batch)


GLM, AIR = ("GLM-4.6", 111), ("GLM-4.5-Air", 27)
MEASURED = [
    (GLM, 118.2, 49.8, 1, True, 22.98),
    (GLM, 118.2, 49.8, 1, False, 27.82),
    (GLM, 118.2, 49.8, 8, True, 138.9),
    (GLM, 118.2, 49.8, 8, False, 154.7),
    (GLM, 91.0, 47.0, 1, False, 29.3),
    (GLM, 91.0, 47.0, 8, False, 155.6),
    (GLM, 66.0, 50.0, 1, False, 33.7),
    (GLM, 66.0, 50.0, 8, False, 186.9),
    (GLM, 52.0, 50.0, 1, False, 40.8),
    (GLM, 52.0, 50.0, 8, False, 212.2),
    (AIR, 106.4, 49.4, 1, True, 20.46),
    (AIR, 106.4, 49.4, 1, False, 20.92),
    (AIR, 106.4, 49.4, 8, True, 148.8),
    (AIR, 106.4, 49.4, 8, False, 152.7),
    (AIR, 91.0, 47.0, 1, False, 24.0),
    (AIR, 91.0, 47.0, 8, False, 141.6),
    (AIR, 66.0, 50.0, 1, False, 25.7),
    (AIR, 52.0, 50.0, 1, False, 30.4),
    (AIR, 52.0, 50.0, 8, False, 173.2),
]
"""docs/reference/offload.md: model and experts on the device; GB/s of CPU and link; sequences; guesses; milliseconds of a step. The links of the
second and fourth machine are about 50."""


@pytest.mark.parametrize(("model", "host", "link", "batch", "guesses", "milliseconds"), MEASURED)
def test_measured_steps_are_predicted(
    model: tuple[str, int], host: float, link: float, batch: int, guesses: bool, milliseconds: float
) -> None:
    demand = _demand(model[0], batch)
    pool = demand.experts
    assert pool is not None
    slots = pool.num_layers * model[1]
    placed = TierPlacement(
        num_experts=pool.num_experts,
        expert_bytes=pool.expert_bytes,
        device_slots=slots,
        host_slots=pool.num_experts - slots,
        device_bytes=1,
    )
    speeds = Speeds(host=host * 1e9, link=link * 1e9, disk=0.0, device=4.1e12)
    assert predicted_seconds(demand, placed, speeds, guesses=guesses) == pytest.approx(milliseconds / 1e3, rel=0.15)
