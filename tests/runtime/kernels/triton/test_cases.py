"""Triton kernels equal the plain references of their operations (triton_cases), through Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
from triton_cases import CASES

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # warnings are numpy's, of the interpreter's infinities


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str, device: str) -> None:
    CASES[name](device)
