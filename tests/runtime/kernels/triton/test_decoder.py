"""Whole decoders through the Triton kernels say what they say through the references; and nobody imports triton who does not use it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from triton_cases import models

from windlass.runtime.kernels.ops import linear
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.triton import available, ops

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # warnings are numpy's, of the interpreter's infinities


@pytest.mark.parametrize(
    ("family", "kind"), [("gpt_oss", None), ("deepseek_v3", "int4"), ("glm4_moe", "int8"), ("falcon-rw", None)]
)
def test_a_decoder(family: str, kind: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, caches = models.decoder(family, device, torch.float32, kind)
    mine = models.logits(decoder, caches, device)
    monkeypatch.setenv("WINDLASS_TRITON", "0")
    plain, caches = models.decoder(family, "cpu", torch.float32, kind)
    wanted = models.logits(plain, caches, "cpu")
    torch.testing.assert_close(mine.cpu(), wanted, atol=2e-4, rtol=1e-3)


def test_who_may_be_taken(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 64, device=device), PackedRows.random("int4", 40, 64, 32, device=device)
    called: list[str] = []
    kernel = ops.linear
    monkeypatch.setattr(ops, "linear", lambda *inputs: called.append("kernel") or kernel(*inputs))
    assert linear.linear(x, weight).shape == (3, 40) and called
    called.clear()
    assert linear.linear(x.requires_grad_(), weight).requires_grad and not called, "gradients need the reference"
    monkeypatch.setenv("WINDLASS_TRITON", "0")
    assert available.usable(x.detach()) == (device == "cuda")


def test_rows_on_a_cpu_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINDLASS_NO_NATIVE")
    monkeypatch.setenv("WINDLASS_TRITON", "0")
    x, weight = torch.randn(3, 64), PackedRows.random("int8", 40, 64, 32, device="cpu")
    torch.testing.assert_close(linear.linear(x, weight), x @ weight.dense().T)
    assert torch.equal(linear.embed(torch.tensor([3], dtype=torch.int32), weight), weight.dense()[3:4])
    assert program.usable(x) == program.available()


def test_triton_is_not_imported_for_nothing() -> None:
    text = "import sys; import windlass.runtime.nn; assert not any(name.split('.')[0] == 'triton' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", text], check=True)
