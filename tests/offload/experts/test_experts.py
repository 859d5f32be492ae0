"""Experts on disk compute what experts in memory compute, to the last bit, with any number of slots; and a failed read harms only its step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from windlass.core.model import Activation  # noqa: E402
from windlass.errors import BadInput  # noqa: E402
from windlass.kernels.arguments import ExpertsArgs  # noqa: E402
from windlass.kernels.ops.experts import experts  # noqa: E402
from windlass.kernels.packing.panels import Panels  # noqa: E402
from windlass.offload.experts.cache import ExpertCache  # noqa: E402
from windlass.offload.experts.experts import DiskExperts, ExpertSlots  # noqa: E402
from windlass.offload.tiers.file import TierWriter  # noqa: E402
from windlass.offload.tiers.forms import expert_forms, matrix_bytes  # noqa: E402
from windlass.offload.tiers.reader import DirectReader  # noqa: E402

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
        self.disk = DiskExperts(0, entry)
        self.disk.bind(ExpertSlots(self.reader, ExpertCache(1, EXPERTS, slots), entry.block_bytes))

    def args(self, rows: int, seed: int) -> ExpertsArgs:
        torch.manual_seed(seed)
        ids = torch.stack([torch.randperm(EXPERTS + 2)[:4] - 1 for _ in range(rows)]).int()  # -1 and 12 are on other ranks
        x, weights, add = torch.randn(rows, HIDDEN), torch.rand(rows, 4), torch.randn(rows, HIDDEN)
        return ExpertsArgs(x, ids, weights, self.gate_up, self.down, Activation.SILU, add=add)

    def both(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        args = self.args(rows, seed)
        return experts(args), experts(args._replace(gate_up=self.disk, down=self.disk))


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
