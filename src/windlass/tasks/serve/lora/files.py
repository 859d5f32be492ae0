"""Files of an adapter, taken from a folder that the operator allowed. They may come from strangers.

They are copied: what was checked is what engines load, now and after a crash, whatever happens to the originals. Of a folder only the two
files of PEFT's format are read; weights in another format than safetensors are never opened.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from windlass.errors import BadInput
from windlass.units import format_bytes

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of an adapter: a part of model names and of a path."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_BYTES = {CONFIG: 2**20, WEIGHTS: 4 * 2**30}
MAX_PATH_CHARACTERS = 1024
COPY_BYTES = 2**20


def take_adapter(root: Path, given: str, target: Path) -> int:
    """Copies the adapter in `given`, a folder below `root`, into `target`, which is made. Returns the size of its weights."""
    folder = inside(root, given)
    target.mkdir(mode=0o700, parents=True)
    return [_copy(root, folder / name, target / name) for name in MAX_BYTES][-1]


def inside(root: Path, given: str) -> Path:
    """A folder below `root`, by its path from there or its whole path; symbolic links are followed, but not out of it."""
    try:
        if not given or len(given) > MAX_PATH_CHARACTERS or "\0" in given:
            raise BadInput("is not a path")
        folder = (root / given).resolve(strict=True)
        if not folder.is_relative_to(root.resolve(strict=True)) or not folder.is_dir():
            raise BadInput("is not a folder below the server's --lora-dir")
    except (OSError, RuntimeError):  # outside and missing look alike: nobody learns what else there is
        raise BadInput("is not a folder below the server's --lora-dir") from None
    return folder


def _copy(root: Path, source: Path, target: Path) -> int:
    name = target.name
    try:
        real = source.resolve(strict=True)
        if not real.is_relative_to(root.resolve(strict=True)):
            raise BadInput(f"has an {name} that links to outside of the server's --lora-dir")
        # not blocking: a named pipe would be waited for
        opened = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError):
        raise BadInput(f"has no {name} that can be read; give a folder that PEFT wrote, with safetensors") from None
    with os.fdopen(opened, "rb") as reader:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise BadInput(f"has an {name} that is not a plain file")
        if found.st_size > MAX_BYTES[name]:
            raise BadInput(f"has an {name} of {format_bytes(found.st_size)}; at most {format_bytes(MAX_BYTES[name])} are taken")
        try:
            with target.open("xb") as writer:
                return _copy_bytes(reader.fileno(), writer.fileno(), found.st_size)
        except OSError as error:
            raise BadInput(f"could not be copied: {error.strerror}; ask the server's operator for room") from None


def _copy_bytes(reader: int, writer: int, size: int) -> int:
    """No more than the size that was checked: the file may grow meanwhile."""
    done = 0
    while done < size and (data := os.read(reader, min(COPY_BYTES, size - done))):
        done += len(data)
        while data:
            data = data[os.write(writer, data) :]
    return done
