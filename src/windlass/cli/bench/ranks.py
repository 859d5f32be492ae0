"""Benchmark over several ranks, of which this process is rank 0 (measure.bench.MultiRank)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

import msgspec

from windlass.cli.open.fleet import Over, Replanned, open_fleet
from windlass.errors import Error

if TYPE_CHECKING:
    from windlass.core.request import Info
    from windlass.engine.engine import Engine
    from windlass.engine.protocol import Launch
    from windlass.fleet.root.epoch import NodeProgress
    from windlass.fleet.root.inline import Beside
    from windlass.measure.report import SplitResult


class FleetRanks:
    """A context manager; closes the other ranks."""

    def __init__(self, over: Over, told: Callable[[str], None], nodes: Callable[[NodeProgress], None]) -> None:
        self._over, self._told, self._nodes = over, told, nodes
        self._beside: Beside | None = None
        self._launch: Launch | None = None

    def load(self, launch: Launch, progress: Callable[[int, int], None]) -> tuple[Engine, Info]:
        from windlass.engine.load import load_model
        from windlass.fleet.root.inline import Beside

        self._launch = launch
        self._beside = Beside(lambda make: open_fleet(launch, self._over, self._nodes, self._told, make))
        with self._beside.explained():
            engine, info = load_model(self._beside.launch(), progress)
        self._beside.ready(info)
        return engine, info

    def watch(self, run: Callable[[], Sequence[float]]) -> SplitResult:
        from windlass.measure.report import RankTimes, SplitResult

        assert self._beside is not None
        plan = self._beside.fleet.plan
        with self._beside.explained():
            found = self._beside.watch(run)
        assert plan is not None
        return SplitResult(
            layout=str(plan.layout),
            sync=self._over.sync,
            predicted_tokens_per_second=plan.tokens_per_second or self._predicted(),
            ranks=tuple(RankTimes(**msgspec.structs.asdict(one)) for one in found),
        )

    def _predicted(self) -> float:
        """Prediction for ranks on this machine; a plan for several machines already has one."""
        assert self._beside is not None and self._launch is not None
        try:
            node = self._beside.fleet.own_node(self._over.layout.world)
            return Replanned(self._launch, self._over).replan([node]).tokens_per_second
        except Error:
            return 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._beside is not None:
            self._beside.close()
