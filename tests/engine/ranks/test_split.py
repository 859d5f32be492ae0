"""One model over several processes: the same text, and nobody left behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from windlass.cli.bench.ranks import InlineRanks  # noqa: E402
from windlass.core.client import Unavailable  # noqa: E402
from windlass.core.launch import Launch, RandomInit  # noqa: E402
from windlass.core.layout import Layout  # noqa: E402
from windlass.core.request import GREEDY  # noqa: E402
from windlass.engine.execute.runner import Buffers  # noqa: E402
from windlass.engine.execute.step_codec import decode_step, encode_step  # noqa: E402
from windlass.engine.load import load_model  # noqa: E402
from windlass.engine.protocol import Submit  # noqa: E402
from windlass.engine.schedule.scheduler import SchedulerLimits  # noqa: E402
from windlass.errors import Impossible  # noqa: E402
from windlass.kernels.program import program  # noqa: E402
from windlass.parallel.processes import GroupLost  # noqa: E402
from windlass.weights.text.files import model_text  # noqa: E402

CONFIG = json.loads((Path(__file__).parents[2] / "families" / "tiny" / "llama.json").read_text())
LIMITS = SchedulerLimits(num_blocks=40, context_tokens=64, max_sequences=4, max_step_tokens=24, max_step_logits=8)


@pytest.fixture(autouse=True)
def threads() -> Any:
    """Splitting shares the cores out."""
    yield
    if program.available():
        program.set_threads(program.num_threads())


def tiny(layout: Layout, **how: Any) -> Launch:
    random = RandomInit(config=CONFIG, scheme="bf16")
    return Launch(model="tiny", device="cpu", context_tokens=64, random_weights=random, layout=layout, **how)


@contextmanager
def loaded(launch: Launch) -> Generator[tuple[Any, Any]]:
    """The engine of rank 0 in this process, the others beside it; closed and ended afterwards."""
    if launch.is_single:
        engine, info = load_model(launch)
        try:
            yield engine, info
        finally:
            engine.close()
        return
    with InlineRanks(lambda _: None, lambda _: None) as ranks:
        engine, info = ranks.load(launch, lambda _done, _total: None)
        try:
            yield engine, info
        finally:
            engine.close()


def generated(launch: Launch, prompts: list[list[int]], count: int) -> list[list[int]]:
    with loaded(launch) as (engine, _):
        found: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            engine.submit(Submit(number, prompt, GREEDY, count))
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.id, []).extend(output.token_ids)
        return [found[number] for number in range(len(prompts))]


def test_text_is_that_of_one_process(smollm2: Path) -> None:
    """Nine heads and three kv heads over two and over three. In fp32: where activations are rounded to 8 bits, ties may fall otherwise."""
    tokenizer = model_text(smollm2).tokenizer
    prompts = [
        tokenizer.encode(text) for text in ("What is the capital of France?", "Once upon a time, in a village by the river,")
    ]
    how = {"model": str(smollm2), "device": "cpu", "kv": "fp32", "exact": True, "context_tokens": 64}
    alone = generated(Launch(**how), prompts, 12)
    assert [len(answer) for answer in alone] == [12, 12]
    for layout in (Layout(tp=2), Layout(tp=3)):
        assert generated(Launch(**how, layout=layout), prompts, 12) == alone, layout


def others_of(pid: int) -> list[int]:
    """Ranks that a process has started."""
    found = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(line.split()[0]) for line in found.splitlines() if "windlass.engine.ranks.follower" in line]


def is_there(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while any(is_there(pid) for pid in pids):
        assert time.monotonic() < until, f"still there: {pids}"
        time.sleep(0.05)


def test_ranks_end_with_the_engine() -> None:
    with loaded(tiny(Layout(tp=2, pp=2))) as (engine, info):
        pids = others_of(os.getpid())
        assert len(pids) == 3
        assert info.device == "cpu"
        engine.submit(Submit(1, [1, 2, 3], GREEDY, 4))
        while engine.has_work:
            engine.step()
    wait_until_gone(pids)


def test_a_rank_that_dies_is_noticed() -> None:
    with loaded(tiny(Layout(tp=2))) as (engine, _):
        (pid,) = others_of(os.getpid())
        engine.submit(Submit(1, [1, 2, 3], GREEDY, 30))
        engine.step()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises((GroupLost, Unavailable)):
            while engine.has_work:
                engine.step()


def test_a_root_that_is_killed_leaves_no_orphan() -> None:
    script = (
        "import sys, time; from windlass.cli.bench.ranks import InlineRanks; from windlass.core.launch import Launch; import msgspec\n"
        "launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch); ranks = InlineRanks(print, print)\n"
        "kept = ranks.load(launch, lambda *_: None); print('ready', flush=True); time.sleep(600)"
    )
    import msgspec

    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdin is not None and root.stdout is not None
        root.stdin.write(msgspec.msgpack.encode(tiny(Layout(tp=2))))
        root.stdin.close()
        while root.stdout.readline() != b"ready\n":
            assert root.poll() is None, "it ended before it was ready"
        pids = others_of(root.pid)
        assert len(pids) == 1
        root.kill()
    wait_until_gone(pids)


def test_what_cannot_be_split_is_said_at_once() -> None:
    with pytest.raises(Impossible, match="dp 2"), loaded(tiny(Layout(tp=2, dp=2))):
        pass


# --- the message


def filled(seed: int, rows: list[int]) -> Buffers:
    chance, buffers = torch.Generator().manual_seed(seed), Buffers(LIMITS, torch.device("cpu"))
    total = sum(rows)
    for part in (buffers.tokens, buffers.positions, buffers.slots):
        part[:total] = torch.randint(0, 99, (total,), generator=chance).numpy()
    buffers.starts[: len(rows) + 1] = [sum(rows[:number]) for number in range(len(rows) + 1)]
    buffers.lengths[: len(rows)] = [count + 17 for count in rows]
    buffers.blocks[: len(rows)] = torch.randint(0, 40, (len(rows), buffers.blocks.shape[1]), generator=chance).numpy()
    buffers.logit_rows[: len(rows)] = range(len(rows))
    buffers.counts[:] = total, len(rows), len(rows)
    return buffers


@given(st.integers(0, 99), st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_a_step_arrives_as_it_was_sent(seed: int, rows: list[int]) -> None:
    sent, came = filled(seed, rows), Buffers(LIMITS, torch.device("cpu"))
    decode_step(encode_step(sent.step), came)
    there, here = came.step.trimmed(), sent.step.trimmed()
    for name in ("tokens", "positions", "slots", "starts", "lengths", "logit_rows", "counts"):
        assert torch.equal(getattr(there, name), getattr(here, name)), name
    for length, one, other in zip(here.lengths.tolist(), there.blocks, here.blocks, strict=True):
        assert torch.equal(one[: -(-length // 16)], other[: -(-length // 16)])


@given(st.data())
def test_a_step_that_does_not_fit_is_refused(data: st.DataObject) -> None:
    """Cut short, drawn out, or with counts that buffers have no room for."""
    good, buffers = encode_step(filled(1, [3, 2]).step), Buffers(LIMITS, torch.device("cpu"))
    bad = data.draw(
        st.one_of(
            st.integers(0, len(good) - 1).map(lambda count: good[:count]),
            st.binary(min_size=4, max_size=64).map(lambda more: good + more),
            st.tuples(st.integers(0, 3), st.sampled_from([-1, 25, 2**31 - 1])).map(
                lambda change: good[: 4 * change[0]] + change[1].to_bytes(4, "little", signed=True) + good[4 * change[0] + 4 :]
            ),
        )
    )
    with pytest.raises(ValueError, match=r"a step of|buffer size"):
        decode_step(bad, buffers)
