"""A device on the CPU: what is launched happens in order, and as early or as late as a real one may do it.

Streams, buffers that are copied when the stream gets to it, and graphs whose replay runs the decoder and moves the
buffers on, with the interface that engine.runner knows.
"""

# ruff: noqa: E402 (the folder of cuda_references is put on the path first)

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CUDA_TESTS = str(Path(__file__).parents[2] / "runtime" / "kernels" / "cuda")
if CUDA_TESTS not in sys.path:
    sys.path.insert(0, CUDA_TESTS)

from cuda_references import advance_pairs_reference as advance_pairs_reference
from cuda_references import greedy_reference

from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.execute import runner
from windlass.runtime.engine.execute.buffers import Buffers
from windlass.runtime.engine.execute.graphs import CapturedGraph, DecodeGraphs, InFlightStep, copied, decode_step
from windlass.runtime.engine.schedule.scheduler import SchedulerLimits
from windlass.runtime.kernels.step import KvCache, Step, attention_cache


class Stream:
    def __init__(self, late: bool) -> None:
        self.late = late
        self._waiting: deque[Callable[[], object]] = deque()
        self._num_launched = self._num_done = 0
        self.now = self._free = self.upload_seconds = 0.0
        """The host's clock, when the device will have done all, and what the host takes to fill the buffers of a step."""
        self.step_seconds: dict[int, float] = {}
        """By rows: what the device takes."""

    def launch(self, work: Callable[[], object], rows: int = 0) -> Event:
        """`rows`: of a step; 0: takes no time."""
        self._waiting.append(work)
        self._num_launched += 1
        self._free = max(self._free, self.now) + self.step_seconds.get(rows, 0.0)
        if not self.late:
            self.reach(self._num_launched)
        return Event(self, self._num_launched, self._free)

    def reach(self, number: int) -> None:
        while self._num_done < number:
            self._waiting.popleft()()
            self._num_done += 1

    def synchronize(self) -> None:
        self.reach(self._num_launched)


class Event:
    def __init__(self, stream: Stream, number: int, done_at: float = 0.0) -> None:
        self._stream, self._number, self._done_at = stream, number, done_at

    def synchronize(self) -> None:
        self._stream.reach(self._number)
        self._stream.now = max(self._stream.now, self._done_at)


class LateBuffers(Buffers):
    """The host's side is read when a copy is made, not when it is asked for."""

    def __init__(self, stream: Stream, limits: SchedulerLimits, device: torch.device) -> None:
        super().__init__(limits, device, separate=True)
        self._stream, self._copied = stream, Event(stream, 0)

    def wait(self) -> None:
        self._copied.synchronize()

    def upload(self, num_sequences: int, blocks_changed: bool) -> None:
        self._stream.now += self._stream.upload_seconds
        self._copied = self._stream.launch(lambda: Buffers.upload(self, num_sequences, False))
        if blocks_changed:
            self.upload_blocks(num_sequences)

    def upload_blocks(self, num_sequences: int) -> None:
        self._copied = self._stream.launch(lambda: Buffers.upload_blocks(self, num_sequences))


class Replay:
    """In place of a CUDA graph. Whoever replays one himself reads its results next, which waits for the device."""

    def __init__(self, stream: Stream, work: Callable[[], None]) -> None:
        self.stream, self.work = stream, work

    def replay(self) -> None:
        self.stream.launch(self.work)
        self.stream.synchronize()


class LateGraphs(DecodeGraphs):
    def __init__(
        self, stream: Stream, decoder: Any, caches: Sequence[KvCache], step: Step, counts: Tensor, most: int, num_tokens: int, sizes: Any
    ) -> None:  # fmt: skip
        self._stream: Any = stream
        self._decoder, self._caches, self._step, self._counts = decoder, caches, step, counts
        self._num_tokens = num_tokens
        self._sizes = [size for size in sizes if size < most] + [most]
        self._graphs = {}
        self._host_tokens = [torch.full((most,), 2**30, dtype=torch.int32) for _ in range(2)]
        self.why_not = ""
        self.num_launched = 0
        self.sizes_run: set[int] = set()

    def launch(self, captured: CapturedGraph, sequences: list[tuple[object, int]], longest: int) -> InFlightStep:
        self.num_launched += 1
        replay: Any = captured.graph
        self._stream.launch(replay.work, captured.chosen.shape[0])
        self._host_tokens.reverse()
        tokens = self._host_tokens[0]
        done = self._stream.launch(lambda: tokens[: captured.chosen.shape[0]].copy_(captured.chosen))
        return InFlightStep(captured, sequences, longest, tokens, done)

    def _capture(self, size: int, longest: int) -> CapturedGraph:
        step = decode_step(self._step, size, longest)
        self._stream.synchronize()
        assert int(step.lengths.max()) <= longest
        logits = self._decoder(step, self._caches)
        greedy_reference(logits, self._num_tokens or 0, copied(step), self._counts)
        captured = CapturedGraph(None, torch.full_like(logits, torch.nan), torch.zeros(size, dtype=torch.int32), longest)  # type: ignore[arg-type]

        def work() -> None:
            self.sizes_run.add(size)
            assert int(step.lengths.max()) <= longest, "longer than this graph was made for"
            captured.logits.copy_(self._decoder(step, self._caches))
            captured.chosen.copy_(greedy_reference(captured.logits, self._num_tokens or 0, step, self._counts))

        captured.graph = Replay(self._stream, work)  # type: ignore[assignment]
        return captured


def make_late_engine(
    decoder: Any, patch: Any, *, late: bool, sizes: Sequence[int] = (1, 4), vocab_size: int = 64, caches: Any = None, **changes: Any
) -> Engine:  # fmt: skip
    """As fake_decoder.make_engine, on such a device; the last block of the caches is the spare one."""
    limits = SchedulerLimits(
        **({"context_tokens": 256, "max_step_tokens": 40, "max_step_logits": 12, "lookahead": True} | changes)
    )
    stream = Stream(late)
    patch.setattr(runner, "Buffers", lambda limits, device: LateBuffers(stream, limits, device))
    caches = caches or [attention_cache(limits.num_blocks + 1, 1, 1, torch.float32)]

    def in_turn(step: Step, caches: Sequence[KvCache]) -> Tensor:
        stream.synchronize()
        return decoder(step, caches)

    engine = Engine(in_turn, caches, limits, vocab_size, record=False)
    made = engine.runner
    buffers = made._buffers
    made._graphs = LateGraphs(
        stream, decoder, caches, buffers.step, buffers.device_counts, limits.max_sequences, vocab_size, sizes
    )
    return engine


@dataclass
class Answers:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def take(self, outputs: Any) -> None:
        for output in outputs:
            assert output.id not in self.reasons, "something after the end"
            self.tokens.setdefault(output.id, []).extend(output.token_ids)
            if output.finish is not None:
                self.reasons[output.id] = output.finish.reason

    def finish(self, engine: Engine) -> Answers:
        for _ in range(3000):
            if not engine.has_work:
                break
            self.take(engine.step())
        assert not engine.has_work
        pool = engine.scheduler.pool
        assert pool.num_free == pool.num_blocks, "blocks that nobody gave back"
        return self


def prompt(number: int, length: int) -> list[int]:
    return [(number * 31 + at * (number % 5 + 1)) % 60 for at in range(length)]
