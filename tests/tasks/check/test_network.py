"""Verdicts on networks and stragglers; agents that really listen, connect and measure on this machine."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import healthy

from windlass.cli.check.table import table
from windlass.errors import BadInput
from windlass.tasks.check.network.agent import serve
from windlass.tasks.check.network.judge import (
    Measured,
    Reached,
    judge_all_reduce,
    judge_bandwidth,
    judge_fabric,
    judge_reach,
    judge_work,
)
from windlass.tasks.check.network.session import HostAgent, Session
from windlass.tasks.check.report import Check, Report, grouped, host_list, one_line, worst

pytestmark = pytest.mark.pure


def only(rows: list[Check]) -> Check:
    found = [row for row in rows if row.state != "pass"]
    assert len(found) == 1, found
    return found[0]


def reached(source: str, target: str, port: int = 9998, seconds: float | None = 1e-4, problem: str = "") -> Reached:
    return Reached(source=source, target=target, port=port, seconds=seconds, problem=problem)


PAIRS = [(one, other) for one in "abc" for other in "abc" if one != other]


def test_a_network_that_is_well() -> None:
    rows = [
        *judge_reach([reached(*pair) for pair in PAIRS]),
        *judge_bandwidth([Measured(source=one, target=other, bytes_per_second=1e9) for one, other in PAIRS]),
        *judge_work({name: {"matmul_tflops": 1.0, "copy_gbytes": 10.0} for name in "abc"}),
        *judge_fabric(dict.fromkeys("abc", healthy.FABRIC)),
        *judge_all_reduce({2**30: 455e9}, "NVIDIA H100 80GB HBM3", 8, 1),
    ]
    assert [row for row in rows if row.state != "pass"] == []


def test_a_blocked_port_is_named() -> None:
    tried = [
        reached(one, other) if other != "c" else reached(one, other, seconds=None, problem="no answer") for one, other in PAIRS
    ]
    row = next(row for row in judge_reach(tried) if row.state == "fail")
    assert row.host == "c" and "port 9998 of c" in row.measured and "anywhere" in row.measured and "9998" in row.remedy


def test_a_slow_link_and_whose_it_is() -> None:
    found = [Measured(source=one, target=other, bytes_per_second=1e8 if "b" in one + other else 1e9) for one, other in PAIRS]
    found += [Measured(source="d", target="a", bytes_per_second=1e9), Measured(source="a", target="d", bytes_per_second=1e9)]
    found += [Measured(source="d", target="c", bytes_per_second=1e9)]
    row = only(judge_bandwidth(found))
    assert row.host == "b" and "of b" in row.remedy
    assert only(judge_bandwidth([Measured(source="a", target="b", bytes_per_second=1e8)], needed=1e9)).state == "warn"


def test_a_long_way() -> None:
    assert only(judge_reach([reached("a", "b", seconds=0.03), reached("b", "a", seconds=0.03)])).name == "latency"


@pytest.mark.parametrize("what", ["matmul_tflops", "copy_gbytes"])
def test_a_straggler_is_named(what: str) -> None:
    found = {f"n{number}": {"matmul_tflops": 1.0 + number / 100, "copy_gbytes": 10.0} for number in range(8)}
    found["n5"] = found["n5"] | {what: found["n5"][what] / 2}
    assert only(judge_work(found)).host == "n5"


def test_a_port_of_infiniband_that_is_down() -> None:
    down = msgspec.structs.replace(healthy.PORTS[0], state="DOWN")
    sick = msgspec.structs.replace(healthy.FABRIC, ports=(down, *healthy.PORTS[1:]))
    row = only(judge_fabric({"a": healthy.FABRIC, "b": sick}))
    assert row.host == "b" and "mlx5_0:1 DOWN" in row.measured


def test_unlike_mtus() -> None:
    other = msgspec.structs.replace(healthy.FABRIC.interfaces[0], mtu=1500)
    fabrics = dict.fromkeys("abc", healthy.FABRIC) | {"d": msgspec.structs.replace(healthy.FABRIC, interfaces=(other,))}
    row = only(judge_fabric(fabrics))
    assert (row.name, row.host) == ("mtu", "d")


def test_an_all_reduce_below_the_operators_mark() -> None:
    assert only(judge_all_reduce({2**34: 200e9}, "NVIDIA H100 80GB HBM3", 8, 1)).name == "all-reduce"
    assert only(judge_all_reduce({2**26: 1e9}, "", 0, 4, link_bytes=50e9)).name == "all-reduce"


# --- reports


def test_states_and_exit_codes() -> None:
    row = Check(name="x", state="pass", measured="")
    warn, fail = msgspec.structs.replace(row, state="warn"), msgspec.structs.replace(row, state="fail")
    assert [Report(checks=rows).exit_code for rows in ((), (row,), (row, warn), (warn, fail, row))] == [0, 0, 1, 2]
    assert worst([]) == "pass"
    assert set(Report(checks=(row,)).as_json()) == {"checks", "estimates", "state"}
    assert set(json.loads(msgspec.json.encode(row))) == {"name", "state", "measured", "needed", "remedy", "host"}


def test_one_line() -> None:
    row = Check(name="x", state="pass", measured="")
    assert one_line(Report(checks=(row, row))) == "check: 2 checks passed"
    bad = Check(name="ram", state="fail", measured="1 GiB", remedy="buy more")
    assert one_line(Report(checks=(row, bad))) == "check: fail: ram: 1 GiB (buy more)"


def test_a_thousand_machines_are_groups() -> None:
    """A row for each check, and one for each fault; nobody reads 1,024 rows."""
    names = ("gpus", "ram", "disk room")
    rows = [
        Check(name=name, state="pass", measured=f"{host} GiB", host=f"node{host:04}") for host in range(1024) for name in names
    ]
    rows += [
        Check(name="ecc", state="fail", measured="GPU 3: 2 errors", remedy="reset", host=f"node{host:04}") for host in (5, 9)
    ]
    groups = grouped(rows)
    assert len(groups) == 4 and len(groups[0].hosts) == 1024
    assert groups[0].where == "node0000, node0001, node0002 and 1,021 more" and groups[3].where == "node0005, node0009"
    assert table(Report(checks=tuple(rows))).row_count == 4
    assert host_list(["a", "b", "c", "d"]) == "a, b, c, d"


# --- agents


def test_an_agent_answers_lines_and_survives_bad_ones() -> None:
    out = io.StringIO()
    asked = [
        {"do": "clock"},
        {"do": "nonsense"},
        {"do": "connect", "targets": [["127.0.0.1", 1]]},
        {"do": "listen", "ports": [0]},
    ]
    serve(io.StringIO("\n".join(json.dumps(one) for one in asked) + "\n\n"), out)
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (
        answers[0]["ok"] > 1e9
        and "nonsense" in answers[1]["error"]
        and answers[2]["ok"][0]["problem"]
        and answers[3]["ok"]["bound"]
    )


@pytest.mark.multi
def test_agents_measure_each_other(tmp_path: Path) -> None:
    """Two on this machine, which is one host with two addresses."""
    argv = (sys.executable, "-P", "-m", "windlass", "check-agent")
    session = Session([HostAgent(name=f"h{number}", argv=argv, address=f"127.0.0.{number}") for number in (1, 2)])
    gone = Session([HostAgent(name="gone", argv=("sh", "-c", "echo Connection refused >&2; exit 255"), address="127.0.0.3")])
    try:
        assert set(session.facts(full=False)) == {"h1", "h2"}
        assert all(abs(skew) < 5 for skew in session.skews().values())
        bound = session.each("listen", {"h1": {"address": "127.0.0.1"}, "h2": {"address": "127.0.0.2"}}, ports=[0])
        port = int(bound["h2"]["bound"])
        found = session.each("connect", {"h1": {"targets": [("127.0.0.2", port)]}})
        assert found["h1"][0]["seconds"] > 0
        assert session.each("bandwidth", {"h1": {"host": "127.0.0.2", "port": port, "num_bytes": 2**22}})["h1"] > 0
        shared = session.shared(str(tmp_path))
        assert {one.sees for one in shared} == {("h1", "h2")} and list(tmp_path.iterdir()) == []
        assert session.lost == {}
        assert gone.facts(full=False) == {} and "Connection refused" in gone.lost["gone"]
    finally:
        session.close()
        gone.close()


def test_a_shell_that_greets_is_no_obstacle() -> None:
    """Some print a line even if nobody is there to read it."""
    agent = shlex.join([sys.executable, "-P", "-m", "windlass", "check-agent"])
    session = Session(
        [HostAgent(name="h", argv=("sh", "-c", f"echo 'Welcome'; echo '{{}} of the day'; exec {agent}"), address="::1")]
    )
    try:
        assert abs(session.skews()["h"]) < 60 and session.lost == {}
    finally:
        session.close()


def test_without_ssh_it_is_said() -> None:
    with pytest.raises(BadInput, match="no-such-ssh is not installed here; it is needed to reach h"):
        Session([HostAgent(name="h", argv=("no-such-ssh", "h"), address="h")])
