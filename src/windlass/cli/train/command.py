"""`windlass train`: run a recipe, prepare data, export checkpoints."""

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
    recipe: Path = typer.Argument(..., metavar="RECIPE.toml", help="The training recipe."),
    resume: bool = typer.Option(False, "--resume", help="Continue from the last checkpoint."),
    resume_if_any: bool = typer.Option(
        False, "--continue", help="Continue from the last checkpoint if there is one, else start; what launched jobs do."
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Override a key of the recipe, e.g. schedule.steps=100."
    ),
    nproc: int = typer.Option(
        1, "--nproc", metavar="N", help="Worker processes on this machine, run under torchrun's elastic agent if more than one."
    ),
    nodes: str = typer.Option(
        "1",
        "--nodes",
        metavar="N|MIN:MAX",
        help="Machines that run this command together; fewer than MAX go on without the others.",
    ),
    rendezvous: str = typer.Option(
        "", "--rendezvous", metavar="HOST:PORT", help="With --nodes: where they meet, on node 0. `windlass launch` sets it."
    ),
    node: int = typer.Option(0, "--node", metavar="I", help="With --nodes: this machine's number; 0 holds the meeting."),
    address: str = typer.Option("", "--address", metavar="ADDRESS", help="With --nodes: where the others reach this machine."),
    max_restarts: int | None = typer.Option(
        None, metavar="N", help="How often failed workers are restarted from the last checkpoint. Default: 3 with --nproc."
    ),
    out: Path | None = typer.Option(
        None, metavar="DIR", help="Directory for checkpoints and logs. Default: <recipe>-run beside the recipe."
    ),
    plan_only: bool = typer.Option(False, "--plan", help="Only print the plan, and whether it fits."),
    plan_file: Path | None = typer.Option(None, hidden=True, help="The plan, for worker processes."),
    force: bool = typer.Option(False, "--force", help="Start even if the plan does not fit."),
    profile: bool = typer.Option(False, "--profile", help="Profile a few steps: a trace, and FLOPs by module."),
    prometheus: int | None = typer.Option(None, metavar="PORT", help="Serve metrics to Prometheus on this port."),
    tensorboard: bool = typer.Option(False, "--tensorboard", help="Also write metrics for TensorBoard."),
    as_json: bool = typer.Option(False, "--json", help="Print one line of JSON per step instead of the live line."),
) -> int:
    """Train a recipe. The run is planned first and does not start if it does not fit.

    Exit code 0: done. 75: stopped by SIGTERM, SIGUSR1, SIGHUP or Ctrl-C after saving a checkpoint; continue with `--resume`. 74: the last checkpoint
    could not be saved. 3: does not fit.
    """
    from windlass.cli.train.options import TrainOptions
    from windlass.cli.train.run import run_recipe

    options = TrainOptions(
        resume=resume,
        resume_if_any=resume_if_any,
        nodes=nodes,
        rendezvous=rendezvous,
        node=node,
        address=address,
        settings=tuple(settings),
        nproc=nproc,
        max_restarts=max_restarts,
        out=out,
        plan_only=plan_only,
        plan_file=plan_file,
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
        ..., metavar="CHECKPOINT", help="A run's directory (uses its last checkpoint), or one of its step-N directories."
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="Output directory, in Hugging Face format."),
    tokenizer: Path | None = typer.Option(None, metavar="DIR", help="Directory of the tokenizer files. Default: the run's copy."),
    dtype: str = typer.Option("bf16", metavar="bf16|fp16|fp32", help="Data type of the weights."),
    max_shard: str = typer.Option("5GB", metavar="5GB", help="Maximum size of a weights file."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> int:
    """Export a checkpoint as Hugging Face safetensors with config and tokenizer, for transformers, vLLM and `windlass convert`."""
    from windlass.cli.train.export import run_export

    return run_export(checkpoint, out, tokenizer=tokenizer, dtype=dtype, max_shard=max_shard, as_json=as_json)


@app.command()
def consolidate(
    local: Path = typer.Argument(..., metavar="LOCAL", help="The local checkpoint directory, the same path on every node."),
    shared: Path = typer.Argument(..., metavar="SHARED", help="Shared directory for the complete checkpoints."),
    hostfile: Path = typer.Option(..., "--hostfile", metavar="FILE", help="One host per line, as `host slots=8`."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> int:
    """Collect checkpoint parts from the nodes' local disks. A local copy is deleted only after its checksum was verified on the shared store."""
    from windlass.cli.train.export import run_consolidate

    return run_consolidate(local, shared, hostfile=hostfile, as_json=as_json)
