"""`windlass launch`: its commands and their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from windlass.cli.launch import workers

if TYPE_CHECKING:
    from windlass.tasks.launch.job import Scheduler

JOB = "Its name or number, as `windlass launch list` shows it."
EXAMPLES = """Examples:

windlass launch slurm --nodes 4 --gpus 8 --time 24h --partition gpu -- train run recipes/glm-4.6-1024xH800.toml

windlass launch slurm --nodes 2 --gpus 8 --time 8h -- serve ./GLM-4.6 --tp 16

windlass launch slurm --gpus 1 --time 2h --each gsm8k,humaneval,mmlu -- eval ./GLM-4.5-Air-int4 --tasks {}

windlass launch pbs --nodes 2 --gpus 4 --time 12h --partition workq -- train run recipe.toml

windlass launch ssh --hostfile hosts -- train run recipe.toml

windlass launch local -- bench tiny-glm

windlass launch slurm --nodes 4 --gpus 8 --dry-run -- train run recipe.toml"""


class _WorkersByDefault(TyperGroup):
    """`windlass launch --hostfile hosts` is `windlass launch workers --hostfile hosts`."""

    def parse_args(self, ctx, args):  # type: ignore[no-untyped-def]
        if args and args[0].startswith("-") and args[0] not in ("-h", "--help"):
            args = ["workers", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_WorkersByDefault,
    help=f"Run any command as a job on Slurm, PBS, other machines by ssh, or this one.\n\n{EXAMPLES}",
    no_args_is_help=True,
)


@app.callback()
def launch() -> None:
    pass


def _submitting(scheduler: Scheduler) -> Callable[..., int]:
    def run(
        ctx: typer.Context,
        command: list[str] = typer.Argument(
            ..., metavar="-- COMMAND...", help="serve, train run, eval, bench or convert, with its options."
        ),
        nodes: int | None = typer.Option(None, metavar="N", help="Nodes. Default: the recipe's or the plan's, else 1."),
        gpus: int | None = typer.Option(
            None, metavar="N", help="GPUs of each node. Default: the recipe's or the plan's, else 0."
        ),
        ranks: int | None = typer.Option(None, metavar="N", help="Training processes on each node. Default: one a GPU, else 1."),
        time: str | None = typer.Option(
            None, metavar="24h", help="Time limit. Training saves before it and goes back to the queue."
        ),
        warning: str | None = typer.Option(None, metavar="5min", help="How long before the time limit training is told to save."),
        each: str | None = typer.Option(
            None, metavar="A,B,...", help="An array: one job for each value, put in the place of {}."
        ),
        array_limit: int | None = typer.Option(None, metavar="N", help="Of an array, how many run at once."),
        name: str = typer.Option("", "--name", metavar="NAME", help="Of the job. Default: from the command."),
        folder: Path | None = typer.Option(
            None, metavar="DIR", help="Scripts, logs, addresses; seen by all nodes. Default: ~/.windlass/jobs/NAME."
        ),
        partition: str | None = typer.Option(None, metavar="P", help="Partition; with PBS, the queue."),
        account: str | None = typer.Option(None, metavar="A", help="Who pays for it."),
        qos: str | None = typer.Option(None, metavar="Q", help="Quality of service (Slurm)."),
        constraint: str | None = typer.Option(None, metavar="FEATURE", help="Only nodes that have this (Slurm)."),
        reservation: str | None = typer.Option(None, metavar="NAME", help="Use nodes that were reserved under this name."),
        cpus: int | None = typer.Option(None, metavar="N", help="CPUs of each node."),
        memory: str | None = typer.Option(None, metavar="64G", help="Memory of each node, as the scheduler writes it."),
        exclusive: bool | None = typer.Option(None, "--exclusive", help="Share nodes with nobody."),
        gpu_type: str | None = typer.Option(None, metavar="h100", help="As the site names it."),
        gpu_option: str | None = typer.Option(None, metavar="gpus-per-node|gres|none", help="How GPUs are asked for (Slurm)."),
        tasks: str | None = typer.Option(
            None, metavar="node|rank", help="One task a node, which starts the ranks, or one a rank (Slurm)."
        ),
        requeue: bool | None = typer.Option(
            None, "--requeue/--no-requeue", help="Go back to the queue after the time limit or a lost node."
        ),
        on_node_loss: str = typer.Option(
            "wait", metavar="wait|shrink", help="When a node is lost: wait for another, or go on with the rest."
        ),
        min_nodes: int | None = typer.Option(None, metavar="N", help="With shrink: fewer than this do not go on."),
        container: str | None = typer.Option(None, metavar="IMAGE", help="Run the command in this container."),
        container_runtime: str | None = typer.Option(
            None, metavar="pyxis|apptainer", help="What starts the container. Default: pyxis."
        ),
        mount: list[str] = typer.Option([], metavar="DIR[:DIR]", help="Also seen in the container."),
        dialect: str | None = typer.Option(None, metavar="pbspro|torque", help="Of PBS."),
        hostfile: Path | None = typer.Option(None, metavar="FILE", help="With ssh: one machine per line, `node001 slots=8`."),
        python: str | None = typer.Option(
            None, metavar="PATH", help="The interpreter that has Windlass on the nodes. Default: this one's path."
        ),
        env: list[str] = typer.Option([], metavar="NAME=VALUE", help="Set on every node."),
        extra: list[str] = typer.Option([], metavar="OPTION", help="A directive written as it is: --extra=--licenses=foo."),
        site: Path | None = typer.Option(
            None, metavar="launch.toml", help="Defaults of a site. Default: ~/.windlass/launch.toml."
        ),
        check: bool = typer.Option(True, "--check/--no-check", help="Check this machine first."),
        wait: bool = typer.Option(False, "--wait", help="Show the log until the job ends; the exit code is the job's."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Print the files and submit nothing."),
        as_json: bool = typer.Option(False, "--json", help="Print JSON; with --dry-run the files by name."),
    ) -> int:
        from windlass.cli.launch.refuse import check_words, refuse_others_options
        from windlass.cli.launch.submit import LaunchOptions, submit
        from windlass.errors import BadInput
        from windlass.units import parse_time

        refuse_others_options(ctx, scheduler)
        values = tuple(value for value in (each or "").split(",") if value)
        filled = [[word.replace("{}", value) for word in command] for value in values or ("{}",)]
        parsed = [check_words(ctx.find_root().command, words) for words in filled]
        given: dict[str, Any] = {
            "time_seconds": None if time is None else parse_time(time), "warning_seconds": None if warning is None else parse_time(warning),
            "partition": partition, "account": account, "qos": qos, "constraint": constraint, "reservation": reservation, "cpus_per_node": cpus,
            "memory": memory, "exclusive": exclusive, "gpu_type": gpu_type, "gpu_option": gpu_option, "tasks": tasks, "requeue": requeue,
            "array_limit": array_limit, "container": container, "container_runtime": container_runtime, "mounts": mount or None,
            "dialect": dialect, "python": python, "extra": extra or None, "env": [_pair(word) for word in env] or None,
        }  # fmt: skip
        if each is not None and not values:
            raise BadInput("--each has no values; write them with commas between them")
        options = LaunchOptions(
            scheduler=scheduler,
            command=tuple(command),
            nodes=nodes,
            gpus=gpus,
            ranks=ranks,
            each=values,
            name=name,
            folder=folder,
            hostfile=hostfile,
            site=site,
            on_node_loss=on_node_loss,
            min_nodes=min_nodes,
            given={key: value for key, value in given.items() if value is not None},
            dry_run=dry_run,
            as_json=as_json,
            wait=wait,
            check=check,
        )
        return submit(options, [one for one in parsed if one is not None])

    return run


def _pair(word: str) -> tuple[str, str]:
    from windlass.errors import BadInput

    name, equals, value = word.partition("=")
    if not equals:
        raise BadInput(f"--env {word!r}: write NAME=VALUE")
    return name, value


_DOCS: dict[Scheduler, str] = {
    "slurm": "Submit a command to Slurm.",
    "pbs": "Submit a command to PBS Pro, OpenPBS or Torque.",
    "ssh": "Run a command on the machines of a hostfile, by ssh.",
    "local": "Run a command on this machine, in the background.",
}
for _scheduler, _doc in _DOCS.items():
    _run = _submitting(_scheduler)
    _run.__doc__ = inspect.cleandoc(_doc)
    app.command(_scheduler)(_run)

app.command("workers")(workers.launch)


@app.command("list")
def list_jobs(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> int:
    """List the jobs that were launched from this machine."""
    from windlass.cli.launch.jobs import show_list

    return show_list(as_json)


@app.command()
def status(
    job: str = typer.Argument(..., metavar="JOB", help=JOB), as_json: bool = typer.Option(False, "--json", help="Print JSON.")
) -> int:
    """Show a job: its state and why, nodes, address and log."""
    from windlass.cli.launch.jobs import show_status

    return show_status(job, as_json)


@app.command()
def logs(
    job: str = typer.Argument(..., metavar="JOB", help=JOB),
    follow: bool = typer.Option(False, "--follow", "-f", help="Until the job ends."),
    lines: int = typer.Option(1000, metavar="N", min=1, help="The last N lines."),
) -> int:
    """Print a job's log."""
    from windlass.cli.launch.jobs import show_logs

    return show_logs(job, follow, lines)


@app.command()
def cancel(job: str = typer.Argument(..., metavar="JOB", help=JOB)) -> int:
    """End a job. Training saves a checkpoint first, if the scheduler leaves it the time."""
    from windlass.cli.launch.jobs import cancel as cancel_job

    return cancel_job(job)


@app.command()
def forget(job: str = typer.Argument(..., metavar="JOB", help=JOB)) -> int:
    """Take an ended job off the list; its folder stays."""
    from windlass.cli.launch.jobs import forget as forget_job

    return forget_job(job)


@app.command(hidden=True)
def node(
    folder: str = typer.Argument(..., metavar="FOLDER|-"),
    run: str = typer.Option(""),
    node: int = typer.Option(0, min=0),
    meeting: str = typer.Option(""),
    index: int | None = typer.Option(None),
) -> int:
    """The part of a job that runs on each node; scripts call it."""
    from windlass.cli.launch.node import run_on_node

    return run_on_node(folder, run, node, meeting, index)


@app.command("vllm-node", hidden=True)
def vllm_node(model: str = typer.Argument(...), plan: Path = typer.Option(...), node: int = typer.Option(..., min=1)) -> int:
    """vLLM on a node that serves no API; scripts call it."""
    from windlass.cli.launch.node import run_vllm_node

    return run_vllm_node(model, plan, node)


@app.command(hidden=True)
def supervise(folder: Path = typer.Argument(...), run: Path = typer.Option(...)) -> int:
    """Holds the connections of a job over ssh; its script calls it."""
    from windlass.cli.launch.node import supervise_ssh

    return supervise_ssh(folder, run)


@app.command()
def init(
    hosts: str = typer.Option("", metavar="node[001-004],...", help="Machines for ssh. Default: Slurm's nodes."),
    slots: int = typer.Option(0, metavar="N", min=0, help="Processes or GPUs of each machine."),
    disk: Path | None = typer.Option(None, metavar="DIR", help="Folder on a local disk. Default: the largest that is found."),
    scheduler: str = typer.Option("", metavar="slurm|pbs", help="Default: the one that is installed."),
    partition: str = typer.Option("", metavar="P", help="For the job script; with PBS, the queue."),
    account: str = typer.Option("", metavar="A", help="For the job script: who pays."),
    key: Path | None = typer.Option(None, metavar="FILE", help="The ssh key. Default: ~/.ssh/id_ed25519."),
    yes: bool = typer.Option(False, "--yes", "-y", help="Do not ask."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be changed."),
) -> int:
    """Set a cluster up: prerequisites, local disks, network, hostfile, ssh keys, connectivity, settings, a job script. Can be run again."""
    from windlass.cli.launch.init import InitOptions, run_init

    options = InitOptions(
        hosts=hosts, slots=slots, disk=disk, scheduler=scheduler, partition=partition, account=account, key=key, yes=yes, dry_run=dry_run
    )  # fmt: skip
    return run_init(options)
