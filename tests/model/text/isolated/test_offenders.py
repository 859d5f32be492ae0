from __future__ import annotations

import pytest

from windlass.core.client import Slowed
from windlass.model.text.isolated import offenders
from windlass.model.text.isolated.offenders import Offenders, group_of

pytestmark = pytest.mark.pure


def test_a_group_is_refused_until_its_deeds_are_forgotten() -> None:
    now = [0.0]
    some = Offenders(most=2, seconds=60, clock=lambda: now[0])
    for _ in range(3):
        some.check("a")
        some.note("a")
        now[0] += 10
    with pytest.raises(Slowed) as found:
        some.check("a")
    assert found.value.seconds == 30, "when the first is forgotten, two are left, which are allowed"
    some.check("b")
    now[0] += 30
    some.check("a")
    assert some.recent("a") == 2


def test_groups_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offenders, "MAX_GROUPS", 3)
    some = Offenders(most=0, seconds=60)
    for name in "abcad":
        some.note(name)
    assert [some.recent(name) for name in "abcd"] == [2, 0, 1, 1]


def test_users_of_a_group_are_one() -> None:
    assert group_of("key 1/somebody") == group_of("key 1/somebody/else") == "key 1" and group_of("") == ""


def test_a_suspect_that_does_well_is_none_and_its_deeds_still_count() -> None:
    some = Offenders(most=1, seconds=60)
    some.clear("a")
    some.note("a")
    assert some.is_suspect("a") and not some.is_suspect("b")
    some.clear("a")
    assert not some.is_suspect("a") and some.recent("a") == 1
    some.note("a")
    assert some.is_suspect("a")
    with pytest.raises(Slowed):
        some.check("a")
