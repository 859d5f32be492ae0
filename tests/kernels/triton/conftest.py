"""Triton kernels run on this machine's GPU, or where there is none on the CPU through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

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
