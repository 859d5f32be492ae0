"""Grammars of calls and answers in every style, walked at random over a vocabulary of bytes: whatever they allow is read back as asked."""

from __future__ import annotations

import json
import os
import random
import threading
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.cpu

pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from byte_vocab import TEXTUAL, Vocab, allowed  # noqa: E402

from waiting import HUNG_SECONDS  # noqa: E402
from windlass.core.client import Busy  # noqa: E402
from windlass.core.request import Constraint  # noqa: E402
from windlass.errors import BadInput, MissingExtra  # noqa: E402
from windlass.model.text.grammar.call_forms import CALLS  # noqa: E402
from windlass.model.text.grammar.tool_grammar import OutputSpec, answer_grammar  # noqa: E402
from windlass.model.text.parse.stream import TextStream  # noqa: E402
from windlass.model.text.parse.styles import style_marks  # noqa: E402
from windlass.runtime.engine.protocol import TokenizerData  # noqa: E402
from windlass.runtime.engine.sample import grammar as grammars  # noqa: E402
from windlass.runtime.engine.sample.grammar import GrammarCompiler, GrammarMatcher, num_words  # noqa: E402
from windlass.runtime.machine.memory import ProcessMemory  # noqa: E402

DEFINED = {"level": {"type": "integer", "minimum": 0, "maximum": 9}}
PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"enum": ["Oslo", 'the "Horn"', "a, b"]},
        "days": {"$ref": "#/$defs/level"},
        "sure": {"type": "boolean"},
        "range": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 3}, "minItems": 1, "maxItems": 2},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": DEFINED,
}
TOOLS: tuple[dict[str, Any], ...] = (
    {"type": "function", "function": {"name": "forecast", "description": "The weather", "parameters": PARAMETERS}},
    {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
)
SCHEMAS = {"forecast": PARAMETERS, "now": TOOLS[1]["parameters"]}


def walked(vocab: Vocab, guide: GrammarMatcher, chance: random.Random, longest: int = 600) -> list[int]:
    """Tokens drawn at random of those that may come; the end where it may."""
    tokens: list[int] = []
    row = np.zeros(num_words(vocab.tokenizer.vocab_size), np.uint32)
    while not guide.is_complete and len(tokens) < longest:
        guide.fill(row)
        assert not guide.error
        choices = allowed(row)
        if vocab.end in choices and chance.random() < 0.7:
            return tokens
        tokens.append(chance.choice([token for token in choices if token != vocab.end]))
        guide.advance(tokens[-1])
    assert len(tokens) < longest
    return tokens


VOCABS = {style: (TEXTUAL, Vocab(*style_marks(style))) for style in CALLS}


@pytest.mark.parametrize("choice", ["required", "forecast", "now"])
@pytest.mark.parametrize("style", CALLS)
def test_whatever_is_allowed_is_a_call_as_asked(style: str, choice: str) -> None:
    """Where the marks are special tokens, and where they are text like any other."""
    chance = random.Random(f"{style} {choice}")
    asked = OutputSpec(style=style, tools=TOOLS, tool_choice=choice)
    for vocab in VOCABS[style]:
        for _ in range(6):
            tokens = walked_without_thoughts(vocab, asked, chance)
            stream = TextStream(vocab.tokenizer, style=style, tools=TOOLS)
            pieces = [stream.push([token]) for token in tokens] + [stream.finish()]
            calls = [call for piece in pieces for call in piece.tool_calls]
            assert "".join(piece.content for piece in pieces).strip() == "", vocab.tokenizer.decode(tokens, skip_special=False)
            assert calls
            assert len(calls) == 1 or choice == "required"
            for call in calls:
                assert choice in ("required", call.name)
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def walked_without_thoughts(vocab: Vocab, asked: OutputSpec, chance: random.Random) -> list[int]:
    """Of channels, reasoning is any text and has no end when it is drawn at random: the first bytes of a call are given."""
    guide = vocab.guide(asked)
    given = vocab.tokenizer.encode("<|channel|>commentary to", special=False) if asked.style == "channels" else []
    for token in given:
        guide.advance(token)
    return [*given, *walked(vocab, guide, chance)]


STRINGS = (
    {
        "name": "say",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["text"],
        },
    },
)
PAIRS = "<arg_key>text</arg_key>\n<arg_value>a </b>\n</arg_value>\n<arg_key>times</arg_key>\n<arg_value>2</arg_value>"
TAGGED = "<parameter=text>\na </b>\n\n</parameter>\n<parameter=times>\n2\n</parameter>"
WRITTEN = {
    "json": '<tool_call>\n{"name": "say", "arguments": {"text": "a </b>\\n", "times": 2}}\n</tool_call>',
    "arg_pairs": f"<tool_call>say\n{PAIRS}\n</tool_call>",
    "xml_function": f"<tool_call>\n<function=say>\n{TAGGED}\n</function>\n</tool_call>",
    "bracket_list": '[TOOL_CALLS] [{"name": "say", "arguments": {"text": "a </b>\\n", "times": 2}}]',
    "bracket_args": '[TOOL_CALLS]say[ARGS]{"text": "a </b>\\n", "times": 2}',
    "bare_json": '{"name": "say", "parameters": {"text": "a </b>\\n", "times": 2}}',
    "channels": '<|channel|>commentary to=functions.say <|constrain|>json<|message|>{"text": "a </b>\\n", "times": 2}',
}


@pytest.mark.parametrize("style", CALLS)
def test_what_the_model_was_taught_to_write_is_allowed(style: str) -> None:
    asked = OutputSpec(style=style, tools=STRINGS, tool_choice="say")
    for vocab in VOCABS[style]:
        assert vocab.accepts(asked, WRITTEN[style])
        assert not vocab.accepts(asked, WRITTEN[style].replace("say", "sing"))
        assert not vocab.accepts(asked, "Let me think.")
        assert not vocab.accepts(asked, WRITTEN[style].replace("2", "two"))
        stream = TextStream(vocab.tokenizer, style=style, tools=STRINGS)
        tokens = vocab.tokenizer.encode(WRITTEN[style], special=False)
        calls = (*stream.push(tokens).tool_calls, *stream.finish().tool_calls)
        assert [json.loads(call.arguments) for call in calls] == [{"text": "a </b>\n", "times": 2}]


THOUGHTS = {
    "json": "<think>well\n</think>\n\n",
    "arg_pairs": "\n<think>well</think>\n",
    "bracket_args": "[THINK]well[/THINK]",
    "channels": "<|channel|>analysis<|message|>well<|end|><|start|>assistant",
}


@pytest.mark.parametrize("style", THOUGHTS)
def test_reasoning_comes_before_and_is_free(style: str) -> None:
    final = "<|channel|>final<|message|>" if style == "channels" else ""
    constraint = Constraint(kind="choice", value='["yes", "no"]')
    for vocab in VOCABS[style]:
        first = OutputSpec(style=style, constraint=constraint, reasons="first")
        assert vocab.accepts(first, f"{THOUGHTS[style]}{final}yes")
        assert vocab.accepts(first, f"{final}no")
        assert not vocab.accepts(first, f"{THOUGHTS[style]}{final}maybe")
        calling = OutputSpec(style=style, tools=STRINGS, tool_choice="required", reasons="first")
        assert vocab.accepts(calling, THOUGHTS[style] + WRITTEN[style])
        if style == "channels":
            continue
        already = OutputSpec(style=style, constraint=constraint, reasons="already")
        assert vocab.accepts(already, THOUGHTS[style].lstrip().split("k>" if style != "bracket_args" else "K]", 1)[1] + "yes")
        assert not vocab.accepts(already, "yes")
        assert not vocab.accepts(OutputSpec(style=style, constraint=constraint), THOUGHTS[style] + "yes")


@pytest.mark.parametrize("style", CALLS)
def test_with_a_constraint_and_tools_the_model_may_do_either(style: str) -> None:
    asked = OutputSpec(style=style, tools=STRINGS, constraint=Constraint(kind="json_schema", value='{"type": "object"}'))
    final = "<|channel|>final<|message|>" if style == "channels" else ""
    for vocab in VOCABS[style]:
        assert vocab.accepts(asked, WRITTEN[style])
        assert vocab.accepts(asked, final + '{"anything": [1]}')
        assert not vocab.accepts(asked, final + "anything")


@pytest.mark.parametrize("style", CALLS)
def test_strict_tools_are_called_as_they_should_be_or_not_at_all(style: str) -> None:
    """Nobody makes the model call, but what begins as a call must be one."""
    tool = {"type": "function", "function": {**STRINGS[0], "strict": True}}
    asked = OutputSpec(style=style, tools=(tool,))
    final = "<|channel|>final<|message|>" if style == "channels" else ""
    words = "Well: a < b, [TOOL and <tool. " if style not in ("bare_json", "channels") else ""
    for vocab in VOCABS[style]:
        assert vocab.accepts(asked, final + "Nothing to do.\n\n {1}")
        assert vocab.accepts(asked, words + WRITTEN[style])
        assert not vocab.accepts(asked, words + WRITTEN[style].replace("say", "sing"))
        assert not vocab.accepts(asked, words + WRITTEN[style].replace("2", "two"))
        assert not vocab.accepts(asked, words + WRITTEN[style][:-2])
    lax = {"type": "function", "function": STRINGS[0]}
    assert answer_grammar(OutputSpec(style=style, tools=(lax,)), {}) == ""
    assert answer_grammar(OutputSpec(style=style, tools=(tool,), tool_choice="none"), {}) == ""


def test_words_before_and_between_strict_calls() -> None:
    tool = {**STRINGS[0], "strict": True}
    for style in ("json", "arg_pairs", "xml_function", "bracket_args", "bracket_list"):
        for vocab in VOCABS[style]:
            text = f"First. {WRITTEN[style]}\nThen {WRITTEN[style]} done"
            assert vocab.accepts(OutputSpec(style=style, tools=(tool,)), text)
            stream = TextStream(vocab.tokenizer, style=style, tools=(tool,))
            piece = stream.push(vocab.tokenizer.encode(text, special=False))
            assert len(piece.tool_calls) == 2


def test_a_style_without_calls_cannot_be_made_to_call() -> None:
    for style in ("plain", "tags"):
        with pytest.raises(BadInput, match="tool_choice is 'required', but the tool call format"):
            answer_grammar(OutputSpec(style=style, tools=TOOLS, tool_choice="required"), {})
        constraint = Constraint(kind="choice", value='["a"]')
        assert TEXTUAL.accepts(OutputSpec(style=style, tools=TOOLS, constraint=constraint), "a")


def test_nothing_asked_is_no_grammar() -> None:
    for choice in ("auto", "none"):
        assert answer_grammar(OutputSpec(style="json", tools=TOOLS, tool_choice=choice), {}) == ""


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        ("a/b", "a/b"),
        (r"a\/b", "a/b"),
        ("a\nb", "a\nb"),
        (r"a\nb", "a\nb"),
        (r"\\/", "\\/"),
        ("[/]{2}", "//"),
        (r"\d+\.", "12."),
        ("ö+", "öö"),
    ],
)
def test_regular_expressions_keep_their_meaning(regex: str, text: str) -> None:
    asked = OutputSpec(style="plain", constraint=Constraint(kind="regex", value=regex))
    assert TEXTUAL.accepts(asked, text)
    assert not TEXTUAL.accepts(asked, text + "!")


def test_stops_are_the_requests_own() -> None:
    """Not where the grammar wants more, and not the tokenizer's where the request has others or none."""
    asked = OutputSpec(style="plain", constraint=Constraint(kind="regex", value="ab?"))
    row = np.zeros(num_words(TEXTUAL.tokenizer.vocab_size) + 3, np.uint32)
    (a,), (b,), (c,) = (TEXTUAL.tokenizer.encode(text, special=False) for text in "abc")
    for stops, after in (((TEXTUAL.end,), {b, TEXTUAL.end}), ((), {b}), ((c,), {b, c}), ((b,), {b})):
        guide = TEXTUAL.guide(asked, stops)
        guide.fill(row)
        assert allowed(row) == [a]
        guide.advance(a)
        guide.fill(row)
        assert set(allowed(row)) == after


def test_a_stop_that_the_grammar_cannot_do_without_is_an_error() -> None:
    (a,) = TEXTUAL.tokenizer.encode("a", special=False)
    guide = TEXTUAL.guide(OutputSpec(style="plain", constraint=Constraint(kind="regex", value="ab?")), (a,))
    row = np.zeros(num_words(TEXTUAL.tokenizer.vocab_size), np.uint32)
    guide.fill(row)
    assert "no token of this model matches" in guide.error


def test_a_grammar_out_of_control_ends_its_request_only() -> None:
    """No token is a byte that this grammar needs, so nothing can follow."""
    special = Vocab("<|only|>")
    number = special.tokenizer.token_id("<|only|>")
    guide = special.guides.matcher(
        json.dumps({"grammars": [{"lark_grammar": f"start: <[{number}]> <[{number}]>\n"}]}), [special.end]
    )
    row = np.zeros(num_words(special.tokenizer.vocab_size), np.uint32)
    guide.fill(row)
    assert allowed(row) == [number]
    guide.advance(17)
    guide.fill(row)
    assert guide.error
    assert not row.any()


def test_without_a_vocabulary_or_the_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="needs the model's tokenizer"):
        GrammarCompiler().matcher("{}", [])
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    guides = GrammarCompiler()
    guides.set_tokenizer(TokenizerData(TEXTUAL.tokenizer.backend.to_str(), [TEXTUAL.end]))
    with pytest.raises(MissingExtra, match=r"constrained output needs llguidance.*pip install 'windlass-llm\[serve\]'"):
        guides.matcher("{}", [])


def test_a_tokenizer_that_cannot_be_used_is_refused() -> None:
    guides = GrammarCompiler()
    guides.set_tokenizer(TokenizerData("{}", []))
    with pytest.raises(BadInput, match="constrained output is not available"):
        guides.matcher("{}", [])


# --- many that are compiled ------------------------------------------------------------------------------------------


def words_grammar(number: int, count: int = 4000) -> str:
    given = " | ".join(f'"w{number}x{place}"' for place in range(count))
    return answer_grammar(OutputSpec(style="plain", constraint=Constraint(kind="grammar", value=f"start: {given}\n")), {})


def taught() -> GrammarCompiler:
    guides = GrammarCompiler()
    guides.set_tokenizer(TokenizerData(TEXTUAL.tokenizer.backend.to_str(), [TEXTUAL.end]))
    return guides


def test_what_nobody_waits_for_is_not_compiled() -> None:
    guides = taught()
    given_up = [words_grammar(number) for number in range(8)]
    futures = [guides.compile(grammar) for grammar in given_up]
    shared = guides.compile(given_up[7])
    for grammar in given_up:
        guides.release(grammar)
    wanted = guides.compile(words_grammar(99))
    assert shared is futures[7]
    assert not shared.cancelled(), "one still waits for it"
    assert wanted.result(30)
    assert [future.cancelled() for future in futures[1:]] == [True] * 6 + [False]
    assert guides.compile(given_up[3]).result(30), "it can be asked for again"
    guides.close()


def test_what_takes_long_to_compile_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a thread of its own, which runs when nobody else wants the CPU."""
    go_on, policies = threading.Event(), dict[str, int]()
    compiled = GrammarCompiler._compile

    def held(guides: GrammarCompiler, grammar: str) -> Any:
        policies[grammar] = os.sched_getscheduler(0)  # of this thread
        assert grammar != slow or go_on.wait(HUNG_SECONDS), "hung"
        return compiled(guides, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", held)
    guides, slow, quick = taught(), words_grammar(1), words_grammar(2)
    first = guides.compile(slow, is_slow=True)
    assert guides.compile(quick).result(HUNG_SECONDS) and not first.done()
    go_on.set()
    assert first.result(HUNG_SECONDS)
    assert policies == {slow: os.SCHED_IDLE, quick: os.sched_getscheduler(os.getpid())}
    guides.close()


def test_more_than_can_be_compiled_soon_is_put_off() -> None:
    guides = taught()
    large = [words_grammar(number, 15_000) for number in range(5)]
    accepted: list[str] = []
    with pytest.raises(Busy, match="retry in a moment"):
        for grammar in large:
            guides.compile(grammar)
            accepted.append(grammar)
    assert accepted
    for grammar in accepted:
        guides.release(grammar)
    assert guides.compile(large[-1]).result(30), "there is room again"
    guides.close()


def test_small_grammars_are_kept_but_not_forever() -> None:
    guides = taught()
    futures = [guides.compile(words_grammar(number, 3)) for number in range(100)]
    assert all(future.result(30) for future in futures)
    guides.compile(words_grammar(100, 3)).result(30)
    assert guides.compile(words_grammar(99, 3)) is futures[99]
    assert guides.compile(words_grammar(0, 3)) is not futures[0]
    guides.close()


def test_large_grammars_are_kept_as_long_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter(number * 50 * 2**20 for number in range(1000))
    monkeypatch.setattr(grammars, "process_memory", lambda: ProcessMemory(anonymous_bytes=next(taken)))
    guides = taught()
    futures = [guides.compile(words_grammar(number, 3)) for number in range(4)]
    assert [future.result(30).size_bytes for future in futures] == [50 * 2**20] * 4
    guides.compile(words_grammar(4, 3)).result(30)
    assert guides.compile(words_grammar(3, 3)) is futures[3] and guides.compile(words_grammar(2, 3)) is futures[2]
    assert guides.compile(words_grammar(1, 3)) is not futures[1]
    guides.close()


def test_a_grammar_whose_masks_take_too_long_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(number * 0.01 for number in range(1000))
    for name in ("thread_time", "perf_counter"):
        monkeypatch.setattr(grammars.time, name, lambda: next(clock))
    guide = TEXTUAL.guides.matcher(json.dumps({"grammars": [{"lark_grammar": 'start: x\nx: x x | "a"'}]}), [TEXTUAL.end])
    row = np.zeros(num_words(TEXTUAL.tokenizer.vocab_size), np.uint32)
    [token] = TEXTUAL.tokenizer.encode("a")
    num_masks = 0
    while not guide.error:
        guide.fill(row)
        guide.advance(token)
        num_masks += 1
    assert "too long" in guide.error and not row.any()
    assert num_masks == 14, "one is seen to be slow; then 0.1 s and 2 ms for each, at 10 ms"


def test_a_grammar_that_would_take_seconds_is_refused() -> None:
    with pytest.raises(BadInput, match="too big") as found:
        TEXTUAL.guides.matcher(words_grammar(0, 32_000), ())
    assert found.value.field == "constraint"
