"""Experts in a file below host memory: read into a cache by the thread that answers, or copied to the device for steps of many rows."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from disk_tiers import EXPERTS, LAYERS, SPLITS, Reference, Tiers, place_in, question, source

from windlass.core.tiers.device import DeviceSplit
from windlass.errors import BadInput
from windlass.runtime.kernels.cuda.tiered import DISK_PLACES
from windlass.runtime.offload.device.share import library
from windlass.runtime.offload.device.weights import DeviceTieredWeights
from windlass.runtime.offload.tiers.file import tier_path
from windlass.runtime.weights.load.random import RandomWeights

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(library() is None, reason="no compiler")]


@pytest.mark.parametrize("split", SPLITS, ids=["three tiers", "all on disk", "no share"])
def test_the_same_sums_as_from_memory(tmp_path: Path, split: DeviceSplit) -> None:
    tiers, reference, generator = Tiers(tmp_path, split), Reference(split), torch.Generator().manual_seed(1)
    for rows, active in ((1, 4), (1, 4), (5, 4), (64, 4), (64, 8), (2, 4)):
        for layer in range(LAYERS):
            x, items = question(generator, tiers, layer, rows, active)
            items = items if split.share else [item for item in items if item[0] < split.on_disk]
            found, expected = tiers.ask(layer, x, items), reference.answer(layer, x, items)
            assert (found - expected).norm() <= 3e-4 * expected.norm(), (rows, layer)
    tiers.tier.after_step()
    stats, counts = tiers.tier.stats(), tiers.tier._memory.disk.cache.counts  # type: ignore[union-attr]
    assert counts.misses == stats.expert_reads > 0 and stats.read_bytes > 0
    assert stats.disk_bytes == LAYERS * split.on_disk * tiers.tier._memory.disk.block_bytes  # type: ignore[union-attr]
    assert f"{split.on_disk} on disk" in tiers.tier.line
    tiers.tier.close()


@pytest.mark.parametrize(("model", "group"), [("Qwen3-30B-A3B", 128), ("GLM-4.5-Air", 64), ("Qwen3-30B-A3B", 32)])
def test_other_families_and_groups(tmp_path: Path, model: str, group: int) -> None:
    split = SPLITS[0]._replace(has_shared=model.startswith("GLM"))
    tiers, reference = Tiers(tmp_path, split, source(model, group)), Reference(split, source(model, group))
    generator = torch.Generator().manual_seed(8)
    for rows in (1, 20):
        x, items = question(generator, tiers, 1, rows, 4)
        expected = reference.answer(1, x, items)
        assert (tiers.ask(1, x, items) - expected).norm() <= 3e-4 * expected.norm()
    tiers.tier.close()


@settings(max_examples=10)
@given(st.data())
def test_random_splits(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    on_device = data.draw(st.integers(0, EXPERTS - 1))
    on_disk = data.draw(st.integers(1, EXPERTS - on_device))
    slots = data.draw(st.integers(2, LAYERS * on_disk + 3))
    share = data.draw(st.sampled_from([0.3, 0.6, 1.0]))
    split = DeviceSplit(LAYERS, EXPERTS, on_device, has_shared=True, share=share, on_disk=on_disk, cache_slots=slots)
    tiers, generator = Tiers(tmp_path_factory.mktemp("disk"), split), torch.Generator().manual_seed(2)
    reference = Reference(split)
    for _ in range(6):
        layer, rows = data.draw(st.integers(0, LAYERS - 1)), data.draw(st.sampled_from([1, 2, 9, 64]))
        x, items = question(generator, tiers, layer, rows, 4)
        found, expected = tiers.ask(layer, x, items), reference.answer(layer, x, items)
        assert (found - expected).norm() <= 3e-4 * expected.norm()
    tiers.tier.after_step()
    tiers.tier.close()


@pytest.mark.parametrize("split", SPLITS[:2], ids=["three tiers", "all on disk"])
def test_whole_layers_for_steps_of_many_rows(tmp_path: Path, split: DeviceSplit) -> None:
    """Whether experts are in host memory, in the file or in the cache; also after a step that was given up; and nothing stays held."""
    tiers, behind = Tiers(tmp_path, split), source()
    slots, generator = tiers.layers[0].slots, torch.Generator().manual_seed(3)
    for given_up in (True, False, False):
        for number, found in enumerate(tiers.layers):
            assert found.copies is not None
            found.copies.before(number)
            gate_up, down = behind.experts(number + 1, "gate", "up"), behind.experts(number + 1, "down")
            for expert, at in enumerate(found.whole_table.tolist()[:-1]):
                assert torch.equal(slots.gate_up.data[at], gate_up.data[expert])
                assert torch.equal(slots.down.data[at], down.data[expert])
            if given_up:
                found.abandon()
                break
            found.copies.after(number)
        tiers.tier.after_step()
        for layer in range(LAYERS):  # the cache is in use between two prompts
            tiers.ask(layer, *question(generator, tiers, layer, 1, 4))
    assert not slots.gate_up.data[split.nothing_slot].any() and not slots.down.data[split.nothing_slot].any()
    reads: Any = tiers.tier._memory.reads
    assert not reads._held and not reads._copied and len(reads._free) == reads._disk.ring.shape[0]
    tiers.tier.close()


def test_measuring_bursts_changes_nothing(tmp_path: Path) -> None:
    """They pass through the ring, and count neither as reads of steps nor among the cache's."""
    tiers, reference, generator = Tiers(tmp_path, SPLITS[0]), Reference(SPLITS[0]), torch.Generator().manual_seed(9)
    for experts in (1, 3, 100):
        assert tiers.tier.burst_speed(experts) > 0
    disk = tiers.tier._memory.disk
    assert disk is not None and disk.reader.counts.num_bytes >= 3 * (1 + 3 + 8) * disk.block_bytes
    assert tiers.tier.stats().read_bytes == 0 and tiers.tier.stats().read_seconds == pytest.approx(0.0)
    x, items = question(generator, tiers, 1, 2, 4)
    expected = reference.answer(1, x, items)
    assert (tiers.ask(1, x, items) - expected).norm() <= 3e-4 * expected.norm()
    missed = sum(expert < SPLITS[0].on_disk for expert, *_ in items)
    assert tiers.tier.stats().read_bytes == missed * disk.block_bytes > 0
    tiers.tier.close()


def test_places_and_slots(tmp_path: Path) -> None:
    """Every expert is in one place, and what the device computes with for those on disk is its own."""
    split = SPLITS[0]
    tiers = Tiers(tmp_path, split)
    seen: set[int] = set()
    for layer in tiers.layers:
        table = layer.table.tolist()[:-1]
        assert [-1 - DISK_PLACES - at for at in range(split.on_disk)] == table[: split.on_disk]
        assert sorted(-1 - at for at in table[split.on_disk :] if at < 0) == list(range(split.in_host))
        assert len(set(layer.whole_table.tolist())) == EXPERTS + 1
        seen |= {at for at in layer.table.tolist() if at >= 0}
    assert seen == set(range(split.first_spare)) and list(split.spare) == [split.first_spare]
    assert split.nothing_slot == split.staging - 1 == split.first_spare + 1
    tiers.tier.close()


class Unread(RandomWeights):
    """Experts that were found in the file are not made again."""

    first = 0

    def experts(self, layer: int, *parts: str, only: Any = None) -> Any:
        assert only[0] >= self.first or (layer == 1 and only == (0, 1)), "read again"
        return super().experts(layer, *parts, only=only)


def test_a_file_is_found_again_and_serves_fewer_experts(tmp_path: Path) -> None:
    split, reference = SPLITS[0], Reference(SPLITS[0])
    Tiers(tmp_path, split).tier.close()
    (file,) = tmp_path.iterdir()
    before = file.stat().st_ino
    for on_disk in (split.on_disk, split.on_disk - 5):
        fewer = split._replace(on_disk=on_disk)
        behind = source()
        behind.__class__, behind.first = Unread, on_disk  # type: ignore[attr-defined]
        tiers, generator = Tiers(tmp_path, fewer, behind), torch.Generator().manual_seed(4)
        assert tiers.weights.was_found and file.stat().st_ino == before
        x, items = question(generator, tiers, 1, 4, 4)
        expected = Reference(fewer).answer(1, x, items)
        assert (tiers.ask(1, x, items) - expected).norm() <= 3e-4 * expected.norm()
        tiers.tier.close()
    more = Tiers(tmp_path, split._replace(on_disk=split.on_disk + 2))
    assert not more.weights.was_found and len(list(tmp_path.iterdir())) == 1
    more.tier.close()
    del reference


@pytest.mark.parametrize("damage", ["cut short", "other bytes", "no index"])
def test_a_damaged_file_is_written_again(tmp_path: Path, damage: str) -> None:
    split = SPLITS[0]
    Tiers(tmp_path, split).tier.close()
    file = tier_path(tmp_path, place_in(tmp_path).key)
    with file.open("r+b") as opened:
        size = opened.seek(0, os.SEEK_END)
        if damage == "cut short":
            opened.truncate(size // 2)
        elif damage == "no index":
            opened.seek(size - 40)
            opened.write(bytes(40))
        else:
            for at in range(4096, size - 8192, 4096):  # some of it: a sample of the blocks is checked
                opened.seek(at)
                opened.write(b"\xff")
    tiers, reference, generator = Tiers(tmp_path, split), Reference(split), torch.Generator().manual_seed(5)
    assert not tiers.weights.was_found
    x, items = question(generator, tiers, 2, 3, 4)
    expected = reference.answer(2, x, items)
    assert (tiers.ask(2, x, items) - expected).norm() <= 3e-4 * expected.norm()
    tiers.tier.close()


def test_a_read_that_fails_names_the_file(tmp_path: Path) -> None:
    """The device gets an answer, and whoever looks after the step an error; once the disk is well again, answers are right again."""
    split = SPLITS[0]
    tiers, reference, generator = Tiers(tmp_path, split), Reference(split), torch.Generator().manual_seed(6)
    file = tier_path(tmp_path, place_in(tmp_path).key)
    content = file.read_bytes()
    os.truncate(file, 8192)
    x, items = question(generator, tiers, 0, 8, 4)
    assert any(expert < split.on_disk for expert, *_ in items)
    tiers.ask(0, x, items)
    with pytest.raises(BadInput, match=rf"{file.name} ends at byte \d+;"):
        tiers.tier.after_step()
    copies = tiers.layers[0].copies
    assert copies is not None
    with pytest.raises(BadInput, match=file.name):
        copies.before(0)
    tiers.layers[0].abandon()
    file.write_bytes(content)
    expected = reference.answer(0, x, items)
    assert (tiers.ask(0, x, items) - expected).norm() <= 3e-4 * expected.norm()
    tiers.tier.after_step()
    tiers.tier.close()


def test_a_load_that_ends_early_leaves_nothing(tmp_path: Path) -> None:
    weights = DeviceTieredWeights(source(), SPLITS[0], 1, place_in(tmp_path))
    weights.experts(1, "gate", "up")
    weights.abort()
    assert not list(tmp_path.iterdir())
