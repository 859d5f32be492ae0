"""Sixty questions as users ask them, and what `windlass plan` answers: prints docs/reference/questions.md.

python bench/plan/questions.py > docs/reference/questions.md
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from typing import Any

from windlass.cli import execute
from windlass.units import format_rate, format_seconds

QUESTIONS = [
    ("Can I run Llama 70B on my 24 GB card?", "Llama-3.1-70B --on 1xRTX-4090,ram=64GB --quant q4_k_m"),
    ("And on two of them?", "Llama-3.1-70B --on 2xRTX-4090 --quant q4_k_m"),
    ("Two used 3090s for 70B, 4-bit, in vLLM?", "Llama-3.1-70B --on 2xRTX-3090 --quant int4 --engine vllm"),
    ("What does a 5090 do with a 32B model?", "Qwen3-32B --on 1xRTX-5090 --quant q4_k_m"),
    ("8B in bf16 on a 4090, one user", "Llama-3.1-8B --on 1xRTX-4090 --quant bf16"),
    ("GLM-4.5-Air on a 4090 with 128 GB of RAM", "GLM-4.5-Air --on 1xRTX-4090,ram=128GB,channels=2 --quant q4_k_m"),
    ("gpt-oss-120b on a gaming PC with 96 GB", "gpt-oss-120b --on 1xRTX-4090,ram=96GB,channels=2"),
    ("gpt-oss-120b on one H100", "gpt-oss-120b --on 1xH100"),
    ("DeepSeek-V3 on an EPYC with 12 channels and one 4090", "DeepSeek-V3 --on 1xRTX-4090,ram=768GB,channels=12 --quant q4_k_m"),
    ("The same without the 4090", "DeepSeek-V3 --on cpu:64,ram=768GB,channels=12 --quant q4_k_m"),
    ("The same in KTransformers", "DeepSeek-V3 --on 1xRTX-4090,ram=768GB,channels=12 --quant q4_k_m --engine kt"),
    ("Do two sockets double it?", "DeepSeek-V3 --on 1xRTX-4090,ram=1152GB,channels=24 --quant q4_k_m --engine kt"),
    ("DeepSeek-V3 on a Mac Studio with 512 GB", "DeepSeek-V3 --on M3-Ultra --quant q4_k_m"),
    ("GLM-5.1 on that Mac", "GLM-5.1 --on M3-Ultra --quant int4"),
    ("70B on an M4 Max laptop", "Llama-3.1-70B --on M4-Max --quant q4_k_m"),
    ("Qwen3-30B-A3B on an M4 Max", "Qwen3-30B-A3B --on M4-Max --quant int4"),
    ("gpt-oss-120b on a DGX Spark", "gpt-oss-120b --on DGX-Spark --engine llama.cpp"),
    ("70B on a DGX Spark", "Llama-3.1-70B --on DGX-Spark --quant q4_k_m --engine ollama"),
    ("8B on my 16-core desktop without a GPU", "Llama-3.1-8B --on cpu:16,ram=64GB --quant int4"),
    ("30B-A3B on it", "Qwen3-30B-A3B --on cpu:16,ram=64GB --quant q4_k_m"),
    ("Three mini PCs, 32 GB each, gigabit", "Llama-3.1-70B --on '3x(cpu:16,ram=32GB)@1Gb' --quant int4"),
    ("And with 10 Gb?", "Llama-3.1-70B --on '3x(cpu:16,ram=32GB)@10Gb' --quant int4"),
    ("GLM-4.5-Air int4 on one H200", "GLM-4.5-Air --on 1xH200 --quant int4"),
    ("GLM-4.6 int4 on one H200, the rest in RAM", "GLM-4.6 --on 1xH200,ram=128GB,bw=138GB --quant int4"),
    ("GLM-4.5-Air for 64 users at once on one H200", "GLM-4.5-Air --on 1xH200 --quant int4 --concurrency 64"),
    ("How many requests a second is that?", "GLM-4.5-Air --on 1xH200 --quant int4 --rate 1/s --ttft 1s --tpot 50ms"),
    ("GLM-4.6 in fp8 on eight H100s", "GLM-4.6 --on 8xH100 --quant fp8 --kv fp8 --context 32k"),
    ("GLM-4.6 in bf16: how many nodes?", "GLM-4.6 --on '2x(8xH100)@400Gb' --quant bf16 --context 32k"),
    ("GLM-4.5 at 128k for eight users on eight H100s", "GLM-4.5 --on 8xH100 --quant fp8 --kv fp8 --context 128k --concurrency 8"),
    ("405B in fp8 on eight H200s, as much as it gives", "Llama-3.1-405B --on 8xH200 --quant fp8 --kv fp8 --goal throughput --context 4k"),
    ("405B on eight MI300X", "Llama-3.1-405B --on 8xMI300X --quant fp8 --kv fp8 --goal throughput --context 4k"),
    ("70B on two H100s at 100 users, prompts of 5,000", "Llama-3.1-70B --on 2xH100 --quant fp8 --context 5500 --concurrency 100 --prompt-tokens 5000 --new-tokens 500"),
    ("The same with a smaller cache", "Llama-3.1-70B --on 2xH100 --quant fp8 --kv fp8 --context 5500 --concurrency 100 --prompt-tokens 5000 --new-tokens 500"),
    ("Does TensorRT-LLM do more?", "Llama-3.1-70B --on 2xH100 --quant fp8 --context 5500 --concurrency 100 --prompt-tokens 5000 --new-tokens 500 --engine nim"),
    ("Qwen3-235B on eight H100s, a chat burst of 1,000", "Qwen3-235B-A22B --on 8xH100 --quant bf16 --engine vllm --goal throughput --requests 1000 --spread --prompt-tokens 219 --new-tokens 201"),
    ("The same on A100s", "Qwen3-235B-A22B --on 8xA100 --quant bf16 --engine vllm --goal throughput --requests 1000 --spread --prompt-tokens 219 --new-tokens 201"),
    ("DeepSeek-V3 on eight H200s for one user", "DeepSeek-V3 --on 8xH200 --quant fp8"),
    ("With MTP, 80 % accepted?", "DeepSeek-V3 --on 8xH200 --quant fp8 --drafts 1 --acceptance 0.8"),
    ("DeepSeek-V3 over 72 H100s, wide expert parallelism", "DeepSeek-V3 --on '9x(8xH100)@400Gb' --quant fp8 --engine sglang --tp 1 --dp 72 --ep 72 --pp 1 --context 2600 --concurrency 18432 --prompt-tokens 2000 --new-tokens 500"),
    ("Agents with 90 % of the prompt cached", "GLM-4.5-Air --on 4xH100 --quant bf16 --prompt-tokens 30000 --new-tokens 500 --context 32k --cached-prefix 0.9"),
    ("32k prompts on Air: time to the first token?", "GLM-4.5-Air --on 4xH100 --quant bf16 --prompt-tokens 32000 --new-tokens 500 --context 33k"),
    ("Six A100s, can I use all for Llama-2-70B?", "Llama-2-70B --on 6xA100-80GB --context 4k"),
    ("A 4090 and a 3090 together", "Qwen3-32B --on 1xRTX-4090+1xRTX-3090 --quant bf16"),
    ("Four L40S for 70B in fp8", "Llama-3.1-70B --on 4xL40S --quant fp8"),
    ("One A10 for 8B", "Llama-3.1-8B --on 1xA10 --quant int8"),
    ("T4s, is anything possible?", "Llama-3.1-8B --on 1xT4 --quant int4"),
    ("Mixtral on one A100", "Mixtral-8x7B --on 1xA100-80GB"),
    ("GLM-4.7-Flash on a 24 GB card", "GLM-4.7-Flash --on 1xRTX-4090 --quant q4_k_m"),
    ("INTELLECT-3 on one H200", "INTELLECT-3 --on 1xH200 --quant int4"),
    ("B200: one for 405B in 4 bits?", "Llama-3.1-405B --on 2xB200 --quant int4"),
    ("405B on one 4090 from disk", "Llama-3.1-405B --on 1xRTX-4090,ram=64GB,disk=500GB --quant int4"),
    ("405B on two A100s with 200 GB of RAM", "Llama-3.1-405B --on 2xA100-80GB,ram=200GB,disk=500GB"),
    ("GLM-4.6 on four 3090s and 192 GB", "GLM-4.6 --on 4xRTX-3090,ram=192GB,channels=2 --quant iq4_xs"),
    ("Kimi-size on 8xH100: DeepSeek-V3 in bf16?", "DeepSeek-V3 --on 8xH100 --quant bf16"),
    ("Cheapest way to serve Air?", "GLM-4.5-Air --on 1xH200 --quant int4 --goal cost"),
    ("Air over Ollama on two 3090s and RAM", "GLM-4.5-Air --on 2xRTX-3090,ram=128GB,channels=2 --quant q4_k_m --engine ollama"),
    ("Windlass on eight H100s?", "GLM-4.5-Air --on 8xH100 --engine windlass"),
    ("8-bit cache for long context on a Mac", "Llama-3.1-70B --on M3-Ultra --quant q4_k_m --context 128k --kv int8"),
    ("AVX-512 for prompts: 64 Zen 5 cores", "Qwen3-30B-A3B --on cpu:64,ram=256GB,channels=12,isa=avx512 --quant q4_k_m --engine ik"),
    ("8,192 GPUs", "DeepSeek-V3 --on '1024x(8xH100)@400Gb' --goal throughput"),
]  # fmt: skip


def answer(arguments: str) -> dict[str, Any] | str:
    """The plan, or the refusal in its own words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        execute(["plan", *shlex.split(arguments), "--json"])
    return json.loads(out.getvalue()) if out.getvalue() else err.getvalue().strip().removeprefix("windlass: ")


def row(question: str, arguments: str) -> str:
    plan = answer(arguments)
    if isinstance(plan, str):
        return f"| {question} | `{arguments}` | refused | {plan} |"
    if not plan["fits"]:
        return f"| {question} | `{arguments}` | does not fit, {plan['short_bytes'] / 2**30:,.1f} GiB short | what would: {'; '.join(plan['would_fit'])} |"
    speed = plan["speed"]
    many = plan["workload"]["concurrency"] > 1
    name = "sustained" if many else "decode"
    low, high = speed[f"{name}_range"]
    said = f"{format_rate(speed[f'{name}_tokens_per_second'])} tokens/s ({format_rate(low)}-{format_rate(high)})"
    said += (
        f" over {plan['workload']['concurrency']:,} at once"
        if many
        else f", first token {format_seconds(speed['time_to_first_token_seconds'])}"
    )
    if plan["load"]:
        said += f"; at most {plan['load']['most_requests_per_second']:.2g} requests/s"
    layout = "".join(f" {key}{plan['layout'][key]}" for key in ("tp", "pp", "ep", "dp") if plan["layout"][key] > 1)
    why = next(reason["why"] for reason in plan["reasons"] if reason["choice"] == "engine")
    caution = f" **Not run yet: {plan['caution']}.**" if plan["caution"] else ""
    return f"| {question} | `{arguments}` | {said} | {plan['engine']}, {plan['scheme']['name']}{layout}: {why}.{caution} |"


def main() -> None:
    print("# Sixty questions\n")
    print(
        "As users ask them; answered by `windlass plan` (`bench/plan/questions.py` prints this page). Eight of ten runs should lie in the brackets.\n"
    )
    print("| question | `windlass plan` | answer | engine and why |\n|---|---|---|---|")
    for question, arguments in QUESTIONS:
        print(row(question, arguments))


if __name__ == "__main__":
    main()
