"""`windlass launch init`: sets a cluster up in eight steps. Each can be run again; nothing is changed without being asked or told `--yes`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput, Error, UnknownName
from windlass.tasks.launch.init import (
    LOCAL_DISKS,
    PROGRAMS,
    STEPS,
    Outcome,
    StepResult,
    choose_disk,
    expand_hosts,
    hostfile_lines,
    missing_programs,
    settings_toml,
)
from windlass.units import format_bytes

IN_MEMORY = frozenset({"tmpfs", "ramfs"})


class InitOptions(Frozen):
    hosts: str = ""
    slots: int = 0
    disk: Path | None = None
    partition: str = ""
    account: str = ""
    scheduler: str = ""
    key: Path | None = None
    yes: bool = False
    dry_run: bool = False


class Init:
    """One method a step; `ask` is asked before anything is changed."""

    def __init__(self, options: InitOptions, home: Path, ask: Callable[[str], bool]) -> None:
        self.options, self.home, self._ask = options, home, ask
        self.hostfile, self.settings, self.script = home / "hosts", home / "launch.toml", home / "job-example.sh"

    def run(self) -> list[StepResult]:
        steps = (self.prerequisites, self.disks, self.network, self.hosts, self.keys, self.connect, self.site, self.example)
        found: list[StepResult] = []
        for name, step in zip(STEPS, steps, strict=True):
            try:
                outcome, detail = step()
            except (Error, OSError) as error:
                outcome, detail = "failed", str(error)
            except subprocess.TimeoutExpired as error:
                outcome, detail = "failed", f"{error.cmd[0]} did not answer within {error.timeout:.0f} s; run this again"
            found.append(StepResult(step=name, outcome=outcome, detail=detail))
        return found

    def _change(self, what: str, act: Callable[[], None]) -> tuple[Outcome, str]:
        if self.options.dry_run:
            return "would", what
        if not self.options.yes and not self._ask(f"{what}?"):
            return "declined", what
        act()
        return "done", what

    def prerequisites(self) -> tuple[Outcome, str]:
        missing = missing_programs({program: shutil.which(program) is not None for program in PROGRAMS})
        scheduler = self._scheduler()
        if missing:
            return "failed", f"install {', '.join(missing)}"
        return "there", f"ssh, a compiler; scheduler: {scheduler or 'none, so ssh and local'}"

    def _scheduler(self) -> str:
        if self.options.scheduler:
            return self.options.scheduler
        return "slurm" if shutil.which("sbatch") else "pbs" if shutil.which("qsub") else ""

    def disks(self) -> tuple[Outcome, str]:
        largest = "" if self.options.disk is not None else self._largest()
        if self.options.disk is None and not largest:
            return "failed", "no local disk is found; name one with --disk"
        folder = self.options.disk or Path(largest) / "windlass"
        room = f"{format_bytes(shutil.disk_usage(_existing(folder)).free)} free"
        if folder.is_dir():
            return "there", f"{folder}, {room}"
        return self._change(f"create {folder} ({room})", lambda: folder.mkdir(parents=True, mode=0o700))

    def _largest(self) -> str:
        places = [place for place in LOCAL_DISKS if os.access(place, os.W_OK) and Path(place).is_dir()]
        types = _file_systems()
        return choose_disk(
            {place: shutil.disk_usage(place).free for place in places},
            {place: types.get(place, "") in IN_MEMORY for place in places},
        )

    def network(self) -> tuple[Outcome, str]:
        from windlass.runtime.machine.fabric.fabric import read_fabric

        fabric = read_fabric()
        ports = [f"{port.device} {port.link_layer} {port.gigabits:g} Gb/s" for port in fabric.active_ports]
        interfaces = [f"{one.name} {one.address}" for one in fabric.interfaces]
        if not interfaces:
            return "failed", "no network interface has an address"
        return "there", "; ".join([*ports[:4], *interfaces[:4]])

    def hosts(self) -> tuple[Outcome, str]:
        if self.hostfile.is_file():
            from windlass.tasks.launch.hostfile import parse_hostfile

            return "there", f"{self.hostfile}, {len(parse_hostfile(self.hostfile.read_text(), str(self.hostfile)))} machines"
        names = expand_hosts(self.options.hosts) if self.options.hosts else self._nodes()
        if not names:
            return "skipped", "no machines are named: --hosts node[001-004]"
        return self._change(
            f"write {self.hostfile} with {len(names)} machines",
            lambda: self._write(self.hostfile, hostfile_lines(names, self.options.slots)),
        )

    def _nodes(self) -> list[str]:
        """Slurm's own list."""
        if self._scheduler() != "slurm":
            return []
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%N"], capture_output=True, text=True, check=False, timeout=30)
        return list(dict.fromkeys(done.stdout.split()))

    def keys(self) -> tuple[Outcome, str]:
        if self._scheduler() and not self.options.hosts:
            return "skipped", "the scheduler starts processes; ssh keys are not needed"
        key = self.options.key or Path.home() / ".ssh" / "id_ed25519"
        if key.exists():
            return "there", f"{key}; `ssh-copy-id -i {key}.pub HOST` puts it on a machine"

        def make() -> None:
            key.parent.mkdir(mode=0o700, exist_ok=True)
            done = subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise BadInput(f"ssh-keygen failed: {done.stderr.strip()}")

        return self._change(f"make the key {key}", make)

    def connect(self) -> tuple[Outcome, str]:
        if not self.hostfile.is_file():
            return "skipped", "no hostfile"
        if self._scheduler() and not self.options.hosts:
            return "skipped", "`windlass launch slurm -- check` looks from inside a job"
        if self.options.dry_run:
            return "would", f"`windlass check --hosts {self.hostfile}`"
        words = [sys.executable, "-P", "-m", "windlass", "check", "--hosts", str(self.hostfile), "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
        import msgspec

        try:
            report = msgspec.json.decode(done.stdout.encode(), type=dict[str, object])
        except DECODE_ERRORS:
            return "failed", (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return (
            "there" if report["state"] != "fail" else "failed"
        ), f"check: {report['state']}; details: windlass check --hosts {self.hostfile}"

    def site(self) -> tuple[Outcome, str]:
        if self.settings.is_file():
            asked = self.options.partition or self.options.account
            return "there", f"{self.settings}{' is left as it is; change it by hand' if asked else ''}"
        values: dict[str, object] = {"warning_seconds": 300, "python": sys.executable}
        values |= {
            key: value for key, value in (("partition", self.options.partition), ("account", self.options.account)) if value
        }
        return self._change(f"write {self.settings}", lambda: self._write(self.settings, settings_toml(values)))

    def example(self) -> tuple[Outcome, str]:
        from windlass.tasks.launch.job import Job, Settings
        from windlass.tasks.launch.render.choose import render_job

        if self.script.is_file():
            return "there", str(self.script)
        scheduler = self._scheduler()
        job = Job(name="example", command=("train", "run", "recipe.toml"), kind="train")
        settings = Settings(
            scheduler="slurm" if scheduler == "slurm" else "pbs" if scheduler == "pbs" else "local",
            folder=str(self.home / "jobs" / "example"),
            workdir=str(Path.cwd()),
            python=sys.executable,
            time_seconds=3600,
            partition=self.options.partition if scheduler else "",
        )
        text = render_job(job, settings).files["job.sh"]
        return self._change(f"write {self.script}, a job script to read", lambda: self._write(self.script, text))

    def _write(self, file: Path, text: str) -> None:
        from windlass.model.formats.disk.atomic import write_atomically

        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.encode())


def _existing(folder: Path) -> Path:
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def _file_systems() -> dict[str, str]:
    """Mount point -> type."""
    from windlass.runtime.machine.proc import read_text

    fields = (line.split() for line in read_text("/proc/mounts").splitlines())
    return {words[1]: words[2] for words in fields if len(words) > 2}


def run_init(options: InitOptions) -> int:
    """Exit code 0 if no step failed."""
    from windlass.tasks.launch.registry import jobs_directory

    if options.scheduler not in ("", "slurm", "pbs"):
        raise UnknownName("--scheduler", options.scheduler, ("slurm", "pbs"))
    results = Init(options, jobs_directory().parent, _ask).run()
    _show(results)
    return 2 if any(one.outcome == "failed" for one in results) else 0


def _ask(question: str) -> bool:
    """Without a terminal nothing is changed."""
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _show(results: list[StepResult]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from windlass.cli.console import console

    table = Table("", "step", "", "", box=None, pad_edge=False)
    for number, one in enumerate(results, start=1):
        table.add_row(str(number), one.step, one.outcome, escape(one.detail))
    console().print(table)
