"""The scripts of a job for the scheduler that its settings name."""

from __future__ import annotations

from windlass.tasks.launch.job import Job, Rendered, Settings, checked
from windlass.tasks.launch.render import local, pbs, slurm, ssh


def render_job(job: Job, settings: Settings) -> Rendered:
    checked(job, settings)
    return {"slurm": slurm, "pbs": pbs, "ssh": ssh, "local": local}[settings.scheduler].render(job, settings)
