"""Compiles every CUDA unit that tests/runtime/kernels/cuda/test_compiles.py asks for, and keeps what came of it in cuda_compiled.json.

Run: python tests/data/make_cuda_compiled.py. Needs NVRTC and no GPU; about a minute. Without it tests compile what has changed themselves.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime" / "kernels" / "cuda"))

import kept
import test_compiles

if __name__ == "__main__":
    found = {kept.digest(*unit): sorted(kept.compiled(*unit)) for unit in test_compiles.all_units()}
    kept.KEPT.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
    print(f"{len(found)} units compile")
