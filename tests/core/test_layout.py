"""How degrees multiply, and the two grids of a training job."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.layout import Layout, coordinates, training_groups
from windlass.errors import Impossible

pytestmark = pytest.mark.pure

degrees = st.integers(1, 6)


@given(degrees, degrees, degrees)
def test_every_rank_has_a_place_of_its_own(tp: int, pp: int, dp: int) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp)
    places = [coordinates(layout, rank) for rank in range(layout.world)]
    assert len(set(places)) == layout.world == tp * pp * dp
    assert all(place.tp < tp and place.pp < pp and place.dp < dp for place in places)


def test_tensor_ranks_are_neighbours() -> None:
    layout = Layout(tp=4, pp=2, dp=2)
    assert [coordinates(layout, rank).tp for rank in range(5)] == [0, 1, 2, 3, 0]
    assert [coordinates(layout, rank).pp for rank in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 0]
    assert [coordinates(layout, rank).dp for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]


def test_experts_are_no_further_factor() -> None:
    assert Layout(tp=8, ep=8).world == 8
    assert Layout(tp=8, ep=2).expert_tp == 4
    assert Layout(tp=8, ep=8).expert_tp == 1


def test_words() -> None:
    assert str(Layout()) == "one device"
    assert str(Layout(tp=8, ep=4, pp=2)) == "tp=8 pp=2 ep=4"


def test_both_grids() -> None:
    """8,192 GPUs as tp 8 x pp 16: dense layers are copied 64 times; with ep 32 over whole tp groups the experts twice."""
    groups = training_groups(8192, tp=8, pp=16, ep=32, expert_tp=8)
    assert (groups.dp, groups.expert_dp, groups.world) == (64, 2, 8192)
    published = training_groups(256, tp=2, pp=8, ep=16)
    assert (published.dp, published.expert_dp) == (16, 2)


@given(degrees, degrees, degrees, degrees, degrees, st.integers(1, 4))
def test_grids_multiply_to_the_world(tp: int, cp: int, pp: int, ep: int, expert_tp: int, times: int) -> None:
    world = tp * cp * pp * ep * expert_tp * times
    groups = training_groups(world, tp=tp, cp=cp, pp=pp, ep=ep, expert_tp=expert_tp)
    assert groups.tp * groups.cp * groups.pp * groups.dp == world
    assert groups.expert_tp * groups.ep * groups.pp * groups.expert_dp == world


@pytest.mark.parametrize(("expert_tp", "product"), [(8, 4096), (1, 512)])
def test_ep_that_does_not_fit(expert_tp: int, product: int) -> None:
    with pytest.raises(Impossible, match=f"ep 32 does not fit.*= {product}"):
        training_groups(256, tp=8, pp=16, ep=32, expert_tp=expert_tp)


def test_degrees_that_do_not_divide() -> None:
    with pytest.raises(Impossible, match="100 is not a multiple of 128"):
        training_groups(100, tp=8, pp=16)
