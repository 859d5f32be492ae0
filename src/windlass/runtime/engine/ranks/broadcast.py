"""Rank 0 broadcasts every step to the other ranks: one frame each, over a connection to every rank."""

from __future__ import annotations

import socket
import time
from types import TracebackType
from typing import Any, Self

from windlass.core.ranks.frames import write_frame
from windlass.core.ranks.rendezvous import Meeting
from windlass.runtime.engine.execute.step_codec import encode_step
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import Step
from windlass.runtime.parallel.group import GroupLost
from windlass.runtime.parallel.mesh import connect_all
from windlass.runtime.parallel.store import RendezvousStore

STEPS = "steps"
SECONDS_TO_LOAD = 3600.0
"""For the slowest rank to load: a terabyte from a slow disk. A rank that dies is noticed long before, by its supervisor."""
SECONDS_TO_SEND = 4.0
"""A rank that accepts no step for so long is stuck, or its link is down."""


class StepBroadcast:
    """Sends nothing before `connect`."""

    def __init__(self) -> None:
        self._others: list[tuple[int, socket.socket]] = []
        self.num_steps = self.num_rows = self.sent_bytes = 0
        self.seconds = 0.0
        self.step_seconds = 0.0
        """From the broadcast to the end of the forward pass, where that is measured."""
        self._began = 0.0

    def connect(self, rank: int, meeting: Meeting, store: RendezvousStore) -> None:
        """Returns when all ranks have their weights and wait for a step."""
        found = connect_all(store, STEPS, rank, len(meeting.hosts), meeting.key, meeting.hosts[rank], SECONDS_TO_LOAD)
        self._others = [(rank, connection) for rank, connection in enumerate(found) if connection is not None]
        for _, connection in self._others:
            connection.settimeout(SECONDS_TO_SEND)

    def send(self, step: Step) -> None:
        began = self._began = time.perf_counter()
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

    def end(self) -> None:
        self.step_seconds += time.perf_counter() - self._began

    def close(self) -> None:
        for _, connection in self._others:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def broadcast_steps(decoder: Any, steps: StepBroadcast, timed: bool) -> None:
    """Sends the step to the other ranks before every forward pass, recorded or not.

    `timed`: the pass has ended when it returns, as on CPUs; a GPU's has only begun."""
    decoder.register_forward_pre_hook(lambda _, inputs: program.call(lambda: steps.send(inputs[0])))
    if timed:
        decoder.register_forward_hook(lambda *_: program.call(steps.end))
