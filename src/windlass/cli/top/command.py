"""`windlass top`: a terminal view of servers, runs and machines."""

from __future__ import annotations

from pathlib import Path

import typer

EXAMPLES = """Examples:

windlass top

windlass top 10.0.0.7:8000 10.0.0.7:9400 10.0.0.8:9400

windlass top --once --json"""


def top(
    addresses: list[str] = typer.Argument(
        None,
        metavar="[URL|HOST:PORT...]",
        help="Servers, exporters (`windlass observe node`) and runs (`windlass train run --prometheus`); "
        "without any, this machine and a server on port 8000, if there is one.",
    ),
    hosts: Path | None = typer.Option(None, metavar="FILE", help="A hostfile: the exporter of every host, port 9400."),
    key: Path | None = typer.Option(None, metavar="FILE", help="A file with the key that they ask for."),
    interval: float = typer.Option(2.0, metavar="SECONDS", help="Between two readings."),
    once: bool = typer.Option(False, "--once", help="Print once and exit."),
    as_json: bool = typer.Option(False, "--json", help="Print once, as JSON."),
    plain: bool = typer.Option(
        False, "--plain", help="Lines of words without bars, for screen readers; also where there is no terminal."
    ),
) -> int:
    """Watch servers, their requests, training runs, machines and GPUs in a terminal; `?` shows the keys."""
    from windlass.cli.top.run import TopOptions, show

    options = TopOptions(
        addresses=tuple(addresses or ()), hosts=hosts, key=key, interval=interval, once=once, as_json=as_json, plain=plain
    )
    return show(options)


top.__doc__ = f"{top.__doc__}\n\n{EXAMPLES}"
