"""Puts the compiled CPU kernels into the wheel, so that a machine without a compiler runs at full speed.

x86-64 wheels carry AVX2 and AVX-512 code, arm64 wheels NEON; which is used is decided at run time. Without a compiler, or with
WINDLASS_NO_KERNELS=1, the wheel is pure Python and compiles its kernels at first use.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or os.environ.get("WINDLASS_NO_KERNELS", "") not in ("", "0") or platform.system() != "Linux":
            return
        build = _load(Path(self.root) / "src" / "windlass" / "runtime" / "kernels" / "build.py")
        try:
            made = build.build_shipped(Path(self.root) / "build" / "kernels")
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(
                f"no kernels in this wheel ({error}): they are compiled at first use, by a machine that has a compiler"
            )
            return
        build_data["force_include"] |= {str(file): f"windlass/runtime/kernels/lib/{file.name}" for file in made}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag([file.read_bytes() for file in made])}"


# libstdc++'s newest symbol of systems with that glibc (auditwheel's manylinux policies): `GLIBCXX_3.4.N` -> glibc 2.M.
LIBSTDCXX = ((19, 17), (24, 28), (28, 31), (29, 34), (30, 35), (33, 39))


def platform_tag(libraries: list[bytes]) -> str:
    """manylinux_2_M: the oldest glibc that has every symbol the libraries need, and beside which is a libstdc++ that has (PEP 600)."""
    minors = [int(found) for data in libraries for found in re.findall(rb"GLIBC_2\.(\d+)", data)]
    newest = max((int(found) for data in libraries for found in re.findall(rb"GLIBCXX_3\.4\.(\d+)", data)), default=0)
    beside = next((minor for symbol, minor in LIBSTDCXX if newest <= symbol), LIBSTDCXX[-1][1])
    return f"manylinux_2_{max([17, beside, *minors])}_{platform.machine()}"


def _load(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location("windlass_kernels_build", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
