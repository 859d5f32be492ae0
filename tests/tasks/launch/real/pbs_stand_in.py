"""A stand-in for PBS's commands, after OpenPBS's manual pages: `qsub`, `qstat`, `qdel`, `pbsdsh`. No server: jobs are processes of this machine.

It keeps what scripts rely on: directives are parsed and old and new style may not be mixed; the script is spooled, so that its own path is not the
submitted one; it starts in the home directory without the caller's environment, but for -v; PBS_NODEFILE has a line for each mpiproc of each chunk,
on the first node only; pbsdsh starts its command once a line, without the job's environment but for PBS_*, and passes no signals on; at the walltime
SIGTERM, then SIGKILL; -o knows no variables; arrays have PBS_ARRAY_INDEX.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ.get("STANDIN_ROOT", "/nonexistent"))
NODES = os.environ.get("STANDIN_NODES", "localhost").split(",")
KILL_AFTER_SECONDS = 10.0


def main(program: str, words: list[str]) -> int:
    return {"qsub": qsub, "qstat": qstat, "qdel": qdel, "pbsdsh": pbsdsh, "hostname": hostname}[program](words)


def hostname(words: list[str]) -> int:
    """Each node has its own."""
    print(os.environ.get("STANDIN_HOST", NODES[0]))
    return 0


def refuse(text: str) -> int:
    print(f"qsub: {text}", file=sys.stderr)
    return 2


def qsub(words: list[str]) -> int:
    variables = dict(word.split("=", 1) for place, word in enumerate(words) if place and words[place - 1] == "-v")
    script = Path(words[-1])
    text = script.read_text()
    options = re.findall(r"^#PBS (.*)$", text, re.MULTILINE)
    select = next((line for line in options if line.startswith("-l select=")), "")
    if any(line.startswith("-l nodes=") for line in options):
        return refuse("node(s) specification error" if not select else "may not mix select and nodes")
    chunk = dict(part.split("=") for part in select.removeprefix("-l select=").split(":")[1:])
    number = int(re.match(r"-l select=(\d+)", select)[1]) if select else 1  # type: ignore[index]
    if number > len(NODES):
        return refuse("Job violates queue and/or server resource limits")
    walltime = next((line.split("=")[1] for line in options if line.startswith("-l walltime=")), "")
    hours, minutes, seconds = (int(part) for part in (walltime or "24:00:00").split(":"))
    array = next((line.split()[1] for line in options if line.startswith("-J ")), "")
    ROOT.mkdir(exist_ok=True)
    job = f"{len(list(ROOT.iterdir())) + 1}{'[]' if array else ''}.standin"
    first, last = (int(part) for part in array.split("-")) if array else (0, 0)
    for index in range(first, last + 1):
        place = ROOT / (job if not array else job.replace("[]", f"[{index}]"))
        place.mkdir()
        (place / "spooled").write_text(text)
        lines = [node for node in NODES[:number] for _ in range(int(chunk.get("mpiprocs", "1")))]
        (place / "nodefile").write_text("\n".join(lines) + "\n")
        out = next((line[3:] for line in options if line.startswith("-o ")), str(Path.home()))
        environment = {
            "HOME": os.environ["HOME"], "PATH": os.environ["PATH"], "PBS_JOBID": place.name, "PBS_NODEFILE": str(place / "nodefile"),
            "PBS_O_WORKDIR": str(Path.cwd()), "PBS_ENVIRONMENT": "PBS_BATCH", "STANDIN_ROOT": str(ROOT), "STANDIN_NODES": ",".join(NODES),
        }  # fmt: skip
        environment |= {"PBS_ARRAY_INDEX": str(index)} if array else {}
        _start(place, environment | variables, (hours * 60 + minutes) * 60 + seconds, Path(out) / f"job.o{place.name}")
    print(job)
    return 0


def _start(place: Path, environment: dict[str, str], limit: int, out: Path) -> None:
    """A parent in a session of its own: it waits for the job, and ends it at the walltime."""
    if os.fork():
        return
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)  # or a caller that reads our output would wait for the job
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    with out.open("ab") as log:
        process = subprocess.Popen(
            ["bash", str(place / "spooled")],
            cwd=environment["HOME"],
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    (place / "pid").write_text(str(process.pid))
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(KILL_AFTER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    (place / "status").write_text(str(process.returncode))
    os._exit(0)


def qstat(words: list[str]) -> int:
    job = words[-1]
    places = sorted(ROOT.glob(job.replace("[]", "[[]*[]]")))
    if not places:
        print(f"qstat: Unknown Job Id {job}", file=sys.stderr)
        return 153
    codes = [int((place / "status").read_text()) for place in places if (place / "status").exists()]
    over = len(codes) == len(places)
    print(f"Job Id: {job}\n    job_state = {'F' if over else 'R'}\n    exec_host = {'+'.join(f'{node}/0' for node in NODES)}")
    if over:
        print(f"    Exit_status = {max(codes)}")
    return 0


def qdel(words: list[str]) -> int:
    for place in ROOT.glob(words[-1].replace("[]", "[[]*[]]")):
        if not (place / "status").exists():
            os.killpg(int((place / "pid").read_text()), signal.SIGTERM)
    return 0


def pbsdsh(words: list[str]) -> int:
    """Ends when all have ended; a signal ends it alone."""
    command = words[words.index("--") + 1 :]
    kept = {
        name: value for name, value in os.environ.items() if name.startswith(("PBS_", "STANDIN_")) or name in ("PATH", "HOME")
    }
    started = [
        subprocess.Popen(command, env=kept | {"STANDIN_HOST": node}, start_new_session=True)
        for node in Path(os.environ["PBS_NODEFILE"]).read_text().split()
    ]
    return max(process.wait() for process in started)


def install(folder: Path) -> Path:
    """Programs of these names in a folder for PATH."""
    folder.mkdir()
    for name in ("qsub", "qstat", "qdel", "pbsdsh", "hostname"):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__)}" {name} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def wait_all(seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not all((place / "status").exists() for place in ROOT.iterdir()) and time.monotonic() < end:
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
