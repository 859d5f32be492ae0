"""ssh over a hostfile: one connection a host, on whose standard input the job's description goes and whose end ends what runs there.

Training, arrays and single commands run on the hosts; a server's root runs here, with workers there (tasks/launch/ssh.py).
"""

from __future__ import annotations

import shlex

from windlass.tasks.launch.hostfile import SshHost, parse_hostfile
from windlass.tasks.launch.job import Job, Rendered, Settings
from windlass.tasks.launch.render import script
from windlass.tasks.launch.render.script import quoted

GRACE_SECONDS = 600
"""For a checkpoint, once the connection has ended."""

# The description is one line of JSON. It is passed in the environment, which other users of the machine cannot read.
REMOTE = f"""
IFS= read -r WINDLASS_JOB || exit 1
export WINDLASS_JOB
cd "$1" || exit 2
python=$2; shift 2
exec "$python" -P -m windlass.tasks.launch.guard --grace {GRACE_SECONDS} "$python" -P -m windlass launch node - "$@"
"""

OPTIONS = "-T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3".split()


def render(job: Job, settings: Settings) -> Rendered:
    hosts = parse_hostfile("\n".join(settings.hosts))
    files = {
        "job.sh": _supervisor(job, settings),
        "commands.txt": _commands(job, settings, hosts),
        "hosts": "\n".join(settings.hosts) + "\n",
        "env.sh": script.env_file(settings),
        "job.json": script.job_file(job, settings),
    }
    return Rendered(files=files, submit=("setsid", "bash", f"{settings.folder}/job.sh"))


def connect(host: SshHost, ssh: tuple[str, ...] = ("ssh",)) -> list[str]:
    port = ["-p", str(host.ssh_port)] if host.ssh_port is not None else []
    return [*ssh, *OPTIONS, *port, "--", host.name]


def node_command(settings: Settings, host: SshHost, node: int, meeting: str) -> list[str]:
    """The ssh command that runs one node."""
    there = ["sh", "-c", REMOTE.strip(), "windlass-node", settings.workdir, host.python or settings.python]
    there += ["--node", str(node), *(["--meeting", meeting] if meeting else [])]
    return [*connect(host), shlex.join(there)]


def server_command(job: Job, settings: Settings) -> list[str]:
    """A root here and workers on the hosts."""
    return [
        settings.python, "-P", "-m", "windlass", "launch", "workers", "--hostfile", f"{settings.folder}/hosts",
        "--secret-file", f"{settings.folder}/secret", "--python", settings.python, "--", *job.command,
    ]  # fmt: skip


def _commands(job: Job, settings: Settings, hosts: tuple[SshHost, ...]) -> str:
    """What the supervisor runs, to be read."""
    if job.kind == "serve":
        return shlex.join(server_command(job, settings)) + "\n"
    meeting = f"{hosts[0].reached_at}:PORT" if job.num_nodes > 1 else ""
    used = hosts[: job.num_nodes] if job.kind != "array" else hosts
    return "".join(f"{shlex.join(node_command(settings, host, node, meeting))}\n" for node, host in enumerate(used))


def _supervisor(job: Job, settings: Settings) -> str:
    return "\n".join(
        [
            *script.in_one_folder(job, settings),
            'printf "%s\\n" "$$" > "$run/pid"',
            f"cd {quoted(settings.workdir)} || exit 2",
            "",
            "# Opens the connections of commands.txt, and ends them together.",
            f'{quoted(settings.python)} -P -m windlass launch supervise "$folder" --run "$run" &',
            "step=$!",
            script.TRAPS,
            script.WAIT,
            script.record(None),
            'exit "$code"',
            "",
        ]
    )
