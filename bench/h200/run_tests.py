"""Runs the GPU tests of tests/runtime/kernels/cuda where pytest may be missing. Run: PYTHONPATH=src python bench/h200/run_tests.py"""

from __future__ import annotations

import importlib.util
import sys
import traceback
import types
from pathlib import Path

TESTS = Path(__file__).parents[2] / "tests"
FILES = [
    *sorted((TESTS / "runtime" / "kernels" / "cuda").glob("test_*.py")),
    TESTS / "runtime" / "engine" / "sample" / "test_masks_on_device.py",
]


class _Anything:
    def __getattr__(self, name: str) -> _Anything:
        return self

    def __call__(self, *arguments: object, **_: object) -> object:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self


def main() -> int:
    if importlib.util.find_spec("pytest") is None:
        fake = types.ModuleType("pytest")
        fake.mark = _Anything()  # type: ignore[attr-defined]
        sys.modules["pytest"] = fake
    failed = 0
    wanted = sys.argv[1:]
    for file in FILES:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, test in vars(module).items():
            if not name.startswith("test_") or test.__code__.co_argcount or (wanted and name not in wanted):
                continue
            try:
                test()
                print(f"passed {name}", flush=True)
            except Exception:  # noqa: BLE001 (a runner reports all)
                failed += 1
                print(f"FAILED {name}\n{traceback.format_exc()[-1500:]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
