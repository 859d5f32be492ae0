"""`windlass worker`: this machine waits for a root and runs ranks of its model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from windlass.core.ranks.rendezvous import DEFAULT_PORT
from windlass.errors import BadInput

if TYPE_CHECKING:
    from windlass.runtime.fleet.worker.config import WorkerConfig

EXAMPLES = """Examples:

windlass worker --listen 10.0.0.7:9998 --secret-file ~/.windlass-secret

windlass worker --listen 0.0.0.0:9998 --interface eth1 --secret-file secret --cache /data/windlass --cache-size 200GB

On the root: windlass run MODEL --workers 10.0.0.7:9998,10.0.0.8:9998 --secret-file secret"""


def worker(
    listen: str = typer.Option(
        f"127.0.0.1:{DEFAULT_PORT}", metavar="HOST:PORT", help="Address to listen on; 0.0.0.0 is every interface."
    ),
    secret_file: Path = typer.Option(
        ...,
        metavar="FILE",
        help="Shared secret of root and workers: at least 16 bytes, the same on all machines, private.",
    ),
    cache: Path | None = typer.Option(
        None, metavar="DIR", help="Folder for received weights; by default in the user's cache folder."
    ),
    cache_size: str | None = typer.Option(
        None, metavar="200GB", help="Maximum size of that folder; by default, what the disk has."
    ),
    model_dir: list[Path] = typer.Option(
        [],
        metavar="DIR",
        help="Folder with models; one with the same contents as the root's is read from here, and nothing is sent.",
    ),
    device: str = typer.Option("cpu", metavar="cpu|cuda", help="Device of the ranks."),
    interface: str | None = typer.Option(
        None,
        metavar="NAME",
        help="Network interface for traffic between ranks, such as eth1; by default, the one the root connected to.",
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print warnings and errors only."),
) -> int:
    """Wait for a root, and run ranks of a model that is split over several machines.

    A worker serves one root at a time and keeps a cache of received weights. Ranks run in their own processes, and end when the root or
    any other rank is lost.

    Root and worker authenticate with the secret. Traffic is signed, not encrypted: use a network that you trust.

    Ctrl-C or SIGTERM ends it.
    """
    from windlass.core.ranks.address import parse_address
    from windlass.open.client import require_torch

    require_torch("running a worker")
    host, port = parse_address(listen, "--listen")
    return _work(host, port, secret_file, _config(device, interface, cache, cache_size, model_dir), quiet)


worker.__doc__ = f"{worker.__doc__}\n\n{EXAMPLES}"


def _config(device: str, interface: str | None, cache: Path | None, cache_size: str | None, models: list[Path]) -> WorkerConfig:
    from windlass.runtime.fleet.transfer.cache import WeightCache
    from windlass.runtime.fleet.worker.config import WorkerConfig
    from windlass.runtime.fleet.worker.local_checkpoints import LocalCheckpoints
    from windlass.runtime.fleet.worker.probe import address_of
    from windlass.runtime.machine.folders import cache_dir
    from windlass.runtime.machine.gpus import this_machines_gpus
    from windlass.units import parse_bytes

    if device.split(":")[0] not in ("cpu", "cuda"):
        raise BadInput(f"--device is cpu or cuda, not {device!r}")
    if device != "cpu" and not this_machines_gpus():
        raise BadInput(
            f"--device {device}: this machine has no NVIDIA GPU; leave it out, or start the worker on a machine that has one"
        )
    for folder in models:
        if not folder.is_dir():
            raise BadInput(f"--model-dir {folder}: no such folder")
    limit = None if cache_size is None else parse_bytes(cache_size)
    return WorkerConfig(
        device=device,
        address=address_of(interface) if interface else "",
        cache=WeightCache(cache or cache_dir() / "weights", limit),
        local=LocalCheckpoints(models),
    )


def _work(host: str, port: int, secret_file: Path, config: WorkerConfig, quiet: bool) -> int:
    import asyncio

    from windlass import __version__
    from windlass.runtime.fleet.protocol.secret import read_secret, warning
    from windlass.runtime.fleet.worker.worker import Worker, listen

    secret, log = read_secret(secret_file), ConsoleLog(quiet)
    if problem := warning(secret_file):
        log.line(f"warning: {problem}")
    with listen(host, port) as listening:
        at = listening.getsockname()
        log.line(f"windlass {__version__} listens at {f'[{at[0]}]' if ':' in at[0] else at[0]}:{at[1]}; waiting for a root")
        asyncio.run(Worker(listening, secret, config, log).run())
    log.line("ended")
    return 0


class ConsoleLog:
    """Lines on standard error; a status line only on a terminal."""

    def __init__(self, quiet: bool) -> None:
        import sys

        from windlass.tasks.serve.monitor.log import Log

        self._log, self._quiet = Log(), quiet
        self._on_terminal = sys.stderr.isatty() and not quiet

    def line(self, text: str) -> None:
        if not self._quiet or text.startswith("warning"):
            self._log.end_status()
            self._log.line(text)

    def show_status(self, text: str) -> None:
        if self._on_terminal:
            self._log.show_status(text)
