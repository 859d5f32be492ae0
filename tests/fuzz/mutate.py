"""Changes of sound inputs that follow their structure. The same `Random` makes the same change, so every input can be made again.

A sample is the parts of a sound file in order (magic, lengths, names, values): whole parts are left out, doubled, exchanged and altered, so
that most of what is made is sound nearly everywhere. Trees (JSON, msgpack) are changed as trees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

Sample = tuple[bytes, ...]
"""Parts of a sound input; joined they are the input."""
Mutator = Callable[[Random, Sequence[Sample]], bytes]

COUNTS = (1, 1, 1, 1, 2, 2, 3, 6)
"""How many changes one input gets."""
MAX_BYTES = 2**18
"""Of an input: what grows does so by doubling."""
GROWN_BYTES = MAX_BYTES // 4
MANY = (50, 1000, 5000, 20_000, GROWN_BYTES)
EDGES = (0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 127, 128, 255, 256, 257, 1023, 4096, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
         2**53, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip
TEXTS = ("", "\0", "0", "-1", "1e999", "-0.0", "nan", "inf", "true", "null", "\n", "\r\n", " ", "/", "..", "../../etc/passwd", "'", '"', "\\",
         "\x1b[31m", "\u202e", "\ud800", "\ufeff", "\U0001f600", "é" * 70, "a" * 5000, "9" * 400, "[" * 2000, "{" * 100, "%s%n", "{0}", "{{x}}",
         "<|im_start|>", "</think>", "a.b.c", "$ref", "#/a", "1" * 5000)  # fmt: skip


def mutate_parts(random: Random, samples: Sequence[Sample]) -> bytes:
    parts = list(random.choice(samples))
    for _ in range(random.choice(COUNTS)):
        _change_parts(random, parts, samples)
    data = b"".join(parts)
    return alter(random, data) if random.random() < 0.2 else data[:MAX_BYTES]


def mutate_text(random: Random, samples: Sequence[Sample]) -> bytes:
    """The parts of a text are its words, spaces and marks."""
    return mutate_parts(random, [words(b"".join(sample)) for sample in samples])


def mutate_lines(random: Random, samples: Sequence[Sample]) -> bytes:
    """Of JSON Lines: a line that is changed as a tree, or the lines as parts."""
    lines = list(random.choice(samples))
    if random.random() < 0.3:
        return mutate_parts(random, samples)
    chosen = random.randrange(len(lines))
    lines[chosen] = mutate_json(random, [(lines[chosen],)]) + b"\n"
    return b"".join(lines)


def mutate_json(random: Random, samples: Sequence[Sample]) -> bytes:
    text = b"".join(random.choice(samples))
    if random.random() < 0.12:
        return alter(random, text)
    return _json(random, change_tree(random, msgspec.json.decode(text)))


def mutate_grown(random: Random, samples: Sequence[Sample]) -> bytes:
    """Trees in which one thing is there thousands of times, or is very long: what takes the square of it is seen."""
    if random.random() < 0.6:
        return mutate_json(random, samples)
    tree = msgspec.json.decode(b"".join(random.choice(samples)))
    for _ in range(random.choice((1, 1, 2, 3))):
        _grow(random, tree)
    return _json(random, tree)


def grown_text(random: Random, text: bytes) -> bytes:
    """The same for text: a word, a space or a line again and again, each time with another number, or the same."""
    parts = words(text)
    at = random.randrange(len(parts))
    part = b"".join(parts[at : at + random.choice((1, 1, 2, 4, 8, 30))])
    times = min(random.choice(MANY), GROWN_BYTES // (len(part) + 1))
    put = part * times if random.random() < 0.6 else b"".join(_numbered(part.decode(), n).encode() for n in range(times))
    return b"".join(parts[:at]) + put + random.choice((b"", b"".join(parts[at:])))


def mutate_msgpack(random: Random, samples: Sequence[Sample]) -> bytes:
    data = b"".join(random.choice(samples))
    if random.random() < 0.4:
        return alter(random, data)
    try:
        return msgspec.msgpack.encode(change_tree(random, msgspec.msgpack.decode(data)))
    except (OverflowError, UnicodeEncodeError):  # what msgpack cannot say
        return alter(random, data)


def mutate_safetensors(random: Random, samples: Sequence[Sample]) -> bytes:
    """A sample: the header's length, the header, the tensors. The header as a tree, with a true length or another."""
    length, header, rest = random.choice(samples)
    if random.random() < 0.3:
        return alter(random, length + header + rest)
    header = _json(random, change_tree(random, msgspec.json.decode(header)))
    said = len(header) if random.random() < 0.95 else random.choice(EDGES)
    return said.to_bytes(8, "little") + header + (rest if random.random() < 0.8 else alter(random, rest))


def words(text: bytes) -> Sample:
    return tuple(re.findall(rb"[\w.]+|[ \t]+|\n+|[^\w\s]|\s", text)) or (b"",)


# --- parts


def _change_parts(random: Random, parts: list[bytes], samples: Sequence[Sample]) -> None:
    if not parts:
        parts.append(b"")
    at = random.randrange(len(parts))
    kind = random.randrange(10)
    if kind == 0:
        del parts[at : at + random.choice((1, 1, 1, 4))]
    elif kind == 1:
        parts[at:at] = [parts[at]] * random.choice((1, 1, 2, 100))
    elif kind == 2:
        other = random.randrange(len(parts))
        parts[at], parts[other] = parts[other], parts[at]
    elif kind == 3:
        parts[at] = random.choice(random.choice(samples))
    elif kind == 4:
        stop = at + random.randrange(1, 9)
        parts[at:at] = parts[at:stop]
    else:
        parts[at] = alter(random, parts[at])


def alter(random: Random, data: bytes) -> bytes:
    """One change of bytes; what may be a number becomes another one of the same width."""
    if len(data) in (1, 2, 4, 8) and random.random() < 0.7:
        return _number(random, len(data))
    at = random.randrange(len(data) + 1)
    kind = random.randrange(9)
    if kind == 0 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + random.choice((b"\0", b"\x01", b"\x7f", b"\x80", b"\xff", random.randbytes(1))) + data[at + 1 :]
    if kind in (2, 3):
        put = _number(random, random.choice((1, 2, 4, 8)))
        return data[:at] + put + data[at + len(put) :]
    if kind == 4:
        return data[:at] + data[at + random.choice((1, 1, 2, 4, 8, 100)) :]
    if kind == 5:
        return data[:at] + random.randbytes(random.choice((1, 1, 2, 4, 8, 64))) + data[at:]
    if kind == 6:
        return data[:at]
    if kind == 7:
        return data[:at] + random.choice(TEXTS).encode("utf-8", "surrogatepass") + data[at:]
    cut = data[at : at + random.choice((1, 4, 16, 64, 1024))]
    return (data[:at] + cut * random.choice((1, 2, 50)) + data[at:])[:MAX_BYTES]


def _number(random: Random, width: int) -> bytes:
    value = random.choice(EDGES) if random.random() < 0.8 else random.getrandbits(8 * width)
    order = "little" if random.random() < 0.85 else "big"
    return (value & (1 << 8 * width) - 1).to_bytes(width, order)


# --- trees


def change_tree(random: Random, tree: Any) -> Any:
    for _ in range(random.choice(COUNTS)):
        tree = _changed(random, tree, _places(tree))
    return tree


Place = tuple[Any, Any]
"""A container and a key in it."""


def _places(tree: Any) -> list[Place]:
    """Of all values below the root."""
    found: list[Place] = []
    left = [tree]
    for value in left:  # grows while it is read
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        found += [(value, key) for key in keys]
        left += [value[key] for key in keys if isinstance(value[key], (dict, list))]
        if len(found) > 20_000:
            break
    return found


def _changed(random: Random, tree: Any, places: list[Place]) -> Any:
    if not places or random.random() < 0.01:
        return odd_value(random)
    holder, key = random.choice(places)
    value = holder[key]
    kind = random.randrange(12)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        other, other_key = random.choice(places)
        holder[other_key if isinstance(other_key, str) else random.choice(TEXTS)] = holder.pop(key)
    elif kind == 2:
        other, other_key = random.choice(places)
        holder[key] = other[other_key] if not _is_within(holder, other[other_key]) else None
    elif kind == 3 and isinstance(holder, list):
        holder[key:key] = [value] * random.choice((1, 2, 40))
    elif kind == 4:
        holder[key] = [value] if random.random() < 0.5 else {random.choice(TEXTS[2:]): value}
    elif kind in (5, 6) and isinstance(value, (int, float)):
        holder[key] = _near(random, value)
    elif kind in (7, 8) and isinstance(value, str):
        holder[key] = _other_text(random, value)
    else:
        holder[key] = odd_value(random)
    return tree


def _grow(random: Random, tree: Any) -> None:
    places = _places(tree)
    if not places:
        return
    holder, key = random.choice(places)
    value = holder[key]
    times = min(random.choice(MANY), GROWN_BYTES // (len(json.dumps(value)) + len(str(key)) + 8))
    is_numbered = random.random() < 0.7
    copies = [_numbered(value, number if is_numbered else None) for number in range(times)]
    if random.random() < 0.25:
        name = key if isinstance(key, str) else "a"
        holder[key] = name * times if isinstance(value, str) else {name * times: value}
    elif isinstance(holder, list):
        holder[key:key] = copies
    elif random.random() < 0.4:
        holder[key] = copies
    else:
        holder |= {f"{key}{number}": copy for number, copy in enumerate(copies)}


def _numbered(value: Any, number: int | None) -> Any:
    """Another one, alike; without a number a copy."""
    if isinstance(value, str) and number is not None:
        return re.sub(r"(?<=\d)(?!\d)|$", str(number), value, count=1)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and number is not None:
        return value + number
    if isinstance(value, list):
        return [_numbered(item, number) for item in value]
    return {key: _numbered(item, number) for key, item in value.items()} if isinstance(value, dict) else value


def _is_within(holder: Any, value: Any) -> bool:
    """Whether a value holds the place that it would be put into: that would be a tree without an end."""
    return any(one is holder for one, _ in _places(value)) or value is holder


def _near(random: Random, value: float) -> Any:
    return random.choice((value + 1, value - 1, -value, value * 2, value / 2, float(value), 0, random.choice(EDGES), str(value)))


def _other_text(random: Random, value: str) -> str:
    at = random.randrange(len(value) + 1)
    put = random.choice(TEXTS)
    return random.choice((value[:at], value[:at] + put + value[at:], value * 2, value.upper(), value[::-1], put))


def odd_value(random: Random) -> Any:
    kind = random.randrange(9)
    if kind == 0:
        return random.choice((*EDGES, -1, -(2**31), -(2**63), 10**30))
    if kind == 1:
        return random.choice((0.0, -0.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")))
    if kind == 2:
        return random.choice(TEXTS)
    if kind == 3:
        return random.choice((True, False, None))
    if kind == 4:
        return [odd_value(random) for _ in range(random.randrange(4))]
    if kind == 5:
        return {random.choice(TEXTS): odd_value(random) for _ in range(random.randrange(3))}
    if kind == 6 and random.random() < 0.05:
        return _deep(random.choice((50, 900, 5000)))
    if kind == 7:
        return [random.choice(TEXTS)] * random.choice((1, 10, 500))
    return random.choice((None, "", 0, [], {}))


def _deep(depth: int) -> Any:
    found: Any = []
    for level in range(depth):
        found = [found] if level % 2 else {"a": found}
    return found


def _json(random: Random, tree: Any) -> bytes:
    """Also as no standard encoder writes it: NaN, half surrogates, integers of any size."""
    try:
        text = json.dumps(tree, ensure_ascii=random.random() < 0.5)
    except (RecursionError, ValueError):
        text = "[" * 100_000
    return text.encode("utf-8", "surrogatepass")[:MAX_BYTES]
