"""A reader guided by coverage, with atheris (libFuzzer). Optional: nothing else needs it.

pip install atheris
python tests/fuzz/guided.py --reader gguf-rows [libFuzzer's options: -runs=100000 -max_total_time=60]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from random import Random

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import atheris

with atheris.instrument_imports(include=["windlass"]):
    from fuzz.readers import READERS
    from fuzz.run import Campaign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reader", choices=sorted(READERS), required=True)
    given, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder, atheris.instrument_imports(include=["windlass"]):
        one = Campaign(given.reader, 0, Path(folder))
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, sample in enumerate(one.samples):
            (corpus / str(number)).write_bytes(b"".join(sample))
        os.chdir(one.folder)

        def read(data: bytes) -> None:
            with contextlib.suppress(*one.reader.refusals):
                one.reader.read(data, one.folder)

        def mutate(data: bytes, max_size: int, seed: int) -> bytes:
            """Half of them along the structure, whatever the coverage says."""
            if seed % 2:
                return one.reader.mutate(Random(seed), one.samples)[:max_size]
            return atheris.Mutate(data, max_size)

        atheris.Setup([sys.argv[0], *options, str(corpus)], read, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
