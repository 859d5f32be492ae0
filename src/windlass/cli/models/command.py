"""`windlass models`: the registry."""

from __future__ import annotations

import typer

app = typer.Typer(help="The models known by name.", no_args_is_help=False)


@app.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
    filter_by: str = typer.Option("", "--filter", metavar="TEXT", help="Only names or families that contain TEXT."),
) -> None:
    """List the registry: sizes, context, cache per token, and the smallest listed hardware that runs each."""
    if context.invoked_subcommand is not None:
        return
    from windlass.cli.models import tables as model_tables

    rows = model_tables.registry_rows(filter_by)
    model_tables.print_json(rows) if as_json else model_tables.print_registry(rows)


@app.command()
def show(
    name: str = typer.Argument(..., metavar="MODEL", help="A path, a name of the registry, or a hub name."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
    tensors: bool = typer.Option(False, "--tensors", help="List every tensor rule."),
) -> None:
    """Show one model: its shape, its counts and, with --tensors, its tensors."""
    from windlass.cli.models import tables as model_tables
    from windlass.open.resolve import describe_model

    resolved = describe_model(name)
    if as_json:
        model_tables.print_json(model_tables.model_json(resolved, tensors))
    else:
        model_tables.print_model(resolved, tensors)


@app.command("list")
def list_models(
    local: bool = typer.Option(False, "--local", help="What is on this disk instead of the registry."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """List the registry, or with --local the models on this disk with their sizes and last use."""
    from windlass.cli.models import tables as model_tables

    if not local:
        rows = model_tables.registry_rows("")
        model_tables.print_json(rows) if as_json else model_tables.print_registry(rows)
        return
    from windlass.cli.models import local as local_tables

    local_tables.print_local(as_json)


@app.command()
def pull(
    name: str = typer.Argument(..., metavar="NAME", help="A name of the registry or of the hub."),
    max_workers: int = typer.Option(8, metavar="N", help="Files downloaded at once."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON for machines."),
) -> None:
    """Download a model. Interrupted, it goes on where it was; HF_HOME and the user's token are respected."""
    from windlass.cli.models import local as local_tables

    local_tables.pull(name, max_workers, as_json)


@app.command()
def rm(
    name: str = typer.Argument(..., metavar="NAME", help="As `windlass models list --local` calls it."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only say how much it would free."),
) -> None:
    """Delete a model from this disk."""
    from windlass.cli.models import local as local_tables

    local_tables.remove(name, dry_run)
