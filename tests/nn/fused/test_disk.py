"""A model whose experts lie on the device, in host memory and on disk gives the logits of one that is all on the device: stand-ins for the
kernels, the CPU's own part and its reads as they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for folder in (Path(__file__).parent, Path(__file__).parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from offload_kernels import OffloadKernels, tiles_of  # noqa: E402
from stand_ins import StandIns  # noqa: E402
from tiny_fused import weights_of  # noqa: E402

from windlass.core.tiers.device import DeviceSplit  # noqa: E402
from windlass.errors import BadInput  # noqa: E402
from windlass.kernels.cuda import driver, layout  # noqa: E402
from windlass.kernels.cuda.layout import Tiles  # noqa: E402
from windlass.nn import Decoder  # noqa: E402
from windlass.offload.device.disk import DiskPlace  # noqa: E402
from windlass.offload.device.share import library  # noqa: E402
from windlass.offload.device.weights import DeviceTieredWeights  # noqa: E402
from windlass.offload.tiers.file import tier_path  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(library() is None, reason="no compiler")]

CHUNKS = [(0, 70), (70, 71), (71, 90), (90, 91), (91, 162), (162, 163)]
"""Rows of steps: more than 64, one, several, one, more than 64 again, one."""
KEY = "k" * 32


class Changing(StandIns):
    """Weights that change: staging slots. Nothing is kept of them."""

    def _product(self, x: Any, weight: Tiles, matrix: int = 0) -> Any:
        if weight.num_matrices == 1:
            return super()._product(x, weight, matrix)
        return x.float() @ layout.dequantize(weight.part(matrix, matrix + 1))[0].T


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
    Changing(torch.float32).install(monkeypatch)
    kernels = OffloadKernels()
    monkeypatch.setattr(driver, "kernel", kernels.kernel)
    spec, weights, _ = weights_of(name)
    expected = logits_of(Decoder(spec, weights), tiny)
    decoder = offloaded(name, tmp_path, on_device, on_disk, slots, share)
    assert_alike(expected, logits_of(decoder, tiny))
    decoder.tier.after_step()
    stats = decoder.tier.stats()
    assert (kernels.num_on_disk > 0) == (on_disk > 0) == (stats.expert_reads > 0) == (stats.read_bytes > 0)
    assert all(not layer.slots.gate_up.data[layer.nothing_slot].any() for layer in tiles_of(decoder) if on_disk)
    decoder.tier.close()


def test_a_disk_that_fails_during_a_prompt(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step ends with an error that names the file, and the next one is right once the file is."""
    Changing(torch.float32).install(monkeypatch)
    monkeypatch.setattr(driver, "kernel", OffloadKernels().kernel)
    spec, weights, _ = weights_of("glm+128")
    decoder = offloaded("glm+128", tmp_path, 12, 10, 8, 0.5)
    file = tier_path(tmp_path, KEY)
    content = file.read_bytes()
    with file.open("r+b") as opened:
        opened.truncate(8192)
    with pytest.raises(BadInput, match=file.name):
        logits_of(decoder, tiny)
    file.write_bytes(content)
    assert_alike(logits_of(Decoder(spec, weights), tiny), logits_of(decoder, tiny))
    reads = decoder.tier._memory.reads
    assert len(reads._free) == reads._disk.ring.shape[0] and not reads._held, "a block was lost, or is still held"
    decoder.tier.close()
