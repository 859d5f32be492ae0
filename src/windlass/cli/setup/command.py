"""`windlass setup`: what is installed beside Windlass, in an environment of its own."""

from __future__ import annotations

import typer

app = typer.Typer(help="Install what Windlass can drive, each in an environment of its own.", no_args_is_help=True)


@app.callback()
def setup() -> None:
    pass


@app.command()
def vllm(
    cpu: bool | None = typer.Option(None, "--cpu/--gpu", help="Which build; without it, what this machine has."),
    remove: bool = typer.Option(False, "--remove", help="Remove it again."),
) -> int:
    """Install vLLM for `windlass serve --engine vllm`, in the user's cache directory (WINDLASS_CACHE). Done again, it changes nothing.

    Where vLLM can be imported beside Windlass, that one is used and nothing is installed.
    """
    from windlass.cli.setup.vllm import run

    return run(cpu=cpu, remove=remove)
