"""What the harness costs: its processor time an answer, and the server's tokens/s with it and without.

python bench/evaluate/overhead.py tiny-glm --task lists --questions 1200

The bare run sends the same requests at the same concurrency and keeps nothing: the least that any client does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE)]

from against_lm_eval import Server, environment, windlass  # noqa: E402

from windlass.core.request import GREEDY, Request  # noqa: E402
from windlass.tasks.evaluate.run.items import prepare  # noqa: E402
from windlass.tasks.evaluate.run.settings import Wanted  # noqa: E402
from windlass.tasks.evaluate.tasks.catalog import builtin  # noqa: E402
from windlass.wire.client.http_client import HttpClient  # noqa: E402


async def bare(url: str, task: str, count: int, at_once: int) -> tuple[float, int, float]:
    """Seconds, generated tokens, and processor seconds."""
    prepared = prepare(builtin()[task], Wanted(num_examples=count), True)
    client, turns, tokens = HttpClient(url, streams=False), asyncio.Semaphore(at_once), 0

    async def ask(messages: tuple[dict[str, object], ...]) -> None:
        nonlocal tokens
        async with (
            turns,
            aclosing(
                client.generate(Request(messages=messages, sampling=GREEDY, max_tokens=prepared.settings.max_tokens))
            ) as stream,
        ):
            async for delta in stream:
                tokens += delta.usage.completion_tokens if delta.usage else 0

    await client.info()
    begin, used = time.monotonic(), time.process_time()
    await asyncio.gather(*(ask(question.messages or ()) for question in prepared.questions))
    seconds, used = time.monotonic() - begin, time.process_time() - used
    await client.close()
    return seconds, tokens, used


def harness(url: str, task: str, count: int, at_once: int, folder: Path) -> tuple[float, int, float]:
    """Seconds, generated tokens, and processor seconds of the harness's process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [
        "eval",
        url,
        "--tasks",
        task,
        "--num-examples",
        str(count),
        "--concurrency",
        str(at_once),
        "--results-dir",
        str(folder),
        "--json",
    ]
    made = subprocess.run(windlass(*words), env=environment(), capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (row,) = json.loads(made.stdout)["results"]
    assert row["num_failed_requests"] == 0
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return row["seconds"], row["tokens"]["answer"], used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="lists")
    parser.add_argument("--questions", type=int, default=1200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8124)
    given = parser.parse_args()
    few = max(given.questions // 6, 1)
    with Server(given.model, given.port) as server, tempfile.TemporaryDirectory() as place:
        for number in range(given.rounds):
            seconds, tokens, client = asyncio.run(bare(server.url, given.task, given.questions, given.concurrency))
            folder = Path(place)
            _, _, small = harness(server.url, given.task, few, given.concurrency, folder / f"few{number}")
            took, made, large = harness(server.url, given.task, given.questions, given.concurrency, folder / f"all{number}")
            each = 1000 * (large - small) / (given.questions - few)
            share = 100 * (made / took) / (tokens / seconds)
            print(
                f"round {number}: bare {tokens / seconds:.0f} tokens/s, harness {made / took:.0f} tokens/s ({share:.1f} %)",
                end=", ",
            )
            print(
                f"{each:.2f} ms of CPU an answer of {made / given.questions:.1f} tokens, of which the bare client "
                f"{1000 * client / given.questions:.2f}; start and report with {few}: {small:.1f} s of CPU",
                flush=True,
            )
    print(f"on {os.cpu_count()} cores, {given.concurrency} requests at once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
