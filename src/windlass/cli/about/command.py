"""Small commands: `version`, `devices`, `completion`, `ps`, `stop`; and `pull` and `rm`, as in `windlass models`."""

from __future__ import annotations

from typing import Any

import typer


def version(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Show the version of Windlass and of what it uses, for a bug report."""
    from windlass.cli.about.version import show

    show(as_json)


def devices(
    filter_by: str = typer.Argument("", metavar="[TEXT]", help="Only devices whose name contains TEXT."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the GPUs that `windlass plan --on` knows by name."""
    from windlass.cli.about.devices import show

    show(filter_by, as_json)


def completion(shell: str = typer.Argument(..., metavar="bash|zsh|fish", help="Your shell.")) -> None:
    """Print a script that completes commands and model names: add `source <(windlass completion bash)` to ~/.bashrc."""
    from windlass.cli.about.completion import script

    print(script(shell))


def ps(
    context: typer.Context,
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the Windlass servers and other commands of yours that run on this machine."""
    from windlass.cli.about.running import show

    show(lambda arguments: parameters(context, arguments), as_json)


def stop(
    context: typer.Context,
    what: str = typer.Argument(..., metavar="MODEL|PID|all", help="From `windlass ps`."),
) -> None:
    """Stop a server or another command of yours: it finishes what it is answering, then ends."""
    from windlass.cli.about.running import stop as end

    end(what, lambda arguments: parameters(context, arguments))


def parameters(context: typer.Context, arguments: tuple[str, ...]) -> dict[str, Any]:
    """The options and arguments of another `windlass ...` by name, as its command reads them; empty if it cannot."""
    commands: Any = context.find_root().command
    command = commands.commands.get(arguments[0])
    if command is None:
        return {}
    try:
        return command.make_context(arguments[0], list(arguments[1:]), resilient_parsing=True).params
    except Exception:  # noqa: BLE001 - another version's options: shown without details
        return {}
