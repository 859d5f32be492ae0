"""The classes of weaknesses that servers of language models were known for, each tried on ours. docs/security.md has the table."""

from __future__ import annotations

import ast
import json
import re
import socket
import tomllib
from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from fake import FakeClient
from serving import posted

from fuzz import made_models as made
from windlass.core.hardware.parse import parse_hardware
from windlass.core.plan import Plan
from windlass.errors import BadInput
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.model.text.chat.template import render_chat
from windlass.tasks.launch.command import Command, ServedModel, VllmOptions
from windlass.tasks.launch.vllm import environment as vllm
from windlass.tasks.launch.vllm.render import render_nodes
from windlass.tasks.observe.http import TextServer
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.search.request import PlanRequest
from windlass.tasks.serve.settings import ServerSettings

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "windlass"

# --- deserialisation, and code that is made of text


FORBIDDEN: dict[str, frozenset[str]] = {
    "pickle.load": frozenset(),
    "pickle.loads": frozenset(),
    "marshal.loads": frozenset(),
    "shelve.open": frozenset(),
    "yaml.load": frozenset(),
    "numpy.load": frozenset(),
    "np.load": frozenset(),
    "joblib.load": frozenset(),
    "dill.loads": frozenset(),
    "cloudpickle.loads": frozenset(),
    "eval": frozenset(),
    "exec": frozenset({"tasks/evaluate/sandbox/inside.py"}),  # programs that are evaluated, inside the sandbox
    "os.system": frozenset(),
    "tarfile.extractall": frozenset(),
}


def calls(text: str) -> list[tuple[str, ast.Call]]:
    """Of a source: what is called, as it is written."""
    return [(ast.unparse(node.func), node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


def complaints(text: str, name: str) -> list[str]:
    found: list[str] = []
    for called, node in calls(text):
        options = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called in FORBIDDEN and name not in FORBIDDEN[called]:
            found.append(called)
        if called.endswith(".extractall"):
            found.append(called)
        if called == "torch.load" and options.get("weights_only") != "True":
            found.append("torch.load without weights_only")
        found += [f"{key}={value}" for key, value in options.items() if (key, value) in BAD_OPTIONS]
    return found


BAD_OPTIONS = {
    ("shell", "True"),
    ("trust_remote_code", "True"),
    ("allow_pickle", "True"),
    ("verify", "False"),
    ("weights_only", "False"),
}


@pytest.mark.parametrize(
    "text",
    [
        "pickle.loads(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "subprocess.run(x, shell=True)",
        "eval(x)",
        "a.extractall()",
    ],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert complaints(text, "x.py")


def test_nothing_unpickles_or_runs_what_it_reads() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 500
    found = {str(file.relative_to(SOURCE)): complaints(file.read_text(), str(file.relative_to(SOURCE))) for file in files}
    assert {name: what for name, what in found.items() if what} == {}


# --- code that comes with a model


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    """A model whose config and tokenizer name Python files beside them, which say that they ran."""
    made.write_text(tmp_path)
    ran = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
    for name in ("modeling_x", "configuration_x", "tokenization_x"):
        (tmp_path / f"{name}.py").write_text(ran)
    for name, own in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        values = json.loads((tmp_path / name).read_text())
        values["auto_map"] = {
            own: "configuration_x.X",
            "AutoModelForCausalLM": "modeling_x.X",
            "AutoTokenizer": ["tokenization_x.X", None],
        }
        (tmp_path / name).write_text(json.dumps(values))
    return tmp_path


def test_code_that_comes_with_a_model_is_not_run(with_code: Path) -> None:
    from windlass.model import families
    from windlass.model.formats.config import read_config
    from windlass.runtime.weights.text.files import model_text

    assert families.describe(read_config(with_code)).num_layers == 1
    assert model_text(with_code).tokenizer.encode("hello")
    assert not (with_code / "ran").exists()


VLLM_PLANS = (
    ("GLM-4.5-Air", "1xH200"),
    ("GLM-4.6", "2x(8xH100-80GB)@400Gb"),
    ("Qwen3-8B", "1x(cpu:16,ram=64GB)"),
    ("Kimi-K2", "8xH200"),
)
DANGEROUS = (
    "--trust-remote-code", "--trust-request-chat-template", "--enable-prompt-embeds", "--allowed-local-media-path", "--allowed-media-domains",
    "--enable-lora", "--enable-ssl-refresh", "--logits-processors", "--middleware", "--tool-parser-plugin", "--allow-credentials",
    "--tokenizer-revision", "--hf-overrides", "--hf-token", "--worker-extension-cls",
)  # fmt: skip
"""Flags of vLLM that run others' code, read local files, fetch media or open routes."""
DANGEROUS_VARIABLES = re.compile(
    "VLLM_(ALLOW_INSECURE_SERIALIZATION|SERVER_DEV_MODE|ALLOW_RUNTIME_LORA_UPDATING|PLUGINS|TORCH_PROFILER_DIR)"
)


def plan_of(name: str, hardware: str) -> Plan:
    known = find(name)
    if known is None:
        pytest.skip(f"{name} is not in the registry")
    spec = spec_of(known)
    return make_plan(
        PlanRequest(spec=spec, rules=rules(spec), hardware=parse_hardware(hardware), context_tokens=4096, engine="vllm")
    )


def commands(name: str, hardware: str, *extra: str) -> tuple[Command, ...]:
    options = VllmOptions(python="python", api_key="secret", master_address="10.0.0.1", cpus=(0, 1), extra=extra)
    model = ServedModel(
        path="/models/x", name="x", stored="bf16", chat_template="{% if tools %}<tool_call>{{ name }}<arg_key>{% endif %}"
    )
    return render_nodes(plan_of(name, hardware), model, options)


@pytest.mark.parametrize(("name", "hardware"), VLLM_PLANS[:3])
def test_vllm_gets_no_flag_that_runs_or_fetches_anything(name: str, hardware: str) -> None:
    for command in commands(name, hardware):
        given = {word.split("=")[0] for word in command.argv}
        assert not given & set(DANGEROUS)
        assert not [variable for variable in command.env if DANGEROUS_VARIABLES.fullmatch(variable)]
        assert command.env["HF_HUB_OFFLINE"] == "1" and command.env["VLLM_NO_USAGE_STATS"] == "1"
        assert command.argv[1] == "-P"  # nothing is imported from the folder that it is started in
        assert command.argv[command.argv.index("--host") + 1] == "127.0.0.1"
        assert "secret" not in " ".join(command.argv) and command.env["VLLM_API_KEY"] == "secret"


def test_vllm_runs_a_models_code_only_when_that_is_asked_for() -> None:
    (command,) = commands("GLM-4.5-Air", "1xH200", "--trust-remote-code")
    assert command.argv.count("--trust-remote-code") == 1
    with pytest.raises(BadInput, match="--host is set by the plan"):
        commands("GLM-4.5-Air", "1xH200", "--host", "0.0.0.0")


def test_vllm_is_installed_in_one_version() -> None:
    assert all(re.fullmatch(r"[\w-]+==\d+\.\d+\.\d+", package) for package in (vllm.GPU, vllm.CPU))
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+(\+cpu)?", vllm.TORCH)


# --- templates

ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ self._TemplateReference__context }}",
    "{{ joiner.__init__.__globals__.__builtins__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['sys'].modules }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "{{ ('%s' | attr('format'))(messages.__init__) }}",
    "{% set f = '{0.__class__.__init__.__globals__}'.format %}{{ f(cycler) }}",
    "{% for f in ['{0.__class__}'.format] %}{{ f(cycler) }}{% endfor %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% import 'os' as os %}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ range.__self__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ (''|attr('__cla' ~ 'ss__')) }}",
    "{{ messages[0].content.__reduce_ex__(2) }}",
    "{{ loop.__init__.__globals__ }}",
    "{{ caller.__globals__ }}",
)
TRACES = ("<class", "subclasses", "uid=", "root:", "builtins", "module", "globals", "0x")


@pytest.mark.parametrize("template", ESCAPES)
def test_templates_do_not_leave_their_sandbox(template: str) -> None:
    """An error, or nothing: what a template may not see is undefined."""
    pytest.importorskip("jinja2")
    try:
        text = render_chat(template, [{"role": "user", "content": "x"}])
    except BadInput as error:
        assert "\n" not in str(error)
        return
    assert not [trace for trace in TRACES if trace in text], text


def test_a_request_brings_no_template() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 7 * 7 }}"}
    assert posted("/v1/chat/completions", body).status_code == 400
    kwargs = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}", "tokenize": True},
    }
    assert posted("/v1/chat/completions", kwargs).status_code == 400


# --- numbers in requests

HUGE, TEXT = 2**63, [{"role": "user", "content": "x"}]
NUMBERS: list[dict[str, Any]] = [
    *(
        {field: value}
        for field in ("max_tokens", "min_tokens", "n", "top_logprobs", "top_k", "seed", "priority")
        for value in (-(2**63), HUGE, 2**70)
    ),
    {"n": 10_000},
    {"logit_bias": {str(HUGE): 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"1": 1e308}},
    {"stop_token_ids": [HUGE]},
    {"stop_token_ids": [-1]},
    {"temperature": -1},
    {"temperature": 1e308},
    {"top_p": 1e-320},
    {"repetition_penalty": 0},
    {"repetition_penalty": 1e300},
    {"stop": ["x"] * 10_000},
    {"stop": "x" * 100_000},
    {"presence_penalty": 1e9},
    {"timeout": -1},
    {"logprobs": True, "top_logprobs": 1_000_000},
]


@pytest.mark.parametrize("change", NUMBERS, ids=[json.dumps(one)[:40] for one in NUMBERS])
def test_numbers_of_any_size_are_an_answer_or_the_clients_fault(change: dict[str, Any]) -> None:
    answer = posted("/v1/chat/completions", {"messages": TEXT, "max_tokens": 2, **change})
    assert answer.status_code in (200, 400), answer.text


# --- media, and addresses that a request names


@pytest.fixture
def listener() -> Generator[socket.socket]:
    """A server that nobody may connect to."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        found.setblocking(False)
        yield found


@pytest.mark.parametrize("api", ["chat", "responses", "messages", "ollama", "file", "data"])
def test_no_address_in_a_request_is_opened(api: str, listener: socket.socket) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
    part = {
        "type": "image_url",
        "image_url": {"url": {"file": "file:///etc/passwd", "data": "data:image/png;base64,AAAA"}.get(api, url)},
    }
    path, body = {
        "responses": ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}),
        "messages": (
            "/v1/messages",
            {
                "max_tokens": 2,
                "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}],
            },
        ),
        "ollama": ("/api/chat", {"model": "fake", "messages": [{"role": "user", "content": "x", "images": [url]}]}),
    }.get(api, ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}))
    client = FakeClient()
    assert posted(path, body, client).status_code in (400, 404)
    assert client.requests == []
    with pytest.raises(BlockingIOError):
        listener.accept()


# --- exhaustion

LARGE: dict[str, bytes] = {
    "nested": b'{"messages": ' + b"[" * 200_000,
    "nested schema": json.dumps({"messages": TEXT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 0}}})
    .replace('"schema": 0', '"schema": ' + '{"not": ' * 3000 + "{}" + "}" * 3000)
    .encode(),
    "large": b'{"messages": "' + b"x" * 9 * 2**20 + b'"}',
    "many messages": json.dumps({"messages": TEXT * 100_000}).encode(),
    "one long number": b'{"messages": [], "seed": ' + b"1" * 100_000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_a_body_that_is_too_much_is_refused(name: str) -> None:
    client = FakeClient()
    assert posted("/v1/chat/completions", LARGE[name], client).status_code in (400, 413)
    assert client.requests == []


# --- who may reach it


def test_everything_listens_to_this_machine_alone() -> None:
    assert ServerSettings().host == "127.0.0.1" and VllmOptions().host == "127.0.0.1"
    assert ServerSettings().api_keys == () and ServerSettings().cors_origins == ()
    with pytest.raises(BadInput, match="--key"):
        TextServer("0.0.0.0", 0, {})


def test_secrets_are_compared_in_constant_time() -> None:
    """Wherever a key, a tag or a proof that came from outside is looked at."""
    for name in (
        "tasks/serve/http/api_keys.py",
        "tasks/observe/http.py",
        "runtime/fleet/protocol/channel.py",
        "runtime/fleet/protocol/handshake.py",
        "runtime/parallel/mesh.py",
    ):
        assert "hmac.compare_digest" in (SOURCE / name).read_text(), name


# --- updates

FIXED = {
    "jinja2": "3.1.6",  # CVE-2025-27516: the sandbox can be left through |attr
    "starlette": "1.0.1",  # CVE-2026-48710
    "torch": "2.6.0",  # CVE-2025-32434: weights_only runs code
    "pyarrow": "14.0.1",  # CVE-2023-47248: a Parquet file runs code
    "llguidance": "1.7",
}
"""The first versions without what was found in them."""


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


@pytest.mark.parametrize("package", FIXED)
def test_no_version_with_a_known_hole_is_allowed_or_installed(package: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    floors = [found[1] for words in extras.values() for word in words if (found := re.match(rf"{package}>=([\d.]+)", word))]
    assert floors and all(numbers(floor) >= numbers(FIXED[package]) for floor in floors)
    try:
        assert numbers(version(package)) >= numbers(FIXED[package])
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
