"""`windlass launch slurm|pbs|ssh|local`: from the options to files and a submitted job."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.cli.launch.before import Words, refuse_before
from windlass.cli.launch.refuse import QUEUES, TAKEN_BY, refuse_others_kinds
from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput, Error, UnknownName
from windlass.tasks.launch.job import Job, Rendered, Scheduler, Settings, as_name, kind_of
from windlass.tasks.launch.render.choose import render_job
from windlass.units import parse_time

if TYPE_CHECKING:
    from windlass.tasks.launch.drive.state import Record

SITE_KEYS = (
    "partition account qos constraint reservation cpus_per_node memory gpu_type gpu_option tasks exclusive warning_seconds "
    "container container_runtime mounts dialect python extra env time_seconds".split()
)
"""What a site's launch.toml may set."""


class LaunchOptions(Frozen):
    scheduler: Scheduler
    command: tuple[str, ...]
    nodes: int | None = None
    gpus: int | None = None
    ranks: int | None = None
    each: tuple[str, ...] = ()
    name: str = ""
    folder: Path | None = None
    hostfile: Path | None = None
    site: Path | None = None
    on_node_loss: str = "wait"
    min_nodes: int | None = None
    given: dict[str, Any] = {}
    """Fields of Settings that were set on the command line."""
    dry_run: bool = False
    as_json: bool = False
    wait: bool = False
    check: bool = True


def submit(options: LaunchOptions, parsed: Sequence[Words] = ()) -> int:
    """`parsed`: the command's own options; of an array, for each value."""
    from windlass.tasks.launch.registry import jobs_directory, new_name

    directory = jobs_directory()
    name = new_name(directory, as_name(options.name or _usual_name(options.command)))
    hosts = _hosts(options)
    job = _job(options, name, hosts)
    settings = _settings(options, name, directory, hosts)
    for words in parsed:
        refuse_before(words, job, settings)
    settings, notes = _with_cpus(job, settings)
    rendered = render_job(job, settings)
    rendered = msgspec.structs.replace(rendered, notes=(*rendered.notes, *notes))
    if options.dry_run:
        show(rendered, options.as_json)
        return 0
    if options.check:
        _check(job)
    record = _start(job, settings, rendered, directory)
    _say_started(record, rendered, options.as_json)
    if not options.wait:
        return 0
    from windlass.cli.launch.jobs import follow

    return follow(record)


def _usual_name(command: tuple[str, ...]) -> str:
    """`train-recipe`, `serve-GLM-4.5-Air`."""
    words = [word for word in command[1:] if not word.startswith("-") and word not in ("run", "{}")]
    name = Path(words[0]).name if words else ""
    for ending in (".toml", ".gguf", ".m"):
        name = name.removesuffix(ending)
    return f"{command[0] if command else 'job'}{f'-{name}' if name else ''}"


def show(rendered: Rendered, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode({"files": rendered.files, "submit": rendered.submit, "notes": rendered.notes}).decode())
        return
    for name, text in rendered.files.items():
        print(f"==> {name} <==\n{text}")
    print(f"submit: {shlex.join(rendered.submit)}")
    for note in rendered.notes:
        print(f"note: {note}")


# --- what runs


def _hosts(options: LaunchOptions) -> tuple[str, ...]:
    if options.scheduler != "ssh":
        return ()
    if options.hostfile is None:
        raise BadInput("launch ssh needs --hostfile FILE, with one machine per line: `node001 slots=8`")
    from windlass.tasks.launch.hostfile import parse_hostfile, read_hosts

    text = read_hosts(options.hostfile)
    parse_hostfile(text, str(options.hostfile))
    return tuple(line for line in (line.strip() for line in text.splitlines()) if line and not line.startswith("#"))


def _job(options: LaunchOptions, name: str, hosts: tuple[str, ...]) -> Job:
    nodes, gpus = _shape(options, hosts)
    kind = kind_of(options.command, nodes, bool(options.each))
    ranks = options.ranks or (_slots(hosts) if hosts else 0) or gpus or 1
    if options.on_node_loss not in ("wait", "shrink"):
        raise UnknownName("--on-node-loss", options.on_node_loss, ("wait", "shrink"))
    refuse_others_kinds(kind, options.scheduler, options.ranks, options.on_node_loss, options.min_nodes)
    least = options.min_nodes or (1 if options.on_node_loss == "shrink" else nodes)
    if not 1 <= least <= nodes:
        raise BadInput(f"--min-nodes {least} is not between 1 and --nodes {nodes}")
    return Job(
        name=name,
        command=options.command,
        kind=kind,
        num_nodes=nodes,
        min_nodes=least if kind == "train" else nodes,
        gpus_per_node=gpus,
        ranks_per_node=ranks if kind == "train" else 1,
        values=options.each,
    )


def _slots(hosts: tuple[str, ...]) -> int:
    from windlass.tasks.launch.hostfile import parse_hostfile

    slots = {host.slots for host in parse_hostfile("\n".join(hosts))} - {None}
    if len(slots) > 1:
        raise BadInput(
            f"the hosts have unlike slots ({', '.join(map(str, sorted(map(int, filter(None, slots)))))}); give --ranks, the same for all"
        )
    return slots.pop() or 0 if slots else 0


def _shape(options: LaunchOptions, hosts: tuple[str, ...]) -> tuple[int, int]:
    """Nodes and GPUs of each: as asked, else as the recipe's hardware or the saved plan says, else one node (all hosts, with ssh)."""
    over_ssh = options.scheduler == "ssh"
    planned = None if over_ssh and options.nodes is not None and options.gpus is not None else _planned(options.command, over_ssh)
    nodes, gpus = planned or (len(hosts) if hosts and _spans_nodes(options) else 1, 0)
    if options.scheduler == "local" and options.nodes not in (None, 1):
        raise BadInput("launch local runs on this machine alone; leave --nodes out, or use ssh with a hostfile")
    nodes = options.nodes if options.nodes is not None else 1 if options.scheduler == "local" else nodes
    if hosts and nodes > len(hosts):
        raise BadInput(f"{nodes} nodes are asked for, and the hostfile has {len(hosts)}")
    return nodes, gpus if options.gpus is None else options.gpus


def _spans_nodes(options: LaunchOptions) -> bool:
    return options.command[:1] == ("serve",) or options.command[:2] == ("train", "run")


def _planned(command: tuple[str, ...], over_ssh: bool) -> tuple[int, int] | None:
    if command[:2] == ("train", "run"):
        return _of_recipe([word for word in command[2:] if word.endswith(".toml")], over_ssh)
    if "--plan" in command[:-1]:
        from windlass.open.plan import read_plan

        plan = read_plan(Path(command[command.index("--plan") + 1]))
        nodes = len({rank.node for rank in plan.ranks}) or 1
        on_gpus = not all(held.name.startswith("cpu") for held in plan.memory.per_device)
        return nodes, -(-plan.layout.world // nodes) if on_gpus else 0
    return None


def _of_recipe(files: list[str], over_ssh: bool) -> tuple[int, int] | None:
    if not files:
        return None
    if not Path(files[0]).exists() and not over_ssh:  # over ssh it may be there, and only there
        raise BadInput(f"the recipe {files[0]} is not here; jobs are run in this folder, {Path.cwd()}")
    if not Path(files[0]).is_file():
        return None
    from windlass.core.hardware.parse import parse_hardware
    from windlass.core.recipe.recipe import load_recipe

    on = load_recipe(files[0]).hardware.on
    if on is None:
        return None
    hardware = parse_hardware(on)
    gpus = sum(device.kind == "cuda" for device in hardware.nodes[0].devices)
    return len(hardware.nodes), gpus


# --- settings


def _settings(options: LaunchOptions, name: str, directory: Path, hosts: tuple[str, ...]) -> Settings:
    values: dict[str, Any] = {
        "scheduler": options.scheduler,
        "folder": str((options.folder or directory / name).expanduser().absolute()),
        "workdir": str(Path.cwd()),
        "python": sys.executable,
        "hosts": hosts,
    }
    values |= _of_scheduler(_site(options.site, directory), options.scheduler) | options.given
    if values.get("container") and "python" not in options.given:
        values["python"] = "python3"  # the image's
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise BadInput(f"launch settings: {error}") from None


def _with_cpus(job: Job, settings: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Without --cpus schedulers give one CPU a task. What is asked for instead is said, and so is where nothing is known."""
    if settings.cpus_per_node is not None or settings.scheduler not in QUEUES or _asks_for_cpus(settings):
        return settings, ()
    if settings.scheduler == "pbs":
        number = max(job.gpus_per_node, 1) if settings.dialect == "pbspro" else 1
        return settings, (f"CPUs: {number} on each node; --cpus N asks for N",)
    from windlass.tasks.launch.drive.cpus import usual_cpus

    found = usual_cpus(job, settings)
    return msgspec.structs.replace(settings, cpus_per_node=found.per_node), (found.why,)


def _asks_for_cpus(settings: Settings) -> bool:
    """By a directive of the user's own."""
    return any(word.startswith(("--cpus-per", "-c", "ncpus", "-l")) for word in settings.extra)


def _of_scheduler(site: dict[str, Any], scheduler: Scheduler) -> dict[str, Any]:
    """Without what only queues have a use for: the container of a site is not that of a job on this machine."""
    named = {"cpus_per_node": "cpus", "mounts": "mount"}
    return {key: value for key, value in site.items() if scheduler in QUEUES or named.get(key, key) not in TAKEN_BY}


def _site(file: Path | None, directory: Path) -> dict[str, Any]:
    """launch.toml: --site FILE, else the one that `launch init` wrote beside the jobs."""
    import tomllib

    chosen = file or directory.parent / "launch.toml"
    if file is None and not chosen.is_file():
        return {}
    try:
        table = tomllib.loads(chosen.read_text(encoding="utf-8"))
    except (OSError, *DECODE_ERRORS) as error:
        raise BadInput(f"{chosen} cannot be read: {error}") from None
    for key in table:
        if key not in (*SITE_KEYS, "time"):
            raise UnknownName(f"key in {chosen}", key, [*SITE_KEYS, "time"])
    if "time" in table:
        table["time_seconds"] = parse_time(str(table.pop("time")))
    if isinstance(table.get("env"), dict):
        table["env"] = [[str(key), str(value)] for key, value in table["env"].items()]
    return table


# --- starting


def _check(job: Job) -> None:
    """One line when all is well; what would fail stops the launch."""
    from windlass.cli.check.quick import check_before

    check_before("launch", num_gpus=0)


def _start(job: Job, settings: Settings, rendered: Rendered, directory: Path) -> Record:
    from windlass.cli.launch.jobs import CANCELLED
    from windlass.model.formats.disk.atomic import write_atomically, write_errors
    from windlass.tasks.launch.drive.choose import driver_of
    from windlass.tasks.launch.drive.state import Record
    from windlass.tasks.launch.registry import remember

    folder = Path(settings.folder)
    _refuse_taken(folder, directory)
    is_new = not folder.exists()
    with write_errors(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # keys and prompts lie there
    for name, text in rendered.files.items():
        write_atomically(folder / name, text.encode())
    (folder / CANCELLED).unlink(missing_ok=True)  # of a job that had this folder before
    try:
        job_id = driver_of(settings.scheduler).submit(rendered, folder)
    except Error:
        if is_new:  # a job that was refused leaves nothing, and its name is free again
            shutil.rmtree(folder, ignore_errors=True)
        raise
    record = Record(
        name=job.name, scheduler=settings.scheduler, folder=str(folder), id=job_id, submitted=time.time(), job=job, workdir=settings.workdir
    )  # fmt: skip
    remember(directory, record, write_atomically)
    return record


def _refuse_taken(folder: Path, directory: Path) -> None:
    """A folder may be used again, but not under a job that has not ended: its scripts are read when it is requeued."""
    from windlass.cli.launch.jobs import state_of
    from windlass.tasks.launch.registry import all_jobs

    for other in all_jobs(directory):
        if Path(other.folder) == folder and not state_of(other).is_final:
            raise BadInput(f"{folder} is the folder of the job {other.name}, which has not ended; choose another --folder")


def _say_started(record: Record, rendered: Rendered, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode({"name": record.name, "id": record.id, "folder": record.folder}).decode())
        return
    for note in rendered.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{record.name} is launched ({record.scheduler} {record.id.partition(':')[0]}); its folder is {record.folder}")
    print(f"windlass launch status|logs|cancel {record.name}")
