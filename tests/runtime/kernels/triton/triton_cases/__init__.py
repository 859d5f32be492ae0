"""Every Triton kernel against the plain reference of its operation, case by case: `CASES[name](device)` raises where they differ.

No pytest here, so that bench/h200/triton_kernels.py runs the same cases on a GPU. Those in `LARGE` have the shapes of real models and run
only there.
"""

from triton_cases import attention, between, products
from triton_cases.compare import CASES, LARGE

__all__ = ["CASES", "LARGE", "attention", "between", "products"]
