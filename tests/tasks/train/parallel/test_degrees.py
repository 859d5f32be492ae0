"""Every arrangement of a table is accepted, or refused with advice that is accepted when it is followed, by the planner as well."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from windlass.cli.plan import training
from windlass.core.hardware.parse import parse_hardware
from windlass.core.recipe.recipe import Recipe, recipe_from
from windlass.errors import BadInput, Impossible
from windlass.tasks.train.parallel.degrees import check_arrangement

pytestmark = pytest.mark.pure

CONFIG = json.loads((Path(__file__).parents[3] / "model" / "families" / "tiny" / "glm4_moe.json").read_text())
CONFIG |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
}
Settings = dict[str, Any]
TABLE: dict[str, tuple[Any, ...]] = {
    "nproc": (1, 2, 4),
    "parallel.pp": (None, 2),
    "parallel.tp": (None, 2),
    "parallel.ep": (None, 2, 4),
    "parallel.fsdp": (None, 1, 2, 4),
    "parallel.zero": (None, 0, 1, 2, 3),
    "run.engine": ("torch", "deepspeed"),
}
ROWS = [dict(zip(TABLE, values, strict=True)) for values in product(*TABLE.values())]


def recipe(settings: Settings) -> Recipe:
    table: dict[str, Any] = {
        "model": {"config": CONFIG},
        "batch": {"global_batch": 8, "micro_batch": 1},
        "schedule": {"steps": 9},
    }
    table["data"] = {"sequence_length": 32}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        if name and value is not None:
            table.setdefault(section, {})[name] = value
    return recipe_from(table)


def followed(settings: Settings, said: str) -> Settings:
    """What a reader would type next."""
    changed = dict(settings)
    advice = said.rpartition(": ")[2]
    for part in re.split(r", | and ", advice):
        if found := re.fullmatch(r"set (\S+) = (.+)", part):
            changed[found[1]] = json.loads(found[2])
        elif found := re.fullmatch(r"remove (\S+)", part):
            changed[found[1]] = None
        elif found := re.fullmatch(r"start (\d+) with --nproc \1", part):
            changed["nproc"] = int(found[1])
        else:
            raise AssertionError(f"{settings}: nobody can follow {said!r}")
    assert changed != settings
    return changed


def refused(settings: Settings) -> str:
    """Empty: it is accepted."""
    try:
        check_arrangement(recipe(settings), settings["nproc"])
    except BadInput as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def contradicts_itself(settings: Settings) -> bool:
    """Which is refused as the recipe is read, before it is known how many processes there are."""
    return (settings["parallel.fsdp"] or 1) > 1 and settings["parallel.zero"] not in (None, 3)


def test_advice_is_accepted() -> None:
    """At the first try, whatever was asked for."""
    num_refused = 0
    for row in ROWS:
        settings = row
        if contradicts_itself(row):
            settings = followed(row, refused(row))
        if said := refused(settings):
            again = followed(settings, said)
            assert refused(again) == "", (settings, said)
            num_refused += 1
    assert 500 < num_refused < len(ROWS) - 100


def test_what_is_accepted_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner, which knows other trainers too, refuses nothing that the trainer takes."""
    monkeypatch.setattr(training, "resolve_hardware", lambda _: parse_hardware("cpu:8"))
    planned: set[tuple[Any, ...]] = set()
    for row in ROWS:
        if refused(row):
            continue
        asked = recipe(row)
        filled = training.with_trainer_defaults(asked, row["nproc"])
        key = (row["nproc"], filled.parallel, filled.run.engine)
        if key not in planned:
            planned.add(key)
            plan = training.plan_recipe(asked, "table", nproc=row["nproc"])
            assert plan.train is not None and plan.fits
    assert len(planned) > 30


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"parallel.pp": 2}, "tp 1 x pp 2 needs a multiple of 2 processes, and there is one: start 2 with --nproc 2"),
        ({"nproc": 2, "parallel.pp": 2, "parallel.zero": 1}, ": set parallel.zero = 0"),
        ({"nproc": 4, "parallel.pp": 2, "parallel.zero": 3}, "for every micro-batch: set parallel.zero = 0"),
        ({"nproc": 2, "parallel.zero": 2}, ": set parallel.zero = 3"),
        ({"nproc": 2, "parallel.tp": 2, "run.engine": "deepspeed"}, 'without parallel.tp 2: set run.engine = "torch"'),
        ({"nproc": 2, "parallel.tp": 2, "run.engine": "deepspeed", "parallel.zero": 1}, ': set parallel.zero = 3 and set run.engine = "torch"'),
        ({"run.engine": "deepspeed", "parallel.zero": 0}, "parallel.zero 0 does not need DeepSpeed: set parallel.zero = 3"),
        ({"run.engine": "deepspeed", "parallel.fsdp": 2, "nproc": 2}, "is parallel.zero: remove parallel.fsdp"),
        ({"nproc": 2, "parallel.cp": 2}, "can be planned but not trained: set parallel.cp = 1"),
    ],
)  # fmt: skip
def test_what_is_said(settings: Settings, said: str) -> None:
    with pytest.raises(Impossible) as caught:
        check_arrangement(recipe(settings), settings.get("nproc", 1))
    assert str(caught.value).endswith(said)


def test_no_more_processes_than_gpus_are_proposed() -> None:
    with pytest.raises(Impossible, match=r"there are 2: set parallel\.pp = 1$"):
        check_arrangement(recipe({"parallel.tp": 2, "parallel.pp": 2}), 2, most=2)
    with pytest.raises(Impossible, match=r"start 4 with --nproc 4$"):
        check_arrangement(recipe({"parallel.tp": 2, "parallel.pp": 2}), 2, most=4)
    check_arrangement(recipe({"parallel.tp": 2, "parallel.pp": 2}), 2, num_nodes=2)
