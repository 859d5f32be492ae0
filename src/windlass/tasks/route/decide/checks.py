"""Checks of a finished answer that can fail: its JSON schema, the tests that its prompt gives. Which apply follows from the request."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from windlass.core.model import Frozen
from windlass.core.request import Request
from windlass.model.text.grammar.check import check_answer
from windlass.tasks.route.features.text import text_of

Verdict = Literal["passed", "failed", "none"]
"""none: nothing can be checked."""
_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_ASSERT = re.compile(r"^[ \t>]*(assert .+)$", re.MULTILINE)


class GivenTests(Frozen):
    """A program and the tests of its prompt, for a sandbox."""

    source: str
    tests: str


def check_json(request: Request, answer: str) -> Verdict:
    constraint = request.constraint
    if constraint is None or constraint.kind not in ("json_object", "json_schema"):
        return "none"
    schema = msgspec.json.decode(constraint.value) if constraint.kind == "json_schema" else {"type": "object"}
    return "failed" if check_answer(answer, schema) == "invalid" else "passed"


def given_tests(request: Request, answer: str) -> GivenTests | None:
    """The code of the answer and the `assert` lines of the prompt; None where there are none."""
    tests = _ASSERT.findall(text_of(request))
    if not tests:
        return None
    blocks = _BLOCK.findall(answer)
    return GivenTests(source="\n\n".join(blocks) if blocks else answer, tests="\n".join(tests))
