"""The text format that Prometheus scrapes (prometheus.io/docs/instrumenting/exposition_formats): written and read. Pure.

Reading is for `windlass top` and for the history of a machine without Prometheus: it takes what our own parts, vLLM and dcgm-exporter write.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from windlass.core.metrics.metric import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]
"""Sorted by name."""

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?\s*$")
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPED = re.compile(r"\\(.)")


class Sample(NamedTuple):
    name: str
    labels: Labels
    value: float


# --- writing ---------------------------------------------------------------------------------------------------------


def text_of(readings: Iterable[tuple[Metric, Iterable[tuple[Mapping[str, str], float]]]]) -> str:
    """Families without samples are left out."""
    lines: list[str] = []
    for metric, samples in readings:
        found = [sample_line(metric.name, labels, value) for labels, value in samples]
        if found:
            lines += [f"# HELP {metric.name} {_escaped_help(metric.help)}", f"# TYPE {metric.name} {metric.kind}", *found]
    return "\n".join([*lines, ""])


def sample_line(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {number(value)}" if inside else f"{name} {number(value)}"


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def _escaped_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


# --- reading ---------------------------------------------------------------------------------------------------------


def read(text: str) -> Iterator[Sample]:
    """Comments and lines that are no samples are skipped."""
    for line in text.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line)
        value = None if found is None else _value(found[3])
        if found is not None and value is not None:
            yield Sample(found[1], _labels(found[2] or ""), value)


def _labels(text: str) -> Labels:
    return tuple(sorted((name, _unescaped(value)) for name, value in _LABEL.findall(text)))


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], text) if "\\" in text else text


def _value(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
