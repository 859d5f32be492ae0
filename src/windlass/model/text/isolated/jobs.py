"""What a worker is asked, and how it answers. Runs inside the worker."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from windlass.core.model import Frozen
from windlass.errors import BadInput, Error
from windlass.model.text.chat.template import keep_template, render_chat
from windlass.model.text.grammar.compile import compile_grammar
from windlass.model.text.tokenize.build import library_reason

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CHARACTERS = 50_000_000
"""Of a rendered chat: far more than any context holds."""


class Rendering(Frozen, tag="render"):
    """A chat template, and the values that it sees."""

    template: str
    values: dict[str, Any]


class Compilation(Frozen, tag="compile"):
    grammar: str


class Task(Frozen):
    job: Rendering | Compilation
    cpu_seconds: float
    """After which the worker is ended."""


class Answer(Frozen):
    text: str = ""
    error: str = ""
    field: str = ""
    """Of the request, which is at fault."""
    is_foreign: bool = False
    """The error is none of the request's: something is not installed, or a library failed in a way that nobody expected."""
    is_last: bool = False
    """The worker ends after it."""
    cpu_seconds: float = 0.0
    """That it took."""


def prepare(job: Rendering | Compilation) -> None:
    """What a worker keeps for its next jobs. Errors are for `done` to tell."""
    if isinstance(job, Rendering):
        with suppress(Exception):
            keep_template(job.template)


def done(job: Rendering | Compilation, tokenizer: LLTokenizer | Error | None) -> Answer:
    """Raises MemoryError where the worker's memory is used up."""
    try:
        return Answer(text=_rendered(job) if isinstance(job, Rendering) else _compiled(job, tokenizer))
    except BadInput as error:
        return Answer(error=str(error), field=error.field)
    except Error as error:
        return Answer(error=str(error), is_foreign=True)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - what the libraries raise for what they did not expect; Rust's panics are no Exceptions
        what = f"{type(error).__name__}: {library_reason(error)}"
        return Answer(error=f"a library failed in a way that was not expected: {what}", is_foreign=True)


def _rendered(job: Rendering) -> str:
    text = render_chat(job.template, **job.values)
    if len(text) > MAX_CHARACTERS:
        raise BadInput(
            f"the chat template wrote {len(text):,} characters; at most {MAX_CHARACTERS:,} are taken", field="messages"
        )
    return text


def _compiled(job: Compilation, tokenizer: LLTokenizer | Error | None) -> str:
    if isinstance(tokenizer, Error):
        raise tokenizer
    if tokenizer is None:
        raise RuntimeError("the tokenizer could not be prepared for constraints")
    compile_grammar(tokenizer, job.grammar)
    return ""
