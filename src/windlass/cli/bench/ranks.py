"""Benchmark over several ranks, of which this process is rank 0 (measure.bench.MultiRank)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import msgspec

from windlass.core.launch import Launch
from windlass.errors import Error
from windlass.open.fleet import Replanner, open_fleet

if TYPE_CHECKING:
    from windlass.core.request import Info
    from windlass.runtime.engine.engine import Engine
    from windlass.runtime.fleet.root.epoch import NodeProgress
    from windlass.runtime.fleet.root.inline import InlineFleet
    from windlass.tasks.bench.report import SplitResult


class InlineRanks:
    """A context manager: closing ends the other ranks."""

    def __init__(self, told: Callable[[str], None], nodes: Callable[[NodeProgress], None]) -> None:
        self._told, self._nodes = told, nodes
        self._beside: InlineFleet | None = None
        self._launch: Launch | None = None

    def load(self, launch: Launch, progress: Callable[[int, int], None]) -> tuple[Engine, Info]:
        from windlass.runtime.engine.ranks.first import load_job
        from windlass.runtime.fleet.root.inline import InlineFleet

        self._launch = launch
        self._beside = InlineFleet(lambda make: open_fleet(launch, self._nodes, self._told, make))
        with self._beside.explained():
            engine, info = load_job(self._beside.job(), progress)
        self._beside.ready(info)
        return engine, info

    def watch(self, run: Callable[[], Sequence[float]]) -> SplitResult:
        from windlass.tasks.bench.report import RankTimes, SplitResult

        assert self._beside is not None and self._launch is not None
        plan = self._beside.fleet.plan
        with self._beside.explained():
            found = self._beside.watch(run)
        assert plan is not None
        return SplitResult(
            layout=str(plan.layout),
            sync=self._launch.sync,
            predicted_tokens_per_second=plan.tokens_per_second or self._predicted(),
            ranks=tuple(RankTimes(**msgspec.structs.asdict(one)) for one in found),
        )

    def _predicted(self) -> float:
        """Prediction for ranks on this machine; a plan for several machines already has one."""
        assert self._beside is not None and self._launch is not None
        try:
            node = self._beside.fleet.local_node(self._launch.layout.world)
            return Replanner(self._launch).replan([node]).tokens_per_second
        except Error:
            return 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._beside is not None:
            self._beside.close()
