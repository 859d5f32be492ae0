"""`windlass eval --prometheus PORT`: where an evaluation stands, for Prometheus."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from windlass.core.metrics import training as m
from windlass.core.metrics.exposition import text_of
from windlass.tasks.evaluate.run.progress import Standing, Watcher


class Exported:
    """A watcher that also keeps the last standing as text."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._text = ""

    def update(self, standing: Standing) -> None:
        self._text = standing_text(standing)
        self._watcher.update(standing)

    def note(self, line: str) -> None:
        self._watcher.note(line)

    def text(self) -> str:
        return self._text


def standing_text(standing: Standing) -> str:
    wrong = standing.num_graded - standing.num_correct
    pending = standing.num_done - standing.num_graded - standing.num_failed
    verdicts = {"correct": standing.num_correct, "wrong": wrong, "failed": standing.num_failed, "pending": pending}
    left = standing.seconds_left
    return text_of(
        [
            (m.EVAL_QUESTIONS, [({}, standing.num_total)]),
            (m.EVAL_ANSWERED, [({"verdict": verdict}, number) for verdict, number in verdicts.items()]),
            (m.EVAL_TOKENS, [({"kind": "prompt"}, standing.prompt_tokens), ({"kind": "completion"}, standing.answer_tokens)]),
            (m.EVAL_LEFT, [] if left is None else [({}, left)]),
            (m.EVAL_COST, [({}, standing.usd)]),
        ]
    )


@contextmanager
def exported(watcher: Watcher, port: int | None) -> Generator[Watcher]:
    """`port` None: not at all."""
    if port is None:
        yield watcher
        return
    from windlass.tasks.observe.http import TextServer

    kept = Exported(watcher)
    server = TextServer("127.0.0.1", port, {"/metrics": kept.text})
    watcher.note(f"metrics at http://127.0.0.1:{server.port}/metrics")
    try:
        yield kept
    finally:
        server.close()
