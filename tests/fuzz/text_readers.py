"""Readers of what comes with a model or out of one: configs, tokenizers, chat templates, grammars, tool calls. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from fuzz import made_models as made
from fuzz.mutate import Sample, mutate_grown, mutate_json, mutate_text
from fuzz.reader import Reader, put
from windlass.errors import BadInput


def as_json(value: object) -> Sample:
    return (json.dumps(value).encode(),)


# --- configs


def _config_samples(folder: Path) -> list[Sample]:
    from windlass.model.families.registry import known_models, published_config

    return [as_json(made.CONFIG), *(as_json(published_config(model)) for model in known_models())]


def read_config(data: bytes, folder: Path) -> None:
    from windlass.core.count import count_parameters
    from windlass.model import families
    from windlass.model.formats.config import read_config

    spec = families.describe(read_config(put(folder, "config.json", data)))
    count_parameters(spec, families.rules(spec))


# --- tokenizers


def _text_reader(name: str, sample: Callable[[], object]) -> Reader:
    """A file of a model directory beside the sound others."""

    def samples(folder: Path) -> list[Sample]:
        made.write_text(folder / name)
        return [as_json(sample())]

    def read(data: bytes, folder: Path) -> None:
        from windlass.runtime.weights.text.files import model_text

        put(folder / name, name, data)
        model_text(folder / name)

    return Reader(samples, read, mutate_json)


def read_tokenizer(data: bytes, folder: Path) -> None:
    """As runtime/weights/text/trial.py does, in a process of its own, which the library may end. Texts that it refuses are no fault of the file."""
    from windlass.model.text.tokenize.build import build_tokenizer, check_tokenizer

    backend = build_tokenizer(data, "tokenizer.json")
    with suppress(BadInput):
        check_tokenizer(backend)


def _gguf_vocabulary_samples(folder: Path) -> list[Sample]:
    from windlass.model.text.tokenize.gguf_export import tokenizer_metadata

    metadata, _ = tokenizer_metadata(made.tokenizer_json(), made.TOKENIZER_CONFIG, 300, made.TEMPLATE)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab"]
    sentencepiece = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": pieces, "tokenizer.ggml.scores": [-float(n) for n in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
    return [as_json(metadata), as_json(sentencepiece)]


def read_gguf_vocabulary(data: bytes, folder: Path) -> None:
    import msgspec

    from windlass.model.text.chat.template import chat_template
    from windlass.model.text.tokenize.build import build_tokenizer
    from windlass.model.text.tokenize.gguf_tokenizer import tokenizer_files

    try:
        metadata: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    if isinstance(metadata, dict):
        files = tokenizer_files(metadata)
        build_tokenizer(msgspec.json.encode(files["tokenizer.json"]), "GGUF")
        chat_template(files["tokenizer_config.json"])


def _dllama_tokenizer_samples(folder: Path) -> list[Sample]:
    from windlass.model.formats.dllama.tokenizer import DllamaTokenizer, tokenizer_bytes, with_splitting

    tokens = [*(bytes([byte]) for byte in range(256)), b"he", b"llo", b"<s>", b"</s>"]
    splitting = {"pre_tokenizer": made.tokenizer_json()["pre_tokenizer"]}
    found = DllamaTokenizer(
        vocabulary=tokens, scores=[-float(number) for number in range(258)] + [-1e30] * 2, bos_id=258, eos_ids=(259,),
        chat_template=with_splitting(made.TEMPLATE, splitting),
    )  # fmt: skip
    data = tokenizer_bytes(found)
    return [made.cut_pairs(data), made.cut_every(data, 4)]


def read_dllama_tokenizer(data: bytes, folder: Path) -> None:
    import msgspec

    from windlass.model.formats.dllama.tokenizer import read_tokenizer
    from windlass.model.text.tokenize.build import build_tokenizer
    from windlass.runtime.weights.text.dllama import tokenizer_config, tokenizer_json

    stored = read_tokenizer(put(folder, "x.t", data))
    tokenizer_config(stored)
    build_tokenizer(msgspec.json.encode(tokenizer_json(stored)), "x.t")


def read_for_conversion(data: bytes, folder: Path) -> None:
    """tokenizer.json as the converter to Distributed Llama reads it."""
    from windlass.tasks.convert.dllama.vocabulary import read_hugging_face

    (folder / "converted").mkdir(exist_ok=True)
    put(folder / "converted", "tokenizer.json", data)
    read_hugging_face(folder / "converted")


# --- chat templates, rendered as the isolated worker does

CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "{{ 7 * 7 }} <|im_end|>"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}],
    "add_generation_prompt": True,
    "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
}  # fmt: skip
TEMPLATES = (
    made.TEMPLATE,
    "{%- macro show(x) -%}{{ x | string | replace('a', 'b') }}{%- endmacro -%}{%- set ns = namespace(n=0) -%}{%- for m in messages[::-1] -%}"
    "{%- set ns.n = ns.n + loop.index0 * 2 -%}{{ show(m.content) }}{%- if not loop.last %}, {% endif -%}{%- endfor -%}{{ ns.n }}"
    "{{ strftime_now('%Y') if strftime_now is defined else '' }}{{ raise_exception('no') if messages | length > 9 }}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}{% endgeneration %}{% else %}"
    "{{ m['content'].split('x')[-1].strip() }}{% endif %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{{ '%05d' % 3 }}{{ [1, 2] | map('string') | join('-') }}{{ range(3) | list | sum }}{% endfor %}{% break %}{% endfor %}",
)


def read_template(data: bytes, folder: Path) -> None:
    from windlass.model.text.isolated.jobs import Rendering, done

    answer = done(Rendering(template=data.decode("utf-8", "replace"), values=CHAT), None)
    if answer.is_foreign:
        raise AssertionError(answer.error)
    if answer.error:
        raise BadInput(answer.error)


# --- grammars, compiled as the isolated worker does


def _grammar_samples(folder: Path) -> list[Sample]:
    schema = {
        "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}},
        "type": "object",
        "required": ["a", "n"],
        "additionalProperties": False,
        "properties": {
            "a": {"type": "string", "pattern": "^[a-z]{1,8}$", "maxLength": 8},
            "n": {"$ref": "#/$defs/node"},
            "b": {"type": "array", "items": {"type": "number", "minimum": 0, "multipleOf": 0.5}, "minItems": 1, "maxItems": 4},
            "c": {"enum": ["x", 1, None]},
            "d": {"oneOf": [{"const": 1}, {"type": "string", "format": "date-time"}]},
            "e": {"type": ["integer", "null"]},
        },
    }
    lark = 'start: item ("," item)*\nitem: /[a-z]+/ | "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/\n'
    gbnf = 'root ::= "a" item* | [^x-z]+\nitem ::= "b"{2,5} (root | "\\x41")?\n'
    kinds = [
        ("json_schema", json.dumps(schema)),
        ("regex", r"(?i:a+|b{2,5})[^\d\s]*\.(com|org)?"),
        ("choice", json.dumps(["yes", "no", "é"])),
        ("grammar", lark),
        ("grammar", gbnf),
    ]
    return [as_json({"kind": kind, "value": value, "is_strict": True}) for kind, value in kinds]


def mutate_constraint(random: Any, samples: Sequence[Sample]) -> bytes:
    """The value in its own language."""
    given = json.loads(b"".join(random.choice(samples)))
    mutate = mutate_json if given["kind"] in ("json_schema", "choice") else mutate_text
    given["value"] = mutate(random, [(given["value"].encode(),)]).decode("utf-8", "replace")[:20_000]
    given["is_strict"] = random.random() < 0.5
    return json.dumps(given).encode()


@cache
def _vocabulary() -> Any:
    from windlass.model.text.grammar.compile import grammar_tokenizer

    return grammar_tokenizer(json.dumps(made.tokenizer_json()), [257])


def read_grammar(data: bytes, folder: Path) -> None:
    from windlass.core.request.constraint import Constraint
    from windlass.model.text.grammar.tool_grammar import OutputSpec, answer_grammar
    from windlass.model.text.isolated.jobs import Compilation, done

    constraint = Constraint(**json.loads(data))
    grammar = answer_grammar(OutputSpec(style="tags", constraint=constraint), {"<think>": 258, "</think>": 259})
    answer = done(Compilation(grammar=grammar), _vocabulary())
    if answer.is_foreign:
        raise AssertionError(answer.error)
    if answer.error:
        raise BadInput(answer.error)


def _answer_samples(folder: Path) -> list[Sample]:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"items": {"enum": [1, 2]}}},
        "$defs": {"x": {"type": "integer", "minimum": 3}},
    }
    return [
        as_json([{"a": 4, "b": [1, 2]}, schema]),
        as_json(
            [
                [1, 2, "x"],
                {
                    "minItems": 2,
                    "items": {"enum": [1, 2.0, "x"], "required": ["a"]},
                    "uniqueItems": True,
                    "contains": {"const": 1},
                },
            ]
        ),
        as_json(
            [{"a": 1}, {"dependentRequired": {"a": ["b"]}, "additionalProperties": {"type": ["string", "null"]}, "pattern": "^a"}]
        ),
        as_json([{"a": "x"}, {"anyOf": [{"required": ["a"]}, False], "maxProperties": 2, "not": {"const": 3}}]),
    ]


def read_answer(data: bytes, folder: Path) -> None:
    """An answer compared with the client's schema."""
    from windlass.model.text.grammar.check import check_answer
    from windlass.model.text.grammar.schema import enforceable

    try:
        value, schema = json.loads(data)[:2]
        text = json.dumps(value)
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    check_answer(text, schema)
    enforceable(schema)


# --- tool calls and reasoning, as a model writes them

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": ["integer", "null"]}, "any": {"anyOf": [{"type": "boolean"}, {"type": "object"}]}}}}},
    {"name": "odd", "parameters": {"properties": {"x": {"type": 3}}}},
]  # fmt: skip
ANSWERS = (
    '<think>\nhm</think>\n\nSure.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call> done',
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=any>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>',
    '[THINK]x[/THINK][TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "\\u00e9"}, "id": "abcdefghi"}]',
    '[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Oslo"}[TOOL_CALLS]odd[ARGS]{}',
    '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo", "x": {"y": [1, "}"]}}}',
    '<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": 1}<|call|>'
    "<|start|>assistant<|channel|>final<|message|>hi<|return|>",
)


def read_answer_text(data: bytes, folder: Path) -> None:
    """Every style, in pieces."""
    from windlass.model.text.parse import stream
    from windlass.model.text.parse.styles import PLAIN, STYLES

    text = data.decode("utf-8", "replace")
    step = 1 + len(text) // 60
    for style in STYLES:
        if style == PLAIN:
            continue
        splitter = stream._splitter(style, len(text) % 2 == 1, TOOLS, False, len(text) % 3 == 0)
        assert splitter is not None
        parts = [splitter.push(text[at : at + step]) for at in range(0, len(text), step)]
        for reasoning, content, calls in [*parts, splitter.finish()]:
            (reasoning + content + "".join(call.name + call.arguments for call in calls)).encode()  # it can be sent
        splitter.take_pieces()


READERS: dict[str, Reader] = {
    "config": Reader(_config_samples, read_config, mutate_json),
    "tokenizer-json": Reader(lambda folder: [as_json(made.tokenizer_json())], read_tokenizer, mutate_json, may_exhaust=True),
    "tokenizer-config": _text_reader("tokenizer_config.json", lambda: made.TOKENIZER_CONFIG),
    "generation-config": _text_reader("generation_config.json", lambda: made.GENERATION_CONFIG),
    "gguf-vocabulary": Reader(_gguf_vocabulary_samples, read_gguf_vocabulary, mutate_json),
    "dllama-tokenizer": Reader(_dllama_tokenizer_samples, read_dllama_tokenizer),
    "tokenizer-converted": Reader(lambda folder: [as_json(made.tokenizer_json())], read_for_conversion, mutate_json),
    "chat-template": Reader(
        lambda folder: [(text.encode(),) for text in TEMPLATES], read_template, mutate_text, may_exhaust=True
    ),
    "grammar": Reader(_grammar_samples, read_grammar, mutate_constraint, may_exhaust=True),
    "schema-answer": Reader(_answer_samples, read_answer, mutate_grown, seconds=2.0),
    "tool-calls": Reader(lambda folder: [(text.encode(),) for text in ANSWERS], read_answer_text, mutate_text),
}
