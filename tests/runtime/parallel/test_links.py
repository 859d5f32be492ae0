"""Native links between processes, through memory and through sockets: the same sums everywhere, and small ones within their bound."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from starting import exit_codes  # noqa: E402
from summing import rank_of_links  # noqa: E402
from talking import Way, rank_without_compiler  # noqa: E402

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.ranks.rendezvous import Meeting  # noqa: E402
from windlass.errors import Impossible, UnknownName  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.parallel.join import join_ranks  # noqa: E402
from windlass.runtime.parallel.store import FolderStore  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.multi, pytest.mark.skipif(not program.available(), reason="nothing is compiled here")]

MEMORY, SOCKETS = Way(), Way(host="127.0.0.1", machines=(0, 1, 2, 3))
BOTH = Way(host="127.0.0.1", machines=(0, 1, 0, 1))


@pytest.mark.parametrize("sync", ["exact", "int8"])
@pytest.mark.parametrize(("count", "way"), [(2, MEMORY), (2, SOCKETS), (3, SOCKETS), (4, BOTH)], ids=str)
def test_sums_rows_and_logits(tmp_path: Path, count: int, way: Way, sync: str) -> None:
    """Four ranks on two cores too: whoever waits must let others compute."""
    way = way._replace(machines=way.machines[:count], sync=sync)
    assert exit_codes(count, rank_of_links, str(tmp_path), Layout(tp=count), way) == [0] * count


@pytest.mark.parametrize("way", [MEMORY, SOCKETS])
def test_logits_from_the_last_stage(tmp_path: Path, way: Way) -> None:
    way = way._replace(machines=way.machines[:3])
    assert exit_codes(3, rank_of_links, str(tmp_path), Layout(pp=3), way) == [0] * 3


def test_all_talk_as_the_poorest_can(tmp_path: Path) -> None:
    way = Way("auto", "127.0.0.1")
    assert exit_codes(2, rank_without_compiler, str(tmp_path), Layout(tp=2), way) == [0, 0]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    board, layout = FolderStore(tmp_path), Layout(tp=2)
    meeting = {"key": bytes(32), "hosts": ("", ""), "machines": (0, 0)}
    with pytest.raises(UnknownName, match="unknown transport 'lynx'; did you mean links"):
        join_ranks(Meeting(**meeting, transport="lynx"), layout, 0, board, "cpu")
    with pytest.raises(UnknownName, match="unknown sync 'int4'"):
        join_ranks(Meeting(**meeting, sync="int4"), layout, 0, board, "cpu")
    with pytest.raises(Impossible, match="over native links only, and these ranks use gloo"):
        join_ranks(Meeting(**meeting, sync="int8", transport="gloo"), layout, 0, board, "cpu")
    with pytest.raises(Impossible, match="need compiled kernels"):
        join_ranks(Meeting(**meeting, transport="links"), layout, 0, board, "cpu")
