"""One model over several processes: the same text, and nobody left behind, however it ends."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from subprocesses import children, started, until_gone  # noqa: E402
from waiting import HUNG_SECONDS  # noqa: E402
from windlass.cli.bench.ranks import InlineRanks  # noqa: E402
from windlass.core.client import Unavailable  # noqa: E402
from windlass.core.launch import Launch, RandomInit  # noqa: E402
from windlass.core.layout import Layout  # noqa: E402
from windlass.core.request import GREEDY  # noqa: E402
from windlass.core.rule import stored_tensors  # noqa: E402
from windlass.errors import Impossible  # noqa: E402
from windlass.model.families import describe, rules  # noqa: E402
from windlass.runtime.engine.execute.buffers import Buffers  # noqa: E402
from windlass.runtime.engine.execute.step_codec import decode_step, encode_step  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.engine.protocol import Submit  # noqa: E402
from windlass.runtime.engine.ranks import first  # noqa: E402
from windlass.runtime.engine.schedule.scheduler import SchedulerLimits  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.parallel.processes import GroupLost  # noqa: E402

CONFIG = json.loads((Path(__file__).parents[3] / "model" / "families" / "tiny" / "llama.json").read_text())
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


def others_of(pid: int) -> list[int]:
    """Ranks that a process has started."""
    return children(pid, "windlass.runtime.engine.ranks.follower")


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


def answers(engine: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.submit(Submit(number, prompt, GREEDY, count))
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.token_ids)
    return [found[number] for number in range(len(prompts))]


def generated(launch: Launch, prompts: list[list[int]], count: int) -> list[list[int]]:
    with loaded(launch) as (engine, _):
        return answers(engine, prompts, count)


HEADS = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8}


def checkpoint(folder: Path) -> Path:
    """Small, random, and the same for every rank."""
    config = CONFIG | HEADS | {"torch_dtype": "float32"}
    chance = torch.Generator().manual_seed(0)
    tensors = {}
    for tensor in stored_tensors(rules(describe(config))):
        drawn = torch.randn(tensor.shape, generator=chance)
        tensors[tensor.name] = 1 + 0.3 * drawn if drawn.dim() == 1 else drawn * (1 if "embed" in tensor.name else 0.2)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_tokens_are_those_of_one_process_and_ranks_end_with_the_engine(tmp_path: Path) -> None:
    """Nine heads and three kv heads over three, and over two, who then both ask one of the kv heads, in two stages."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8]]
    how: dict[str, Any] = {"device": "cpu", "kv": "fp32", "exact": True, "context_tokens": 64}
    how["model"] = str(checkpoint(tmp_path))
    alone = generated(Launch(**how), prompts, 12)
    assert [len(answer) for answer in alone] == [12, 12]
    for layout in (Layout(tp=3), Layout(tp=2, pp=2)):
        with loaded(Launch(**how, layout=layout)) as (engine, info):
            pids = others_of(os.getpid())
            assert len(pids) == layout.world - 1 and info.device == "cpu"
            assert answers(engine, prompts, 12) == alone, layout
        until_gone(*pids)


def test_text_is_that_of_one_process(smollm2: Path) -> None:
    """Its nine heads and three kv heads over two. In fp32: where activations are rounded to 8 bits, ties may fall otherwise. What one process
    writes is what is kept in tests/data (tests/runtime/engine/models/test_smollm2.py)."""
    kept = json.loads((Path(__file__).parents[3] / "data" / "smollm2_golden.json").read_text())
    if hashlib.sha256(smollm2.read_bytes()).hexdigest() != kept["sha256"]:
        pytest.skip("smollm2_golden.json was made of another file")
    how = {"model": str(smollm2), "device": "cpu", "kv": "fp32", "exact": True, "context_tokens": 64}
    asked = kept["answers"][:2]
    found = generated(Launch(**how, layout=Layout(tp=2)), [one["prompt"] for one in asked], 12)
    assert found == [one["answer"][:12] for one in asked]


def test_a_rank_that_dies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its end: whoever waited for it to be silent too long would wait for an hour."""
    monkeypatch.setattr(first, "join_ranks", partial(first.join_ranks, timeout_seconds=3600.0))
    with loaded(tiny(Layout(tp=2))) as (engine, _):
        (pid,) = others_of(os.getpid())
        engine.submit(Submit(1, [1, 2, 3], GREEDY, 30))
        engine.step()
        os.kill(pid, signal.SIGKILL)
        errors: list[Exception] = []

        def run() -> None:
            try:
                while engine.has_work:
                    engine.step()
            except Exception as error:  # noqa: BLE001 - the outermost edge of the thread
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(HUNG_SECONDS)
        assert not thread.is_alive(), "hung: a rank is dead and nobody noticed"
        assert isinstance(errors[0], GroupLost | Unavailable)


def test_a_root_that_is_killed_leaves_no_orphan() -> None:
    script = (
        "import sys, time; from windlass.cli.bench.ranks import InlineRanks; from windlass.core.launch import Launch; import msgspec\n"
        "launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch); quiet = lambda _: None; ranks = InlineRanks(quiet, quiet)\n"
        "kept = ranks.load(launch, lambda *_: None); print('ready', flush=True); time.sleep(3600)"
    )
    import msgspec

    with started([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as root:
        assert root.stdin is not None and root.stdout is not None
        root.stdin.write(msgspec.msgpack.encode(tiny(Layout(tp=2))))
        root.stdin.close()
        while root.stdout.readline() != b"ready\n":
            assert root.poll() is None, "it ended before it was ready"
        pids = others_of(root.pid)
        assert len(pids) == 1
    until_gone(*pids)


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
