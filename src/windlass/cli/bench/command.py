"""`windlass bench`: speed of a model on this machine, compared with the hardware limits."""

from __future__ import annotations

from pathlib import Path

import typer

from windlass.cli.options import opens_model
from windlass.core.launch import Launch
from windlass.errors import BadInput

EXAMPLES = """Examples:

windlass bench ./GLM-4.5-Air-int4 --batch 1,8,32

windlass bench Llama-3.1-8B --random-weights --quant int4 --group 32

windlass bench SmolLM2-135M-Instruct.gguf --save before.json

windlass bench ./GLM-4.5-Air-int4 --workers 10.0.0.7:9998,10.0.0.8:9998 --secret-file ~/.windlass-secret

windlass bench SmolLM2-135M-Instruct.gguf --compare before.json --profile trace.json --memory memory.png

windlass bench --served ./GLM-4.5-Air-int4

windlass bench --served ./GLM-4.5-Air-int4 http://localhost:8001 --at-once 8,64 --limit-first-token 700 --limit-between-tokens 50

windlass bench --served http://localhost:8001 --rate 0.5,1,2 --seconds 120"""

SERVED = "With --served"
DEFAULT_TOKENS = 128


@opens_model
def bench(
    model: list[str] = typer.Argument(
        ...,
        metavar="MODEL",
        help="Model as for `run`; with --random-weights a name or config.json is enough. With --served also the URL of a server, "
        "and several of them.",
    ),
    batch: str = typer.Option("1", metavar="1,8,32", help="Batch sizes to measure."),
    prompt_tokens: int | None = typer.Option(
        None, metavar="N", help="Prompt length; 128 by default, with --served that of the load."
    ),
    new_tokens: int | None = typer.Option(
        None, metavar="N", help="Generated tokens per sequence; 128 by default, with --served those of the load."
    ),
    random_weights: bool = typer.Option(
        False, "--random-weights", help="Random weights of the model's shape, stored as --quant says; needs no checkpoint."
    ),
    group: int | None = typer.Option(None, metavar="128|64|32", help="With --random-weights: group size; 128 by default."),
    launch: Launch = typer.Option(),
    profile: Path | None = typer.Option(None, metavar="trace.json", help="Write a Chrome trace of steps and kernels."),
    memory: Path | None = typer.Option(None, metavar="mem.png", help="Plot memory over time."),
    compare: Path | None = typer.Option(None, metavar="old.json", help="Compare with a report saved by --save."),
    save: Path | None = typer.Option(None, metavar="new.json", help="Save the report as JSON."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
    keep: bool = typer.Option(
        True,
        "--keep/--no-keep",
        help="Keep the figures in a local file: later plans on this machine use them. Not with --speculate, --exact, --deterministic or a split.",
    ),
    served: bool = typer.Option(
        False,
        "--served",
        rich_help_panel=SERVED,
        help="Measure over HTTP, as clients see it: a server that is started for MODEL as it comes, or servers at URLs.",
    ),
    load: str | None = typer.Option(
        None, metavar="table", rich_help_panel=SERVED, help="A set of loads: 1 to 256 at once; the default. Lengths scale it."
    ),
    at_once: str | None = typer.Option(
        None, metavar="1,8,32", rich_help_panel=SERVED, help="Closed loop: so many users, each with one request at a time."
    ),
    rate: str | None = typer.Option(
        None, metavar="0.5,2", rich_help_panel=SERVED, help="Poisson arrivals: so many requests per second."
    ),
    requests: int | None = typer.Option(
        None, metavar="N", rich_help_panel=SERVED, help="Requests per load; 4 per user, at least 16, by default."
    ),
    seconds: float | None = typer.Option(None, metavar="S", rich_help_panel=SERVED, help="Instead, send requests for so long."),
    limit_first_token: float | None = typer.Option(
        None, metavar="MS", rich_help_panel=SERVED, help="Goodput counts requests whose first token takes at most this."
    ),
    limit_between_tokens: float | None = typer.Option(
        None, metavar="MS", rich_help_panel=SERVED, help="And whose mean time between tokens is at most this."
    ),
    rounds: int | None = typer.Option(
        None, metavar="N", rich_help_panel=SERVED, help="How often all is measured; 1, or 2 where servers are compared."
    ),
    seed: int = typer.Option(0, metavar="N", rich_help_panel=SERVED, help="Of prompts and arrivals."),
    api_key: str | None = typer.Option(
        None, metavar="KEY|FILE", rich_help_panel=SERVED, help="API key of the URLs; also WINDLASS_API_KEY."
    ),
    name: str | None = typer.Option(
        None,
        "--name",
        metavar="NAME",
        rich_help_panel=SERVED,
        help="Model name at the URLs; without it, the first that is listed.",
    ),
) -> int:
    """Benchmark a model with the serving engine: tokens/s, time to first token, memory bandwidth and FLOP/s.

    The limits of the machine (memory bandwidth, matmul throughput) are measured in the same run.

    With --served, benchmark servers over HTTP: throughput, percentiles of the first token and between tokens, goodput.
    """
    if served:
        from windlass.cli.bench.served.run import ServedOptions
        from windlass.cli.bench.served.run import run as run_served

        _refuse(
            "is for a benchmark without --served",
            {
                "--batch": batch != "1",
                "--random-weights": random_weights,
                "--group": group,
                "--profile": profile,
                "--memory": memory,
            },
        )
        return run_served(
            ServedOptions(
                targets=tuple(model),
                load=load,
                at_once=at_once,
                rate=rate,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                requests=requests,
                seconds=seconds,
                limit_first_token=limit_first_token,
                limit_between_tokens=limit_between_tokens,
                rounds=rounds,
                seed=seed,
                api_key=api_key,
                name=name,
                launch=launch,
                compare=compare,
                save=save,
                as_json=as_json,
            )
        )
    _refuse(
        "needs --served",
        {
            "--load": load,
            "--at-once": at_once,
            "--rate": rate,
            "--requests": requests,
            "--seconds": seconds,
            "--limit-first-token": limit_first_token,
            "--limit-between-tokens": limit_between_tokens,
            "--rounds": rounds,
            "--seed": seed,
            "--api-key": api_key,
            "--name": name,
            "more than one MODEL": len(model) > 1,
            "a URL": model[0].startswith(("http://", "https://")),
        },
    )
    _refuse("needs --random-weights", {"--group": None if random_weights else group})
    from windlass.cli.bench.run import BenchOptions, run

    options = BenchOptions(
        batches=batch,
        prompt_tokens=DEFAULT_TOKENS if prompt_tokens is None else prompt_tokens,
        new_tokens=DEFAULT_TOKENS if new_tokens is None else new_tokens,
        random_weights=random_weights,
        quant=launch.quant,
        group=128 if group is None else group,
        launch=launch,
        profile=profile,
        memory=memory,
        compare=compare,
        save=save,
        as_json=as_json,
        keep=keep,
    )
    return run(model[0], options)


def _refuse(why: str, given: dict[str, object]) -> None:
    """The options that would have no effect."""
    for flag, value in given.items():
        if value:
            raise BadInput(f"{flag} {why}")


bench.__doc__ = f"{bench.__doc__}\n\n{EXAMPLES}"
