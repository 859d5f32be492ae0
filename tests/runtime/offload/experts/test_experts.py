"""Experts on disk compute what experts in memory compute, to the last bit, with any number of slots; and a failed read harms only its step."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.model import Activation  # noqa: E402
from windlass.errors import BadInput  # noqa: E402
from windlass.runtime.kernels.arguments import ExpertsArgs  # noqa: E402
from windlass.runtime.kernels.ops.experts import experts  # noqa: E402
from windlass.runtime.kernels.packing.panels import Panels  # noqa: E402
from windlass.runtime.kernels.program.reads import Priority  # noqa: E402
from windlass.runtime.offload.experts.cache import ExpertCache  # noqa: E402
from windlass.runtime.offload.experts.experts import DiskExperts, ExpertSlots  # noqa: E402
from windlass.runtime.offload.tiers.file import TierWriter  # noqa: E402
from windlass.runtime.offload.tiers.forms import expert_forms, matrix_bytes  # noqa: E402
from windlass.runtime.offload.tiers.reader import DirectReader  # noqa: E402

pytestmark = pytest.mark.cpu

EXPERTS, HIDDEN, WIDTH = 12, 64, 32


class Case:
    def __init__(self, folder: Path, kind: str, slots: int) -> None:
        torch.manual_seed(0)
        if kind == "bf16":
            self.gate_up, self.down = (
                torch.randn(EXPERTS, 2 * WIDTH, HIDDEN).bfloat16(),
                torch.randn(EXPERTS, HIDDEN, WIDTH).bfloat16(),
            )
            blocks = [(matrix_bytes(self.gate_up[number]), matrix_bytes(self.down[number])) for number in range(EXPERTS)]
        else:
            self.gate_up = Panels.random(kind, 2 * WIDTH, HIDDEN, 32, EXPERTS, seed=1)
            self.down = Panels.random(kind, HIDDEN, WIDTH, 32, EXPERTS, seed=2)
            blocks = [
                tuple(one.expert_data(number).numpy().data for one in (self.gate_up, self.down)) for number in range(EXPERTS)
            ]
        writer = TierWriter(folder, "k" * 64, keep=True)
        entry = writer.add("layers.0.experts", expert_forms(self.gate_up, self.down), blocks)
        tier = writer.finish()
        assert tier.path is not None
        self.path, self.reader = tier.path, DirectReader(tier.descriptor, tier.name)
        self.disk, self.second = DiskExperts(0, entry), DiskExperts(1, entry)  # of the same weights
        self.slots = ExpertSlots(self.reader, ExpertCache(2, EXPERTS, slots), entry.block_bytes)
        self.disk.bind(self.slots)
        self.second.bind(self.slots)

    def args(self, rows: int, seed: int) -> ExpertsArgs:
        torch.manual_seed(seed)
        ids = torch.stack([torch.randperm(EXPERTS + 2)[:4] - 1 for _ in range(rows)]).int()  # -1 and 12 are on other ranks
        x, weights, add = torch.randn(rows, HIDDEN), torch.rand(rows, 4), torch.randn(rows, HIDDEN)
        return ExpertsArgs(x, ids, weights, self.gate_up, self.down, Activation.SILU, add=add)

    def both(self, rows: int, seed: int, *, second: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        args, disk = self.args(rows, seed), self.second if second else self.disk
        return experts(args), experts(args._replace(gate_up=disk, down=disk))


@pytest.mark.parametrize("slots", [1, 2, 5, 12])
@pytest.mark.parametrize("kind", ["bf16", "int4", "int8"])
def test_the_same_bits(kind: str, slots: int, tmp_path: Path) -> None:
    case = Case(tmp_path, kind, slots)
    for seed, rows in enumerate((1, 2, 7, 40, 1, 3)):
        expected, found = case.both(rows, seed)
        assert torch.equal(expected, found)
    case.reader.close()


def test_without_experts_of_its_own_a_rank_adds_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, "int4", 3)
    args = case.args(3, 0)
    args = args._replace(ids=torch.full_like(args.ids, -1), gate_up=case.disk, down=case.disk)
    assert args.add is not None and torch.equal(experts(args), args.add)
    case.reader.close()


def test_a_failed_read_is_not_taken_for_an_expert(tmp_path: Path) -> None:
    case = Case(tmp_path, "int8", 4)
    content = case.path.read_bytes()
    expected, found = case.both(2, 0)
    assert torch.equal(expected, found)
    os.truncate(case.path, 4096)
    with pytest.raises(BadInput, match="remove it and start again"):
        case.both(30, 1)
    with case.path.open("r+b") as file:
        file.write(content)
    for seed in range(1, 4):
        expected, found = case.both(9, seed)
        assert torch.equal(expected, found)
    case.reader.close()


GUESSES = {
    "right": lambda case, seed: case.args(1, seed + 1).ids,
    "half right": lambda case, seed: case.args(1, seed + 1).ids // 2 * 2,
    "wrong": lambda case, seed: (case.args(1, seed + 1).ids + 5) % EXPERTS,
    "too many": lambda case, seed: torch.arange(EXPERTS),
}


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("slots", [2, 8, 18, 24])
def test_reading_ahead_changes_nothing(guess: str, slots: int, tmp_path: Path) -> None:
    """To the last bit, whatever was guessed; and a right guess is found."""
    case, seeds = Case(tmp_path, "int4", slots), iter(range(0, 40, 2))
    now = 0
    case.disk.foresee(case.second, lambda _: GUESSES[guess](case, now))
    for now in seeds:
        for second in (False, True):
            expected, found = case.both(1, now + second, second=second)
            assert torch.equal(expected, found)
    counts = case.slots.cache.counts
    if guess in ("right", "half right"):
        assert (counts.foreseen > 0) == (slots >= 18), "only where there is room"
    case.reader.close()
    assert counts.hits + counts.misses == sum(len(case.disk._own(case.args(1, seed).ids)) for seed in range(40))


class LateReader:
    """Guesses are read when they are waited for, or right after the next read that something waits for."""

    def __init__(self, reader: DirectReader) -> None:
        self._reader, self._late = reader, list[LateRead]()

    def read(self, offset: int, buffer: memoryview, priority: Priority) -> Any:
        if priority is not Priority.NOW:
            self._late.append(LateRead(self._reader, offset, buffer))
            return self._late[-1]
        read = self._reader.read(offset, buffer, priority)
        read.settle()
        for late in self._late:
            late.settle()
        self._late.clear()
        return read


class LateRead:
    def __init__(self, reader: DirectReader, offset: int, buffer: memoryview) -> None:
        self._begin, self._read = partial(reader.read, offset, buffer, Priority.NOW), None

    def _begun(self) -> Any:
        self._read = self._read or self._begin()
        return self._read

    def done(self) -> bool:
        return self._read is not None and self._read.done()

    def hurry(self) -> None: ...

    def cancel(self) -> None: ...

    def settle(self) -> bool:
        return self._begun().settle()

    def wait(self) -> None:
        self._begun().wait()


@pytest.mark.parametrize("slots", [8, 10, 12])
def test_what_comes_is_not_written_where_another_expert_is(slots: int, tmp_path: Path) -> None:
    """The second layer needs more experts than there are slots, and some of its last ones were guessed."""
    case = Case(tmp_path, "int4", slots)
    case.slots.reader = LateReader(case.reader)
    for seed in range(0, 60, 2):
        ids = case.second._own(case.args(9, seed + 1).ids)
        case.disk.foresee(case.second, lambda _: torch.empty(1, 0))
        case.both(9, seed)  # nothing of the second layer is in a slot
        case.disk.foresee(case.second, lambda _, ids=ids: torch.tensor([ids[-3:]]))
        args = case.args(1, seed)
        args = args._replace(ids=args.ids[:, :1], weights=args.weights[:, :1])
        assert torch.equal(experts(args), experts(args._replace(gate_up=case.disk, down=case.disk)))
        expected, found = case.both(9, seed + 1, second=True)
        assert torch.equal(expected, found)
    case.reader.close()


def test_a_guess_that_cannot_be_read_harms_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, "int8", 24)
    content = case.path.read_bytes()
    case.both(1, 0)  # is in memory from here on
    os.truncate(case.path, 4096)
    wrong = torch.tensor([[number for number in range(EXPERTS) if number not in case.args(1, 1).ids]])
    case.disk.foresee(case.second, lambda _: wrong[:, :4])
    expected, found = case.both(1, 0)
    assert torch.equal(expected, found)
    assert len(case.slots.ahead.slots) == 4
    case.slots.ahead.take(1, ())  # the layer comes, and has chosen others
    for one in case.slots.ahead._unneeded:
        one.read.settle()
    with case.path.open("r+b") as file:
        file.write(content)
    for seed in (1, 2, 3, 4):
        expected, found = case.both(1, seed, second=True)
        assert torch.equal(expected, found), "what was guessed and not read is not taken for an expert"
    case.reader.close()


def test_a_right_guess_that_cannot_be_read_is_an_error_once(tmp_path: Path) -> None:
    case = Case(tmp_path, "int8", 24)
    content = case.path.read_bytes()
    case.both(1, 0)
    os.truncate(case.path, 4096)
    case.disk.foresee(case.second, lambda _: case.args(1, 1).ids)
    case.both(1, 0)
    with pytest.raises(BadInput, match="remove it and start again"):
        case.both(1, 1, second=True)
    with case.path.open("r+b") as file:
        file.write(content)
    expected, found = case.both(1, 1, second=True)
    assert torch.equal(expected, found)
    case.reader.close()
