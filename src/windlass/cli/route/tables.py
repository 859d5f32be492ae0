"""Tables of `windlass route` in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.cli.console import console
from windlass.cli.eval.tables import table
from windlass.core.statistics.intervals import show_interval, show_percent


def show_report(report: Mapping[str, Any]) -> None:
    out = console()
    out.print(table(f"{report['num_prompts']:,} prompts, {report['cross_validation']}", COLUMNS, list(_rows(report))))
    out.print(f"cost: {report['cost_unit']}", markup=False)
    for line in lines(report):
        out.print(line, markup=False)


COLUMNS = ("", "#score", "#95 %", "#cost", "#median s", "models")


def _rows(report: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    base = report["baselines"]
    named = [(model["name"], model) for model in report["models"]]
    named += [("router", report["router"]), ("random", base["random"]), ("by length", base["length"]), ("oracle", base["oracle"])]
    return [_row(name, found) for name, found in named]


def _row(name: str, found: Mapping[str, Any]) -> list[str]:
    interval = (found["score_interval"][0], found["score_interval"][1])
    share = " ".join(f"{100 * part:.0f}% {model}" for model, part in found["share"].items() if part)
    seconds = found.get("seconds_p50") or found.get("seconds")
    shown = "" if seconds is None else f"{seconds:.2f}"
    return [name, show_percent(found["score"], interval), show_interval(interval), f"{found['cost']:.4g}", shown, share]


def lines(report: Mapping[str, Any]) -> list[str]:
    found = list[str]()
    if report["apgr"] is not None:
        found.append(
            f"APGR {_with(report, 'apgr')} (random 0.5{_length(report)}), CPT50 {_with(report, 'cpt50')}, CPT80 {_with(report, 'cpt80')}"
        )
    other = report.get("new_groups")
    if other and other["apgr"] is not None:
        found.append(f"whole groups left out: APGR {_with(other, 'apgr')}, CPT50 {_with(other, 'cpt50')}")
    floor = report["floor"]
    splits = floor["splits"]
    found.append(
        f"floor {floor['asked']:g} of {report['baselines']['best_single']['model']}, {floor['confidence']:.0%} confidence: "
        f"held {floor['held']:.3f} with {floor['cheap_share']:.0%} of calls to other models; "
        f"missed in {splits['num_missed']} of {splits['num_splits']} random splits"
    )
    over = report["over_best_single"]
    low, high = over["score_interval"]
    ratio = "" if over["cost_ratio"] is None else f", at {over['cost_ratio']:.0%} of its cost"
    found.append(f"over the best single model: {100 * over['score']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}){ratio}")
    if report["num_dropped"]:
        found.append(f"{report['num_dropped']:,} prompts were left out: not every model has answered them")
    return found


def _with(report: Mapping[str, Any], name: str) -> str:
    low, high = report["intervals"][name]
    return f"{report[name]:.3f} ({low:.3f} to {high:.3f})"


def _length(report: Mapping[str, Any]) -> str:
    found = report["baselines"]["length"]["apgr"]
    return "" if found is None else f", length {found:.3f}"
