"""Which request used how much energy: a counter's growth is divided by the tokens that each request had computed meanwhile. Pure.

What was measured is never lost: the sum over requests, idle and loading is the counter. Within an interval (a second, or less when a request
ends) a prompt token and a generated token count alike, since a step computes both at once; that division is the estimate in it. Energy
of a time in which requests were in flight but none had a token yet (a long prefill) waits for the next interval with tokens.
"""

from __future__ import annotations

from typing import Literal

Use = Literal["requests", "idle", "loading"]
USES: tuple[Use, ...] = ("requests", "idle", "loading")


class EnergyLedger:
    def __init__(self) -> None:
        self.joules: dict[Use, float] = dict.fromkeys(USES, 0.0)
        self._work: dict[int | str, int] = {}
        """Tokens since the last settlement of each request in flight, by number, and of ended ones, by model."""
        self._used: dict[int | str, float] = {}
        self._waiting = 0.0

    @property
    def total_joules(self) -> float:
        """With what waits for tokens."""
        return sum(self.joules.values()) + self._waiting

    def add_work(self, number: int, tokens: int) -> None:
        self._work[number] = self._work.get(number, 0) + tokens

    def settle(self, joules: float, *, is_loading: bool, num_in_flight: int) -> None:
        """`joules`: the counter's growth since the last settlement."""
        total = sum(self._work.values())
        if is_loading:
            self.joules["loading"] += joules
        elif total:
            self._share(joules + self._waiting, total)
        elif num_in_flight:
            self._waiting += joules
        else:  # what waited was for requests that ended without a token
            self.joules["requests"] += self._waiting
            self.joules["idle"] += joules
            self._waiting = 0.0

    def _share(self, joules: float, total: int) -> None:
        for number, tokens in self._work.items():
            self._used[number] = self._used.get(number, 0.0) + joules * tokens / total
        self.joules["requests"] += joules
        self._work, self._waiting = {}, 0.0

    def used(self, key: int | str) -> float:
        """By a request in flight so far, or by all ended requests of a model."""
        return self._used.get(key, 0.0)

    def end(self, number: int, model: str) -> None:
        """The request becomes one of its model's; what it has done since the last settlement is still to be settled."""
        self._used[model] = self._used.get(model, 0.0) + self._used.pop(number, 0.0)
        if number in self._work:
            self._work[model] = self._work.get(model, 0) + self._work.pop(number)
