"""Sixty questions as users ask them, answered by the planner, as Markdown. Run: python bench/plan/questions.py > docs/reference/plan-questions.md

Every answer is what `windlass plan` says when the script is run; nothing is written by hand but the questions.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

QUESTIONS: tuple[tuple[str, str], ...] = (
    ("Can my RTX 3060 run an 8B model?", "Llama-3.1-8B --on 1xRTX-3060"),
    ("The same as Q4_K_M, how fast?", "Llama-3.1-8B --on 1xRTX-3060 --quant q4_k_m"),
    ("Qwen3-14B on a 12 GB RTX 4070?", "Qwen3-14B --on 1xRTX-4070 --quant q4_k_m"),
    ("gpt-oss-20b on an RTX 4080?", "gpt-oss-20b --on 1xRTX-4080"),
    ("Is an RTX 5080 enough for Mistral Small 24B?", "Mistral-Small-24B --on 1xRTX-5080 --quant q4_k_m"),
    ("Qwen3-32B on one RTX 4090?", "Qwen3-32B --on 1xRTX-4090"),
    ("Qwen3-32B at 32k context on two RTX 3090?", "Qwen3-32B --on 2xRTX-3090 --context 32k"),
    ("Qwen3-30B-A3B on an RTX 3090 Ti?", "Qwen3-30B-A3B --on 1xRTX-3090-Ti --quant q4_k_m"),
    ("Llama 3.3 70B on two RTX 4090?", "Llama-3.3-70B-Instruct --on 2xRTX-4090 --quant q4_k_m"),
    ("Llama 3.3 70B on one RTX 5090 with 128 GB of RAM?", "Llama-3.3-70B-Instruct --on 1xRTX-5090,ram=128GB --quant q4_k_m"),
    ("What does a 7900 XTX do with Qwen3-14B?", "Qwen3-14B --on 1xRadeon-RX-7900-XTX --quant q6_k"),
    ("Qwen3-32B on a Radeon AI PRO R9700?", "Qwen3-32B --on 1xR9700 --quant q5_k_m"),
    ("gpt-oss-120b on a Strix Halo box?", "gpt-oss-120b --on Strix-Halo"),
    ("gpt-oss-120b on a DGX Spark?", "gpt-oss-120b --on DGX-Spark"),
    ("gpt-oss-120b on one H100?", "gpt-oss-120b --on 1xH100"),
    ("gpt-oss-120b with one RTX 4090 and 96 GB of RAM?", "gpt-oss-120b --on 1xRTX-4090,ram=96GB"),
    ("GLM-4.5-Air on a Mac with M2 Max?", "GLM-4.5-Air --on M2-Max --quant q4_k_m"),
    ("GLM-4.5-Air on an M4 Max with 128 GB?", "GLM-4.5-Air --on M4-Max --quant q4_k_m"),
    ("DeepSeek-R1 on an M3 Ultra with 512 GB?", "DeepSeek-R1 --on M3-Ultra[480GB] --quant q4_k_m"),
    ("DeepSeek-R1 in two bits on an M3 Ultra with 256 GB?", "DeepSeek-R1 --on M3-Ultra[230GB] --quant ud_q2_k_xl"),
    ("Kimi-K2 on an M3 Ultra with 512 GB?", "Kimi-K2 --on M3-Ultra[490GB] --quant ud_q2_k_xl"),
    ("DeepSeek-R1 on a 64-core server with 768 GB, CPU only?", "DeepSeek-R1 --on cpu:64,channels=12,ram=768GB --quant q4_k_m"),
    ("DeepSeek-R1 with one RTX 4090 in such a server?", "DeepSeek-R1 --on 1xRTX-4090,ram=768GB,channels=12 --quant q4_k_m"),
    ("Qwen3-30B-A3B on a laptop's 8 cores, 32 GB?", "Qwen3-30B-A3B --on cpu:8,channels=2,ram=32GB --quant q4_k_m"),
    ("Llama 8B on a desktop without a GPU?", "Llama-3.1-8B --on cpu:16,channels=2,ram=64GB --quant q8_0"),
    ("GLM-4.6 in fp8 on eight H100?", "GLM-4.6 --on 8xH100 --quant fp8"),
    ("GLM-4.6 on eight A100?", "GLM-4.6 --on 8xA100"),
    ("GLM-4.6 on four H200, 32 users?", "GLM-4.6 --on 4xH200 --concurrency 32 --context 16k"),
    ("DeepSeek-R1 on eight H200 for 64 users?", "DeepSeek-R1 --on 8xH200 --concurrency 64 --context 8k"),
    ("DeepSeek-R1 on eight H100?", "DeepSeek-R1 --on 8xH100"),
    ("DeepSeek-R1 on 16 H100?", "DeepSeek-R1 --on 2x(8xH100)@400Gb"),
    ("Kimi-K2 on eight B200?", "Kimi-K2 --on 8xB200"),
    ("GLM-4.5-Air on four H100 for 5 requests a second, first token within a second?", "GLM-4.5-Air --on 4xH100 --rate 5/s --ttft 1s --tpot 50ms"),
    ("GLM-5.2 on eight B300?", "GLM-5.2 --on 8xB300"),
    ("Llama-3.1-405B on eight H100?", "Llama-3.1-405B --on 8xH100"),
    ("Llama-3.1-405B on four MI300X?", "Llama-3.1-405B --on 4xMI300X"),
    ("Llama 70B for the most users on two H100?", "Llama-3.3-70B-Instruct --on 2xH100 --goal throughput --context 4k"),
    ("Llama 70B at 128k context on two H200?", "Llama-3.3-70B-Instruct --on 2xH200 --context 128k"),
    ("Qwen3-235B on eight A100?", "Qwen3-235B-A22B --on 8xA100"),
    ("Qwen3-235B on four RTX PRO 6000?", "Qwen3-235B-A22B --on 4xRTX-PRO-6000"),
    ("Mistral Large on two A100?", "Mistral-Large-123B --on 2xA100 --quant awq"),
    (
        "DeepSeek-V3 at 20 requests a second, prompts of 4k on machines of their own?",
        "DeepSeek-V3 --on 4x(8xH100)@400Gb --prefill-on 2x(8xH100)@400Gb --rate 20/s --ttft 3s --tpot 60ms --prompt-tokens 4k --new-tokens 512",
    ),
    ("How many H100 for GLM-4.6 in fp8? I have one.", "GLM-4.6 --on 1xH100,ram=512GB --quant fp8"),
    ("Llama 70B on eight V100?", "Llama-3.3-70B-Instruct --on 8xV100-32GB"),
    ("Llama 70B on Gaudi 3?", "Llama-3.3-70B-Instruct --on 8xGaudi3"),
    ("Can I plan Qwen3-Next?", "Qwen3-Next-80B-A3B --on 1xH200"),
    ("Pre-train Llama 8B on 15T tokens with 1,024 H100: how long?", "Llama-3.1-8B --train --tokens 15T --on 128x(8xH100)@400Gb"),
    ("Pre-train Llama 8B on my eight RTX 4090?", "Llama-3.1-8B --train --on 8xRTX-4090"),
    ("Full fine-tuning of Llama 8B on one H100?", "Llama-3.1-8B --train --tokens 100M --on 1xH100"),
    ("Full fine-tuning of Llama 8B on eight H100?", "Llama-3.1-8B --train --tokens 100M --on 8xH100"),
    ("LoRA of Llama 8B on one RTX 4090?", "Llama-3.1-8B --train --lora 16 --sequence 2k --on 1xRTX-4090"),
    ("LoRA of Llama 70B on one H100?", "Llama-3.3-70B-Instruct --train --lora 16 --on 1xH100"),
    ("LoRA of Llama 70B on eight A100?", "Llama-3.3-70B-Instruct --train --lora 16 --on 8xA100"),
    ("LoRA of GLM-4.5 on eight H100?", "GLM-4.5 --train --lora 16 --on 8xH100"),
    ("LoRA of GLM-4.5 on sixteen H100?", "GLM-4.5 --train --lora 16 --on 16xH100"),
    ("LoRA of Qwen3-30B-A3B on eight H100?", "Qwen3-30B-A3B --train --lora 16 --on 8xH100"),
    ("Pre-train GLM-4.5-Air on 22T tokens with 2,048 H100?", "GLM-4.5-Air --train --tokens 22T --on 256x(8xH100)@400Gb"),
    ("Pre-train GLM-4.5 on 23T tokens with 64 H200?", "GLM-4.5 --train --tokens 23T --on 8x(8xH200)@400Gb"),
    ("Pre-train DeepSeek-V3 on 14.8T tokens with 2,048 H800?", "DeepSeek-V3 --train --tokens 14.8T --framework megatron --on 256x(8xH800)@400Gb"),
    ("Extend Llama 70B to 128k on 64 H100?", "Llama-3.1-70B --train --tokens 1B --sequence 128k --on 8x(8xH100)@400Gb"),
)  # fmt: skip


def answer(command: str) -> tuple[str, str, str]:
    """What the planner says: the answer, the engine, and why."""
    told = subprocess.run(
        [sys.executable, "-m", "windlass", "plan", *command.split(), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if told.returncode not in (0, 3):
        return "no: " + told.stderr.strip().removeprefix("windlass: ").splitlines()[-1], "-", "-"
    plan: dict[str, Any] = json.loads(told.stdout)
    if not plan["fits"]:
        short = f"no: {plan['short_bytes'] / 2**30:,.0f} GiB short on a device" if plan.get("short_bytes") else "no"
        return short, plan["engine"], "would fit: " + ("; ".join(plan["would_fit"][:2]) or "nothing that was tried")
    return _trained(plan) if plan["train"] else _served(plan)


def _served(plan: dict[str, Any]) -> tuple[str, str, str]:
    speed = plan["speed"]
    how = f"{plan['scheme']['name']}, {_layout(plan['layout'])}"
    pace = _pace(plan) if speed else "memory only; speed is not predicted"
    used = max(held["total_bytes"] / held["capacity_bytes"] for held in plan["memory"]["per_device"])
    host = plan["memory"]["host_bytes"]
    beside = f", {host / 2**30:,.0f} GiB in host memory" if host else ""
    bound = f"bound by {speed['bound_by']}; " if speed else ""
    chosen = next(reason["why"] for reason in plan["reasons"] if reason["choice"] == "engine")
    without = f"; without offloading: {plan['would_fit'][0]}" if plan["would_fit"] else ""
    asked = plan["disaggregated"] or plan["load"]
    told = f"{'no' if asked and not asked['within'] else 'yes'}: {pace} ({how}){_load(plan)}"
    return told, plan["engine"], f"{chosen}; {bound}{used:.0%} of a device's memory{beside}{without}"


def _load(plan: dict[str, Any]) -> str:
    """Of a stream of requests, on these machines and with prompts on others."""
    load, apart = plan["load"], plan["disaggregated"]
    if apart:
        pools = f"{apart['prefill']['units']} x prefill and {apart['decode']['units']} x decode"
        return f"; {pools} for {apart['requests_per_second']:g}/s, first token {apart['time_to_first_token_seconds']:.1f} s"
    return f"; at most {load['most_requests_per_second']:.3g} requests/s" if load else ""


def _pace(plan: dict[str, Any]) -> str:
    """Of one sequence while it decodes; of many with their prompts."""
    name = "sustained" if plan["workload"]["concurrency"] > 1 else "decode"
    low, high = plan["speed"][f"{name}_range"]
    rate = plan["speed"][f"{name}_tokens_per_second"]
    many = f" over {plan['workload']['concurrency']:,} at once" if plan["workload"]["concurrency"] > 1 else ""
    return f"{_rate(rate)} tokens/s{many}, {_rate(low)}-{_rate(high)}"


def _trained(plan: dict[str, Any]) -> tuple[str, str, str]:
    train = plan["train"]
    run, rate = train["run"], train["intervals"]["tokens_per_second"]
    days = train["intervals"]["days"]
    warned = [reason["why"] for reason in plan["reasons"] if reason["choice"] == "warning"]
    length = f"{_long(days['low'])} to {_long(days['high'])} for {run['tokens'] / 1e9:,.1f}B tokens"
    why = f"{_rate(rate['low'])} to {_rate(rate['high'])} tokens/s, MFU {train['model_flops_utilization']:.0%}, {_layout(train['layout'])}"
    return f"{'fits, but ' + warned[0] if warned else 'yes: ' + length}", train["job"]["framework"], why


def _rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.3g}"


def _long(days: float) -> str:
    return f"{24 * days:,.1f} hours" if days < 2 else f"{days:,.0f} days"


def _layout(groups: dict[str, int]) -> str:
    return (
        " ".join(f"{name}={groups[name]}" for name in ("tp", "cp", "pp", "ep", "dp") if groups.get(name, 1) > 1) or "one device"
    )


def main() -> None:
    print("# Sixty questions\n")
    print(
        "What `windlass plan` answers to questions as people ask them. Made by `python bench/plan/questions.py`; intervals hold 80 % of runs.\n"
    )
    print("| question | answer | engine | why | command: `windlass plan ...` |\n|---|---|---|---|---|")
    for question, command in QUESTIONS:
        told, engine, why = answer(command)
        print(f"| {question} | {told} | {engine} | {why} | `{command}` |", flush=True)


if __name__ == "__main__":
    main()
