"""A model's tokenizer, tried in a process of its own: what the library cannot survive ends that one, and not the server that opens the model.

python -P -m windlass.runtime.weights.text.trial MODEL BYTES
"""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from windlass.errors import BadInput, Error
from windlass.model.text.isolated.limits import helper_environment, limit_memory, size_bytes
from windlass.model.text.tokenize.build import check_tokenizer
from windlass.runtime.weights.text.files import model_text

CPU_SECONDS = 60.0
"""0.6 s for 150,000 tokens."""
MEMORY_BYTES = 4 * 2**30
MOST_SECONDS = 600.0
"""By the clock, on a machine that does much else."""
REFUSED = 3
"""An exit code; the reason stands on stdout."""


def try_text(path: Path) -> None:
    """BadInput where the tokenizer cannot be built, or ends the process that uses it. Texts that it refuses cost their request alone."""
    command = [sys.executable, "-P", "-m", "windlass.runtime.weights.text.trial", str(path), str(MEMORY_BYTES)]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=helper_environment(), timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadInput(f"{path}: its tokenizer is not ready after {MOST_SECONDS:.0f} s; it is damaged") from None
    if ended.returncode == REFUSED:
        raise BadInput(ended.stdout.decode(errors="replace"))
    if ended.returncode:
        limits = f"{CPU_SECONDS:.0f} s of CPU time, {MEMORY_BYTES // 2**30} GiB"
        raise BadInput(f"{path}: its tokenizer ends the process that builds it ({_how(ended.returncode)}; limits: {limits})")


def _how(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def main(path: Path, memory_bytes: int) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(size_bytes() + memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends a process that does not handle it
    try:
        backend = model_text(path).tokenizer.backend
    except (Error, OSError) as error:
        print(error, end="")
        return REFUSED
    with suppress(BadInput):
        check_tokenizer(backend)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
