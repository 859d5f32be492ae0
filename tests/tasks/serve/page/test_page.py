"""The page in headless Chromium, against the real server on loopback with a client whose every word the test says itself."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import shutil
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from waiting import HUNG_SECONDS, until
from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores, Stats, Timings, ToolCall, Usage

uvicorn = pytest.importorskip("uvicorn")
playwright_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.pure,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

expect = playwright_api.expect
FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync""".split()
expect.set_options(timeout=HUNG_SECONDS * 1000)
KEY = "sesame"


# --- a server whose words the test says ------------------------------------------------------------------------------


@dataclass
class Turn:
    """One answer under way. `None` in the queue ends it."""

    request: Request
    loop: asyncio.AbstractEventLoop
    words: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)
    left: threading.Event = field(default_factory=threading.Event)
    """Set when nobody listens any more, or the answer is complete."""
    said: int = 0

    def say(self, *words: str | Delta) -> None:
        for word in words:
            self._put(Delta(content=word, token_ids=(self.said,)) if isinstance(word, str) else word)
            self.said += 1

    def end(self, *words: str | Delta) -> None:
        self.say(*words)
        self._put(None)

    def _put(self, word: Delta | None) -> None:
        self.loop.call_soon_threadsafe(self.words.put_nowait, word)


class Stage:
    """A Client. Every request becomes a Turn that the test speaks in."""

    def __init__(self) -> None:
        self.turns: queue.Queue[Turn] = queue.Queue()
        self.running = 0

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        turn = Turn(request, asyncio.get_running_loop())
        self.running += 1
        self.turns.put(turn)
        try:
            while (word := await turn.words.get()) is not None:
                yield word
            usage = Usage(prompt_tokens=5, completion_tokens=turn.said, cached_tokens=0)
            yield Delta(finish_reason="stop", usage=usage, timings=Timings(queue_seconds=0, prefill_seconds=0, decode_seconds=1))
        finally:
            self.running -= 1
            turn.left.set()

    async def score(self, request: ScoreRequest) -> Scores:
        raise NotImplementedError

    async def info(self) -> Info:
        stats = Stats(running=self.running, waiting=0, num_blocks=100, blocks_used=self.running * 10)
        return Info(model="stage", context_tokens=4096, vocab_size=256, max_sequences=8, device="cpu", scheme="int4", stats=stats)

    async def close(self) -> None:
        pass

    def turn(self) -> Turn:
        return self.turns.get(timeout=HUNG_SECONDS)


@dataclass
class Served:
    stage: Stage
    url: str


def serve(stage: Stage, *keys: str) -> Iterator[Served]:
    from windlass.tasks.serve.app import make_app
    from windlass.tasks.serve.settings import ServerSettings

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        app = make_app(stage, ServerSettings(port=port, api_keys=keys, log_requests=False, drain_seconds=0.5))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        until(lambda: server.started, "the server does not start")
        yield Served(stage, f"http://127.0.0.1:{port}")
        server.should_exit = True
        thread.join(HUNG_SECONDS)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    yield from serve(Stage())


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    yield from serve(Stage(), KEY)


# --- a browser that reports whatever it should not do ----------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=HUNG_SECONDS * 1000)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def profile(browser: Any) -> Any:
    """For visits that leave nothing behind: a new one, or only a new page in it, costs as much as a test."""
    return new_profile(browser)


def new_profile(browser: Any, **options: Any) -> Any:
    still = {"viewport": {"width": 1200, "height": 800}, "reduced_motion": "reduce"}  # nothing fades in: nothing is waited for
    made = browser.new_context(**{**still, **options})
    made.set_default_timeout(HUNG_SECONDS * 1000)
    return made


class Visit:
    """A page in a profile of its own, or the one of a profile whose storage is emptied afterwards, with all that it asked for and
    complained about."""

    def __init__(self, browser: Any, url: str, profile: Any = None, **options: Any) -> None:
        self.url, self.asked, self.complaints = url, [], []
        self.is_shared, self.context = profile is not None, profile or new_profile(browser, **options)
        self.page = self.context.pages[0] if self.context.pages else self.context.new_page()
        self._hears: dict[str, Any] = {
            "request": lambda request: self.asked.append(request.url),
            "console": lambda message: message.type in ("error", "warning") and self.complaints.append(message.text),
            "pageerror": lambda error: self.complaints.append(str(error)),
        }
        for event, hear in self._hears.items():
            self.page.on(event, hear)

    def open(self, route: str = "") -> Any:
        self.page.goto(f"{self.url}/{route}")
        return self.page

    def close(self, allowed: tuple[str, ...] = ()) -> None:
        for event, hear in self._hears.items():
            self.page.remove_listener(event, hear)
        if self.is_shared:
            self._leave_nothing()
        else:
            self.context.close()
        assert [url for url in self.asked if not url.startswith(self.url)] == [], "only its own server is asked"
        assert [text for text in self.complaints if not any(words in text for words in allowed)] == []

    def _leave_nothing(self) -> None:
        self.page.evaluate("sessionStorage.clear()")
        self.page.goto("about:blank")
        devtools = self.context.new_cdp_session(self.page)  # what a page keeps while it is left goes too
        devtools.send("Storage.clearDataForOrigin", {"origin": self.url, "storageTypes": "all"})
        devtools.detach()
        self.page.unroute_all()
        self.page.emulate_media(color_scheme="null")
        self.context.clear_permissions()


@pytest.fixture
def visit(browser: Any, profile: Any, served: Served) -> Iterator[Visit]:
    visit = Visit(browser, served.url, profile)
    yield visit
    visit.close()


@pytest.fixture
def page(visit: Visit) -> Any:
    page = visit.open()
    expect(page.locator("#model")).to_have_value("stage")
    return page


def ask(page: Any, served: Served, text: str) -> Turn:
    page.fill("#question", text)
    page.press("#question", "Enter")
    return served.stage.turn()


def answer(page: Any) -> Any:
    return page.locator(".message.answer").last


def prose(page: Any) -> Any:
    return answer(page).locator("> .prose")


# --- talking ---------------------------------------------------------------------------------------------------------


def test_an_answer_is_seen_piece_by_piece(page: Any, served: Served) -> None:
    turn = ask(page, served, "How are\nyou?")
    assert [dict(message) for message in turn.request.messages or ()] == [{"role": "user", "content": "How are\nyou?"}]
    expect(page.locator(".message.user .bubble")).to_have_text("How are\nyou?")
    expect(answer(page).locator(".pulse")).to_be_visible()
    turn.say("One")
    expect(prose(page)).to_have_text("One")
    expect(page.locator("#send")).to_have_attribute("aria-label", "Stop")
    turn.say(" two **th")
    expect(prose(page)).to_have_text("One two **th")
    turn.say("ree**")
    expect(prose(page).locator("strong")).to_have_text("three")
    turn.end()
    expect(page.locator("#send")).to_have_attribute("aria-label", "Send")
    figures = answer(page).locator(".figures")
    for words in ("tokens/s", "first token", "3 tokens", "stage"):
        expect(figures).to_contain_text(words)


def test_the_placeholder_is_seen_whole(page: Any, served: Served) -> None:
    field = page.locator("#question")
    expect(field).to_be_visible()
    assert field.evaluate("field => field.clientHeight >= field.scrollHeight && field.clientHeight > 40")


def test_an_answer_that_repeats_itself_is_stopped(page: Any, served: Served) -> None:
    turn = ask(page, served, "Talk for ever")
    turn.say("on and on " * 40)
    expect(answer(page).locator(".note")).to_contain_text("only repeated itself")
    assert turn.left.wait(HUNG_SECONDS), "the server hears that nobody listens"


def test_stopping_keeps_what_was_said_and_frees_the_slot(page: Any, served: Served) -> None:
    turn = ask(page, served, "Talk for ever")
    turn.say("On and on")
    expect(prose(page)).to_have_text("On and on")
    page.keyboard.press("Escape")
    expect(answer(page).locator(".note")).to_have_text("You stopped this answer.")
    assert turn.left.wait(HUNG_SECONDS), "the server hears that nobody listens"
    expect(prose(page)).to_have_text("On and on")
    again = ask(page, served, "Go on")
    assert [message["content"] for message in again.request.messages or ()] == ["Talk for ever", "On and on", "Go on"]
    page.click("#send")
    assert again.left.wait(HUNG_SECONDS)


def test_regenerate_asks_the_same_again(page: Any, served: Served) -> None:
    first = ask(page, served, "Draw a lot")
    first.end("Heads")
    page.click("text=Regenerate")
    second = served.stage.turn()
    assert second.request.messages == first.request.messages
    second.end("Tails")
    expect(page.locator(".message.answer")).to_have_count(1)
    expect(prose(page)).to_have_text("Tails")


def test_the_last_message_can_be_said_differently(page: Any, served: Served) -> None:
    ask(page, served, "First").end("1")
    expect(prose(page)).to_have_text("1")
    ask(page, served, "Secnod").end("2")
    expect(prose(page)).to_have_text("2")
    page.locator("#question").press("ArrowUp")
    field = page.locator(".editing textarea")
    expect(field).to_have_value("Secnod")
    field.fill("Second")
    field.press("Enter")
    turn = served.stage.turn()
    assert [message["content"] for message in turn.request.messages or ()] == ["First", "1", "Second"]
    turn.end("2, better")
    expect(page.locator(".message.user")).to_have_count(2)
    page.locator(".message.user").last.hover()
    page.locator(".message.user").last.get_by_label("Edit this message").click()
    page.locator(".editing textarea").press("Escape")
    expect(page.locator(".message.user .bubble").last).to_have_text("Second")


def test_reasoning_is_folded_away_with_its_time(page: Any, served: Served) -> None:
    page.click("#open-settings")
    page.locator(".segments label", has_text="On").click()
    page.click("text=Done")
    turn = ask(page, served, "Think")
    assert turn.request.thinking is True
    turn.say(Delta(reasoning="Let me *see*."))
    expect(answer(page).locator("summary")).to_contain_text("Thinking")
    expect(answer(page).locator(".reasoning .prose")).not_to_be_visible()
    turn.end("Done thinking.")
    expect(answer(page).locator("summary")).to_contain_text("Thought for")
    answer(page).locator("summary").click()
    expect(answer(page).locator(".reasoning .prose")).to_have_text("Let me see.")
    expect(prose(page)).to_have_text("Done thinking.")


def test_tool_calls_are_shown(page: Any, served: Served) -> None:
    turn = ask(page, served, "Weather?")
    turn.end(Delta(tool_calls=(ToolCall(id="c1", name="get_weather", arguments='{"city":"Paris"}'),)))
    expect(answer(page).locator(".call-name")).to_have_text("get_weather")
    expect(answer(page).locator(".call code")).to_have_text('{\n  "city": "Paris"\n}')


def test_settings_are_sent_checked_and_kept(page: Any, served: Served) -> None:
    page.click("#open-settings")
    page.fill("#set-system", "Be brief.")
    page.fill("#set-temperature", "hot")
    expect(page.locator("#about-temperature")).to_contain_text("should be a number, between 0 and 2")
    page.fill("#set-temperature", "0.25")
    page.fill("#set-top_p", "0.9")
    page.fill("#set-max_tokens", "64")
    page.fill("#set-seed", "7")
    page.keyboard.press("Escape")
    page.reload()
    expect(page.locator("#model")).to_have_value("stage")
    turn = ask(page, served, "Hello")
    sampling = turn.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, turn.request.max_tokens) == (0.25, 0.9, 7, 64)
    assert (turn.request.messages or ())[0]["content"] == "Be brief."
    turn.end("Hi")
    expect(prose(page)).to_have_text("Hi")


def test_conversations_are_kept_opened_and_deleted(page: Any, served: Served) -> None:
    ask(page, served, "About cats").end("Meow")
    expect(prose(page)).to_have_text("Meow")
    page.click("#new-chat")
    expect(page.locator("#welcome")).to_be_visible()
    ask(page, served, "About dogs").end("Woof")
    expect(prose(page)).to_have_text("Woof")
    expect(page.locator(".conversation .open")).to_have_text(["About dogs", "About cats"])
    page.reload()
    expect(prose(page)).to_have_text("Woof")
    page.locator(".conversation .open", has_text="cats").click()
    expect(prose(page)).to_have_text("Meow")
    page.go_back()
    expect(prose(page)).to_have_text("Woof")
    page.get_by_label("Delete “About dogs”").click()
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator(".conversation .open")).to_have_text(["About cats"])
    page.click("text=Undo")
    expect(page.locator(".conversation .open")).to_have_text(["About dogs", "About cats"])


def test_an_answer_goes_on_while_another_chat_is_looked_at(page: Any, served: Served) -> None:
    slow = ask(page, served, "Slow one")
    slow.say("Beg")
    expect(prose(page)).to_have_text("Beg")
    page.click("#new-chat")
    ask(page, served, "Quick one").end("Done")
    expect(prose(page)).to_have_text("Done")
    slow.end("inning")
    page.locator(".conversation .open", has_text="Slow").click()
    expect(prose(page)).to_have_text("Beginning")


# --- what a model writes does nothing --------------------------------------------------------------------------------

HOSTILE = """<script>window.owned = 1</script>
<img src="x" onerror="window.owned = 2">
<iframe srcdoc="<script>parent.owned = 3</script>"></iframe>

[click](javascript:window.owned=4) [relative](/v1/models) [data](data:text/html,x)
![picture](https://evil.example/p.png) [fine](https://example.org/a)

<a href="javascript:window.owned=5" onclick="window.owned=6">html</a>

| <b>cell</b> | x |
|---|---|
| <svg onload="window.owned=7"> | y |

```html" onclick="window.owned=8
<script>window.owned = 9</script>
```
"""


def test_what_a_model_writes_stays_text(page: Any, served: Served) -> None:
    ask(page, served, "Be evil").end(*(HOSTILE[at : at + 7] for at in range(0, len(HOSTILE), 7)))
    expect(answer(page).locator("footer.shown")).to_be_visible()
    assert page.evaluate("window.owned") is None
    assert (
        page.evaluate(
            "document.querySelectorAll('#thread :is(script, img, iframe, svg:not(.icon), b, [onclick], [onerror])').length"
        )
        == 0
    )
    links = page.evaluate("[...document.querySelectorAll('#thread .prose a')].map(a => [a.href, a.rel, a.target])")
    rel = "noopener noreferrer nofollow"
    assert links == [["https://evil.example/p.png", rel, "_blank"], ["https://example.org/a", rel, "_blank"]]
    expect(prose(page)).to_contain_text("<script>window.owned = 1</script>")
    page.reload()  # and from what was kept
    expect(prose(page)).to_contain_text("<script>window.owned = 1</script>")
    assert page.evaluate("window.owned") is None


def test_the_browser_itself_refuses_markup_from_text(visit: Visit) -> None:
    page = visit.open()
    tried = page.evaluate(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'made'; } catch { return 'refused'; } })()"
    )
    assert tried == "refused"
    visit.complaints.clear()  # it complains, as it should


def test_markdown_is_drawn(page: Any, served: Served) -> None:
    ask(page, served, "Show").end(
        "# Title\n\n- a\n- b\n\n| x | y |\n|---|--:|\n| 1 | 2 |\n\n```py\nprint('hi')\n```\n\n$a_1$ end"
    )
    expect(prose(page).locator("h3")).to_have_text("Title")
    expect(prose(page).locator("li")).to_have_text(["a", "b"])
    expect(prose(page).locator("td.right")).to_have_text("2")
    expect(prose(page).locator("figcaption")).to_contain_text("py")
    expect(prose(page).locator(".math")).to_have_text("$a_1$")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_label("Copy code").click()
    expect(prose(page).locator("figcaption button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print('hi')"


# --- when it does not work -------------------------------------------------------------------------------------------


def test_the_key_is_asked_for_and_kept_for_the_visit(browser: Any, locked: Served) -> None:
    visit = Visit(browser, locked.url)
    page = visit.open()
    page.fill("#key-field", "wrong")
    page.press("#key-field", "Enter")
    expect(page.locator("#key")).to_contain_text("was not accepted")
    page.fill("#key-field", KEY)
    page.press("#key-field", "Enter")
    expect(page.locator("#model")).to_have_value("stage")
    expect(page.locator("#chip")).to_contain_text("Ready")
    ask(page, locked, "Hello").end("Come in")
    expect(prose(page)).to_have_text("Come in")
    assert page.evaluate("JSON.stringify({...localStorage})").find(KEY) < 0
    page.reload()
    expect(page.locator("#model")).to_have_value("stage")
    visit.close(allowed=("401",))


def refuse(page: Any, status: int, message: str, **headers: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}})
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, body=body, headers=names))


@pytest.mark.parametrize(
    ("status", "title", "retry"),
    [
        (429, "The server is busy", "Try again in 1 s"),
        (503, "The model is not ready", "Try again in 1 s"),
        (400, "The server rejected this request", "Try again"),
    ],
)
def test_a_refusal_is_told_kindly_and_can_be_tried_again(
    browser: Any, profile: Any, served: Served, status: int, title: str, retry: str
) -> None:
    visit = Visit(browser, served.url, profile)
    page = visit.open()
    expect(page.locator("#model")).to_have_value("stage")
    refuse(page, status, "Because <b>so</b>.", **({} if status == 400 else {"retry_after": "1"}))
    page.fill("#question", "Please")
    page.press("#question", "Enter")
    trouble = answer(page).locator(".error-notice")
    expect(trouble).to_contain_text(title)
    expect(trouble).to_contain_text("Because <b>so</b>.")
    expect(trouble.locator("button")).to_have_text(retry)
    page.unroute("**/v1/chat/completions")
    expect(trouble.locator("button")).to_be_enabled()
    trouble.locator("button").click()
    served.stage.turn().end("At last")
    expect(prose(page)).to_have_text("At last")
    expect(page.locator(".message.user")).to_have_count(1)
    visit.close(allowed=(str(status),))


def test_a_connection_that_breaks_keeps_what_came(browser: Any, profile: Any, served: Served) -> None:
    visit = Visit(browser, served.url, profile)
    page = visit.open()
    chunk = json.dumps({"choices": [{"delta": {"content": "Half an ans"}}]})
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, body=f"data: {chunk}\n\n", content_type="text/event-stream"),
    )
    page.fill("#question", "Please")
    page.press("#question", "Enter")
    expect(prose(page)).to_have_text("Half an ans")
    expect(answer(page).locator(".error-notice")).to_contain_text("The response was interrupted")
    visit.close()


def test_a_server_that_is_gone_is_said_to_be(browser: Any, profile: Any, served: Served) -> None:
    visit = Visit(browser, served.url, profile)
    page = visit.open()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.fill("#question", "Anyone?")
    page.press("#question", "Enter")
    expect(answer(page).locator(".error-notice")).to_contain_text("The server cannot be reached")
    visit.close(allowed=("ERR_FAILED",))


# --- the live view ---------------------------------------------------------------------------------------------------


def test_the_numbers_move(page: Any, served: Served) -> None:
    page.click("nav >> text=Live")
    live = page.locator("#live")
    expect(live.locator("h1")).to_have_text("Ready")
    requests = live.get_by_label("Requests").locator(".value")
    expect(requests).to_have_text("0")
    written = live.locator(".totals dd").nth(2)
    before = int(written.inner_text().replace(",", ""))
    page.click("nav >> text=Chat")
    turn = ask(page, served, "Count")
    page.click("nav >> text=Live")
    expect(requests).to_have_text("1")
    turn.say(*(f"{number} " for number in range(12)))
    expect(live.locator(".hero .value")).not_to_have_text("0 tokens/s")
    expect(live.locator(".hero .line-0")).to_have_attribute("d", re.compile("L"))
    path = live.locator(".hero .line-0").get_attribute("d") or ""
    turn.end()
    expect(written).to_have_text(f"{before + 12:,}")
    expect(requests).to_have_text("0")
    expect(live.locator(".hero .line-0")).not_to_have_attribute("d", path)


STATUS: dict[str, Any] = {
    "model": "GLM", "context_tokens": 131072, "engine": "windlass", "state": "ready", "loading": {"done_bytes": 0, "total_bytes": 0},
    "uptime_seconds": 3700, "device": "2 x H200", "scheme": "int4", "kv": "fp8",
    "now": {"running": 3, "waiting": 2, "tokens_per_second": 412.5, "prompt_tokens_per_second": 9000, "kv_used": 0.42, "kv_total": 2**36,
            "prefix_hit_rate": 0.25, "ttft_p50": 0.12, "ttft_p95": 0.8, "itl_p50": 0.0071, "itl_p95": None},
    "totals": {"requests": 10, "prompt_tokens": 5000, "completion_tokens": 2000, "by_outcome": {"stop": 8, "error": 2}},
    "machine": {"cpu_percent": 12.0, "memory_bytes": 2**34, "memory_total_bytes": 2**37, "process_bytes": 2**33,
                "devices": [{"name": f"H200 {index}", "use_percent": 90.0, "memory_bytes": 2**36, "memory_total_bytes": 141 * 2**30,
                             "planned_bytes": 2**36 + 2**33, "power_watts": 600.0} for index in range(2)],
                "energy_joules": 36000.0, "energy_source": "NVML counter"},
    "plan": {"title": "GLM on 2 x H200", "rows": [{"what": "layout", "value": "tp 2", "reason": "<b>fits</b> with room"}]},
    "workers": [{"name": "node-1", "address": "10.0.0.1", "state": "ready", "share": 0.5},
                {"name": "node-2", "address": "10.0.0.2", "state": "lost", "share": 0.5}],
}  # fmt: skip


def stream(page: Any, *statuses: dict[str, Any]) -> None:
    body = "".join(f"data: {json.dumps(status)}\n\n" for status in statuses)
    page.route("**/windlass/live", lambda route: route.fulfill(status=200, body=body, content_type="text/event-stream"))


def test_everything_a_status_says_is_shown(visit: Visit) -> None:
    stream(visit.page, STATUS)
    live = visit.open("#/live").locator("#live")
    for words in (
        "413 tokens/s",
        "9,000",
        "3",
        "running, 2 waiting",
        "42 %",
        "of 64.0 GiB",
        "25 %",
        "120 ms",
        "p95 800 ms",
        "7.1 ms",
        "p95 –",
    ):
        expect(live.locator(".tiles")).to_contain_text(words)
    for words in (
        "H200 0",
        "64.0 GiB of 141 GiB",
        "Planned 72.0 GiB, 8.00 GiB less so far",
        "90 %",
        "600 W",
        "10 Wh",
        "18 J",
        "NVML counter",
    ):
        expect(live.locator(".machine")).to_contain_text(words)
    expect(live.locator(".mark:visible")).to_have_count(2)
    expect(live.locator(".totals .outcomes li")).to_have_text(["complete880 %", "failed220 %"])
    expect(live.locator(".node")).to_have_count(3)
    expect(live.locator(".node").last).to_contain_text("lost")
    expect(live.locator(".edge")).to_have_count(2)
    expect(live.locator(".edge.down")).to_have_count(1)
    expect(live.locator(".plan tbody tr")).to_have_text(["layouttp 2<b>fits</b> with room"])


WATCHED: dict[str, Any] = {
    "now": 10_000.0,
    "alerts": [
        {"name": "WindlassGpuXid", "severity": "page", "state": "firing", "summary": "GPU 3: XID <b>79</b>", "action": "Reboot.", "since": 9400.0},
        {"name": "WindlassDiskFull", "severity": "page", "state": "pending", "summary": "/ 2% left", "action": "Free some.", "since": 9990.0},
    ],
    "charts": [
        {"title": "GPU power", "unit": "watts", "label": "0", "points": [[9000.0, 300.0], [9500.0, 600.0], [10_000.0, 450.0]]},
        {"title": "KV cache", "unit": "ratio", "label": "", "points": [[9000.0, 0.1], [10_000.0, 0.42]]},
        {"title": "Training loss", "unit": "loss", "label": "", "points": [[10_000.0, 2.0]]},
    ],
}  # fmt: skip


def test_alerts_and_the_last_day_are_shown(visit: Visit) -> None:
    body = json.dumps(WATCHED)
    visit.page.route("**/windlass/history", lambda route: route.fulfill(status=200, body=body, content_type="application/json"))
    stream(visit.page, {**STATUS, "has_history": True})
    day = visit.open("#/live").locator("#live .day")
    expect(day.locator(".under")).to_have_text("1 firing")
    expect(day.locator(".alert")).to_have_count(2)
    expect(day.locator(".alert.firing")).to_contain_text("GPU 3: XID <b>79</b>")
    expect(day.locator(".alert.firing")).to_contain_text("firing for 10 min 0 s, page, WindlassGpuXid")
    charts = day.locator(".day-chart")
    expect(charts).to_have_count(2)  # one point is no line
    expect(charts.first).to_contain_text("450 W")
    expect(charts.first.locator("svg")).to_have_attribute("aria-label", re.compile("GPU power 0: now 450 W, at most 600 W in"))
    expect(charts.last).to_contain_text("42 %")


STATES = {
    "loading": "Loading the model",
    "restarting": "The engine is restarting",
    "draining": "The server is shutting down",
    "dead": "The engine is down",
    "ready": "Ready",
}


def test_the_state_is_said(browser: Any, served: Served) -> None:
    visit = Visit(browser, served.url)  # what is read before a page stays with it
    # A stream that stays open, as the real one does, and says what the test says.
    visit.page.add_init_script("""
      const real = fetch;
      const body = new ReadableStream({ start: (stream) => (window.tell = (status) =>
        stream.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(status)}\\n\\n`))) });
      window.fetch = (path, ...rest) => (path === "/windlass/live" ? Promise.resolve(new Response(body)) : real(path, ...rest));
    """)
    page = visit.open("#/live")
    for state, title in STATES.items():
        page.evaluate("tell", {**STATUS, "state": state, "loading": {"done_bytes": 2**30, "total_bytes": 2**32}})
        expect(page.locator("#live h1")).to_have_text(title)
        expect(page.locator("progress")).to_be_visible(visible=state == "loading")
        if state == "loading":
            expect(page.locator(".banner")).to_contain_text("1.00 GiB of 4.00 GiB loaded")
            expect(page.locator("progress")).to_have_js_property("value", 0.25)
            expect(page.locator("#chip")).to_contain_text("Loading 25 %")
    visit.close()


# --- looks and hands -------------------------------------------------------------------------------------------------


def lightness(page: Any) -> float:
    colours = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
    return sum(colours) / 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(visit: Visit, scheme: str) -> None:
    visit.page.emulate_media(color_scheme=scheme)
    page = visit.open()
    assert (lightness(page) > 128) == (scheme == "light")
    page.click("#theme")
    assert (lightness(page) > 128) == (scheme == "dark")
    page.reload()
    assert (lightness(page) > 128) == (scheme == "dark"), "a choice is kept"
    page.click("#theme")
    assert page.evaluate("localStorage.getItem('windlass.theme')") is None, "back to what the system has"


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3); };
  const light = (colour) => rgb(colour).map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
  const value = (name) => { const box = document.body.appendChild(document.createElement("i")); box.style.color = `var(${name})`;
    const found = getComputedStyle(box).color; box.remove(); return found; };
  const ratio = (a, b) => { const [x, y] = [light(value(a)), light(value(b))].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  return [["--ink", "--paper"], ["--soft", "--paper"], ["--soft", "--sunk"], ["--soft", "--card"], ["--accent", "--paper"], ["--bad", "--card"],
          ["--accent-ink", "--accent"]].map(([a, b]) => [`${a} on ${b}`, ratio(a, b)]);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(visit: Visit, scheme: str) -> None:
    visit.page.emulate_media(color_scheme=scheme)
    ratios = visit.open().evaluate(CONTRAST)
    assert {name: round(ratio, 2) for name, ratio in ratios if ratio < 4.5} == {}, "WCAG AA"


def test_the_keyboard_is_enough(page: Any, served: Served) -> None:
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    turn = served.stage.turn()
    assert (turn.request.messages or ())[0]["content"] == "one\ntwo"
    turn.end("Fine")
    expect(page.locator("footer.shown")).to_be_visible()
    page.keyboard.press("Shift+Tab")
    for _ in range(3):
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Regenerate this answer":
            break
        page.keyboard.press("Shift+Tab")
    outline = page.evaluate(
        "[document.activeElement.getAttribute('aria-label'), getComputedStyle(document.activeElement).outlineStyle]"
    )
    assert outline == ["Regenerate this answer", "solid"]
    page.keyboard.press("Enter")
    served.stage.turn().end("Again")
    expect(prose(page)).to_have_text("Again")


def test_every_control_has_a_name(page: Any, served: Served) -> None:
    ask(page, served, "Hello").end("```\nx\n```")
    expect(page.locator("footer.shown")).to_be_visible()
    page.click("#open-settings")
    nameless = page.evaluate("""[...document.querySelectorAll("button, a, input, textarea, select")].filter((one) =>
        !one.getAttribute("aria-label") && !one.textContent.trim() && !one.labels?.length).map((one) => one.outerHTML)""")
    assert nameless == []


def test_a_screen_reader_hears_an_answer_once(page: Any, served: Served) -> None:
    page.evaluate("""window.heard = []; new MutationObserver(() => heard.push(announcer.textContent))
        .observe(announcer, { childList: true, characterData: true, subtree: true })""")
    turn = ask(page, served, "Count")
    for number in range(20):
        turn.say(f"{number} ")
    turn.end()
    expect(page.locator("footer.shown")).to_be_visible()
    heard = page.evaluate("heard")
    assert heard[0] == "Waiting for the answer"
    assert len(heard) == 2
    assert heard[1].startswith("0 1 2")


@pytest.mark.parametrize("route", ["", "#/live"])
def test_it_fits_a_small_screen(browser: Any, served: Served, route: str) -> None:
    visit = Visit(browser, served.url, viewport={"width": 360, "height": 640}, has_touch=True, reduced_motion="reduce")
    stream(visit.page, STATUS)
    page = visit.open(route)
    if route:
        expect(page.locator(".plan")).to_be_visible()
    else:
        ask(page, served, "W" * 200).end(
            "x" * 300 + "\n\n| " + " | ".join("abcdefgh") + " |\n|" + "---|" * 8 + "\n\n```\n" + "y" * 200 + "\n```"
        )
        expect(page.locator("footer.shown")).to_be_visible()
        page.click("#open-side")
        expect(page.locator(".conversation")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(".conversation")).not_to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("[...document.querySelectorAll('#scroll, #live')].every((one) => one.scrollWidth <= 360)")
    assert page.evaluate("document.getAnimations().filter((one) => one.playState === 'running').length") == 0
    visit.close()
