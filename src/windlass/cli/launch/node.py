"""`windlass launch node` and `supervise`: what the scripts of a job call."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

from windlass.errors import BadInput


def run_on_node(folder: str, run: str, number: int, meeting: str, index: int | None) -> int:
    from windlass.model.formats.disk.atomic import write_atomically
    from windlass.runtime.machine.parent_death import kill_with_parent
    from windlass.tasks.launch.hostfile import parse_hostfile
    from windlass.tasks.launch.node import Node, read_description, run_node

    if folder == "-":
        description = read_description(os.environ.pop("WINDLASS_JOB", "").encode())
        hosts = tuple(host.reached_at for host in parse_hostfile("\n".join(description.settings.hosts)))[
            : description.job.num_nodes
        ]
    else:
        description = read_description(_read(Path(folder) / "job.json"))
        if description.settings.scheduler == "local":  # a scheduler ends what its script leaves
            kill_with_parent(signal.SIGTERM)
        hosts = tuple(_read(Path(run) / "hosts").decode().split())
    if number >= max(len(hosts), 1):
        raise BadInput(f"node {number} is not among the {len(hosts)} hosts of this job")
    node = Node(
        job=description.job,
        settings=description.settings,
        number=number,
        hosts=hosts,
        run=run,
        meeting=meeting,
        index=index if index is not None else _array_index(run),
    )
    return run_node(node, write_atomically)


def supervise_ssh(folder: Path, run: Path) -> int:
    from windlass.model.formats.disk.atomic import write_atomically
    from windlass.runtime.machine.parent_death import kill_with_parent
    from windlass.tasks.launch.drive.ssh import supervise
    from windlass.tasks.launch.node import read_description

    kill_with_parent(signal.SIGTERM)  # of the job's script: nobody would end what runs on the hosts
    return supervise(read_description(_read(folder / "job.json")), run, write_atomically)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise BadInput(
            f"{file} cannot be read on {os.uname().nodename}: {error.strerror}; is the job's folder on shared storage?"
        ) from None


def _array_index(run: str) -> int | None:
    given = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if not given and run and (Path(run) / "index").is_file():
        given = (Path(run) / "index").read_text().strip()
    return int(given) if given.isdecimal() else None


def run_vllm_node(model: str, plan: Path, node: int) -> int:
    """In the foreground; a signal ends vLLM and its ranks."""
    import subprocess

    from windlass.open.plan import read_plan
    from windlass.open.resolve import model_files
    from windlass.open.vllm.start import served_model, vllm_command

    command = vllm_command(read_plan(plan), served_model(model_files(model, shown=False)), node=node)
    process = subprocess.Popen([*command.argv], env=os.environ | command.env)

    def end(number: int, frame: FrameType | None) -> None:
        process.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return process.wait()
