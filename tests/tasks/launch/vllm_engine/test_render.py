"""A plan as vLLM's flags: whole commands, word for word, and what is refused instead of dropped."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.layout import Layout
from windlass.core.plan import DeviceMemoryPlan, Plan
from windlass.errors import BadInput, DoesNotFit, Impossible
from windlass.model.families.chat.vllm_parsers import VllmParsers, vllm_parsers
from windlass.tasks.launch.command import ServedModel, VllmOptions
from windlass.tasks.launch.vllm.render import (  # pyright: ignore[reportPrivateUsage]
    _shared,
    render,  # pyright: ignore[reportPrivateUsage]
    render_nodes,
)

pytestmark = pytest.mark.pure

GLM = "{%- if tools %}<tool_call>{{ name }}<arg_key>{% endif %}<think></think>"
OPTIONS = VllmOptions(python="python", api_key="secret", master_address="10.0.0.1", cpus=(0, 1, 2, 3))
COMMON = "HF_HUB_OFFLINE=1 VLLM_API_KEY=... "
QUIET = "VLLM_LOGGING_COLOR=0 VLLM_NO_USAGE_STATS=1 "
SERVE = "python -P -m vllm.entrypoints.cli.main serve /models/air "
LISTEN = " --served-model-name air --host 127.0.0.1 --port 8001 --disable-uvicorn-access-log"
GLM_PARSERS = " --reasoning-parser glm45 --enable-auto-tool-choice --tool-call-parser glm45"


def model(stored: str = "bf16", template: str | None = GLM) -> ServedModel:
    return ServedModel(path="/models/air", name="air", stored=stored, chat_template=template)


# --- whole commands --------------------------------------------------------------------------------------------------


def test_one_gpu(make: Any) -> None:
    """int4 files say themselves how they are packed: no --quantization."""
    plan = make("GLM-4.5-Air", "1xH200", quant="int4", concurrency=4)
    assert render(plan, model("int4"), OPTIONS).shown() == (
        f"{COMMON}{QUIET}{SERVE}--tensor-parallel-size 1 --pipeline-parallel-size 1 --dtype bfloat16 --kv-cache-dtype auto"
        f" --gpu-memory-utilization 0.92 --max-model-len 8192 --max-num-seqs 4{LISTEN}{GLM_PARSERS}"
    )


def test_eight_gpus(make: Any) -> None:
    plan = make("GLM-4.5-Air", "8xH100-80GB", pins={"tp": 8, "pp": 1, "ep": 1, "dp": 1}, kv="fp8", concurrency=16)
    assert render(plan, model(), OPTIONS).shown() == (
        f"{COMMON}{QUIET}{SERVE}--tensor-parallel-size 8 --pipeline-parallel-size 1 --dtype bfloat16 --kv-cache-dtype fp8"
        f" --gpu-memory-utilization 0.92 --max-model-len 8192 --max-num-seqs 16{LISTEN}{GLM_PARSERS}"
    )


def test_two_nodes(make: Any) -> None:
    """The second listens for nothing but the first; layers are divided as planned."""
    plan = make("GLM-4.6", "2x(8xH100-80GB)@400Gb", pins={"tp": 8, "pp": 2, "dp": 1}, concurrency=8)
    words = (
        f"{COMMON}{QUIET}VLLM_PP_LAYER_PARTITION=46,46 {SERVE}--tensor-parallel-size 8 --pipeline-parallel-size 2 --dtype bfloat16"
        f" --kv-cache-dtype auto --gpu-memory-utilization 0.92 --max-model-len 8192 --max-num-seqs 8{LISTEN}{GLM_PARSERS}"
        " --nnodes 2 --node-rank {} --master-addr 10.0.0.1 --master-port 29501"
    )
    first, second = render_nodes(plan, model(), OPTIONS)
    assert first.shown() == words.format(0)
    assert second.shown() == words.format(1) + " --headless"
    assert first.notes == ()


def test_experts_over_replicas(make: Any) -> None:
    """ep is tp x dp, and each replica has half of the sequences."""
    plan = make("GLM-4.5-Air", "8xH100-80GB", pins={"tp": 4, "ep": 8, "dp": 2}, concurrency=64)
    command = render(plan, model(), OPTIONS)
    assert command.shown() == (
        f"{COMMON}{QUIET}{SERVE}--tensor-parallel-size 4 --pipeline-parallel-size 1 --data-parallel-size 2 --enable-expert-parallel"
        f" --dtype bfloat16 --kv-cache-dtype auto --gpu-memory-utilization 0.92 --max-model-len 8192 --max-num-seqs 32{LISTEN}{GLM_PARSERS}"
    )
    assert command.notes == ()


def test_cpu(make: Any) -> None:
    """The CPU build's `vllm serve` ends at once; memory and threads are told by the environment."""
    plan = make("GLM-4.5-Air", "1x(cpu:16,ram=512GB)", concurrency=2)
    assert render(plan, model(template=None), OPTIONS).shown() == (
        f"{COMMON}VLLM_CPU_KVCACHE_SPACE=3 VLLM_CPU_OMP_THREADS_BIND=0,1,2,3 {QUIET}"
        "python -P -m vllm.entrypoints.openai.api_server --model /models/air --tensor-parallel-size 1 --pipeline-parallel-size 1"
        f" --dtype bfloat16 --kv-cache-dtype auto --max-model-len 8192 --max-num-seqs 2{LISTEN}"
    )


# --- parts -----------------------------------------------------------------------------------------------------------


def test_the_key_is_in_no_argument(make: Any) -> None:
    command = render(make("GLM-4.5-Air", "1xH200", quant="int4"), model("int4"), OPTIONS)
    assert "secret" not in " ".join(command.argv) and "secret" not in command.shown()
    assert command.env["VLLM_API_KEY"] == "secret"


def test_plain_files_become_fp8_while_loading(make: Any) -> None:
    plan = make("GLM-4.5-Air", "1xH200", quant="fp8")
    argv = render(plan, model("bf16"), OPTIONS).argv
    assert argv[argv.index("--quantization") + 1] == "fp8"
    assert "--quantization" not in render(plan, model("fp8"), OPTIONS).argv


def test_a_cap_on_memory_holds_for_vllm(make: Any) -> None:
    """Planned for 70 GB of 80: vLLM counts from the whole device."""
    plan = make("Llama-3.1-8B", "1xA100-80GB[70GB]")
    capacity = plan.memory.per_device[0].capacity_bytes
    options = msgspec.structs.replace(OPTIONS, device_bytes=80 * 2**30)
    argv = render(plan, model(), options).argv
    fraction = float(argv[argv.index("--gpu-memory-utilization") + 1])
    assert fraction <= 0.92 * capacity / (80 * 2**30) < fraction + 1e-4


def test_devices_are_named_where_they_are_not_the_first(make: Any) -> None:
    plan = make("Llama-3.1-8B", "1xH100-80GB")
    moved = msgspec.structs.replace(plan, ranks=tuple(msgspec.structs.replace(rank, device=2) for rank in plan.ranks))
    assert "CUDA_VISIBLE_DEVICES" not in render(plan, model(), OPTIONS).env
    assert render(moved, model(), OPTIONS).env["CUDA_VISIBLE_DEVICES"] == "2"
    among = msgspec.structs.replace(OPTIONS, visible=("4", "5", "7"))
    assert render(moved, model(), among).env["CUDA_VISIBLE_DEVICES"] == "7"


def test_replicas_of_experts_are_noted(make: Any) -> None:
    plan = make("GLM-4.5-Air", "8xH200", pins={"tp": 4, "ep": 1, "dp": 2}, concurrency=64)
    (note,) = render(plan, model(), OPTIONS).notes
    assert "shard the experts over all 8 ranks" in note
    assert render(make("Llama-3.1-8B", "8xH200", pins={"dp": 8}, concurrency=64), model(), OPTIONS).notes == ()


def test_tp_over_nodes_is_noted(make: Any) -> None:
    plan = make("GLM-4.6", "2x(8xH100-80GB)@400Gb", pins={"tp": 16, "pp": 1, "dp": 1})
    assert any("tp 16 spans nodes" in note for note in render(plan, model(), OPTIONS).notes)


def test_extra_words_come_last_and_repeat_nothing(make: Any) -> None:
    plan = make("Llama-3.1-8B", "1xH200")
    argv = render(plan, model(), msgspec.structs.replace(OPTIONS, extra=("--enforce-eager",))).argv
    assert argv[-1] == "--enforce-eager"
    for words in (("--dtype", "half"), ("--dtype=half",)):
        with pytest.raises(BadInput, match="--dtype is set by the plan"):
            render(plan, model(), msgspec.structs.replace(OPTIONS, extra=words))


@given(st.integers(1, 64), st.integers(1, 64))
def test_ranks_share_cpus_evenly(num_cpus: int, num_ranks: int) -> None:
    parts = _shared(tuple(range(num_cpus)), num_ranks)
    held = [cpu for part in parts for cpu in part]
    assert len(parts) == num_ranks and len({len(part) for part in parts}) == 1
    assert len(set(held)) == len(held) > num_cpus - num_ranks


def test_ranks_of_one_cpu_are_bound_apart(make: Any) -> None:
    """`auto` would look for two NUMA nodes."""
    plan = make("GLM-4.5-Air", "1x(cpu:16,ram=512GB)")
    two = msgspec.structs.replace(
        plan, layout=Layout(tp=2), ranks=(plan.ranks[0], msgspec.structs.replace(plan.ranks[0], rank=1, tp=1))
    )
    assert render(two, model(), OPTIONS).env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    few = msgspec.structs.replace(OPTIONS, cpus=(0,))
    assert "VLLM_CPU_OMP_THREADS_BIND" not in render(two, model(), few).env


@pytest.mark.parametrize(
    ("template", "parsers"),
    [
        (None, VllmParsers()),
        ("{{ messages }}", VllmParsers()),
        (GLM, VllmParsers(tools="glm45", reasoning="glm45")),
        ("<tool_call>\n<function=example></think>", VllmParsers(tools="qwen3_coder", reasoning="deepseek_r1")),
        ("<tool_call>\n<function=example>", VllmParsers(tools="qwen3_coder")),
        ("<tool_call>{}</tool_call></think>", VllmParsers(tools="hermes", reasoning="qwen3")),
        ("<tool_call>{}</tool_call>", VllmParsers(tools="hermes")),
        ("<|start|>assistant<|channel|>final", VllmParsers(tools="openai", reasoning="openai_gptoss")),
        ("<|start_header_id|>system Environment: ipython", VllmParsers(tools="llama3_json")),
        ("</think>", VllmParsers(reasoning="deepseek_r1")),
    ],
)
def test_parsers_follow_the_template(template: str | None, parsers: VllmParsers) -> None:
    assert vllm_parsers(template) == parsers


# --- refusals --------------------------------------------------------------------------------------------------------


def _other(plan: Plan, **changes: Any) -> Plan:
    return msgspec.structs.replace(plan, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"train": {}}, BadInput, "training"),
        ({"engine": "windlass"}, Impossible, "plan with --engine vllm"),
        ({"fits": False, "short_bytes": 2**30}, DoesNotFit, "1.00 GiB short"),
        ({"layout": Layout(tp=8, ep=4)}, Impossible, "ep 4"),
    ],
)
def test_what_no_flag_can_say_is_refused(make: Any, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as refused:
        render(_other(make("GLM-4.5-Air", "8xH100-80GB"), **changes), model(), OPTIONS)
    assert "\n" not in str(refused.value)


def test_weights_outside_the_devices_are_refused(make: Any) -> None:
    plan = make("GLM-4.5-Air", "8xH100-80GB")
    with pytest.raises(Impossible, match="offloads weights"):
        render(_other(plan, memory=msgspec.structs.replace(plan.memory, host_bytes=1)), model(), OPTIONS)


def test_unlike_devices_are_refused(make: Any) -> None:
    plan = make("GLM-4.5-Air", "8xH100-80GB")
    other: DeviceMemoryPlan = msgspec.structs.replace(plan.memory.per_device[0], name="A100-80GB")
    mixed = msgspec.structs.replace(plan.memory, per_device=(*plan.memory.per_device[1:], other))
    with pytest.raises(Impossible, match="devices of one kind"):
        render(_other(plan, memory=mixed), model(), OPTIONS)


@pytest.mark.parametrize(
    ("nodes", "words"), [((0, 0, 0, 1), "equally many ranks on every node"), ((0, 1, 0, 1), "consecutive ranks")]
)
def test_nodes_that_vllm_cannot_number_are_refused(make: Any, nodes: tuple[int, ...], words: str) -> None:
    plan = make("GLM-4.5-Air", "4xH200", pins={"tp": 4})
    ranks = tuple(msgspec.structs.replace(rank, node=node) for rank, node in zip(plan.ranks, nodes, strict=True))
    with pytest.raises(Impossible, match=words):
        render(_other(plan, ranks=ranks), model(), OPTIONS)


@pytest.mark.parametrize(
    ("quant", "stored", "words"),
    [
        ("int4", "bf16", "windlass convert /models/air OUT --quant int4"),
        ("bf16", "int4", "are int4"),
        ("int8", "int4", "are int4"),
    ],
)
def test_files_that_are_not_what_was_planned_are_refused(make: Any, quant: str, stored: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        render(make("Llama-3.1-8B", "1xH200", quant=quant), model(stored), OPTIONS)


def test_cpu_runs_16_bits_on_one_machine(make: Any) -> None:
    with pytest.raises(Impossible, match="bf16 and fp32 on a CPU, not int4"):
        make("GLM-4.5-Air", "1x(cpu:16,ram=512GB)", quant="int4")
    plan = make("GLM-4.5-Air", "1x(cpu:16,ram=512GB)")
    int4 = make("GLM-4.5-Air", "1xH200", quant="int4").scheme
    with pytest.raises(Impossible, match="runs bf16 and fp32"):
        render(_other(plan, scheme=int4), model("int4"), OPTIONS)
    with pytest.raises(Impossible, match="KV cache"):
        render(_other(plan, scheme=msgspec.structs.replace(plan.scheme, kv="fp8")), model(), OPTIONS)
    two = (plan.ranks[0], msgspec.structs.replace(plan.ranks[0], rank=1, node=1))
    with pytest.raises(Impossible, match="one machine"):
        render(_other(plan, layout=Layout(pp=2), ranks=two), model(), OPTIONS)


def test_kv_in_fp32_needs_fp32(make: Any) -> None:
    plan = make("Llama-3.1-8B", "1xH200")
    with pytest.raises(Impossible, match="compute type"):
        render(_other(plan, scheme=msgspec.structs.replace(plan.scheme, kv="fp32")), model(), OPTIONS)


def test_several_nodes_need_an_address(make: Any) -> None:
    plan = make("GLM-4.6", "2x(8xH100-80GB)@400Gb", pins={"tp": 8, "pp": 2, "dp": 1})
    with pytest.raises(BadInput, match="give the address"):
        render(plan, model(), VllmOptions())
    with pytest.raises(BadInput, match="no node 2"):
        render(plan, model(), OPTIONS, node=2)
