"""What schedulers answer, read; jobs remembered; local jobs for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from subprocesses import started
from waiting import until
from windlass.cli import execute
from windlass.errors import BadInput, UnknownName
from windlass.tasks.launch.drive import pbs, slurm
from windlass.tasks.launch.drive.process import is_alive, start_time
from windlass.tasks.launch.drive.state import JobState, Record, SchedulerFailed, ended_state, exit_of, runs_of
from windlass.tasks.launch.init import expand_hosts, hostfile_lines
from windlass.tasks.launch.job import Job
from windlass.tasks.launch.node import filled, vllm_words
from windlass.tasks.launch.ports import Claim, free_port, meeting_ports
from windlass.tasks.launch.registry import all_jobs, find_job, new_name, remember

pytestmark = pytest.mark.pure


# --- Slurm


@pytest.mark.parametrize(
    ("text", "state", "reason"),
    [
        ("7|PENDING||N/A|Resources", "waiting", "Resources: waits for nodes"),
        ("7|PENDING||N/A|PartitionTimeLimit", "waiting", "smaller --time"),
        ("7|PENDING||N/A|QOSMaxGRESPerUser", "waiting", "limit of your account"),
        ("7|PENDING||N/A|ReqNodeNotAvail, UnavailableNodes:n1", "waiting", "sinfo -R"),
        ("7|PENDING||N/A|SomethingNew", "waiting", "SomethingNew"),
        ("7|RUNNING|n[1-2]|2026-11-16T09:00:00|None", "running", ""),
        ("7|COMPLETING|n1|2026-11-16T09:00:00|None", "running", ""),
        ("7|PREEMPTED||N/A|None", "waiting", "None"),
    ],
)
def test_queue_lines(text: str, state: str, reason: str) -> None:
    found = slurm.live_state(slurm.parse_queue(text))
    assert found.state == state and reason in found.reason


def test_running_tasks_of_an_array_count() -> None:
    found = slurm.live_state(slurm.parse_queue("7_0|RUNNING|n1|x|None\n7_1|RUNNING|n2|x|None\n7_[2-3]|PENDING||N/A|Resources"))
    assert found == JobState(state="running", hosts="n1,n2", reason="2 of 3 tasks run")


@pytest.mark.parametrize(
    ("state", "code", "expected"),
    [
        ("COMPLETED", "0:0", "done"),
        ("CANCELLED by 0", "0:15", "cancelled"),
        ("FAILED", "75:0", "stopped"),
        ("FAILED", "1:0", "failed"),
        ("TIMEOUT", "0:0", "failed"),
        ("NODE_FAIL", "0:0", "failed"),
        ("OUT_OF_MEMORY", "0:125", "failed"),
    ],
)
def test_how_slurm_jobs_end(state: str, code: str, expected: str) -> None:
    assert slurm.ended(state, code).state == expected


@pytest.mark.parametrize("state", ["PENDING", "PREEMPTED", "REQUEUED", "RUNNING", "COMPLETING", "CONFIGURING"])
def test_what_is_not_over(state: str) -> None:
    assert not slurm.is_over(state)


# --- PBS

QSTAT = """Job Id: 12.server
    Job_Name = train
    job_state = {state}
    exec_host = n1/0*8+n2/0*8
    comment = Not Running: Insufficient amount of resource: ngpus
\t (R: 8 A: 0 T: 4)
    Exit_status = {code}
"""


@pytest.mark.parametrize(
    ("letter", "code", "state"),
    [("Q", 0, "waiting"), ("R", 0, "running"), ("F", 0, "done"), ("F", 75, "stopped"), ("C", -29, "failed")],
)
def test_qstat(letter: str, code: int, state: str) -> None:
    found = pbs.parse_job(QSTAT.format(state=letter, code=code))
    assert found.state == state
    assert found.hosts == ("n1,n2" if letter == "R" else "")
    assert "ngpus (R: 8 A: 0 T: 4)" in found.reason if letter == "Q" else True


def test_a_job_that_submitted_itself_again_is_followed(tmp_path: Path) -> None:
    run = tmp_path / "run-1.server-0"
    run.mkdir()
    assert pbs.last_id(tmp_path, "1.server") == "1.server"
    (run / "next").write_text("2.server\n")
    assert pbs.last_id(tmp_path, "1.server") == "2.server"


# --- files of a job


def run_folder(folder: Path, name: str, code: int) -> Path:
    made = folder / name
    made.mkdir()
    (made / "exit.json").write_text(json.dumps({"code": code, "ended": 1}))
    return made


def test_exit_files_say_how_it_ended(tmp_path: Path) -> None:
    assert ended_state(tmp_path) is None
    run_folder(tmp_path, "run-5_0-0", 0)
    assert ended_state(tmp_path, 2) is None, "one task of two"
    run_folder(tmp_path, "run-5_1-0", 2)
    found = ended_state(tmp_path, 2)
    assert found is not None and found.state == "failed" and "1 of 2 tasks" in found.reason
    assert exit_of(tmp_path / "none") is None
    assert [path.name for path in runs_of(tmp_path, "5_1")] == ["run-5_1-0"]
    assert len(runs_of(tmp_path, "5")) == 2
    run_folder(tmp_path, "run-51-0", 1)
    assert len(runs_of(tmp_path, "5")) == 2, "not those of job 51"


def a_record(name: str, folder: Path, submitted: float = 1.0) -> Record:
    job = Job(name=name, command=("bench", "tiny-glm"))
    return Record(name=name, scheduler="local", folder=str(folder), id="1:2", submitted=submitted, job=job)


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def test_jobs_are_remembered_and_found(tmp_path: Path) -> None:
    remember(tmp_path, a_record("one", tmp_path), write)
    remember(tmp_path, a_record("two", tmp_path, 2.0), write)
    (tmp_path / "broken.json").write_text("{")
    assert [record.name for record in all_jobs(tmp_path)] == ["two", "one"]
    assert find_job(tmp_path, "one").name == "one"
    with pytest.raises(UnknownName, match="did you mean"):
        find_job(tmp_path, "onee")
    assert new_name(tmp_path, "one") == "one-2"
    with pytest.raises(BadInput, match="no job"):
        find_job(tmp_path / "nowhere", "one")


def test_a_pid_that_is_used_again_is_not_our_job() -> None:
    with started(["sleep", "600"]) as process:
        assert is_alive(f"{process.pid}:{start_time(process.pid)}")
        assert not is_alive(f"{process.pid}:1")
    assert not is_alive(f"{process.pid}:1")


# --- a scheduler that has forgotten a job, or does not obey


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """On Slurm, with its folder."""
    monkeypatch.setenv("WINDLASS_JOBS", str(tmp_path / "jobs"))
    folder = tmp_path / "folder"
    folder.mkdir()
    record = msgspec.structs.replace(a_record("j", folder), scheduler="slurm", id="7")
    remember(tmp_path / "jobs", record, write)
    return record


def answering(monkeypatch: pytest.MonkeyPatch, answers: Mapping[str, str]) -> None:
    """Programs of Slurm; one that is not named fails."""

    def run(argv: list[str]) -> str:
        if argv[0] not in answers:
            raise SchedulerFailed(f"{argv[0]} failed: Invalid job id specified")
        return answers[argv[0]]

    monkeypatch.setattr(slurm, "_run", run)


def test_a_job_that_slurm_has_forgotten_can_be_forgotten(
    job: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, {})
    assert execute(["launch", "status", "j"]) == 0
    assert "Slurm no longer knows it" in capsys.readouterr().out
    assert execute(["launch", "logs", "j", "--follow"]) == 4, "nothing more will come"
    assert execute(["launch", "cancel", "j"]) == 0 and "had ended" in capsys.readouterr().out
    assert execute(["launch", "forget", "j"]) == 0


def test_cancelling_that_fails_is_no_cancelling(
    job: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, {"squeue": "7|RUNNING|n1|x|None\n"})
    assert execute(["launch", "cancel", "j"]) == 2 and "scancel failed" in capsys.readouterr().err
    assert list(Path(job.folder).iterdir()) == []
    Path(job.folder).rmdir()
    answering(monkeypatch, {"squeue": "7|RUNNING|n1|x|None\n", "scancel": ""})
    assert execute(["launch", "cancel", "j"]) == 0, "a folder that is gone does not keep a job alive"


def test_every_task_of_an_array_has_a_log(job: Record, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    both = msgspec.structs.replace(job, job=msgspec.structs.replace(job.job, values=("a", "b")))
    remember(tmp_path / "jobs", both, write)
    for number in range(2):
        (Path(job.folder) / f"log-7_{number}.txt").write_text("".join(f"line {line} of {number}\n" for line in range(5)))
    assert execute(["launch", "logs", "j", "--lines", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(f"==> log-7_{number}.txt <==\nline 3 of {number}\nline 4 of {number}\n" in printed for number in range(2))


def test_following_begins_with_the_last_lines(
    job: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, {})
    (Path(job.folder) / "log-7.txt").write_text("".join(f"line {line}\n" for line in range(5)))
    assert execute(["launch", "logs", "j", "-f", "--lines", "2"]) == 4
    assert capsys.readouterr().out == "line 3\nline 4\n"


def test_names_are_never_cut_off(job: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("windlass.cli.console.console", lambda: Console(width=80))
    answering(monkeypatch, {})
    assert execute(["launch", "list"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed and "log" not in printed, "a path does not fit"


# --- small things


def test_other_nodes_of_vllm_get_the_model_and_the_plan() -> None:
    assert vllm_words(("serve", "./M", "--engine", "vllm", "--plan", "p.json")) == ["./M", "--plan", "p.json"]
    assert vllm_words(("serve", "./M", "--engine", "vllm", "--plan=p.json")) == ["./M", "--plan", "p.json"]
    with pytest.raises(BadInput, match="needs a plan"):
        vllm_words(("serve", "./M", "--engine", "vllm"))


def test_values_go_where_the_braces_are() -> None:
    assert filled(("eval", "M-{}", "--tasks", "{}"), "a b") == ["eval", "M-a b", "--tasks", "a b"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1,n2", ["n1", "n2"]),
        ("node[001-003]", ["node001", "node002", "node003"]),
        ("a[1,3-4]-ib,login", ["a1-ib", "a3-ib", "a4-ib", "login"]),
        ("", []),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names
    assert hostfile_lines(names, 8).count("slots=8") == len(names)


@pytest.mark.parametrize("text", ["node[a-b]", "n[1-]", "n[]"])
def test_host_lists_that_name_nobody(text: str) -> None:
    with pytest.raises(BadInput, match="names no machines"):
        expand_hosts(text)


@given(st.text())
def test_meeting_ports_are_no_outgoing_ones(name: str) -> None:
    assert all(20000 <= port < 30000 for port in meeting_ports(name)) and len(set(meeting_ports(name))) == 64


def test_a_port_that_is_taken_is_passed_over() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = free_port([port, port + 1, port + 2, port + 3])
        assert other != port
        with pytest.raises(BadInput, match="none of 1 ports"):
            free_port([port])


def test_two_jobs_that_start_together_take_two_ports() -> None:
    """Neither listens yet."""
    first = free_port(range(20000, 20100))
    ports = range(first, first + 50)
    one, other = Claim(ports), Claim(ports)
    assert one.port != other.port
    one.close()
    again = Claim(ports)
    assert again.port == one.port, "a job that ended gives it back"
    for claim in (other, again):
        claim.close()


@pytest.mark.multi
def test_a_local_job_from_launch_to_cancel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs in the background, is listed, ends with its code; a second is cancelled and leaves nothing."""
    monkeypatch.setenv("WINDLASS_JOBS", str(tmp_path / "jobs"))
    monkeypatch.chdir(tmp_path)

    def launch(*words: str) -> str:
        """By a process that ends: what it has started has no parent here."""
        command = [sys.executable, "-m", "windlass", "launch", "local", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def windlass(*words: str, code: int = 0) -> str:
        assert execute(["launch", *words]) == code
        printed = capsys.readouterr()
        return printed.out or printed.err

    assert "eval-compare is launched" in launch("--", "eval", "compare", "none", "nothing")
    until(lambda: json.loads(windlass("list", "--json"))[0]["state"] == "failed")
    assert "none" in windlass("logs", "eval-compare")
    assert "exit code 2" in windlass("status", "eval-compare", code=2)
    os.mkfifo(tmp_path / "fifo.toml")  # a command that waits until it is ended
    launch("--name", "wait", "--", "train", "run", "fifo.toml", "--out", "x", "--set", "schedule.steps=1")
    folder = tmp_path / "jobs" / "wait"
    until(lambda: (folder / "run-0" / "pid").exists())
    pid = int((folder / "run-0" / "pid").read_text())
    assert "cancelled" in windlass("cancel", "wait")
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert json.loads(windlass("status", "wait", "--json", code=1))["state"] == "cancelled"
    assert "no longer listed" in windlass("forget", "wait")
    assert "job 'wait'" in windlass("status", "wait", code=2)
