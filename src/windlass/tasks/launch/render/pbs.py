"""PBS Pro / OpenPBS (`select`), and Torque where it differs (`nodes=:ppn=`). One chunk a node, started by pbsdsh.

PBS has no warning before the time limit, so the script keeps a timer; a job may not requeue itself without rights, so it submits itself again.
`-o` knows no variables, and the node file exists on the first node only.
"""

from __future__ import annotations

from windlass.tasks.launch.job import Job, Rendered, Settings
from windlass.tasks.launch.render import script
from windlass.tasks.launch.render.script import quoted


def render(job: Job, settings: Settings) -> Rendered:
    files = {
        "job.sh": _batch(job, settings),
        "node.sh": script.node_file(settings, _node()),
        "env.sh": script.env_file(settings),
        "job.json": script.job_file(job, settings),
    }
    notes = ("ngpus is no built-in resource of PBS: `pbsnodes -a` says whether this site has it",) if job.gpus_per_node else ()
    return Rendered(files=files, submit=("qsub", f"{settings.folder}/job.sh"), notes=notes)


def walltime(seconds: int) -> str:
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def directives(job: Job, settings: Settings) -> list[str]:
    """Old and new style may not be mixed (pbs_resources.7B)."""
    lines = [f"-N {job.name[:15]}", "-j oe", f"-o {_escaped(settings.folder)}/"]
    lines += _torque_resources(job, settings) if settings.dialect == "torque" else _resources(job, settings)
    if settings.time_seconds is not None:
        lines.append(f"-l walltime={walltime(settings.time_seconds)}")
    lines += [f"-{flag} {value}" for flag, value in (("q", settings.partition), ("A", settings.account)) if value]
    lines.append(f"-r {'y' if settings.requeue else 'n'}")
    return [*lines, *_array(job, settings), *settings.extra]


def _array(job: Job, settings: Settings) -> list[str]:
    """Torque writes the limit of an array as Slurm does; of PBS Pro's versions only some take that, and all since 19.4 the attribute."""
    if not _is_array(job):
        return []
    numbers, limit = f"0-{len(job.values) - 1}", settings.array_limit
    if settings.dialect == "torque":
        return [f"-t {numbers}{f'%{limit}' if limit else ''}"]
    return [f"-J {numbers}", *([f"-W max_run_subjobs={limit}"] if limit else [])]


def _is_array(job: Job) -> bool:
    """PBS Pro refuses an array of one."""
    return len(job.values) > 1


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(" ", "\\ ")


def _resources(job: Job, settings: Settings) -> list[str]:
    chunk = [f"{job.num_nodes}", f"ncpus={settings.cpus_per_node or max(job.gpus_per_node, 1)}", "mpiprocs=1"]
    chunk += [f"ngpus={job.gpus_per_node}"] if job.gpus_per_node and settings.gpu_option != "none" else []
    chunk += [f"mem={settings.memory}"] if settings.memory else []
    place = "scatter:excl" if settings.exclusive else "scatter"
    return [f"-l select={':'.join(chunk)}", f"-l place={place}"]


def _torque_resources(job: Job, settings: Settings) -> list[str]:
    chunk = [f"nodes={job.num_nodes}", f"ppn={settings.cpus_per_node or 1}"]
    chunk += [f"gpus={job.gpus_per_node}"] if job.gpus_per_node and settings.gpu_option != "none" else []
    return [f"-l {':'.join(chunk)}", *([f"-l mem={settings.memory}"] if settings.memory else [])]


def _batch(job: Job, settings: Settings) -> str:
    return "\n".join(
        [
            *script.header(settings),
            script.shown_command(job),
            *(f"#PBS {option}" for option in directives(job, settings)),
            "",
            "set -u",
            f"folder={quoted(settings.folder)}",
            "attempt=${WINDLASS_ATTEMPT:-0}",
            'run="$folder/run-$PBS_JOBID-$attempt"',
            'mkdir -p "$run" || exit 2',
            *script.secrets(job),
            *_index(job, settings),
            "# One line for each process of a node: every node once, in their order.",
            'awk \'!seen[$0]++\' "$PBS_NODEFILE" > "$run/hosts"',
            "echo \"windlass: attempt $((attempt + 1)) on $(tr '\\n' ' ' < \"$run/hosts\")\"",
            "",
            *_start(job, settings),
            "step=$!",
            script.TRAPS if job.num_nodes == 1 else script.FILE_TRAPS,  # pbsdsh passes no signals on, and would end
            *_timer(job, settings),
            script.WAIT,
            *(['kill "$timer" 2>/dev/null'] if _has_timer(job, settings) else []),
            "",
            *_again(job, settings),
            script.record(settings.time_seconds),
            'exit "$code"',
            "",
        ]
    )


def _index(job: Job, settings: Settings) -> list[str]:
    if not job.values:
        return []
    if not _is_array(job):
        return ['printf "0\\n" > "$run/index"']
    return [f'printf "%s\\n" "${"PBS_ARRAYID" if settings.dialect == "torque" else "PBS_ARRAY_INDEX"}" > "$run/index"']


def _start(job: Job, settings: Settings) -> list[str]:
    """pbsdsh gives tasks no environment of ours, so what they need are arguments. One node needs no pbsdsh."""
    command = 'bash "$folder/node.sh" "$run"'
    if settings.container:
        binds = " ".join(
            f"--bind {quoted(path)}" for path in dict.fromkeys([settings.folder, settings.workdir, *settings.mounts])
        )
        command = f"apptainer exec {'--nv ' if job.gpus_per_node else ''}{binds} {quoted(settings.container)} {command}"
    if job.num_nodes == 1:
        return [f"{command} &"]
    unique = " -u" if settings.dialect == "torque" else ""
    return [f"pbsdsh{unique} -- {command} &"]


def _has_timer(job: Job, settings: Settings) -> bool:
    return job.kind == "train" and settings.time_seconds is not None


def _timer(job: Job, settings: Settings) -> list[str]:
    if not _has_timer(job, settings):
        return []
    assert settings.time_seconds is not None
    seconds = settings.time_seconds - settings.warning_seconds
    why = f"# PBS sends no warning: {settings.warning_seconds} s before the limit this shell is told by its own timer."
    return [why, f"(sleep {seconds} && kill -USR1 $$) &", "timer=$!"]


def _again(job: Job, settings: Settings) -> list[str]:
    if job.kind != "train" or not settings.requeue:
        return []
    return [
        f'if [ "$code" -eq 75 ] && [ -e "$run/warned" ] && [ "$attempt" -lt {settings.max_requeues} ]; then',
        '    next=$(qsub -v WINDLASS_ATTEMPT=$((attempt + 1)) "$folder/job.sh") &&',
        '        printf "%s\\n" "$next" > "$run/next" && echo "windlass: saved; goes on as $next"',
        "fi",
    ]


FIND_NODE = """node=$(awk -v host="$(hostname)" '
    { split($1, a, "."); split(host, b, ".") }
    $1 == host || a[1] == b[1] { print NR - 1; exit }' "$run/hosts")
if [ -z "$node" ]; then echo "windlass: $(hostname) is not among the hosts of $run/hosts" >&2; exit 2; fi"""


def _node() -> list[str]:
    return ["# The node's number is its line among the hosts; a name may be written with or without its domain.", FIND_NODE]
