"""Reports: shares of the limit, JSON there and back, comparisons; traces and memory logs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from windlass.errors import BadInput
from windlass.runtime.machine.memory import parse_status, process_memory
from windlass.tasks.bench.limits import MachineLimits, cpu_matmul_flops, measure_limits
from windlass.tasks.bench.memory import MemoryLog, draw
from windlass.tasks.bench.report import BatchResult, BenchReport, MemoryUse, compare, encode_report, read_report
from windlass.tasks.bench.trace import Trace
from windlass.tasks.bench.work import WeightBytes

pytestmark = pytest.mark.cpu

LIMITS = MachineLimits(read_bytes_per_second=20e9, matmul_flops=100e9, matmul_dtype="fp32")


def made(batch: int = 1, step_seconds: float = 0.05, **changes: float) -> BenchReport:
    run = BatchResult(
        batch=batch,
        prompt_tokens=128,
        new_tokens=64,
        prefill_tokens_per_second=100,
        time_to_first_token_seconds=1.2,
        decode_tokens_per_second=batch / step_seconds,
        mean_decode_tokens_per_second=batch / step_seconds,
        step_seconds=step_seconds,
        step_read_bytes=0.6e9,
        step_weight_bytes=0.55e9,
        step_kv_bytes=0.05e9,
        step_flops=1e9 * batch,
        prefill_flops=64e9,
        prefill_seconds=1.28,
    )
    memory = MemoryUse(
        weights=WeightBytes(always=10**9), kv_bytes=10**8, resident_bytes=1_030, loading_peak_bytes=1_100, planned_bytes=1_000
    )
    report = BenchReport(
        model="m",
        parameters=10**9,
        scheme="int4",
        kv="bf16",
        device="cpu",
        machine="box",
        num_threads=2,
        limits=LIMITS,
        start_seconds=2.0,
        runs=(run,),
        memory=memory,
    )
    return msgspec.structs.replace(report, **changes)


def test_shares_of_the_limit() -> None:
    (run,) = made().runs
    assert run.read_bytes_per_second == pytest.approx(12e9) and run.read_share(LIMITS) == pytest.approx(0.6)
    assert run.memory_limit_tokens_per_second(LIMITS) == pytest.approx(1 / 0.03)
    assert run.decode_flops_share(LIMITS) == pytest.approx(0.2) and run.prefill_flops_share(LIMITS) == pytest.approx(0.5)
    assert made().memory.over_plan == pytest.approx(0.03)


def test_json_there_and_back() -> None:
    text = encode_report(made())
    assert json.loads(text)["runs"][0]["reached"]["read_share"] == pytest.approx(0.6)
    assert read_report(text, "x") == made()
    for text in (b"{", b"[]", b'{"model": 3}', b"\xff", b'{"runs": [3], "memory": 4}', b'{"runs": 3}'):
        with pytest.raises(BadInput, match="not a report"):
            read_report(text, "x")
    with pytest.raises(BadInput, match="version 9"):
        read_report(encode_report(made(version=9)), "x")


def test_comparison_is_above_one_where_it_got_better() -> None:
    changes = {change.what: change for change in compare(made(step_seconds=0.025, start_seconds=4.0), made())}
    assert changes["batch 1: decode tokens/s"].ratio == pytest.approx(2.0)
    assert changes["startup, s"].ratio == pytest.approx(0.5)
    assert changes["batch 1: time to first token, s"].ratio == 1.0
    assert not any(name.startswith("batch") for name in (change.what for change in compare(made(batch=8), made())))


def test_limits_are_plausible() -> None:
    found = measure_limits("cpu", 2)
    assert 1e9 < found.read_bytes_per_second < 1e12 and 1e9 < found.matmul_flops < 1e13
    best = found.at_least(msgspec.structs.replace(found, matmul_flops=1e18, read_bytes_per_second=1.0))
    assert best.matmul_flops == 1e18 and best.read_bytes_per_second == found.read_bytes_per_second


def test_the_peak_test_puts_threads_back() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    cpu_matmul_flops(1)
    assert torch.get_num_threads() == before


STATUS = "Name:\tpython\nRssAnon:\t    2048 kB\nRssFile:\t     100 kB\nRssShmem:\t       4 kB\n"


def test_resident_bytes() -> None:
    found = parse_status(STATUS)
    assert (found.anonymous_bytes, found.file_bytes) == (2052 * 1024, 100 * 1024)
    assert process_memory().anonymous_bytes > 10**6


def test_memory_is_watched_and_drawn(tmp_path: Path) -> None:
    log = MemoryLog()
    with log.watching():
        log.mark("growing")
        held = bytearray(64 * 2**20)
        held[::4096] = b"x" * len(held[::4096])
        before = log.samples[0].own_bytes
    assert log.samples[-1].own_bytes - before > 60 * 2**20 and log.peak_bytes >= log.samples[-1].own_bytes
    draw(log, 10**8, "title", tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_what_chrome_reads() -> None:
    times = iter([0.0, 1.0, 3.0])
    trace = Trace(lambda: next(times))
    with trace.span("schedule", rows=4):
        pass
    trace.add_chain([("norm", 0.25), ("linear", 0.5)], begin=1.0)
    events = json.loads(trace.encode())["traceEvents"]
    spans = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [("schedule", 1e6, 2e6), ("norm", 1e6, 0.25e6), ("linear", 1.25e6, 0.5e6)]
    assert events[0]["ph"] == "M" and events[2]["args"] == {"rows": 4}
