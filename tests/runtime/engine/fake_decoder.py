"""A decoder without a model: its logits are a known function of the tokens it finds in the cache blocks of a sequence.

So a wrong slot, block, length or position changes what comes out, and the right tokens can be computed without an engine.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from waiting import HUNG_SECONDS, until
from windlass.core.request import Info
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.schedule.scheduler import SchedulerLimits
from windlass.runtime.kernels.step import KvCache, Step, attention_cache

NUM_TABLE_ROWS = 997


class FakeDecoder:
    def __init__(self, vocab_size: int = 64, padding: int = 8, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(NUM_TABLE_ROWS, vocab_size, generator=generator) * 2
        self.vocab_size, self.padding = vocab_size, padding
        self.num_rows = 0
        self.broken_after: int | None = None

    def __call__(self, step: Step, caches: Sequence[KvCache]) -> Tensor:
        step = step.trimmed()
        self.num_rows += len(step.tokens)
        (cache,) = caches
        cache.store((step.tokens + 1)[:, None, None].float(), step.positions[:, None, None].float(), step.slots)
        wanted = set(step.logit_rows.tolist())
        rows = [
            self.logits(history[: position + 1])
            for sequence, (first, last) in enumerate(pairwise(step.starts.tolist()))
            for history in [self.history(cache, step, sequence)]
            for row, position in enumerate(step.positions[first:last].tolist(), first)
            if row in wanted
        ]
        assert step.logit_rows.tolist() == sorted(wanted)
        return torch.stack(rows) if rows else torch.zeros(0, self.vocab_size + self.padding)

    def history(self, cache: KvCache, step: Step, sequence: int) -> list[int]:
        length = int(step.lengths[sequence])
        keys, values = cache.gather(step.blocks[sequence], length)
        assert values.flatten().tolist() == list(range(length)), "positions in the cache"
        return [round(token) - 1 for token in keys.flatten().tolist()]

    def logits(self, history: Sequence[int]) -> Tensor:
        """Padding has the largest logits of all, so that it would be drawn if it could."""
        mark = 7
        for token in history:
            mark = (mark * 1_000_003 + token + 1) % 2_147_483_647
        row = self.table[mark % NUM_TABLE_ROWS]
        if self.broken_after is not None and len(history) > self.broken_after:
            row = row * torch.nan
        return torch.cat([row, torch.full((self.padding,), 99.0)])

    def greedy(self, prompt: Sequence[int], count: int, stops: frozenset[int] = frozenset()) -> list[int]:
        """What an engine must answer."""
        history = list(prompt)
        for _ in range(count):
            history.append(int(self.logits(history)[: self.vocab_size].argmax()))
            if history[-1] in stops:
                break
        return history[len(prompt) :]

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Of every token but the first, given those before it."""
        return [
            float(self.logits(tokens[:index])[: self.vocab_size].double().log_softmax(-1)[tokens[index]])
            for index in range(1, len(tokens))
        ]


def make_engine(decoder: Any = None, vocab_size: int = 64, clock: Any = time.perf_counter, **changes: Any) -> Engine:
    given: dict[str, Any] = {
        "num_blocks": 32, "context_tokens": 256, "max_sequences": 4, "max_step_tokens": 40, "max_step_logits": 12,
    }  # fmt: skip
    limits = SchedulerLimits(**(given | changes))
    caches = [attention_cache(limits.num_blocks, 1, 1, torch.float32)]
    return Engine(decoder or FakeDecoder(vocab_size), caches, limits, vocab_size, record=False, clock=clock)


class SlowDecoder(FakeDecoder):
    """Takes a while for each step, so that there is time to interrupt it."""

    seconds = 0.01

    def __call__(self, step: Step, caches: Sequence[KvCache]) -> Tensor:
        time.sleep(self.seconds)
        return super().__call__(step, caches)


class HeldDecoder(FakeDecoder):
    """Takes only as many steps as it is let: whoever lets it knows that a request is in the middle, on however slow a machine."""

    def __init__(self, steps: int = 0, **more: Any) -> None:
        super().__init__(**more)
        self._steps = threading.Semaphore(steps)

    def let(self, steps: int = 10_000) -> None:
        self._steps.release(steps)

    def __call__(self, step: Step, caches: Sequence[KvCache]) -> Tensor:
        assert self._steps.acquire(timeout=HUNG_SECONDS), "hung: nobody let it go on"
        return super().__call__(step, caches)


class GatedDecoder(FakeDecoder):
    """For another process: what is longer than `FREE` tokens waits for a file to be there."""

    FREE = 24

    def __init__(self, vocab_size: int, gate: Path) -> None:
        super().__init__(vocab_size)
        self._gate = gate

    def __call__(self, step: Step, caches: Sequence[KvCache]) -> Tensor:
        if int(step.trimmed().lengths.max()) > self.FREE:
            until(self._gate.exists, str(self._gate))
        return super().__call__(step, caches)


class CrashingDecoder(FakeDecoder):
    """A prompt that begins with token 13 kills the process, one with 14 raises."""

    def __call__(self, step: Step, caches: Sequence[KvCache]) -> Tensor:
        found = step.trimmed()
        tokens = found.tokens[found.positions == 0].tolist()
        if 13 in tokens:
            os.abort()
        if 14 in tokens:
            raise RuntimeError("the device caught fire\nand burned")
        return super().__call__(step, caches)


def load(job: Any, progress: Any) -> tuple[Engine, Info]:
    """What a worker calls instead of reading a checkpoint; `model` names what is to be tested ("gated behind FILE", for one)."""
    from windlass.errors import DoesNotFit

    launch = job.launch
    kinds = {"fake": FakeDecoder, "slow": SlowDecoder, "crashing": CrashingDecoder}
    if launch.model == "too large":
        raise DoesNotFit("it is 5 bytes short", 5)
    if launch.model == "dies while loading":
        os._exit(3)
    if launch.model.startswith("loaded behind "):
        until(Path(launch.model.removeprefix("loaded behind ")).exists, "the file that loading waits for")
        return make_engine(), Info(model=launch.model, context_tokens=256, vocab_size=64, max_sequences=4)
    for done in (0, 50, 100):
        progress(done, 100)
    vocab_size = 300 if launch.model == "slow" else 64
    kind, _, gate = launch.model.partition(" behind ")
    decoder = GatedDecoder(vocab_size, Path(gate)) if gate else kinds.get(kind, FakeDecoder)(vocab_size)
    engine = make_engine(decoder, vocab_size)
    return engine, Info(model=launch.model, context_tokens=256, vocab_size=vocab_size, max_sequences=4)
