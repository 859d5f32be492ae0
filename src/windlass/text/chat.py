"""Chats to text: a model's Jinja template, rendered where it can do no harm.

Templates come with checkpoints, so they are strangers' code: they run in Jinja's immutable sandbox and see only plain values.
The environment is the one that published templates are written for (transformers, utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from windlass.errors import BadInput, MissingExtra

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    **variables: object,
) -> str:
    """`special_tokens` is bos_token, eos_token...; `variables` are the template's own (enable_thinking)."""
    import jinja2

    values = {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
    try:
        return _compiled(template).render(**(special_tokens or {}), **variables, **_plain(values))
    except jinja2.TemplateError as error:
        raise BadInput(f"the chat template refused: {_first_line(error)}") from None
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise BadInput(f"the chat template failed on these messages: {type(error).__name__}: {_first_line(error)}") from None


def chat_template(config: Mapping[str, Any], name: str = "default") -> str | None:
    """From tokenizer_config.json: one template, or a list of named ones."""
    value = config.get("chat_template")
    if isinstance(value, list):
        return next((entry["template"] for entry in value if isinstance(entry, dict) and entry.get("name") == name), None)
    return value if isinstance(value, str) else None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its kind, which templates name; a token may be written as an object."""
    found: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
    return found


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise BadInput(f"the chat template cannot be read: {_first_line(error)}") from None


def _environment() -> jinja2.Environment:
    try:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise MissingExtra("jinja2", "run", "rendering a chat") from None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation()])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _generation() -> type[jinja2.ext.Extension]:
    """`{% generation %}` marks the assistant's words for training; here its body is rendered as it is."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _plain(value: Any) -> Any:
    """Rebuilt of JSON's types: what a template sees has no methods that reach further."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no reason given"])[0][:200]
