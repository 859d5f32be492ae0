"""Real sockets: clients that leave, are slow, send too much or come in crowds, and servers that end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake import FakeClient
from raw_http import raw_request
from serving import HELLO, Lines, Running, get, post, running

import owned_time
from waiting import HUNG_SECONDS
from windlass.tasks.serve.app import make_app, service_of
from windlass.tasks.serve.http.protocol import ABORT
from windlass.tasks.serve.server import Server
from windlass.tasks.serve.settings import ServerSettings

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"


def chat_request(server: Running, **asked: Any) -> socket.socket:
    body = json.dumps({**HELLO, **asked}).encode()
    return raw_request(server, f"POST {CHAT} HTTP/1.1\nHost: localhost\nContent-Length: {len(body)}", body)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    with connection:
        while piece := connection.recv(65536):
            found += piece
    return found


def idle(server: Running) -> bool:
    client: Any = server.client
    return len(server.service.in_flight) == 0 and client.running == 0 and client.waiting == 0


# --- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_its_place_at_once(stream: bool, n: int) -> None:
    with running(lambda: FakeClient(tokens=2000, hold_after=2)) as server:  # the answer would never end
        client: Any = server.client
        connection = chat_request(server, stream=stream, n=n)
        if stream:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        server.until(lambda: client.running == n)
        connection.close()
        server.until(lambda: idle(server))
        assert client.cancelled == n and server.service.metrics.outcomes["cancelled"] == 1


def test_a_client_that_leaves_the_queue_gives_up_its_place() -> None:
    with running(lambda: FakeClient(slots=1, hold_after=0)) as server:
        client: Any = server.client
        first, second = chat_request(server), chat_request(server)
        server.until(lambda: client.waiting == 1)
        second.close()
        server.until(lambda: client.waiting == 0 and client.running == 1)
        first.close()
        server.until(lambda: idle(server))


def test_one_that_leaves_before_its_body_is_there_is_forgotten() -> None:
    with running() as server:
        raw_request(server, f"POST {CHAT} HTTP/1.1\nHost: localhost\nContent-Length: 100", b"{").close()
        server.until(lambda: server.service.metrics.outcomes["cancelled"] == 1)
        assert post(server.url + CHAT, json=HELLO).status_code == 200


def test_all_of_several_requests_sent_ahead_end_with_their_client() -> None:
    """uvicorn alone would tell only the last of them."""
    with running(lambda: FakeClient(hold_after=0)) as server:
        client: Any = server.client
        body = json.dumps(HELLO).encode()
        one = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        connection = raw_request(server, f"POST {CHAT} HTTP/1.1\nHost: localhost\nContent-Length: {len(body)}", body + one + one)
        server.until(lambda: client.running == 1 and [len(one.pipeline) for one in server.server.server_state.connections] == [2])
        connection.close()
        server.until(lambda: idle(server))


def test_requests_sent_ahead_are_answered_in_turn() -> None:
    with running() as server:
        body = json.dumps({**HELLO, "max_tokens": 1}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        ahead = (head + "\r\n").encode() + body + (head + "Connection: close\r\n\r\n").encode() + body
        connection = raw_request(server, f"POST {CHAT} HTTP/1.1\nHost: localhost\nContent-Length: {len(body)}", body + ahead)
        assert read_all(connection).count(b"HTTP/1.1 200 OK") == 3


def test_a_client_that_does_not_read_is_ended_by_the_deadline() -> None:
    with running(lambda: FakeClient(tokens=4000), deadline_seconds=1.0) as server:
        connection = chat_request(server, stream=True, n=16)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.until(lambda: idle(server))
        server.until(lambda: not server.server.server_state.connections)
        assert server.service.metrics.outcomes.total() == 1
        connection.close()


# --- clients that are slow or send too much --------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_connection_that_asks_for_nothing_is_closed(sent: bytes) -> None:
    with running(head_seconds=0.2) as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        made = socket.create_connection((host, int(port)), timeout=HUNG_SECONDS)
        with made as connection, contextlib.suppress(ConnectionError):  # cut off is as good as closed in order
            connection.sendall(sent)
            assert connection.recv(1) == b""


def test_a_body_that_does_not_come_is_waited_for_so_long() -> None:
    with running(head_seconds=1.0) as server:
        connection = raw_request(server, f"POST {CHAT} HTTP/1.1\nHost: localhost\nContent-Length: 100", b"{")
        assert read_all(connection).startswith(b"HTTP/1.1 408")


def test_headers_without_end_are_cut_off() -> None:
    with running() as server:
        connection = raw_request(server, "GET /health HTTP/1.1\nHost: localhost\nX: " + "x" * 1000)
        connection.close()
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=HUNG_SECONDS) as endless, pytest.raises(ConnectionError):
            endless.sendall(b"GET /health HTTP/1.1\r\n")
            for number in range(100_000):
                endless.sendall(b"X-%d: %s\r\n" % (number, b"x" * 1000))
        assert get(server.url + "/health").status_code == 200


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    with running(max_body_bytes=1000) as server:
        connection = raw_request(server, f"POST {CHAT} HTTP/1.1\nHost: localhost\nContent-Length: 1000000000")
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 413") and b"body_too_large" in answer and b"connection: close" in answer


def test_a_body_that_turns_out_too_large_is_not_read_to_its_end() -> None:
    def pieces() -> Any:
        for _ in range(1000):
            yield b" " * 1000

    with running(max_body_bytes=10_000) as server:
        with contextlib.suppress(httpx.WriteError):  # it was closed while we were still sending
            assert post(server.url + CHAT, content=pieces()).status_code == 413
        assert post(server.url + CHAT, json=HELLO).status_code == 200


def test_what_is_no_http_at_all_is_refused() -> None:
    with running() as server:
        connection = raw_request(server, "\x16\x03\x01\x02")
        assert read_all(connection).startswith(b"HTTP/1.1 400")


# --- crowds ----------------------------------------------------------------------------------------------------------


def test_500_connections_and_a_queue_of_64_are_answered_or_refused() -> None:
    slots, waiting, crowd = 16, 64, 500

    async def ask(http: httpx.AsyncClient, number: int) -> tuple[int, str]:
        response = await http.post(CHAT, json={**HELLO, "max_tokens": 3, "stream": number % 2 == 0})
        if response.status_code == 429:
            assert 1 <= int(response.headers["retry-after"]) <= 60
            return 429, response.json()["error"]["code"]
        assert response.status_code == 200
        return 200, "whole" if "w2" in response.text else response.text

    async def crowded(url: str) -> Counter[tuple[int, str]]:
        limits = httpx.Limits(max_connections=crowd, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=HUNG_SECONDS) as http:
            return Counter(await asyncio.gather(*(ask(http, number) for number in range(crowd))))

    with running(lambda: FakeClient(slots=slots, hold_after=0), max_waiting=waiting) as server, ThreadPoolExecutor(1) as aside:
        client: Any = server.client
        outcomes = server.service.metrics.outcomes
        asking = aside.submit(lambda: asyncio.run(crowded(server.url)))
        server.until(lambda: outcomes["full"] == crowd - slots - waiting)
        server.call(client.release)
        found = asking.result(HUNG_SECONDS)
        assert found == {(200, "whole"): slots + waiting, (429, "rate_limit_exceeded"): crowd - slots - waiting}
        assert client.most_running <= slots
        assert idle(server) and client.finished == outcomes["length"] == slots + waiting


# --- deadlines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_ends_with_an_error(stream: bool) -> None:
    with running(lambda: FakeClient(hold_after=2)) as server:
        response = post(server.url + CHAT, json={**HELLO, "timeout": 1.0, "stream": stream})
        if stream:
            assert response.status_code == 200 and "[DONE]" not in response.text
            error = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        else:
            assert response.status_code == 408
            error = response.json()["error"]
        assert error["code"] == "deadline_exceeded"
        server.until(lambda: idle(server))
        assert server.service.metrics.outcomes["late"] == 1


def test_a_deadline_holds_where_the_engine_does_not_keep_it() -> None:
    with running(lambda: FakeClient(hold_after=0)) as server:
        assert post(server.url + CHAT, json={**HELLO, "timeout": 0.2}).status_code == 408
        server.until(lambda: idle(server))


class Reluctant:
    """Takes the head of an answer and not its body."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.aborted = False

    async def __call__(self, message: Any) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()


def test_a_deadline_in_the_middle_of_a_whole_answer_writes_nothing_into_it() -> None:
    async def ask() -> Reluctant:
        app = make_app(FakeClient(), ServerSettings(), log=Lines())
        body = json.dumps({**HELLO, "timeout": 0.3}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        send = Reluctant()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            return await asyncio.Event().wait()

        def abort() -> None:
            send.aborted = True

        scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"",
                 "headers": [(b"host", b"localhost")], "client": ("x", 1), "root_path": "", ABORT: abort}  # fmt: skip
        async with app.router.lifespan_context(app):
            await service_of(app).supervisor.wait_ready()
            await app(scope, receive, send)
            assert service_of(app).metrics.outcomes == {"late": 1}
        return send

    found = owned_time.run(ask())
    assert [message["type"] for message in found.sent] == ["http.response.start", "http.response.body"]
    assert found.aborted and b"data:" not in found.sent[1]["body"]


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_server_that_ends_finishes_what_runs_and_refuses_what_comes() -> None:
    server = Running(lambda: FakeClient(hold_after=2), drain_seconds=24 * 3600.0).start()
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(post(server.url + CHAT, json={**HELLO, "stream": True})))
    asking.start()
    client: Any = server.client
    server.until(lambda: client.running == 1)
    server.loop.call_soon_threadsafe(server.server.stop)
    server.until(lambda: server.service.draining.is_set())
    refused = post(server.url + CHAT, json=HELLO)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining" and "retry-after" in refused.headers
    assert get(server.url + "/ready").status_code == 503
    assert get(server.url + "/health").status_code == 200
    server.call(client.release)
    asking.join(HUNG_SECONDS)
    server.wait_ended()
    assert client.closed
    assert answers[0].text.endswith("data: [DONE]\n\n")


def test_what_is_not_finished_in_time_is_told_so() -> None:
    server = Running(lambda: FakeClient(hold_after=2), drain_seconds=0.3).start()
    connection = chat_request(server, stream=True)
    client: Any = server.client
    server.until(lambda: client.running == 1)
    server.loop.call_soon_threadsafe(server.server.stop)
    answer = read_all(connection)
    assert b'"code":"draining"' in answer and b"[DONE]" not in answer
    server.wait_ended()
    assert client.running == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_that_ends_drains(number: signal.Signals) -> None:
    async def ask() -> None:
        app = make_app(FakeClient(), ServerSettings(drain_seconds=0.0), log=Lines())
        server = Server(app, ServerSettings())
        with server.capture_signals():
            os.kill(os.getpid(), number)
            async with asyncio.timeout(HUNG_SECONDS):
                await service_of(app).draining.wait()
                while not server.should_exit:
                    await asyncio.sleep(0.01)

    found = signal.getsignal(number)
    before = signal.signal(number, signal.SIG_DFL if found == signal.SIG_IGN else found)  # under nohup it would be ignored
    try:
        asyncio.run(ask())
        assert signal.getsignal(number) != signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_what_nohup_ignores_stays_ignored() -> None:
    async def ask() -> None:
        app = make_app(FakeClient(), ServerSettings(), log=Lines())
        with Server(app, ServerSettings()).capture_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        assert not service_of(app).draining.is_set()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(ask())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_told_twice_it_ends_at_once() -> None:
    server = Running(lambda: FakeClient(hold_after=2), drain_seconds=24 * 3600.0).start()
    connection = chat_request(server, stream=True)
    client: Any = server.client
    server.until(lambda: client.running == 1)
    server.loop.call_soon_threadsafe(server.server.stop)
    server.loop.call_soon_threadsafe(server.server.stop)
    server.wait_ended()
    assert not any("Traceback" in line or "Cancelled" in line for line in server.log.lines)
    connection.close()


def test_whoever_watches_does_not_keep_a_server_from_ending() -> None:
    server = Running(FakeClient, drain_seconds=24 * 3600.0).start()
    connection = raw_request(server, "GET /windlass/live HTTP/1.1\nHost: localhost")
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    server.loop.call_soon_threadsafe(server.server.stop)
    server.wait_ended()
    connection.close()
