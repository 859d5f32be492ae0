"""Steps as the first rank tells the others of them: a frame each, over a connection of its own to every rank."""

from __future__ import annotations

import socket
import time
from types import TracebackType
from typing import Any, Self

from windlass.engine.execute.step_codec import encode_step
from windlass.engine.ranks.process import RankJob, write_frame
from windlass.kernels.program import program
from windlass.kernels.step import Step
from windlass.parallel.group import GroupLost
from windlass.parallel.mesh import connect_all
from windlass.parallel.store import RendezvousStore

STEPS = "steps"
SECONDS_TO_LOAD = 3600.0
"""For the slowest rank to have its weights: a terabyte from a slow disk. One that dies is noticed long before, by whoever started it."""
SECONDS_TO_SEND = 4.0
"""A rank that does not take a step for so long is stuck, or its link is cut."""


class Steps:
    """Nobody is told of anything before `meet`."""

    def __init__(self) -> None:
        self._others: list[tuple[int, socket.socket]] = []
        self.num_steps = self.num_rows = self.sent_bytes = 0
        self.seconds = 0.0

    def meet(self, job: RankJob, board: RendezvousStore) -> None:
        """Returns when all ranks have their weights and wait for a step."""
        meeting, world = job.meeting, job.launch.layout.world
        found = connect_all(board, STEPS, job.rank, world, meeting.key, meeting.hosts[job.rank], SECONDS_TO_LOAD)
        self._others = [(rank, connection) for rank, connection in enumerate(found) if connection is not None]
        for _, connection in self._others:
            connection.settimeout(SECONDS_TO_SEND)

    def tell(self, step: Step) -> None:
        began = time.perf_counter()
        data = encode_step(step)
        self.num_steps += 1
        self.num_rows += int(step.counts[0])
        for rank, connection in self._others:
            try:
                write_frame(connection, data)
            except OSError as error:
                raise GroupLost(f"rank {rank} is gone: {error}") from error
        self.sent_bytes += len(data) * len(self._others)
        self.seconds += time.perf_counter() - began

    def close(self) -> None:
        for _, connection in self._others:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def announce(decoder: Any, steps: Steps) -> None:
    """Before every pass of the decoder, recorded or not, the others are told of its step."""
    decoder.register_forward_pre_hook(lambda _, given: program.call(lambda: steps.tell(given[0])))
