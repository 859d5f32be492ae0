"""`windlass route`: fit a router to answers, report what it gains, ask it."""

from __future__ import annotations

from pathlib import Path

import typer

EXAMPLES = """Examples:

windlass route fit eval-results/small eval-results/large --floor 0.95

windlass route fit answers.jsonl --models small=Qwen3-8B,large=GLM-4.6 --price GLM-4.6=0.6,2.2 --price Qwen3-8B=0.05,0.2

windlass route report router.json --plot pareto.png --page report.html

windlass route ask router.json "What is the capital of France?"

windlass serve --route router.toml

windlass route compare SmolLM2-135M-Instruct.gguf ./Qwen3-8B-int4 --tasks humaneval"""

app = typer.Typer(help=f"Route between small and large models, measured on your own answers.\n\n{EXAMPLES}", no_args_is_help=True)


@app.command()
def fit(
    answers: list[Path] = typer.Argument(
        ..., metavar="ANSWERS...", help="Results folders of `windlass eval`; .jsonl, one answer a line; .csv, one column a model."
    ),
    models: str | None = typer.Option(None, metavar="small=NAME,large=NAME", help="Which models, cheapest first. Default: all."),
    price: list[str] = typer.Option([], metavar="NAME=IN,OUT", help="Dollars per million prompt and answer tokens of a model."),
    floor: float = typer.Option(0.95, metavar="SHARE", help="Quality to keep, relative to the best single model."),
    confidence: float = typer.Option(0.95, metavar="P", help="With which the floor holds."),
    out: Path = typer.Option(Path("router.json"), metavar="FILE", help="The router."),
    plot: Path | None = typer.Option(None, metavar="FILE.png", help="Draw quality against cost."),
    page: Path | None = typer.Option(None, metavar="FILE.html", help="Write the report as a page."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> int:
    """Fit a router to answers of two models or more to the same prompts, and say what it would have gained."""
    from windlass.cli.route.fit import FitCommand, fit_command

    command = FitCommand(
        answers=tuple(answers), models=models, prices=tuple(price), floor=floor, confidence=confidence, out=out, plot=plot,
        page=page, as_json=as_json,
    )  # fmt: skip
    return fit_command(command)


@app.command()
def report(
    router: Path = typer.Argument(..., metavar="router.json"),
    plot: Path | None = typer.Option(None, metavar="FILE.png", help="Draw quality against cost."),
    page: Path | None = typer.Option(None, metavar="FILE.html", help="Write the report as a page."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Show what a fitted router gains against each model, random, length and the oracle."""
    from windlass.cli.route.fit import report_command

    return report_command(router, plot, page, as_json)


@app.command()
def ask(
    router: Path = typer.Argument(..., metavar="router.json|router.toml", help="A .json only decides; a .toml asks its models."),
    prompt: str = typer.Argument(..., metavar="PROMPT"),
    variant: str = typer.Option("auto", "--model", metavar="auto|auto:cheap|auto:best", help="As a client would say."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Say which model a prompt goes to and why; with a router.toml, also answer it."""
    from windlass.cli.route.ask import ask_command

    return ask_command(router, prompt, variant, as_json)
