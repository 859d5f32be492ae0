"""Options of every command that can run a model over several processes or machines, so that they read the same everywhere."""

from __future__ import annotations

from typing import Any

import typer

WORKERS: Any = typer.Option(
    None, metavar="HOST:PORT,...", help="Machines that share the model with this one; each runs `windlass worker`."
)
SECRET_FILE: Any = typer.Option(None, metavar="FILE", help="The secret that the workers were started with.")
SYNC: Any = typer.Option("exact", metavar="exact|int8", help="How partial sums travel: as they are, or in blocks of int8.")
TP: Any = typer.Option(1, metavar="N", min=1, help="Processes that share every layer.")
PP: Any = typer.Option(1, metavar="N", min=1, help="Stages of layers, one after another, each in processes of its own.")
EP: Any = typer.Option(1, metavar="N", min=1, help="Of the tp processes, how many ways the experts are spread.")
