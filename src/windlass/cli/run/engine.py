"""The engine behind `windlass run`: started in a process of its own, with a progress bar while it loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from windlass.cli.fleet.progress import node_progress
from windlass.errors import MissingExtra
from windlass.open.progress import byte_progress

if TYPE_CHECKING:
    from windlass.cli.open.plan import Wanted
    from windlass.core.client import SyncClient
    from windlass.core.launch import Launch


@contextmanager
def open_client(wanted: Wanted, shown: bool) -> Generator[SyncClient]:
    """Ready when it is given out; its process ends with the block."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", "run", "running a model")
    from windlass.open.compile import compile_kernels

    compile_kernels(shown)
    with _opened(wanted, shown) as client:
        yield client


@contextmanager
def _opened(wanted: Wanted, shown: bool) -> Generator[SyncClient]:
    from windlass.core.client import SyncClient
    from windlass.open.client import open_client as open_over

    launch = launch_of(wanted)
    with ExitStack() as showing:
        if wanted.over.is_one:
            started = showing.enter_context(byte_progress(f"loading {wanted.path.name}", shown))
            client = SyncClient(open_over(launch, wanted.over, Loaded(started)))
        else:
            nodes = showing.enter_context(node_progress(shown))
            client = SyncClient(open_over(launch, wanted.over, None, nodes, _remark if shown else lambda _: None))
        try:
            client.info()
        except BaseException:
            client.close()
            raise
    with client:
        yield client


def _remark(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def launch_of(wanted: Wanted) -> Launch:
    from windlass.core.launch import Launch

    return Launch(
        model=str(wanted.path),
        device=wanted.device,
        kv=wanted.kv,
        exact=wanted.exact,
        context_tokens=wanted.context_tokens,
        max_sequences=wanted.max_sequences or 1,  # one person asks
        kv_bytes=wanted.kv_bytes,
    )


class Loaded:
    """Bytes so far -> steps of a bar."""

    def __init__(self, started: Callable[[int], Callable[[int], None]]) -> None:
        self._started = started
        self._advance: Callable[[int], None] | None = None
        self._done = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._advance is None:
            self._advance = self._started(total_bytes)
        self._advance(done_bytes - self._done)
        self._done = done_bytes
