"""A cluster of hosts on one box, disturbed at random for minutes while eight clients ask: no request may be lost, no text may change.

Run as root: python bench/split/chaos_cluster.py [MODEL] [--hosts 3] [--minutes 5] [--seed 0] [--tokens 48] [-- OPTIONS OF windlass serve]
MODEL: a directory; without it a small mixture of experts with random weights, converted to int4.

Events: a host loses its power and comes back; a link is cut, for long or for a moment; a host is slowed; a worker is restarted; a rank, or
the root's engine, is killed; a rank stands still; two hosts go at once; a host goes while an epoch begins. Texts are compared with those of
one undisturbed process. Without `-- --exact --kv fp32` the packed kernels' texts may differ where two tokens are about equally likely, when the
number of ranks changes; how many did, and how far apart the two tokens were, is printed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "runtime" / "fleet"))

from asking import Answer, Clients, ask_all
from chaos import READY, check_end, first_difference, questions
from cluster import ROOT, Cluster
from hosts import Hosts, lacking

SECONDS_TO_SETTLE = 120.0


class Disturber:
    def __init__(self, cluster: Cluster, clients: Clients, chance: random.Random) -> None:
        self._cluster, self._clients, self._chance = cluster, clients, chance
        self._hosts = cluster.hosts
        self.events: Counter[str] = Counter()
        self.longest_pause = 0.0

    @property
    def _all(self) -> list[Callable[[int], None]]:
        return [
            self.power_cut,
            self.cut,
            self.flap,
            self.slow,
            self.restart,
            self.kill_rank,
            self.kill_engine,
            self.stuck,
            self.two,
            self.partition,
            self.early,
        ]

    def once(self) -> None:
        event, number = self._chance.choice(self._all), self._chance.choice([n for n in self._hosts.numbers if n != ROOT])
        print(f"{time.strftime('%X')} {event.__name__} {number}", flush=True)
        self.events[event.__name__] += 1
        began = time.monotonic()
        event(number)
        self._flow(began)

    def _flow(self, began: float) -> None:
        """Answers go on, whoever is left."""
        before = self._clients.num_pieces
        while self._clients.num_pieces < before + 32:
            assert time.monotonic() - began < SECONDS_TO_SETTLE, f"nothing goes on:\n{self._cluster.said}"
            time.sleep(0.05)
        self.longest_pause = max(self.longest_pause, time.monotonic() - began)

    def _pause(self, least: float, most: float) -> None:
        time.sleep(self._chance.uniform(least, most))

    def power_cut(self, number: int) -> None:
        self._hosts.kill(number)
        self._pause(0, 8)
        self._hosts.revive(number)
        self._cluster.start_worker(number, wait=False)

    def cut(self, number: int) -> None:
        self._hosts.cut(number)
        self._pause(5, 9)
        self._hosts.restore(number)

    def flap(self, number: int) -> None:
        for _ in range(self._chance.randint(1, 3)):
            self._hosts.cut(number)
            self._pause(0.05, 2)
            self._hosts.restore(number)
            self._pause(0.2, 1)

    def slow(self, number: int) -> None:
        self._hosts.shape(number, self._chance.choice(["5mbit", "20mbit", "100mbit"]))
        self._hosts.halt(number, 0.1, self._chance.uniform(0.05, 0.5))
        self._pause(2, 6)
        self._hosts.unhalt(number)
        self._hosts.shape(number, self._hosts.rate)

    def partition(self, number: int) -> None:
        """Two workers that the root reaches and that do not reach each other. Nobody is dead: it takes as long as a collective may."""
        other = self._chance.choice([n for n in self._hosts.numbers if n not in (ROOT, number)])
        self._hosts.part(number, other)
        self._pause(5, 40)
        self._hosts.rejoin(number, other)

    def restart(self, number: int) -> None:
        self._cluster.end_worker(number, self._chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGKILL]))
        self._pause(0, 3)
        self._cluster.start_worker(number, wait=False)

    def kill_rank(self, number: int) -> None:
        for pid in self._cluster.computing(number):
            os.kill(pid, signal.SIGKILL)

    def kill_engine(self, _: int) -> None:
        self.kill_rank(ROOT)

    def stuck(self, number: int) -> None:
        """A rank that neither works nor ends, as one that waits for a broken disk."""
        pids = list(self._cluster.computing(number))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self._pause(1, 9)
        for pid in pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGCONT)

    def two(self, _: int) -> None:
        for number in self._hosts.numbers:
            if number != ROOT:
                self._hosts.kill(number)
        self._pause(0, 5)
        for number in self._hosts.numbers:
            if number != ROOT:
                self._hosts.revive(number)
                self._cluster.start_worker(number, wait=False)

    def early(self, number: int) -> None:
        """While an epoch begins."""
        self.kill_rank(number)
        self._pause(0.5, 4)
        self.power_cut(number)


def report(answers: list[list[Answer]], undisturbed: list[Answer], disturber: Disturber) -> int:
    whole = [(answer, expected) for given, expected in zip(answers, undisturbed, strict=True) for answer in given]
    lost = [answer for answer, _ in whole if answer.error]
    other = [(answer, expected) for answer, expected in whole if not answer.error and answer.tokens != expected.tokens]
    print(f"events        {sum(disturber.events.values())}: {dict(disturber.events)}")
    print(f"answers       {len(whole)}, {sum(len(answer.tokens) for answer, _ in whole):,} tokens")
    print(f"lost          {len(lost)}{''.join(f'{chr(10)}    {answer.error}' for answer in lost[:5])}")
    print(f"other text    {len(other)}{''.join(f'{chr(10)}    {first_difference(*pair)}' for pair in other[:5])}")
    print(f"longest pause {max(answer.longest_pause for answer, _ in whole):.1f} s within an answer")
    return int(bool(lost or other))


def run(options: argparse.Namespace, hosts: Hosts, folder: Path) -> int:
    model = options.model or made_model(folder)
    asked = questions(options.tokens)
    alone = Cluster(hosts, folder, model)
    alone.start_root(options.serve, workers=[])
    undisturbed = ask_all(alone.connect, asked)
    assert not any(answer.error for answer in undisturbed), undisturbed
    alone.end_root(signal.SIGINT)
    cluster = Cluster(hosts, folder, model)
    for number in hosts.numbers:
        if number != ROOT:
            cluster.start_worker(number)
    root = cluster.start_root([*options.serve, *options.split])
    clients = Clients(cluster.connect, asked)
    disturber = Disturber(cluster, clients, random.Random(options.seed))
    until = time.monotonic() + 60 * options.minutes
    while time.monotonic() < until:
        disturber.once()
        time.sleep(disturber._chance.uniform(0, 4))
    answers = clients.stop()
    (folder / "root.log").write_text(cluster.said)
    if options.log:
        options.log.write_text(cluster.said)
    status = report(answers, undisturbed, disturber)
    print(f"epochs        {sum(bool(READY.split()[0] in line.text and 'is ready' in line.text) for line in root.lines)}")
    began = time.monotonic()
    check_end(cluster, options.end)
    print(f"the end       {time.monotonic() - began:.1f} s till no rank was left anywhere")
    for number in list(cluster.workers):
        assert cluster.end_worker(number) == 0, cluster.said
    assert [hosts.pids(number) for number in hosts.numbers] == [[] for _ in hosts.numbers]
    return status


def made_model(folder: Path) -> Path:
    from made_models import EXPERTS, make

    from windlass.cli import execute as windlass

    made = make(folder / "bf16", EXPERTS)
    assert windlass(["convert", str(made), str(folder / "int4"), "--quant", "int4", "--group", "32"]) == 0
    return folder / "int4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tp", default="", help="pin --tp")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--end", type=lambda name: signal.Signals[name], default=signal.SIGINT)
    words, serve = sys.argv[1:], ["--exact", "--kv", "fp32", "--context", "512"]
    if "--" in words:
        serve, words = words[words.index("--") + 1 :], words[: words.index("--")]
    options = parser.parse_args(words)
    options.serve, options.split = serve, ["--tp", options.tp] if options.tp else []
    if why := lacking():
        raise SystemExit(why)
    with Hosts(options.hosts) as hosts, tempfile.TemporaryDirectory(prefix="windlass-chaos-") as folder:
        raise SystemExit(run(options, hosts, Path(folder)))


if __name__ == "__main__":
    main()
