"""Verdicts on a recipe's data and on the recovery drill: a tiny run of the same layout, killed and resumed. Pure."""

from __future__ import annotations

from windlass.core.model import Frozen
from windlass.tasks.check.report import Check, failed, passed, warned

TOLERANCE = 1e-6


class DataFacts(Frozen):
    num_tokens: int = 0
    num_shards: int = 0
    problems: tuple[str, ...] = ()
    digests: bool = False


class DrillFacts(Frozen):
    """Losses by step of an undisturbed run and of one that was killed and resumed."""

    whole: dict[int, float] = {}
    resumed: dict[int, float] = {}
    problem: str = ""
    """Why a run did not end."""


def judge_data(facts: DataFacts, needed_tokens: int = 0) -> list[Check]:
    if facts.problems:
        more = f"; and {len(facts.problems) - 3} more" if len(facts.problems) > 3 else ""
        return [
            failed(
                "data", "; ".join(facts.problems[:3]) + more, "all shards whole", "prepare them again with `windlass train data`"
            )
        ]
    shown = f"{facts.num_tokens:,} tokens in {facts.num_shards} shards{', digests verified' if facts.digests else ''}"
    if needed_tokens > facts.num_tokens:
        epochs = needed_tokens / max(facts.num_tokens, 1)
        judge = warned(
            "data",
            f"{shown}: {epochs:.1f} epochs",
            f"{needed_tokens:,} tokens",
            "tokens are repeated; prepare more if that is not meant",
        )
        return [judge if epochs > 4 else passed("data", f"{shown}, {epochs:.1f} epochs", f"{needed_tokens:,} tokens")]
    return [passed("data", shown, f"{needed_tokens:,} tokens" if needed_tokens else "")]


def judge_drill(facts: DrillFacts) -> list[Check]:
    if facts.problem:
        return [
            failed(
                "recovery drill",
                facts.problem,
                "a run that ends",
                "run it by hand: `windlass train run RECIPE --set schedule.steps=4`",
            )
        ]
    lost = sorted(set(facts.whole) - set(facts.resumed))
    if lost:
        return [
            failed(
                "recovery drill",
                f"steps {lost[:4]} were lost by the kill",
                "none lost",
                "is the run's folder on a disk that keeps what is synced?",
            )
        ]
    off = [step for step, loss in facts.whole.items() if abs(facts.resumed[step] - loss) > TOLERANCE * max(abs(loss), 1.0)]
    if off:
        shown = f"step {off[0]}: {facts.resumed[off[0]]:.6f} after resuming, {facts.whole[off[0]]:.6f} undisturbed"
        return [failed("recovery drill", shown, "the same losses", "the checkpoint lacks state; report this with the recipe")]
    return [passed("recovery drill", f"{len(facts.whole)} steps, killed and resumed: the same losses")]
