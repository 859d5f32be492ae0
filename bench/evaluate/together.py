"""Eight evaluations at once against one server, and three models one after another: failed requests, and memory over time.

python bench/evaluate/together.py eight tiny-glm
python bench/evaluate/together.py three tiny-glm SmolLM2-135M-Instruct.gguf src/windlass/model/bundled/tiny-glm
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE)]

from against_lm_eval import Server, environment, windlass  # noqa: E402

from windlass.runtime.machine.memory import process_memory, process_tree  # noqa: E402

MIB = 2**20


class MemoryLog:
    """Anonymous memory of a process and its descendants, ten times a second."""

    def __init__(self, pid: int) -> None:
        self.samples: list[tuple[float, int]] = []
        self._pid, self._over, self._begin = pid, threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            used = sum(process_memory(pid).anonymous_bytes for pid in process_tree(self._pid))
            self.samples.append((time.monotonic() - self._begin, used))

    def end(self) -> list[tuple[float, int]]:
        self._over.set()
        self._thread.join()
        return self.samples


def eight(model: str, count: int, port: int) -> int:
    with Server(model, port) as server, tempfile.TemporaryDirectory() as place:
        rounds: list[int] = []
        for number in range(3):
            log = MemoryLog(server.pid)
            begin = time.monotonic()
            words = [
                ["eval", server.url, "--tasks", "arithmetic,lists,functions", "--num-examples", str(count), "--seed", str(seed)]
                for seed in range(8)
            ]
            running = [
                subprocess.Popen(
                    windlass(*each, "--results-dir", f"{place}/{number}-{seed}", "--json"),
                    env=environment(),
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for seed, each in enumerate(words)
            ]
            found = [json.loads(process.communicate()[0]) for process in running]
            rows = [row for one in found for row in one["results"]]
            used = [sample for _, sample in log.end()]
            rounds.append(max(used))
            failed, answers = sum(row["num_failed_requests"] for row in rows), sum(row["num_answers"] for row in rows)
            print(
                f"round {number}: {answers} answers in {time.monotonic() - begin:.1f} s, {failed} failed requests; "
                f"server's memory {used[0] / MIB:.0f} MiB before, at most {max(used) / MIB:.0f}, {used[-1] / MIB:.0f} after",
                flush=True,
            )
    return 0


def three(models: list[str], count: int) -> int:
    with tempfile.TemporaryDirectory() as place:
        words = ["eval", *models, "--tasks", "arithmetic,lists", "--num-examples", str(count), "--results-dir", place]
        process = subprocess.Popen(
            windlass(*words), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        log = MemoryLog(process.pid)
        _, said = process.communicate()
        samples = log.end()
        not_given_back = [line for line in said.splitlines() if "not given back" in line]
    print(f"exit status {process.returncode}; {len(not_given_back)} models whose memory was not given back")
    valleys = [(at, used) for (at, used), (_, before) in zip(samples[1:], samples, strict=False) if used < before * 0.6]
    for at, used in [*valleys, *samples[-1:]]:
        print(f"{at:6.1f} s: {used / MIB:.0f} MiB")
    print(f"peak {max(used for _, used in samples) / MIB:.0f} MiB")
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["eight", "three"])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--port", type=int, default=8125)
    given = parser.parse_args()
    return eight(given.models[0], given.questions, given.port) if given.what == "eight" else three(given.models, given.questions)


if __name__ == "__main__":
    sys.exit(main())
