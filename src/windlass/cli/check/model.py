"""A model: its files, a plan for this machine; with --full a load, a generation and how long evaluations take."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.cli.check.options import CheckOptions, Found, plan_row, problem_of, say
from windlass.cli.check.rehearsal import basis_of, rehearse, require_tasks
from windlass.core.launch import Launch, RandomInit
from windlass.errors import Error
from windlass.runtime.machine.health.other_programs import OtherPrograms
from windlass.tasks.check.model.estimate import (
    ANSWER_TOKENS,
    EXAMPLES,
    PROMPT_TOKENS,
    evaluation_seconds,
    of_others,
    one_after_another,
)
from windlass.tasks.check.model.files import FileFacts, judge_files
from windlass.tasks.check.model.generation import GenerationFacts, judge_generation
from windlass.tasks.check.needs import needs_of_plan
from windlass.tasks.check.report import Check, failed

if TYPE_CHECKING:
    from windlass.core.client import SyncClient
    from windlass.core.plan import Plan
    from windlass.open.resolve import ModelDescription

CONTEXT, PROMPT, NEW_TOKENS = 8192, "The quick brown fox jumps over the lazy dog, and then it", 64
TIMED_TOKENS = 128
"""Of the prompt: repeated to this length, so that prefill can be timed."""


def check_model(options: CheckOptions) -> Found:
    from windlass.open.resolve import find_model

    if options.tasks:
        require_tasks(options.tasks)
    location = find_model(options.target)
    path = location.path
    rows = [] if options.random_weights else file_rows(path, options)
    if path is None and not options.random_weights:
        rows = [
            failed(
                "model files",
                f"{location.hub} is not on this machine",
                "its files",
                f"windlass run {options.target} downloads it; or --random-weights",
            )
        ]
    try:
        plan = _plan(options)
    except Error as error:
        return Found(rows=(*rows, failed("plan", problem_of(error), "a plan for this machine", "see `windlass plan`")))
    rows.append(plan_row(plan))
    found = Found(needs=needs_of_plan(plan), rows=tuple(rows))
    runnable = plan.fits and not any(row.state == "fail" for row in rows)
    return _measured(found, plan, path, options) if options.full and runnable else found


def file_rows(path: Path | None, options: CheckOptions) -> list[Check]:
    if path is None:
        return []
    from windlass.open.checkpoint_files import read_files
    from windlass.runtime.weights.files import model_file

    found = model_file(path)
    facts = read_files(found, digests=options.full, seen=lambda name: say(options, f"reading {name}"))
    return judge_files(_described(facts, found))


def _described(facts: FileFacts, path: Path) -> FileFacts:
    """With what its config and its tokenizer say."""
    from windlass.core.count import count_parameters
    from windlass.open.resolve import describe_path
    from windlass.runtime.weights.text.files import model_text

    changes: dict[str, Any] = {}
    try:
        described = describe_path(path)
        changes["parameters"] = count_parameters(described.spec, described.rules).total
    except Error as error:
        changes["config_problem"] = problem_of(error)
    try:
        changes["has_chat_template"] = model_text(path).chat_template is not None
    except Error as error:
        changes["tokenizer_problem"] = problem_of(error)
    return msgspec.structs.replace(facts, **changes)


def _plan(options: CheckOptions) -> Plan:
    from windlass.open.resolve import describe_model
    from windlass.runtime.machine.probe import probe
    from windlass.tasks.plan.inference.assemble import make_plan
    from windlass.tasks.plan.inference.search.request import PlanRequest

    resolved = describe_model(options.target)
    request = PlanRequest(
        spec=resolved.spec,
        rules=resolved.rules,
        hardware=probe(gpus=options.device != "cpu"),
        context_tokens=options.context_tokens or min(CONTEXT, resolved.spec.context_tokens),
        concurrency=1,
        engine="windlass",
        quant=options.quant or _stored(resolved, options),
    )
    return make_plan(request, source=resolved.source, digest=resolved.digest)


def _stored(resolved: ModelDescription, options: CheckOptions) -> str:
    """As the files are; random weights are int4."""
    if options.random_weights:
        return "int4"
    path = Path(resolved.source)
    if not path.is_dir():
        return "int4" if path.is_file() else "auto"
    from windlass.model.formats.config import read_config
    from windlass.open.scheme import stored_scheme

    stored = stored_scheme(read_config(path))[0]
    return stored if stored in ("bf16", "int4", "int8", "fp8") else "auto"


# --- --full


def _measured(found: Found, plan: Plan, path: Path | None, options: CheckOptions) -> Found:
    from windlass.cli.run.session import ready_client

    launch = _launch(path, options)
    say(options, "loading the model")
    began = time.monotonic()
    try:
        with ready_client(launch, not options.as_json) as client:
            facts = _generate(client, time.monotonic() - began, path, options)
    except Error as error:
        return msgspec.structs.replace(
            found, rows=(*found.rows, failed("load", problem_of(error), "that it loads", "see the message"))
        )
    speed = plan.speed.decode_tokens_per_second if plan.speed is not None else 0.0
    used = max(held.total_bytes for held in plan.memory.per_device)
    rows = judge_generation(facts, used, speed)
    try:
        estimates = _estimates(facts, options, options.price or plan.cost.usd_per_hour)
    except Error as error:  # what was measured before it is still worth reading
        by_hand = f"run it by hand: windlass eval {options.target} --tasks {options.tasks} --num-examples 4"
        rows.append(failed("evaluation", problem_of(error), "a short one that ends", by_hand))
        estimates = {}
    return Found(needs=found.needs, rows=(*found.rows, *rows), estimates=estimates)


def _launch(path: Path | None, options: CheckOptions) -> Launch:
    context = options.context_tokens or CONTEXT
    if options.random_weights:
        from windlass.open.resolve import model_config

        config, label = model_config(options.target)
        config = {
            key: value for key, value in config.items() if key != "quantization_config"
        }  # as it is published does not matter
        limit = min(context, int(config.get("max_position_embeddings", context)))
        random = RandomInit(config=config, scheme=options.quant or "int4")
        return Launch(model=label, device=options.device, context_tokens=limit, max_sequences=1, random_weights=random)
    from windlass.open.resolve import describe_model, model_files

    context = min(context, describe_model(options.target).spec.context_tokens)
    return Launch(
        model=str(model_files(options.target, shown=not options.as_json)),
        device=options.device,
        context_tokens=context,
        max_sequences=1,
        quant=options.quant,
    )


def _generate(client: SyncClient, load_seconds: float, path: Path | None, options: CheckOptions) -> GenerationFacts:
    from windlass.core.request import Request, Sampling

    info = client.info()
    ids, round_trips = _prompt(path if info.has_text else None, info.vocab_size)
    asked = Request(token_ids=tuple(ids), sampling=Sampling(temperature=0.0), max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    for _ in client.generate(msgspec.structs.replace(asked, max_tokens=2, cache_salt="warm")):  # first uses of kernels
        pass
    deltas = list(client.generate(asked))
    timings = deltas[-1].timings
    stats = client.info().stats
    return GenerationFacts(
        load_seconds=load_seconds,
        logprobs=tuple(one.logprob for delta in deltas for one in delta.logprobs),
        vocab_size=info.vocab_size,
        num_prompt_tokens=len(ids),
        prefill_seconds=timings.prefill_seconds if timings is not None else 0.0,
        decode_seconds=timings.decode_seconds if timings is not None else 0.0,
        text="".join(delta.content for delta in deltas),
        round_trips=round_trips,
        memory_bytes=max((device.own_bytes for device in stats.devices), default=stats.process_bytes) if stats is not None else 0,
        is_random=options.random_weights,
    )


def _prompt(path: Path | None, vocab_size: int) -> tuple[list[int], bool | None]:
    """Tokens of a sentence, repeated; and whether the sentence comes back from them."""
    if path is None:
        return [(7 * place) % max(vocab_size - 1, 1) for place in range(TIMED_TOKENS)], None
    from windlass.runtime.weights.text.files import model_text

    tokenizer = model_text(path).tokenizer
    ids = tokenizer.encode(PROMPT)
    came_back = tokenizer.decode(ids).strip() == PROMPT
    return (ids * (TIMED_TOKENS // max(len(ids), 1)))[: TIMED_TOKENS - len(ids)] + ids, came_back


def _estimates(facts: GenerationFacts, options: CheckOptions, price: float) -> dict[str, Any]:
    numbers = sorted({*EXAMPLES, options.examples or EXAMPLES[0]})
    prefill, decode = facts.prefill_tokens_per_second, facts.decode_tokens_per_second
    if options.tasks:
        others = OtherPrograms()
        runs = rehearse(options, max(numbers), prefill, decode)
        share = others.share()
        times = {number: evaluation_seconds(runs, number, share) for number in numbers}
        basis = basis_of(runs, options.tasks) + of_others(share)
    else:
        times = {number: one_after_another(facts.load_seconds, prefill, decode, number) for number in numbers}
        basis = (
            f"{PROMPT_TOKENS} prompt and {ANSWER_TOKENS} answer tokens each, one after another; "
            "`eval` asks several at once, which --tasks NAME measures"
        )
    return {
        "examples": {str(number): time.as_json(price) for number, time in times.items()},
        "decode_tokens_per_second": decode,
        "prefill_tokens_per_second": prefill,
        "load_seconds": facts.load_seconds,
        "basis": basis,
    }
