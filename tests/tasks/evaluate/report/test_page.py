"""The report's page in Chromium: it shows what the report says, filters work, and answers are text whatever they contain."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from scripted import settings_for, sums

from browser import NEEDED, chromium
from waiting import HUNG_SECONDS
from windlass.tasks.evaluate.report.page import page
from windlass.tasks.evaluate.report.report import ModelRun, build, measure
from windlass.tasks.evaluate.run.records import Record

CHROMIUM = chromium()
pytestmark = [
    pytest.mark.pure,
    pytest.mark.multi,
    pytest.mark.skipif(CHROMIUM is None, reason=NEEDED),
]
EVIL = "</script><img src=x onerror=\"document.title='evil'\">"


@pytest.fixture
def shown(tmp_path: Path) -> Generator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    prepared = sums(tmp_path, 130)
    records = [
        Record(
            task="sums",
            id=str(n),
            verdict="wrong" if n == 3 else "correct",
            answer=EVIL if n == 3 else "10",
            flexible="10",
            why=f"why {n}",
        )
        for n in range(130)
    ]
    run = ModelRun(settings=settings_for(prepared), prepared=(prepared,), records={one.key: one for one in records})
    (tmp_path / "report.html").write_bytes(page(build([run]), measure([run], "world"), [run]))
    with sync_api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=HUNG_SECONDS * 1000)
        view, errors = browser.new_page(), list[str]()
        view.set_default_timeout(HUNG_SECONDS * 1000)
        view.on("pageerror", lambda error: errors.append(str(error)))
        view.goto(f"file://{tmp_path / 'report.html'}")
        yield view
        assert errors == []
        browser.close()


def test_the_page_shows_every_example_and_filters_them(shown: Any) -> None:
    assert "scripted: 130 answers, 1 task" in shown.inner_text("#lead") and "99 %" in shown.inner_text("#main")
    assert shown.locator("#list details").count() == 100  # the rest on demand
    shown.click("#more")
    assert shown.locator("#list details").count() == 130
    shown.select_option("select[aria-label=verdict]", "wrong")
    assert shown.inner_text("#count") == "1 of 130"
    shown.click("#list summary")
    shown.wait_for_selector("#list .texts")
    assert (
        EVIL in shown.inner_text("#list details")
        and "3 + 7 =" in shown.inner_text("#list details")
        and "why 3" in shown.inner_text("#list")
    )
    assert shown.locator("img").count() == 0 and shown.title() == "Evaluation of scripted"
    shown.fill("input", "nothing has this")
    assert shown.inner_text("#count") == "0 of 130"
