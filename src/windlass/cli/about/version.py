"""`windlass version`: what is installed, for a bug report."""

from __future__ import annotations

import platform
from importlib import metadata

from windlass import __version__
from windlass.errors import DISTRIBUTION

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "starlette", "vllm")
"""Of the extras; a version that differs is the first question of every bug report."""


def facts() -> dict[str, str]:
    return {
        "windlass": __version__,
        "distribution": DISTRIBUTION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: installed(name) for name in PACKAGES},
        "cpu kernels": kernels(),
    }


def installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def kernels() -> str:
    """Where the CPU kernels would come from; compiles nothing."""
    from windlass.runtime.kernels import build

    return build.origin("native")


def show(as_json: bool) -> None:
    found = facts()
    if as_json:
        import msgspec

        print(msgspec.json.encode(found).decode())
        return
    width = max(map(len, found))
    print("\n".join(f"{name:<{width}}  {value}" for name, value in found.items()))
