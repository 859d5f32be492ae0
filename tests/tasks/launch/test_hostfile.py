"""Hostfiles: what is read, what is refused and with which words; and the ssh command of a host."""

from __future__ import annotations

import shlex
import string
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadInput, Error
from windlass.tasks.launch.hostfile import KEYS, SshHost, parse_hostfile, workers_of
from windlass.tasks.launch.ssh import exit_reason, render, worker_arguments

pytestmark = pytest.mark.pure

GOOD = """
# the shelf
10.0.0.7                      # nothing differs

ada@box2  port=9999 ssh_port=2222 python=/opt/w/bin/python
box3 address=192.168.4.3 interface=eth1 cache="/data/my cache" cache_size=200GB model_dir=/models device=cuda secret_file=/etc/s
[fd00::7] port=9000
"""


def test_what_is_read() -> None:
    first, second, third, fourth = parse_hostfile(GOOD)
    assert first == SshHost(name="10.0.0.7")
    assert second == SshHost(name="ada@box2", port=9999, ssh_port=2222, python="/opt/w/bin/python")
    assert third.cache == "/data/my cache" and third.reached_at == "192.168.4.3" and third.secret_file == "/etc/s"
    assert second.reached_at == "box2"
    assert workers_of([first, second, third, fourth]) == "10.0.0.7:9998,box2:9999,192.168.4.3:9998,[fd00::7]:9000"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no machine"),
        ("# nobody\n\n", "names no machine"),
        ("a\na", "a:9998 twice"),
        ("a port=9998\nb address=a", "a:9998 twice"),
        ("a\nb prot=1", "port"),
        ("a port", "line 1: 'port' should be key=value"),
        ("a port=", "should be key=value"),
        ("a\n\nb port=0", "line 3: port is a port"),
        ("a port=65536", "1 to 65535"),
        ("a port=²", "1 to 65535"),
        ("a port=1 port=2", "port is given twice"),
        ("-oProxyCommand=rm", "is not a host"),
        ("a@-b", "is not a host"),
        ("-l@b", "is not a host"),
        ("a;b", "is not a host"),
        ("a 'b", "line 1"),
        ("a address=b:1", "without brackets and port"),
        ("a python=-c", "not a path"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(Error, match=words):
        parse_hostfile(text)


@given(st.text(alphabet=string.printable, max_size=80))
def test_anything_else_is_read_or_refused(text: str) -> None:
    try:
        hosts = parse_hostfile(text)
    except Error:
        return
    assert hosts and all(not host.name.startswith("-") for host in hosts)


@given(
    st.fixed_dictionaries(
        {}, optional={key: st.text(alphabet="abz/._ '\"$`;&|\\", min_size=1, max_size=12) for key in KEYS if "port" not in key}
    )
)
def test_what_is_written_is_what_is_read(values: dict[str, str]) -> None:
    text = " ".join(["box", *(f"{key}={shlex.quote(value)}" for key, value in values.items())])
    try:
        (host,) = parse_hostfile(text)
    except BadInput:
        return
    assert {key: getattr(host, key) for key in values} == values


BARE = "-T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3".split()


@pytest.mark.parametrize(
    ("host", "options", "python", "words"),
    [
        (SshHost(name="a"), BARE, sys.executable, ["--listen", "a:9998"]),
        (SshHost(name="u@a", port=7, ssh_port=2222), [*BARE, "-p", "2222"], sys.executable, ["--listen", "a:7"]),
        (SshHost(name="[fd00::7]", python="/p"), BARE, "/p", ["--listen", "[fd00::7]:9998"]),
        (
            SshHost(name="a", address="10.0.0.1", interface="eth1", device="cuda", cache="/a b", cache_size="2GB", model_dir="/m"),
            BARE,
            sys.executable,
            ["--listen", "10.0.0.1:9998", "--interface", "eth1", "--device", "cuda", "--cache", "/a b", "--cache-size", "2GB",
             "--model-dir", "/m"],
        ),
        (SshHost(name="a", secret_file="/s"), BARE, sys.executable, ["--listen", "a:9998", "--secret-file", "/s"]),
    ],
)  # fmt: skip
def test_the_command_of_a_host(host: SshHost, options: list[str], python: str, words: list[str]) -> None:
    argv = list(render(host).argv)
    assert argv[: -1 - len(["--", host.name])] == ["ssh", *options] and argv[-3:-1] == ["--", host.name]
    shell, flag, script, name, found, *rest = shlex.split(argv[-1])
    assert (shell, flag, name, found, rest) == ("sh", "-c", "windlass-worker", python, words)
    assert ("read -r secret" in script) == (not host.secret_file)
    assert worker_arguments(host) == words


def test_python_of_the_launch_and_of_the_host() -> None:
    assert "/there/python" in render(SshHost(name="a"), "/there/python").argv[-1]
    assert "/there/python" not in render(SshHost(name="a", python="/p"), "/there/python").argv[-1]


@pytest.mark.parametrize(
    ("status", "words"), [(255, "ssh could not connect"), (127, "python=... in the hostfile"), (2, "status 2: last words")]
)
def test_why_a_worker_ended(status: int, words: str) -> None:
    assert words in exit_reason(status, "last words", render(SshHost(name="a")))
