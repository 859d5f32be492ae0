"""`windlass plan --calibrate`: measures this machine once, and keeps the figures for later plans."""

from __future__ import annotations

import msgspec
from rich.table import Table

from windlass.cli.console import console, working
from windlass.core.hardware.measured import MeasuredLimits
from windlass.errors import MissingExtra
from windlass.units import format_seconds


def calibrate_here(shown: bool) -> MeasuredLimits:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("torch", "run", "--calibrate")
    from pathlib import Path

    import torch

    from windlass.runtime.machine.system import this_system
    from windlass.tasks.bench import kept
    from windlass.tasks.bench.calibrate import calibrate

    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    with working("measuring memory, products, link, disk and launches of this machine"):
        limits = calibrate(device, this_system().num_cores, Path.cwd())
    if kept.wanted():
        kept.save(kept.with_limits(kept.load(), kept.this_machine(), limits))
    if shown:
        console().print(_table(limits, str(kept.path()) if kept.wanted() else ""))
    return limits


def _table(limits: MeasuredLimits, where: str) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, title_justify="left", title="this machine", title_style="bold")
    rows = (
        ("memory", limits.read_bytes_per_second, "GB/s", 1e9),
        ("products", limits.matmul_flops, "TFLOP/s", 1e12),
        ("host memory", limits.host_read_bytes_per_second, "GB/s", 1e9),
        ("link", limits.link_bytes_per_second, "GB/s", 1e9),
        ("disk", limits.disk_bytes_per_second, "GB/s", 1e9),
    )
    for name, value, unit, scale in rows:
        if value:
            table.add_row(name, f"{value / scale:,.3g} {unit}")
    table.add_row("launch", format_seconds(limits.launch_seconds))
    table.add_row("kept in", where or "nowhere: WINDLASS_KEEP_MEASURED=0")
    return table


def as_json(limits: MeasuredLimits) -> str:
    return msgspec.json.encode(limits).decode()
