"""Other people's clients against a running server: `python bench/serve/clients/run.py http://127.0.0.1:8000`.

Runs in an environment that has the clients (`make harness` makes one); those that are not installed are skipped. Prints one row per
client with its version and what was called. Exit status 1 if a call fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUESTION = "What is the capital of France?"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": WEATHER}}
KEY = "unused"
TOKENIZER = str(Path(__file__).resolve().parents[3] / "src" / "windlass" / "model" / "bundled" / "tiny-glm")
"""For clients that count tokens themselves and would download one."""
Check = Callable[[str, str], str]
CLIENTS: list[tuple[str, Check]] = []


def client(package: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CLIENTS.append((package, check))
        return check

    return add


@client("openai")
def openai_chat(url: str, model: str) -> str:
    import openai

    api = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    api.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8)
    chunks = list(
        api.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
    )
    assert all(chunk.usage for chunk in chunks)
    answer = api.chat.completions.create(
        model=model, messages=MESSAGES, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=60
    )
    [call] = answer.choices[0].message.tool_calls
    assert "city" in json.loads(call.function.arguments)
    pieces = [
        piece
        for chunk in api.chat.completions.create(
            model=model, messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=60, stream=True
        )
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or ()
    ]
    assert len(pieces) > 2 and pieces[0].function.name == "weather"
    prefilled = [*MESSAGES, {"role": "assistant", "content": "The capital of France is"}]
    assert (
        "Paris"
        in api.chat.completions.create(model=model, messages=prefilled, max_tokens=4, temperature=0).choices[0].message.content
    )
    try:
        api.chat.completions.create(model=model, messages=[{"role": "user", "content": "x " * 20_000}])
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded" and "maximum context length is" in str(error)
    else:
        raise AssertionError("a prompt that does not fit was accepted")
    return "chat, stream with usage in every chunk, one required call, call streamed in pieces, prefill, too long"


@client("openai")
def openai_responses(url: str, model: str) -> str:
    import openai

    api = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    first = api.responses.create(model=model, input=QUESTION, max_output_tokens=12)
    assert first.output_text and first.usage.output_tokens
    second = api.responses.create(model=model, input="And of Spain?", previous_response_id=first.id, max_output_tokens=8)
    assert api.responses.retrieve(second.id).id == second.id
    assert api.responses.input_items.list(second.id).data
    api.responses.delete(second.id)
    with api.responses.stream(model=model, input=QUESTION, max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    called = api.responses.create(model=model, input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=60)
    assert called.output[0].type == "function_call"
    return "responses: create, stored and continued, retrieve, input items, delete, stream helper, function call"


@client("openai")
def openai_parse(url: str, model: str) -> str:
    import openai
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=20)
        large: bool

    api = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    parsed = (
        api.chat.completions.parse(model=model, messages=MESSAGES, response_format=City, max_tokens=60).choices[0].message.parsed
    )
    assert isinstance(parsed, City)
    tags = {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2}},
        "required": ["tags"],
    }
    raw = api.chat.completions.with_raw_response.create(
        model=model,
        messages=MESSAGES,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": tags}},
    )
    assert "uniqueItems" in raw.headers["windlass-unenforced"] and raw.headers["windlass-schema"] in ("valid", "invalid")
    assert raw.headers["x-request-id"]
    return "parse into a pydantic model; a set (uniqueItems) enforced as far as possible, headers"


@client("openai")
def openai_embeddings(url: str, model: str) -> str:
    import openai

    api = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    found = api.embeddings.create(model=model, input=["Paris", "London"])
    short = api.embeddings.create(model=model, input="Paris", dimensions=16, encoding_format="float")
    assert len(found.data) == 2 and abs(sum(value * value for value in found.data[0].embedding) - 1) < 1e-3
    assert len(short.data[0].embedding) == 16
    return "embeddings: several inputs, base64 and float, dimensions"


@client("openai")
def openai_batches(url: str, model: str) -> str:
    import openai

    api = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    body = {"model": model, "messages": MESSAGES, "max_tokens": 4}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    try:
        file = api.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    except openai.NotFoundError:
        return "batches: not run, the server has no --files"
    batch = api.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    until = time.monotonic() + 120
    while batch.status not in ("completed", "failed", "cancelled") and time.monotonic() < until:
        time.sleep(0.2)
        batch = api.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.request_counts.completed == 1
    [answer] = api.files.content(batch.output_file_id).text.splitlines()
    assert json.loads(answer)["response"]["body"]["choices"][0]["message"]["content"]
    assert api.batches.list().data and api.files.list().data and api.files.delete(file.id).deleted
    return "files and batches: upload, create, retrieve, content, list, delete"


@client("anthropic")
def anthropic_messages(url: str, model: str) -> str:
    import anthropic

    api = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
    found = api.messages.create(model=model, max_tokens=8, messages=MESSAGES, system="Be brief.")
    assert found.content[0].text and found.usage.input_tokens
    with api.messages.stream(model=model, max_tokens=8, messages=MESSAGES) as stream:
        assert "".join(stream.text_stream) == stream.get_final_message().content[0].text
    tools = [{"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER}]
    used = api.messages.create(model=model, max_tokens=60, messages=MESSAGES, tools=tools, tool_choice={"type": "any"})
    [block] = [block for block in used.content if block.type == "tool_use"]
    follow = [
        *MESSAGES,
        {"role": "assistant", "content": used.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]},
    ]
    api.messages.create(model=model, max_tokens=8, messages=follow, tools=tools)
    assert api.messages.count_tokens(model=model, messages=MESSAGES, tools=tools).input_tokens > 20
    begun = [*MESSAGES, {"role": "assistant", "content": "The capital of France is"}]
    assert (
        "Paris" in api.messages.create(model=model, max_tokens=4, messages=begun, extra_body={"temperature": 0}).content[0].text
    )
    with contextlib.suppress(anthropic.NotFoundError):
        api.messages.create(model="other", max_tokens=5, messages=MESSAGES)
    return "messages, stream helper, tool use and its result, count_tokens, prefill, errors"


@client("ollama")
def ollama_api(url: str, model: str) -> str:
    import ollama

    api = ollama.Client(host=url)
    options = {"num_predict": 8}
    assert api.chat(model=model, messages=MESSAGES, options=options).message.content
    assert [part.done for part in api.chat(model=model, messages=MESSAGES, stream=True, options=options)][-1]
    assert api.generate(model=model, prompt=QUESTION, options=options).eval_count == 8
    assert api.chat(model=model, messages=MESSAGES, format=WEATHER, options={"num_predict": 60}).message.content.startswith("{")
    api.chat(model=model, messages=MESSAGES, tools=[TOOL], options={"num_predict": 30})
    assert api.list().models[0].model == model and api.show(model).capabilities and api.ps().models
    assert api.pull(model).status == "success"
    assert len(api.embed(model=model, input=["a", "b"]).embeddings) == 2
    return "chat, stream, generate, format, tools, list, show, ps, pull, embed"


@client("litellm")
def litellm_completion(url: str, model: str) -> str:
    import litellm

    litellm.suppress_debug_info = True
    common: dict[str, Any] = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": KEY, "num_retries": 0}
    assert litellm.completion(messages=MESSAGES, max_tokens=8, **common).choices[0].message.content
    assert list(litellm.completion(messages=MESSAGES, max_tokens=8, stream=True, **common))
    answer = litellm.completion(messages=MESSAGES, tools=[TOOL], tool_choice="required", max_tokens=60, **common)
    assert answer.choices[0].message.tool_calls
    marked = [{"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}]}]
    litellm.completion(messages=marked, max_tokens=8, **common)
    try:
        litellm.completion(messages=[{"role": "user", "content": "x " * 20_000}], **common)
    except litellm.ContextWindowExceededError:
        return "completion, stream, tools, cache_control, ContextWindowExceededError"
    raise AssertionError("not recognised as too long")


@client("langchain-openai")
def langchain(url: str, model: str) -> str:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class City(BaseModel, extra="forbid"):
        """A city."""

        name: str = Field(max_length=20)

    chat = ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model=model, max_tokens=100, temperature=0, max_retries=0)
    assert chat.invoke(QUESTION).content
    assert list(chat.stream(QUESTION))
    for method in ("function_calling", "json_schema"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke(QUESTION), City)
    return "invoke, stream, with_structured_output by function calling (parallel_tool_calls: false) and by schema"


@client("llama-index-llms-openai-like")
def llama_index(url: str, model: str) -> str:
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    llm = OpenAILike(
        model=model,
        api_base=f"{url}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=60,
        max_retries=0,
    )
    assert llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content
    assert list(llm.stream_chat([ChatMessage(role="user", content=QUESTION)]))
    found = llm.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg=QUESTION, tool_required=True)
    assert found.message.additional_kwargs.get("tool_calls") or found.message.blocks
    return "chat, stream_chat, chat_with_tools (parallel_tool_calls: false)"


@client("instructor")
def instructor_model(url: str, model: str) -> str:
    import instructor
    import openai
    from pydantic import BaseModel, Field

    class City(BaseModel, extra="forbid"):
        name: str = Field(max_length=20)

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        api = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0), mode=mode)
        found = api.chat.completions.create(
            model=model, messages=MESSAGES, response_model=City, max_tokens=100, temperature=0, max_retries=2
        )
        assert isinstance(found, City)
    return "create with a response_model, by tools and by JSON schema"


@client("openai-agents")
def agents(url: str, model: str) -> str:
    import openai
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    async def run() -> None:
        api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            agent = Agent(
                name="a", instructions="Be brief.", model=kind(model=model, openai_client=api), tools=[weather],
                model_settings=ModelSettings(max_tokens=60, temperature=0, tool_choice="required", parallel_tool_calls=False),
            )  # fmt: skip
            assert (await Runner.run(agent, QUESTION, max_turns=4)).final_output is not None

    asyncio.run(run())
    return "Runner.run with a required tool, over chat completions and over responses"


@client("pydantic-ai-slim")
def pydantic_ai(url: str, model: str) -> str:
    from pydantic import BaseModel, Field
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(BaseModel, extra="forbid"):
        name: str = Field(max_length=20)

    settings: Any = {"max_tokens": 100, "temperature": 0}
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        assert isinstance(
            Agent(kind(model, provider=provider), output_type=City, model_settings=settings, retries=3).run_sync(QUESTION).output,
            City,
        )
    return "an Agent with structured output, over chat completions and over responses"


@client("llm")
def llm_command(url: str, model: str) -> str:
    from llm.default_plugins.openai_models import Chat

    chat = Chat(model, model_name=model, api_base=f"{url}/v1")
    chat.key = KEY
    assert chat.prompt(QUESTION, max_tokens=8, stream=False).text()
    assert "".join(chat.prompt(QUESTION, max_tokens=8, stream=True))
    return "prompt, streamed and not"


@client("dspy")
def dspy_programs(url: str, model: str) -> str:
    import dspy

    options: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": KEY, "max_tokens": 60, "temperature": 0.0, "cache": False}
    assert dspy.LM(f"openai/{model}", **options)(QUESTION)
    answer = {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 40}}, "required": ["answer"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {**answer, "additionalProperties": False}}}
    with dspy.context(lm=dspy.LM(f"openai/{model}", response_format=wanted, **options), adapter=dspy.JSONAdapter()):
        assert dspy.Predict("question -> answer")(question=QUESTION).answer
    return "LM, and Predict with the JSON adapter and a schema (response_format)"


@client("open-interpreter")
def open_interpreter(url: str, model: str) -> str:
    from interpreter import interpreter

    interpreter.offline, interpreter.disable_telemetry, interpreter.auto_run = True, True, False
    interpreter.llm.model, interpreter.llm.api_base, interpreter.llm.api_key = f"openai/{model}", f"{url}/v1", KEY
    interpreter.llm.context_window, interpreter.llm.max_tokens = 1000, 24
    interpreter.llm.supports_functions = False
    interpreter.system_message = "Answer in one sentence."
    assert any(message.get("content") for message in interpreter.chat(QUESTION, display=False))
    return "chat (streamed, code as text), nothing executed"


@client("aider-chat")
def aider(url: str, model: str) -> str:
    """It applies whatever edits the model writes; a model this small writes none."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hello.py").write_text("print('hello')\n")
        words = [
            str(Path(sys.executable).parent / "aider"), "--model", f"openai/{model}", "--openai-api-base", f"{url}/v1",
            "--openai-api-key", KEY, "--message", "What does hello.py print?", "--yes-always", "--no-git", "--no-check-update",
            "--no-show-model-warnings", "--analytics-disable", "--map-tokens", "0", "--edit-format", "ask", "hello.py",
        ]  # fmt: skip
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        assert done.returncode == 0 and "Tokens:" in done.stdout, done.stdout[-1500:] + done.stderr[-500:]
    return "`aider --message` about a file, edit format `ask`, streamed"


@client("guidellm")
def guidellm(url: str, model: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [
            str(Path(sys.executable).parent / "guidellm"), "run", "--backend", f"kind=openai_http,target={url},model={model}",
            "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3",
            "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--output", f"kind=json,path={report}", "--disable-progress",
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        assert done.returncode == 0 and report.exists(), (done.stdout + done.stderr)[-3000:]
        [run] = json.loads(report.read_text())["benchmarks"]
        requests = run["requests"]
        assert len(requests["successful"]) == 3 and not requests["errored"], str(requests)[:2000]
    return "`guidellm run`, synchronous profile, synthetic text, 3 requests"


@client("aiperf")
def aiperf(url: str, model: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            str(Path(sys.executable).parent / "aiperf"), "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming",
            "--request-count", "4", "--concurrency", "2", "--tokenizer", TOKENIZER, "--synthetic-input-tokens-mean", "20",
            "--output-tokens-mean", "8", "--artifact-dir", folder, "--ui", "none",
        ]  # fmt: skip
        done = subprocess.run(words, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        [result] = Path(folder).rglob("profile_export_aiperf.json")
        assert json.loads(result.read_text())["request_count"]["avg"] == 4
    return "`aiperf profile`, chat, streamed, 4 requests at a concurrency of 2"


def main(url: str) -> int:
    import httpx

    model = httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"][0]["id"]
    failed = 0
    for package, check in CLIENTS:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"| {package} | - | not installed |")
            continue
        try:
            print(f"| {package} | {version} | {check(url, model)} |", flush=True)
        except Exception as error:  # noqa: BLE001 - a client's failure is the result
            failed += 1
            traceback.print_exc()
            print(
                f"| {package} | {version} | FAILED in {check.__name__}: {type(error).__name__}: {str(error)[:300]} |", flush=True
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].rstrip("/")))
