"""Prompts that all models have answered, as arrays: one row a prompt, one column a model, cheapest model first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.errors import BadInput, UnknownName
from windlass.route.tables.answers import Answer

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
MIN_PROMPTS = 30
"""Fewer say nothing about a model: the interval of a share is wider than 35 points."""
PRICED_BY_RANK = "calls, in steps from the cheapest model to the dearest (the table has no costs)"


@dataclass(frozen=True, slots=True)
class Table:
    prompts: tuple[str, ...]
    groups: tuple[str, ...]
    models: tuple[str, ...]
    """Cheapest first."""
    scores: Floats
    """Of [prompts, models], as all arrays here."""
    costs: Floats
    seconds: Floats
    """NaN where unknown."""
    joules: Floats
    tokens: Floats
    """Of the answer; 0 where unknown."""
    cost_unit: str = "per answer, as the table has it"
    num_dropped: int = 0
    """Prompts that some model has not answered."""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def best(self) -> int:
        """The model with the highest mean score; of equal ones the cheapest."""
        return int(np.argmax(self.scores.mean(axis=0)))

    @property
    def has_groups(self) -> bool:
        return len(set(self.groups)) > 1

    def rows(self, mask: NDArray[Any]) -> Table:
        """A boolean mask, or numbers of rows."""
        numbers = np.flatnonzero(mask) if mask.dtype == bool else mask
        return Table(
            tuple(self.prompts[i] for i in numbers), tuple(self.groups[i] for i in numbers), self.models,
            self.scores[numbers], self.costs[numbers], self.seconds[numbers], self.joules[numbers], self.tokens[numbers],
            self.cost_unit, self.num_dropped,
        )  # fmt: skip


def make_table(
    answers: Sequence[Answer], models: Sequence[str] = (), prices: Mapping[str, tuple[float, float]] | None = None
) -> Table:
    """`models`: which of them, cheapest first; empty: all, ordered by cost. `prices`: dollars per million prompt and answer tokens."""
    names = _names(answers, models)
    by_prompt = _by_prompt(answers, names)
    whole = [key for key, found in by_prompt.items() if len(found) == len(names)]
    _check_overlap(by_prompt, whole, names)
    shape = (len(whole), len(names))
    arrays = {field: np.full(shape, np.nan) for field in ("score", "cost", "seconds", "joules", "answer_tokens")}
    for row, key in enumerate(whole):
        for column, name in enumerate(names):
            some = by_prompt[key][name]
            for field, array in arrays.items():
                array[row, column] = _mean([_value(one, field, prices) for one in some])
    first = [next(iter(by_prompt[key].values()))[0] for key in whole]
    table = Table(
        tuple(one.prompt for one in first), tuple(one.group for one in first), tuple(names),
        arrays["score"], arrays["cost"], arrays["seconds"], arrays["joules"], arrays["answer_tokens"], num_dropped=len(by_prompt) - len(whole),
    )  # fmt: skip
    return _ordered(_priced(table, bool(prices)), is_fixed=bool(models))


def _names(answers: Sequence[Answer], wanted: Sequence[str]) -> list[str]:
    counts = Counter(answer.model for answer in answers)
    if not answers:
        raise BadInput("the tables hold no answers; run `windlass eval` on two models and name its results folder")
    for name in wanted:
        if name not in counts:
            raise UnknownName("model in these tables", name, counts)
    names = list(dict.fromkeys(wanted)) or sorted(counts)
    if len(names) < 2:
        raise BadInput(f"only {names[0]} has answers here; a router needs the answers of two models or more to the same prompts")
    return names


def _by_prompt(answers: Sequence[Answer], names: Sequence[str]) -> dict[tuple[str, str], dict[str, list[Answer]]]:
    kept, known = defaultdict[tuple[str, str], dict[str, list[Answer]]](dict), set(names)
    for answer in answers:
        if answer.model in known:
            key = (answer.group, answer.id or answer.prompt)
            kept[key].setdefault(answer.model, []).append(answer)
    return dict(kept)


def _check_overlap(by_prompt: Mapping[Any, Mapping[str, Any]], whole: Sequence[Any], names: Sequence[str]) -> None:
    if len(whole) >= MIN_PROMPTS:
        return
    counts = ", ".join(f"{name} {sum(name in found for found in by_prompt.values()):,}" for name in names)
    fewest = min(names, key=lambda name: sum(name in found for found in by_prompt.values()))
    raise BadInput(
        f"{len(whole)} prompts have answers of all models, at least {MIN_PROMPTS} are needed (answered: {counts}); "
        f"evaluate {fewest} on the same questions, or leave it out with --models"
    )


def _value(answer: Answer, field: str, prices: Mapping[str, tuple[float, float]] | None) -> float | None:
    if field == "cost" and prices and answer.model in prices:
        for_prompt, for_answer = prices[answer.model]
        return (answer.prompt_tokens * for_prompt + answer.answer_tokens * for_answer) / 1e6
    return getattr(answer, field)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def _priced(table: Table, by_tokens: bool) -> Table:
    """Costs of all models, or of none: then a call costs 0 of the worst model up to 1 of the best, which counts calls of the best."""
    unit = "dollars per answer" if by_tokens else table.cost_unit
    if not np.isnan(table.costs).all(axis=0).any():
        means = np.nanmean(table.costs, axis=0)
        return _replace(table, costs=np.where(np.isnan(table.costs), means, table.costs), cost_unit=unit)
    ranks = np.argsort(np.argsort(table.scores.mean(axis=0), kind="stable"))
    steps = ranks / (len(table.models) - 1)
    return _replace(table, costs=np.tile(steps, (len(table), 1)), cost_unit=PRICED_BY_RANK)


def _ordered(table: Table, is_fixed: bool) -> Table:
    means = table.costs.mean(axis=0)
    if is_fixed and table.cost_unit == PRICED_BY_RANK:  # the order that the user gave is the order of prices
        count = len(table.models)
        return _replace(table, costs=np.tile(np.arange(count) / (count - 1), (len(table), 1)))
    order = np.argsort(means, kind="stable")
    return _replace(
        table, models=tuple(table.models[i] for i in order), scores=table.scores[:, order], costs=table.costs[:, order],
        seconds=table.seconds[:, order], joules=table.joules[:, order], tokens=table.tokens[:, order],
    )  # fmt: skip


def _replace(table: Table, **changes: Any) -> Table:
    from dataclasses import replace

    return replace(table, **changes)
