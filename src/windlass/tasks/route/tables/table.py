"""Prompts that all models have answered, as arrays: one row a prompt, one column a model, cheapest model first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.errors import BadInput, UnknownName
from windlass.tasks.route.tables.answers import Answer

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
MIN_PROMPTS = 30
"""Fewer say nothing about a model: the interval of a share is wider than 35 points."""
MAX_MODELS = 255
FIELDS = ("score", "cost", "seconds", "joules", "answer_tokens")
"""In the order of a table's arrays."""
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
    first = _first_of_prompts(answers, set(names))
    rows, columns = {_key(one): row for row, one in enumerate(first)}, {name: column for column, name in enumerate(names)}
    sums, counts = np.zeros((len(FIELDS), len(rows), len(names))), np.zeros((len(FIELDS), len(rows), len(names)), dtype=np.int32)
    for one in answers:
        if one.model in columns:
            row, column = rows[_key(one)], columns[one.model]
            for place, field in enumerate(FIELDS):
                value = _value(one, field, prices)
                if value is not None:
                    sums[place, row, column] += value
                    counts[place, row, column] += 1
    is_answered = counts[0] > 0
    whole = np.flatnonzero(is_answered.all(axis=1))
    _check_overlap(is_answered, len(whole), names)
    sums, counts = sums[:, whole], counts[:, whole]
    means = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    table = Table(
        tuple(first[row].prompt for row in whole), tuple(first[row].group for row in whole), tuple(names),
        *means, num_dropped=len(first) - len(whole),
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
    if len(names) > MAX_MODELS:
        raise BadInput(
            f"the tables have {len(names)} models, at most {MAX_MODELS} can be routed between; choose some with --models"
        )
    return names


def _key(answer: Answer) -> tuple[str, str]:
    return answer.group, answer.id or answer.prompt


def _first_of_prompts(answers: Sequence[Answer], names: set[str]) -> list[Answer]:
    """One answer of every prompt, in the order of the tables."""
    found: dict[tuple[str, str], Answer] = {}
    for answer in answers:
        if answer.model in names:
            found.setdefault(_key(answer), answer)
    return list(found.values())


def _check_overlap(is_answered: Bools, num_whole: int, names: Sequence[str]) -> None:
    if num_whole >= MIN_PROMPTS:
        return
    counts = is_answered.sum(axis=0).tolist()
    shown = ", ".join(f"{name} {count:,}" for name, count in zip(names, counts, strict=True))
    fewest = names[counts.index(min(counts))]
    raise BadInput(
        f"{num_whole} prompts have answers of all models, at least {MIN_PROMPTS} are needed (answered: {shown}); "
        f"evaluate {fewest} on the same questions, or leave it out with --models"
    )


def _value(answer: Answer, field: str, prices: Mapping[str, tuple[float, float]] | None) -> float | None:
    if field == "cost" and prices and answer.model in prices:
        for_prompt, for_answer = prices[answer.model]
        return (answer.prompt_tokens * for_prompt + answer.answer_tokens * for_answer) / 1e6
    return getattr(answer, field)


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
