"""A model whose experts lie on the device, in host memory and on disk gives the logits of one that is all on the device: stand-ins for the
kernels, the CPU's own part and its reads as they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
HERE = str(Path(__file__).parents[1])
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from stand_ins import StandIns  # noqa: E402
from stand_ins_offload import OffloadStandIns  # noqa: E402
from tiny_fused import weights_of  # noqa: E402

from windlass.core.tiers.device import DeviceSplit  # noqa: E402
from windlass.errors import BadInput  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.offload.device.disk import DiskPlace  # noqa: E402
from windlass.runtime.offload.device.share import library  # noqa: E402
from windlass.runtime.offload.device.weights import DeviceTieredWeights  # noqa: E402
from windlass.runtime.offload.tiers.file import tier_path  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(library() is None, reason="no compiler")]

CHUNKS = [(0, 70), (70, 71), (71, 90), (90, 91), (91, 162), (162, 163)]
"""Rows of steps: more than 64, one, several, one, more than 64 again, one."""
KEY = "k" * 32


def logits_of(decoder: Any, tiny: Any) -> list[Any]:
    caches = decoder.make_caches(16, torch.float32)
    tokens = torch.randint(0, 96, (CHUNKS[-1][1],), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        return [decoder(tiny.step([tiny.chunk(tokens, *chunk, list(range(12)))]), caches).clone() for chunk in CHUNKS]


def offloaded(name: str, folder: Path, on_device: int, on_disk: int, slots: int, share: float) -> Any:
    spec, weights, _ = weights_of(name)
    moe = spec.experts
    assert moe is not None
    first = next(at for at, layer in enumerate(spec.layers) if layer.feed_forward == moe)
    split = DeviceSplit(
        spec.num_layers - first, moe.num_experts, on_device, moe.shared_intermediate_size > 0, share, on_disk, slots
    )
    source = DeviceTieredWeights(weights, split, first, DiskPlace(folder, KEY, keep=True, bytes_per_second=1e9))
    decoder = Decoder(spec, source)  # type: ignore[arg-type]
    decoder.tier = source.finish()  # type: ignore[assignment]
    return decoder


def whole_logits(name: str, tiny: Any, patch: pytest.MonkeyPatch) -> list[Any]:
    """Logits of the whole model."""
    StandIns(torch.float32).install(patch)
    spec, weights, _ = weights_of(name)
    return logits_of(Decoder(spec, weights), tiny)


def stand_in(decoder: Any, patch: pytest.MonkeyPatch) -> OffloadStandIns:
    made = OffloadStandIns(torch.float32, decoder.tier._memory.mailbox, decoder.tier.share)
    made.install(patch)
    return made


def assert_alike(expected: list[Any], found: list[Any]) -> None:
    """Rows that the CPU computes are rounded to bf16 on their way to it. Where two experts are nearly equally likely that may change the choice."""
    errors = [(one - other).norm(dim=-1) / one.norm(dim=-1) for one, other in zip(expected, found, strict=True)]
    assert all(error.median() <= 0.006 for error in errors)
    assert torch.cat(errors).gt(0.01).float().mean() <= 0.02


@pytest.mark.parametrize("name", ["glm+qk_norm", "glm+128", "qwen"])
@pytest.mark.parametrize(
    ("on_device", "on_disk", "slots", "share"), [(12, 10, 8, 0.5), (0, 32, 4, 1.0), (20, 5, 64, 0.0), (12, 0, 0, 0.5)]
)
def test_the_same_logits(
    name: str, on_device: int, on_disk: int, slots: int, share: float, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole_logits(name, tiny, monkeypatch)
    decoder = offloaded(name, tmp_path, on_device, on_disk, slots, share)
    kernels = stand_in(decoder, monkeypatch)
    assert_alike(expected, logits_of(decoder, tiny))
    decoder.tier.after_step()
    stats = decoder.tier.stats()
    assert (kernels.num_on_disk > 0) == (on_disk > 0) == (stats.expert_reads > 0) == (stats.read_bytes > 0)
    slots_there, nothing = decoder.tier._memory.slots, decoder.tier.split.nothing_slot
    assert nothing < 0 or not (slots_there.gate_up.data[nothing].any() or slots_there.down.data[nothing].any())
    decoder.tier.close()


def test_a_disk_that_fails_during_a_prompt(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ends with an error that names the file, and the next one is right once the file is."""
    expected = whole_logits("glm+128", tiny, monkeypatch)
    decoder = offloaded("glm+128", tmp_path, 12, 10, 8, 0.5)
    stand_in(decoder, monkeypatch)
    file = tier_path(tmp_path, KEY)
    content = file.read_bytes()
    with file.open("r+b") as opened:
        opened.truncate(8192)
    with pytest.raises(BadInput, match=file.name):
        logits_of(decoder, tiny)
    file.write_bytes(content)
    assert_alike(expected, logits_of(decoder, tiny))
    reads = decoder.tier._memory.reads
    assert len(reads._free) == reads._disk.ring.shape[0] and not reads._held, "a block was lost, or is still held"
    decoder.tier.close()
