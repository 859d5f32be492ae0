"""`windlass serve`: a model over HTTP."""

from __future__ import annotations

from pathlib import Path

import typer

from windlass.cli.about.completion import complete_model
from windlass.cli.options import opens_model
from windlass.core.launch import Launch

EXAMPLES = """Examples:

windlass serve SmolLM2-135M-Instruct.gguf

windlass serve ./GLM-4.5-Air-int4 --context 32k --max-waiting 128 --api-key keys.txt --host 0.0.0.0

windlass serve ./GLM-4.5-Air-int4 --workers 10.0.0.7:9998,10.0.0.8:9998 --secret-file ~/.windlass-secret

windlass serve small=./Qwen3-8B-int4 large=./GLM-4.5-Air-int4 --keep 1 --lora small:legal=./adapters/legal

windlass serve ./Qwen3-8B --engine vllm --plan plan.json

windlass serve --route router.toml

windlass serve small=./Qwen3-8B-int4 large=./GLM-4.5-Air-int4 --keep 1 --route router.json"""


@opens_model
def serve(
    models: list[str] | None = typer.Argument(
        None,
        metavar="MODEL...",
        help="A model directory, a .gguf or .m file, or a name from `windlass models` or the hub; NAME=MODEL names it. "
        "Several are loaded on demand.",
        autocompletion=complete_model,
    ),
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 is every interface."),
    port: int = typer.Option(8000, "--port", metavar="PORT", help="Port; 0 picks a free one."),
    api_key: str | None = typer.Option(
        None,
        metavar="KEY|FILE",
        help="Require this API key, or one of a file: one per line, or .toml with names and limits; also WINDLASS_API_KEY.",
    ),
    max_waiting: int = typer.Option(
        64, metavar="N", help="Maximum queued sequences (each of n answers is one); beyond that, 429."
    ),
    max_running: int | None = typer.Option(
        None,
        metavar="N",
        help="Maximum sequences in a batch; by default what memory has room for, up to 256 on a GPU and 16 on a CPU.",
    ),
    route: Path | None = typer.Option(
        None,
        metavar="router.toml|router.json",
        help="Serve a router: clients ask for auto, auto:cheap or auto:best. With MODELs a router.json is enough; --keep 1: they take turns.",
    ),
    engine: str = typer.Option("windlass", metavar="windlass|vllm", help="Inference engine."),
    launch: Launch = typer.Option(),
    plan: Path | None = typer.Option(None, metavar="plan.json", help="Serve as this saved plan says (`windlass plan --save`)."),
    name: str = typer.Option("", "--name", metavar="NAME", help="Model name in the API; without it, the model's own."),
    deadline: float = typer.Option(600.0, metavar="SECONDS", help="Maximum time of a request."),
    drain: float = typer.Option(30.0, metavar="SECONDS", help="Time for running requests to finish at shutdown."),
    max_body: str = typer.Option("8MiB", metavar="SIZE", help="Maximum size of a request body."),
    allow_host: list[str] = typer.Option([], metavar="NAME", help="Another Host header to accept."),
    cors: list[str] = typer.Option([], metavar="ORIGIN", help="An allowed CORS origin, such as https://example.org."),
    log_prompts: bool = typer.Option(False, "--log-prompts", help="Log prompts."),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No access log."),
    page: bool = typer.Option(True, "--page/--no-page", help="The web page at /."),
    files: Path | None = typer.Option(None, metavar="DIR", help="Folder for files and batches (/v1/files, /v1/batches)."),
    history: bool = typer.Option(True, "--history/--no-history", help="Keep a day of numbers and evaluate alert rules."),
    alert_webhook: str = typer.Option("", metavar="URL", help="Post alerts there, in Alertmanager's format."),
    alert_command: str = typer.Option("", metavar="COMMAND", help="Give alerts to this command on standard input, such as mail."),
    metric_aliases: bool = typer.Option(True, "--metric-aliases/--no-metric-aliases", help="vLLM's names in /metrics too."),
    usage_energy: bool = typer.Option(False, "--usage-energy", help="Joules of the request in every response's usage."),
    otlp: str = typer.Option(
        "", metavar="URL", help="Send a span for every request to this OpenTelemetry collector (OTLP over HTTP)."
    ),
    lora: list[str] = typer.Option(
        [],
        metavar="[MODEL:]NAME=DIR",
        help="A LoRA adapter (PEFT format), asked for as MODEL:NAME; of the first model unless it says.",
    ),
    lora_dir: Path | None = typer.Option(
        None, metavar="DIR", help="Where an admin may load LoRA adapters from while the server runs (/v1/load_lora_adapter)."
    ),
    keep: int | None = typer.Option(
        None, metavar="N", help="Of several models, how many stay loaded at a time; by default what fits."
    ),
    memory: str = typer.Option("", metavar="SIZE", help="Of several models, memory that those loaded may take together."),
    unload_after: float | None = typer.Option(
        None, metavar="SECONDS", help="Of several models, unload one that has been idle for so long."
    ),
    tls_cert: str = typer.Option("", metavar="FILE", help="A certificate (PEM): serve over HTTPS."),
    tls_key: str = typer.Option("", metavar="FILE", help="The certificate's private key (PEM)."),
) -> int:
    """Serve a model over HTTP: an OpenAI-compatible API and a web page.

    Listens on localhost by default. Ctrl-C or SIGTERM finishes the running requests and exits; a second one exits at once.
    """
    from windlass.cli.serve.run import ServeOptions, start

    options = ServeOptions(
        models=tuple(models or ()),
        lora=tuple(lora),
        lora_dir=lora_dir,
        keep=keep,
        memory=memory,
        unload_after=unload_after,
        route=route,
        host=host,
        port=port,
        api_key=api_key,
        max_waiting=max_waiting,
        max_running=max_running,
        engine=engine,
        launch=launch,
        plan=plan,
        name=name,
        deadline=deadline,
        drain=drain,
        max_body=max_body,
        allow_host=tuple(allow_host),
        cors=tuple(cors),
        log_prompts=log_prompts,
        quiet=quiet,
        page=page,
        files=files,
        history=history,
        alert_webhook=alert_webhook,
        alert_command=alert_command,
        metric_aliases=metric_aliases,
        usage_energy=usage_energy,
        otlp=otlp,
        tls_cert=tls_cert,
        tls_key=tls_key,
    )
    return start(options)


serve.__doc__ = f"{serve.__doc__}\n\n{EXAMPLES}"
