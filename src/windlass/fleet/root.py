"""The root's side of a fleet, in the process in front: a connection to every worker, one epoch after another, and the way to its engine.

An epoch is one life of all ranks. `Fleet.port` makes a Port for `engine.calls.Calls`; opening it begins an epoch with the workers that
are here, and its `lost` says `Moved` when the epoch is over for a reason that no request is to blame for: Calls then makes the next one
and replays what was in flight. What a layout is made of is not known here: `replan` is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from windlass.engine.port import Port
from windlass.engine.protocol import Launch

if TYPE_CHECKING:
    from windlass.fleet.replan import EpochPlan, Node

Replan = Callable[[Sequence["Node"]], "EpochPlan"]
"""The machines that are here, this one first, to a layout, shares, stages, and who has which ranks. Raises DoesNotFit."""


class Fleet:
    def __init__(
        self,
        launch: Launch,
        workers: Sequence[str],
        secret: bytes,
        replan: Replan,
        *,
        sync: str = "exact",
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`workers`: HOST:PORT each. `told` gets a line for whatever an operator should know."""
        self._launch, self._workers, self._secret, self._replan = launch, tuple(workers), secret, replan
        self._sync, self._told = sync, told

    def port(self) -> Port:
        """The way to the engine of the next epoch, which begins when it is opened."""
        raise NotImplementedError

    async def close(self) -> None:
        """Every rank ends, every worker is told goodbye. May be called twice."""
