"""`windlass models`: the model registry and local models."""

from __future__ import annotations

import typer

from windlass.cli.about.completion import complete_model

app = typer.Typer(help="Known models: list, inspect, download, delete.", no_args_is_help=False)


@app.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    filter_by: str = typer.Option("", "--filter", metavar="TEXT", help="Only models whose name or alias contains TEXT."),
) -> None:
    """List the registry: sizes, context length, KV cache per token, and the smallest hardware that runs each model."""
    if context.invoked_subcommand is not None:
        return
    from windlass.cli.models import tables as model_tables

    rows = model_tables.registry_rows(filter_by)
    model_tables.print_json(rows) if as_json else model_tables.print_registry(rows)


@app.command()
def show(
    name: str = typer.Argument(..., metavar="MODEL", help="Path, registry name or hub name.", autocompletion=complete_model),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    tensors: bool = typer.Option(False, "--tensors", help="List every tensor."),
) -> None:
    """Show a model: architecture, parameter counts and, with --tensors, its tensors."""
    from windlass.cli.models import tables as model_tables
    from windlass.open.resolve import describe_model

    resolved = describe_model(name)
    if as_json:
        model_tables.print_json(model_tables.model_json(resolved, tensors))
    else:
        model_tables.print_model(resolved, tensors)


@app.command("list")
def list_models(
    local: bool = typer.Option(False, "--local", help="List models on this disk instead of the registry."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the registry, or with --local the models on this disk with size and last use."""
    from windlass.cli.models import tables as model_tables

    if not local:
        rows = model_tables.registry_rows("")
        model_tables.print_json(rows) if as_json else model_tables.print_registry(rows)
        return
    from windlass.cli.models import local as local_tables

    local_tables.print_local(as_json)


@app.command()
def pull(
    name: str = typer.Argument(..., metavar="NAME", help="Registry name or hub name.", autocompletion=complete_model),
    max_workers: int = typer.Option(8, metavar="N", help="Parallel downloads."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Download a model; run again to resume. Respects HF_HOME and HF_TOKEN."""
    from windlass.cli.models import local as local_tables

    local_tables.pull(name, max_workers, as_json)


@app.command()
def rm(
    name: str = typer.Argument(..., metavar="NAME", help="Name from `windlass models list --local`."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only print how much space it would free."),
) -> None:
    """Delete a model from this disk."""
    from windlass.cli.models import local as local_tables

    local_tables.remove(name, dry_run)
