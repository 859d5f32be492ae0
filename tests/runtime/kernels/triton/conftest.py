"""Triton kernels run on this machine's GPU, or where there is none on the CPU through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()  # otherwise tests/conftest.py has asked for the interpreter

sys.path.insert(0, str(Path(__file__).parent))  # for triton_cases, which benchmarks share

collect_ignore = [] if importlib.util.find_spec("triton") else ["test_cases.py", "test_decoder.py"]


@pytest.fixture(autouse=True)
def triton_instead_of_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_NO_NATIVE", "1")
    monkeypatch.setenv("WINDLASS_TRITON", "1")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session", autouse=True)
def language_replaced_once_a_launch() -> Iterator[None]:
    """Triton's interpreter replaces all functions of triton.language when a kernel is launched, and again for every call of a function within
    it (tl.max, tl.zeros, our own): that was most of the time of these tests. The first time in a launch is enough."""
    if HAS_GPU:
        yield
        return
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", once_a_launch(interpreter))
        yield


def once_a_launch(interpreter: Any) -> Callable[[Any], Any]:
    replace, languages = interpreter._patch_lang, {id(interpreter.tl), id(interpreter.tl.core)}
    replaced: set[int] = set()

    class Scope(interpreter._LangPatchScope):
        """Of a launch: the interpreter calls `restore` at its end, and never for calls within it."""

        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def replace_once(function: Any) -> Any:
        scope, seen = Scope(), languages.intersection(map(id, function.__globals__.values()))
        if not seen <= replaced:
            replaced.update(seen)
            scope._changes = replace(function)._changes
        return scope

    return replace_once
