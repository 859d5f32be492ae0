from __future__ import annotations

from pathlib import Path

import pytest
from routing import router_file

from windlass.errors import BadInput
from windlass.tasks.route.operate.client import check_budget
from windlass.tasks.route.operate.settings import EXAMPLE, check_models, read_settings

pytestmark = pytest.mark.pure


def read(folder: Path, text: str):  # type: ignore[no-untyped-def]
    (folder / "router.toml").write_text(text)
    return read_settings(folder / "router.toml")


def test_the_example_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, EXAMPLE)
    assert [model.name for model in found.models] == ["small", "large"] and found.policy.kind == "floor"
    check_models(found, router_file(), "router.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("router = ", "is not TOML"),
        (EXAMPLE.replace('router = "router.json"', 'router = "router.json"\nstickie = true'), "did you mean `sticky`"),
        (EXAMPLE.replace('name = "large"', 'name = "small"'), "the same name"),
        ('shadow = "other"\n' + EXAMPLE, "not among"),
        ('policy = {kind = "latency"}\n' + EXAMPLE, "max_seconds"),
        ("first_token_seconds = 0\n" + EXAMPLE, "positive"),
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says) as found:
        read(tmp_path, text)
    assert "\n" not in str(found.value).replace("\n", "", 0)


def test_a_router_of_other_models_is_refused(tmp_path: Path) -> None:
    other = read(tmp_path, EXAMPLE.replace('"large"', '"huge"'))
    with pytest.raises(BadInput, match=r"was fitted to small, large, but router\.toml has small, huge"):
        check_models(other, router_file(), "router.toml")


def test_a_budget_needs_costs(tmp_path: Path) -> None:
    import msgspec

    found = read(tmp_path, 'policy = {kind = "budget", usd_per_request = 0.01}\n' + EXAMPLE)
    check_budget(found, router_file())
    with pytest.raises(BadInput, match="--price"):
        check_budget(found, msgspec.structs.replace(router_file(), cost_unit="calls of the best"))
