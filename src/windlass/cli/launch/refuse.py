"""What is refused before anything is written or queued: options that would do nothing, and command lines that the job could not start with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.errors import BadInput
from windlass.tasks.launch.job import VERBS, Kind, Scheduler

if TYPE_CHECKING:
    import typer

QUEUES: tuple[Scheduler, ...] = ("slurm", "pbs")
TAKEN_BY: dict[str, tuple[Scheduler, ...]] = {
    **dict.fromkeys("qos constraint reservation gpu_type tasks".split(), ("slurm",)),
    **dict.fromkeys("partition account exclusive gpu_option memory cpus requeue array_limit extra".split(), QUEUES),
    **dict.fromkeys("container container_runtime mount".split(), QUEUES),
    "dialect": ("pbs",),
    "hostfile": ("ssh",),
}
"""Options that not every scheduler has a use for."""


def refuse_others_options(ctx: typer.Context, scheduler: Scheduler) -> None:
    for name in (name for name, takers in TAKEN_BY.items() if scheduler not in takers and _is_given(ctx, name)):
        takers = "` and `launch ".join(TAKEN_BY[name])
        instead = "; a directive of your site can be given with --extra" if scheduler == "pbs" and name != "hostfile" else ""
        raise BadInput(f"--{name.replace('_', '-')} is for `launch {takers}`, not for `launch {scheduler}`{instead}")
    if scheduler == "pbs" and ctx.params.get("container_runtime") == "pyxis":
        raise BadInput("pyxis is a plugin of Slurm; with PBS a container is started by apptainer")
    for name, needed in (
        ("warning", "time"),
        ("array_limit", "each"),
        ("mount", "container"),
        ("container_runtime", "container"),
    ):
        if _is_given(ctx, name) and not _is_given(ctx, needed) and not _is_given(ctx, "site"):
            raise BadInput(f"--{name.replace('_', '-')} does nothing without --{needed}")


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_others_kinds(kind: Kind, scheduler: Scheduler, ranks: int | None, on_node_loss: str, min_nodes: int | None) -> None:
    """Options that only training has a use for."""
    may_shrink = on_node_loss == "shrink"
    if kind != "train" and (ranks is not None or may_shrink or min_nodes is not None):
        given = "--ranks" if ranks is not None else "--on-node-loss" if may_shrink else "--min-nodes"
        raise BadInput(f"{given} is for `train run`; leave it out")
    if min_nodes is not None and not may_shrink:
        raise BadInput("--min-nodes is for --on-node-loss shrink; without it the job waits for all its nodes")
    if may_shrink and scheduler not in ("slurm", "ssh"):
        raise BadInput(f"--on-node-loss shrink is for Slurm and ssh: `launch {scheduler}` cannot go on without a node")


def check_words(root: Any, words: list[str]) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """Parses the job's command line, as it will be when the job starts, perhaps hours later. `root`: the command `windlass`.

    Returns the names of the command and its options."""
    if not words or words[0] not in VERBS:
        return None  # refused in better words when the job is made
    if {"-h", "--help"} & set(words):
        raise BadInput(f"help is not a job: `windlass {' '.join(words)}` shows it")
    try:
        return _parse(root, words)
    except Exception as error:  # of click, whose usage errors format their own message; others are ours
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        said = " ".join(str(usage()).split()) or f"`windlass {' '.join(words)}` is not a whole command"
        raise BadInput(f"{said} (see `windlass {words[0]} --help`)") from None


def _parse(root: Any, words: list[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Groups are walked as click does."""
    context, command, left, names = None, root, words, list[str]()
    while True:
        context = command.make_context(command.name or "windlass", list(left), parent=context)
        if not hasattr(command, "resolve_command"):
            return tuple(names), dict(context.params)
        left = [*context._protected_args, *context.args]  # as click's Group.invoke
        if not left:
            return tuple(names), {}
        name, command, left = command.resolve_command(context, left)
        names.append(str(name))
