"""One model over three hosts that are killed, cut off, slowed and restarted while eight clients ask: none of them is told.

What is tested does not depend on the model, and most of the time goes by while ranks start: it is small, its weights are random, and its nine
heads are divided by three ranks only. bench/split_chaos.py takes any other.

What "the same text" means: sums over two ranks and over three are of the same numbers in another order, so that in fp32 the last bits of
logits differ, and where a layout changes in the middle of an answer two tokens that are as likely to six digits might change places. In
the int4 kernels, which round activations to 8 bits, a last bit can become a whole step of rounding. So the model is the int4 output of
`windlass convert`, and it is computed in fp32 (`--exact`): differences are 1e-5, and a tie that close is not to be expected in some thousand
tokens. The undisturbed run is by one engine alone. How often the packed kernels differ, and by how much, is in bench/split/chaos_cluster.py.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from asking import Answer, Clients, Question, ask_all
from chaos import READY, SILENT, Chaos, check, check_end, questions
from cluster import Cluster
from hosts import Hosts, lacking

from windlass.core.request import Request, Sampling

pytestmark = [pytest.mark.multi, pytest.mark.skipif(bool(why := lacking()), reason=why)]
pytest.importorskip("torch")

NEW_TOKENS = 96
WORDS = ("--exact", "--kv", "fp32", "--context", "512")
SOON_STEADY = """
import windlass.cli
from windlass.runtime.fleet.root import state_machine
state_machine.STEADY_SECONDS = 1.0
windlass.cli.main()
"""
"""The command line, with a root that waits for a second, not three, before a worker that is back gets its part again."""


def converted(folder: Path, config: dict[str, Any]) -> Path:
    """To int4."""
    from made_models import make

    from windlass.cli import execute as run

    assert run(["convert", str(make(folder / "bf16", config)), str(folder / "int4"), "--quant", "int4", "--group", "32"]) == 0
    return folder / "int4"


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from made_models import NINE_HEADS

    return converted(tmp_path_factory.mktemp("nine"), NINE_HEADS)


@pytest.fixture(scope="module")
def hosts() -> Generator[Hosts]:
    with Hosts(3) as made:
        yield made


def alone(model: Path, asked: Sequence[Question]) -> list[Answer]:
    """By one engine, undisturbed, in this process."""
    from one_engine import answers

    return answers(model, [_request(question) for question in asked], context_tokens=512)


def _request(question: Question) -> Request:
    sampling = Sampling(temperature=question.temperature, seed=question.seed)
    return Request(prompt=question.prompt, max_tokens=question.max_tokens, sampling=sampling, ignore_eos=True)


@pytest.fixture(scope="module")
def undisturbed(int4: Path) -> list[Answer]:
    return alone(int4, questions(NEW_TOKENS))


@pytest.fixture
def cluster(int4: Path, hosts: Hosts, tmp_path: Path) -> Generator[Cluster]:
    """A root and two workers, in their first epoch."""
    made = Cluster(hosts, tmp_path, int4, ("-c", SOON_STEADY))
    for number in (2, 3):
        made.start_worker(number)
    made.start_root(WORDS)
    yield made
    for number in hosts.numbers:
        hosts.kill(number)
        hosts.revive(number)


def test_what_every_host_holds(int4: Path, cluster: Cluster) -> None:
    """A split that silently did nothing would give the same text: each host has a rank, and its cache has its part of the weights only."""
    hosts = cluster.hosts
    assert cluster.root is not None
    ready = cluster.root.until(READY).text
    assert all(cluster.address(number) in ready for number in (2, 3))
    assert [len(cluster.computing(number)) for number in hosts.numbers] == [1, 1, 1]
    whole = sum(file.stat().st_size for file in int4.glob("*.safetensors"))
    for number in (2, 3):
        held = sum(file.stat().st_size for file in (cluster.folder / f"cache{number}").rglob("*") if file.is_file())
        assert 0.1 * whole < held < 0.75 * whole, f"{held:,} of {whole:,}"
    before = [hosts.counted(number) for number in hosts.numbers]
    ask_all(cluster.connect, questions(16, 1))
    for number, earlier in zip(hosts.numbers, before, strict=True):
        assert sum(hosts.counted(number).since(earlier)) > 16 * 288 * 4, f"host {number} was not needed"


def test_clients_see_a_pause_and_nothing_else(cluster: Cluster, undisturbed: list[Answer]) -> None:
    """At its end the root is killed, which leaves nothing on any host but its worker."""
    clients = Clients(cluster.connect, questions(NEW_TOKENS))
    chaos = Chaos(cluster, clients)
    chaos.answers_flow()
    chaos.kill(3)
    chaos.cut(2)
    chaos.power_on_and_mend(3, 2)
    chaos.slow(3)
    answers = clients.stop()
    print(cluster.root.said if cluster.root else "", chaos.noticed, sep="\n")  # seen where it fails
    assert check(answers, undisturbed, chaos.changes) >= 8  # of the three times
    assert re.search(SILENT, chaos.noticed["killed"]) and re.search(SILENT, chaos.noticed["cut"]), chaos.noticed
    check_end(cluster, signal.SIGKILL)
    for number in (2, 3):
        assert cluster.end_worker(number) == 0
    assert [cluster.hosts.pids(number) for number in cluster.hosts.numbers] == [[], [], []]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM-MoE of random weights, in int4."""
    from made_models import EXPERTS

    return converted(tmp_path_factory.mktemp("experts"), EXPERTS)


@pytest.mark.long
def test_experts_whose_ranks_die_or_stand_still(experts: Path, hosts: Hosts, tmp_path: Path) -> None:
    """Two experts a host; a rank is killed on one, then on another a rank neither works nor ends."""
    asked = questions(96)  # of 200, one is as good as a tie: it changes with the number of ranks, disturbed or not
    undisturbed = alone(experts, asked)
    cluster = Cluster(hosts, tmp_path, experts)
    for number in (2, 3):
        cluster.start_worker(number)
    cluster.start_root((*WORDS, "--tp", "3", "--ep", "3")).until("tp=3 ep=3 over root")
    clients = Clients(cluster.connect, asked)
    chaos = Chaos(cluster, clients)
    chaos.answers_flow()
    chaos.kill_rank(3)
    chaos.freeze_rank(2)
    answers = clients.stop()
    print(cluster.said)
    assert check(answers, undisturbed, chaos.changes) >= 2
    assert "SIGKILL" in chaos.noticed["rank killed"], chaos.noticed
    assert "no heartbeat" in chaos.noticed["rank stood still"], chaos.noticed
    check_end(cluster, signal.SIGINT)
    for number in (2, 3):
        assert cluster.end_worker(number) == 0
