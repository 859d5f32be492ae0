"""`windlass plan`: what running or training a model takes, and why."""

from __future__ import annotations

from pathlib import Path

import typer

EXAMPLES = """Examples:

windlass plan GLM-4.5-Air --on 1xH200 --quant int4

windlass plan Llama-3.1-405B --on 2xA100-80GB,ram=200GB,disk=500GB

windlass plan GLM-4.6 --on "4x(8xH100-80GB)@400Gb" --goal throughput --context 32k

windlass plan INTELLECT-3 --cloud"""


SERVING = ("engine", "goal", "context", "concurrency", "quant", "group", "kv", "prompt_tokens", "new_tokens")
TRAINING = ("tokens", "sequence", "batch")


def plan(
    ctx: typer.Context,
    target: str = typer.Argument(
        ..., metavar="MODEL|RECIPE.toml", help="A path, a name of the registry, a hub name, or a training recipe."
    ),
    on: str | None = typer.Option(
        None,
        metavar="HARDWARE",
        help="8xH100-80GB, 2xA100-80GB[70GB],ram=200GB, 4x(8xH100-80GB)@400Gb, 3x(cpu:16,ram=32GB)@1Gb or cluster.toml; else this machine.",
    ),
    engine: str = typer.Option("auto", metavar="auto|windlass|vllm", help="What will run it."),
    goal: str = typer.Option("latency", metavar="latency|throughput|cost", help="What to pick by."),
    context: str | None = typer.Option(None, metavar="8k", help="Tokens of context to keep memory for, per sequence."),
    concurrency: int | None = typer.Option(
        None, metavar="N", help="Sequences at once; without it one, or as many as fit for throughput and cost."
    ),
    quant: str = typer.Option("auto", metavar="auto|bf16|fp8|int8|int4", help="How weights are stored."),
    group: int = typer.Option(128, metavar="128|64|32", help="Weights that share a scale (int4, int8)."),
    kv: str = typer.Option("bf16", metavar="bf16|fp8|fp32", help="How keys and values are stored."),
    tp: int | None = typer.Option(None, help="Pin: ranks that share each layer."),
    pp: int | None = typer.Option(None, help="Pin: stages of layers."),
    ep: int | None = typer.Option(None, help="Pin: ranks the experts are spread over (the tp ranks again)."),
    dp: int | None = typer.Option(None, help="Pin: replicas."),
    prompt_tokens: str | None = typer.Option(None, metavar="1k", help="Length of a prompt, for speed."),
    new_tokens: str | None = typer.Option(None, metavar="1k", help="Length of an answer, for speed."),
    train: bool = typer.Option(False, "--train", help="Plan a training run instead."),
    tokens: str | None = typer.Option(None, metavar="15T", help="Tokens to train on."),
    sequence: str | None = typer.Option(None, metavar="4k", help="Training: tokens per sequence."),
    batch: str | None = typer.Option(None, metavar="4M", help="Training: tokens per step."),
    cloud: bool = typer.Option(False, "--cloud", help="Offers that can run it, cheapest first."),
    all_offers: bool = typer.Option(False, "--all-offers", help="With --cloud: also prices older than a year or unverified."),
    region: str = typer.Option("world", metavar="R", help="Grid for carbon: a country or a cloud region."),
    as_json: bool = typer.Option(False, "--json", help="Print the whole plan as JSON."),
    save: Path | None = typer.Option(None, metavar="plan.json", help="Write the plan, for `windlass run --plan`."),
    plot: Path | None = typer.Option(None, metavar="out.png", help="Draw memory per device."),
) -> int:
    """Say what running a model takes: devices, layout, quantization, memory, speed, price, and why.

    Exit code 3 when it does not fit; it then says how many bytes are short and what would fit.
    """
    from windlass.cli.plan import inference as plan_inference
    from windlass.cli.plan import training as plan_training
    from windlass.cli.plan.output import Output

    output = Output(as_json=as_json, save=save, plot=plot)
    pins = {name: value for name, value in (("tp", tp), ("pp", pp), ("ep", ep), ("dp", dp)) if value is not None}
    if train or target.endswith(".toml"):
        _refuse(ctx, SERVING, "about running a model, not about training one; a recipe says how to train")
        return plan_training.run(
            target,
            on=on,
            pins=pins,
            tokens=tokens,
            sequence=sequence,
            batch=batch,
            region=region,
            cloud=cloud,
            all_offers=all_offers,
            output=output,
        )
    _refuse(ctx, TRAINING, "about training; add --train, or leave it out")
    return plan_inference.run(
        target,
        on=on,
        engine=engine,
        goal=goal,
        context=context,
        concurrency=concurrency,
        quant=quant,
        group=group,
        kv=kv,
        pins=pins,
        lengths=(prompt_tokens, new_tokens),
        cloud=cloud,
        all_offers=all_offers,
        region=region,
        output=output,
    )


def _refuse(ctx: typer.Context, names: tuple[str, ...], why: str) -> None:
    """What would be ignored is a misunderstanding, and said."""
    from windlass.errors import BadInput

    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise BadInput(f"--{name.replace('_', '-')} is {why}")


plan.__doc__ = f"{plan.__doc__}\n\n{EXAMPLES}"
