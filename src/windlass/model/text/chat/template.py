"""Renders a model's Jinja chat template in a sandbox.

Templates come with checkpoints and are untrusted code: they run in Jinja's immutable sandbox and see only plain values.
The environment is the one that published templates are written for (transformers, utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput, MissingExtra

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

Message = Mapping[str, Any]
OPENED, CLOSED = "\ufdd0", "\ufdd1"
"""Markers around `{% generation %}` blocks, if requested. Unicode noncharacters, reserved for internal use."""


class _NamedTemplate(Frozen):
    name: str
    template: str


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    marked: bool = False,
    **variables: object,
) -> str:
    """`special_tokens` is bos_token, eos_token...; `variables` are the template's own (enable_thinking); `marked`: mark `{% generation %}` blocks."""
    values: dict[str, Any] = {**(special_tokens or {}), **variables, "messages": messages, "tools": tools or None}
    values["add_generation_prompt"] = add_generation_prompt
    try:
        return _compiled(template, marked).render(_plain(values))
    except _jinja().TemplateError as error:
        raise BadInput(f"the chat template raised an error: {_first_line(error)}", field="messages") from None
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError, ArithmeticError) as error:
        raise BadInput(
            f"the chat template failed on these messages: {type(error).__name__}: {_first_line(error)}", field="messages"
        ) from None


def keep_template(template: str) -> None:
    """Compiles it, so that rendering it is all that is left to do in this process."""
    _compiled(template, False)


def chat_template(config: Mapping[str, Any], name: str = "default") -> str | None:
    """From tokenizer_config.json: one template, or a list of named ones."""
    value = config.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    try:
        templates = msgspec.convert(value, list[_NamedTemplate])
    except msgspec.ValidationError:
        raise BadInput("chat_template in tokenizer_config.json should be a string, or a list of names and templates") from None
    return next((entry.template for entry in templates if entry.name == name), None)


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on, which templates refer to; a token may be an object with `content`."""
    found: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        text: Any = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
    return found


@lru_cache(maxsize=16)
def _compiled(template: str, marked: bool) -> jinja2.Template:
    try:
        return _environment(marked).from_string(template)
    except (_jinja().TemplateError, RecursionError, SyntaxError) as error:  # a `break` outside of a loop
        raise BadInput(f"the chat template is invalid: {_first_line(error)}") from None


def _environment(marked: bool) -> jinja2.Environment:
    _jinja()
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    extensions = [loopcontrols, _generation(marked)]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    cast(dict[str, Any], environment.globals).update(raise_exception=_raise, strftime_now=_strftime_now)
    return environment


def _jinja() -> ModuleType:
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("jinja2", "run", "rendering a chat") from None
    return jinja2


def _generation(marked: bool) -> type[Extension]:
    """`{% generation %}` marks assistant content for training; rendered as is, or between OPENED and CLOSED if `marked`."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if not marked:
                return body
            opened, closed = (nodes.Output([nodes.TemplateData(mark)]) for mark in (OPENED, CLOSED))
            return [opened, *body, closed]

    return Generation


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Without Jinja's HTML escaping."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise _jinja().TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _plain(value: Any) -> Any:
    """Rebuilt from JSON types, so that a template cannot reach other objects through methods."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no reason given"])[0][:200]
