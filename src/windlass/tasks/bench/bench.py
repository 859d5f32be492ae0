"""Benchmarks a model with the serving engine in this process: load, run batches, compare with the machine's limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Protocol, cast

import msgspec
import torch

from windlass import __version__
from windlass.core.constants import BLOCK_TOKENS
from windlass.core.count import count_parameters
from windlass.core.launch import Launch
from windlass.core.request import GREEDY, Info
from windlass.core.scheme import kv_token_bytes
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import load_model
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.tiers import tier_stats
from windlass.runtime.kernels.program.program import num_threads
from windlass.runtime.machine.memory import process_memory
from windlass.runtime.machine.system import this_system
from windlass.runtime.nn.decoder import Decoder
from windlass.tasks.bench.limits import MachineLimits, measure_limits
from windlass.tasks.bench.loop import BatchTiming, random_prompts, run_batch
from windlass.tasks.bench.memory import MemoryLog
from windlass.tasks.bench.profile import profiled
from windlass.tasks.bench.report import BatchResult, BenchReport, MemoryUse, SplitResult, TierResult
from windlass.tasks.bench.setup import BenchSetup
from windlass.tasks.bench.trace import Trace
from windlass.tasks.bench.weight_bytes import weight_bytes
from windlass.tasks.bench.work import WeightBytes, decode_work, prefill_work

WARMUP_TOKENS = 3
"""Decode steps of the warmup run, which does not count."""
PROFILED_TOKENS = 8
SHORT_TOKENS = 4


class BenchProgress(Protocol):
    """Callbacks for a progress display."""

    def loading(self, done_bytes: int, total_bytes: int) -> None: ...

    def doing(self, what: str) -> None: ...


class NoProgress:
    def loading(self, done_bytes: int, total_bytes: int) -> None:
        pass

    def doing(self, what: str) -> None:
        pass


class EngineSteps:
    """Adapts Engine to the timing loop (loop.StepEngine)."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._number = engine, 0

    def submit(self, tokens: Sequence[int], max_tokens: int) -> int:
        """Greedy and without stop tokens, so that only the length ends it."""
        self._number += 1
        self._engine.submit(Submit(id=self._number, token_ids=list(tokens), sampling=GREEDY, max_tokens=max_tokens))
        return self._number

    def step(self) -> Sequence[int]:
        """Ids of sequences that got a token, once for each. Tokens are synchronised with the device, which may already run the next step."""
        return [output.id for output in self._engine.step() for _ in output.token_ids]


class MultiRank(Protocol):
    """A model split over several ranks, of which this process is rank 0; the implementation manages the others."""

    def load(self, launch: Launch, progress: Callable[[int, int], None]) -> tuple[Engine, Info]: ...

    def watch(self, run: Callable[[], Sequence[float]]) -> SplitResult:
        """`run` decodes and returns its step times; returns where the time went on every rank."""
        ...


class SingleRank:
    def load(self, launch: Launch, progress: Callable[[int, int], None]) -> tuple[Engine, Info]:
        return load_model(launch, progress)

    def watch(self, run: Callable[[], Sequence[float]]) -> None:
        """A single rank has no communication."""


def bench(
    setup: BenchSetup,
    begin: float,
    log: MemoryLog,
    trace: Trace | None,
    planned_bytes: int | None,
    progress: BenchProgress | None = None,
    spread: MultiRank | SingleRank | None = None,
) -> BenchReport:
    """`begin`: time.perf_counter() at program start."""
    spread = spread or SingleRank()
    progress = progress or NoProgress()
    log.base_bytes = before = process_memory().anonymous_bytes
    with log.watching():
        log.mark("load")
        engine, info = spread.load(launch_of(setup), progress.loading)
    start_seconds = time.perf_counter() - begin
    try:
        device = info.device or "cpu"
        progress.doing("measuring the limits of this machine")
        limits = measure_limits(device, num_threads())
        began = time.perf_counter()
        with log.watching():
            runs, weights = _runs(setup, engine, log, trace, progress)
            held = _memory_bytes(device, before)
        tiers = _tiers(engine, info, time.perf_counter() - began)
        split = spread.watch(lambda: _steps(setup, engine))
    finally:
        engine.close()
    progress.doing("measuring the limits again")
    limits = limits.at_least(measure_limits(device, num_threads()))
    memory = MemoryUse(
        weights=weights,
        kv_bytes=info.kv_bytes,
        resident_bytes=held,
        loading_peak_bytes=log.peak_bytes - before,
        planned_bytes=planned_bytes,
    )
    return msgspec.structs.replace(_report(setup, info, limits, start_seconds, runs, memory), split=split, tiers=tiers)


def launch_of(setup: BenchSetup) -> Launch:
    """With room for exactly the batches that are measured."""
    return msgspec.structs.replace(
        setup.launch, context_tokens=setup.context_tokens, max_sequences=max(setup.batches), kv_bytes=kv_bytes(setup)
    )


def kv_bytes(setup: BenchSetup) -> int:
    """KV blocks for the largest batch, plus one spare block per sequence."""
    tokens = (-(-setup.context_tokens // BLOCK_TOKENS) + 1) * BLOCK_TOKENS
    return max(setup.batches) * tokens * kv_token_bytes(setup.spec, setup.launch.kv_type)


def _tiers(engine: Engine, info: Info, seconds: float) -> TierResult | None:
    """What was read from disk, and what its disk reads without a model."""
    decoder = cast(Decoder, engine.runner.decoder)
    stats = tier_stats(decoder)
    if stats is None:
        return None
    measured = decoder.tier.measure()
    return TierResult(
        stats=stats,
        seconds=seconds,
        predicted_step_seconds=decoder.tier.placed.step_seconds,
        disk_bytes_per_second=measured.disk,
        link_bytes_per_second=measured.link,
        cpu_bytes_per_second=measured.host if measured.link else 0.0,
        placement=info.details.get("offload", ""),
    )


def _runs(
    setup: BenchSetup, engine: Engine, log: MemoryLog, trace: Trace | None, progress: BenchProgress
) -> tuple[tuple[BatchResult, ...], WeightBytes]:
    weights = weight_bytes(cast(Decoder, engine.runner.decoder))
    runs: list[BatchResult] = []
    for batch in setup.batches:
        progress.doing(f"measuring batch {batch}")
        log.mark(f"batch {batch}")
        runs.append(_run(setup, engine, weights, batch, trace))
    return tuple(runs), weights


def _steps(setup: BenchSetup, engine: Engine) -> list[float]:
    """Step times of decoding the first batch, with prompts so short that prefill is negligible."""
    batch = setup.batches[0]
    prompts = random_prompts(batch, SHORT_TOKENS, engine.num_tokens, seed=7)
    seconds: list[float] = []

    @contextmanager
    def timed() -> Generator[None]:
        began = time.perf_counter()
        yield
        seconds.append(time.perf_counter() - began)

    run_batch(EngineSteps(engine), prompts, setup.new_tokens, around_step=timed)
    return seconds


def _memory_bytes(device: str, before: int) -> int:
    """Growth of the process's anonymous memory since before loading; on a GPU, memory allocated by PyTorch."""
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else process_memory().anonymous_bytes - before


def _run(setup: BenchSetup, engine: Engine, weights: WeightBytes, batch: int, trace: Trace | None) -> BatchResult:
    submitted = EngineSteps(engine)
    prompts = _prompts(setup, engine, batch)
    run_batch(submitted, next(prompts), _tokens_for(setup, engine, batch, WARMUP_TOKENS))
    timed = run_batch(submitted, next(prompts), setup.new_tokens)
    python_share = None
    if trace is not None:
        tokens = _tokens_for(setup, engine, batch, PROFILED_TOKENS)
        with profiled(engine, trace) as steps:
            run_batch(submitted, next(prompts), tokens, around_step=lambda: trace.span("step", batch=batch))
        python_share = steps.python_share(batch)
    result = _result(setup, batch, timed, weights, python_share)
    return msgspec.structs.replace(result, experts_touched=_experts_touched(engine, batch))


def _experts_touched(engine: Engine, batch: int) -> float | None:
    fused = getattr(engine.runner.decoder, "fused", None)
    return None if fused is None else fused.experts_touched(batch)


def _prompts(setup: BenchSetup, engine: Engine, batch: int) -> Iterator[list[list[int]]]:
    """Sets of prompts that miss the prefix cache."""
    seed = batch * 1000
    while True:
        seed += 1
        yield random_prompts(batch, setup.prompt_tokens, engine.num_tokens, seed)


def _tokens_for(setup: BenchSetup, engine: Engine, batch: int, tokens: int) -> int:
    """New tokens such that all sequences decode together for `tokens` steps, although the first start before the last is prefilled."""
    per_step = max(engine.limits.max_step_tokens - batch, 1)
    return min(-(-batch * setup.prompt_tokens // per_step) + tokens, setup.new_tokens)


def _result(setup: BenchSetup, batch: int, timed: BatchTiming, weights: WeightBytes, python_share: float | None) -> BatchResult:
    step = decode_work(setup.spec, setup.rules, weights, batch, timed.mean_context_tokens, setup.launch.kv_type)
    prefill = prefill_work(setup.spec, setup.rules, weights, batch, setup.prompt_tokens, timed.prefill_steps)
    mean = batch * timed.tokens_per_step * len(timed.step_seconds) / sum(timed.step_seconds)
    return BatchResult(
        batch=batch,
        prompt_tokens=setup.prompt_tokens,
        new_tokens=setup.new_tokens,
        prefill_tokens_per_second=batch * setup.prompt_tokens / timed.prefill_seconds,
        time_to_first_token_seconds=timed.prefill_seconds,
        decode_tokens_per_second=mean if timed.tokens_per_step > 1 else batch / timed.median_step_seconds,
        mean_decode_tokens_per_second=mean,
        tokens_per_step=timed.tokens_per_step,
        step_seconds=timed.median_step_seconds,
        step_read_bytes=step.read_bytes,
        step_weight_bytes=step.weight_bytes,
        step_kv_bytes=step.kv_bytes,
        step_flops=step.flops,
        prefill_flops=prefill.flops,
        prefill_seconds=timed.prefill_seconds,
        python_share=python_share,
    )


def _report(
    setup: BenchSetup, info: Info, limits: MachineLimits, start_seconds: float, runs: tuple[BatchResult, ...], memory: MemoryUse
) -> BenchReport:
    device = info.device or "cpu"
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else this_system().cpu_model
    return BenchReport(
        model=setup.name,
        parameters=count_parameters(setup.spec, setup.rules).total,
        scheme=info.scheme or (setup.scheme.name if setup.scheme else ""),
        kv=info.kv or setup.launch.kv_type,
        device=device,
        machine=name,
        num_threads=num_threads() if device == "cpu" else os.cpu_count() or 1,
        limits=limits,
        start_seconds=start_seconds,
        runs=runs,
        memory=memory,
        random_weights=setup.launch.random_weights is not None,
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        windlass=__version__,
    )
