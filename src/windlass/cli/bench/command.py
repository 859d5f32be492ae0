"""`windlass bench`: speed of a model on this machine, compared with the hardware limits."""

from __future__ import annotations

from pathlib import Path

import typer

from windlass.cli.options import opens_model
from windlass.core.launch import Launch

EXAMPLES = """Examples:

windlass bench ./GLM-4.5-Air-int4 --batch 1,8,32

windlass bench Llama-3.1-8B --random-weights --quant int4 --group 32

windlass bench SmolLM2-135M-Instruct.gguf --save before.json

windlass bench ./GLM-4.5-Air-int4 --workers 10.0.0.7:9998,10.0.0.8:9998 --secret-file ~/.windlass-secret

windlass bench SmolLM2-135M-Instruct.gguf --compare before.json --profile trace.json --memory memory.png"""


@opens_model
def bench(
    model: str = typer.Argument(
        ..., metavar="MODEL", help="Model as for `run`; with --random-weights a name or config.json is enough."
    ),
    batch: str = typer.Option("1", metavar="1,8,32", help="Batch sizes to measure."),
    prompt_tokens: int = typer.Option(128, metavar="N", help="Prompt length."),
    new_tokens: int = typer.Option(128, metavar="N", help="Generated tokens per sequence."),
    random_weights: bool = typer.Option(
        False, "--random-weights", help="Random weights of the model's shape; needs no checkpoint."
    ),
    group: int = typer.Option(128, metavar="128|64|32", help="With --random-weights: group size."),
    launch: Launch = typer.Option(),
    profile: Path | None = typer.Option(None, metavar="trace.json", help="Write a Chrome trace of steps and kernels."),
    memory: Path | None = typer.Option(None, metavar="mem.png", help="Plot memory over time."),
    compare: Path | None = typer.Option(None, metavar="old.json", help="Compare with a report saved by --save."),
    save: Path | None = typer.Option(None, metavar="new.json", help="Save the report as JSON."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> int:
    """Benchmark a model with the serving engine: tokens/s, time to first token, memory bandwidth and FLOP/s.

    The limits of the machine (memory bandwidth, matmul throughput) are measured in the same run.
    """
    from windlass.cli.bench.run import BenchOptions, run

    options = BenchOptions(
        batches=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        random_weights=random_weights,
        quant=launch.quant,
        group=group,
        launch=launch,
        profile=profile,
        memory=memory,
        compare=compare,
        save=save,
        as_json=as_json,
    )
    return run(model, options)


bench.__doc__ = f"{bench.__doc__}\n\n{EXAMPLES}"
