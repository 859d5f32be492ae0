"""`launch ssh` and `check --hosts` over real sshd in three network namespaces: run, faults injected, nothing left behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[2], HERE.parents[2] / "tasks" / "train"):
    sys.path.insert(0, str(folder))

import sshd_hosts  # noqa: E402
from hosts_on_one_box import run  # noqa: E402

from subprocesses import started  # noqa: E402
from waiting import until  # noqa: E402

pytestmark = [
    pytest.mark.multi,
    pytest.mark.long,
    pytest.mark.skipif(bool(sshd_hosts.missing()), reason=sshd_hosts.missing() or "-"),
]
NAMES = ["h1", "h2", "h3"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Generator[sshd_hosts.SshHosts]:
    made = sshd_hosts.SshHosts(tmp_path_factory.mktemp("sshd"), NAMES)
    yield made
    made.close()


@pytest.fixture
def place(hosts: sshd_hosts.SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{hosts.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("WINDLASS_JOBS", str(tmp_path / "jobs"))
    monkeypatch.chdir(tmp_path)
    lines = [f"{name} address={hosts.hosts.addresses[name]}" for name in NAMES]
    (tmp_path / "hosts").write_text("\n".join(lines) + "\n")
    return tmp_path


def windlass(*words: str | Path, codes: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run([sys.executable, "-P", "-m", "windlass", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode in codes, done.stderr + done.stdout
    return done.stdout


def check(place: Path, *words: str | Path) -> dict[str, Any]:
    return json.loads(windlass("check", "--hosts", place / "hosts", "--json", *words, codes=(0, 1, 2)))


def bad(report: dict[str, Any]) -> list[dict[str, str]]:
    return [row for row in report["checks"] if row["state"] != "pass"]


def test_three_hosts_that_are_well(place: Path) -> None:
    report = check(place, "--shared", place / "shared", "--full", "--folder", place)
    assert [row for row in bad(report) if row["name"] not in ("stragglers", "disk speed", "bandwidth")] == [], (
        "speeds vary on a busy machine"
    )
    assert {row["name"] for row in report["checks"]} >= {
        "ports",
        "latency",
        "bandwidth",
        "all-reduce",
        "clock",
        "shared storage",
        "same versions",
        "mtu",
    }


def test_a_blocked_port_is_named(place: Path, hosts: sshd_hosts.SshHosts) -> None:
    """By nftables."""
    space = ["ip", "netns", "exec", hosts.hosts.namespace("h2")]
    rules = "table inet block {\n chain in {\n type filter hook input priority 0\n tcp dport 9998 drop\n }\n}\n"
    done = subprocess.run([*space, "nft", "-f", "-"], input=rules, text=True, capture_output=True, check=False)
    if "not supported" in done.stderr:
        pytest.skip(f"this kernel has no nftables: {done.stderr}")
    assert done.returncode == 0, done.stderr
    try:
        row = next(row for row in bad(check(place)) if row["name"] == "ports")
    finally:
        run(*space, "nft", "delete", "table", "inet", "block")
    assert row["host"] == "h2" and row["state"] == "fail" and "9998" in row["measured"] and "9998" in row["remedy"]


def test_a_port_that_is_in_use_is_named(place: Path, hosts: sshd_hosts.SshHosts) -> None:
    program = "import socket; s = socket.create_server(('', 29500)); print(flush=True); input()"
    argv = [*hosts.hosts.inside("h1", sys.executable, "-c", program)]
    with started(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        holder.stdout.readline()
        row = next(row for row in bad(check(place)) if row["name"] == "ports")
        holder.stdin.close()
    assert row["host"] == "h1" and "29500" in row["measured"] and "in use" in row["measured"]


@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed")
def test_a_skewed_clock_is_named(place: Path) -> None:
    """h2's agent is told another time by libfaketime."""
    shifted = place / "python-in-two-minutes"
    shifted.write_text(f'#!/bin/sh\nexec faketime -f +120s {shlex.quote(sys.executable)} "$@"\n')
    shifted.chmod(0o755)
    lines = (place / "hosts").read_text().splitlines()
    lines[1] += f" python={shifted}"
    (place / "hosts").write_text("\n".join(lines) + "\n")
    row = next(row for row in bad(check(place)) if row["name"] == "clock")
    assert row["host"] == "h2" and row["state"] == "fail" and "ahead" in row["measured"] and "chrony" in row["remedy"]


def test_a_throttled_host_is_named(place: Path, hosts: sshd_hosts.SshHosts) -> None:
    """h3 may use a tenth of a core (CFS quota of a cgroup)."""
    group = Path(f"/sys/fs/cgroup/cpu/windlass-{os.getpid()}")
    if not group.parent.is_dir():
        pytest.skip("no cgroup v1 of CPU time")
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("10000")
        hosts.put("h3", group)
        rows = [row for row in bad(check(place, "--full", "--folder", place)) if row["name"] == "stragglers"]
    finally:
        hosts.put("h3", group.parent)
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()
    assert rows and {row["host"] for row in rows} == {"h3"} and "throttling" in rows[0]["remedy"], rows


def test_storage_that_one_host_does_not_share_is_named(place: Path, hosts: sshd_hosts.SshHosts) -> None:
    """h2 has a disk of its own mounted there."""
    shared = place / "shared"
    shared.mkdir()
    enter = ["nsenter", "--mount", "-t", str(hosts.server_pid("h2"))]
    run(*enter, "mount", "-t", "tmpfs", "none", str(shared))
    try:
        rows = [row for row in bad(check(place, "--shared", shared)) if row["name"] == "shared storage"]
    finally:
        run(*enter, "umount", str(shared))
    assert any(row["host"] == "h2" and row["state"] == "fail" and "h1, h3" in row["measured"] for row in rows), rows


def test_a_slow_link_is_named(place: Path, hosts: sshd_hosts.SshHosts) -> None:
    """20 Mbit/s out of h3."""
    space = hosts.hosts.namespace("h3")
    run("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "32kb", "latency", "50ms")
    try:
        rows = [row for row in bad(check(place, "--full", "--folder", place)) if row["name"] == "bandwidth"]
    finally:
        run("tc", "-n", space, "qdisc", "del", "dev", "eth0", "root")
    assert rows and "h3" in rows[0]["measured"]


def test_a_host_that_is_gone_is_named(place: Path) -> None:
    (place / "hosts").write_text((place / "hosts").read_text() + "h9.invalid\n")
    row = next(row for row in bad(check(place)) if row["name"] == "reach")
    assert row["host"] == "h9.invalid" and row["state"] == "fail"


def test_an_mtu_unlike_the_others_is_named(place: Path, hosts: sshd_hosts.SshHosts) -> None:
    run("ip", "-n", hosts.hosts.namespace("h1"), "link", "set", "eth0", "mtu", "1400")
    try:
        row = next(row for row in bad(check(place)) if row["name"] == "mtu")
    finally:
        run("ip", "-n", hosts.hosts.namespace("h1"), "link", "set", "eth0", "mtu", "1500")
    assert row["host"] == "h1" and "1400" in row["measured"]


def test_training_over_ssh_and_cancelling_leaves_nothing(place: Path, hosts: sshd_hosts.SshHosts) -> None:
    """Two hosts that meet over ssh's word alone; then a job that is cancelled saves, and nothing is left on any host."""
    pytest.importorskip("torch")
    import tiny_run

    recipe = tiny_run.make(place)
    small = [
        "--set",
        "batch.micro_batch=4",
        "--set",
        "checkpoint.interval_steps=50",
        "--set",
        "validation.samples=4",
        "--set",
        "schedule.warmup_steps=2",
    ]
    words = ["launch", "ssh", "--hostfile", place / "hosts", "--nodes", "2"]
    windlass(
        *words,
        "--name",
        "short",
        "--wait",
        "--",
        "train",
        "run",
        recipe,
        "--out",
        place / "short",
        "--set",
        "schedule.steps=6",
        *small,
    )
    assert json.loads((place / "short" / "outcome.json").read_text())["kind"] == "done"
    log = windlass("launch", "logs", "short")
    assert "[h1]" in log and "[h2]" in log and "GLOO_SOCKET_IFNAME=eth0" in log
    windlass(
        *words, "--name", "long", "--", "train", "run", recipe, "--out", place / "long", "--set", "schedule.steps=100000", *small
    )
    until(lambda: (place / "long" / "log.jsonl").exists() and '"step":3' in (place / "long" / "log.jsonl").read_text())
    windlass("launch", "cancel", "long")
    until(lambda: not any("windlass" in line for name in NAMES for line in hosts.processes(name)))
    assert json.loads((place / "long" / "outcome.json").read_text())["kind"] == "stopped"
    assert json.loads(windlass("launch", "status", "long", "--json", codes=(1,)))["state"] in ("stopped", "cancelled")


def test_an_array_over_hosts(place: Path) -> None:
    windlass(
        "launch", "ssh", "--hostfile", place / "hosts", "--wait", "--each", "arithmetic,lists", "--",
        "eval", "tiny-glm", "--tasks", "{}", "--num-examples", "2", "--results-dir", f"{place}/results {{}}",
    )  # fmt: skip
    assert {path.name for path in place.glob("results *")} == {"results arithmetic", "results lists"}
