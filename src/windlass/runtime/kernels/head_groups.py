"""Grouped-query attention where a rank does not hold whole groups of query heads. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """Consecutive query heads and consecutive kv heads, with equally many query heads per kv head."""

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
    """Of a rank's heads, where `group` heads share a kv head and `before` heads of the first kv head are on previous ranks.

    At most three: the rest of a group, whole groups, the beginning of one. Empty for plain grouped-query attention.
    """
    spans: list[Span] = []
    for kv in range(num_kv_heads):
        first, last = max(kv * group - before, 0), min((kv + 1) * group - before, num_heads)
        if first >= last:
            continue  # on this rank only because the scheme splits no finer; unused
        if spans and (last - first) * spans[-1].num_kv_heads == spans[-1].num_heads:
            spans[-1] = Span(spans[-1].first, last, spans[-1].kv_first, kv + 1)
        else:
            spans.append(Span(first, last, kv, kv + 1))
    return () if spans == [Span(0, num_heads, 0, num_kv_heads)] else tuple(spans)
