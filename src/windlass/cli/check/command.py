"""`windlass check`: its options."""

from __future__ import annotations

from pathlib import Path

import typer

EXAMPLES = """Examples:

windlass check

windlass check ./GLM-4.5-Air-int4 --full

windlass check recipes/tiny-glm-moe-cpu.toml --full

windlass check plan.json --hosts hosts --shared /data/runs --full

windlass check GLM-4.5-Air --random-weights --quant int4 --full"""


def check(
    ctx: typer.Context,
    target: str = typer.Argument(
        "", metavar="[MODEL|RECIPE.toml|PLAN.json]", help="What will run. Default: only the machine is checked."
    ),
    hosts: Path | None = typer.Option(
        None, "--hosts", metavar="FILE", help="A hostfile: check these machines by ssh, and the network between them."
    ),
    quick: bool = typer.Option(False, "--quick", help="Only what is read in seconds; the default."),
    full: bool = typer.Option(
        False, "--full", help="Also measure: disks, network, a load, a generation, a tiny run that is killed and resumed."
    ),
    folder: Path = typer.Option(Path(), metavar="DIR", help="Where checkpoints, results or offloaded weights will be written."),
    shared: Path | None = typer.Option(None, metavar="DIR", help="With --hosts: storage that all machines should see."),
    ports: str = typer.Option("9998,29500", metavar="P,...", help="With --hosts: ports that will be used."),
    tasks: str | None = typer.Option(
        None, metavar="NAME,...", help="With --full and a model: estimate the time of these tasks of `windlass eval`."
    ),
    examples: int | None = typer.Option(None, metavar="N", help="Also estimate the time of N examples."),
    price: float = typer.Option(0.0, metavar="USD", help="Dollars an hour, for the estimates. Default: the plan's."),
    quant: str | None = typer.Option(None, metavar="int4|int8", help="As for `run`; with --random-weights, how they are stored."),
    random_weights: bool = typer.Option(
        False, "--random-weights", help="A load with random weights of the model's shape; no download."
    ),
    device: str = typer.Option("auto", metavar="cpu|cuda", help="As for `run`."),
    context: str | None = typer.Option(None, metavar="8k", help="As for `plan`."),
    monitor: str | None = typer.Option(None, metavar="URL", help="A Prometheus or metrics address that should answer."),
    python: str = typer.Option("", metavar="PATH", help="With --hosts: the interpreter that has Windlass there."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Check machines, disks, network, model and recipe before a long run, and estimate its time.

    Exit code 0: all passed. 1: warnings. 2: it would fail.
    """
    from windlass.cli.check.options import CheckOptions
    from windlass.cli.check.run import run_check
    from windlass.errors import BadInput
    from windlass.units import parse_context

    if quick and full:
        raise BadInput("--quick and --full contradict each other")
    _refuse_unused(ctx, target)
    options = CheckOptions(
        target=target,
        hosts=hosts,
        full=full,
        folder=folder,
        shared=shared,
        ports=_ports(ports),
        tasks=tasks,
        examples=examples,
        price=price,
        quant=quant,
        random_weights=random_weights,
        device=device,
        context_tokens=None if context is None else parse_context(context),
        monitor=monitor,
        python=python,
        as_json=as_json,
    )
    return run_check(options)


check.__doc__ = f"{check.__doc__}\n\n{EXAMPLES}"


NEEDS = {
    "shared": "hosts", "ports": "hosts", "python": "hosts", "tasks": "full", "examples": "full", "price": "full",
}  # fmt: skip
OF_A_MODEL = ("tasks", "examples", "quant", "random_weights", "context", "device")


def _refuse_unused(ctx: typer.Context, target: str) -> None:
    """What would be accepted and do nothing."""
    from windlass.errors import BadInput

    def is_given(name: str) -> bool:
        source = ctx.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    for name, needed in NEEDS.items():
        if is_given(name) and not is_given(needed):
            raise BadInput(f"--{name.replace('_', '-')} does nothing without --{needed}")
    for name in OF_A_MODEL:
        if is_given(name) and (not target or target.endswith(".toml")):
            raise BadInput(f"--{name.replace('_', '-')} is for a model: `windlass check MODEL --{name.replace('_', '-')} ...`")
    if is_given("tasks") and is_given("random_weights"):
        raise BadInput("--tasks evaluates the model itself, and --random-weights leaves its weights out; use one of them")


def _ports(text: str) -> tuple[int, ...]:
    from windlass.errors import BadInput

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isascii() and word.isdecimal() and 0 < int(word) < 65536 for word in words):
        raise BadInput(f"--ports {text!r}: write ports with commas between them, 1 to 65535")
    return tuple(int(word) for word in words)


def agent() -> int:
    """Measures for `windlass check --hosts`, which starts it."""
    import sys

    from windlass.tasks.check.network.agent import serve

    return serve(sys.stdin, sys.stdout)
