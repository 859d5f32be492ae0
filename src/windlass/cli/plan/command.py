"""`windlass plan`: hardware, layout, memory, speed and cost of running or training a model, with reasons."""

from __future__ import annotations

from pathlib import Path

import typer

from windlass.cli.about.completion import complete_model

EXAMPLES = """Examples:

windlass plan GLM-4.5-Air --on 1xH200 --quant int4

windlass plan Llama-3.1-405B --on 2xA100-80GB,ram=200GB,disk=500GB

windlass plan GLM-4.6 --on "4x(8xH100-80GB)@400Gb" --goal throughput --context 32k

windlass plan INTELLECT-3 --cloud"""


SERVING = (
    "engine", "goal", "context", "concurrency", "quant", "group", "kv", "prompt_tokens", "new_tokens", "gpu_memory", "host_memory",
    "disk_folder", "requests", "spread", "rate", "ttft", "tpot", "drafts", "acceptance", "cached_prefix", "prefill_on",
    "explain",
)  # fmt: skip
TRAINING = ("tokens", "sequence", "batch", "framework", "lora")


def plan(
    ctx: typer.Context,
    target: str | None = typer.Argument(
        None,
        metavar="MODEL|RECIPE.toml",
        help="A path, a registry name, a Hugging Face name, or a training recipe.",
        autocompletion=complete_model,
    ),
    on: str | None = typer.Option(
        None,
        metavar="HARDWARE",
        help="8xH100-80GB, 2xA100-80GB[70GB],ram=200GB, 4x(8xH100-80GB)@400Gb, 3x(cpu:16,ram=32GB)@1Gb or cluster.toml. Default: this machine.",
    ),
    engine: str = typer.Option(
        "auto",
        metavar="auto|NAME",
        help="windlass, vllm, sglang, tensorrt-llm, llama.cpp (ollama, lmstudio), ik_llama.cpp, ktransformers or mlx. Default: the one that suits it "
        "best of those that run it today.",
    ),
    goal: str = typer.Option("latency", metavar="latency|throughput|cost", help="What to optimize for."),
    context: str | None = typer.Option(None, metavar="8k", help="Context length in tokens, per sequence. Default: 8k."),
    concurrency: int | None = typer.Option(
        None, metavar="N", help="Concurrent sequences. Default: 1 for latency, as many as fit for throughput and cost."
    ),
    quant: str = typer.Option(
        "auto",
        metavar="auto|bf16|fp8|int8|int4|q4_k_m|...",
        help="Weight quantization; also GGUF types, nvfp4, mxfp4, awq, gptq, int3, int5, int6.",
    ),
    group: int = typer.Option(128, metavar="128|64|32", help="Quantization group size (int4, int8)."),
    kv: str = typer.Option("bf16", metavar="bf16|fp8|int8|int4|fp32", help="KV cache type."),
    gpu_memory: str | None = typer.Option(None, metavar="SIZE[,SIZE...]", help="Most memory to use of each GPU. Default: all."),
    host_memory: str | None = typer.Option(None, metavar="SIZE", help="Most host memory to use of each machine. Default: all."),
    disk_folder: Path | None = typer.Option(
        None, metavar="DIR", help="Where weights that do not fit into memory are kept: its free space and speed count."
    ),
    tp: int | None = typer.Option(None, help="Tensor-parallel degree. Default: chosen."),
    pp: int | None = typer.Option(None, help="Pipeline-parallel degree. Default: chosen."),
    ep: int | None = typer.Option(None, help="Expert-parallel degree (reuses the tp ranks). Default: chosen."),
    dp: int | None = typer.Option(None, help="Data-parallel degree: replicas. Default: chosen."),
    prompt_tokens: str | None = typer.Option(None, metavar="1k", help="Prompt length for the speed estimate."),
    new_tokens: str | None = typer.Option(None, metavar="1k", help="Output length for the speed estimate."),
    requests: int = typer.Option(
        0, metavar="N", help="A burst of N requests at once, from the first to the last; not a steady stream."
    ),
    spread: bool = typer.Option(
        False, "--spread", help="With --requests: answers differ in length as in a chat log, so the batch empties slowly."
    ),
    rate: str | None = typer.Option(
        None, metavar="5/s", help="Requests per second: how many are in flight, and how long they wait."
    ),
    ttft: str | None = typer.Option(None, metavar="1s", help="With --rate: longest time to the first token."),
    tpot: str | None = typer.Option(None, metavar="50ms", help="With --rate: longest time between tokens."),
    prefill_on: str | None = typer.Option(
        None,
        metavar="HARDWARE",
        help="With --rate: read prompts on machines of their own, and decode on --on; how many of each are needed.",
    ),
    drafts: int = typer.Option(0, metavar="N", help="Speculative decoding (MTP or a small draft): drafted tokens per step."),
    acceptance: float = typer.Option(0.7, metavar="0..1", help="With --drafts: chance that a draft is accepted."),
    cached_prefix: float = typer.Option(0.0, metavar="0..1", help="Part of each prompt that is in the prefix cache."),
    calibrate: bool = typer.Option(
        False,
        "--calibrate",
        help="Measure this machine first (half a minute): memory, products, link, disk, launches; later plans use it.",
    ),
    explain: bool = typer.Option(
        False, "--explain", help="Show a decode step as a table of its parts; with --plot, also draw it."
    ),
    train: bool = typer.Option(False, "--train", help="Plan a training run."),
    tokens: str | None = typer.Option(None, metavar="15T", help="Training: total tokens."),
    sequence: str | None = typer.Option(None, metavar="4k", help="Training: tokens per sequence."),
    batch: str | None = typer.Option(None, metavar="4M", help="Training: tokens per step."),
    framework: str | None = typer.Option(
        None, metavar="pytorch|megatron|deepspeed", help="Training: whose efficiency to assume. Default: by the recipe."
    ),
    lora: int | None = typer.Option(
        None, metavar="RANK", help="Training: LoRA adapters on frozen weights instead of all weights."
    ),
    cloud: bool = typer.Option(False, "--cloud", help="List cloud offers that can run it, cheapest first."),
    all_offers: bool = typer.Option(
        False, "--all-offers", help="With --cloud: also list prices older than a year or unverified."
    ),
    region: str = typer.Option("world", metavar="R", help="Power grid for the carbon estimate: a country or a cloud region."),
    as_json: bool = typer.Option(False, "--json", help="Print the plan as JSON."),
    save: Path | None = typer.Option(None, metavar="plan.json", help="Save the plan, for `windlass run --plan`."),
    plot: Path | None = typer.Option(None, metavar="out.png", help="Plot memory per device; with --explain, the step's parts."),
) -> int:
    """Plan how to run a model: devices, layout, quantization, memory, speed and cost, with reasons.

    Exit code 3 if it does not fit; the plan then shows the missing bytes and what would fit.
    """
    from windlass.cli.plan import inference as plan_inference
    from windlass.cli.plan import training as plan_training
    from windlass.cli.plan.output import PlanOutput

    if calibrate:
        _refuse(ctx, ("on",), "another machine's; --calibrate measures this one")
        from windlass.cli.plan import calibrate as plan_calibrate

        limits = plan_calibrate.calibrate_here(shown=not as_json)
        if target is None:
            if as_json:
                typer.echo(plan_calibrate.as_json(limits))
            return 0
    if target is None:
        from windlass.errors import BadInput

        raise BadInput("say which model: windlass plan MODEL --on 1xH200")
    output = PlanOutput(as_json=as_json, save=save, plot=plot)
    pins = {name: value for name, value in (("tp", tp), ("pp", pp), ("ep", ep), ("dp", dp)) if value is not None}
    if train or target.endswith(".toml"):
        _refuse(ctx, SERVING, "for inference plans; remove it")
        training = plan_training.TrainingArguments(
            on=on,
            pins=pins,
            tokens=tokens,
            sequence=sequence,
            batch=batch,
            framework=framework,
            lora=lora,
            region=region,
            cloud=cloud,
            all_offers=all_offers,
        )
        return plan_training.run(target, training, output)
    _refuse(ctx, TRAINING, "for training plans; add --train, or remove it")
    inference = plan_inference.InferenceArguments(
        on=on,
        engine=engine,
        goal=goal,
        context=context,
        concurrency=concurrency,
        quant=quant,
        group=group,
        kv=kv,
        pins=pins,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        cloud=cloud,
        all_offers=all_offers,
        region=region,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        disk_folder=disk_folder,
        requests=requests,
        spread=spread,
        rate=rate,
        ttft=ttft,
        tpot=tpot,
        drafts=drafts,
        acceptance=acceptance,
        cached_prefix=cached_prefix,
        prefill_on=prefill_on,
        explain=explain,
    )
    return plan_inference.run(target, inference, output)


def _refuse(ctx: typer.Context, names: tuple[str, ...], why: str) -> None:
    """Refuses options that would have no effect."""
    from windlass.errors import BadInput

    for name in names:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise BadInput(f"--{name.replace('_', '-')} is {why}")


plan.__doc__ = f"{plan.__doc__}\n\n{EXAMPLES}"
