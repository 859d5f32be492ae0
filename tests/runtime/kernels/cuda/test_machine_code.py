"""What decides the speed of integer products and shows in the machine code alone: nothing in local memory, the ring's state in uniform registers.

Changes that look harmless lose these (docs/reference/cuda-notes.md, 39). No GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from windlass.core.integer_units import SHAPES, UNIT_KINDS, Shape  # noqa: E402
from windlass.runtime.kernels.cuda import driver, int8, layout  # noqa: E402

pytestmark = pytest.mark.cpu

DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DENSE = {kind.rows: kind.shape for kind in UNIT_KINDS}


def instructions(kind: int, rows: int, items: int, shape: Shape, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of int8.cu, as it is launched."""
    asked: dict[str, int] = {}
    monkeypatch.setattr(driver, "kernel", lambda *_, shared_bytes, **defines: asked.update(defines))
    int8.kernel(kind, layout.empty(1, 256, 256, 128, device="cpu"), rows, items=items, shape=shape)
    image = folder / "kernel.cubin"
    image.write_bytes(driver.compile_cubin(driver.source("int8.cu"), asked, "sm_90a"))
    told = subprocess.run([DISASSEMBLER, "--dump-sass", image], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@\S+\s+)?([A-Z0-9]+)", told, re.MULTILINE)


@pytest.mark.skipif(not DISASSEMBLER.exists(), reason="Triton has no disassembler")
@pytest.mark.parametrize(("kind", "rows", "items"), [(0, 64, 0), (1, 64, 0), (0, 128, 0), (1, 80, 1), (3, 80, 1)])
def test_products_wait_for_no_memory_and_no_descriptor(
    kind: int, rows: int, items: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        driver._nvrtc()
    except driver.CudaFailed as error:
        pytest.skip(str(error))
    found = instructions(kind, rows, items, (SHAPES if items else DENSE)[rows], tmp_path, monkeypatch)
    products = [place for place, name in enumerate(found) if name == "IGMMA"]
    assert len(products) >= 8
    assert not {"LDL", "STL"} & set(found)
    assert "R2UR" not in found[products[0] : products[-1]]
