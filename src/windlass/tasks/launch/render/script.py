"""What the scripts of all schedulers share: quoting, env.sh, node.sh and how the exit is recorded."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

import msgspec

from windlass.tasks.launch.job import Job, Settings

HEADER = "#!/bin/bash\n# Written by `windlass launch`; read it, change it, and submit it by hand if you like.\n"

# What sbatch and qsub inherit from a login shell, or from a job that launches another, would bind and place the new job's ranks.
LEAKED = "SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_MEM_BIND SLURM_DISTRIBUTION PMIX_RANK"


def header(settings: Settings) -> list[str]:
    """Names with quotes in them are meant so."""
    odd = any(letter in settings.folder + settings.workdir for letter in "\"'\\")
    return [HEADER.rstrip(), *(["# shellcheck disable=SC2089,SC2090"] if odd else [])]


def quoted(value: str) -> str:
    """For bash, in double quotes: people read these scripts, and a quote inside single ones is a riddle."""
    if shlex.quote(value) == value:
        return value
    return '"' + re.sub(r'([\\"$`])', r"\\\1", value) + '"'


def env_file(settings: Settings) -> str:
    """Sourced on every node. Variables of the fabric are set there by `windlass launch node`, which sees it; each is logged with its reason."""
    lines = [
        "# Sourced on every node, before Windlass starts.",
        "export PYTHONUNBUFFERED=1  # lines reach the log when they are written",
    ]
    lines += [f"export {name}={quoted(value)}  # --env" for name, value in settings.env]
    return "\n".join(lines) + "\n"


def node_file(settings: Settings, number: Iterable[str]) -> str:
    """Runs on every node: `node.sh RUN`. `number`: lines that set `node`, counted from 0, and perhaps `rank`."""
    return "\n".join(
        [
            *header(settings),
            "set -u",
            'run="$1"',
            f"folder={quoted(settings.folder)}",
            "# shellcheck source=/dev/null",
            '. "$folder/env.sh"',
            f"cd {quoted(settings.workdir)} || exit 2",
            *number,
            f'exec {quoted(settings.python)} -P -m windlass launch node "$folder" --run "$run" --node "$node"',
            "",
        ]
    )


def job_file(job: Job, settings: Settings) -> str:
    """For `windlass launch node`, and to look things up later."""
    both = {"job": job, "settings": settings}
    return msgspec.json.format(msgspec.json.encode(both), indent=2).decode() + "\n"


def shown_command(job: Job) -> str:
    return f"# windlass {shlex.join(job.command)}"


def in_one_folder(job: Job, settings: Settings) -> list[str]:
    """How a script begins that is run once, without a scheduler: all of it in one folder."""
    return [
        *header(settings),
        shown_command(job),
        "set -u",
        f"folder={quoted(settings.folder)}",
        'run="$folder/run-0"',
        'rm -rf "$run"  # of a job that had this folder before',
        'mkdir -p "$run" || exit 2',
        *secrets(job),
    ]


SECRETS = """# The server's key, and the secret of its workers: made now, and gone however this script ends.
trap 'rm -f "$folder/api-key" "$folder/secret" "$folder/address.json"' EXIT
for name in api-key secret; do
    [ -s "$folder/$name" ] && continue  # of an attempt whose node was lost
    (umask 077 && head -c 32 /dev/urandom | od -A n -v -t x1 | tr -d ' \\n' > "$folder/$name" && echo >> "$folder/$name") || exit 2
done
"""


def secrets(job: Job) -> list[str]:
    return [SECRETS] if job.kind == "serve" else []


# `wait` returns early, with a code above 128, when a trapped signal arrives. A container may be slow to give the signal on.
WAIT = """while :; do
    wait "$step"
    code=$?
    [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null && continue
    break
done
[ "$code" -eq 0 ] && [ -e "$run/stopped" ] && code=75  # saved and stopped
host=
# Of several nodes the first that failed counts, not those that were ended because of it.
[ "$code" -ne 0 ] && [ -s "$run/failed" ] && read -r code host < "$run/failed\""""


def nodes_left(job: Job) -> list[str]:
    """A run that may shrink has done its work if enough nodes have."""
    if not job.may_shrink:
        return []
    done = """$(grep -lE '"code":(0|75)[,}]' "$run"/node-*.json 2>/dev/null | wc -l)"""
    return [f'[ "{done}" -ge {job.min_nodes} ] && {{ code=0; rm -f "$run/failed"; [ -e "$run/stopped" ] && code=75; }}']


TRAPS = """trap 'touch "$run/warned"; kill -USR1 "$step" 2>/dev/null' USR1  # the time limit is near: save and stop
trap 'told=$SECONDS; kill -TERM "$step" 2>/dev/null' TERM INT"""
FILE_TRAPS = """trap 'touch "$run/warned"' USR1  # the nodes look for this file: save and stop
trap 'told=$SECONDS; kill -TERM "$step" 2>/dev/null' TERM INT"""

_EXIT = '{"code": %d, "host": "%s", "told": %s, "limit": %s, "ended": %d}\\n'


def record(limit_seconds: int | None) -> str:
    """How it ended, and when it was told to end: at its time limit, or before."""
    values = f'"$code" "$host" "${{told:-null}}" {"null" if limit_seconds is None else limit_seconds} "$(date +%s)"'
    return f"""printf '{_EXIT}' {values} > "$run/.exit.part" && mv "$run/.exit.part" "$run/exit.json\""""
