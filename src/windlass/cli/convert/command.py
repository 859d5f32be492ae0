"""`windlass convert`: quantizes checkpoints and converts between formats."""

from __future__ import annotations

from pathlib import Path

import typer

EXAMPLES = """Examples:

windlass convert ./GLM-4.5-Air ./GLM-4.5-Air-int4 --quant int4

windlass convert PrimeIntellect/INTELLECT-3 ./INTELLECT-3-int4 --stream --max-memory 2GB

windlass convert SmolLM2-135M-Instruct.gguf ./smollm2 --quant int8

windlass convert ./Llama-3.1-8B ./out --quant int4 --to dllama

windlass convert ./Qwen3-8B ./Qwen3-8B.gguf --quant Q4_K_M"""


def convert(
    sources: list[str] = typer.Argument(
        ..., metavar="SOURCE OUT", help="Model directory, .gguf file, .m file or hub name; then the output."
    ),
    quant: str = typer.Option(
        "int4", metavar="int4|int8|fp8|bf16", help="Quantization of the weights; with --to gguf Q4_K_M, Q4_0 or Q8_0."
    ),
    group: int = typer.Option(128, metavar="128|64|32", help="Group size: weights that share a scale (int4, int8)."),
    asymmetric: bool = typer.Option(False, "--asymmetric", help="int4 with zero points: slightly more accurate and larger."),
    calibrate: str = typer.Option(
        "", metavar="self|FILE", help="Calibrate int4 on text sampled from the model itself, or on a text file."
    ),
    to: str = typer.Option(
        "",
        metavar="hf|gguf|dllama",
        help="Output format: Hugging Face directory, one GGUF file, or Distributed Llama .m and .t files; "
        "without it, OUT's ending decides (.gguf, .m), else hf.",
    ),
    out_dir: Path | None = typer.Option(None, metavar="DIR", help="Convert several SOURCEs, each to a directory in DIR."),
    max_memory: str = typer.Option("2GB", metavar="2GB", help="Memory limit for the conversion, excluding the program itself."),
    jobs: int = typer.Option(0, metavar="N", help="Worker threads; 0: one per core."),
    keep: str = typer.Option("", metavar="lm_head,router", help="Do not quantize matrices whose name contains one of these."),
    head: bool = typer.Option(False, "--quantize-head", help="Quantize the output head too."),
    mtp: str = typer.Option("keep", metavar="keep|drop", help="Keep or drop the multi-token-prediction layer."),
    stream: bool = typer.Option(
        False, "--stream", help="Convert a hub model while it downloads, deleting each source file when done."
    ),
    verify: bool = typer.Option(False, "--verify", help="Read the output back and compare it with the source."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> int:
    """Convert a checkpoint in bounded memory. To resume after an interruption, run the same command again."""
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
