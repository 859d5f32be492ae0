"""Checks an adapter's files against a model, in a process of its own: `python -m windlass.cli.serve.adapter_check MODEL FOLDER`.

The server imports no torch, and a file that brings down whoever reads it brings down this process only.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from windlass.errors import Error
from windlass.foreign import MAX_MESSAGE, shown

SECONDS = 300.0
PROBLEM = 3
"""Exit code: something is wrong with the adapter, and standard output says what."""


def check_adapter(model: Path, folder: Path) -> str:
    """What is wrong with it; empty: nothing."""
    command = [sys.executable, "-m", "windlass.cli.serve.adapter_check", str(model), str(folder)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"was not checked within {SECONDS:g} s"
    if done.returncode == PROBLEM:
        return f"was refused: {shown(done.stdout.strip(), 500)}"
    return "" if done.returncode == 0 else "could not be checked; see the server's log"


def main() -> int:
    from windlass.runtime.weights.adapters import read_adapter
    from windlass.runtime.weights.source import open_model

    model, folder = map(Path, sys.argv[1:])
    try:
        read_adapter(folder, open_model(model).rules)
    except Error as error:
        print(shown(str(error).replace(str(folder), folder.name), MAX_MESSAGE))
        return PROBLEM
    return 0


if __name__ == "__main__":
    sys.exit(main())
