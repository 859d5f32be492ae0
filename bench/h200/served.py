"""A full-size checkpoint in shared memory, served as it comes, and the table of loads over HTTP (`windlass bench --served`).

Random int4 weights under the names that `windlass convert` writes; the tokenizer is tiny-glm's with unused tokens added.
Run: PYTHONPATH=src:bench/h200 python bench/h200/served.py [--model GLM-4.5-Air] [--folder /dev/shm/model] -- BENCH OPTIONS...
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from made_checkpoint import make_checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/model"))
    parser.add_argument("bench", nargs="*", help="further options of `windlass bench --served`")
    options = parser.parse_args()
    if not options.folder.is_dir():
        began = time.perf_counter()
        make_checkpoint(options.folder, options.model)
        size = sum(file.stat().st_size for file in options.folder.iterdir())
        print(f"{size / 1e9:.1f} GB of {options.model} written in {time.perf_counter() - began:.1f} s", flush=True)
    return subprocess.run([sys.executable, "-m", "windlass", "bench", "--served", str(options.folder), *options.bench]).returncode


if __name__ == "__main__":
    sys.exit(main())
