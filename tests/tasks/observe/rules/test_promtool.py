"""Every alert through promtool: a case in which it fires and one in which it does not. Debian: apt-get install prometheus."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cases import CASES, Case

from waiting import HUNG_SECONDS
from windlass.tasks.observe.render.rules import rules_file
from windlass.tasks.observe.rules.all_rules import all_groups

pytestmark = pytest.mark.pure
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: apt-get install prometheus)")


def _unit_test(case: Case) -> dict[str, object]:
    """In promtool, `ax3` repeats three times more, and `_x3` has three gaps: as `cases.expanded` reads them."""
    query = f'clamp_max(count(ALERTS{{alertname="{case.alert}", alertstate="firing"}}), 1)'
    expected = [{"labels": "{}", "value": 1}] if case.fires else []
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "promql_expr_test": [{"expr": query, "eval_time": f"{case.minutes}m", "exp_samples": expected}],
    }


def run_promtool(folder: Path, cases: list[Case]) -> subprocess.CompletedProcess[str]:
    """A file of tests for every group of rules, so that a case evaluates its own group only; once a minute, as the samples come."""
    files: list[str] = []
    for group in all_groups():
        names = {alert.name for alert in group.alerts}
        chosen = [_unit_test(case) for case in cases if case.alert in names]
        if chosen:
            (folder / f"{group.name}.rules").write_text(rules_file([dataclasses.replace(group, interval_seconds=60.0)]))
            tests = {"rule_files": [f"{group.name}.rules"], "evaluation_interval": "1m", "tests": chosen}
            (folder / f"{group.name}.yml").write_text(json.dumps(tests))
            files.append(f"{group.name}.yml")
    return subprocess.run(
        [str(PROMTOOL), "test", "rules", *files], cwd=folder, capture_output=True, text=True, timeout=HUNG_SECONDS, check=False
    )


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    done = run_promtool(tmp_path, CASES)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("case", [Case("WindlassLossNaN", {'windlass_training_loss{job="j"}': "1 NaN NaN"}, 2, False)], ids=str)
def test_promtool_would_say_so(tmp_path: Path, case: Case) -> None:
    assert run_promtool(tmp_path, [case]).returncode != 0


@needs_promtool
def test_the_file_is_what_prometheus_reads(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(rules_file(all_groups()))
    command = [str(PROMTOOL), "check", "rules", "--lint-fatal", str(tmp_path / "rules.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HUNG_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_both_cases() -> None:
    names = {alert.name for group in all_groups() for alert in group.alerts}
    assert {case.alert for case in CASES if case.fires} == names == {case.alert for case in CASES if not case.fires}
