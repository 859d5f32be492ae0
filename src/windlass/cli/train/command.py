"""`windlass train`: run a recipe, make its data, give out what it made."""

from __future__ import annotations

from pathlib import Path

import typer

from windlass.cli.train import data as train_data

EXAMPLES = """Examples:

windlass train run recipes/tiny-glm-moe-cpu.toml

windlass train run recipes/tiny-glm-moe-cpu.toml --resume --set schedule.steps=400 --set optimizer.lr=1e-3

windlass train run recipes/tiny-glm-1xH200.toml --nproc 2 --max-restarts 3"""

app = typer.Typer(help="Train a model, from scratch or from a checkpoint.", no_args_is_help=True)


@app.callback()
def train() -> None:
    pass


@app.command()
def run(
    recipe: Path = typer.Argument(..., metavar="RECIPE.toml", help="What to train, on what and how."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the last checkpoint."),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Overrides a key of the recipe: schedule.steps=100."
    ),
    nproc: int = typer.Option(
        1, "--nproc", metavar="N", help="Processes on this machine; more than one are kept alive by torchrun's agent."
    ),
    max_restarts: int | None = typer.Option(
        None, metavar="N", help="How often killed processes are started again from the last checkpoint."
    ),
    out: Path | None = typer.Option(
        None, metavar="DIR", help="Where checkpoints and logs go; else a folder named for the recipe, beside it."
    ),
    plan_only: bool = typer.Option(False, "--plan", help="Only say whether it fits, and stop."),
    force: bool = typer.Option(False, "--force", help="Start although the plan says that it does not fit."),
    profile: bool = typer.Option(False, "--profile", help="Write a trace of a few steps, and the FLOPs of every module."),
    prometheus: int | None = typer.Option(None, metavar="PORT", help="Serve the run's numbers to Prometheus on this port."),
    tensorboard: bool = typer.Option(False, "--tensorboard", help="Write the run's numbers for TensorBoard too."),
    as_json: bool = typer.Option(False, "--json", help="One line of JSON a step on standard output, instead of the live line."),
) -> int:
    """Train what the recipe says. It checks that the run fits before anything starts.

    Exit code 0: done. 75: stopped on SIGTERM, SIGUSR1 or Ctrl-C, with a checkpoint saved; `--resume` goes on. 3: does not fit.
    """
    from windlass.cli.train.run import Options, run_recipe

    options = Options(
        resume=resume,
        settings=tuple(settings),
        nproc=nproc,
        max_restarts=max_restarts,
        out=out,
        plan_only=plan_only,
        force=force,
        profile=profile,
        prometheus=prometheus,
        tensorboard=tensorboard,
        as_json=as_json,
    )
    return run_recipe(recipe, options)


run.__doc__ = f"{run.__doc__}\n\n{EXAMPLES}"


app.command("data")(train_data.data)


@app.command()
def export(
    checkpoint: Path = typer.Argument(
        ..., metavar="CHECKPOINT", help="A run's folder (its last checkpoint), or one step-N of it."
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="A new folder in the Hugging Face layout."),
    tokenizer: Path | None = typer.Option(None, metavar="DIR", help="Where tokenizer files come from; else as the recipe says."),
    dtype: str = typer.Option("bf16", metavar="bf16|fp16|fp32", help="How weights are written."),
    max_shard: str = typer.Option("5GB", metavar="5GB", help="The largest file of weights."),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> int:
    """Write a checkpoint as Hugging Face safetensors, with config and tokenizer: for transformers, vLLM and `windlass convert`."""
    from windlass.cli.train.export import run_export

    return run_export(checkpoint, out, tokenizer=tokenizer, dtype=dtype, max_shard=max_shard, as_json=as_json)


@app.command()
def consolidate(
    local: Path = typer.Argument(..., metavar="LOCAL", help="The folder that nodes saved to, the same path on each."),
    shared: Path = typer.Argument(..., metavar="SHARED", help="Where whole checkpoints go."),
    hostfile: Path = typer.Option(..., "--hostfile", metavar="FILE", help="One host a line, as `host slots=8`."),
    as_json: bool = typer.Option(False, "--json", help="Print what was brought together as JSON."),
) -> int:
    """Bring together what nodes saved each for itself. A local copy goes only when its checksum was found on the shared store."""
    from windlass.cli.train.export import run_consolidate

    return run_consolidate(local, shared, hostfile=hostfile, as_json=as_json)
