"""The web server of the board: the page's files, runs as server-sent events, and plans; on this machine only.

Every address begins with a secret, which the terminal shows to the one who started the board. The name of the host that
a browser asks for must be this machine's, or a page of another site could reach the board by a name of its own that it
points at 127.0.0.1 (DNS rebinding). Files are taken from a fixed table, and runs by names that were found: no path of a
request is opened.
"""

from __future__ import annotations

import hmac
import json
import re
import select
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qs

from mobius.board.runs import RunStore

HOST: Final = "127.0.0.1"
_OWN_NAME: Final = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.IGNORECASE)
"""Any port: the near end of an SSH tunnel may have another one, and a page of another site has another name."""
_TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_PAGE: Final = (
    *("index.html", "style.css", "app.js", "words.js", "charts.js", "runs.js"),
    *("uplot.min.js", "uplot.min.css"),
)
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_POINTS: Final = 1000
_POLL_SECONDS: Final = 1.0
_HEARTBEAT_POLLS: Final = 20


class BoardServer(ThreadingHTTPServer):
    """Listening server; `serve_forever` answers, a thread for each request."""

    daemon_threads = True
    request_queue_size = 64  # a browser asks for all files of the page at once

    def __init__(self, store: RunStore, *, token: str, port: int = 0) -> None:
        """Bind `port` of this machine, 0: any that is free. Raises OSError if it is taken."""
        self.store, self.token = store, token
        super().__init__((HOST, port), _Request)

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def url(self) -> str:
        """Address of the page, which holds the secret."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over a browser that has gone; anything else is a bug and shown as one."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    server: BoardServer
    timeout = 20.0  # for a request to arrive and for each part of an answer to be taken
    server_version, sys_version = "mobius", ""

    def log_message(self, format: str, *args: Any) -> None:
        pass  # addresses hold the secret

    def do_GET(self) -> None:
        path, query = self._admitted()
        if path in _PAGE or path == "":
            name = path or "index.html"
            content = resources.files("mobius.board").joinpath("page", name).read_bytes()
            self._answer(content, _TYPES[name.rpartition(".")[2]])
        elif path == "api/events":
            self._stream(query)
        elif path is not None:
            try:
                self._answer(self._found(path, query), "application/json")
            except (KeyError, ValueError, OSError):
                self._refuse(HTTPStatus.NOT_FOUND, "There is no such thing.")

    def _admitted(self) -> tuple[str | None, Mapping[str, list[str]]]:
        """Path behind the secret, and the query; (None, {}) after a refusal."""
        address, _, query = self.path.partition("?")
        token, _, path = address.removeprefix("/").partition("/")
        if not _OWN_NAME.fullmatch(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "Open the board as 127.0.0.1 or localhost.")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "Open the board by the whole address that `mobius board` has printed.")
        else:
            return path, parse_qs(query)
        return None, {}

    def _found(self, path: str, query: Mapping[str, list[str]]) -> bytes:
        """Answer to a question about runs, as JSON or as the file. Raises KeyError, ValueError or OSError for none."""
        store = self.server.store
        if path == "api/runs":
            return json.dumps(store.summaries()).encode()
        name = query["run"][0]
        if path == "api/section":
            first, last = (float(query[key][0]) for key in ("first", "last"))
            return json.dumps(store.section(name, first, last, _POINTS)).encode()
        if path == "api/file":
            return store.file(name, query["file"][0])
        raise KeyError(path)

    def _stream(self, query: Mapping[str, list[str]]) -> None:
        """Send rows of the list that changed, and what is new of the runs that are looked at, until the page goes."""
        self._head("text/event-stream")
        watched = dict.fromkeys(query.get("run", [])[:2], (0, 0))
        rows: dict[str, Any] = {}
        polls = 0
        while not _has_gone(self.connection, _POLL_SECONDS if polls else 0.0):
            now = {row["id"]: row for row in self.server.store.summaries()}
            if now != rows or not polls:
                changed = [row for name, row in now.items() if rows.get(name) != row]
                self._send("runs", {"rows": changed, "gone": [name for name in rows if name not in now]})
            for name, seen in watched.items():
                with suppress(KeyError):  # it is gone
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


def _has_gone(connection: socket.socket, seconds: float) -> bool:
    """Whether the browser closes the connection within `seconds`."""
    readable, _, _ = select.select([connection], [], [], seconds)
    with suppress(OSError):
        return bool(readable) and not connection.recv(1024)
    return True
