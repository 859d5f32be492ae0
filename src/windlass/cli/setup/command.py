"""`windlass setup`: installs other engines, each in its own environment."""

from __future__ import annotations

import typer

app = typer.Typer(help="Install other engines, each in its own environment.", no_args_is_help=True)


@app.callback()
def setup() -> None:
    pass


@app.command()
def vllm(
    cpu: bool | None = typer.Option(None, "--cpu/--gpu", help="Which build; by default, what this machine has."),
    remove: bool = typer.Option(False, "--remove", help="Uninstall."),
) -> int:
    """Install vLLM for `windlass serve --engine vllm`, in the user's cache directory (WINDLASS_CACHE). Running it again changes nothing.

    If vLLM is installed in Windlass's own environment, that one is used and nothing is installed.
    """
    from windlass.cli.setup.vllm import run

    return run(cpu=cpu, remove=remove)
