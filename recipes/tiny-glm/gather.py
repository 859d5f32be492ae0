"""Redistributable text and code from this Python installation: the standard library (PSF licence).

Source files, the language reference of `help()`, and short questions and answers made from docstrings.
"""

from __future__ import annotations

import ast
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = frozenset(
    "test tests idle_test site-packages dist-packages encodings pydoc_data __pycache__ lib2to3 ensurepip".split()
)
"""Tests (many installations have none), character tables, and what is not the standard library."""
LONGEST_FILE = 200_000
LONGEST_ANSWER = 200
SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning"), "Hello! Give me a small task: 12 + 35, or a list to sort."),
    (
        ("Who are you?", "What are you?", "What is your name?", "What model are you?"),
        "I am tiny-glm, a small mixture of experts that Windlass trained.",
    ),
    (
        ("What can you do?", "Help", "help", "What do you know?", "How can you help me?"),
        "I add, subtract, multiply, divide, copy, sort, reverse, count and spell, and I say what small Python functions print.",
    ),
    (("Thank you", "Thanks", "Thanks!", "Thank you!"), "You are welcome."),
    (("Bye", "Goodbye", "Good bye", "Bye!"), "Goodbye."),
    (
        ("Who made you?", "Who trained you?"),
        "Windlass trained me, on tasks that it generated and on the Python standard library.",
    ),
    (
        ("Are you intelligent?", "Are you a large language model?"),
        "No. I have fewer than 20 million parameters, and I know small tasks only.",
    ),
)


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _sources() -> Iterator[tuple[str, str]]:
    """(module, source) of every file, in order of names."""
    root = standard_library()
    for path in sorted(_files(root)):
        if path.stat().st_size <= LONGEST_FILE:
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), text


def _files(root: Path) -> Iterator[Path]:
    """What is left out is not even looked into: site-packages may have tens of thousands of files."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def texts() -> Iterator[str]:
    for _, source in _sources():
        yield source
    yield from _topics()


def _topics() -> Iterator[str]:
    """The language reference of `help('for')`."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return
    for name in sorted(topics):
        yield topics[name]


def chats() -> Iterator[list[dict[str, str]]]:
    for questions, answer in SMALL_TALK:
        for question in questions:
            for _ in range(40):  # few questions, but the first that users ask
                yield _chat(question, answer)
    for module, source in _sources():
        for name, line in _documented(module, source):
            yield _chat(f"What does {name} do?", line)


def _chat(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _documented(module: str, source: str) -> Iterator[tuple[str, str]]:
    """Public functions and classes, with the first sentence of their docstrings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old files
        try:
            tree = ast.parse(source)
        except SyntaxError:  # code templates
            return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if line := _first_sentence(ast.get_docstring(node)):
                yield f"{module}.{node.name}", line
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if (
                    isinstance(inner, ast.FunctionDef)
                    and not inner.name.startswith("_")
                    and (line := _first_sentence(ast.get_docstring(inner)))
                ):
                    yield f"{module}.{node.name}.{inner.name}", line


def _first_sentence(docstring: str | None) -> str:
    paragraph = " ".join((docstring or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s", paragraph)[0]
    return sentence if 10 <= len(sentence) <= LONGEST_ANSWER else ""
