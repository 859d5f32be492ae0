"""The page in headless Chromium, against the real server on loopback with a client whose every word the test says itself."""

from __future__ import annotations

import asyncio
import queue
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from browser import NEEDED, chromium
from waiting import HUNG_SECONDS, until
from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores, Stats, Timings, Usage

uvicorn = pytest.importorskip("uvicorn")
playwright_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
CHROMIUM = chromium()
MARKS = [
    pytest.mark.pure,
    pytest.mark.skipif(CHROMIUM is None, reason=NEEDED),
]

expect = playwright_api.expect
FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync""".split()
expect.set_options(timeout=HUNG_SECONDS * 1000)


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


# --- a browser that reports whatever it should not do ----------------------------------------------------------------


@contextmanager
def launched() -> Iterator[Any]:
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=HUNG_SECONDS * 1000)
        yield browser
        browser.close()


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


def ask(page: Any, served: Served, text: str) -> Turn:
    page.fill("#question", text)
    page.press("#question", "Enter")
    return served.stage.turn()


def answer(page: Any) -> Any:
    return page.locator(".message.answer").last


def prose(page: Any) -> Any:
    return answer(page).locator("> .prose")
