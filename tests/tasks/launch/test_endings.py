"""How jobs end: the scripts run for real, with stand-ins for srun and for what runs on the nodes; what the scheduler and the run say of it."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from pathlib import Path

import msgspec
import pytest

from subprocesses import started
from waiting import HUNG_SECONDS, until
from windlass.cli.launch.jobs import state_of
from windlass.errors import BadInput
from windlass.tasks.launch import node
from windlass.tasks.launch.drive import slurm
from windlass.tasks.launch.drive.process import start_time
from windlass.tasks.launch.drive.state import Exit, JobState, Record, agreed, ended_state, exit_of, state_of_exit
from windlass.tasks.launch.job import SECRETS, Job, Scheduler, Settings
from windlass.tasks.launch.registry import remember
from windlass.tasks.launch.render.choose import render_job

pytestmark = pytest.mark.pure

# Two tasks at once. As srun does, it ends the others when one fails, and gives the highest code.
SRUN = """#!/bin/bash
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=0 "$@" & one=$!
SLURM_NODEID=1 "$@" & two=$!
trap 'kill -TERM "$one" "$two" 2>/dev/null' TERM
worst=0
for task in "$one" "$two"; do
    while :; do
        wait "$task"; code=$?
        [ "$code" -gt 128 ] && kill -0 "$task" 2>/dev/null && continue
        break
    done
    [ "$code" -gt "$worst" ] && worst=$code
    [ "$code" -eq 0 ] || [ -n "$KEEP" ] || kill -TERM "$one" "$two" 2>/dev/null
done
exit "$worst"
"""
# As pbsdsh: it waits for both and says nothing of how they ended. Each node has a name of its own.
PBSDSH = """#!/bin/bash
shift
STAND_IN=n1 "$@" &
STAND_IN=n2 "$@" &
wait
"""
SERVER = Job(name="one", command=("serve", "tiny-glm"), kind="serve", num_nodes=2, min_nodes=2)
TRAINING = Job(name="one", command=("train", "run", "r.toml"), kind="train", num_nodes=2, min_nodes=2)
WAITS = 'trap "exit 0" TERM; touch "$folder/up-$node"; while :; do sleep 0.05; done'


class Script:
    """A job whose nodes run `does` (bash; `$node`, `$run`, `$folder`)."""

    def __init__(self, folder: Path, job: Job, does: str, scheduler: Scheduler = "slurm", **settings: int) -> None:
        self.folder, self.run = folder / "job", folder / "job" / ("run-0" if scheduler == "local" else "run-7-0")
        programs = folder / "programs"
        for place in (self.folder, programs):
            place.mkdir()
        stand_ins = {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'n1\\nn2\\n'\n", "python": "#!/bin/bash\n" + _node(does)}
        if scheduler == "pbs":
            stand_ins |= {"pbsdsh": PBSDSH, "hostname": '#!/bin/sh\necho "$STAND_IN"\n', "sleep": "#!/bin/sh\n"}
            (folder / "nodefile").write_text("n1\nn2\n")
        for name, text in stand_ins.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        place = Settings(
            scheduler=scheduler, folder=str(self.folder), workdir=str(folder), python=str(programs / "python"), **settings
        )
        for name, text in render_job(job, place).files.items():
            (self.folder / name).write_text(text)
        self.environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "KEEP": "1" if job.may_shrink else "",
            "PBS_JOBID": "7", "PBS_NODEFILE": str(folder / "nodefile"),
        }  # fmt: skip
        self.command = ["bash", str(self.folder / "job.sh")]

    def to_its_end(self) -> int:
        with started(self.command, env=self.environment) as process:
            return process.wait(HUNG_SECONDS)

    def state(self) -> JobState | None:
        return ended_state(self.folder)

    def secrets(self) -> list[str]:
        return [name for name in SECRETS if (self.folder / name).exists()]


def _node(does: str) -> str:
    """A stand-in for `python -P -m windlass launch node FOLDER --run RUN --node N`."""
    return f"folder=$6; run=$8; node=${{10}}\n{does.replace('$folder', '${folder}')}\n"


def test_the_stand_in_is_given_what_the_script_says(tmp_path: Path) -> None:
    script = Script(tmp_path, TRAINING, 'printf "%s\\n" "$folder" "$run" "$node" > "$run/said-$node"')
    assert script.to_its_end() == 0
    assert (script.run / "said-1").read_text().splitlines() == [str(script.folder), str(script.run), "1"]


# --- several nodes


def test_the_node_that_failed_counts_not_those_that_were_ended(tmp_path: Path) -> None:
    """srun's own code is 143: that of the node which was told to end."""
    fails = 'if [ "$node" = 0 ]; then echo "2 n1" > "$run/failed"; exit 2; fi; exec sleep 600'
    script = Script(tmp_path, TRAINING, fails)
    assert script.to_its_end() == 2, "the scheduler is told the same"
    assert script.state() == JobState(state="failed", reason="exit code 2 on n1")


def test_a_run_that_may_shrink_is_done_when_the_rest_is(tmp_path: Path) -> None:
    shrinks = msgspec.structs.replace(TRAINING, min_nodes=1)
    does = """
    if [ "$node" = 0 ]; then echo "9 n1" > "$run/failed"; exit 9; fi
    printf '{"host":"n2","code":0}' > "$run/node-$node.json\""""
    assert Script(tmp_path, shrinks, does).to_its_end() == 0
    (tmp_path / "other").mkdir()
    script = Script(tmp_path / "other", shrinks, 'echo "9 n1" > "$run/failed"; exit 9')
    assert script.to_its_end() == 9 and script.state() == JobState(state="failed", reason="exit code 9 on n1")


ENDS = """printf '{"host":"n","code":0}' > "$run/node-$node.json\""""


@pytest.mark.parametrize(
    ("does", "code", "reason"),
    [
        (ENDS, 0, ""),
        (f'{ENDS}; [ "$node" = 1 ] && touch "$run/stopped"', 75, "saved and stopped; launch it again to go on"),
        (f'{ENDS}; [ "$node" = 0 ] || {{ echo "2 n2" > "$run/failed"; exit 2; }}', 2, "exit code 2 on n2"),
        (f'[ "$node" = 0 ] && {ENDS}', 1, "exit code 1"),
    ],
)
def test_what_starts_the_nodes_of_pbs_does_not_say_how_they_ended(tmp_path: Path, does: str, code: int, reason: str) -> None:
    script = Script(tmp_path, TRAINING, does, "pbs")
    assert script.to_its_end() == code
    found = script.state()
    assert found is not None and (found.state, found.reason) == ({0: "done", 75: "stopped"}.get(code, "failed"), reason)


def test_a_job_that_pbs_runs_again_begins_anew(tmp_path: Path) -> None:
    """Under its old number, and so in its old folder."""
    left = ("failed", "stopped", "warned", "root-ended", "meeting.json", "worker-1", "node-0.json", "node-1.json", "exit.json")
    looks = " ".join(f'"$run/{name}"' for name in left if not name.startswith("node"))
    script = Script(tmp_path, TRAINING, f'cat {looks} 2>/dev/null && exit 9; [ "$node" = 1 ] || {ENDS}', "pbs")
    script.run.mkdir()
    for name in (*left, "next"):
        (script.run / name).write_text("3 n1\n")
    assert script.to_its_end() == 1, "the second node has not ended this time"
    assert (script.run / "next").exists()


def a_node(run: Path, number: int = 0) -> node.Node:
    settings = Settings(scheduler="slurm", folder=str(run), workdir=str(run), python=sys.executable)
    return node.Node(job=Job(name="j", command=("bench",)), settings=settings, number=number, hosts=("n1",), run=str(run))


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def running(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(node, "_windlass", lambda *words: [sys.executable, "-c", code])


def test_the_first_node_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, "raise SystemExit(74)")
    assert node.run_node(a_node(tmp_path), write) == 74
    assert (tmp_path / "failed").read_text().split() == ["74", os.uname().nodename]
    running(monkeypatch, "raise SystemExit(3)")
    assert node.run_node(a_node(tmp_path, 1), write) == 3
    assert (tmp_path / "failed").read_text().startswith("74 "), "the second failed because of the first"


def test_a_node_that_was_told_to_end_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()")
    assert node.run_node(a_node(tmp_path), write) == 143
    assert not (tmp_path / "failed").exists()


TOLD = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(74))
os.kill(os.getppid(), signal.SIGTERM)
while True: signal.pause()
"""


def test_what_could_not_be_saved_is_noted_after_a_signal_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running(monkeypatch, TOLD)
    assert node.run_node(a_node(tmp_path), write) == 74
    assert (tmp_path / "failed").read_text().startswith("74 ")


def test_a_worker_that_ends_with_its_server_has_not_failed(tmp_path: Path) -> None:
    (tmp_path / "root-ended").touch()
    code = node._child(a_node(tmp_path, 1), [sys.executable, "-c", TOLD], dict(os.environ), until=tmp_path / "root-ended")
    assert code == 74 and not (tmp_path / "failed").exists()


def test_an_error_of_the_node_itself_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: str) -> list[str]:
        raise BadInput("no")

    monkeypatch.setattr(node, "_windlass", refuse)
    with pytest.raises(BadInput):
        node.run_node(a_node(tmp_path), write)
    assert (tmp_path / "failed").read_text().startswith("2 ")


# --- secrets


def test_a_server_has_secrets_while_it_runs(tmp_path: Path) -> None:
    does = 'for name in api-key secret; do stat -c %a "$folder/$name"; cat "$folder/$name"; done > "$run/seen-$node"'
    script = Script(tmp_path, SERVER, does)
    assert script.secrets() == [], "not while it waits in a queue"
    assert script.to_its_end() == 0
    modes_and_values = (script.run / "seen-0").read_text().split()
    assert modes_and_values[::2] == ["600", "600"]
    assert len(set(modes_and_values[1::2])) == 2 and all(len(value) == 64 for value in modes_and_values[1::2])
    assert script.secrets() == []


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
def test_a_server_that_fails_leaves_no_secrets(tmp_path: Path, scheduler: Scheduler) -> None:
    script = Script(tmp_path, SERVER, 'echo "3 n1" > "$run/failed"; exit 3', scheduler)
    assert script.to_its_end() == 3 and script.secrets() == []


@pytest.mark.parametrize(("scheduler", "num_nodes"), [("slurm", 2), ("local", 1)])
def test_a_server_that_is_cancelled_says_so_and_leaves_no_secrets(tmp_path: Path, scheduler: Scheduler, num_nodes: int) -> None:
    """It ends well, with code 0, as it should; it was cancelled all the same."""
    script = Script(tmp_path, SERVER, WAITS, scheduler)
    with started(script.command, env=script.environment) as process:
        until(lambda: _catches(process.pid, signal.SIGTERM) and len(list(script.folder.glob("up-*"))) == num_nodes)
        assert script.secrets() == list(SECRETS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HUNG_SECONDS) == 0
    assert script.secrets() == []
    assert script.state() == JobState(state="cancelled", reason="ended by a signal")


def test_a_server_that_takes_long_to_end_has_no_secrets_meanwhile(tmp_path: Path) -> None:
    """A scheduler may not wait for it, and SIGKILL ends the script as well."""
    drains = 'trap "" TERM; touch "$folder/up-$node"; until [ -e "$folder/drained" ]; do sleep 0.05; done'
    script = Script(tmp_path, SERVER, drains)
    with started(script.command, env=script.environment) as process:
        until(lambda: _catches(process.pid, signal.SIGTERM) and len(list(script.folder.glob("up-*"))) == 2)
        process.send_signal(signal.SIGTERM)
        until(lambda: script.secrets() == [])
        assert process.poll() is None
        (script.folder / "drained").touch()
        assert process.wait(HUNG_SECONDS) == 0


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_secrets_of_a_killed_script_go_when_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_JOBS", str(tmp_path / "jobs"))
    script = Script(tmp_path, SERVER, f'echo $$ > "$folder/node-pid"; {WAITS}', "local")
    with started(script.command, env=script.environment) as process:
        until(lambda: (script.folder / "up-0").exists())
        record = Record(
            name="one", scheduler="local", folder=str(script.folder), id=f"{process.pid}:{start_time(process.pid)}", submitted=1.0, job=SERVER
        )  # fmt: skip
        remember(tmp_path / "jobs", record, write)
        assert state_of(record).state == "running" and script.secrets() == list(SECRETS)
        process.kill()
        process.wait(HUNG_SECONDS)
        os.kill(int((script.folder / "node-pid").read_text()), signal.SIGTERM)
    assert script.secrets() == list(SECRETS), "no program was there to remove them"
    later = msgspec.structs.replace(record, name="later", submitted=2.0)
    remember(tmp_path / "jobs", later, write)
    assert state_of(record).state == "failed" and script.secrets() == list(SECRETS), "those of a later job in this folder"
    assert state_of(later).state == "failed" and script.secrets() == []


def test_steps_that_are_lost_are_told_of_whoever_ended_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_JOBS", str(tmp_path / "jobs"))
    (tmp_path / "run-0").mkdir()
    (tmp_path / "run-0" / "exit.json").write_text('{"code": 74, "told": 5}')
    (tmp_path / "cancelled").touch()
    found = state_of(Record(name="j", scheduler="local", folder=str(tmp_path), id="1:2", submitted=1.0, job=TRAINING))
    assert found.state == "failed" and "steps are lost" in found.reason


def test_what_a_killed_node_has_started_ends_too(tmp_path: Path) -> None:
    """SIGKILL: it could not pass anything on."""
    child = "import os, sys, time; open('child', 'w').write(str(os.getpid())); time.sleep(600)"
    parent = f"""
import subprocess, sys, time
from windlass.tasks.launch.node import _end_with_us
subprocess.Popen([sys.executable, "-c", {child!r}], preexec_fn=_end_with_us)
time.sleep(600)"""
    with started([sys.executable, "-c", parent], cwd=tmp_path) as process:
        file = tmp_path / "child"
        until(lambda: file.exists() and file.read_text() != "")
        process.kill()
        process.wait(HUNG_SECONDS)
    until(lambda: not _lives(int(file.read_text())))


def _lives(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


# --- what is told of it


@pytest.mark.parametrize(
    ("found", "state", "reason"),
    [
        (Exit(code=0), "done", ""),
        (Exit(code=75, told=50, limit=60), "stopped", "launch it again"),
        (Exit(code=0, told=5), "cancelled", "ended by a signal"),
        (Exit(code=143, told=5, limit=3600), "cancelled", "ended by a signal"),
        (Exit(code=0, told=3601, limit=3600), "failed", "time limit"),
        (Exit(code=143), "failed", "exit code 143 (SIGTERM)"),
        (Exit(code=137, host="n3"), "failed", "exit code 137 (SIGKILL) on n3"),
        (Exit(code=74, host="n3"), "failed", "exit code 74 on n3: steps are lost: the last checkpoint could not be written"),
        (Exit(code=74, told=5, limit=3600), "failed", "steps are lost"),
    ],
)
def test_exit_files(found: Exit, state: str, reason: str) -> None:
    said = state_of_exit(found)
    assert said.state == state and reason in said.reason


@pytest.mark.parametrize(
    ("said", "own", "expected"),
    [
        (("CANCELLED by 0", "0:15"), Exit(code=0, told=9), ("cancelled", "CANCELLED by 0; ended by a signal")),
        (("CANCELLED", ""), Exit(code=0), ("cancelled", "CANCELLED")),
        (("CANCELLED", ""), Exit(code=75, told=9), ("stopped", "CANCELLED; it had saved")),
        (("CANCELLED", ""), Exit(code=74, told=9), ("failed", "CANCELLED; exit code 74: steps are lost")),
        (("FAILED", "74:0"), Exit(code=74, told=9), ("failed", "exit code 74: steps are lost")),
        (("FAILED", "143:0"), Exit(code=143, told=9), ("failed", "exit code 143 (SIGTERM)")),
        (("FAILED", ""), Exit(code=2, host="n1"), ("failed", "exit code 2 on n1")),
        (("FAILED", "2:0"), Exit(code=2, host="n1"), ("failed", "exit code 2 on n1")),
        (("FAILED", "0:9"), None, ("failed", "its script was killed by signal 9")),
        (("TIMEOUT", "0:0"), Exit(code=0, told=9), ("failed", "TIMEOUT: the time limit")),
        (("NODE_FAIL", ""), None, ("failed", "NODE_FAIL: a node of it was lost")),
        (("COMPLETED", "0:0"), Exit(code=0), ("done", "")),
        (None, Exit(code=0), ("done", "")),
    ],
)
def test_scheduler_and_run_are_both_heard(said: tuple[str, str] | None, own: Exit | None, expected: tuple[str, str]) -> None:
    found = agreed(slurm.ended(*said) if said else None, state_of_exit(own) if own else None)
    assert found is not None and found.state == expected[0] and found.reason.startswith(expected[1].split(":")[0])
    assert expected[1].split(": ")[-1] in found.reason


def test_slurm_is_asked_for_ended_jobs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --states it shows none; and the server's own code is 0."""
    asked: list[list[str]] = []

    def run(argv: list[str]) -> str:
        asked.append(argv)
        if argv[0] == "squeue":
            return "7|CANCELLED|n1|x|None\n" if "--states=all" in argv else ""
        raise slurm.SchedulerFailed("sacct failed: Slurm accounting storage is disabled")

    monkeypatch.setattr(slurm, "_run", run)
    (tmp_path / "run-7-0").mkdir()
    (tmp_path / "run-7-0" / "exit.json").write_text('{"code": 0, "ended": 1}')
    record = Record(name="j", scheduler="slurm", folder=str(tmp_path), id="7", submitted=1.0, job=SERVER)
    assert slurm.Slurm().state(record) == JobState(state="cancelled", reason="CANCELLED")


def test_a_script_that_was_killed_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str]) -> str:
        return "7|FAILED|n1|x|JobLaunchFailure\n" if argv[0] == "squeue" else ""

    monkeypatch.setattr(slurm, "_run", run)
    record = Record(name="j", scheduler="slurm", folder=str(tmp_path), id="7", submitted=1.0, job=SERVER)
    found = slurm.Slurm().state(record)
    assert found.state == "failed" and "JobLaunchFailure" in found.reason and "killed" in found.reason


def test_one_failed_task_makes_a_failed_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(argv: list[str]) -> str:
        return "FAILED|2:0\nCOMPLETED|0:0\n" if argv[0] == "sacct" else ""

    monkeypatch.setattr(slurm, "_run", run)
    job = msgspec.structs.replace(TRAINING, kind="array", num_nodes=1, values=("a", "b"))
    found = slurm.Slurm().state(Record(name="j", scheduler="slurm", folder=str(tmp_path), id="7", submitted=1.0, job=job))
    assert found == JobState(state="failed", reason="1 of 2 tasks: exit code 2")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sbatch: unrecognized option '--nosuch=1'\nTry \"sbatch --help\" for more information\n", "unrecognized option '--nosuch=1'"),
        (
            "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name specified",
            "invalid partition specified: x; allocation failure: Invalid partition name specified",
        ),
        ("", ""),
    ],
)  # fmt: skip
def test_why_sbatch_refused(text: str, reason: str) -> None:
    assert slurm.complaint(text) == reason


def test_a_folder_that_is_used_again_begins_anew(tmp_path: Path) -> None:
    script = Script(tmp_path, TRAINING, '[ ! -e "$run/warned" ]', "local")
    script.run.mkdir()
    for left in ("warned", "stopped", "failed"):
        (script.run / left).touch()
    assert script.to_its_end() == 0
    found = exit_of(script.run)
    assert found is not None and found.code == 0 and found.told is None
    assert stat.S_ISDIR(script.run.stat().st_mode) and json.loads((script.run / "exit.json").read_text())["host"] == ""
