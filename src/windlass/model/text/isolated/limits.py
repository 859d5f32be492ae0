"""What a process that does strangers' work gets: memory, and variables of the environment. Keys and tokens are not among them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

PASSED = frozenset(("HOME", "LANG", "PATH", "TMPDIR", "TZ"))
PASSED_PREFIXES = ("LC_", "LD_", "PY")
"""Python's own, and where it and its libraries are."""


def yield_to_others() -> None:
    """The calling thread, from now on: whoever else wants its CPU gets it at once. A low priority is not enough: it may finish its slice of 3 ms
    first, as long as a step of a small model takes, whose other threads wait."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def limit_memory(most_bytes: int) -> None:
    """Of this process's address space, or less where it may not choose: a hard limit that was set from outside stays."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard), hard))


def size_bytes() -> int:
    """Of this process's address space."""
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()


def helper_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}
    # One arena: those of other threads take address space, which is limited, and hold nothing.
    return kept | {"MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
