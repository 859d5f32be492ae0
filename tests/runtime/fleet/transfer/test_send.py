"""Weights on their way: pieces of bounded size, to several workers at once, again after a break, and not at all where the files are there."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file  # noqa: E402

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.ranks.epoch import EpochPlan  # noqa: E402
from windlass.runtime.fleet.transfer.cache import CacheEntry, WeightCache  # noqa: E402
from windlass.runtime.fleet.transfer.send import CheckpointSender, send  # noqa: E402
from windlass.runtime.fleet.worker.local_checkpoints import LocalCheckpoints  # noqa: E402
from windlass.runtime.weights.tensors.slices import Slice, subtract  # noqa: E402
from windlass.runtime.weights.transfer.fingerprint import identity  # noqa: E402
from windlass.runtime.weights.transfer.pieces import PIECE_BYTES, CheckpointPiece, is_intact  # noqa: E402

pytestmark = pytest.mark.cpu

CONFIG = (
    '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 2,'
    ' "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,'
    ' "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": false}'
)
HALVES = EpochPlan(layout=Layout(tp=2), nodes=(0, 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 MB: several pieces of the largest matrices."""
    from windlass.core.rule import stored_tensors
    from windlass.model.families import describe, rules

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(CONFIG)
    chance = torch.Generator().manual_seed(0)
    tensors = {
        one.name: torch.randn(one.shape, generator=chance).to(torch.bfloat16)
        for one in stored_tensors(rules(describe(json.loads(CONFIG))))
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def sending(model: Path) -> Iterator[CheckpointSender]:
    made = CheckpointSender(model)
    yield made
    made.close()


def test_pieces_are_small_and_whole(sending: CheckpointSender) -> None:
    slices = sending.needed(HALVES, 1)
    pieces = list(sending.pieces(slices))
    assert all(is_intact(piece) and len(piece.data) <= PIECE_BYTES for piece in pieces)
    assert sum(len(piece.data) for piece in pieces) == sending.num_bytes(slices)
    assert len(pieces) < 1.5 * sending.num_bytes(slices) / PIECE_BYTES + 2, "small slices travel together"
    sent = [one for piece in pieces for one in piece.slices]
    assert subtract(slices, sent) == [] and subtract(sent, slices) == []


def test_to_several_at_once(sending: CheckpointSender, tmp_path: Path) -> None:
    """Each at the speed it takes them; nobody waits for another. What is not taken is not read."""
    wanted = {name: sending.needed(HALVES, rank) for rank, name in enumerate(("quick", "slow"))}
    uses = {name: WeightCache(tmp_path / name).using(sending.catalogue) for name in wanted}
    seen: dict[str, list[tuple[int, int]]] = {name: [] for name in wanted}
    slow_may_go_on = asyncio.Event()

    async def one(name: str) -> None:
        async def write(piece: CheckpointPiece) -> None:
            if name == "slow":
                await slow_may_go_on.wait()
            await asyncio.to_thread(uses[name].keep, piece)

        await send(sending, wanted[name], write, lambda *at: seen[name].append(at))
        slow_may_go_on.set()

    async def both() -> None:
        await asyncio.wait_for(asyncio.gather(one("slow"), one("quick")), 60)

    asyncio.run(both())
    for name, use in uses.items():
        assert use.missing(wanted[name]) == []
        total = sending.num_bytes(wanted[name])
        assert seen[name][0] == (0, total) and seen[name][-1] == (total, total)
        assert [done for done, _ in seen[name]] == sorted(done for done, _ in seen[name])
        use.close()


def test_goes_on_where_it_was_cut(sending: CheckpointSender, tmp_path: Path) -> None:
    slices = sending.needed(HALVES, 0)
    with WeightCache(tmp_path).using(sending.catalogue) as use:
        for number, piece in enumerate(sending.pieces(slices)):
            if number == 3:
                break
            use.keep(piece)
    with WeightCache(tmp_path).using(sending.catalogue) as use:
        left = use.missing(slices)
        assert sending.num_bytes(left) == sending.num_bytes(slices) - sum(file.stat().st_size for file in files(use)) + heads(use)
        keep_all(use, sending, left)
        assert use.missing(slices) == []


def test_another_layout_asks_for_little(sending: CheckpointSender, tmp_path: Path) -> None:
    """From halves to unlike parts: only what the larger part has more of is sent."""
    before, after = (
        sending.needed(HALVES, 1),
        sending.needed(EpochPlan(layout=Layout(tp=2), nodes=(0, 1), shares=(0.25, 0.75)), 1),
    )
    with WeightCache(tmp_path).using(sending.catalogue) as use:
        keep_all(use, sending, use.missing(before))
        left = sending.num_bytes(use.missing(after))
        assert 0.2 * sending.num_bytes(after) < left < 0.45 * sending.num_bytes(after)
        keep_all(use, sending, use.missing(after))
        assert use.store(after)


def files(use: CacheEntry) -> list[Path]:
    return list(use.folder.glob("*.piece"))


def heads(use: CacheEntry) -> int:
    """Bytes of files that are not weights."""
    return sum(4 + int.from_bytes(file.read_bytes()[:4], "big") for file in files(use))


def keep_all(use: CacheEntry, sending: CheckpointSender, slices: list[Slice]) -> None:
    for piece in sending.pieces(slices):
        use.keep(piece)


# --- the same checkpoint elsewhere


def test_a_copy_has_the_same_fingerprint_and_another_key(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    os.utime(copy / "model.safetensors", (1, 1))
    one, other = identity(model), identity(copy)
    assert one.fingerprint == other.fingerprint and one.key != other.key
    assert one == identity(model)


@pytest.mark.parametrize("change", ["weights", "config", "size"])
def test_other_contents_have_another_fingerprint(model: Path, tmp_path: Path, change: str) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    file = copy / ("config.json" if change == "config" else "model.safetensors")
    data = bytearray(file.read_bytes())
    if change == "weights":  # all of them, as any training or conversion does
        data[-(10**6) :] = bytes(byte ^ 1 for byte in data[-(10**6) :])
    elif change == "config":
        data = bytearray(data.replace(b"1e-5", b"1e-6"))
    else:
        data += b"\\0"
    file.write_bytes(data)
    assert identity(copy).fingerprint != identity(model).fingerprint


def test_a_local_copy_is_found(model: Path, tmp_path: Path) -> None:
    fingerprint = identity(model).fingerprint
    (tmp_path / "models" / "other").mkdir(parents=True)
    (tmp_path / "models" / "other" / "model.safetensors").write_bytes(b"no weights at all")
    models = LocalCheckpoints([tmp_path / "models", tmp_path / "gone"])
    assert models.find(fingerprint, "/nowhere/model") is None
    assert models.find(fingerprint, str(model)) == model, "the same path as on the root"
    copy = Path(shutil.copytree(model, tmp_path / "models" / "deep" / "copy"))
    assert models.find(fingerprint, "/nowhere/model") == copy
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-(10**6) :] = bytes(10**6)
    (copy / "model.safetensors").write_bytes(data)
    assert models.find(fingerprint, "/nowhere/model") is None, "it changed since it was looked at"
