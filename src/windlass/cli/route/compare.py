"""`windlass route compare`: estimate, evaluate, fit, compare and write a page, in one command."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

from windlass.cli.route.fit import FitCommand, fit_command
from windlass.core.model import Frozen
from windlass.errors import BadInput


class CompareCommand(Frozen):
    models: tuple[str, ...]
    tasks: str
    num_examples: int | None = None
    max_tokens: int | None = None
    skip_execution: bool = False
    floor: float = 0.95
    results_dir: Path | None = None
    resume: bool = False
    watts: float | None = None
    region: str = "world"
    prices: tuple[str, ...] = ()
    as_json: bool = False


def compare_command(command: CompareCommand) -> int:
    from windlass.cli.eval.models import is_server
    from windlass.cli.eval.options import EvalOptions, wanted_from
    from windlass.cli.eval.run import default_folder, evaluate
    from windlass.tasks.evaluate.run.energy import EnergyMeter
    from windlass.tasks.evaluate.run.settings import Wanted

    if len(command.models) < 2:
        raise BadInput("name two models or more, cheapest first; a router chooses between them")
    given = {
        "models": command.models,
        "tasks": command.tasks,
        "num_examples": command.num_examples,
        "style": None,
        "max_tokens": command.max_tokens,
    }
    wanted: Wanted = wanted_from(given)
    folder = command.results_dir or default_folder(wanted)
    options = EvalOptions(
        results_dir=folder, resume=command.resume, watts=command.watts, region=command.region,
        skip_execution=command.skip_execution,
        confidence=not any(is_server(name) for name in command.models),  # not every server has log-probabilities
    )  # fmt: skip
    code = _quietly(lambda: evaluate(wanted, options), command.as_json)
    if code != 0:
        return code
    if command.skip_execution and not _has_verdicts(folder):
        sys.stderr.write(
            f"{folder}/report.html compares latency, tokens, energy and cost; no program was run, so there is no accuracy to route by: "
            f"run the same without --skip-execution and with --resume\n"
        )
        return 0
    return fit_command(
        FitCommand(
            answers=(folder,), prices=command.prices, floor=command.floor, out=folder / "router.json", plot=folder / "pareto.png",
            page=folder / "route.html", as_json=command.as_json, region=command.region, energy=EnergyMeter(command.watts).how,
        )
    )  # fmt: skip


def _has_verdicts(folder: Path) -> bool:
    from windlass.cli.eval.compare import read_folder

    return any(record.verdict in ("correct", "wrong") for records in read_folder(folder).values() for record in records)


def _quietly(run: Callable[[], int], is_quiet: bool) -> int:
    """Standard output is for the one JSON object."""
    if not is_quiet:
        return run()
    with contextlib.redirect_stdout(sys.stderr):
        return run()
