"""The file on disk: found again and checked, damaged ones removed, nothing left behind by a process that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from subprocesses import started  # noqa: E402
from windlass.core.tiers.values import BLOCK_BYTES  # noqa: E402
from windlass.runtime.machine import disk  # noqa: E402
from windlass.runtime.offload.tiers import file as tier_file  # noqa: E402
from windlass.runtime.offload.tiers.file import TierWriter, clear_leftovers, find_tier  # noqa: E402
from windlass.runtime.offload.tiers.forms import expert_forms, form_of, matrix_bytes, matrix_in  # noqa: E402

pytestmark = pytest.mark.cpu

KEY = "k" * 64


def written(folder: Path, keep: bool = True) -> tier_file.OpenedTier:
    writer = TierWriter(folder, KEY, keep=keep)
    matrix = torch.arange(60, dtype=torch.float32).view(6, 10)
    writer.add("layers.0.mixer.o", (form_of(matrix),), [(matrix_bytes(matrix),)])
    gate_up, down = torch.randn(3, 8, 5), torch.randn(3, 5, 4)
    blocks = [(matrix_bytes(gate_up[number]), matrix_bytes(down[number])) for number in range(3)]
    writer.add("layers.1.experts", expert_forms(gate_up, down), blocks)
    return writer.finish()


def read(tier: tier_file.OpenedTier, name: str, block: int = 0) -> list[torch.Tensor]:
    entry = tier.index.entries[name]
    with Path(f"/proc/self/fd/{tier.descriptor}").open("rb") as content:
        content.seek(entry.offset + block * entry.block_bytes)
        memory = torch.frombuffer(bytearray(content.read(entry.block_bytes)), dtype=torch.uint8)
    return [matrix_in(form, memory) for form in entry.forms]  # type: ignore[misc]


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    tier = written(tmp_path)
    (matrix,) = read(tier, "layers.0.mixer.o")
    assert torch.equal(matrix, torch.arange(60, dtype=torch.float32).view(6, 10))
    experts = [read(tier, "layers.1.experts", number) for number in range(3)]
    assert [tuple(one.shape) for one in experts[0]] == [(8, 5), (5, 4)]
    assert all(entry.offset % BLOCK_BYTES == entry.block_bytes % BLOCK_BYTES == 0 for entry in tier.index.entries.values())
    os.close(tier.descriptor)
    again = find_tier(tmp_path, KEY)
    assert again is not None and again.index == tier.index
    assert all(torch.equal(one, other) for one, other in zip(read(again, "layers.1.experts", 2), experts[2], strict=True))
    os.close(again.descriptor)
    assert find_tier(tmp_path, "x" * 64) is None, "another key is another file"


def test_without_a_name_nothing_is_left(tmp_path: Path) -> None:
    tier = written(tmp_path, keep=False)
    assert list(tmp_path.iterdir()) == []
    assert read(tier, "layers.0.mixer.o")[0].shape == (6, 10)
    os.close(tier.descriptor)


@pytest.mark.parametrize("damage", ["cut", "head", "index", "blocks", "key"])
def test_a_damaged_file_is_removed(damage: str, tmp_path: Path) -> None:
    os.close(written(tmp_path).descriptor)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "cut":
        content = content[:-10]
    elif damage == "head":
        content[3] ^= 1
    elif damage == "index":
        content[-30] ^= 1
    elif damage == "blocks":
        content[BLOCK_BYTES + 2 :: BLOCK_BYTES] = bytes(byte ^ 255 for byte in content[BLOCK_BYTES + 2 :: BLOCK_BYTES])
    path.write_bytes(content)
    found = find_tier(tmp_path, KEY if damage != "key" else KEY[:-1] + "x")  # the same file name, which is a part of the key
    assert found is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_unnamed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: object, flags: int, *rest: int, **named: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(disk.os, "open", refusing)
    writer = TierWriter(tmp_path, KEY, keep=True)
    (part,) = tmp_path.iterdir()
    assert part.name.startswith(f".{os.getpid()}.")
    assert clear_leftovers(tmp_path) == [], "its process runs"
    writer.abort()
    assert list(tmp_path.iterdir()) == []
    os.close(written(tmp_path).descriptor)
    assert [path.suffix for path in tmp_path.iterdir()] == [".tier"]


def test_leftovers_of_processes_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f".{gone.pid}.{disk.this_host()}.00{disk.PART_SUFFIX}").write_bytes(b"x")
    other = tmp_path / f".{gone.pid}.another_machine.00{disk.PART_SUFFIX}"
    other.write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"mine")
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", other.name}, (
        "whether its process runs cannot be seen from here"
    )


def test_a_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from windlass.runtime.offload.tiers.file import TierWriter\n"
        "from windlass.runtime.offload.tiers.forms import form_of, matrix_bytes; import torch\n"
        "writer = TierWriter(Path(sys.argv[1]), 'k' * 64, keep=True); one = torch.zeros(256, 1024)\n"
        "print('writing', flush=True)\n"
        "while True: writer.add('a', (form_of(one),), [(matrix_bytes(one),)])\n"
    )
    with started([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"writing\n"
    assert list(tmp_path.iterdir()) == []
    assert find_tier(tmp_path, KEY) is None


def test_the_speed_of_a_folder_is_measured_without_a_trace(tmp_path: Path) -> None:
    assert disk.read_speed(tmp_path, 2**22) > 0
    assert list(tmp_path.iterdir()) == []
