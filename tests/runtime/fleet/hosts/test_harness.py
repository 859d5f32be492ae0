"""The hosts that other tests use are what they seem: links carry, are shaped, cut and counted; processes die with them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from hosts import Hosts, lacking, remove_stale

from subprocesses import is_running
from waiting import HUNG_SECONDS, until

pytestmark = [pytest.mark.multi, pytest.mark.skipif(bool(why := lacking()), reason=why)]

TAKE = """
import socket, sys
listening = socket.create_server((sys.argv[1], 7001))
print("ready", flush=True)
connection, _ = listening.accept()
total = 0
while data := connection.recv(1 << 18):
    total += len(data)
print(total, flush=True)
"""
GIVE = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7001), timeout=60)
connection.settimeout(None)
connection.sendall(bytes(int(sys.argv[2])))
"""
SAY = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7001), timeout=float(sys.argv[2]))
while True:
    connection.sendall(b"x")
    time.sleep(0.02)
"""
HEAR = """
import socket, sys, time
listening = socket.create_server((sys.argv[1], 7001))
print("ready", flush=True)
connection, _ = listening.accept()
connection.settimeout(0.5)
while True:
    try:
        data = connection.recv(1024)
        print("heard" if data else "end", flush=True)
        if not data: break
    except TimeoutError:
        print("silence", flush=True)
"""


@pytest.fixture(scope="module")
def hosts() -> Generator[Hosts]:
    with Hosts(3) as made:
        yield made


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def send(hosts: Hosts, source: int, target: int, num_bytes: int) -> None:
    """All of it arrives."""
    taking = hosts.start(target, python(TAKE, hosts.address(target)), stdout=subprocess.PIPE, text=True)
    assert taking.stdout is not None
    with taking.stdout as words:
        assert words.readline() == "ready\n"
        done = hosts.run(source, python(GIVE, hosts.address(target), str(num_bytes)))
        assert done.returncode == 0, done.stderr
        total = words.readline()
    taking.wait()
    assert int(total) == num_bytes


def test_links_are_shaped_and_counted(hosts: Hosts) -> None:
    """A gigabit: of 32 MB some must wait, and the counters see them, with headers and what was lost and sent again, on the two hosts only."""
    before = [hosts.counted(number) for number in hosts.numbers]
    send(hosts, 1, 2, 32_000_000)
    first, second, third = (hosts.counted(number).since(earlier) for number, earlier in zip(hosts.numbers, before, strict=True))
    there, _ = hosts.held_back(1)
    assert there.bits_per_second == 1e9 and there.waited > 0
    assert second.received_bytes / 32e6 > 1.0 and 1.0 < first.sent_bytes / 32e6 < 2
    assert second.sent_bytes < 2e6 and third.sent_bytes + third.received_bytes < 100_000


def test_packets_are_cut_where_that_is_asked_for() -> None:
    """1,448 bytes of 1,514 are the sender's; how many are lost and sent again is chance."""
    with Hosts(2, cut_packets=True) as hosts:
        before = hosts.counted(1)
        send(hosts, 1, 2, 4_000_000)
        counted = hosts.counted(1).since(before)
        assert counted.sent_bytes > 1.04 * 4e6 and counted.sent_bytes <= 1514 * counted.sent_packets


def test_a_slowed_link_is_slow(hosts: Hosts) -> None:
    """Both ways: packets wait where the host sends, and where it is sent to."""
    hosts.shape(3, "20mbit")
    try:
        send(hosts, 3, 1, 1_000_000)
        there, back = hosts.held_back(3)
        assert there.bits_per_second == back.bits_per_second == 20e6 and there.waited > 20
        waited = back.waited
        send(hosts, 1, 3, 1_000_000)
        assert hosts.held_back(3)[1].waited > waited + 20
    finally:
        hosts.shape(3, hosts.rate)
    assert {end.bits_per_second for end in hosts.held_back(3)} == {1e9}


def talking(
    hosts: Hosts, source: int, target: int, connect_seconds: float = HUNG_SECONDS
) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    hearing = hosts.start(target, python(HEAR, hosts.address(target)), stdout=subprocess.PIPE, text=True)
    heard(hearing, "ready")
    return hearing, hosts.start(source, python(SAY, hosts.address(target), str(connect_seconds)))


def heard(hearing: subprocess.Popen[str], word: str) -> None:
    """Reads until the word comes."""
    assert hearing.stdout is not None
    end = time.monotonic() + HUNG_SECONDS
    while (line := hearing.stdout.readline().strip()) != word:
        assert time.monotonic() < end and line, f"hung: {line!r} instead of {word!r}"


def test_a_cut_link_says_nothing_and_comes_back(hosts: Hosts) -> None:
    hearing, saying = talking(hosts, 1, 2)
    heard(hearing, "heard")
    hosts.cut(2)
    heard(hearing, "silence")
    assert saying.poll() is None, "nobody was told"
    hosts.restore(2)
    heard(hearing, "heard")
    for process in (saying, hearing):
        process.kill()
        process.wait()


def test_two_hosts_that_do_not_reach_each_other(hosts: Hosts) -> None:
    hosts.part(2, 3)
    try:
        hearing, saying = talking(hosts, 2, 3, 1.0)
        assert saying.wait(HUNG_SECONDS) != 0, "there is no way"
        send(hosts, 1, 2, 1000)
        assert hearing.poll() is None
    finally:
        hosts.rejoin(2, 3)
    hearing.kill()
    hearing.wait()
    send(hosts, 2, 3, 1000)


def test_a_killed_host_is_silent_and_empty(hosts: Hosts) -> None:
    hearing, saying = talking(hosts, 1, 2)
    heard(hearing, "heard")
    assert saying.pid in hosts.pids(1) and "sendall" in hosts.commands(1)[saying.pid]
    assert saying.pid in hosts.kill(1)
    saying.wait(HUNG_SECONDS)
    assert hosts.pids(1) == []
    heard(hearing, "silence")
    hosts.revive(1)
    hearing.kill()
    hearing.wait()
    send(hosts, 1, 2, 1000)


def test_a_halted_host_stands_still_by_turns(hosts: Hosts) -> None:
    counting = hosts.start(3, python("import time\nwhile True: time.sleep(0.01); print(flush=True)"), stdout=subprocess.PIPE)
    hosts.halt(3, 0.1, 0.4)
    end = time.monotonic() + HUNG_SECONDS
    for wanted in ("T", "S", "T", "S"):
        while Path(f"/proc/{counting.pid}/stat").read_text().rpartition(")")[2].split()[0] != wanted:
            assert time.monotonic() < end, "hung: it does not stand still by turns"
            time.sleep(0.02)
    hosts.unhalt(3)
    assert Path(f"/proc/{counting.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
    counting.kill()
    counting.wait()


def test_a_folder_that_a_host_does_not_have(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    found = [
        hosts.start(1, ["ls", tmp_path], hidden, stdout=subprocess.PIPE, text=True).communicate()[0]
        for hidden in (None, tmp_path)
    ]
    assert found == ["file\n", ""]


LEAVES = """
import os, signal, sys, time
sys.path[:0] = sys.argv[1:]
from hosts import Hosts
hosts = Hosts(1).__enter__()
hosts.start(1, ["sleep", "1000"], stdout=-3, stderr=-3)
while not hosts.pids(1):  # it is on its way in
    time.sleep(0.01)
print(hosts._names[0], hosts.pids(1)[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_test_left_is_removed() -> None:
    left = subprocess.run(
        python(LEAVES, *map(str, (Path(__file__).parents[number] for number in (1, 3))), capture_output=True, text=True, timeout=HUNG_SECONDS
    )
    assert left.returncode == -signal.SIGKILL, left.stderr
    name, pid = left.stdout.split()
    remove_stale()  # another run of the tests may do so at the same time
    until(lambda: not Path(f"/run/netns/{name}").exists() and not is_running(int(pid)))
