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
    region: str = typer.Option("world", metavar="NAME", help="Whose electricity, for CO2: a country or a cloud region."),
    out: Path = typer.Option(Path("router.json"), metavar="FILE", help="The router."),
    plot: Path | None = typer.Option(None, metavar="FILE.png", help="Draw quality against cost."),
    page: Path | None = typer.Option(None, metavar="FILE.html", help="Write the report as a page."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> int:
    """Fit a router to answers of two models or more to the same prompts, and say what it would have gained."""
    from windlass.cli.route.fit import FitCommand, fit_command

    command = FitCommand(
        answers=tuple(answers), models=models, prices=tuple(price), floor=floor, confidence=confidence, out=out, plot=plot,
        page=page, region=region, as_json=as_json,
    )  # fmt: skip
    return fit_command(command)


@app.command()
def report(
    router: Path = typer.Argument(..., metavar="router.json", help="What `windlass route fit` wrote."),
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
    prompt: str = typer.Argument(..., metavar="PROMPT", help="The question to decide on."),
    variant: str = typer.Option("auto", "--model", metavar="auto|auto:cheap|auto:best", help="As a client would say."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Say which model a prompt goes to and why; with a router.toml, also answer it."""
    from windlass.cli.route.ask import ask_command

    return ask_command(router, prompt, variant, as_json)


@app.command()
def replay(
    log: Path = typer.Argument(..., metavar="decisions.jsonl", help="The log of a router (`log` in router.toml)."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Make every logged decision again, and say whether it is the same."""
    from windlass.cli.route.replay import replay_command

    return replay_command(log, as_json)


@app.command()
def compare(
    models: list[str] = typer.Argument(..., metavar="MODEL|URL...", help="Two models or more, cheapest first."),
    tasks: str = typer.Option("humaneval", metavar="NAME,FILE.toml,...", help="Tasks of `windlass eval`."),
    num_examples: int | None = typer.Option(None, metavar="N", help="Questions of each task. Default: all."),
    max_tokens: int | None = typer.Option(None, metavar="N", help="Of an answer. Default: the task's."),
    skip_execution: bool = typer.Option(False, "--skip-execution", help="Keep generated programs, but do not run them."),
    floor: float = typer.Option(0.95, metavar="SHARE", help="Quality to keep, relative to the best single model."),
    results_dir: Path | None = typer.Option(None, metavar="DIR", help="Where everything goes."),
    resume: bool = typer.Option(False, "--resume", help="Go on with what the folder has."),
    watts: float | None = typer.Option(None, metavar="W", help="Power of the servers, where nothing measures it."),
    region: str = typer.Option("world", metavar="NAME", help="Whose electricity: a country or a cloud region."),
    price: list[str] = typer.Option([], metavar="NAME=IN,OUT", help="Dollars per million prompt and answer tokens of a model."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> int:
    """Estimate, evaluate all models on the same questions, fit a router, compare, and write a page: one command."""
    from windlass.cli.route.compare import CompareCommand, compare_command

    command = CompareCommand(
        models=tuple(models), tasks=tasks, num_examples=num_examples, max_tokens=max_tokens, skip_execution=skip_execution, floor=floor,
        results_dir=results_dir, resume=resume, watts=watts, region=region, prices=tuple(price), as_json=as_json,
    )  # fmt: skip
    return compare_command(command)
