"""Bytes on the wire for each token, from the hosts' interface counters, and speeds over links of 1 Gbit/s.
Run as root: python bench/split/cluster_bytes.py

Hosts are network namespaces of this box (tests/runtime/fleet/hosts.py). For n hosts and models of several widths, whose weights are random and few:
what a host sends for one token of one answer, frames with all their headers, acknowledgements, steps, signs of life and logits included, over
Distributed Llama's formula: layers x 2 x (n-1) x width x 34/32, which counts no headers at all. A long and a short answer to the same prompt are
compared, so that the prompt and all that happens once are not counted.

    --sync int8: at most 0.70 at n = 3 and 0.53 at n = 4.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "runtime" / "fleet"))

from asking import Answer, Question, ask
from cluster import ROOT, Cluster
from hosts import Hosts, lacking
from made_models import make, wide

SHORT, LONG = 32, 160
BOUND = {3: 0.70, 4: 0.53}


@dataclass(frozen=True)
class Row:
    hosts: int
    width: int
    layers: int
    sync: str
    sent_bytes: float
    """By the host that sends most, for each token."""
    mean_bytes: float
    formula_bytes: float
    tokens_per_second: float

    @property
    def share(self) -> float:
        return self.sent_bytes / self.formula_bytes

    @property
    def mean_share(self) -> float:
        return self.mean_bytes / self.formula_bytes


def formula(hosts: int, width: int, layers: int) -> float:
    """A node's, of facts about Distributed Llama 0.16: src/nn/nn-network.cpp sends every partial sum, in q80, to all others."""
    return layers * 2 * (hosts - 1) * width * 34 / 32


def measured(cluster: Cluster, count: int, width: int, layers: int, sync: str) -> Row:
    hosts = cluster.hosts
    asked(cluster, SHORT)  # what is only done once
    sent: list[list[int]] = []
    seconds: list[float] = []
    for tokens in (SHORT, LONG):
        before = [hosts.counted(number) for number in hosts.numbers]
        began = time.monotonic()
        answer = asked(cluster, tokens)
        seconds.append(time.monotonic() - began)
        assert len(answer.tokens) == tokens, answer
        sent.append(
            [hosts.counted(number).since(earlier).sent_bytes for number, earlier in zip(hosts.numbers, before, strict=True)]
        )
    each = [(more - fewer) / (LONG - SHORT) for fewer, more in zip(*sent, strict=True)]
    return Row(
        hosts=count,
        width=width,
        layers=layers,
        sync=sync,
        sent_bytes=max(each),
        mean_bytes=sum(each) / len(each),
        formula_bytes=formula(count, width, layers),
        tokens_per_second=(LONG - SHORT) / (seconds[1] - seconds[0]),
    )


def asked(cluster: Cluster, tokens: int) -> Answer:
    answer = ask(cluster.connect, Question("a", tokens), Answer())
    assert not answer.error, answer.error
    return answer


def run(count: int, width: int, layers: int, syncs: list[str], rate: str, folder: Path) -> list[Row]:
    model = make(folder / f"model-{width}-{layers}", wide(width, layers))
    rows: list[Row] = []
    with Hosts(count, rate, cut_packets=True) as hosts:
        cluster = Cluster(hosts, folder, model)
        for number in hosts.numbers:
            if number != ROOT:
                cluster.start_worker(number)
        for sync in syncs:
            cluster.start_root(["--context", "512", "--max-running", "1", "--tp", str(count), "--sync", sync])
            rows.append(measured(cluster, count, width, layers, sync))
            show(rows[-1])
            assert cluster.end_root(signal.SIGINT) == 0
        for number in list(cluster.workers):
            cluster.end_worker(number)
    return rows


def show(row: Row) -> None:
    print(
        f"n={row.hosts} width {row.width:5} x {row.layers:2} layers, sync {row.sync:5}: {row.sent_bytes:9,.0f} B a token by the busiest host, "
        f"{row.mean_bytes:9,.0f} by the mean; formula {row.formula_bytes:9,.0f}; {row.share:.3f} and {row.mean_share:.3f} of it; "
        f"{row.tokens_per_second:.1f} tokens/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="3,4")
    parser.add_argument("--widths", default="2048,4096,8192")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--syncs", default="exact,int8")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if why := lacking():
        raise SystemExit(why)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="windlass-wire-") as folder:
        for count in map(int, options.hosts.split(",")):
            for width in map(int, options.widths.split(",")):
                rows += run(count, width, options.layers, options.syncs.split(","), options.rate, Path(folder))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
