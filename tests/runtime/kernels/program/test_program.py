"""A recorded program does on every replay what the calls would have done, with what its buffers hold then, and nothing else."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from windlass.core.model import Activation
from windlass.runtime.kernels.cpu import activate as native_activate
from windlass.runtime.kernels.cpu import gather as native_gather
from windlass.runtime.kernels.cpu import norm as native_norm
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.program.arena import Arena
from windlass.runtime.kernels.program.only_views import NotRecordable

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not program.available(), reason="no C++ compiler")]
ROWS, WIDTH = 8, 48


@pytest.fixture(params=(1, 2), autouse=True, ids=lambda number: f"{number}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    program.set_threads(request.param)
    yield request.param
    program.set_threads(program.num_threads())


def counter(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)


def made(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sure(result: Tensor | None) -> Tensor:
    assert result is not None
    return result


def block(x: Tensor, weight: Tensor) -> Tensor:
    """Several operations that feed each other, with results that die on the way."""
    for _ in range(5):
        normed = sure(native_norm.norm(x, weight, None, 1e-5, "rms"))
        active = sure(native_activate.activate(normed, Activation.GELU, False))
        x = sure(native_norm.add(active, x))
    return x


def test_a_replay_is_what_the_calls_would_have_been() -> None:
    x, weight, rows = made(0, ROWS, WIDTH), made(1, WIDTH), counter(ROWS)
    with program.record(rows) as recorded:
        result = block(x, weight)
    assert recorded.names == ["norm", "activate", "add"] * 5
    for seed in (2, 3):
        x.copy_(made(seed, ROWS, WIDTH))
        recorded.run()
        assert torch.equal(result, block(x, weight))


def test_nothing_runs_while_it_is_recorded() -> None:
    x = made(0, ROWS, WIDTH)
    with program.record(counter(ROWS), Arena()) as recorded:
        result = sure(native_norm.add(x, x))
    result.fill_(7.0)
    assert (result == 7).all()
    recorded.run()
    assert torch.equal(result, x + x)


def test_the_number_of_rows_is_read_at_every_run() -> None:
    x, rows = made(0, ROWS, WIDTH), counter(0)
    with program.record(rows) as recorded:
        result = sure(native_norm.add(x, x))
    for count in (3, ROWS, 1, 0):
        result.fill_(-1.0)
        rows.fill_(count)
        recorded.run()
        assert torch.equal(result[:count], x[:count] * 2)
        assert (result[count:] == -1).all()


def test_two_counters() -> None:
    """Rows of the batch, and the fewer ones whose logits are wanted."""
    x, picked, rows, wanted = made(0, ROWS, WIDTH), torch.tensor([5, 2, 0, 0], dtype=torch.int32), counter(ROWS), counter(2)
    weight = made(1, WIDTH)
    with program.record(rows) as recorded:
        doubled = sure(native_norm.add(x, x))
        with program.rows_counted_by(wanted):
            few = sure(native_gather.gather(doubled, picked))
            normed = sure(native_norm.norm(few, weight, None, 1e-5, "rms"))
        after = sure(native_norm.add(doubled, x))
    normed.fill_(-1.0)
    recorded.run()
    expected = native_norm.norm((x + x)[[5, 2]], weight, None, 1e-5, "rms")
    assert torch.equal(normed[:2], sure(expected))
    assert (normed[2:] == -1).all()
    torch.testing.assert_close(after, x * 3)


def test_counters_mean_nothing_where_nothing_is_recorded() -> None:
    x = made(0, ROWS, WIDTH)
    with program.rows_counted_by(counter(1)):
        assert torch.equal(sure(native_norm.add(x, x)), x + x)


def test_what_is_not_counted_always_has_its_rows() -> None:
    x = made(0, ROWS, WIDTH)
    with program.record(counter(0)) as recorded:
        result = program.empty(x.shape)
        program.emit("add", [result, x, x], [WIDTH, WIDTH, WIDTH], rows=ROWS, counted=False)
    recorded.run()
    assert torch.equal(result, x + x)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + x,
        lambda x: x.clone(),
        lambda x: x.t().contiguous(),
        lambda x: torch.zeros(3),
        lambda x: x.copy_(x * 2),
        lambda x: x[torch.tensor([0])],
        lambda x: x.softmax(-1),
        lambda x: torch.cat((x, x)),
        lambda x: x.sum().item(),
        lambda x: x.to(torch.bfloat16),
        lambda x: x.zero_(),
    ],
)
def test_what_pytorch_computes_cannot_be_recorded(compute: Callable[[Tensor], object]) -> None:
    x = made(0, ROWS, WIDTH)
    with pytest.raises(NotRecordable, match="native operations"), program.record(counter(ROWS)):
        compute(x)
    assert not program.is_recording()
    assert torch.equal(sure(native_norm.add(x, x)), x + x), "after that, operations run at once again"


def test_views_can_be_recorded() -> None:
    x = made(0, ROWS, WIDTH)
    with program.record(counter(ROWS)):
        seen = x.view(ROWS, 4, 12).transpose(0, 1).unflatten(-1, (3, 4)).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        pieces = x.split((8, 40), dim=1)
        assert seen.shape == (4, ROWS, 12) and first.shape == second.shape and len(pieces) == 2
        assert x[2:4, :3].unsqueeze(0).squeeze(0).expand(2, 3).shape == (2, 3)


def test_programs_are_recorded_thread_by_thread() -> None:
    """One thread records; another goes on computing."""
    x, results = made(0, ROWS, WIDTH), []
    with program.record(counter(ROWS)):
        other = threading.Thread(target=lambda: results.append((program.is_recording(), native_norm.add(x, x))))
        other.start()
        other.join()
        assert program.is_recording()
    assert not results[0][0] and torch.equal(results[0][1], x + x)


def test_a_program_keeps_what_it_reads() -> None:
    """Weights outlive whoever recorded with them: what is put where they lay must not be read instead."""
    x, weight = made(0, ROWS, WIDTH), made(1, WIDTH)
    expected = sure(native_norm.norm(x, weight, None, 1e-5, "rms"))
    with program.record(counter(ROWS)) as recorded:
        result = sure(native_norm.norm(x, weight, None, 1e-5, "rms"))
    del weight
    gc.collect()
    others = [torch.full((WIDTH,), float("nan")) for _ in range(1000)]
    recorded.run()
    assert torch.equal(result, expected) and len(others) == 1000


def test_intermediate_results_share_memory() -> None:
    x, weight, shared = made(0, 1024, 2048), made(1, 2048), Arena()
    with program.record(counter(1024), shared) as recorded:
        result = block(x, weight)
    assert len(recorded.names) == 15
    assert recorded.scratch_bytes() == shared.num_bytes <= 4 * result.nbytes, "of fifteen results at most three are alive at once"


def test_programs_may_share_an_arena() -> None:
    x, weight, shared = made(0, ROWS, WIDTH), made(1, WIDTH), Arena()
    with program.record(counter(ROWS), shared) as one:
        first = block(x, weight)
    with program.record(counter(ROWS), shared) as other:
        second = sure(native_norm.add(x, x))
    assert one.scratch_bytes() == other.scratch_bytes() == shared.num_bytes
    one.run()
    other.run()
    assert torch.equal(second, x + x)
    assert torch.equal(first, block(x, weight)), "what is still held of one program the other does not touch"


def test_time_is_kept_per_operation() -> None:
    x = made(0, ROWS, WIDTH)
    with program.record(counter(ROWS)) as recorded:
        native_norm.add(x, x)
        native_norm.norm(x, x[0], None, 1e-5, "rms")
    recorded.run()
    assert [seconds for _, seconds in recorded.seconds()] == [0.0, 0.0]
    recorded.run(timed=True)
    (first, added), (second, normed) = recorded.seconds()
    assert (first, second) == ("add", "norm") and 0 < added < 1 and 0 < normed < 1


def test_an_unknown_operation_is_said() -> None:
    with pytest.raises(AssertionError, match="no operation 'knit'"):
        program.emit("knit", [], rows=1)


def test_an_empty_program_runs() -> None:
    with program.record(counter(1)) as recorded:
        pass
    recorded.run()
    assert recorded.seconds() == []


def test_tensors_that_learn_are_not_for_native_operations() -> None:
    x = made(0, ROWS, WIDTH).requires_grad_()
    assert not program.usable(x) and program.usable(None, x.detach())
    with torch.no_grad():
        assert program.usable(x)
    assert not program.usable(torch.zeros(1, device="meta"))


def test_threads_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_THREADS", "7")
    assert program.num_threads() == 7
    monkeypatch.setenv("WINDLASS_THREADS", "none")
    assert 1 <= program.num_threads() <= 4096


def test_runs_from_several_threads_take_turns() -> None:
    x, wrong = made(0, ROWS, WIDTH), []

    def work() -> None:
        wrong.extend(1 for _ in range(200) if not torch.equal(sure(native_norm.add(x, x)), x + x))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize(("asked", "number"), (("plain", 0), ("avx2", 1)))
def test_an_instruction_set_may_be_asked_for(asked: str, number: int) -> None:
    """Or less, where the machine has less. (No torch: the library needs none.)"""
    code = "from windlass.runtime.kernels import build; print(build.library('native').windlass_use_instruction_set(-1))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "WINDLASS_ISA": asked},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert int(done.stdout) <= number


def test_a_call_comes_between_the_operations_on_the_rows_there_are() -> None:
    """As talk between ranks does: on results in the arena, whose memory is used again afterwards."""
    x, weight, rows = made(0, ROWS, WIDTH), made(1, WIDTH), counter(ROWS)
    seen: list[int] = []

    def double(some: Tensor, source: Tensor) -> None:
        seen.append(some.shape[0])
        assert some.shape == source.shape
        some.mul_(2)

    def both() -> Tensor:
        first = block(x, weight)
        program.call(double, first, x)
        second = block(first, weight)
        program.call(double, second, x)
        return sure(native_norm.add(second, x))

    with program.record(rows) as recorded:
        result = both()
    assert not seen, "recorded, not run"
    for count in (ROWS, 3, 0):
        rows.fill_(count)
        seen.clear()
        recorded.run()
        assert seen == [count, count]
        assert torch.equal(result[:count], both()[:count])
    assert recorded.scratch_bytes() == record_alone(x, weight, rows), "a call keeps no memory from being used again"


def record_alone(x: Tensor, weight: Tensor, rows: Tensor) -> int:
    with program.record(rows) as recorded:
        block(block(x, weight), weight)
    return recorded.scratch_bytes()
