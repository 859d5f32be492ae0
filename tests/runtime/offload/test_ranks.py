"""Several CPU ranks, each with its own weights on disk: the same tokens and log-probabilities as with all of them in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from small_models import Answer, answers, everything, expected, launch  # noqa: E402

from windlass.cli.bench.ranks import InlineRanks  # noqa: E402
from windlass.core.launch import Launch  # noqa: E402
from windlass.core.layout import Layout  # noqa: E402
from windlass.core.tiers.stats import TierStats  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

LAYOUTS = (Layout(tp=2), Layout(pp=2), Layout(tp=2, ep=2), Layout(tp=2, pp=2))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Ranks share the cores out."""
    yield
    if program.available():
        program.set_threads(program.num_threads())


def answered(asked: Launch) -> tuple[list[Answer], str]:
    """And what went where."""
    return watched(asked)[:2]


def watched(asked: Launch) -> tuple[list[Answer], str, list[TierStats | None]]:
    """And what each rank says of its tiers."""
    with InlineRanks(lambda _: None, lambda _: None) as ranks:
        engine, info = ranks.load(asked, lambda _done, _total: None)
        engine.try_steps()  # as on GPUs, of which nothing is seen afterwards
        try:
            found = answers(engine)
            assert ranks._beside is not None
            beats = ranks._beside._wait(ranks._beside.fleet.heartbeats())
            return found, info.details.get("offload", ""), [beats[rank].tiers for rank in sorted(beats)]
        finally:
            engine.close()


@pytest.mark.parametrize(("name", "layout"), [("glm4_moe", Layout(tp=2, ep=2)), ("llama", Layout(pp=2))], ids=str)
def test_everything_of_every_rank_on_disk(name: str, layout: Layout, tmp_path: Path) -> None:
    """To the last bit. Stages are compared with one rank; random weights of tp ranks are drawn for their shapes, and compared with the same ranks."""
    found, line, tiers = watched(launch(name, tmp_path, everything(name, layout, slots=2), layout=layout))
    assert len(tiers) == layout.world and all(one is not None and one.read_bytes > 0 for one in tiers[1:])
    assert "on disk" in line and len(list(tmp_path.glob("*.tier"))) == layout.world
    assert found == (expected(name) if layout.tp == 1 else answered(launch(name, layout=layout))[0])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe", "llama", "deepseek_v3"])
def test_the_same_as_in_memory(name: str, layout: Layout, tmp_path: Path) -> None:
    """To the last bit, with the file written and with the file found."""
    if layout.ep > 1 and name == "llama":
        pytest.skip("no experts")
    in_memory, _ = answered(launch(name, layout=layout))
    for _ in range(2):
        assert answered(launch(name, tmp_path, everything(name, layout, slots=3), layout=layout))[0] == in_memory
    assert len(list(tmp_path.glob("*.tier"))) == layout.world
