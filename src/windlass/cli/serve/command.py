"""`windlass serve`: a model over HTTP."""

from __future__ import annotations

from pathlib import Path

import typer

from windlass.cli.fleet import options as fleet_options

EXAMPLES = """Examples:

windlass serve SmolLM2-135M-Instruct.gguf

windlass serve ./GLM-4.5-Air-int4 --context 32k --max-waiting 128 --api-key keys.txt --host 0.0.0.0

windlass serve ./GLM-4.5-Air-int4 --workers 10.0.0.7:9998,10.0.0.8:9998 --secret-file ~/.windlass-secret

windlass serve ./Qwen3-8B --engine vllm --plan plan.json"""


def serve(
    model: str = typer.Argument(
        ..., metavar="MODEL", help="A model directory, .gguf or .m file, or a name of the registry or the hub."
    ),
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="Where to listen; 0.0.0.0 is every interface."),
    port: int = typer.Option(8000, metavar="PORT", help="0 takes any that is free."),
    api_key: str | None = typer.Option(
        None, metavar="KEY|FILE", help="Ask for this key, or one of a file's (one a line); also WINDLASS_API_KEY."
    ),
    max_waiting: int = typer.Option(64, metavar="N", help="Requests that may wait besides those that run; more get 429."),
    max_running: int | None = typer.Option(None, metavar="N", help="Sequences run at once; without it what memory has room for."),
    engine: str = typer.Option("windlass", metavar="windlass|vllm", help="Who computes."),
    workers: str | None = fleet_options.WORKERS,
    secret_file: Path | None = fleet_options.SECRET_FILE,
    sync: str = fleet_options.SYNC,
    tp: int = fleet_options.TP,
    pp: int = fleet_options.PP,
    ep: int = fleet_options.EP,
    plan: Path | None = typer.Option(None, metavar="plan.json", help="Serve as `windlass plan --save` decided."),
    name: str = typer.Option("", metavar="NAME", help="What clients call the model; without it, its own name."),
    device: str = typer.Option("auto", metavar="cpu|cuda|mps", help="Where it runs; without it the best there is."),
    kv: str | None = typer.Option(None, metavar="bf16|fp32", help="How keys and values are stored."),
    context: str | None = typer.Option(None, metavar="8k", help="Tokens of prompt and answer together."),
    exact: bool = typer.Option(False, "--exact", help="Packed weights as plain fp32: slower, larger, no rounding."),
    deadline: float = typer.Option(600.0, metavar="SECONDS", help="Longest that a request may take."),
    drain: float = typer.Option(30.0, metavar="SECONDS", help="For what runs to finish when the server is told to end."),
    max_body: str = typer.Option("8MiB", metavar="SIZE", help="Largest body of a request."),
    allow_host: list[str] = typer.Option([], metavar="NAME", help="Another name that the server answers to."),
    cors: list[str] = typer.Option([], metavar="ORIGIN", help="A site whose pages may ask, as https://example.org."),
    log_prompts: bool = typer.Option(False, "--log-prompts", help="Write what is asked to the log."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No line for every request."),
    page: bool = typer.Option(True, "--page/--no-page", help="The web page at /."),
) -> int:
    """Serve a model over HTTP: OpenAI's API, and a page to chat and look at.

    Listens on this machine only, unless told otherwise. Ctrl-C, or SIGTERM, finishes what runs and ends; a second one ends at once.
    """
    from windlass.cli.open.fleet import Over
    from windlass.cli.serve.run import ServeOptions, start
    from windlass.core.layout import Layout

    asked = ServeOptions(
        model=model,
        host=host,
        port=port,
        api_key=api_key,
        max_waiting=max_waiting,
        max_running=max_running,
        engine=engine,
        over=Over(workers=workers, secret_file=secret_file, sync=sync, layout=Layout(tp=tp, pp=pp, ep=ep)),
        plan=plan,
        name=name,
        device=device,
        kv=kv,
        context=context,
        exact=exact,
        deadline=deadline,
        drain=drain,
        max_body=max_body,
        allow_host=tuple(allow_host),
        cors=tuple(cors),
        log_prompts=log_prompts,
        quiet=quiet,
        page=page,
    )
    return start(asked)


serve.__doc__ = f"{serve.__doc__}\n\n{EXAMPLES}"
