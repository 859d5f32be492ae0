"""What ranks are told of the launch."""

from __future__ import annotations

import pytest

from windlass.core.launch import Launch
from windlass.core.layout import Layout
from windlass.core.ranks.epoch import EpochPlan
from windlass.runtime.fleet.root.epoch import launch_of_ranks

pytestmark = pytest.mark.pure

THREE = ("10.0.0.7:9998", "10.0.0.8:9998", "10.0.0.9:9998")


@pytest.mark.parametrize(
    ("nodes", "each"), [((0, 1, 2, 3), 1), ((0, 0, 1, 1), 2), ((0, 0, 0, 0), 4), ((0, 1), 1), ((0,), 1), ((0, 2, 2, 2), 2)]
)
def test_ranks_divide_the_memory_of_their_own_machine_only(nodes: tuple[int, ...], each: int) -> None:
    """A machine may have no ranks; then nobody divides by it."""
    launch = Launch(model="m", workers=THREE, layout=Layout(tp=len(nodes)))
    told = launch_of_ranks(launch, EpochPlan(layout=Layout(tp=len(nodes)), nodes=nodes))
    assert told.ranks_per_machine == each
    assert bool(told.workers) == (len(set(nodes)) > 1)


def test_addresses_and_secrets_do_not_travel() -> None:
    launch = Launch(model="m", workers=THREE, secret_file="/secret", layout=Layout(tp=2))
    told = launch_of_ranks(launch, EpochPlan(layout=Layout(tp=2), nodes=(0, 1)))
    assert told.secret_file is None and not set(told.workers) & set(THREE)
