"""What watching costs: the exporter with 8 simulated GPUs, a token's metrics in the server, a tick of the watch, a scrape, a screen of top.

`.venv/bin/python bench/observe/overhead.py`. CPU time of this process, so that other load does not count.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from windlass.core.request import Delta, Timings, Usage
from windlass.tasks.observe.node.exporter import NodeExporter
from windlass.tasks.observe.node.nvidia import NvidiaGpus
from windlass.tasks.observe.node.simulated import SimulatedNvml
from windlass.tasks.observe.scrape import Source
from windlass.tasks.observe.watch import Watch
from windlass.tasks.serve.monitor.energy import RequestEnergy
from windlass.tasks.serve.monitor.metrics import Metrics, SequenceTimer

TOKENS, AT_ONCE, REQUESTS = 200, 8, 64


def each(work: Callable[[], object], times: int) -> float:
    """CPU seconds of one call."""
    work()
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def exporter_cost() -> None:
    exporter = NodeExporter([NvidiaGpus(SimulatedNvml(8))])
    sample, text = each(exporter.sample, 300), each(exporter.text, 100)
    print(f"exporter, 8 GPUs: a sample {1e3 * sample:.2f} ms, a scrape {1e3 * text:.2f} ms ({len(exporter.text()):,} bytes)")
    print(f"  one sample a second and a scrape every 5 s: {100 * (sample + text / 5):.2f} % of a core")


def token_cost() -> None:
    metrics = Metrics()
    energy = RequestEnergy(lambda: 0.0, lambda: False, lambda: 1)
    timer, delta = SequenceTimer(metrics, time.perf_counter()), Delta(token_ids=(1,))
    last = Delta(token_ids=(1,), finish_reason="stop", usage=Usage(prompt_tokens=9, completion_tokens=9), timings=Timings())

    def token() -> None:
        timer.observe(delta)
        energy.add(1, 1)

    def request() -> None:
        SequenceTimer(metrics, time.perf_counter()).observe(last)
        metrics.count_outcome("stop")
        energy.end(1, "m")

    per_token, per_request = each(token, 50_000), each(request, 5_000)
    print(f"server: metrics of a token {1e6 * per_token:.2f} us, of a request {1e6 * per_request:.1f} us")
    for rate in (100, 1000, 4000):
        print(f"  at {rate:,} tokens/s in requests of 200: {100 * (rate * per_token + rate / 200 * per_request):.2f} % of a core")
    print(
        f"  a scrape with vLLM's names {1e3 * each(lambda: metrics.text('m'), 50):.2f} ms, without {1e3 * each(metrics.text, 50):.2f} ms"
    )
    watch_cost(metrics)
    share_of_serving(per_token + per_request / TOKENS)


def share_of_serving(metrics_seconds: float) -> None:
    """Against all the CPU time that a token of the smallest model takes, server and engine together: the worst case there is."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [sys.executable, "-P", "-m", "windlass", "serve", "tiny-glm", "--port", str(port), "--quiet"]
    server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/health", server)
        _ask(url)
        began = _cpu_seconds(server.pid)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            tokens = sum(pool.map(lambda _: _ask(url), range(REQUESTS)))
        used = (_cpu_seconds(server.pid) - began) / tokens
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    print(
        f"tiny-glm served to {AT_ONCE} at once: {1e6 * used:.0f} us of CPU a token, server and engine; "
        f"metrics are {100 * metrics_seconds / used:.2f} % of it"
    )


def _ask(url: str) -> int:
    body = {"model": "tiny-glm", "prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=300) as answer:
        lines = [line[6:] for line in answer if line.startswith(b"data: {")]
    return int(json.loads(lines[-1])["usage"]["completion_tokens"])


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    sys.exit("the server ended")


def _cpu_seconds(group: int) -> float:
    """Of the process group: the server and its engine."""
    total = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return total / os.sysconf("SC_CLK_TCK")


def watch_cost(metrics: Metrics) -> None:
    exporter, now = NodeExporter([NvidiaGpus(SimulatedNvml(8))]), [1e9]
    exporter.sample()
    text = metrics.text().decode()
    sources = [
        Source(job="windlass-serve", instance="a", read=lambda: text),
        Source(job="windlass-node", instance="b", read=exporter.text),
    ]
    watch = Watch(sources, clock=lambda: now[0])

    def tick() -> None:
        now[0] += 15
        watch.tick()

    for _ in range(2 * 240):
        tick()
    per_tick = each(tick, 40)
    print(
        f"watch, {watch.store.num_series} series, two hours old: a tick {1e3 * per_tick:.1f} ms, every 15 s: {100 * per_tick / 15:.2f} % of a core"
    )
    print(f"  charts of the page {1e3 * each(watch.watched, 3):.0f} ms")


if __name__ == "__main__":
    exporter_cost()
    token_cost()
    sys.exit(0)
