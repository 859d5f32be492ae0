"""A small OpenAI-compatible server in a thread of its own: answers sums, and notes what it was asked and what it delivered.

Standard library only, so that processes that are killed a hundred times meet nothing but sockets. `python answering.py PORT SECONDS` serves alone.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self


def write_task(folder: Path, count: int) -> Path:
    """A task of one's own: sums of two numbers, six lines."""
    (folder / "sums.jsonl").write_text("\n".join(json.dumps({"a": n, "b": 7, "sum": n + 7}) for n in range(count)))
    lines = [
        'name = "sums"',
        'category = "math"',
        'source.file = "sums.jsonl"',
        'prompt.chat = "{a} + {b} ="',
        'answer = "{sum}"',
        'grader = "number"',
    ]
    (folder / "sums.toml").write_text("\n".join(lines))
    return folder / "sums.toml"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed are no errors here."""


class AnsweringServer:
    """`off_by`: every sum is wrong by so much; `fails`: the first requests of each text that are answered with 500."""

    def __init__(
        self, port: int = 0, seconds: float = 0.0, model: str = "adder", off_by: int = 0, fails: int = 0, logprobs: bool = True
    ) -> None:
        self.model, self.seconds, self.off_by, self.fails, self.logprobs = model, seconds, off_by, fails, logprobs
        self.asked: Counter[str] = Counter()
        self.delivered: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._http = _Server(("127.0.0.1", port), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def note(self, counter: Counter[str], text: str) -> int:
        with self._lock:
            counter[text] += 1
            return counter[text]

    def answer(self, text: str) -> str:
        found = re.search(r"(\d+) \+ (\d+) =", text)
        return f"The answer is {int(found[1]) + int(found[2]) + self.off_by}" if found else "I cannot say."

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path != "/v1/models":
                    return self.send_json(404, {"error": {"message": "no such route"}})
                return self.send_json(
                    200, {"object": "list", "data": [{"id": outer.model, "max_model_len": 4096, "owned_by": "test"}]}
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                is_chat = self.path == "/v1/chat/completions"
                text = body["messages"][-1]["content"] if is_chat else body.get("prompt", "")
                times = outer.note(outer.asked, text)
                if times <= outer.fails:
                    return self.send_json(500, {"error": {"message": "not yet"}})
                time.sleep(outer.seconds)
                self.send_answer(is_chat, bool(body.get("stream")), text, outer.answer(text))
                outer.note(outer.delivered, text)
                return None

            def send_answer(self, is_chat: bool, is_stream: bool, text: str, answer: str) -> None:
                usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(answer.split())}
                choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
                said = {"role": "assistant", "content": answer}
                choice |= {"delta" if is_stream else "message": said} if is_chat else {"text": answer}
                if not is_chat and outer.logprobs:
                    choice["logprobs"] = {
                        "tokens": [" A"],
                        "token_logprobs": [-0.1],
                        "top_logprobs": [{" A": -0.1, " B": -3.0, " C": -4.0, " D": -5.0}],
                        "text_offset": [0],
                    }
                chunk = {"id": "x", "created": 0, "model": outer.model, "object": "chunk", "choices": [choice], "usage": usage}
                if not is_stream:
                    self.send_json(200, chunk)
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
                self.close_connection = True

            def send_json(self, status: int, body: Any) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler


if __name__ == "__main__":
    with AnsweringServer(int(sys.argv[1]), float(sys.argv[2])) as running:
        print(running.url, flush=True)
        threading.Event().wait()
