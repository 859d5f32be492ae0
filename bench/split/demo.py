"""The same question to one process and to three machines' worth of them: this one and two workers on it. Part of `make demo`.

Run: python bench/split/demo.py MODEL [--prompt TEXT] [--workers 2]

What a user would type is printed and done; the two texts must be the same. Computed in fp32 (--exact): see docs/guides/split.md, "Reproducibility".
"""

from __future__ import annotations

import argparse
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

WINDLASS = [sys.executable, "-m", "windlass"]


def started_worker(secret: Path, cache: Path) -> tuple[subprocess.Popen[str], str]:
    """It listens where there is room; its first words say where."""
    words = ["worker", "--listen", "127.0.0.1:0", "--secret-file", str(secret), "--cache", str(cache)]
    print(f"$ windlass {shlex.join(words)} &", flush=True)
    process = subprocess.Popen([*WINDLASS, *words], stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL, process_group=0)
    assert process.stderr is not None
    for line in process.stderr:
        print(f"  {line.rstrip()}", flush=True)
        if "listens at " in line:
            return process, line.partition("listens at ")[2].split(";")[0].strip()
    raise SystemExit("the worker did not start")


def end(process: subprocess.Popen[str]) -> None:
    """By SIGTERM: under nohup, SIGINT is ignored."""
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)


def answer(model: str, words: list[str]) -> str:
    """Standard output has the answer alone; what is said of the machines goes past it."""
    print(f"$ windlass {shlex.join(['run', model, *words])}", flush=True)
    done = subprocess.run([*WINDLASS, "run", model, *words], stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(done.returncode)
    print(done.stdout, end="", flush=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", default="Why is the sky blue? Answer in two sentences.")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    words = ["--prompt", options.prompt, "--temperature", "0", "--max-tokens", "60", "--exact", "--device", "cpu"]
    alone = answer(options.model, words)
    with tempfile.TemporaryDirectory(prefix="windlass-demo-") as folder, ExitStack() as stack:
        secret = Path(folder) / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_urlsafe(32))
        addresses: list[str] = []
        for number in range(options.workers):
            process, address = started_worker(secret, Path(folder) / f"cache{number}")
            stack.callback(end, process)
            addresses.append(address)
        together = answer(options.model, [*words, "--workers", ",".join(addresses), "--secret-file", str(secret)])
    if together != alone:
        raise SystemExit("the texts differ")
    print(f"the same text from one process and from {options.workers + 1} ranks")


if __name__ == "__main__":
    main()
