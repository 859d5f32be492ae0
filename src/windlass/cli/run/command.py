"""`windlass run`: a chat in the terminal, or one answer."""

from __future__ import annotations

from pathlib import Path

import typer

from windlass.cli.about.completion import complete_model
from windlass.cli.options import opens_model
from windlass.core.launch import Launch

EXAMPLES = """Examples:

windlass run SmolLM2-135M-Instruct.gguf

windlass run ./GLM-4.5-Air-int4 --prompt "Why is the sky blue?" --max-tokens 200

cat letter.txt | windlass run ./Qwen3-8B-int8 --system "Summarise in one sentence." --temperature 0

windlass run SmolLM2-135M-Instruct.gguf --tp 2

windlass run ./GLM-4.5-Air-int4 --workers 10.0.0.7:9998,10.0.0.8:9998 --secret-file ~/.windlass-secret

windlass run meta-llama/Llama-3.1-8B --plan plan.json"""


@opens_model
def run(
    model: str = typer.Argument(
        ...,
        metavar="MODEL",
        help="A model directory, a .gguf or .m file, or a name from `windlass models` or the hub.",
        autocompletion=complete_model,
    ),
    text: list[str] = typer.Argument(None, metavar="PROMPT", help="The same as --prompt."),
    prompt: str | None = typer.Option(
        None,
        metavar="TEXT",
        help="Answer this prompt and exit; - reads it from standard input. Without it: a chat, or the text piped in.",
    ),
    max_tokens: int | None = typer.Option(
        None, metavar="N", help="Maximum tokens of the answer; without it, until the model stops."
    ),
    temperature: float | None = typer.Option(None, metavar="T", help="Sampling temperature; 0 is greedy."),
    top_p: float | None = typer.Option(
        None, metavar="P", help="Nucleus sampling: keep the most likely tokens whose probabilities sum to P."
    ),
    top_k: int | None = typer.Option(None, metavar="K", help="Sample from the K most likely tokens."),
    seed: int | None = typer.Option(None, metavar="S", help="Random seed; the same seed gives the same answer."),
    system: str | None = typer.Option(None, metavar="TEXT", help="System prompt."),
    launch: Launch = typer.Option(),
    plan: Path | None = typer.Option(None, metavar="plan.json", help="Run as this saved plan says (`windlass plan --save`)."),
    allow_loops: bool = typer.Option(False, "--allow-loops", help="Do not stop an answer that only repeats itself."),
    as_json: bool = typer.Option(False, "--json", help="Print the answer as JSON, with token ids and timings."),
) -> int:
    """Run a model on this machine or over several: chat with it, or get one answer.

    Sampling defaults come from the model's generation config if it has one. Ctrl-C stops an answer; a second one, or Ctrl-D, exits.
    """
    from windlass.cli.run.options import RunOptions
    from windlass.cli.run.session import start
    from windlass.errors import BadInput

    if text and prompt is not None:
        raise BadInput("the prompt was given twice, behind the model and with --prompt; leave one of them out")
    options = RunOptions(
        prompt=" ".join(text) if text else prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        system=system,
        launch=launch,
        plan=plan,
        as_json=as_json,
        allow_loops=allow_loops,
    )
    return start(model, options)


run.__doc__ = f"{run.__doc__}\n\n{EXAMPLES}"
