"""Groups do what they say, be their ranks nobody, threads or processes; and a rank that is gone is missed within seconds."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thread_ranks  # noqa: E402
from starting import exit_codes, started  # noqa: E402
from talking import Way, check_group, rank_of_processes  # noqa: E402
from thread_ranks import run_ranks  # noqa: E402

from waiting import HUNG_SECONDS  # noqa: E402
from windlass.core.layout import Layout, coordinates  # noqa: E402
from windlass.errors import Impossible  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.parallel import SOLO, Groups, SoloGroup, make_groups  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.multi]


def test_alone() -> None:
    group = SoloGroup()
    x = torch.tensor([1.0, 2.0])
    group.all_reduce(x)
    group.broadcast(x)
    copy = torch.zeros(2)
    group.gather(x, [copy])
    assert x.tolist() == copy.tolist() == [1.0, 2.0]
    assert SOLO.tp.size == SOLO.pp.size == 1
    SOLO.close()


@pytest.mark.parametrize("size", [2, 3])
def test_threads(size: int) -> None:
    run_ranks(Layout(tp=size), lambda rank, groups: check_group(groups.tp))
    run_ranks(Layout(pp=size), lambda rank, groups: check_group(groups.pp))


def test_what_a_thread_raises_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when those who waited for it have waited long enough."""
    monkeypatch.setattr(thread_ranks, "TIMEOUT_SECONDS", 3 * HUNG_SECONDS)

    def work(rank: int, groups: Groups) -> None:
        if rank == 1:
            raise ValueError("rank 1 fell")
        groups.tp.all_reduce(torch.ones(1))

    raised: list[Exception] = []

    def run() -> None:
        try:
            run_ranks(Layout(tp=3), work)
        except ValueError as error:
            raised.append(error)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(HUNG_SECONDS)
    assert not running.is_alive(), "hung: the others wait for one that has fallen"
    assert [str(error) for error in raised] == ["rank 1 fell"]


def test_who_is_in_which_group() -> None:
    """tp fastest: ranks 0 1 | 2 3 | 4 5 share layers, and 0 2 4 | 1 3 5 pass them on. Replicas meet nobody."""
    layout = Layout(tp=2, pp=3, dp=2)
    joined: dict[str, list[int]] = {}

    for rank in range(layout.world):

        def join(name: str, at: int, size: int, rank: int = rank) -> SoloGroup:
            joined.setdefault(name, []).append(rank)
            assert at == joined[name].index(rank) and size == (2 if name.startswith("tp") else 3)
            return SoloGroup()

        make_groups(layout, rank, join)
    assert sorted(members for name, members in joined.items() if name.startswith("tp")) == [
        [0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]
    ]  # fmt: skip
    assert sorted(members for name, members in joined.items() if name.startswith("pp")) == [
        [0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]
    ]  # fmt: skip
    assert coordinates(layout, 9).pp == 1
    with pytest.raises(Impossible, match="rank 12 of 12"):
        make_groups(layout, 12, lambda *_: SoloGroup())


GLOO = Way("gloo", "127.0.0.1")
WAYS = {
    "gloo": GLOO,
    "memory": Way(),
    "sockets": Way(host="127.0.0.1", machines=(0, 1, 2, 3)),
    "both": Way(host="127.0.0.1", machines=(0, 0, 1, 1)),
}
compiled = pytest.mark.skipif(not program.available(), reason="nothing is compiled here")


@compiled
@pytest.mark.parametrize("layout", [Layout(tp=3), Layout(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_processes(tmp_path: Path, layout: Layout, name: str) -> None:
    way = WAYS[name]._replace(machines=WAYS[name].machines[: layout.world])
    assert exit_codes(layout.world, rank_of_processes, str(tmp_path), layout, way, "talk") == [0] * layout.world


GONE = [(name, layout) for name in ("memory", "sockets") for layout in (Layout(tp=2), Layout(pp=2))]
"""In a sum, and where one waits to be told something."""


@compiled
@pytest.mark.parametrize("how", ["die", "stuck"])
def test_a_rank_that_is_gone_is_missed(tmp_path: Path, how: str) -> None:
    """All ways at once: those who miss one that is stuck wait for it for seconds."""
    with ExitStack() as all_ranks:
        firsts: list[Any] = []
        for number, (name, layout) in enumerate(GONE):
            way, folder = WAYS[name]._replace(machines=WAYS[name].machines[:2]), tmp_path / str(number)
            folder.mkdir()
            firsts.append(all_ranks.enter_context(started(2, rank_of_processes, str(folder), layout, way, how))[0])
        for first in firsts:
            first.join(HUNG_SECONDS)
        missed = {f"{name}, {layout}": first.exitcode for (name, layout), first in zip(GONE, firsts, strict=True)}
        assert set(missed.values()) == {0}, f"None: it hung, and nobody was missed: {missed}"


def test_a_rank_that_is_gone_is_missed_by_gloo(tmp_path: Path) -> None:
    with started(2, rank_of_processes, str(tmp_path), Layout(tp=2), GLOO, "die") as ranks:
        ranks[0].join(HUNG_SECONDS)
        assert ranks[0].exitcode == 0, "None: it hung, and nobody was missed"
