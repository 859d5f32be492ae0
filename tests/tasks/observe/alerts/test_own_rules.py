"""Our own evaluation of every alert, on the cases that promtool judges."""

from __future__ import annotations

from functools import cache

import pytest
from cases import CASES, Case, expanded, named

from windlass.tasks.observe.alerts.evaluation import Evaluation
from windlass.tasks.observe.history.series import SeriesStore
from windlass.tasks.observe.rules.all_rules import all_groups
from windlass.tasks.observe.rules.rule import Group

pytestmark = pytest.mark.pure
MINUTE = 60.0


@cache
def _group_of(alert: str) -> Group:
    return next(group for group in all_groups() for one in group.alerts if one.name == alert)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_promtool_judges(case: Case) -> None:
    evaluation, store = Evaluation([_group_of(case.alert)]), SeriesStore()
    if case.alert in evaluation.left_out:
        assert case.alert.endswith("BurnSteady")  # three days are more than we keep
        return
    columns = {named(series): expanded(values) for series, values in case.series.items()}
    for minute in range(case.minutes + 1):
        for (name, labels), values in columns.items():
            value = values[minute] if minute < len(values) else None
            if value is not None:
                store.add(name, labels, minute * MINUTE, value)
        evaluation.run(store, minute * MINUTE)
    firing = [alert.name for alert in evaluation.firing]
    assert (case.alert in firing) == case.fires, firing


def test_only_windows_beyond_a_day_are_left_to_prometheus() -> None:
    left = Evaluation(all_groups()).left_out
    assert left and all("3d" in name or name.endswith("BurnSteady") for name in left)
