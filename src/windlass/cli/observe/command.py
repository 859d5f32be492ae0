"""`windlass observe`: an exporter for a machine, the monitoring stack, its files, a run's energy."""

from __future__ import annotations

from pathlib import Path

import typer

EXAMPLES = """Examples:

windlass observe node --region FRA

windlass observe up --serve 127.0.0.1:8000 --webhook https://example.org/hook

windlass observe render monitoring --hosts hosts.txt

windlass observe energy runs/my-run --region FRA"""

app = typer.Typer(help=f"Watch servers, runs and machines.\n\n{EXAMPLES}", no_args_is_help=True)

SERVE = typer.Option([], metavar="HOST:PORT", help="A `windlass serve` to watch; may be repeated.")
TRAIN = typer.Option([], metavar="HOST:PORT", help="A `windlass train run --prometheus` to watch.")
NODE = typer.Option([], metavar="HOST:PORT", help="A `windlass observe node` to watch.")
EVALUATE = typer.Option([], "--eval", metavar="HOST:PORT", help="A `windlass eval --prometheus` to watch.")
HOSTS = typer.Option(None, metavar="FILE", help="A hostfile, as of `windlass launch`: every host is a node, port 9400.")
PLAN = typer.Option(None, metavar="plan.json", help="A saved plan: its predictions are shown beside what is measured.")
KEY = typer.Option(None, metavar="FILE", help="A file with the key that they ask for.")
WEBHOOK = typer.Option("", metavar="URL", help="Alerts are posted there, in Alertmanager's format.")
MAIL_TO = typer.Option("", metavar="ADDRESS", help="Alerts by mail, through --smtp.")
SMTP = typer.Option("", metavar="HOST:PORT", help="The mail server.")
FIRST_TOKEN = typer.Option(2.5, metavar="SECONDS", help="Objective for the first token; a bound of its histogram.")
BETWEEN = typer.Option(0.2, metavar="SECONDS", help="Objective between tokens; a bound of its histogram.")
GOOD = typer.Option(0.99, metavar="SHARE", help="Share of requests that should keep the objectives.")


@app.command()
def node(
    host: str = typer.Option("127.0.0.1", metavar="ADDRESS", help="Address to listen on; others than localhost need --key."),
    port: int = typer.Option(9400, "--port", metavar="PORT", help="Port; 0 picks a free one."),
    key: Path | None = typer.Option(None, metavar="FILE", help="A file with the key that scrapes must send."),
    host_metrics: str = typer.Option(
        "auto", metavar="auto|yes|no", help="CPU, memory, disk and network; auto: not if node_exporter answers on port 9100."
    ),
    region: str = typer.Option("", metavar="R", help="Power grid, for carbon: a country or a cloud region."),
    grams: float | None = typer.Option(None, metavar="G", help="Your grid's g CO2e per kWh, instead of the region's average."),
    intensity: Path | None = typer.Option(
        None, metavar="FILE", help="g CO2e per kWh by the hour: CSV lines HOUR,GRAMS (0 to 23, UTC) or TIME,GRAMS."
    ),
    budget: float = typer.Option(0.0, metavar="WATTS", help="Alert when this machine uses more; 0: never."),
    simulate: int = typer.Option(0, metavar="N", help="Simulated GPUs instead of real ones, to try dashboards and alerts."),
) -> int:
    """Export this machine's GPUs (DCGM's names), host (node_exporter's names) and energy to Prometheus."""
    from windlass.cli.observe.node import NodeOptions, serve_node

    options = NodeOptions(
        host=host,
        port=port,
        key=key,
        host_metrics=host_metrics,
        region=region,
        grams=grams,
        intensity=intensity,
        budget=budget,
        simulate=simulate,
    )
    return serve_node(options)


@app.command()
def render(
    folder: Path = typer.Argument(..., metavar="DIR", help="Where to write; files of the same names are replaced."),
    serve: list[str] = SERVE,
    train: list[str] = TRAIN,
    node: list[str] = NODE,
    evaluate: list[str] = EVALUATE,
    hosts: Path | None = HOSTS,
    plan: Path | None = PLAN,
    key: Path | None = KEY,
    webhook: str = WEBHOOK,
    mail_to: str = MAIL_TO,
    smtp: str = SMTP,
    first_token: float = FIRST_TOKEN,
    between_tokens: float = BETWEEN,
    good_share: float = GOOD,
) -> int:
    """Write the files for Prometheus, Alertmanager and Grafana, and start nothing."""
    from windlass.cli.observe.stack import StackOptions, write_files

    return write_files(
        folder,
        StackOptions(
            serve=tuple(serve),
            train=tuple(train),
            node=tuple(node),
            evaluate=tuple(evaluate),
            hosts=hosts,
            plan=plan,
            key=key,
            webhook=webhook,
            mail_to=mail_to,
            smtp=smtp,
            first_token=first_token,
            between_tokens=between_tokens,
            good_share=good_share,
        ),
    )


@app.command()
def up(
    folder: Path = typer.Option(Path("windlass-observe"), "--dir", metavar="DIR", help="Files and data."),
    serve: list[str] = SERVE,
    train: list[str] = TRAIN,
    node: list[str] = NODE,
    evaluate: list[str] = EVALUATE,
    hosts: Path | None = HOSTS,
    plan: Path | None = PLAN,
    key: Path | None = KEY,
    webhook: str = WEBHOOK,
    mail_to: str = MAIL_TO,
    smtp: str = SMTP,
    mail: str = typer.Option("", metavar="COMMAND", help="Without Alertmanager: a command that gets alerts on standard input."),
    desktop: bool = typer.Option(False, "--desktop", help="Without Alertmanager: a desktop notice."),
    first_token: float = FIRST_TOKEN,
    between_tokens: float = BETWEEN,
    good_share: float = GOOD,
    prometheus: str = typer.Option("127.0.0.1:9090", metavar="HOST:PORT", help="Where Prometheus listens."),
    alertmanager: str = typer.Option("127.0.0.1:9093", metavar="HOST:PORT", help="Where Alertmanager listens."),
    without: bool = typer.Option(False, "--own", help="Watch by ourselves, even if Prometheus is installed."),
) -> int:
    """Start Prometheus, Alertmanager and Grafana where they are installed; without Prometheus, watch by ourselves.

    Runs until Ctrl-C, which ends what it started. This machine's exporter runs with it if no --node is given.
    """
    from windlass.cli.observe.stack import StackOptions, bring_up

    return bring_up(
        folder,
        StackOptions(
            serve=tuple(serve),
            train=tuple(train),
            node=tuple(node),
            evaluate=tuple(evaluate),
            hosts=hosts,
            plan=plan,
            key=key,
            webhook=webhook,
            mail_to=mail_to,
            smtp=smtp,
            mail=mail,
            desktop=desktop,
            first_token=first_token,
            between_tokens=between_tokens,
            good_share=good_share,
            prometheus=prometheus,
            alertmanager=alertmanager,
            own=without,
        ),
    )


@app.command()
def energy(
    run: Path = typer.Argument(
        ..., metavar="RUN", help="A folder of `windlass train run` or `windlass eval`, or a history file."
    ),
    region: str = typer.Option("world", metavar="R", help="Power grid: a country or a cloud region."),
    grams: float | None = typer.Option(None, metavar="G", help="Your grid's g CO2e per kWh, instead of the region's average."),
    intensity: Path | None = typer.Option(
        None, metavar="FILE", help="g CO2e per kWh by the hour: CSV lines HOUR,GRAMS (0 to 23, UTC) or TIME,GRAMS."
    ),
    watts: float | None = typer.Option(None, metavar="W", help="Measured or rated power, for a run without a counter."),
    pue: float = typer.Option(1.0, metavar="X", help="Power of the data centre over power of its machines."),
    as_json: bool = typer.Option(False, "--json", help="As JSON."),
) -> int:
    """Energy, carbon and what they were used for, with method and uncertainty."""
    from windlass.cli.observe.energy import EnergyOptions, show_energy

    return show_energy(run, EnergyOptions(region=region, grams=grams, intensity=intensity, watts=watts, pue=pue, as_json=as_json))
