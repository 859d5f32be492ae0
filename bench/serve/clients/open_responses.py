"""The Responses API against the Open Responses specification: `python bench/serve/clients/open_responses.py URL [MODEL]`.

Needs the package openresponses-types, pydantic models made from the specification's OpenAPI file. The cases are those of the project's
compliance suite, which is a web application and on no package index: a text, a stream, a system message, a tool call, a tool call
streamed, an image, a chat of several turns. Every response and every event is validated, and beyond the suite the order of events. A model
that takes no images must refuse one by name. Tools are required here, since the models at hand seldom call one by themselves.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openresponses_types as spec
from pydantic import BaseModel, ValidationError

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place now",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
ENDINGS = ("response.completed", "response.incomplete", "response.failed")


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


WEATHER = {"input": [message("user", "How is the weather in San Francisco?")], "tools": [TOOL], "tool_choice": "required"}
TALK = [
    message("user", "My name is Alice."),
    message("assistant", "Hello Alice! How can I help?"),
    message("user", "What is my name?"),
]
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"input": [message("user", "Say hello in three words.")]}, "message"),
    "stream": ({"input": [message("user", "Count from 1 to 5.")], "stream": True}, "message"),
    "system message": ({"input": [message("system", "You are a pirate."), message("user", "Say hello.")]}, "message"),
    "tool call": (WEATHER, "function_call"),
    "tool call, streamed": ({**WEATHER, "stream": True}, "function_call"),
    "several turns": ({"input": TALK}, "message"),
}
IMAGE = [message("user", [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": PIXEL}])]


def event_models() -> dict[str, type[BaseModel]]:
    """By the type that an event has."""
    found: dict[str, type[BaseModel]] = {}
    for kind in vars(spec).values():
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__name__.endswith("StreamingEvent"):
            words = re.search(r"`([a-z_.]+)`", kind.model_fields["type"].description or "")
            if words is not None:
                found[words[1]] = kind
    return found


def events(text: str) -> Iterator[dict[str, Any]]:
    """Every event has its type as its name too, and the stream ends as it should."""
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks[-1] == "data: [DONE]", f"a stream ends with {blocks[-1][:80]!r}"
    for block in blocks[:-1]:
        name, data = (line.partition(": ")[2] for line in block.split("\n"))
        found = json.loads(data)
        assert found["type"] == name, f"an event named {name} is {found['type']}"
        yield found


def check_order(found: list[dict[str, Any]]) -> None:
    kinds = [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found))), "sequence numbers"
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] in ENDINGS, f"{kinds[:2]} ... {kinds[-1]}"
    is_open: dict[int, list[str]] = {}
    for event in found[2:-1]:
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(is_open), "items are numbered in order"
            is_open[index] = [kind]
            continue
        assert index in is_open and is_open[index][-1] != "response.output_item.done", f"{kind} outside of its item"
        is_open[index].append(kind)
    for index, steps in is_open.items():
        assert steps[-1] == "response.output_item.done", f"item {index} ends with {steps[-1]}"
        for first, then in (
            ("content_part.added", "content_part.done"),
            ("arguments.delta", "arguments.done"),
            ("text.delta", "text.done"),
        ):
            places = [[place for place, step in enumerate(steps) if step.endswith(word)] for word in (first, then)]
            assert not places[0] or (len(places[1]) >= 1 and max(places[0]) < max(places[1])), f"{first} without {then}"


def check(answer: httpx.Response, stream: bool, wanted: str) -> str:
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:300]}"
    if not stream:
        body, count = answer.json(), ""
    else:
        models, found = event_models(), list(events(answer.text))
        for event in found:
            models[event["type"]].model_validate(event)
        check_order(found)
        body, count = found[-1]["response"], f", {len(found)} events"
        deltas = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
        whole = "".join(
            part["text"] for item in body["output"] for part in item.get("content") or () if part["type"] == "output_text"
        )
        assert deltas == whole, "the deltas are not the text"
    spec.ResponseResource.model_validate(body)
    assert body["status"] == "completed", f"status {body['status']}"
    assert any(item["type"] == wanted for item in body["output"]), (
        f"no {wanted} among {[item['type'] for item in body['output']]}"
    )
    return f"{body['usage']['output_tokens']} tokens{count}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model", nargs="?", default="")
    given = parser.parse_args()
    failed = 0
    with httpx.Client(timeout=300) as http:
        for name, (body, wanted) in CASES.items():
            sent = {"temperature": 0, **body, **({"model": given.model} if given.model else {})}
            try:
                found = check(http.post(f"{given.url}/v1/responses", json=sent), bool(body.get("stream")), wanted)
            except (AssertionError, ValidationError, KeyError, ValueError) as error:
                failed += 1
                print(f"FAILED {name}: {error}")
            else:
                print(f"passed {name}: {found}")
        answer = http.post(f"{given.url}/v1/responses", json={"input": IMAGE})
        is_refused = answer.status_code == 400 and "input[0].content[1]" in answer.json()["error"]["param"]
        print(f"{'refused by name' if is_refused else 'FAILED'} image: {answer.json().get('error', {}).get('message')}")
    print(
        f"{len(CASES) - failed} of {len(CASES)} passed, openresponses-types {spec.__version__}, specification {spec.__spec_version__}"
    )
    return 1 if failed or not is_refused else 0


if __name__ == "__main__":
    sys.exit(main())
