"""The web server of the board: the page's files, runs as server-sent events, and plans; only on this machine.

Every address begins with a secret, which the terminal shows to the user who started the board. The host name in a
browser's request must be this machine's name. Otherwise a page of another site could reach the board through a name of
that site that points to 127.0.0.1 (DNS rebinding). Files come from a fixed table, and runs from the list that was
found: the server never opens a path from a request.
"""

from __future__ import annotations

import hmac
import json
import re
import select
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qs

from mobius.board.runs import RunStore
from mobius.errors import MobiusError

HOST: Final = "127.0.0.1"
_OWN_NAME: Final = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.IGNORECASE)
"""Host names with any port: the local end of an SSH tunnel may have another port; a page of another site has another
name."""
_PAGE: Final = {
    "": "text/html",
    **dict.fromkeys(("style.css", "uplot.min.css"), "text/css"),
    **dict.fromkeys(("app.js", "words.js", "charts.js", "runs.js", "plan.js", "uplot.min.js"), "text/javascript"),
}
"""Files of the page, and their types."""
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MAX_BODY: Final = 2**20
_POINTS: Final = 1000
_POLL_SECONDS: Final = 1.0
_HEARTBEAT_POLLS: Final = 20

Planner = Callable[[Mapping[str, Any], Callable[[], bool]], Mapping[str, Any]]
"""Function that answers a question of the page, and may ask whether the page has gone; raises MobiusError with the
message for the user."""


class BoardServer(ThreadingHTTPServer):
    """Listening server; `serve_forever` answers each request in a thread."""

    daemon_threads = True
    request_queue_size = 64  # a browser asks for all files of the page at once

    def __init__(self, store: RunStore, *, token: str, planner: Planner, port: int = 0) -> None:
        """Bind `port` of this machine; 0 means any free port. Raises OSError if it is taken."""
        self.store, self.token, self.planner = store, token, planner
        super().__init__((HOST, port), _Request)

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def url(self) -> str:
        """Address of the page, with the secret."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors because a browser has gone; show any other error, because it is a bug."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    server: BoardServer
    timeout = 20.0  # time limit for a request to arrive, and for the browser to accept each part of an answer
    server_version, sys_version = "mobius", ""

    def log_message(self, format: str, *args: Any) -> None:
        pass  # nothing is logged, because addresses contain the secret

    def do_GET(self) -> None:
        self._respond(self._found)

    def do_POST(self) -> None:
        self._respond(self._planned)

    def _respond(self, find: Callable[[str, Mapping[str, list[str]]], tuple[bytes, str]]) -> None:
        """Answer with the result of `find` for the path after the secret and the query, if the request is allowed."""
        address, _, query = self.path.partition("?")
        token, _, path = address.removeprefix("/").partition("/")
        if not _OWN_NAME.fullmatch(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "Open the board as 127.0.0.1 or localhost.")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "Open the board by the whole address that `mobius board` has printed.")
        elif path == "api/events":
            self._stream(parse_qs(query).get("run", []))
        else:
            try:
                found = find(path, parse_qs(query))
            except (KeyError, TypeError, ValueError, OSError):
                self._refuse(HTTPStatus.NOT_FOUND, "There is no such thing.")
            else:
                self._answer(*found)

    def _found(self, path: str, query: Mapping[str, list[str]]) -> tuple[bytes, str]:
        """Content and type: a file of the page or a run, or steps of a run. Raises KeyError, ValueError or OSError."""
        if path == "api/section":
            first, last = (float(query[key][0]) for key in ("first", "last"))
            return _json(self.server.store.section(query["run"][0], first, last, _POINTS))
        if path == "api/file":
            return self.server.store.file(query["run"][0], query["file"][0]), "application/json"
        kind = _PAGE[path]
        return resources.files("mobius.board").joinpath("page", path or "index.html").read_bytes(), kind

    def _planned(self, path: str, _: Mapping[str, list[str]]) -> tuple[bytes, str]:
        """Forecast for a JSON object with `words`, which follow the options of a `run`. Raises errors like `_found`."""
        length = int(self.headers["Content-Length"])
        if path != "api/plan" or not 0 <= length <= _MAX_BODY:
            raise KeyError(path)
        question = json.loads(self.rfile.read(length))
        if "run" in question:
            options = self.server.store.folder(question.pop("run")) / "training_args.yaml"
            question["words"] = ["--config", str(options), *question["words"]]
        try:
            return _json(self.server.planner(question, lambda: _has_gone(self.connection, 0.0)))
        except MobiusError as error:
            return _json({"problem": str(error)})

    def _stream(self, names: Sequence[str]) -> None:
        """Send changed rows of the list, and new data of the runs `names`, until the page is closed."""
        self._head("text/event-stream")
        watched, rows, polls = dict.fromkeys(names[:2], (0, 0)), dict[str, Any](), 0
        while not _has_gone(self.connection, _POLL_SECONDS if polls else 0.0):
            now = {row["id"]: row for row in self.server.store.summaries()}
            if now != rows or not polls:
                changed = [row for name, row in now.items() if rows.get(name) != row]
                self._send("runs", {"rows": changed, "gone": [name for name in rows if name not in now]})
            for name, seen in watched.items():
                with suppress(KeyError):  # the run is gone
                    if now[name] != rows.get(name):
                        news, watched[name] = self.server.store.history(name, seen, _POINTS)
                        self._send("run", news)
            rows, polls = now, polls + 1
            if not polls % _HEARTBEAT_POLLS:
                self.wfile.write(b": still here\n\n")

    def _send(self, event: str, value: object) -> None:
        self.wfile.write(f"event: {event}\ndata: {json.dumps(value)}\n\n".encode())

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer(f"{text}\n".encode(), "text/plain", status)

    def _answer(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._head(kind, status, {"Content-Length": str(len(content))})
        self.wfile.write(content)

    def _head(self, kind: str, status: HTTPStatus = HTTPStatus.OK, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()


def _json(value: object) -> tuple[bytes, str]:
    return json.dumps(value).encode(), "application/json"


def _has_gone(connection: socket.socket, seconds: float) -> bool:
    """Whether the browser closes the connection within `seconds`."""
    readable, _, _ = select.select([connection], [], [], seconds)
    with suppress(OSError):
        return bool(readable) and not connection.recv(1024)
    return True
