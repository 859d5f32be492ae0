"""Answers that must follow a grammar, from a real model with a real vocabulary: whatever is asked for, the answer is of that form."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu

pytest.importorskip("torch")
pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

from hanging import finished  # noqa: E402
from in_process import InProcessClient  # noqa: E402

from waiting import HUNG_SECONDS  # noqa: E402
from windlass.core.client import Busy  # noqa: E402
from windlass.core.launch import Launch  # noqa: E402
from windlass.core.request import GREEDY, Constraint, Delta, Request, Sampling  # noqa: E402
from windlass.errors import BadInput  # noqa: E402
from windlass.open.resolve import model_files  # noqa: E402
from windlass.runtime.engine.client.client import open_client  # noqa: E402
from windlass.runtime.engine.client.text_processor import TextProcessor  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.engine.sample.grammar import GrammarCompiler  # noqa: E402
from windlass.runtime.weights.text.files import model_text  # noqa: E402

NUM_SCHEMAS = 24
QUESTION = ({"role": "user", "content": "Tell me about a ship."},)
SAMPLED = Sampling(temperature=0.8, seed=7)


class Running:
    """A client and the event loop it belongs to."""

    def __init__(self, path: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.text_of_model = model_text(path)
        launch = Launch(model=str(path), context_tokens=1024, max_sequences=16, device="cpu")
        self.client = InProcessClient(*load_model(launch), self.text_of_model)

    def all(self, requests: list[Request]) -> list[list[Delta]]:
        async def one(request: Request) -> list[Delta]:
            return [delta async for delta in self.client.generate(request)]

        async def together() -> list[list[Delta]]:
            return list(await asyncio.gather(*map(one, requests)))

        return self.loop.run_until_complete(together())

    def texts(self, requests: list[Request]) -> list[str]:
        return ["".join(delta.content for delta in deltas) for deltas in self.all(requests)]

    def text(self, request: Request) -> str:
        return self.texts([request])[0]

    def close(self) -> None:
        self.loop.run_until_complete(self.client.close())
        self.loop.close()


@pytest.fixture(scope="module")
def running(smollm2: Path) -> Iterator[Running]:
    found = Running(smollm2)
    yield found
    found.close()


def asked(kind: Any, value: str = "", sampling: Sampling = GREEDY, **changes: Any) -> Request:
    given: dict[str, Any] = {"messages": QUESTION, "max_tokens": 400} | changes
    return Request(constraint=Constraint(kind=kind, value=value), sampling=sampling, **given)


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """Everything bounded, so that an answer is whole before its tokens are used up."""
    kinds = ["string", "integer", "number", "boolean", "enum", "null", "union"]
    kind = chance.choice(kinds + ["object", "array"] * (2 if depth < 2 else 0)) if depth else "object"
    match kind:
        case "string":
            return {"type": "string", "maxLength": chance.randint(0, 12)}
        case "integer":
            return {"type": "integer", "minimum": chance.randint(-50, 0), "maximum": chance.randint(1, 5000)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": 10, "multipleOf": 0.5}
        case "enum":
            return {"enum": chance.sample(["red", "näve", 'quo"te', 1, None, True, [1, 2]], chance.randint(1, 4))}
        case "union":
            return {"anyOf": [random_schema(chance, 9), random_schema(chance, 9)]}
        case "array":
            low = chance.randint(0, 2)
            return {"type": "array", "items": random_schema(chance, depth + 1), "minItems": low, "maxItems": low + 1}
        case "object":
            names = chance.sample(["name", "a b", "größe", "x-1", "list", "ok"], chance.randint(1, 3))
            properties = {name: random_schema(chance, depth + 1) for name in names}
            required = [name for name in names if chance.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case _:
            return {"type": kind}


def test_random_schemas_are_kept(running: Running) -> None:
    """Some of the sampling settings that could bring back what a grammar has ruled out, and all at once."""
    chance = random.Random(3)
    schemas = [random_schema(chance) for _ in range(NUM_SCHEMAS)]
    ways = [
        GREEDY,
        SAMPLED,
        Sampling(temperature=1.5, top_k=5, seed=1),
        Sampling(temperature=1.0, top_p=0.5, min_p=0.01, seed=2),
        Sampling(temperature=0.0, repetition_penalty=1.5, logit_bias={17: 100.0}),
        Sampling(temperature=1.0, frequency_penalty=1.0, presence_penalty=1.0, logit_bias={2: 100.0}, seed=3),
    ]
    requests = [asked("json_schema", json.dumps(schema), ways[i % len(ways)]) for i, schema in enumerate(schemas)]
    answers = running.all(requests)
    for schema, deltas in zip(schemas, answers, strict=True):
        text = "".join(delta.content for delta in deltas)
        assert deltas[-1].finish_reason == "stop", (schema, text)
        jsonschema.validate(json.loads(text), schema)


def test_seeds_reproduce_alone_and_in_a_batch(running: Running) -> None:
    request = asked("json_schema", '{"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4}', SAMPLED)
    free = Request(messages=QUESTION, sampling=GREEDY, max_tokens=15)
    alone = running.text(request)
    assert running.texts([free, request, free, request])[1::2] == [alone, alone]


def test_the_other_kinds(running: Running) -> None:
    found = running.texts(
        [
            asked("json_object", max_tokens=60, sampling=SAMPLED),
            asked("regex", r"[A-Z][a-z]{2,8}/[0-9]{4}\n", SAMPLED),
            asked("choice", '["yes", "no", "per\\"haps"]'),
            asked("grammar", 'start: PART ("-" PART)~2\nPART: /[abc]{2}/\n'),
            asked("regex", r"\d{3} \w+", messages=None, prompt="The number is", max_tokens=20),
        ]
    )
    assert re.fullmatch(r"[A-Z][a-z]{2,8}/[0-9]{4}\n", found[1])
    assert found[2] in ("yes", "no", 'per"haps')
    assert re.fullmatch(r"[abc]{2}(-[abc]{2}){2}", found[3])
    assert re.match(r"\d{3} \w+", found[4])
    assert found[0].startswith("{")


def test_a_stop_waits_for_the_grammar(running: Running) -> None:
    """`,` is asked to stop the answer, and may only where the answer is whole."""
    comma = model_text_ids(running, ",")
    digits = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = json.dumps(
        {"type": "object", "properties": {"a": digits, "b": digits}, "required": ["a", "b"], "additionalProperties": False}
    )
    bias = Sampling(temperature=0.0, logit_bias={comma[0]: 50.0})
    (deltas,) = running.all([asked("json_schema", schema, bias, stop_token_ids=tuple(comma), max_tokens=100)])
    assert json.loads("".join(delta.content for delta in deltas)).keys() >= {"a", "b"}


def model_text_ids(running: Running, text: str) -> list[int]:
    return running.loop.run_until_complete(running.client.tokenize(text))


def test_an_answer_ends_with_its_grammar_even_where_nothing_stops_it(running: Running) -> None:
    (deltas,) = running.all([asked("choice", '["blue"]', ignore_eos=True)])
    assert "".join(delta.content for delta in deltas) == "blue"
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_token_id is None


def test_an_answer_that_is_cut_off_says_so(running: Running) -> None:
    (deltas,) = running.all([asked("regex", "[a-z]{500}", max_tokens=5)])
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("regex", "(unclosed", "the constraint cannot be compiled: .*unclosed group"),
        ("grammar", "begin: /a/", "the constraint cannot be compiled: .*no start rule"),
        ("json_schema", '{"type": "strin"}', "the constraint cannot be compiled: .*strin"),
        ("json_schema", '{"not": {"type": "string"}}', "the strict JSON schema has not, which cannot be enforced"),
        ("json_schema", "false", "no output can match"),
    ],
)
def test_what_does_not_compile_is_refused_and_the_engine_goes_on(running: Running, kind: Any, value: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        running.text(asked(kind, value))
    assert "\n" not in str(caught.value)
    assert running.text(asked("choice", '["still here"]')) == "still here"


def test_free_requests_beside_constrained_ones_stay_as_they_are(running: Running) -> None:
    free = Request(messages=QUESTION, sampling=GREEDY, max_tokens=15)
    alone = running.text(free)
    assert running.texts([free, asked("regex", "[0-9]{20}"), free])[::2] == [alone, alone]


def test_logprobs_are_the_models_own(running: Running) -> None:
    """The most likely token is told even where the grammar ruled it out."""
    (deltas,) = running.all([asked("regex", "[0-9]{3}", logprobs=1)])
    first = next(delta.logprobs[0] for delta in deltas if delta.logprobs)
    assert first.rank > 1
    assert first.top[0].token_id != first.token_id


TOOL = {
    "type": "function",
    "function": {
        "name": "book_cabin",
        "description": "Books a cabin on a ship",
        "parameters": {
            "type": "object",
            "properties": {"deck": {"enum": ["upper", "lower"]}, "nights": {"type": "integer", "minimum": 1, "maximum": 30}},
            "required": ["deck", "nights"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "leave", "parameters": {"type": "object", "properties": {}}}}
MARKS = {
    "json": "<tool_call>",
    "arg_pairs": "<tool_call><arg_key>",
    "bracket_args": "[TOOL_CALLS][ARGS]",
    "bare_json": '<|start_header_id|>"parameters"',
}


@pytest.mark.parametrize("style", MARKS)
def test_a_named_tool_is_called_in_the_models_own_form(running: Running, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same small model with templates of several families: the grammar does the rest."""
    template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}\n{% endfor %}"
    text = dataclasses.replace(running.text_of_model, chat_template=template + "{# " + MARKS[style] + " #}")
    monkeypatch.setattr(running.client, "_text_processor", TextProcessor(text))
    asking: dict[str, Any] = {"messages": QUESTION, "sampling": GREEDY, "max_tokens": 120, "tools": (TOOL, OTHER)}
    named, none = running.all(
        [Request(**asking, tool_choice="book_cabin"), Request(**asking | {"max_tokens": 5}, tool_choice="none")]
    )
    (call,) = [call for delta in named for call in delta.tool_calls]
    assert call.name == "book_cabin"
    jsonschema.validate(json.loads(call.arguments), TOOL["function"]["parameters"])  # type: ignore[index]
    assert "".join(delta.content for delta in named) == ""
    assert named[-1].finish_reason == "stop"
    assert not [call for delta in none for call in delta.tool_calls]
    assert none[-1].usage.prompt_tokens < named[-1].usage.prompt_tokens, "tools that may not be called are not shown"  # type: ignore[union-attr]


@pytest.mark.multi
def test_another_process_learns_the_words_and_so_does_the_one_after_it() -> None:
    """They are sent once to each engine: to the one that is started after a crash too. The bundled model: two engines read it."""
    launch = Launch(model=str(model_files("tiny-glm", shown=False)), context_tokens=512, max_sequences=2, device="cpu")

    async def run() -> None:
        client = open_client(launch)
        ports: list[Any] = []
        make = client._requests._make_transport
        client._requests._make_transport = lambda: ports.append(make()) or ports[-1]
        request = asked("choice", '["port", "starboard"]')

        async def ask() -> str:
            return "".join([delta.content async for delta in client.generate(request)])

        first = await ask()
        assert first in ("port", "starboard")
        assert await ask() == first
        with pytest.raises(BadInput, match="unclosed group"):
            await anext(client.generate(asked("regex", "(")))
        os.kill(ports[0].pid, signal.SIGKILL)
        while client.is_alive:
            await asyncio.sleep(0.01)
        assert await ask() == first
        assert len(ports) == 2
        await client.close()

    finished(run())


def test_grammars_that_were_given_up_hold_up_nobody(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty that leave while the first of them is being compiled, and then somebody who stays: none of the others is begun."""
    begun: list[str] = []
    first, go_on = threading.Event(), threading.Event()
    compiling = GrammarCompiler._compile

    def held(guides: GrammarCompiler, grammar: str) -> Any:
        begun.append(grammar)
        first.set()
        assert go_on.wait(HUNG_SECONDS), "hung"
        return compiling(guides, grammar)

    def words(number: int) -> str:
        return "start: " + " | ".join(f'"w{number}x{place}"' for place in range(1000)) + "\n"

    async def answered(request: Request) -> str:
        return "".join([delta.content async for delta in running.client.generate(request)])

    async def run() -> None:
        tasks = [asyncio.create_task(answered(asked("grammar", words(number)))) for number in range(60)]
        await asyncio.to_thread(first.wait, HUNG_SECONDS)
        while not any(task.done() for task in tasks):
            await asyncio.sleep(0.005)
        await running.client.info()  # what was asked before it has arrived
        for task in tasks:
            task.cancel()
        left = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in left} == {asyncio.CancelledError, Busy}
        stays = asyncio.create_task(answered(asked("choice", '["yes", "no"]')))
        await asyncio.sleep(0)
        await running.client.info()
        go_on.set()
        assert await stays in ("yes", "no")

    monkeypatch.setattr(GrammarCompiler, "_compile", held)
    running.loop.run_until_complete(run())
    assert len(begun) == 2
    assert "w" in begun[0] and "yes" in begun[1]


def test_an_answer_that_cannot_follow_its_grammar_blames_the_constraint(running: Running) -> None:
    with pytest.raises(BadInput, match="cannot be compiled") as found:
        running.all([asked("regex", "(")])
    assert found.value.field == "constraint"
