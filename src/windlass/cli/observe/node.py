"""`windlass observe node` from its options to an exporter that runs until Ctrl-C."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from windlass.core.model import Frozen
from windlass.errors import BadInput

if TYPE_CHECKING:
    from windlass.core.hardware.energy import Grid
    from windlass.core.hardware.hourly import HourlyGrid
    from windlass.tasks.observe.node.exporter import NodeExporter

NODE_EXPORTER = ("127.0.0.1", 9100)


class NodeOptions(Frozen):
    host: str = "127.0.0.1"
    port: int = 9400
    key: Path | None = None
    host_metrics: str = "auto"
    region: str = ""
    grams: float | None = None
    intensity: Path | None = None
    budget: float = 0.0
    simulate: int = 0


def read_key(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        key = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the key in {path}: {error}") from None
    if not key or not key.isprintable() or not key.isascii():
        raise BadInput(f"{path} should have one line with the key, in printable ASCII")
    return key


def chosen_grid(region: str, grams: float | None) -> Grid | None:
    from windlass.core.hardware.energy import Grid, grid

    if grams is not None:
        if not 0 <= grams <= 5000:
            raise BadInput(f"--grams is {grams:g}; grids have between 0 and about 1,500 g CO2e per kWh")
        return Grid(name=region or "given", grams_per_kwh=grams, year=None, source="given by the user")
    return grid(region) if region else None


def hourly_grid(path: Path, grams: float | None) -> HourlyGrid:
    from windlass.core.hardware.hourly import parse_hourly

    if grams is not None:
        raise BadInput("--intensity and --grams contradict each other: a figure for every hour, or one for all")
    try:
        return parse_hourly(path.expanduser().read_text(encoding="utf-8-sig"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {path}: {error}") from None


def make_exporter(options: NodeOptions) -> NodeExporter:
    from windlass.tasks.observe.node.exporter import NodeExporter
    from windlass.tasks.observe.node.nvidia import NvidiaGpus
    from windlass.tasks.observe.node.simulated import SimulatedNvml

    if options.host_metrics not in ("auto", "yes", "no"):
        raise BadInput(f"--host-metrics is auto, yes or no, not {options.host_metrics!r}")
    gpus = [NvidiaGpus(SimulatedNvml(options.simulate))] if options.simulate else None
    with_host = options.host_metrics == "yes" or (options.host_metrics == "auto" and not _answers(NODE_EXPORTER))
    grid = chosen_grid(options.region, options.grams)
    hourly = None if options.intensity is None else hourly_grid(options.intensity, options.grams)
    return NodeExporter(gpus, with_host=with_host, grid=grid, hourly=hourly, budget_watts=options.budget)


def _answers(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=0.3):
            return True
    except OSError:
        return False


def stop_on_signals() -> threading.Event:
    """Set by Ctrl-C or SIGTERM."""
    stop = threading.Event()

    def heard(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, heard)
    return stop


def serve_node(options: NodeOptions) -> int:
    from windlass.tasks.observe.http import TextServer

    exporter = make_exporter(options)
    exporter.sample()
    server = TextServer(options.host, options.port, {"/metrics": exporter.text}, read_key(options.key))
    stop = stop_on_signals()
    num_gpus = sum(len(gpus) for gpus in exporter.gpus)
    counters = ", ".join(exporter.joules()) or "none that can be read"
    print(
        f"http://{options.host}:{server.port}/metrics  {num_gpus} GPUs, energy counters: {counters}; Ctrl-C ends it", flush=True
    )
    try:
        exporter.run(stop)
    finally:
        server.close()
    return 0
