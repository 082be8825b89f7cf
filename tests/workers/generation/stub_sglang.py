"""Stands in for SGLang where a test is about who starts it: says that it is well, or dies.

stub_sglang.py FOLDER ENTRY DESCRIPTOR --config KEYS --ssl-certfile PEM ...
FOLDER/exit_code: what it ends with at once          FOLDER/starts: one line per start, its process id
"""

import json
import os
import socket
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ANSWERS = {
    "/ready": "",
    "/server_info": "{}",
    "/model_info": '{"weight_version": "0.0", "model_path": "/model"}',
    "/metrics": "sglang:num_running_reqs 2.0\n",
}


class Handler(BaseHTTPRequestHandler):
    keys: dict[str, str] = {}

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == f"Bearer {self.keys['api-key']}" or self.path == "/ready"
        self.send_response(200 if is_known else 401)
        self.end_headers()
        self.wfile.write(ANSWERS[self.path].encode() if is_known else b"")

    def log_message(self, *arguments: object) -> None:
        """Says nothing of each request."""


def main(folder: Path, *arguments: str) -> None:
    options = dict(zip(arguments, arguments[1:], strict=False))
    with (folder / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    if (folder / "exit_code").exists():
        print("OSError: [Errno 98] Address already in use\nthe last words of the stub")
        sys.exit(int((folder / "exit_code").read_text()))
    Handler.keys = json.loads(Path(options["--config"]).read_text())
    server = ThreadingHTTPServer(("", 0), Handler, bind_and_activate=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options["--ssl-certfile"])
    server.socket = context.wrap_socket(socket.socket(fileno=int(arguments[1])), server_side=True)
    server.server_activate()
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
