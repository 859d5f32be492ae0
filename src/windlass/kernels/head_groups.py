"""Query heads and the heads of keys that they share, where a rank does not hold whole groups of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Consecutive query heads of which equally many share each of consecutive kv heads."""

    first: int
    last: int
    kv_first: int
    kv_last: int

    @property
    def heads(self) -> tuple[int, int]:
        return self.first, self.last

    @property
    def kv_heads(self) -> tuple[int, int]:
        return self.kv_first, self.kv_last

    @property
    def num_heads(self) -> int:
        return self.last - self.first

    @property
    def num_kv_heads(self) -> int:
        return self.kv_last - self.kv_first


def spans_of(num_heads: int, num_kv_heads: int, group: int, before: int) -> tuple[Span, ...]:
    """Of a rank's heads, when `group` heads share a kv head and the first kv head has `before` of its own on ranks before this one.

    Three at most: the rest of a group, whole groups, the beginning of one. Empty where all of one size share all kv heads, so that
    nothing need be said.
    """
    found: list[Span] = []
    for kv in range(num_kv_heads):
        first, last = max(kv * group - before, 0), min((kv + 1) * group - before, num_heads)
        if first >= last:
            continue  # held because the scheme cuts no finer; nobody here asks for it
        if found and (last - first) * found[-1].num_kv_heads == found[-1].num_heads:
            found[-1] = Span(found[-1].first, last, found[-1].kv_first, kv + 1)
        else:
            found.append(Span(first, last, kv, kv + 1))
    return () if found == [Span(0, num_heads, 0, num_kv_heads)] else tuple(found)
