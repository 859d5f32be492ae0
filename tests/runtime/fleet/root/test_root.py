"""A root and its workers, as users start them: killed, stopped, gone and back, while requests go on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from small_root import CONFIG, SECRET, WorkerProcess  # noqa: E402

from subprocesses import children, until_gone  # noqa: E402
from waiting import HUNG_SECONDS  # noqa: E402
from windlass.core.client import Unavailable  # noqa: E402
from windlass.core.launch import Launch  # noqa: E402
from windlass.core.layout import Layout  # noqa: E402
from windlass.core.ranks.epoch import EpochPlan, Node  # noqa: E402
from windlass.core.request import GREEDY, Request, Sampling  # noqa: E402
from windlass.core.rule import stored_tensors  # noqa: E402
from windlass.model.families import describe, rules  # noqa: E402
from windlass.runtime.engine.client.client import LocalClient  # noqa: E402
from windlass.runtime.fleet.root import root as root_module  # noqa: E402
from windlass.runtime.fleet.root import state_machine as events  # noqa: E402
from windlass.runtime.fleet.root.client import FleetClient  # noqa: E402
from windlass.runtime.fleet.root.root import Fleet  # noqa: E402
from windlass.runtime.fleet.transfer.send import CheckpointSender  # noqa: E402

LENGTH = 700
REQUESTS = [
    Request(token_ids=(1, 2, 3), sampling=GREEDY, max_tokens=LENGTH, logprobs=1),
    Request(token_ids=(9, 8), sampling=Sampling(temperature=0.8, seed=3, repetition_penalty=1.1), max_tokens=LENGTH),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In fp32, so that it does not matter in which order ranks add."""
    folder = tmp_path_factory.mktemp("model")
    config = CONFIG | {"max_position_embeddings": 4096, "torch_dtype": "float32", "num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    chance = torch.Generator().manual_seed(1)
    tensors = {
        tensor.name: torch.randn(tensor.shape, generator=chance) * (0.3 if len(tensor.shape) > 1 else 0.1)
        for tensor in stored_tensors(rules(describe(config)))
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def launch_of(model: Path) -> Launch:
    return Launch(
        model=str(model),
        device="cpu",
        kv="fp32",
        exact=True,
        context_tokens=1300,
        max_sequences=4,
        kv_bytes=2**24,
        max_step_tokens=64,
    )


def planned(nodes: Sequence[Node]) -> EpochPlan:
    """tp over all machines there are, in unlike parts."""
    return EpochPlan(layout=Layout(tp=len(nodes)), nodes=tuple(range(len(nodes))), shares=(2.0, 1.0)[: len(nodes)])


class Elsewhere(CheckpointSender):
    """The worker does not find the files where the root has them: they have to be sent."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = Path("/nowhere/model")


class Watched:
    """A client of a fleet, and what it told."""

    def __init__(self, model: Path, workers: Sequence[str]) -> None:
        self.lines: list[str] = []
        self.progress: set[tuple[str, str]] = set()
        self.fleet = Fleet(
            msgspec.structs.replace(launch_of(model), workers=tuple(workers)),
            planned,
            SECRET,
            notify=self.lines.append,
            progress=lambda one: self.progress.add((one.name, one.doing)),
        )
        self.client = FleetClient(self.fleet)
        self.counts = [0 for _ in REQUESTS]
        """Tokens of all answers so far."""
        self.is_enough = False

    @property
    def count(self) -> int:
        return min(self.counts)

    async def ask(self, number: int) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        logprobs: list[float] = []
        async for delta in self.client.generate(REQUESTS[number]):
            tokens += delta.token_ids
            self.counts[number] += len(delta.token_ids)
            logprobs += [entry.logprob for entry in delta.logprobs]
            await asyncio.sleep(0)
        return tokens, logprobs

    async def keep_asking(self, number: int, alone: tuple[list[list[int]], list[float]]) -> int:
        """Again and again, as a quick machine has answered before a worker is back; every answer is that of one engine."""
        times = 0
        while not self.is_enough:
            tokens, logprobs = await self.ask(number)
            assert tokens == alone[0][number]
            assert number or logprobs == pytest.approx(alone[1], abs=1e-4)
            times += 1
        return times

    async def until_line(self, words: str, since: int = 0) -> str:
        """The first that has the words in it."""
        await self.until(lambda: any(words in line for line in self.lines[since:]))
        return next(line for line in self.lines[since:] if words in line)

    async def until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(HUNG_SECONDS):
                while not condition():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"hung: {self.lines}") from None


@asynccontextmanager
async def watching(model: Path, workers: Sequence[str]) -> AsyncGenerator[Watched, None]:
    found = Watched(model, workers)
    try:
        yield found
    finally:
        await found.client.close()


@pytest.fixture(scope="module")
def alone(model: Path) -> tuple[list[list[int]], list[float]]:
    """What one undisturbed engine answers."""

    async def run() -> tuple[list[list[int]], list[float]]:
        client = LocalClient(launch_of(model))
        answers: list[list[int]] = []
        logprobs: list[float] = []
        for number, request in enumerate(REQUESTS):
            deltas = [delta async for delta in client.generate(request)]
            answers.append([token for delta in deltas for token in delta.token_ids])
            if not number:
                logprobs = [entry.logprob for delta in deltas for entry in delta.logprobs]
        await client.close()
        return answers, logprobs

    return asyncio.run(run())


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    """One that may be ended."""
    found = WorkerProcess(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    found = WorkerProcess(tmp_path_factory.mktemp("worker"), beat_seconds=HUNG_SECONDS)
    yield found
    found.close()


def again(worker: WorkerProcess, folder: Path) -> WorkerProcess:
    """At the same port, with the same cache."""
    return WorkerProcess(folder, "--listen", f"127.0.0.1:{worker.port}")


@pytest.mark.long
def test_requests_go_on_through_whatever_happens(
    model: Path,
    alone: tuple[list[list[int]], list[float]],
    worker: WorkerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker is killed, comes back, and has its rank stopped, all under the same two requests."""
    monkeypatch.setattr(root_module, "CheckpointSender", Elsewhere)
    name = f"127.0.0.1:{worker.port}"

    async def run() -> None:
        async with watching(model, [name]) as found:
            await found.client.ready()
            assert (name, "receiving") in found.progress
            details = (await found.client.info()).details
            assert (details["layout"], details["nodes"], details["epoch"]) == ("tp=2", f"root, {name}", "1")
            beats = await found.fleet.heartbeats()
            assert sorted(beats) == [0, 1]
            tasks = [asyncio.create_task(found.keep_asking(number, alone)) for number in range(len(REQUESTS))]

            await found.until(lambda: found.count > 30)
            worker.close()
            told = await found.until_line(f"{name} is lost")
            assert "no heartbeat" not in told, "its end was seen, not missed after a while"
            assert found.client.is_alive and found.client.is_moving
            await found.until_line("epoch 2 is ready: one device over root")

            count = found.count
            await found.until(lambda: found.count > count + 30)
            back = again(worker, tmp_path)
            try:
                await found.until_line(f"{name} is back")
                await found.until_line("epoch 3 is ready: tp=2")
                assert any("are cached" in line for line in back.lines()), "what it was sent it still has"

                again_from = found.count
                await found.until(lambda: found.count > again_from + 30)
                (rank,) = back.ranks()
                os.kill(rank, signal.SIGSTOP)
                await found.until_line("sent no heartbeat", len(found.lines) - 1)
                found.is_enough = True
                assert min(await asyncio.gather(*tasks)) > 0
                await found.until(
                    lambda: {node.name: node.state for node in found.client.nodes} == {"root": "running", name: "running"}
                )
            finally:
                back.close()
        assert not back.ranks()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("secret", "words"),
    [(SECRET, "Connection refused; start `windlass worker` there"), (b"not the same secret", "another secret")],
)
def test_who_cannot_be_had_is_named(
    model: Path, lasting: WorkerProcess, secret: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who has another secret is not waited for; a worker that is not there yet may come.
    monkeypatch.setattr(events, "FIRST_SECONDS", HUNG_SECONDS if secret != SECRET else 1.0)
    port = lasting.port if secret != SECRET else 1

    async def run() -> None:
        launch = msgspec.structs.replace(launch_of(model), workers=(f"127.0.0.1:{port}",))
        fleet = Fleet(launch, planned, secret)
        client = FleetClient(fleet)
        with pytest.raises(Unavailable, match=words):
            await client.ready()
        await client.close()

    asyncio.run(asyncio.wait_for(run(), HUNG_SECONDS))


def test_ctrl_c_leaves_nothing_on_any_machine(lasting: WorkerProcess, smollm2: Path) -> None:
    secret = lasting.log.with_name("secret")
    words = ["run", str(smollm2), "--workers", f"127.0.0.1:{lasting.port}", "--secret-file", str(secret)]
    root = subprocess.Popen(
        # Greedy, and with loops allowed, this is answered with all 4,000 tokens: it is not over when Ctrl-C comes.
        [
            *(sys.executable, "-m", "windlass", *words, "--device", "cpu", "--prompt", "Write a very long story."),
            *("--max-tokens", "4000", "--temperature", "0", "--allow-loops"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WINDLASS_THREADS": "1"},
    )
    assert root.stdout is not None
    try:
        os.read(root.stdout.fileno(), 1)  # a first word
        ranks, engine = lasting.ranks(), children(root.pid)
        assert len(ranks) == 1 and engine
        os.killpg(root.pid, signal.SIGINT)
        _, said = root.communicate(timeout=HUNG_SECONDS)
    finally:
        root.kill()
        root.communicate()
    assert root.returncode in (0, 130) and b"Traceback" not in said
    until_gone(*ranks, *engine)
    assert lasting.process.poll() is None
