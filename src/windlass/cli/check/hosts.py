"""Several machines, by ssh: each one's own checks, and the network between them."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from windlass.tasks.check.report import Check, failed

if TYPE_CHECKING:
    from windlass.cli.check.options import CheckOptions
    from windlass.tasks.check.needs import Needs
    from windlass.tasks.check.network.session import HostAgent, Session
    from windlass.tasks.launch.hostfile import SshHost

SIZES = (2**20, 2**24, 2**26)
"""Of the all-reduce, bytes."""


def check_hosts(options: CheckOptions, needs: Needs) -> list[Check]:
    from windlass.tasks.check.network.session import Session
    from windlass.tasks.launch.hostfile import load_hostfile

    assert options.hosts is not None
    hosts = load_hostfile(options.hosts)
    session = Session([_agent(host, options.python) for host in hosts])
    try:
        return _judge(session, options, needs)
    finally:
        session.close()


def _agent(host: SshHost, python: str) -> HostAgent:
    from windlass.tasks.check.network.session import HostAgent
    from windlass.tasks.launch.render.ssh import connect

    there = shlex.join([host.python or python or sys.executable, "-P", "-m", "windlass", "check-agent"])
    return HostAgent(name=host.name, argv=(*connect(host), there), address=host.reached_at)


def _judge(session: Session, options: CheckOptions, needs: Needs) -> list[Check]:
    from windlass.cli.check.options import say
    from windlass.tasks.check.machine.disk import judge_shared
    from windlass.tasks.check.machine.facts import judge_machine
    from windlass.tasks.check.machine.host import judge_alike
    from windlass.tasks.check.network.judge import judge_fabric, judge_reach

    say(options, "asking all machines")
    facts = session.facts(options.full)
    rows = [row for name, one in facts.items() for row in judge_machine(one, needs, name)]
    rows += judge_alike([one.host for one in facts.values()], session.skews())
    rows += judge_fabric({name: one.fabric for name, one in facts.items()})
    tried, busy = session.reach(options.ports)
    rows += judge_reach(tried)
    rows += [
        failed("ports", f"port {port} is in use: {why}", "a free port", "end what holds it, or use another", name)
        for name, ports in busy.items()
        for port, why in ports.items()
    ]
    if options.shared is not None:
        rows += judge_shared(session.shared(str(options.shared)))
    if options.full:
        rows += _measure(session, options, needs)
    rows += [failed("reach", why, "an answer over ssh", f"try `ssh {name}`", name) for name, why in session.lost.items()]
    return rows


def _measure(session: Session, options: CheckOptions, needs: Needs) -> list[Check]:
    from windlass.cli.check.options import say
    from windlass.tasks.check.machine.disk import judge_disk
    from windlass.tasks.check.network.judge import judge_all_reduce, judge_bandwidth, judge_work
    from windlass.tasks.launch.ports import meeting_ports

    say(options, "measuring disks and the same work on every machine")
    rows = [row for name, one in session.disks(str(options.folder.absolute())).items() for row in judge_disk(one, needs, name)]
    rows += judge_work(session.work("cuda" if needs.num_gpus else "cpu"))
    say(options, "measuring the network")
    links = session.bandwidths(options.ports[0])
    rows += judge_bandwidth(links, needs.network_bytes_per_second)
    interfaces = {
        name: one.name
        for name, facts in session.facts(False).items()
        if (one := facts.fabric.interface_of(session.addresses[name]))
    }
    found = session.all_reduce(SIZES, meeting_ports("check")[0], interfaces)
    fastest = max((one.bytes_per_second for one in links), default=0.0)
    return rows + judge_all_reduce(found, "", 0, len(session.addresses), 0.0 if not found else min(fastest, 10e9) / 4)
