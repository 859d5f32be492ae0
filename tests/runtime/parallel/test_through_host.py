"""Groups whose words go through the host's memory say what the groups beneath them say."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cpu

torch = pytest.importorskip("torch")

from thread_ranks import run_ranks  # noqa: E402

from windlass.core.layout import Layout  # noqa: E402
from windlass.runtime.parallel.group import SoloGroup  # noqa: E402
from windlass.runtime.parallel.groups import Groups  # noqa: E402
from windlass.runtime.parallel.through_host import HostStagedGroup, through_host  # noqa: E402


def test_every_collective() -> None:
    def work(rank: int, groups: Groups) -> list[list[float]]:
        group = through_host(groups, "cpu").tp
        mine = torch.full((2,), float(rank + 1))
        summed, told = mine.clone(), mine.clone()
        group.all_reduce(summed)
        group.broadcast(told)
        parts = [torch.empty(2) for _ in range(3)]
        group.all_gather(mine, parts)
        into = [torch.empty(2) for _ in range(3)] if rank == 0 else []
        group.gather(mine, into)
        passed = torch.empty(2)
        group.send_next(mine)
        group.receive_previous(passed)
        assert (group.rank, group.size, group.is_native) == (rank, 3, False)
        return [tensor.tolist() for tensor in (summed, told, *parts, passed, *into)]

    found = run_ranks(Layout(tp=3), work)
    for rank, values in enumerate(found):
        first = [value[0] for value in values]
        assert first[:5] == [6, 1, 1, 2, 3]
        assert first[5] == (rank - 1) % 3 + 1
        assert first[6:] == ([1, 2, 3] if rank == 0 else [])


def test_a_group_of_one_says_nothing() -> None:
    x = torch.ones(2)
    HostStagedGroup(SoloGroup(), "cpu").all_reduce(x)
    assert x.tolist() == [1, 1]
