"""Help texts in words: an option shows what to write after it (`--on HARDWARE`), and a switch nothing.

Typer 0.2x prints Python types there, `<bool>` and `<list[str]>`; earlier ones print nothing.
"""

from __future__ import annotations

from typing import Any

WORDS = {"int": "N", "float": "NUMBER", "path": "PATH", "str": "TEXT"}


def use_words() -> None:
    """From now on, in every command."""
    from typer.core import TyperArgument, TyperOption

    for kind in (TyperArgument, TyperOption):
        for method in ("display_type_rich", "display_type"):
            if hasattr(kind, method):
                setattr(kind, method, _label)


def _label(parameter: Any, ctx: Any) -> str:
    return type_label(parameter)


def type_label(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False) or parameter.param_type_name == "argument":
        return ""  # an argument's metavar is its name
    return parameter.metavar or next((word for kind, word in WORDS.items() if kind in _kind(parameter)), "VALUE")


def _kind(parameter: Any) -> str:
    descriptor = getattr(parameter, "type_descriptor", None)
    return str(getattr(descriptor, "annotation", None) or parameter.type).lower()
