"""Short evaluations of the same kind: `windlass eval` as it will be called, with fewer examples."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.cli.check.options import CheckOptions, say
from windlass.errors import BadInput
from windlass.tasks.check.model.estimate import Answer, Rehearsal, example_time, num_at_once

if TYPE_CHECKING:
    from windlass.tasks.evaluate.run.records import Record

ROUNDS = 2
"""In the first rehearsal every place is taken twice: only after the first answers is it as full as a long run."""
ENOUGH_SECONDS = 10.0
"""Of asking. A machine's speed changes from one second to the next."""
SHORT_SECONDS = 60.0
"""A start that takes longer is not repeated."""
BUDGET = "10min"
"""For each rehearsal; what came until then is what is known."""


def require_tasks(names: str) -> None:
    """Before a model is loaded: that they exist, and that their data is here."""
    from windlass.tasks.evaluate.tasks.catalog import choose_tasks
    from windlass.tasks.evaluate.tasks.sources import is_here, load

    for task in choose_tasks(names, None):
        if not is_here(task):
            load(task)  # says where it is looked for


def rehearse(options: CheckOptions, most: int, prefill: float, decode: float) -> list[Rehearsal]:
    """One; and if that was short, a longer one of up to `most` examples. `prefill`, `decode`: tokens per second of one request."""
    from windlass.cli.eval.models import LOCAL_CONCURRENCY

    first = _rehearsal(options, min(ROUNDS * LOCAL_CONCURRENCY, most), prefill, decode)
    if first.seconds > SHORT_SECONDS:
        return [first]
    return [first, _rehearsal(options, second_number(first, most), prefill, decode)]


def second_number(first: Rehearsal, most: int) -> int:
    """As many as are answered in ENOUGH_SECONDS, but no fewer than before."""
    each = example_time(first.answers)
    asked = len(first.answers)
    return max(asked, min(most, round(ENOUGH_SECONDS / each) if each else most))


def basis_of(runs: Sequence[Rehearsal], tasks: str) -> str:
    longest = max(runs, key=lambda run: len(run.answers))
    numbers = " and ".join(str(len(run.answers)) for run in runs)
    start = sum(run.start_seconds for run in runs) / len(runs)
    return (
        f"from {numbers} examples of {tasks}, {num_at_once(longest.answers)} at once: "
        f"{start:.1f} s to start, {example_time(longest.answers):.3g} s each"
    )


def _rehearsal(options: CheckOptions, number: int, prefill: float, decode: float) -> Rehearsal:
    say(options, f"evaluating {number} examples of {options.tasks}")
    with tempfile.TemporaryDirectory(prefix="windlass-check-") as folder:
        results = Path(folder) / "results"
        began = time.monotonic()
        done = subprocess.run(_command(options, number, results), capture_output=True, text=True, check=False)
        took = time.monotonic() - began
        if done.returncode:
            raise BadInput(f"the short evaluation failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        answers = _answers(results, prefill, decode)
        if not answers:
            raise BadInput(f"the short evaluation of {options.tasks} gave no answers; run `windlass eval` on it to see why")
        return Rehearsal(seconds=took, answers=answers)


def _command(options: CheckOptions, number: int, results: Path) -> list[str]:
    words = ["eval", options.target, "--tasks", str(options.tasks), "--num-examples", str(number), "--budget", BUDGET]
    words += ["--results-dir", str(results), "--device", options.device]
    words += [] if options.quant is None else ["--quant", options.quant]
    words += [] if options.context_tokens is None else ["--context", str(options.context_tokens)]
    return [sys.executable, "-P", "-m", "windlass", *words]


def _answers(results: Path, prefill: float, decode: float) -> tuple[Answer, ...]:
    """From the journal: when each answer came, and what it was."""
    from windlass.cli.eval.compare import read_journal

    records = [record for journal in results.glob("*/journal.jsonl") for record in read_journal(journal)]
    ends = accumulate(record.wall_seconds for record in records)
    return tuple(
        Answer(end_seconds=end, seconds=record.seconds, work=_work(record, prefill, decode))
        for end, record in zip(ends, records, strict=True)
    )


def _work(record: Record, prefill: float, decode: float) -> float:
    """Seconds of the tokens that were computed, one request alone."""
    tokens = record.tokens
    return max(tokens.prompt - tokens.cached, 0) / max(prefill, 1e-9) + tokens.answer / max(decode, 1e-9)
