"""All files of the stack: a path in the folder -> its text. Pure."""

from __future__ import annotations

import json
from typing import Any

from windlass.tasks.observe.dashboards.boards import BOARDS
from windlass.tasks.observe.dashboards.panel import board_json
from windlass.tasks.observe.render.rules import HEAD, duration, rules_file
from windlass.tasks.observe.render.targets import Receivers, Stack
from windlass.tasks.observe.render.yaml import to_yaml
from windlass.tasks.observe.rules.all_rules import all_groups
from windlass.tasks.observe.rules.plan import plan_group

PROMETHEUS, RULES, ALERTMANAGER = "prometheus.yml", "rules.yml", "alertmanager.yml"
GRAFANA = "grafana"
SOURCE_UID = "windlass-prometheus"


def stack_files(stack: Stack, folder: str) -> dict[str, str]:
    """`folder`: where they will lie, as an absolute path; Grafana wants it."""
    return {
        PROMETHEUS: prometheus_yaml(stack),
        RULES: rules_file([*all_groups(stack.objectives), *([plan_group(stack.plan)] if stack.plan is not None else [])]),
        ALERTMANAGER: alertmanager_yaml(stack.receivers),
        f"{GRAFANA}/provisioning/datasources/windlass.yaml": _sources_yaml(stack),
        f"{GRAFANA}/provisioning/dashboards/windlass.yaml": _provider_yaml(folder),
        **{f"{GRAFANA}/dashboards/{board.uid}.json": json.dumps(board_json(board), indent=1) + "\n" for board in BOARDS},
    }


def prometheus_yaml(stack: Stack) -> str:
    return to_yaml(
        {
            "global": {"scrape_interval": duration(stack.scrape_seconds), "evaluation_interval": "15s"},
            "rule_files": [RULES],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [stack.alertmanager]}]}]},
            "scrape_configs": [_job(stack, job, addresses) for job, addresses in stack.targets.jobs.items()],
        },
        HEAD,
    )


def _job(stack: Stack, job: str, addresses: tuple[str, ...]) -> dict[str, Any]:
    key = stack.targets.key_file
    secured = {"authorization": {"credentials_file": key}} if key else {}
    return {"job_name": job, **secured, "static_configs": [{"targets": list(addresses)}]}


def alertmanager_yaml(receivers: Receivers) -> str:
    smtp = {"smtp_smarthost": receivers.smtp, "smtp_from": receivers.mail_from or receivers.mail_to} if receivers.smtp else {}
    return to_yaml(
        {
            "global": {"resolve_timeout": "5m", **smtp},
            "route": {
                "receiver": "people",
                "group_by": ["alertname", "instance"],
                "group_wait": "10s",
                "group_interval": "1m",
                "repeat_interval": "12h",
                "routes": [{"receiver": "people", "matchers": ['severity="page"'], "group_wait": "5s", "repeat_interval": "1h"}],
            },
            "inhibit_rules": [
                _inhibits("WindlassServerDown|WindlassNodeDown|WindlassTrainingDown", "Windlass.*", ["instance"]),
                _inhibits(
                    "WindlassEngineCrashLoop|WindlassEngineDown", "WindlassEngineRestarted|WindlassErrorRate", ["instance"]
                ),
                _inhibits("WindlassDiskFull", "WindlassDiskFilling", ["instance", "mountpoint"]),
            ],
            "receivers": [{"name": "people", **_ways(receivers)}],
        },
        HEAD,
    )


def _inhibits(causes: str, symptoms: str, equal: list[str]) -> dict[str, Any]:
    """A cause does not silence itself."""
    return {
        "source_matchers": [f'alertname=~"{causes}"'],
        "target_matchers": [f'alertname=~"{symptoms}"', f'alertname!~"{causes}"'],
        "equal": equal,
    }


def _ways(receivers: Receivers) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if receivers.webhook:
        found["webhook_configs"] = [{"url": receivers.webhook, "send_resolved": True}]
    if receivers.mail_to and receivers.smtp:
        found["email_configs"] = [{"to": receivers.mail_to, "send_resolved": True}]
    return found


def _sources_yaml(stack: Stack) -> str:
    source = {
        "name": "Windlass Prometheus",
        "uid": SOURCE_UID,
        "type": "prometheus",
        "access": "proxy",
        "url": f"http://{stack.prometheus}",
        "isDefault": True,
        "jsonData": {"timeInterval": duration(stack.scrape_seconds)},
    }
    return to_yaml({"apiVersion": 1, "datasources": [source]}, HEAD)


def _provider_yaml(folder: str) -> str:
    provider = {
        "name": "windlass",
        "folder": "Windlass",
        "type": "file",
        "updateIntervalSeconds": 30,
        "allowUiUpdates": True,
        "options": {"path": f"{folder}/{GRAFANA}/dashboards"},
    }
    return to_yaml({"apiVersion": 1, "providers": [provider]}, HEAD)
