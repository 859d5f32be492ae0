"""A job: what runs, on how many nodes, and how a scheduler is asked for them. Values only."""

from __future__ import annotations

import re
from typing import Literal

from windlass.core.model import Frozen
from windlass.errors import BadInput, UnknownName

Kind = Literal["train", "serve", "array", "single"]
"""train: ranks on every node that meet; serve: a root and workers; array: one process for each value; single: one process."""
Scheduler = Literal["slurm", "pbs", "ssh", "local"]
Loss = Literal["wait", "shrink"]

VERBS = ("serve", "train", "eval", "bench", "convert", "route", "check")
STOPPED = 75
"""Exit code of training that saved and stopped. No other code lets a job go back to the queue: what failed would fail again."""
SECRETS = ("api-key", "secret")
"""Files of a server's job: the key of its clients and the secret of its workers."""
PLACE = "{}"
"""In an array's command: where each value goes."""
NAME = re.compile(r"[^A-Za-z0-9_.+-]+")


class Job(Frozen):
    """What runs."""

    name: str
    command: tuple[str, ...]
    """Arguments of windlass: ("train", "run", "recipe.toml")."""
    kind: Kind = "single"
    num_nodes: int = 1
    min_nodes: int = 1
    """Below which a training run does not go on; less than `num_nodes` only if it may shrink."""
    gpus_per_node: int = 0
    ranks_per_node: int = 1
    """Processes of a training run on each node."""
    values: tuple[str, ...] = ()
    """Of an array, each put in the place of {}."""

    @property
    def may_shrink(self) -> bool:
        return self.min_nodes < self.num_nodes


class Settings(Frozen):
    """How the scheduler is asked. Only what was asked for is written: sites refuse options they do not know."""

    scheduler: Scheduler
    folder: str
    """Of the job: scripts, logs, addresses; seen by all nodes (except with ssh)."""
    workdir: str
    """Where the command is run."""
    python: str
    """The interpreter that has Windlass on the nodes."""
    time_seconds: int | None = None
    partition: str = ""
    """PBS: the queue."""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    cpus_per_node: int | None = None
    memory: str = ""
    """Of a node, as the scheduler writes it: 64G."""
    gpu_type: str = ""
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    tasks: Literal["node", "rank"] = "node"
    """One task a node that starts its ranks, or one task a rank."""
    exclusive: bool = False
    warning_seconds: int = 300
    """How long before the time limit the job is told to save."""
    max_requeues: int = 100
    requeue: bool = True
    array_limit: int | None = None
    """Of an array, how many run at once."""
    container: str = ""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: tuple[str, ...] = ()
    """SOURCE[:TARGET] inside the container, beside the job's folder and the working directory."""
    dialect: Literal["pbspro", "torque"] = "pbspro"
    hosts: tuple[str, ...] = ()
    """With ssh: lines of the hostfile."""
    env: tuple[tuple[str, str], ...] = ()
    """Set on every node."""
    extra: tuple[str, ...] = ()
    """Directives written as they are: `--licenses=foo`."""


class Rendered(Frozen):
    """Files of a job by name, and the command that submits it."""

    files: dict[str, str]
    submit: tuple[str, ...]
    notes: tuple[str, ...] = ()


def kind_of(command: tuple[str, ...], num_nodes: int, has_values: bool) -> Kind:
    """From the command. Raises BadInput for a command that cannot be launched."""
    if not command:
        raise BadInput("there is no command; write it after --, e.g. `-- train run recipe.toml`")
    if command[0] not in VERBS:
        raise UnknownName("command to launch", command[0], VERBS)
    if has_values != any(PLACE in word for word in command):
        raise BadInput(
            f"--each and {PLACE} in the command belong together: `--each gsm8k,humaneval -- eval MODEL --tasks {PLACE}`"
        )
    if has_values:
        if num_nodes > 1:
            raise BadInput("an array (--each) has one node for each of its values; leave --nodes out")
        return "array"
    if command[:2] == ("train", "run"):
        return "train"
    if command[0] == "serve":
        return "serve"
    if num_nodes > 1:
        raise BadInput(f"`{' '.join(command[:2])}` runs on one node; --nodes is for `serve` and `train run`")
    return "single"


def checked(job: Job, settings: Settings) -> None:
    """Refuses what no scheduler could run, before anything is written."""
    for what, number in (("--nodes", job.num_nodes), ("--ranks", job.ranks_per_node)):
        if number < 1:
            raise BadInput(f"{what} is {number}; it must be at least 1")
    if settings.array_limit is not None and settings.array_limit < 1:
        raise BadInput(f"--array-limit is {settings.array_limit}; it must be at least 1")
    if settings.scheduler == "pbs" and settings.dialect == "torque" and settings.exclusive:
        raise BadInput("Torque has no directive for whole nodes that all its versions know; give your site's with --extra")
    if job.gpus_per_node < 0:
        raise BadInput(f"--gpus is {job.gpus_per_node}; it must not be negative")
    if settings.time_seconds is not None and settings.time_seconds <= settings.warning_seconds and job.kind == "train":
        raise BadInput(
            f"--time {settings.time_seconds} s leaves nothing after --warning {settings.warning_seconds} s; ask for more time, or a later warning"
        )
    for word in (*job.command, *job.values, settings.folder, settings.workdir, settings.python):
        if "\0" in word or "\n" in word:
            raise BadInput(f"{word!r} has a line break or a NUL, which no script can carry")
    for name, _ in settings.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise BadInput(f"--env {name!r} is no name of a variable; write NAME=VALUE")


def as_name(text: str) -> str:
    """A name that schedulers, shells and file systems take."""
    return NAME.sub("-", text).strip("-.")[:60] or "job"
