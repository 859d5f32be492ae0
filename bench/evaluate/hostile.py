"""Hostile programs in the sandbox: what each was stopped by, as the table of docs/reference/evaluate.md.

python bench/evaluate/hostile.py
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE.parents[1] / "tests" / "tasks" / "evaluate" / "sandbox")]

from hostile import PROGRAMS, TESTS  # noqa: E402

from windlass.tasks.evaluate.sandbox.sandbox import Limits, Program, Sandbox  # noqa: E402


async def main() -> int:
    sandbox = Sandbox(1, Limits(cpu_seconds=2, wall_seconds=6.0, memory_bytes=256 * 2**20))
    num_passed = 0
    print("| program | passed | what it was told | seconds |\n|---|---|---|---|")
    try:
        for name, source in PROGRAMS.items():
            begin = time.monotonic()
            found = await sandbox.run(Program(source=source, tests=TESTS))
            num_passed += found.passed
            why = found.why.removesuffix(f": {TESTS}").replace("|", "/")[:90]
            print(f"| {name} | {'YES' if found.passed else 'no'} | {why} | {time.monotonic() - begin:.1f} |", flush=True)
    finally:
        sandbox.close()
    print(f"\n{len(PROGRAMS)} programs, {num_passed} passed; {sandbox.layers}")
    return 1 if num_passed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
