"""`windlass eval run`: one model after another, each with a journal of its own, and one report over all."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.eval.metrics import exported
from windlass.cli.eval.models import MemoryCheck, OpenModel, check_names, is_server, opened, unique_label
from windlass.cli.eval.options import EvalOptions, check_options, launch_of, with_launch
from windlass.cli.eval.progress import showing
from windlass.core.client import Client
from windlass.core.request import GREEDY, Request
from windlass.errors import BadInput
from windlass.tasks.evaluate.report.files import files
from windlass.tasks.evaluate.report.report import ModelRun, Report, as_json, build, measure
from windlass.tasks.evaluate.run.budget import Budget, Price, left_of, parse_budget, parse_price
from windlass.tasks.evaluate.run.estimate import estimate
from windlass.tasks.evaluate.run.items import Prepared, items, missing, prepare
from windlass.tasks.evaluate.run.records import Journal, decode
from windlass.tasks.evaluate.run.runner import How, Runner
from windlass.tasks.evaluate.run.settings import SAMPLED_TEMPERATURE, SAVED, Settings, Wanted, encode_wanted, folder_name, resumed
from windlass.tasks.evaluate.sandbox.sandbox import Sandbox
from windlass.tasks.evaluate.tasks.catalog import choose_tasks
from windlass.tasks.evaluate.tasks.sources import is_here
from windlass.tasks.evaluate.tasks.task import Task
from windlass.tasks.route.decide.confidence import confidence_of

JOURNAL = "journal.jsonl"


def evaluate(wanted: Wanted, options: EvalOptions) -> int:
    check_options(options)
    wanted = with_launch(wanted, options.launch)
    folder = options.results_dir or default_folder(wanted)
    if options.resume:
        wanted = resumed(folder, wanted)
        options = msgspec.structs.replace(options, launch=launch_of(wanted, options.launch))
    check_names(wanted.models)
    _check_harness(wanted, options)
    tasks = _tasks(wanted)
    from windlass.model.formats.disk.atomic import write_atomically, write_errors

    with write_errors(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
    _refuse_overwriting(folder, options.resume)
    write_atomically(folder / SAVED, encode_wanted(wanted))
    try:
        return asyncio.run(_evaluate(wanted, tasks, folder, options))
    except KeyboardInterrupt:
        sys.stderr.write(f"what came is in {folder}; --resume goes on\n")
        raise


def _check_harness(wanted: Wanted, options: EvalOptions) -> None:
    if not options.harness[0]:
        return
    from windlass.cli.eval.harness import harness_python

    harness_python()
    local = next((name for name in wanted.models if not is_server(name)), None)
    if local is not None:
        raise BadInput(f"--harness talks to servers: start `windlass serve {local}` and name its URL")


def default_folder(wanted: Wanted) -> Path:
    """The same words, the same folder: an evaluation that was started before is found again."""
    if not wanted.models:
        raise BadInput("name at least one model, or with --resume a --results-dir (see `windlass eval --help`)")
    digest = blake2b(msgspec.json.encode(wanted), digest_size=3).hexdigest()
    names = "-".join(folder_name(Path(name).name or name) for name in wanted.models)
    return Path("eval-results") / f"{names[:60]}-{digest}"


def _refuse_overwriting(folder: Path, resume: bool) -> None:
    found = sorted(folder.glob(f"*/{JOURNAL}"))
    if found and not resume:
        raise BadInput(f"{folder} holds an evaluation; add --resume to go on with it, or choose another --results-dir")


def _tasks(wanted: Wanted) -> list[Task]:
    """Without --tasks, those whose data is here."""
    found = choose_tasks(wanted.tasks, wanted.category)
    if wanted.tasks is not None:
        return found
    here = [task for task in found if is_here(task)]
    if not here:
        raise BadInput("no task of this category has its data on this machine; `windlass eval tasks` says where it is looked for")
    return here


async def _evaluate(wanted: Wanted, tasks: Sequence[Task], folder: Path, options: EvalOptions) -> int:
    runs: list[ModelRun] = []
    theirs: dict[str, Any] = {}
    sandbox, begin, usd = await _sandbox(tasks, options), time.monotonic(), 0.0
    try:
        for name in wanted.models:
            memory = MemoryCheck()
            async with opened(name, options) as model:
                label = unique_label(model.label, name, {run.model for run in runs})
                how = how_of(model, options, time.monotonic() - begin, usd)
                run, spent = await _one(label, model, wanted, tasks, folder, options, how, sandbox)
                runs.append(run)
                usd += spent
                _report(folder, runs, options)  # after every model: the next may take hours
                theirs |= await _harness(label, model, wanted, folder, options)
            _remark(memory.check(label), options)
    finally:
        if sandbox is not None:
            sandbox.close()
    return _finish(folder, runs, theirs, options)


async def _harness(label: str, model: OpenModel, wanted: Wanted, folder: Path, options: EvalOptions) -> dict[str, Any]:
    """By model, what lm-evaluation-harness says; empty if it was not asked for."""
    if not options.harness[0]:
        return {}
    from windlass.cli.eval.harness import run_harness

    place, style = folder / label, wanted.style or "chat"
    found = await run_harness(
        model.url, model.info.model, options.harness[1], place, style, model.concurrency, wanted.num_examples, options.api_key
    )
    return {label: found}


async def _sandbox(tasks: Sequence[Task], options: EvalOptions) -> Sandbox | None:
    if options.skip_execution or all(task.grader != "python" for task in tasks):
        return None
    sandbox = Sandbox(anyway=options.execute_anyway)
    try:
        await sandbox.check()
    except BaseException:
        sandbox.close()
        raise
    if sandbox.missing:
        _remark(f"programs run in a weak sandbox, without {'; '.join(sandbox.missing)}", options)
    return sandbox


async def _one(
    label: str,
    model: OpenModel,
    wanted: Wanted,
    tasks: Sequence[Task],
    folder: Path,
    options: EvalOptions,
    how: How,
    sandbox: Sandbox | None,
) -> tuple[ModelRun, float]:
    """And the dollars that this run of it took."""
    prepared = tuple(prepare(task, wanted, model.info.has_chat) for task in tasks)
    settings = settings_of(label, model, wanted, prepared)
    await _check_logprobs(model.client, prepared, model.top)
    from windlass.model.formats.disk.atomic import write_errors
    from windlass.model.formats.disk.journal import Journal as DiskJournal

    place = folder / label
    with write_errors(place, 0):
        place.mkdir(exist_ok=True)
    journal = DiskJournal(place / JOURNAL, settings.fingerprint())
    try:
        _announce(label, prepared, settings, journal, place, model, how, options)
        with showing(label, not options.as_json) as bar, exported(bar, options.prometheus) as watcher:
            runner = Runner(model.client, prepared, settings, journal, how, sandbox, watcher)
            records = await runner.run()
        if runner.is_stopped_by_budget:
            _remark(f"{label}: the budget is spent; --resume with another --budget goes on", options)
        layers = sandbox.layers if sandbox else ""
        run = ModelRun(settings=settings, prepared=prepared, records=dict(records), sandbox=layers, price=how.price)
        return run, runner.spent_usd
    finally:
        journal.close()


def settings_of(label: str, model: OpenModel, wanted: Wanted, prepared: Sequence[Prepared]) -> Settings:
    samples = wanted.samples or 1
    default = SAMPLED_TEMPERATURE if samples > 1 else 0.0
    is_local = not model.url  # a server computes as it was started
    return Settings(
        model=label,
        weights=model.weights,
        tasks=tuple(one.settings for one in prepared),
        num_examples=wanted.num_examples,
        samples=samples,
        temperature=default if wanted.temperature is None else wanted.temperature,
        seed=wanted.seed or 0,
        thinking=wanted.thinking,
        quant=wanted.quant if is_local else None,
        kv=wanted.kv if is_local else None,
        exact=wanted.exact if is_local else None,
        deterministic=wanted.deterministic if is_local else None,
        context=wanted.context if is_local else None,
        sync=wanted.sync if is_local else None,
    )


def how_of(model: OpenModel, options: EvalOptions, seconds: float, usd: float) -> How:
    """`seconds`, `usd`: what models before it took of the budget."""
    price = parse_price(options.price) if options.price else Price(usd_per_hour=model.speed.usd_per_hour)
    budget = parse_budget(options.budget) if options.budget else Budget()
    if budget.usd is not None and not price.is_known:
        raise BadInput(
            f"--budget {options.budget} needs a price: add --price IN,OUT (dollars per million tokens) or --price USD/h"
        )
    return How(
        concurrency=model.concurrency,
        deadline_seconds=options.deadline_seconds,
        patience_seconds=options.wait_seconds,
        budget=left_of(budget, seconds, usd),
        price=price,
        watts=model.speed.watts,
        top=model.top,
        confidence=confidence_of if options.confidence else None,
    )


async def _check_logprobs(client: Client, prepared: Sequence[Prepared], top: int) -> None:
    """Before anything is asked: a server without log-probabilities cannot answer some tasks at all."""
    needing = next((one.task.name for one in prepared if one.task.grader == "choice"), None)
    if needing is None:
        return
    request = Request(prompt="Answer:", sampling=GREEDY, max_tokens=1, logprobs=top)
    deltas = [delta async for delta in client.generate(request)]
    if not any(delta.logprobs for delta in deltas):
        raise BadInput(f"the server returns no log-probabilities, which task {needing} needs; leave the task out")


def _announce(
    label: str,
    prepared: Sequence[Prepared],
    settings: Settings,
    journal: Journal,
    path: Path,
    model: OpenModel,
    how: How,
    options: EvalOptions,
) -> None:
    from windlass.model.formats.disk.atomic import require_free

    have = {key: decode(payload) for key, payload in journal.records().items()}
    wanted = items(prepared, settings.samples, False)
    left = missing(wanted, have)
    found = estimate(left, {one.task.name: one.task for one in prepared}, model.speed, how.price, options.region)
    require_free(path, found.disk_bytes)
    for one in prepared:
        if not one.is_pinned:
            _remark(f"{one.task.name}: {one.data} is another revision than the pinned one; results say so", options)
    if not options.as_json:
        from windlass.cli.eval.tables import estimate_line

        resumes = f"{len(wanted) - len(left):,} of {len(wanted):,} answers are there; " if have else ""
        sys.stderr.write(f"{label}: {resumes}{estimate_line(found)}; {how.concurrency} requests at once\n")


def _report(folder: Path, runs: Sequence[ModelRun], options: EvalOptions) -> None:
    from windlass.model.formats.disk.atomic import write_atomically

    made = files(build(runs), measure(runs, options.region), runs)
    for name, content in made.items():
        write_atomically(folder / name, content)


def _finish(folder: Path, runs: Sequence[ModelRun], theirs: dict[str, Any], options: EvalOptions) -> int:
    report, clock = build(runs), measure(runs, options.region)
    _export(folder, report, runs, options)
    written = [folder / name for name in ("report.html", "report.md", "report.png") if (folder / name).exists()]
    if options.as_json:
        journals = {run.model: folder / run.model / JOURNAL for run in runs}
        made = as_json(report, clock, journals) | ({"harness": theirs} if theirs else {})
        text = msgspec.json.format(msgspec.json.encode(made), indent=2).decode()
        sys.stdout.write(text + "\n")
        return 0
    from windlass.cli.eval.tables import show_harness, show_report

    show_report(report, clock, written)
    show_harness(theirs)
    return 0


def _export(folder: Path, report: Report, runs: Sequence[ModelRun], options: EvalOptions) -> None:
    from datetime import UTC, datetime

    from windlass.model.formats.disk.atomic import write_atomically

    now = datetime.now(UTC)
    if "lm-eval" in options.layouts:
        from windlass import __version__
        from windlass.tasks.evaluate.report.lm_eval import lm_eval_files

        for name, content in lm_eval_files(report, list(runs), now.strftime("%Y-%m-%dT%H-%M-%S"), __version__).items():
            (folder / "export-lm-eval" / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "export-lm-eval" / name, content)
    if "inspect" in options.layouts:
        from windlass.tasks.evaluate.report.inspect_log import write_inspect_logs

        (folder / "export-inspect").mkdir(exist_ok=True)
        write_inspect_logs(report, runs, folder / "export-inspect", now.isoformat())


def _remark(line: str, options: EvalOptions) -> None:
    if line and not options.as_json:
        sys.stderr.write(f"{line}\n")
