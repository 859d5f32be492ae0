"""Work over processes: results, what is told on the way, and errors that arrive as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from made_shards import double, fill_the_disk, refuse, vanish

from windlass.errors import BadInput, DoesNotFit
from windlass.tasks.train.data.prepare.processes import run_parallel

pytestmark = [pytest.mark.cpu, pytest.mark.multi]


def nothing(_: int) -> None:
    pass


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_item_is_done_and_told_of(jobs: int) -> None:
    told: list[int] = []
    found = dict(run_parallel(double, range(20), jobs=jobs, advance=told.append))
    assert found == {number: 2 * number for number in range(20)}
    assert 0 < sum(told) <= 20  # the last may not have been looked at any more


@pytest.mark.parametrize(
    ("work", "kind", "why"),
    [
        (fill_the_disk, DoesNotFit, "the disk is full"),
        (refuse, BadInput, "unknown number '1'; did you mean"),
        (vanish, BadInput, "fewer --jobs"),
    ],
)
def test_errors_arrive_as_they_were(work: Callable[[int], int], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why) as raised:
        list(run_parallel(work, [1, 1], jobs=2, advance=nothing))
    assert not isinstance(raised.value, DoesNotFit) or raised.value.short_bytes == 123
