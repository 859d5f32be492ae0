"""No kernels and no compiler: one loud line, where the CPU is used."""

from __future__ import annotations

import pytest

from windlass.open import compile as opening
from windlass.runtime.kernels import build

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WINDLASS_NO_NATIVE", raising=False)
    monkeypatch.setattr(build, "will_compile", lambda name: False)
    monkeypatch.setattr(build, "why_not", lambda name: "there is no C++ compiler")
    monkeypatch.setattr(opening, "_has_gpu", lambda: False)


@pytest.mark.parametrize(
    ("device", "gpu", "warned"), [("auto", False, 1), ("cpu", True, 1), ("auto", True, 0), ("cuda", False, 0)]
)
def test_a_warning_where_the_cpu_is_used(
    device: str, gpu: bool, warned: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(opening, "_has_gpu", lambda: gpu)
    opening.compile_kernels(shown=False, device=device)
    said = capsys.readouterr().err
    assert said.count("\n") == said.count("WARNING: no compiled CPU kernels: there is no C++ compiler") == warned
    assert not warned or ("40 to 300 times slower" in said and "make wheel" in said and "--no-deps windlass_llm-*.whl" in said)


def test_no_warning_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WINDLASS_NO_NATIVE", "1")
    opening.compile_kernels(shown=True, device="cpu")
    assert capsys.readouterr().err == ""


def test_no_warning_with_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(build, "why_not", lambda name: None)
    opening.compile_kernels(shown=True, device="cpu")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("device", "gpu", "compiled"),
    [("auto", False, ["native"]), ("cpu", True, ["native"]), ("auto", True, []), ("cuda:1", False, []), ("mps", False, [])],
)
def test_nothing_is_compiled_for_a_model_on_a_gpu(
    device: str, gpu: bool, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(opening, "_has_gpu", lambda: gpu)
    monkeypatch.setattr(build, "will_compile", lambda name: True)
    monkeypatch.setattr(build, "library", asked.append)
    opening.compile_kernels(shown=False, device=device)
    assert asked == compiled
