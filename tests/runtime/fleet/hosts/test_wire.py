"""What hosts send for each token, from their interfaces' counters: sums as int8 stay below Distributed Llama's bytes, headers and all.

Its formula counts no headers: layers x 2 x (n-1) x width x 34/32 for each node. A long and a short answer to one prompt are compared, so that
what happens once is not counted. As wide as GLM-4.5-Air (4,096), and otherwise small.
"""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest
from asking import Answer, Question, ask
from cluster import Cluster
from hosts import Hosts, lacking

pytestmark = [pytest.mark.multi, pytest.mark.skipif(bool(why := lacking()), reason=why)]
pytest.importorskip("torch")

WIDTH, LAYERS = 4096, 8
SHORT, LONG = 4, 20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Cluster]:
    from made_models import make, wide

    folder = tmp_path_factory.mktemp("wide")
    with Hosts(4, cut_packets=True) as hosts:
        yield Cluster(hosts, folder, make(folder / "model", wide(WIDTH, LAYERS, ffn=96, heads=6)))


@pytest.mark.parametrize(("ranks", "bound"), [(3, 0.70), pytest.param(4, 0.53, marks=pytest.mark.long)])
def test_int8_sums_on_the_wire(cluster: Cluster, ranks: int, bound: float) -> None:
    words = ["--context", "256", "--max-running", "1", "--tp", str(ranks), "--sync", "int8"]
    for number in range(2, ranks + 1):
        if number not in cluster.workers:
            cluster.start_worker(number)
    cluster.start_root(words, workers=range(2, ranks + 1))
    sent_by(cluster, ranks, SHORT)
    short, long = sent_by(cluster, ranks, SHORT), sent_by(cluster, ranks, LONG)
    each = [(more - fewer) / (LONG - SHORT) for fewer, more in zip(short, long, strict=True)]
    formula = LAYERS * 2 * (ranks - 1) * WIDTH * 34 / 32
    assert cluster.end_root(signal.SIGINT) == 0
    assert min(each) > 0.3 * formula, "somebody says nothing: nothing is split"
    assert max(each) <= bound * formula, [round(one / formula, 3) for one in each]


def sent_by(cluster: Cluster, ranks: int, tokens: int) -> list[int]:
    """By each host, for one answer."""
    before = [cluster.hosts.counted(number) for number in range(1, ranks + 1)]
    answer = ask(cluster.connect, Question("a", tokens), Answer())
    assert not answer.error and len(answer.tokens) == tokens, answer.error
    return [cluster.hosts.counted(number + 1).since(earlier).sent_bytes for number, earlier in enumerate(before)]
