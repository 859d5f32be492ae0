"""Placement over tiers: never over a cap, nothing twice, and no single move makes the predicted step faster."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.tiers.placement import RING_UNITS, place_tiers, predicted_seconds, spread
from windlass.core.tiers.values import BLOCK_BYTES, Demand, ExpertPool, Room, Speeds, TierPlacement, Unit, in_blocks
from windlass.errors import DoesNotFit

pytestmark = pytest.mark.pure

CPU = Speeds(host=20e9, disk=2e9)
GPU = Speeds(device=4e12, link=50e9, host=85e9, disk=2e9)
MB = 2**20


def dense(count: int, size: int = 8 * MB, fixed: int = MB) -> Demand:
    units = tuple(Unit(name=f"layers.{number}.ffn.down", num_bytes=size) for number in range(count))
    return Demand(fixed_bytes=fixed, fixed_read_bytes=fixed, units=units)


def mixture(num_experts: int, size: int = MB, touched: float = 0.1, units: int = 4, num_layers: int = 1) -> Demand:
    pool = ExpertPool(num_experts=num_experts, expert_bytes=size, touched=touched, num_layers=num_layers)
    return msgspec.structs.replace(dense(units), experts=pool)


@pytest.mark.parametrize(
    ("demand", "room", "speeds", "expected"),
    [
        pytest.param(dense(8), Room(host=65 * MB), CPU, {"disk_units": 0, "ring_bytes": 0, "disk_bytes": 0}, id="all in memory"),
        pytest.param(dense(8), Room(host=50 * MB, disk=1 << 40), CPU, {"disk_units": 4, "ring_bytes": 16 * MB}, id="dense, disk"),
        pytest.param(
            mixture(100), Room(host=200 * MB), CPU, {"disk_units": 0, "host_slots": 100, "disk_experts": 0}, id="all experts"
        ),
        pytest.param(
            mixture(100),
            Room(host=73 * MB, disk=1 << 40),
            CPU,
            {"disk_units": 0, "host_slots": 40, "disk_experts": 100},
            id="cache",
        ),
        pytest.param(
            mixture(100, num_layers=10),
            Room(device=(33 + 2 + 2 * 10 + 8 * 3) * MB, host=1 << 40),
            GPU,
            {"host_units": 0, "disk_units": 0, "device_slots": 30, "host_slots": 70, "disk_experts": 0},
            id="device and host, staging and spare slots",
        ),
        pytest.param(
            dense(8),
            Room(device=50 * MB, host=1 << 40),
            GPU,
            {"host_units": 4, "disk_units": 0, "ring_bytes": 16 * MB},
            id="dense, host",
        ),
        pytest.param(
            dense(8),
            Room(device=50 * MB, host=16 * MB, disk=1 << 40),
            GPU,
            {"host_units": 2, "disk_units": 2},
            id="dense, host and disk",
        ),
    ],
)
def test_table(demand: Demand, room: Room, speeds: Speeds, expected: dict[str, int]) -> None:
    placed = place_tiers(demand, room, speeds)
    found = {name: getattr(placed, name) for name in expected}
    assert {name: len(value) if isinstance(value, tuple) else value for name, value in found.items()} == expected


@pytest.mark.parametrize(
    ("demand", "room"),
    [
        pytest.param(dense(8), Room(host=20 * MB), id="no disk"),
        pytest.param(dense(8), Room(host=10 * MB, disk=1 << 40), id="no room for the ring"),
        pytest.param(mixture(100), Room(host=73 * MB, disk=50 * MB), id="disk too small for the experts"),
        pytest.param(mixture(100, size=64 * MB), Room(host=100 * MB, disk=1 << 40), id="no room for two experts"),
    ],
)
def test_too_small_says_how_much_is_missing(demand: Demand, room: Room) -> None:
    with pytest.raises(DoesNotFit, match="are missing; raise --host-memory") as raised:
        place_tiers(demand, room, CPU)
    assert raised.value.short_bytes > 0


def test_streaming_behind_the_computation_is_free() -> None:
    """Experts are waited for, units are not: a few units stream so that more experts stay in memory."""
    demand = mixture(400, touched=0.5, units=16)
    placed = place_tiers(demand, Room(host=300 * MB, disk=1 << 40), CPU)
    assert placed.disk_units
    kept = msgspec.structs.replace(placed, disk_units=(), host_slots=placed.host_slots - len(placed.disk_units) * 8 + 16)
    assert predicted_seconds(demand, placed, CPU) < predicted_seconds(demand, kept, CPU)


@given(st.integers(1, 200), st.data())
def test_streamed_units_are_spread_evenly(total: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, total))
    found = sorted(spread(dense(total).units, count))
    assert len(found) == count
    gaps = [second - first for first, second in pairwise(found)]
    assert not gaps or max(gaps) - min(gaps) <= 1


# --- properties ------------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 64 * BLOCK_BYTES)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    units = draw(st.lists(SIZES, max_size=10))
    layers = draw(st.integers(1, 8))
    pool = st.builds(
        ExpertPool,
        num_experts=st.integers(1, 12).map(lambda each: each * layers),
        expert_bytes=SIZES,
        touched=st.floats(0.01, 1.0),
        num_layers=st.just(layers),
        least_slots=st.just(2),
    )
    fixed = draw(SIZES)
    return Demand(
        fixed_bytes=fixed,
        fixed_read_bytes=fixed,
        units=tuple(Unit(name=f"layers.{number}.mixer.o", num_bytes=size) for number, size in enumerate(units)),
        experts=draw(st.none() | pool),
    )


@st.composite
def cases(draw: st.DrawFn, disk_is_slowest: bool = False) -> tuple[Demand, Room, Speeds]:
    demand = draw(demands())
    size = st.integers(0, 2 * demand.total_bytes + BLOCK_BYTES)
    has_device, disk = draw(st.booleans()), draw(st.floats(1e8, 1e13))
    rates = st.floats(disk if disk_is_slowest else 1e8, 1e13)
    room = Room(device=draw(size) if has_device else None, host=draw(size), disk=draw(size))
    device, link = (draw(rates), draw(rates)) if has_device else (0.0, 0.0)
    return demand, room, Speeds(device=device, link=link, host=draw(rates), disk=disk)


def placed_or_none(demand: Demand, room: Room, speeds: Speeds) -> TierPlacement | None:
    try:
        return place_tiers(demand, room, speeds)
    except DoesNotFit:
        return None


def bytes_by_tier(demand: Demand, placed: TierPlacement, has_device: bool) -> tuple[int, int, int]:
    """Counted from the placement's lists alone: device, host, disk."""
    sizes = {unit.name: in_blocks(unit.num_bytes) for unit in demand.units}
    host, disk = (sum(sizes[name] for name in names) for names in (placed.host_units, placed.disk_units))
    first = demand.fixed_bytes + sum(sizes.values()) - host - disk + placed.ring_bytes
    disk += placed.disk_experts * placed.expert_bytes
    if has_device:
        first += (placed.device_slots + staging_slots(demand, placed)) * placed.expert_bytes
        return first, host + placed.host_slots * placed.expert_bytes, disk
    return 0, first + placed.host_slots * placed.expert_bytes, disk


def staging_slots(demand: Demand, placed: TierPlacement) -> int:
    """Beside a device, where not all experts are on it: for two layers' worth of the others, and for two that move."""
    pool = demand.experts
    away = pool.num_experts - placed.device_slots if pool and placed.num_experts else 0
    return 2 * away // pool.num_layers + 2 if pool and away else 0


@given(cases())
def test_never_over_a_cap_and_nothing_twice(case: tuple[Demand, Room, Speeds]) -> None:
    demand, room, speeds = case
    placed = placed_or_none(demand, room, speeds)
    if placed is None:
        return
    device, host, disk = bytes_by_tier(demand, placed, room.device is not None)
    assert device <= (room.device or 0) and host <= room.host and disk <= room.disk
    assert (device, host, disk) == (placed.device_bytes, placed.host_bytes, placed.disk_bytes)
    homes = [*placed.host_units, *placed.disk_units]
    assert len(set(homes)) == len(homes) and set(homes) <= {unit.name for unit in demand.units}
    experts = demand.experts.num_experts if demand.experts else 0
    assert placed.device_slots + placed.host_slots <= experts
    assert placed.disk_experts == (experts if placed.device_slots + placed.host_slots < experts else 0)
    assert bool(placed.ring_bytes) == bool(homes)


@given(cases())
def test_the_prediction_is_that_of_the_placement(case: tuple[Demand, Room, Speeds]) -> None:
    demand, room, speeds = case
    placed = placed_or_none(demand, room, speeds)
    if placed is not None:
        assert placed.step_seconds == pytest.approx(predicted_seconds(demand, placed, speeds))


def moved(demand: Demand, placed: TierPlacement, room: Room, name: str) -> list[TierPlacement]:
    """The placements in which this unit lives elsewhere and experts use the room that this leaves."""
    homes = {"first": (), "host": placed.host_units, "disk": placed.disk_units}
    here = next((tier for tier in ("host", "disk") if name in homes[tier]), "first")
    targets = {"first", "disk", *({"host"} if room.device is not None else set())} - {here}
    found: list[TierPlacement] = []
    sizes = {unit.name: in_blocks(unit.num_bytes) for unit in demand.units}
    for target in targets:
        host = tuple(one for one in placed.host_units if one != name) + ((name,) if target == "host" else ())
        disk = tuple(one for one in placed.disk_units if one != name) + ((name,) if target == "disk" else ())
        ring = RING_UNITS * max((sizes[one] for one in (*host, *disk)), default=0)
        bare = TierPlacement(host_units=host, disk_units=disk, ring_bytes=ring, expert_bytes=placed.expert_bytes)
        device_used, host_used, disk_used = bytes_by_tier(demand, bare, room.device is not None)
        slots = filled(demand, room, device_used, host_used, disk_used)
        if slots is not None:
            found.append(msgspec.structs.replace(bare, device_slots=slots[0], host_slots=slots[1]))
    return found


def filled(demand: Demand, room: Room, device: int, host: int, disk: int) -> tuple[int, int] | None:
    """Expert slots in the room that is left; None: over a cap."""
    if device > (room.device or 0) or host > room.host or disk > room.disk:
        return None
    if demand.experts is None:
        return 0, 0
    size, count = in_blocks(demand.experts.expert_bytes), demand.experts.num_experts
    on_device = min(((room.device or 0) - device) // size, count) if room.device is not None else 0
    in_host = min((room.host - host) // size, count - on_device)
    if on_device + in_host < count and disk + count * size > room.disk:
        return None
    if room.device is None and in_host < min(demand.experts.least_slots, count):
        return None
    return on_device, in_host


@given(cases(disk_is_slowest=True))
def test_moving_anything_makes_the_predicted_step_no_faster(case: tuple[Demand, Room, Speeds]) -> None:
    """Memory is used before the disk, which is never the faster of the two."""
    demand, room, speeds = case
    placed = placed_or_none(demand, room, speeds)
    if placed is None:
        return
    # Beside a device experts move first: units stay on it where they fit, whatever the step would gain.
    is_bound = room.device is not None and demand.experts is not None
    for unit in () if is_bound else demand.units:
        for other in moved(demand, placed, room, unit.name):
            assert predicted_seconds(demand, other, speeds) >= placed.step_seconds * (1 - 1e-9), (unit, other)
    for field in ("device_slots", "host_slots"):  # an expert less in memory is an expert more on disk
        if getattr(placed, field):
            fewer = msgspec.structs.replace(placed, **{field: getattr(placed, field) - 1})
            assert predicted_seconds(demand, fewer, speeds) >= placed.step_seconds * (1 - 1e-9)


@given(demands(), st.data())
def test_more_memory_is_never_slower(demand: Demand, data: st.DataObject) -> None:
    sizes = st.integers(0, 2 * demand.total_bytes)
    less, more = sorted((data.draw(sizes), data.draw(sizes)))
    disk = 2 * demand.total_bytes + 200 * BLOCK_BYTES
    found = placed_or_none(demand, Room(host=less, disk=disk), CPU)
    if found is not None:
        larger = place_tiers(demand, Room(host=more, disk=disk), CPU)
        assert larger.step_seconds <= found.step_seconds * 1.05, "unequal units may leave gaps, but not large ones"


def test_what_is_on_disk_already_streams_again() -> None:
    """Speeds are measured anew at every start; the file is not written anew for it."""
    demand = mixture(400, touched=0.5, units=16)
    room = Room(host=300 * MB, disk=1 << 40)
    first = place_tiers(demand, room, CPU)
    faster = msgspec.structs.replace(CPU, disk=CPU.disk * 1.3)
    assert place_tiers(demand, room, faster, first.disk_units).disk_units == first.disk_units
    nothing = place_tiers(demand, Room(host=1 << 40), CPU, first.disk_units)
    assert nothing.disk_units == (), "not where it would be slower"
