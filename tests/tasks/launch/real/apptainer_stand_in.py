"""A stand-in for `apptainer exec [--nv] [--bind SRC[:DST]]... IMAGE COMMAND...`, after its manual page: a mount namespace and chroot. Needs root.

An image is a folder with a file `contents` that names the folders of this machine which are in it, read-only. Stricter than the program: nothing
else of this machine is seen, not the home directory, /tmp or the current folder, but what --bind names. What runs inside gets APPTAINER_CONTAINER,
and replaces this process, so that signals reach it, as in apptainer without a PID namespace.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

SCRIPT = """
set -e
root="$1"; image="$2"; binds="$3"; shift 3
mount -t tmpfs none "$root"
while IFS= read -r path; do mkdir -p "$root$path"; mount --rbind "$path" "$root$path"; mount -o remount,bind,ro "$root$path"; done < "$image/contents"
for path in /proc /dev /sys; do mkdir -p "$root$path"; mount --rbind "$path" "$root$path"; done
for path in bin lib lib64 sbin; do [ -L "/$path" ] && ln -s "$(readlink "/$path")" "$root/$path"; done
mkdir -p "$root/tmp"
printf '%s\\n' "$binds" | while IFS= read -r one; do
    [ -n "$one" ] || continue
    source="${one%%:*}"; target="${one#*:}"
    mkdir -p "$root$target"; mount --rbind "$source" "$root$target"
done
exec chroot "$root" "$@"
"""


def main(words: list[str]) -> int:
    if not words or words.pop(0) != "exec":
        sys.exit("apptainer: only exec is known here")
    binds: list[str] = []
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--bind":
            given = words.pop(0)
            binds.append(given if ":" in given else f"{given}:{given}")
        elif option != "--nv":
            sys.exit(f"apptainer: unknown flag {option}")
    image, command = words[0], words[1:]
    if not (Path(image) / "contents").is_file():
        sys.exit(f"FATAL: could not open image {image}: failed to retrieve path")
    root = tempfile.mkdtemp(prefix="root-", dir=Path(image).parent)
    inside = ["sh", "-c", SCRIPT, "sh", root, image, "\n".join(binds), *command]
    os.environ["APPTAINER_CONTAINER"] = image
    os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", *inside])


def make_image(folder: Path) -> Path:
    """With this interpreter, everything that it imports, and the system."""
    python = {sys.prefix, sys.base_prefix, *(path for path in sys.path if Path(path).is_dir())}
    held = sorted({str(Path(path).absolute()) for path in python} | {"/usr", "/etc"})
    outermost = [path for path in held if not any(path.startswith(f"{other}/") for other in held)]
    image = folder / "wind lass.sandbox"
    image.mkdir()
    (image / "contents").write_text("\n".join(outermost) + "\n")
    return image


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
