"""What a response's headers say about JSON Schemas that a grammar cannot enforce completely.

`windlass-unenforced` names the keywords; `windlass-schema` says whether the finished answer keeps all of its schema. With `strict`, such
a schema is rejected instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from windlass.core.request import Constraint, Delta, Request, tool_name
from windlass.foreign import shown
from windlass.model.text.grammar.check import MAX_STEPS, Verdict, check_answer
from windlass.model.text.grammar.room import Room, Work
from windlass.model.text.grammar.schema import enforceable, enforceable_text
from windlass.tasks.serve.http.asgi import Header
from windlass.wire.schema.errors import unsupported

UNENFORCED, VERDICT = b"windlass-unenforced", b"windlass-schema"
MAX_HEADER = 512
MAX_NAMES = 512
"""More do not fit into a header."""
_REASON = "which cannot be enforced while the answer is written; leave it or `strict` out"
_UNSAFE = re.compile(r"[^\x21-\x7e]")
_WORST: tuple[Verdict, ...] = ("invalid", "unknown", "valid")


class SchemaNotes:
    """Of one request. `left_out`: names of keywords that are not enforced."""

    def __init__(self, request: Request) -> None:
        self.left_out: list[str] = []
        has_schema = self._note_answer(request.constraint)
        self._tools = dict(self._tool_schemas(request))
        self._answer: Any = None
        if request.constraint is not None and has_schema and self.left_out:
            self._answer = msgspec.json.decode(request.constraint.value)

    @property
    def headers(self) -> list[Header]:
        return [unenforced_header(self.left_out)] if self.left_out else []

    def _note_answer(self, constraint: Constraint | None) -> bool:
        """Whether it is held to a schema."""
        if constraint is None or constraint.kind != "json_schema":
            return False
        left_out = enforceable_text(constraint.value).left_out
        if left_out and constraint.is_strict:
            raise unsupported("response_format", f"has a strict JSON schema with {shown(left_out[0], 100)}, {_REASON}")
        self._leave_out(left_out)
        return True

    def _tool_schemas(self, request: Request) -> Iterable[tuple[str, Any]]:
        """Of tools whose calls are held to a grammar."""
        is_required = request.tool_choice not in ("auto", "none")
        room = Room()
        for number, tool in enumerate(request.tools if request.tool_choice != "none" else ()):
            function = tool.get("function", tool)
            schema, is_strict = function.get("parameters"), function.get("strict") is True
            if not isinstance(schema, dict) or not (is_required or is_strict):
                continue
            left_out = enforceable(schema, room).left_out
            if left_out and is_strict:
                raise unsupported(f"tools[{number}].function.parameters", f"has {shown(left_out[0], 100)}, {_REASON}")
            self._leave_out(left_out)
            yield tool_name(tool), schema

    def _leave_out(self, names: Sequence[str]) -> None:
        self.left_out += names[: max(MAX_NAMES - len(self.left_out), 0)]

    def verdict(self, choices: Sequence[Sequence[Delta]]) -> list[Header]:
        """Of complete answers."""
        if not self.left_out:
            return []
        work = Work(MAX_STEPS)
        found = [verdict for deltas in choices for verdict in self._verdicts(deltas, work)]
        return [(VERDICT, next(word for word in _WORST if word in found).encode())] if found else []

    def _verdicts(self, deltas: Sequence[Delta], work: Work) -> Iterable[Verdict]:
        calls = [call for delta in deltas for call in delta.tool_calls]
        for call in calls:
            if call.name in self._tools:
                yield check_answer(call.arguments, self._tools[call.name], work)
        if self._answer is not None and not calls:
            yield check_answer("".join(delta.content for delta in deltas), self._answer, work)


def unenforced_header(names: Iterable[str]) -> Header:
    """Names come from the client, so what a header cannot hold is replaced."""
    return UNENFORCED, _UNSAFE.sub("?", ",".join(names)[:MAX_HEADER]).encode()
