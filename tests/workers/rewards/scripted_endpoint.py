"""A real HTTP server on this machine in place of an endpoint of OpenAI's API: well, slow, busy, or talking rubbish."""

import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Endpoint:
    """Answers as `answers` says, call by call; the last goes on. Text is what a chat completion says, a function of the
    request gives the whole reply."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any, dict[str, str]]] = [(200, "Score: 7", {})]
        self.delay_s = 0.0
        self.usage: dict[str, int] | None = {"total_tokens": 50}
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_a_time = self._running = 0
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                endpoint._running += 1
                endpoint.most_at_a_time = max(endpoint.most_at_a_time, endpoint._running)
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = min(len(endpoint.asked), len(endpoint.answers) - 1)
                endpoint.asked.append({"path": self.path, **body})
                endpoint.keys.append(self.headers.get("Authorization"))
                status, said, headers = endpoint.answers[number]
                time.sleep(endpoint.delay_s)
                completion = {"choices": [{"message": {"content": said}}], "usage": endpoint.usage}
                if callable(said):
                    reply = json.dumps(said(body)).encode()
                else:
                    reply = (json.dumps(completion) if status == 200 and isinstance(said, str) else str(said)).encode()
                endpoint._running -= 1
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(reply))}.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    self.wfile.write(reply)
                except BrokenPipeError:
                    pass  # nobody waits for it any more

            def log_message(self, *_: object) -> None:
                """Nothing: the test says what was asked."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
