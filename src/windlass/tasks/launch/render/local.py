"""This machine, in the background: the same script without a scheduler's lines."""

from __future__ import annotations

from windlass.tasks.launch.job import Job, Rendered, Settings
from windlass.tasks.launch.render import script


def render(job: Job, settings: Settings) -> Rendered:
    files = {
        "job.sh": _batch(job, settings),
        "node.sh": script.node_file(settings, ["node=0"]),
        "env.sh": script.env_file(settings),
        "job.json": script.job_file(job, settings),
    }
    return Rendered(files=files, submit=("setsid", "bash", f"{settings.folder}/job.sh"))


def _batch(job: Job, settings: Settings) -> str:
    return "\n".join(
        [
            *script.in_one_folder(job, settings),
            'hostname > "$run/hosts"',
            'printf "%s\\n" "$$" > "$run/pid"',
            "",
            'bash "$folder/node.sh" "$run" &',
            "step=$!",
            script.TRAPS,
            *_timer(job, settings),
            script.WAIT,
            *(['kill "$timer" 2>/dev/null'] if settings.time_seconds is not None else []),
            script.record(settings.time_seconds),
            'exit "$code"',
            "",
        ]
    )


def _timer(job: Job, settings: Settings) -> list[str]:
    """--time holds here too: training is warned and saves, then everything is told to end."""
    if settings.time_seconds is None:
        return []
    warning = settings.warning_seconds if job.kind == "train" else 0
    first = f"sleep {settings.time_seconds - warning}"
    if warning:
        first += f" && kill -USR1 $$ && sleep {warning}"
    return [f"({first} && kill -TERM $$) &", "timer=$!"]
