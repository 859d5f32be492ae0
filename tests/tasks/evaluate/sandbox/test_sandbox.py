# ruff: noqa: E501 - programs are lines of a table
"""Programs in the sandbox: right ones pass, wrong ones fail, hostile ones do no harm and never pass."""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hostile import PROGRAMS, TESTS

from waiting import HUNG_SECONDS, until
from windlass.tasks.evaluate.sandbox import sandbox as module
from windlass.tasks.evaluate.sandbox.sandbox import LIMITS, Limits, NoSandbox, Outcome, Program, Sandbox
from windlass.tasks.evaluate.tasks.catalog import builtin
from windlass.tasks.evaluate.tasks.grade import program
from windlass.tasks.evaluate.tasks.questions import Asked, questions
from windlass.tasks.evaluate.tasks.sources import load

pytestmark = [pytest.mark.pure, pytest.mark.multi]

LONG = msgspec.structs.replace(LIMITS, wall_seconds=HUNG_SECONDS)
"""For programs that end by themselves: a busy machine changes no verdict."""
SHORT = Limits(cpu_seconds=1, wall_seconds=4.0, memory_bytes=256 * 2**20)
"""For those that do not."""


def run_all(programs: Sequence[Program], limits: Limits = LONG) -> list[Outcome]:
    async def run() -> list[Outcome]:
        sandbox = Sandbox(2, limits)
        try:
            return list(await asyncio.gather(*map(sandbox.run, programs)))
        finally:
            sandbox.close()

    try:
        return asyncio.run(run())
    except NoSandbox as error:
        pytest.skip(str(error))


def run_one(source: str, tests: str, **fields: str) -> Outcome:
    return run_all([Program(source=source, tests=tests, **fields)])[0]


def left_running(folder: str) -> list[str]:
    """Processes of a sandbox: its folder is on their command lines."""
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if folder.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def test_hostile_programs_do_no_harm_and_never_pass() -> None:
    async def run() -> tuple[list[Outcome], str]:
        sandbox = Sandbox(4, SHORT)  # some of them only wait
        try:
            programs = [Program(source=source, tests=TESTS) for source in PROGRAMS.values()]
            return list(await asyncio.gather(*map(sandbox.run, programs))), sandbox.folder
        finally:
            sandbox.close()

    try:
        outcomes, folder = asyncio.run(run())
    except NoSandbox as error:
        pytest.skip(str(error))
    assert {name: outcome.why for name, outcome in zip(PROGRAMS, outcomes, strict=True) if outcome.passed} == {}
    assert all(len(outcome.why) <= 600 for outcome in outcomes)
    until(lambda: not left_running(folder), "a program outlives its verdict")
    assert not list(Path("/").glob("windlass-was-here")) and not list(Path(os.__file__).parent.glob("windlass-was-here"))


@pytest.mark.parametrize(
    "name", ["reading files", "environment", "network", "ptrace", "namespaces", "/proc", "symlinks", "writing anywhere"]
)
def test_what_a_program_may_not_do_is_told_to_it(name: str) -> None:
    (outcome,) = run_all([Program(source=PROGRAMS[name], tests="assert answer(20) == 0 or True")])
    told = {
        "reading files": "No such file",
        "environment": "KeyError",
        "network": "not permitted",
        "/proc": "No such file",
        "symlinks": "not permitted",
    }
    assert told[name] in outcome.why if name in told else outcome.passed, outcome


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("def f(x):\n    return x + 1", "assert f(1) == 2"),
        ("def f(x, *, y=1):\n    return x + y", "assert f(1, y=3) == 4"),
        ("def f():\n    return {1: (2, [3.5, {4}], None, True, 1j, b'x', frozenset([1]), range(3))}", "assert f() == {1: (2, [3.5, {4}], None, True, 1j, b'x', frozenset([1]), range(3))}"),
        ("def f():\n    return float('inf'), 10**400", "assert f() == (float('inf'), 10**400)"),
        ("def f(s):\n    return s[::-1]", "assert f('a\\u00e9\\U0001f600') == '\\U0001f600\\u00e9a'"),
        ("def f():\n    raise KeyError('k')", "try:\n    f()\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError"),
        ("class P:\n    def __init__(self, a):\n        self.a = a\ndef f(ps):\n    return sum(p.a for p in ps)", "assert f([P(1), P(2)]) == 3"),
        ("class N:\n    def __init__(self, v):\n        self.v, self.n = v, None\ndef f(n):\n    return n.n.v", "a = N(1)\na.n = N(2)\nassert f(a) == 2"),
        ("def f(n):\n    return (i for i in range(n))", "assert list(f(3)) == [0, 1, 2]"),
        ("import re\ndef f(s):\n    return re.match('a', s)", "assert f('abc')\nassert not f('x')"),
        ("def sum(a, b):\n    return a * b", "assert sum(2, 5) == 10"),
        ("def f(x):\n    return x", "def check(f, a):\n    assert f(a) == a\ncheck(f, 1)"),
        ("import math\ndef sum(a, b):\n    return a * b", "assert sum(2, 5) == math.floor(10.5)"),
        ("def f(x):\n    return x", "print('x' * 100000)\nassert f(1) == 1"),
        ("import sys\ndef f(x):\n    return sys.getsizeof(x)", "assert f(()) == sys.getsizeof(())"),
        ("def f(xs, kind):\n    return [x for x in xs if isinstance(x, kind)]", "assert f([1, 'a'], int) == [1]"),
        ("import threading\ndef f():\n    out = []\n    t = threading.Thread(target=out.append, args=(1,))\n    t.start()\n    t.join()\n    return out", "assert f() == [1]"),
        ("import math, random, json, collections, decimal, sqlite3\ndef f():\n    open('/tmp/x', 'w').write('1')\n    return int(open('/tmp/x').read())", "assert f() == 1"),
    ],
)  # fmt: skip
def test_right_programs_pass(source: str, tests: str) -> None:
    assert run_one(source, tests) == Outcome(passed=True, why="all tests passed")


@pytest.mark.parametrize(
    ("source", "tests", "why"),
    [
        ("def f(x):\n    return 3", "x = 1\nassert f(x) == 2", "failed: assert f(x) == 2"),
        ("def g(x):\n    return 2", "assert f(1) == 2", "defines nothing that the tests call"),
        ("def f(x:\n    return 2", "assert f(1) == 2", "does not run: SyntaxError"),
        ("def f(x):\n    return 1 / 0", "assert f(1) == 2", "ZeroDivisionError: division by zero: assert f(1) == 2"),
        ("x = 1", "assert sum([1, 2]) == 3", "defines nothing that the tests call"),
        ("import os\ndef f(x):\n    os._exit(0)", "try:\n    f(1)\nexcept Exception:\n    pass", "ended before it answered"),
        ("import os\ndef f(x):\n    os._exit(0)", "try:\n    f(1)\nexcept:\n    pass", "ended before it answered"),
        ("import os\ndef f(x):\n    os.close(3)\n    while True:\n        pass", "f(1)", "ended before it answered"),
        ("def f(x):\n    return input()", "assert f(1) == 2", "EOFError"),
        ("import numpy", "assert f(1) == 2", "does not run: ModuleNotFoundError"),
        ("", "assert f(1) == 2", "defines nothing that the tests call"),
    ],
)
def test_wrong_programs_fail_and_say_why(source: str, tests: str, why: str) -> None:
    outcome = run_one(source, tests)
    assert not outcome.passed and why in outcome.why


def test_why_can_be_written_down_whatever_a_program_raises() -> None:
    outcome = run_one("def f():\n    raise ValueError('\\ud800')", "f()")
    assert not outcome.passed and "\\ud800" in outcome.why
    assert msgspec.json.encode(outcome.why)


def test_tests_take_only_the_function_that_was_asked_for() -> None:
    """What tests compare with comes from the context, whatever the answer defines under its name."""
    context, tests = "def helper(x):\n    return x * 2", "def check(f):\n    assert f(3) == helper(3)\ncheck(double)"
    cheat = "def helper(x):\n    return 0\ndef double(x):\n    return 0"
    assert not run_one(cheat, tests, context=context, entry_point="double").passed
    assert run_one("def double(x):\n    return x + x", tests, context=context, entry_point="double").passed
    assert "does not define double" in run_one("x = 1", tests, context=context, entry_point="double").why


def test_what_tests_bind_is_not_taken_from_the_answer() -> None:
    """Parameters and names of caught exceptions: an answer could replace the one, and need not define the other."""
    tests = "def check(a):\n    try:\n        assert a == 1\n    except ValueError as e:\n        print(e)\ncheck(1)"
    assert "defines nothing that the tests call" in run_one("a = e = 1", tests).why


def test_a_program_can_make_only_so_many_files() -> None:
    source = "def f():\n    for n in range(10**4):\n        open(f'/tmp/{n}', 'w').close()"
    assert "No space left" in run_one(source, "f()").why


def test_a_kernel_that_offers_less_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_filter", lambda: False)

    async def run(anyway: bool) -> tuple[Outcome, tuple[str, ...]]:
        sandbox = Sandbox(1, anyway=anyway)
        try:
            return await sandbox.run(Program(source="def f():\n    return 1", tests="assert f() == 1")), sandbox.missing
        finally:
            sandbox.close()

    with pytest.raises(NoSandbox, match=r"seccomp.*--skip-execution.*--execute-anyway"):
        asyncio.run(run(False))
    outcome, missing = asyncio.run(run(True))
    assert outcome.passed and any("seccomp" in line for line in missing)


# --- published sets ---------------------------------------------------------------------------------------------------


class _Nothing(ast.NodeTransformer):
    """Every function returns its value in a list: another type, so no test can hold."""

    def visit_Return(self, node: ast.Return) -> ast.AST:
        node.value = ast.List(elts=[node.value or ast.Constant(None), ast.Constant("mutated")], ctx=ast.Load())
        return ast.fix_missing_locations(node)


def mutated(source: str) -> str:
    return ast.unparse(_Nothing().visit(ast.parse(source)))


def canonical(name: str, count: int | None, monkeypatch: pytest.MonkeyPatch, data: Path) -> list[Program]:
    monkeypatch.setenv("WINDLASS_DATA", str(data))
    task = builtin()[name]
    rows = load(task).rows
    asked = questions(task, rows, (), "chat", Asked(num_examples=count))
    by_id = {row["name"]: row for row in rows}
    return [
        Program(
            source=program(one, by_id[one.id].get("canonical_solution") or by_id[one.id]["code"]),
            tests=one.tests,
            context=one.context,
            entry_point=one.entry_point,
        )
        for one in asked
    ]


@pytest.mark.parametrize(("name", "count"), [("humaneval", 12), ("mbpp", 12)])
def test_some_canonical_solutions_pass(name: str, count: int, monkeypatch: pytest.MonkeyPatch, data_folder: Path) -> None:
    outcomes = run_all(canonical(name, count, monkeypatch, data_folder))
    assert [outcome.why for outcome in outcomes if not outcome.passed] == [] and len(outcomes) == count


@pytest.mark.long
@pytest.mark.parametrize(("name", "count"), [("humaneval", 164), ("mbpp", 427), ("mbpp_full", 974)])
def test_all_canonical_solutions_pass(name: str, count: int, monkeypatch: pytest.MonkeyPatch, data_folder: Path) -> None:
    outcomes = run_all(canonical(name, None, monkeypatch, data_folder))
    assert [outcome.why for outcome in outcomes if not outcome.passed] == [] and len(outcomes) == count


@pytest.mark.long
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_all_mutated_solutions_fail(name: str, monkeypatch: pytest.MonkeyPatch, data_folder: Path) -> None:
    programs = canonical(name, None, monkeypatch, data_folder)
    broken = [
        Program(source=mutated(one.source), tests=one.tests, context=one.context, entry_point=one.entry_point) for one in programs
    ]
    outcomes = run_all(broken)
    assert sum(outcome.passed for outcome in outcomes) == 0


def test_excerpts_are_read_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in the sets' own form, so that this needs none of them."""
    (tmp_path / "humaneval").mkdir()
    row = {
        "task_id": "HumanEval/0", "entry_point": "twice", "prompt": 'def twice(x: int) -> int:\n    """ Twice x.\n    """\n',
        "canonical_solution": "    return 2 * x\n", "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
    }  # fmt: skip
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (one,) = canonical("humaneval", None, monkeypatch, tmp_path)
    broken = Program(source=mutated(one.source), tests=one.tests, context=one.context, entry_point=one.entry_point)
    assert [outcome.passed for outcome in run_all([one, broken])] == [True, False]
