"""`windlass convert`: any checkpoint to 4 or 8 bits."""

from __future__ import annotations

from pathlib import Path

import typer

EXAMPLES = """Examples:

windlass convert ./GLM-4.5-Air ./GLM-4.5-Air-int4 --quant int4

windlass convert PrimeIntellect/INTELLECT-3 ./INTELLECT-3-int4 --stream --max-memory 2GB

windlass convert SmolLM2-135M-Instruct.gguf ./smollm2 --quant int8

windlass convert ./Llama-3.1-8B ./out --quant int4 --to dllama"""


def convert(
    sources: list[str] = typer.Argument(
        ..., metavar="SOURCE OUT", help="Model directory, .gguf, .m, or a name; then the output."
    ),
    quant: str = typer.Option("int4", metavar="int4|int8|fp8|bf16", help="How matrices are stored."),
    group: int = typer.Option(128, metavar="128|64|32", help="Weights that share a scale (int4, int8)."),
    asymmetric: bool = typer.Option(False, "--asymmetric", help="int4 with zero points: a little closer, a little larger."),
    calibrate: str = typer.Option(
        "", metavar="self|TEXT", help="int4 that keeps products: measured on the model's own text, or on a text file."
    ),
    to: str = typer.Option("hf", metavar="hf|dllama", help="A Hugging Face directory, or Distributed Llama's .m and .t files."),
    out_dir: Path | None = typer.Option(None, metavar="DIR", help="Convert several SOURCEs, each to a folder in DIR."),
    max_memory: str = typer.Option("2GB", metavar="2GB", help="What the work may hold in memory, beside the program."),
    jobs: int = typer.Option(0, metavar="N", help="Workers; 0 is one per core."),
    keep: str = typer.Option("", metavar="lm_head,router", help="Parts of names of matrices to leave in high precision."),
    head: bool = typer.Option(False, "--quantize-head", help="Pack the output head too."),
    mtp: str = typer.Option("keep", metavar="keep|drop", help="The multi-token-prediction layer."),
    stream: bool = typer.Option(False, "--stream", help="From the hub: convert file by file as they arrive, and delete each."),
    verify: bool = typer.Option(False, "--verify", help="Read everything back and compare it with the source."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> int:
    """Convert a checkpoint in bounded memory. Interrupted, it goes on where it was when the same command is given again."""
    from windlass.cli.convert.run import ConvertOptions, run

    options = ConvertOptions(
        quant=quant,
        group=group,
        asymmetric=asymmetric,
        calibrate=calibrate,
        to=to,
        max_memory=max_memory,
        jobs=jobs,
        keep=tuple(part for part in keep.split(",") if part),
        head=head,
        mtp=mtp,
        stream=stream,
        verify=verify,
        as_json=as_json,
    )
    return run(sources, out_dir, options)


convert.__doc__ = f"{convert.__doc__}\n\n{EXAMPLES}"
