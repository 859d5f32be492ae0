"""Faults made for real on this machine, and what `windlass check` says of each: a table for docs/reference/check.md. Needs root.

python bench/check/faults.py [--healthy 50] [--full 5]: also that many quick and full checks of the machine as it is, and their alarms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "tasks" / "check" / "real"))

import injected


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--healthy", type=int, default=0)
    parser.add_argument("--full", type=int, default=0)
    options = parser.parse_args()
    healthy("--quick", options.healthy)
    healthy("--full", options.full)
    print("| fault | how | check | says |\n|---|---|---|---|")
    for fault in injected.FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            row = injected.found(fault, Path(folder))
            said = row["measured"].replace(folder, "DIR")
            print(f"| {fault.name} | {fault.how} | `{fault.check}` {row['state']} | {said} |", flush=True)


def healthy(kind: str, times: int) -> None:
    if not times:
        return
    states: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            began = time.monotonic()
            argv = [sys.executable, "-P", "-m", "windlass", "check", kind, "--json", "--folder", folder]
            report = json.loads(subprocess.run(argv, capture_output=True, text=True, check=False).stdout)
            seconds.append(time.monotonic() - began)
            states[report["state"]] += 1
            alarms.update(f"{row['name']}: {row['measured']}" for row in report["checks"] if row["state"] != "pass")
    seconds.sort()
    print(
        f"{times} runs of check {kind}: {dict(states)}, alarms {dict(alarms) or 'none'}; {seconds[0]:.1f} to {seconds[-1]:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
