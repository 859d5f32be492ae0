"""`windlass bench`: how fast a model runs here, against what the machine can do."""

from __future__ import annotations

from pathlib import Path

import typer

from windlass.cli.fleet import options as fleet_options

EXAMPLES = """Examples:

windlass bench ./GLM-4.5-Air-int4 --batch 1,8,32

windlass bench Llama-3.1-8B --random-weights --quant int4 --group 32

windlass bench SmolLM2-135M-Instruct.gguf --save before.json

windlass bench ./GLM-4.5-Air-int4 --workers 10.0.0.7:9998,10.0.0.8:9998 --secret-file ~/.windlass-secret

windlass bench SmolLM2-135M-Instruct.gguf --compare before.json --profile trace.json --memory memory.png"""


def bench(
    model: str = typer.Argument(..., metavar="MODEL", help="As for `run`; with --random-weights a name or a config is enough."),
    batch: str = typer.Option("1", metavar="1,8,32", help="Sequences at once; each is measured."),
    prompt_tokens: int = typer.Option(128, metavar="N", help="Length of a prompt."),
    new_tokens: int = typer.Option(128, metavar="N", help="Length of an answer."),
    random_weights: bool = typer.Option(False, "--random-weights", help="No checkpoint: the published shape, numbers at random."),
    quant: str | None = typer.Option(None, metavar="int4|int8|fp8|bf16", help="With --random-weights: how matrices are stored."),
    group: int = typer.Option(128, metavar="128|64|32", help="With --random-weights: weights that share a scale."),
    workers: str | None = fleet_options.WORKERS,
    secret_file: Path | None = fleet_options.SECRET_FILE,
    sync: str = fleet_options.SYNC,
    tp: int = fleet_options.TP,
    pp: int = fleet_options.PP,
    ep: int = fleet_options.EP,
    device: str = typer.Option("auto", metavar="cpu|cuda|mps", help="Where it runs; without it the best there is."),
    kv: str = typer.Option("bf16", metavar="bf16|fp32", help="How keys and values are stored."),
    exact: bool = typer.Option(False, "--exact", help="Packed weights as plain fp32: slower, larger, no rounding."),
    profile: Path | None = typer.Option(None, metavar="trace.json", help="Write a Chrome trace of the steps and their kernels."),
    memory: Path | None = typer.Option(None, metavar="mem.png", help="Draw memory over time."),
    compare: Path | None = typer.Option(None, metavar="old.json", help="Set an earlier measurement beside it."),
    save: Path | None = typer.Option(None, metavar="new.json", help="Write the measurement as JSON."),
    as_json: bool = typer.Option(False, "--json", help="Print the measurement as JSON."),
) -> int:
    """Measure a model on this machine, through the engine that serves: tokens/s, time to first token, bytes and operations per second.

    What the machine can do is measured in the same run: how fast it reads memory, how fast it multiplies matrices.
    """
    from windlass.cli.bench.run import BenchOptions, run
    from windlass.cli.open.fleet import Over
    from windlass.core.layout import Layout

    options = BenchOptions(
        batches=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        random_weights=random_weights,
        quant=quant,
        group=group,
        over=Over(workers=workers, secret_file=secret_file, sync=sync, layout=Layout(tp=tp, pp=pp, ep=ep)),
        device=device,
        kv=kv,
        exact=exact,
        profile=profile,
        memory=memory,
        compare=compare,
        save=save,
        as_json=as_json,
    )
    return run(model, options)


bench.__doc__ = f"{bench.__doc__}\n\n{EXAMPLES}"
