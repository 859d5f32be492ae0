"""Slurm: a batch script with one srun. Written for 22.05 and later; options that sites refuse are written only if asked for.

- `--signal=B:USR1@S` warns the batch shell, which passes it on through srun: without `B:` the shell would not know to requeue.
- `--cpus-per-task` stands on srun too: from 22.05 until 23.11 srun did not inherit it (SchedMD/slurm CHANGELOG).
- A requeued job has the same id and starts from the top; `--open-mode=append` keeps its log.
"""

from __future__ import annotations

from windlass.tasks.launch.job import Job, Rendered, Settings
from windlass.tasks.launch.render import script
from windlass.tasks.launch.render.script import quoted


def render(job: Job, settings: Settings) -> Rendered:
    files = {
        "job.sh": _batch(job, settings),
        "node.sh": script.node_file(settings, _node(settings)),
        "env.sh": script.env_file(settings),
        "job.json": script.job_file(job, settings),
    }
    return Rendered(files=files, submit=("sbatch", "--parsable", f"{settings.folder}/job.sh"))


def time_limit(seconds: int) -> str:
    """`1-02:00:00`"""
    minutes = _minutes(seconds)
    days, rest = divmod(minutes, 24 * 60)
    return f"{f'{days}-' if days else ''}{rest // 60:02}:{rest % 60:02}:00"


def _minutes(seconds: int) -> int:
    """Rounded up: Slurm's grain."""
    return -(-seconds // 60)


def _limit(settings: Settings) -> int | None:
    return None if settings.time_seconds is None else 60 * _minutes(settings.time_seconds)


def directives(job: Job, settings: Settings) -> list[str]:
    """The options of sbatch, without `#SBATCH`."""
    log = f"{settings.folder.replace('%', '%%')}/log-{'%A_%a' if job.values else '%j'}.txt"
    per_node = job.ranks_per_node if settings.tasks == "rank" else 1
    lines = [f"--job-name={job.name}", f"--output={log}", "--open-mode=append", f"--chdir={settings.workdir}"]
    lines += [f"--nodes={job.num_nodes}", f"--ntasks-per-node={per_node}"]
    lines += _gpus(job, settings)
    if settings.cpus_per_node is not None:
        lines.append(f"--cpus-per-task={max(settings.cpus_per_node // per_node, 1)}")
    named = (
        ("mem", settings.memory), ("partition", settings.partition), ("account", settings.account), ("qos", settings.qos),
        ("constraint", settings.constraint), ("reservation", settings.reservation),
    )  # fmt: skip
    lines += [f"--{name}={value}" for name, value in named if value]
    if settings.time_seconds is not None:
        lines.append(f"--time={time_limit(settings.time_seconds)}")
    lines += _ending(job, settings)
    if job.values:
        limit = f"%{settings.array_limit}" if settings.array_limit else ""
        lines.append(f"--array=0-{len(job.values) - 1}{limit}")
    return lines + list(settings.extra)


def _gpus(job: Job, settings: Settings) -> list[str]:
    """gres and gpus-per-node together are fatal, so one of them."""
    if not job.gpus_per_node or settings.gpu_option == "none":
        return []
    kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
    name = "--gpus-per-node=" if settings.gpu_option == "gpus-per-node" else "--gres=gpu:"
    return [f"{name}{kind}{job.gpus_per_node}"]


def _ending(job: Job, settings: Settings) -> list[str]:
    lines = ["--exclusive"] if settings.exclusive else []
    lines.append("--requeue" if settings.requeue else "--no-requeue")
    if job.kind == "train" and settings.time_seconds is not None:
        lines.append(f"--signal=B:USR1@{settings.warning_seconds}")
    if job.may_shrink:
        lines.append("--no-kill")  # a node that fails does not end the others
    return lines


def directive(option: str) -> str:
    """sbatch splits the line at spaces, and takes quotes and backslashes as a shell does; `#` after a space would begin a comment."""
    if any(letter in option for letter in " \t\"'\\#$`"):
        escaped = option.replace("\\", "\\\\").replace('"', '\\"')
        return f'#SBATCH "{escaped}"'
    return f"#SBATCH {option}"


def _batch(job: Job, settings: Settings) -> str:
    return "\n".join(
        [
            *script.header(settings),
            script.shown_command(job),
            *(directive(option) for option in directives(job, settings)),
            "",
            "set -u",
            f"unset {script.LEAKED}  # of the shell that submitted: they would bind ranks",
            f"folder={quoted(settings.folder)}",
            "attempt=${SLURM_RESTART_COUNT:-0}",
            f'run="$folder/run-{_id(job)}-$attempt"',
            'mkdir -p "$run" || exit 2',
            *script.secrets(job),
            'scontrol show hostnames "$SLURM_JOB_NODELIST" > "$run/hosts"',
            'echo "windlass: attempt $((attempt + 1)) on $SLURM_JOB_NODELIST"',
            "",
            *_srun(job, settings),
            "step=$!",
            script.TRAPS,
            script.WAIT,
            *script.nodes_left(job),
            "",
            *_requeue(job, settings),
            script.record(_limit(settings)),
            'exit "$code"',
            "",
        ]
    )


def _id(job: Job) -> str:
    return "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.values else "$SLURM_JOB_ID"


def _srun(job: Job, settings: Settings) -> list[str]:
    per_node = job.ranks_per_node if settings.tasks == "rank" else 1
    words = [f"srun --ntasks-per-node={per_node} --label"]
    if settings.cpus_per_node is not None:
        words.append(f"--cpus-per-task={max(settings.cpus_per_node // per_node, 1)}")
    words.append("--no-kill --kill-on-bad-exit=0" if job.may_shrink else "--kill-on-bad-exit=1")
    command = 'bash "$folder/node.sh" "$run"'
    if settings.container and settings.container_runtime == "pyxis":
        words += _pyxis(settings)
    elif settings.container:
        command = " ".join(_apptainer(job, settings)) + f" {command}"
    return [" \\\n    ".join([*words, f"{command} &"])]


def _mounts(settings: Settings) -> list[str]:
    """The job's folder and the working directory under their own names, then what was asked for."""
    own = dict.fromkeys([settings.folder, settings.workdir])
    return [f"{path}:{path}" for path in own] + [mount if ":" in mount else f"{mount}:{mount}" for mount in settings.mounts]


def _pyxis(settings: Settings) -> list[str]:
    """The image's values win over exported ones of the host unless they are named (pyxis README)."""
    names = ",".join(["PYTHONUNBUFFERED", *(name for name, _ in settings.env)])
    return [
        f"--container-image={quoted(settings.container)}",
        f"--container-mounts={quoted(','.join(_mounts(settings)))}",
        f"--container-env={names}",
        "--no-container-mount-home",
    ]


def _apptainer(job: Job, settings: Settings) -> list[str]:
    binds = [word for mount in _mounts(settings) for word in ("--bind", quoted(mount))]
    return ["apptainer exec", *(["--nv"] if job.gpus_per_node else []), *binds, quoted(settings.container)]


def _requeue(job: Job, settings: Settings) -> list[str]:
    """Only after a warning and a saved checkpoint. `scontrol requeue` ends this script; without scontrol the exit code says it: 75."""
    if job.kind != "train" or not settings.requeue:
        return []
    return [
        f'if [ "$code" -eq 75 ] && [ -e "$run/warned" ] && [ "$attempt" -lt {settings.max_requeues} ]; then',
        '    echo "windlass: saved; the job goes back to the queue"',
        "    trap '' TERM USR1  # of the requeue itself",
        '    if scontrol requeue "$SLURM_JOB_ID"; then sleep 60; exit 75; fi',
        '    echo "windlass: it cannot be requeued from this node; submit it again: sbatch $folder/job.sh"',
        "fi",
    ]


def _node(settings: Settings) -> list[str]:
    lines = ['node="$SLURM_NODEID"']
    if settings.tasks == "rank":
        lines += [
            "# One task a rank: what torchrun would set.",
            'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"',
        ]
    return lines
