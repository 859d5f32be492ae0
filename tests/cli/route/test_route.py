"""`windlass route` from the command line, in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tasks" / "route"))

from routing import NAME, SUM, answers

from windlass.cli import execute

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("route")
    lines = b"\n".join(msgspec.json.encode(one) for one in answers())
    (made / "answers.jsonl").write_bytes(lines)
    assert (
        execute(["route", "fit", str(made / "answers.jsonl"), "--floor", "0.9", "--out", str(made / "router.json"), "--json"])
        == 0
    )
    return made


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """The one line that a refused command prints."""
    assert execute(list(words)) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_report_has_its_stable_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["route", "report", str(folder / "router.json"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"name", "score", "cost"} <= report["models"][0].keys()
    assert {"score", "cost", "share"} <= report["router"].keys() and sum(report["router"]["share"].values()) == pytest.approx(1.0)
    assert {"random", "length", "best_single", "oracle"} == report["baselines"].keys()
    assert all(isinstance(report[name], float) for name in ("apgr", "cpt50", "cpt80"))
    assert {"asked", "held", "confidence"} <= report["floor"].keys() and report["floor"]["splits"]["num_splits"] == 200
    assert report["cross_validation"].startswith("5-fold")


def test_tables_plots_and_pages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot, page = folder / "pareto.png", folder / "report.html"
    assert execute(["route", "report", str(folder / "router.json"), "--plot", str(plot), "--page", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "oracle" in shown and "APGR" in shown and "floor 0.9" in shown
    assert plot.read_bytes().startswith(b"\x89PNG") and b"<svg" in page.read_bytes() and b"small" in page.read_bytes()


@pytest.mark.parametrize(("prompt", "model"), [(SUM, "small"), (NAME, "large")])
def test_ask_says_which_model_and_why(folder: Path, capsys: pytest.CaptureFixture[str], prompt: str, model: str) -> None:
    assert execute(["route", "ask", str(folder / "router.json"), prompt, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == model and found["reason"] and not found["is_unlike"]


def test_bad_input_is_one_line_that_says_what_would_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, router = str(folder / "answers.jsonl"), str(folder / "router.json")
    assert "does not exist" in said(capsys, "route", "fit", "nothing.jsonl")
    assert "did you mean large" in said(capsys, "route", "fit", table, "--models", "small,lareg")
    assert "cheapest first" in said(capsys, "route", "fit", table, "--models", "small")
    assert "--floor 1" in said(capsys, "route", "fit", table, "--floor", "1.7")
    assert "NAME=0.5,1.5" in said(capsys, "route", "fit", table, "--price", "0.5,1.5")
    assert "is not a router" in said(capsys, "route", "report", table)
    assert "auto:best" in said(capsys, "route", "ask", router, "x", "--model", "auto:bets")
    assert "two models or more" in said(capsys, "route", "compare", "tiny-glm")
    (folder / "half.jsonl").write_text('{"prompt": "a", "model": "m"}\n')
    assert "half.jsonl, line 1" in said(capsys, "route", "fit", str(folder / "half.jsonl"))
    assert "or a router with --route" in said(capsys, "serve")


def test_a_router_of_other_models_is_not_served(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = 'router = "router.json"\n[[models]]\nname = "tiny"\nat = "http://localhost:1"\n'
    (folder / "router.toml").write_text(settings)
    assert "was fitted to small, large" in said(capsys, "serve", "--route", str(folder / "router.toml"), "--port", "0")


def test_the_metrics_are_those_that_the_alert_about_drift_reads() -> None:
    import asyncio

    from prometheus_client import CollectorRegistry, generate_latest
    from routing import Model, chat, collect, routed

    from windlass.cli.serve.route import RouterCollector
    from windlass.core.metrics.training import ROUTE_DECISIONS, ROUTE_EXPECTED_SHARE

    router, registry = routed(Model("small"), Model("large")), CollectorRegistry()
    registry.register(RouterCollector(router))
    asyncio.run(collect(router, chat(SUM)))
    asyncio.run(collect(router, chat(SUM, model="large")))  # named: the router decided nothing
    text = generate_latest(registry).decode().splitlines()
    assert f'{ROUTE_DECISIONS}{{model="small"}} 1.0' in text and f'{ROUTE_DECISIONS}{{model="large"}} 0.0' in text
    shares = {line.split(" ")[0]: float(line.split(" ")[1]) for line in text if line.startswith(f"{ROUTE_EXPECTED_SHARE}{{")}
    assert len(shares) == 2 and sum(shares.values()) == pytest.approx(1.0)


def test_models_of_the_command_line_are_those_of_the_router(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    router = str(folder / "router.json")
    assert "needs the models" in said(capsys, "serve", "--route", router)
    assert "was fitted to small, large" in said(
        capsys, "serve", "tiny=tiny-glm", "other=tiny-glm", "--route", router, "--port", "0"
    )
    assert "served without --route" in said(capsys, "serve", "small=a", "large=b", "--route", router, "--lora", "x=y")
