"""Statistics and problems of documents, counted per work unit and merged."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

MOJIBAKE = re.compile("Ã[\u0080-\u00bf]|Â[\u0080-\u00bf]|â€[\u0080-\u00bf™œ\u009d“”˜¢¦]|ï»¿|ï¿½")
"""UTF-8 that was read as Latin-1 or Windows-1252 and written again: é becomes Ã©, ’ becomes â€™."""
CONTROL = re.compile("[\u0000-\u0008\u000b\u000e-\u001a\u001c-\u001f\u007f-\u009f]")
"""Control characters, except tab, line ends, form feed and escape (terminal colours)."""
REPLACEMENT = "\ufffd"
EXAMPLES = 5
PERCENTILES = (1, 10, 50, 90, 99)
_STEPS = 8
"""Histogram bins per doubling of the length: percentiles are accurate within nine per cent."""


class QualityCounts(msgspec.Struct):
    """Of one work unit, or of all."""

    documents: int = 0
    """Kept documents, without empty and unreadable ones."""
    chats: int = 0
    characters: int = 0
    tokens: int = 0
    learned_tokens: int = 0
    empty: int = 0
    bad: int = 0
    """Unreadable records."""
    too_long: int = 0
    unlearnable: int = 0
    """Chats without assistant text."""
    replacement: int = 0
    """Documents with replacement characters; the next two likewise."""
    mojibake: int = 0
    control: int = 0
    shortest: int = 0
    longest: int = 0
    lengths: dict[int, int] = {}
    """Histogram bin -> documents."""
    examples: dict[str, list[str]] = {}
    """Problem -> a few locations."""

    def note(self, what: str, place: str) -> None:
        found = self.examples.setdefault(what, [])
        if len(found) < EXAMPLES:
            found.append(place)

    def look_at(self, text: str, place: str) -> None:
        """Checks for encoding problems."""
        self.characters += len(text)
        if text.isascii() and text.isprintable():
            return
        for what, is_damaged in (
            ("replacement", REPLACEMENT in text),
            ("mojibake", MOJIBAKE.search(text) is not None),
            ("control", CONTROL.search(text) is not None),
        ):
            if is_damaged:
                setattr(self, what, getattr(self, what) + 1)
                self.note(what, place)

    def count(self, num_tokens: int, num_learned: int, is_chat: bool, longest: int, place: str) -> None:
        self.documents += 1
        self.chats += is_chat
        self.tokens += num_tokens
        self.learned_tokens += num_learned
        self.shortest = min(self.shortest or num_tokens, num_tokens)
        self.longest = max(self.longest, num_tokens)
        step = _step(num_tokens)
        self.lengths[step] = self.lengths.get(step, 0) + 1
        if num_tokens > longest:
            self.too_long += 1
            self.note("too_long", f"{place} ({num_tokens} tokens)")
        if is_chat and not num_learned:
            self.unlearnable += 1
            self.note("unlearnable", place)


def _step(length: int) -> int:
    from math import log2

    return int(log2(max(length, 1)) * _STEPS)


def merge_counts(counts: Sequence[QualityCounts]) -> QualityCounts:
    total = QualityCounts(lengths={}, examples={})
    for each in counts:
        for name in ("documents", "chats", "characters", "tokens", "learned_tokens", "empty", "bad", "too_long", "unlearnable"):
            setattr(total, name, getattr(total, name) + getattr(each, name))
        for name in ("replacement", "mojibake", "control"):
            setattr(total, name, getattr(total, name) + getattr(each, name))
        total.shortest = min(total.shortest or each.shortest, each.shortest or total.shortest)
        total.longest = max(total.longest, each.longest)
        for step, number in each.lengths.items():
            total.lengths[step] = total.lengths.get(step, 0) + number
        for what, places in each.examples.items():
            for place in places:
                total.note(what, place)
    return total


def percentiles(counts: QualityCounts) -> dict[int, int]:
    """Percentile of documents -> length in tokens, approximately."""
    found: dict[int, int] = {}
    for percent in PERCENTILES:
        wanted, seen = counts.documents * percent / 100, 0
        for step in sorted(counts.lengths):
            seen += counts.lengths[step]
            if seen >= wanted:
                found[percent] = min(max(round(2 ** ((step + 0.5) / _STEPS)), counts.shortest), counts.longest)
                break
    return found
