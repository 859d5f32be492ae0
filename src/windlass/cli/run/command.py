"""`windlass run`: a chat in the terminal, or one answer. (Not called run.py: the package's own `run` would be hidden by it.)"""

from __future__ import annotations

from pathlib import Path

import typer

from windlass.cli.fleet import options as fleet_options

EXAMPLES = """Examples:

windlass run SmolLM2-135M-Instruct.gguf

windlass run ./GLM-4.5-Air-int4 --prompt "Why is the sky blue?" --max-tokens 200

cat letter.txt | windlass run ./Qwen3-8B-int8 --system "Summarise in one sentence." --temperature 0

windlass run SmolLM2-135M-Instruct.gguf --tp 2

windlass run ./GLM-4.5-Air-int4 --workers 10.0.0.7:9998,10.0.0.8:9998 --secret-file ~/.windlass-secret

windlass run meta-llama/Llama-3.1-8B --plan plan.json"""


def run(
    model: str = typer.Argument(
        ..., metavar="MODEL", help="A model directory, .gguf or .m file, or a name of the registry or the hub."
    ),
    prompt: str | None = typer.Option(
        None, metavar="TEXT", help="Answer this and stop. Without it: a chat, or what is piped in."
    ),
    max_tokens: int | None = typer.Option(None, metavar="N", help="Longest answer; without it until the model stops."),
    temperature: float | None = typer.Option(None, metavar="T", help="0 takes the most likely token; 1 draws as the model says."),
    top_p: float | None = typer.Option(None, metavar="P", help="Draw among the most likely tokens that together reach P."),
    top_k: int | None = typer.Option(None, metavar="K", help="Draw among the K most likely tokens."),
    seed: int | None = typer.Option(None, metavar="S", help="The same seed gives the same answer."),
    system: str | None = typer.Option(None, metavar="TEXT", help="What the model is told before the chat begins."),
    device: str = typer.Option("auto", metavar="cpu|cuda|mps", help="Where it runs; without it the best there is."),
    kv: str | None = typer.Option(None, metavar="bf16|fp32", help="How keys and values are stored."),
    context: str | None = typer.Option(None, metavar="8k", help="Tokens of chat and answer to keep memory for."),
    workers: str | None = fleet_options.WORKERS,
    secret_file: Path | None = fleet_options.SECRET_FILE,
    sync: str = fleet_options.SYNC,
    tp: int = fleet_options.TP,
    pp: int = fleet_options.PP,
    ep: int = fleet_options.EP,
    plan: Path | None = typer.Option(None, metavar="plan.json", help="Run as `windlass plan --save` decided."),
    exact: bool = typer.Option(False, "--exact", help="Packed weights as plain fp32: slower, larger, no rounding."),
    as_json: bool = typer.Option(False, "--json", help="Print the answer as JSON, with its tokens and times."),
) -> int:
    """Run a model on this machine, or on several: chat with it, or have one answer.

    Sampling follows the model's own generation config where it has one. Ctrl-C stops an answer; a second one, or Ctrl-D, leaves.
    """
    from windlass.cli.open.fleet import Over
    from windlass.cli.run.options import RunOptions
    from windlass.cli.run.session import start
    from windlass.core.layout import Layout

    options = RunOptions(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        system=system,
        device=device,
        kv=kv,
        context=context,
        over=Over(workers=workers, secret_file=secret_file, sync=sync, layout=Layout(tp=tp, pp=pp, ep=ep)),
        plan=plan,
        exact=exact,
        as_json=as_json,
    )
    return start(model, options)


run.__doc__ = f"{run.__doc__}\n\n{EXAMPLES}"
