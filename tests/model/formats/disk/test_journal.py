"""The journal: what was recorded is found again, whatever moment it was torn at."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.model.formats.disk.journal import Journal

pytestmark = pytest.mark.pure

PRINT = {"quant": "int4", "group": 128, "source": "abc"}


def written(path: Path, count: int = 3) -> bytes:
    journal = Journal(path, PRINT)
    for number in range(count):
        journal.record(f"key {number}", {"number": number, "digest": "ab\n" * number}, sync=number % 2 == 0)
    journal.sync()
    journal.close()
    return path.read_bytes()


def test_records_are_found_again(tmp_path: Path) -> None:
    written(tmp_path / "journal")
    journal = Journal(tmp_path / "journal", PRINT)
    assert journal.done("key 1") and not journal.done("key 3")
    assert journal.payload("key 2") == {"number": 2, "digest": "ab\nab\n"}
    assert list(journal.records()) == ["key 0", "key 1", "key 2"]
    journal.record("key 3")
    journal.record("key 1", "again")
    journal.close()
    again = Journal(tmp_path / "journal", PRINT)
    assert again.done("key 3") and again.payload("key 3") is None and again.payload("key 1") == "again"
    again.remove()
    assert not list(tmp_path.iterdir())


def test_other_settings_are_refused(tmp_path: Path) -> None:
    before = written(tmp_path / "journal")
    with pytest.raises(
        BadInput, match=r"unfinished work with a different group, source; delete .*journal to start over, or use another"
    ):
        Journal(tmp_path / "journal", PRINT | {"group": 64, "source": "abd"})
    with pytest.raises(BadInput, match="a different keep;"):
        Journal(tmp_path / "journal", PRINT | {"keep": ["head"]})
    assert (tmp_path / "journal").read_bytes() == before


def test_tuples_and_lists_are_the_same_settings(tmp_path: Path) -> None:
    Journal(tmp_path / "journal", {"keep": ("a", "b")}).close()
    Journal(tmp_path / "journal", {"keep": ["a", "b"]}).close()


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    first = Journal(tmp_path / "journal", PRINT)
    with pytest.raises(BadInput, match="another process is writing to"):
        Journal(tmp_path / "journal", PRINT)
    first.close()
    Journal(tmp_path / "journal", PRINT).close()


def test_torn_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = written(path)
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        journal = Journal(path, PRINT)
        assert len(journal.records()) == max(sum(end <= length for end in ends) - 1, 0)
        journal.record("next")
        journal.close()
        again = Journal(path, PRINT)
        assert again.done("next")
        again.close()


def test_a_damaged_line_ends_what_is_relied_on(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lines = written(path).split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1], bytes(20), lines[3], b""]))
    journal = Journal(path, PRINT)
    assert list(journal.records()) == ["key 0"]
    journal.close()
    assert path.read_bytes() == b"\n".join([lines[0], lines[1], b""])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.booleans())
def test_any_bytes(tmp_path: Path, content: bytes, after_a_header: bool) -> None:
    path = tmp_path / "journal"
    path.write_bytes(
        (b'{"fingerprint":{"quant":"int4","group":128,"source":"abc"},"version":1}\n' if after_a_header else b"") + content
    )
    journal = Journal(path, PRINT)
    journal.record("key", 1)
    journal.close()
    again = Journal(path, PRINT)
    assert again.payload("key") == 1
    again.close()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written: No such file"):
        Journal(tmp_path / "absent" / "journal", PRINT)


def test_what_is_forgotten_is_not_found_again(tmp_path: Path) -> None:
    before = written(tmp_path / "journal")
    journal = Journal(tmp_path / "journal", PRINT)
    journal.forget(["key 7"])
    assert (tmp_path / "journal").read_bytes() == before
    journal.forget(["key 1", "key 7"])
    journal.record("key 4")
    journal.close()
    again = Journal(tmp_path / "journal", PRINT)
    assert list(again.records()) == ["key 0", "key 2", "key 4"]
    assert again.payload("key 2") == {"number": 2, "digest": "ab\nab\n"}
    again.close()
