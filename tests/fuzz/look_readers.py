"""The look at a constraint that the server takes itself, before a process with limits compiles it: it must end soon whatever it is given."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutate import MAX_BYTES, Sample, grown_text, mutate_grown
from fuzz.reader import Reader
from fuzz.text_readers import READERS as TEXT_READERS
from fuzz.text_readers import as_json, mutate_constraint
from windlass.errors import BadInput
from windlass.wire.schema.errors import ApiError

SECONDS = 2.0
"""CPU time. The largest that is taken needs a tenth of a second; a look without limits needs minutes for the inputs made here."""
STYLES = ("json", "arg_pairs", "xml_function", "bare_json", "channels")


def _samples(folder: Path) -> list[Sample]:
    """Besides the ordinary ones, those in which things belong together that are compared with each other."""
    box = {
        "$defs": {"a1": {"$id": "http://example.org/a1/x.json"}},
        "properties": {"p1": {"$ref": "a1/x.json"}},
        "required": ["p1"],
    }
    tagged = {"type": "object", "properties": {"kind": {"const": 1}}, "required": ["kind"], "additionalProperties": False}
    union = {"enum": [1, 2], "oneOf": [{"const": 1}, {"const": 2}], "not": {}, "minProperties": 1}
    tags = {"oneOf": [tagged, {**tagged, "properties": {"kind": {"enum": [2, 3.0]}}}], "patternProperties": {r"^\ba": {}}}
    schemas = [box, union, tags, {"allOf": [{"$ref": "#/$defs/a~1b/c"}], "$defs": {"a/b": {"c": {"pattern": "(^a|b$)[$]"}}}}]
    made = [as_json({"kind": "json_schema", "value": json.dumps(schema), "is_strict": False}) for schema in schemas]
    return [*TEXT_READERS["grammar"].samples(folder), *made]


def mutate(random: Random, samples: Sequence[Sample]) -> bytes:
    if random.random() < 0.4:
        return mutate_constraint(random, samples)
    given = json.loads(b"".join(random.choice(samples)))
    value = given["value"].encode()
    grown = mutate_grown(random, [(value,)]) if given["kind"] in ("json_schema", "choice") else grown_text(random, value)
    given["value"] = grown.decode("utf-8", "replace")[:MAX_BYTES]
    return json.dumps(given).encode()


def read_look(data: bytes, folder: Path) -> None:
    """As an answer's constraint, and as the parameters of tools, strict and not."""
    from windlass.core.request import Constraint

    constraint = Constraint(**json.loads(data))
    with _strictly():
        _look({"constraint": constraint}, "tags")
        for tools in _tools(constraint):
            for style in STYLES:
                with suppress(BadInput):
                    _look({"tools": tools, "tool_choice": "required"}, style)


def _look(given: dict[str, Any], style: str) -> None:
    from windlass.core.request import Request
    from windlass.model.text.grammar.tool_grammar import OutputSpec, answer_grammar
    from windlass.tasks.serve.api.schema_notes import SchemaNotes

    with suppress(ApiError):  # a strict schema with what cannot be enforced
        SchemaNotes(Request(messages=({"role": "user", "content": ""},), **given))
        answer_grammar(OutputSpec(style=style, **given), {"<tool_call>": 258, "</think>": 259})


def _tools(constraint: Any) -> list[tuple[dict[str, Any], ...]]:
    if constraint.kind != "json_schema":
        return []
    schema = json.loads(constraint.value)
    if not isinstance(schema, dict):
        return []
    kinds = [{"name": "f", "parameters": schema, "strict": True}, {"name": "g", "parameters": {"properties": {"a": schema}}}]
    return [({"type": "function", "function": kind},) for kind in kinds]


class _Raising(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())


@contextmanager
def _strictly() -> Generator[None]:
    """What the look did not expect is the client's fault to the server, and a finding here."""
    log, handler = logging.getLogger("windlass"), _Raising()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


READERS: dict[str, Reader] = {"constraint-look": Reader(_samples, read_look, mutate, seconds=SECONDS)}
