"""Kills an evaluation at random moments and resumes it: no answer lost, none asked twice beyond those in flight, the same report.

python bench/evaluate/kills.py --kills 100
python bench/evaluate/kills.py --kills 10 --url http://127.0.0.1:8000 --tasks arithmetic,lists     # a real server; what it was asked is not counted
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parents[1] / "tests" / "cli" / "eval")]

from answering import AnsweringServer, write_task  # noqa: E402

CONCURRENCY = 8


def start(url: str, tasks: str, folder: Path) -> subprocess.Popen[bytes]:
    words = ["eval", url, "--tasks", tasks, "--results-dir", str(folder), "--resume", "--concurrency", str(CONCURRENCY)]
    return subprocess.Popen(
        [sys.executable, "-m", "windlass", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PYTHONPATH": sys.path[0], "PATH": "/usr/bin:/bin"},
    )


def finish(url: str, tasks: str, folder: Path) -> None:
    process = start(url, tasks, folder)
    _, error = process.communicate()
    if process.returncode:
        raise SystemExit(error.decode())


def journaled(folder: Path) -> dict[str, str]:
    """Answers by key, of whole lines."""
    found: dict[str, str] = {}
    for file in folder.glob("*/journal.jsonl"):
        for line in file.read_bytes().split(b"\n")[1:-1]:
            try:
                entry = json.loads(line)
            except ValueError:
                break
            found[entry["key"]] = entry["payload"]["answer"]
    return found


def reports(folder: Path) -> dict[str, bytes]:
    found = {name: (folder / name).read_bytes() for name in ("report.json", "report.md", "report.html")}
    found["report.html"] = re.sub(rb'id="measured">.*?</script>', b"", found["report.html"])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="An evaluation that is killed again and again.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--questions", type=int, default=9000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url")
    parser.add_argument("--tasks")
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = None if given.url else stack.enter_context(AnsweringServer(seconds=0.05))
        url, tasks = given.url or server.url, given.tasks or str(write_task(folder, given.questions))
        return disturb(given, server, url, tasks, folder)


def disturb(given: argparse.Namespace, server: AnsweringServer | None, url: str, tasks: str, folder: Path) -> int:
    draw, killed, num_idle = random.Random(given.seed), folder / "killed", 0
    kept: dict[str, str] = {}
    lost = changed = num_kills = 0
    while num_kills < given.kills:
        process = start(url, tasks, killed)
        begin, first = time.monotonic(), len(kept)
        # half of the kills fall anywhere from the start on, half behind the first new answers
        late = draw.random() < 0.5
        pause = draw.uniform(0.0, 0.5) if late else draw.uniform(0.0, 2.5)
        while late and process.poll() is None and len(journaled(killed)) <= first and time.monotonic() - begin < 60:
            time.sleep(0.02)
        time.sleep(pause)
        if process.poll() is not None:
            break  # everything is answered
        process.send_signal(signal.SIGKILL)
        process.wait()
        num_kills += 1
        now = journaled(killed)
        lost += sum(key not in now for key in kept)
        changed += sum(now.get(key, answer) != answer for key, answer in kept.items())
        num_idle += len(now) == len(kept)
        kept = now
    num_before = len(kept)
    if server is not None:
        server.seconds = 0.0
    finish(url, tasks, killed)
    asked_twice = sum(count - 1 for count in server.asked.values()) if server else None
    num_questions = len(server.asked) if server else len(journaled(killed))
    if server is not None:
        server.asked.clear()
    finish(url, tasks, folder / "whole")
    same = reports(killed) == reports(folder / "whole")
    print(f"{num_kills} kills ({num_idle} before any new answer), {num_before} of {num_questions} answers were there at the last")
    print(
        f"answers lost {lost}, changed {changed}; asked again {asked_twice}, at most {CONCURRENCY * num_kills} could be in flight"
    )
    print(f"report.json, report.md, report.html (but for its line of clocks) byte-identical to an undisturbed run's: {same}")
    ok = same and not lost and not changed and (asked_twice is None or asked_twice <= CONCURRENCY * num_kills)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
