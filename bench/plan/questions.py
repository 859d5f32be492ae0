"""Sixty questions as users ask them, and what `windlass plan` answers: prints docs/reference/questions.md.

python bench/plan/questions.py > docs/reference/questions.md
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

from windlass.cli import execute
from windlass.units import format_rate, format_seconds

DATA = Path(__file__).parent / "published" / "questions.toml"


def answer(arguments: str) -> dict[str, Any] | str:
    """The plan, or the refusal in its own words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        execute(["plan", *shlex.split(arguments), "--json"])
    return json.loads(out.getvalue()) if out.getvalue() else err.getvalue().strip().removeprefix("windlass: ")


def row(question: str, arguments: str) -> str:
    plan = answer(arguments)
    if isinstance(plan, str):
        return f"| {question} | `{arguments}` | refused | {plan} |"
    if not plan["fits"]:
        short = f"does not fit, {plan['short_bytes'] / 2**30:,.1f} GiB short"
        return f"| {question} | `{arguments}` | {short} | what would: {'; '.join(plan['would_fit'])} |"
    speed = plan["speed"]
    many = plan["workload"]["concurrency"] > 1
    name = "sustained" if many else "decode"
    low, high = speed[f"{name}_range"]
    said = f"{format_rate(speed[f'{name}_tokens_per_second'])} tokens/s ({format_rate(low)}-{format_rate(high)})"
    said += (
        f" over {plan['workload']['concurrency']:,} at once"
        if many
        else f", first token {format_seconds(speed['time_to_first_token_seconds'])}"
    )
    if plan["load"]:
        said += f"; at most {plan['load']['most_requests_per_second']:.2g} requests/s"
    layout = "".join(f" {key}{plan['layout'][key]}" for key in ("tp", "pp", "ep", "dp") if plan["layout"][key] > 1)
    why = next(reason["why"] for reason in plan["reasons"] if reason["choice"] == "engine")
    caution = f" **Not run yet: {plan['caution']}.**" if plan["caution"] else ""
    return f"| {question} | `{arguments}` | {said} | {plan['engine']}, {plan['scheme']['name']}{layout}: {why}.{caution} |"


def main() -> None:
    print("# Sixty questions\n")
    print(
        "As users ask them; answered by `windlass plan` (`bench/plan/questions.py` prints this page). Eight of ten runs should lie in the brackets.\n"
    )
    print("| question | `windlass plan` | answer | engine and why |\n|---|---|---|---|")
    for one in tomllib.loads(DATA.read_text())["question"]:
        print(row(one["asked"], one["arguments"]))


if __name__ == "__main__":
    main()
