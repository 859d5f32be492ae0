"""`windlass eval`: evaluate models, compare evaluations, list tasks."""

from __future__ import annotations

from pathlib import Path

import typer
from typer.core import TyperGroup

from windlass.cli.options import opens_model
from windlass.core.launch import Launch

EXAMPLES = """Examples:

windlass eval tiny-glm --tasks arithmetic,lists

windlass eval http://localhost:8000 --tasks gsm8k,humaneval --num-examples 200

windlass eval SmolLM2-135M-Instruct.gguf ./Qwen3-8B-int4 --tasks mmlu_logprob --num-examples 1000 --shots 5

windlass eval http://localhost:8000 --tasks humaneval --samples 10 --budget 2h

windlass eval --resume --results-dir eval-results/tiny-glm-1f2e3d

windlass eval compare eval-results/one eval-results/other"""


class _RunsByDefault(TyperGroup):
    """`windlass eval MODEL` is `windlass eval run MODEL`; `compare` and `tasks` are commands beside it."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunsByDefault, help=f"Evaluate models by category; resumable, with intervals.\n\n{EXAMPLES}", no_args_is_help=True
)


@app.callback()
def eval_() -> None:
    pass


@app.command()
@opens_model
def run(
    models: list[str] = typer.Argument(
        None,
        metavar="MODEL|URL...",
        help="Models as for `run`; servers: http://host:8000, or http://host:8000#NAME of several; routers: router.toml.",
    ),
    tasks: str | None = typer.Option(
        None, metavar="NAME,FILE.toml,...", help="Tasks; `windlass eval tasks` lists them. By default all whose data is here."
    ),
    category: str | None = typer.Option(
        None, metavar="coding,math,...", help="Only tasks of coding, math, reasoning or knowledge."
    ),
    num_examples: int | None = typer.Option(None, metavar="N", help="Questions of each task; a seeded choice. Default: all."),
    shots: int | None = typer.Option(None, metavar="K", help="Worked examples before each question. Default: the task's."),
    samples: int | None = typer.Option(None, metavar="N", help="Answers to each question, for pass@k. Default: 1, greedy."),
    temperature: float | None = typer.Option(None, metavar="T", help="0 is greedy, the default; with --samples 0.8."),
    seed: int | None = typer.Option(None, metavar="S", help="Of the choice of questions and of sampling. Default: 0."),
    max_tokens: int | None = typer.Option(None, metavar="N", help="Of an answer. Default: the task's."),
    prompt: str | None = typer.Option(
        None, metavar="chat|completion", help="With or without the chat template. Default: chat, if the model has one."
    ),
    thinking: bool | None = typer.Option(None, "--thinking/--no-thinking", help="Switch reasoning on or off."),
    concurrency: int | None = typer.Option(None, metavar="N", help="Requests at once. Default: what the server runs at once."),
    results_dir: Path | None = typer.Option(
        None,
        metavar="DIR",
        help="Where journals and reports go. Default: a folder under eval-results/ named by models and settings.",
    ),
    resume: bool = typer.Option(False, "--resume", help="Go on with what the folder has: ask only what is missing."),
    budget: str | None = typer.Option(None, metavar="5usd|2h", help="Stop in time, with what there is."),
    price: str | None = typer.Option(
        None, metavar="IN,OUT|USD/h", help="Dollars per million prompt and answer tokens, or per hour."
    ),
    watts: float | None = typer.Option(None, metavar="W", help="Power of the server, where nothing measures it."),
    prometheus: int | None = typer.Option(None, metavar="PORT", help="Serve progress to Prometheus on this port."),
    region: str = typer.Option("world", metavar="NAME", help="Whose electricity: a country or a cloud region."),
    api_key: str | None = typer.Option(None, metavar="KEY", envvar="WINDLASS_API_KEY", help="Key of the servers."),
    skip_execution: bool = typer.Option(False, "--skip-execution", help="Keep generated programs, but do not run them."),
    execute_anyway: bool = typer.Option(
        False, "--execute-anyway", help="Run generated programs even if this machine cannot isolate them. Dangerous."
    ),
    harness: tuple[str, str] = typer.Option(
        ("", ""), metavar="lm-eval TASKS", help="Also run lm-evaluation-harness's tasks, and show its numbers beside ours."
    ),
    export: str | None = typer.Option(None, metavar="lm-eval,inspect", help="Also write results in these layouts."),
    confidence: bool = typer.Option(
        False, "--confidence", help="Keep each answer's confidence (token log-probabilities), for `windlass route fit`."
    ),
    wait: float = typer.Option(600.0, metavar="SECONDS", help="How long a server that is gone is waited for."),
    deadline: float = typer.Option(600.0, metavar="SECONDS", help="Of one answer; later it counts as a failed request."),
    launch: Launch = typer.Option(),
    as_json: bool = typer.Option(False, "--json", help="Print results as JSON."),
) -> int:
    """Evaluate models: every answer is kept as it comes, so a run that ends in any way goes on with --resume."""
    from windlass.cli.eval.options import EvalOptions, wanted_from
    from windlass.cli.eval.run import evaluate

    given = {
        "models": tuple(models or ()), "tasks": tasks, "category": category, "num_examples": num_examples, "shots": shots,
        "samples": samples, "temperature": temperature, "seed": seed, "max_tokens": max_tokens, "style": prompt, "thinking": thinking,
    }  # fmt: skip
    options = EvalOptions(
        concurrency=concurrency,
        results_dir=results_dir,
        resume=resume,
        budget=budget,
        price=price,
        watts=watts,
        prometheus=prometheus,
        region=region,
        api_key=api_key,
        skip_execution=skip_execution,
        execute_anyway=execute_anyway,
        harness=harness,
        export=export,
        confidence=confidence,
        wait_seconds=wait,
        deadline_seconds=deadline,
        launch=launch,
        as_json=as_json,
    )
    return evaluate(wanted_from(given), options)


@app.command()
def compare(
    folders: list[Path] = typer.Argument(..., metavar="A B...", help="Results folders; the first is compared with each other."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> int:
    """Compare evaluations on the questions that they share: paired differences with intervals."""
    from windlass.cli.eval.compare import compare_folders

    return compare_folders(folders, as_json)


@app.command()
def tasks(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> int:
    """List the built-in tasks and whether their data is on this machine."""
    from windlass.cli.eval.tables import show_tasks

    show_tasks(as_json)
    return 0
