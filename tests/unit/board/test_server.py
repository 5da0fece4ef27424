"""Nobody but the one who has its address reads anything through the board, and nobody writes."""

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from harness.run_feeds import line, step, write_run

from mobius.board import command
from mobius.board.command import open_server, opened_in_browser
from mobius.board.runs import RunStore
from mobius.board.server import BoardServer
from mobius.errors import ConfigError, PlanError

GONE = threading.Event()
ROOT = Path(__file__).resolve().parents[3]


def planned(question: Mapping[str, Any], has_gone: Callable[[], bool]) -> Mapping[str, Any]:
    """In the place of the planner: the question, or with `wait` whether the page goes."""
    if question["words"] == ["wait"]:
        while not has_gone():
            threading.Event().wait(0.02)
        GONE.set()
    if question["words"] == ["bad"]:
        raise PlanError("it does not fit")
    return question


@pytest.fixture
def board(tmp_path: Path) -> Iterator[BoardServer]:
    write_run(tmp_path / "runs" / "first", 5)
    (tmp_path / "secret.txt").write_text("secret")
    server = open_server(RunStore(tmp_path / "runs"), planned, port=0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(
    board: BoardServer, path: str, *, method: str = "GET", host: str | None = None, body: str = ""
) -> tuple[int, str, Any]:
    with socket.create_connection(("127.0.0.1", board.port), timeout=10) as connection:
        name = f"127.0.0.1:{board.port}" if host is None else host
        head = f"Host: {name}\r\n" if name else ""
        head += f"Content-Length: {len(body)}\r\n" if body else ""
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n{body}".encode("latin-1"))
        answer = http.client.HTTPResponse(connection, method=method)
        answer.begin()
        return answer.status, answer.read().decode(), answer.headers


def test_the_page_and_all_that_it_names_is_here_and_from_nowhere_else(board: BoardServer) -> None:
    status, page, headers = ask(board, f"/{board.token}/")
    assert status == 200
    waiting, seen = re.findall(r'(?:href|src)="([\w.]+)"', page), set[str]()
    while waiting:
        name = waiting.pop()
        status, text, _ = ask(board, f"/{board.token}/{name}")
        assert status == 200, name
        seen.add(name)
        waiting += [other for other in re.findall(r'from "\./(\w+\.js)"', text) if other not in seen]
    assert {"style.css", "uplot.min.js", "app.js", "runs.js", "plan.js", "charts.js", "words.js"} <= seen
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path", ["/", "/app.js", "/wrong/", "/wrong/api/runs", "//", "/%00/", "/tok\xe9n/", "*", "http://[/"]
)
def test_without_the_token_there_is_nothing(board: BoardServer, path: str) -> None:
    status, text, _ = ask(board, path)
    assert status == 403
    assert "whole address" in text


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "[", "a@localhost"]
)
def test_a_name_that_is_not_this_machine_is_refused(board: BoardServer, host: str) -> None:
    """A page of another site that points its own name at 127.0.0.1."""
    assert ask(board, f"/{board.token}/app.js", host=host)[0] == 421


def test_the_end_of_a_tunnel_may_have_another_port(board: BoardServer) -> None:
    assert ask(board, f"/{board.token}/app.js", host="localhost:9999")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        *("../secret.txt", "..%2fsecret.txt", "app.js/../../../secret.txt", "api", "page/app.js", "uplot.LICENSE"),
        *("api/file?run=../&file=secret.txt", "api/file?run=first&file=../../secret.txt", "api/file?run=first"),
        *("api/file?run=first&file=events.jsonl", "api/file?run=..&file=plan.json", "api/section?run=first&first=x"),
        *("api/section?run=nobody&first=0&last=9", "api/plans", "%2e%2e/secret.txt"),
    ],
)
def test_no_path_leads_to_another_file(board: BoardServer, path: str) -> None:
    board.store.summaries()
    status, text, _ = ask(board, f"/{board.token}/{path}")
    assert status == 404
    assert "secret" not in text


def test_it_listens_on_this_machine_alone(board: BoardServer) -> None:
    assert board.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "POST"])
def test_nothing_can_be_written(board: BoardServer, method: str) -> None:
    status, _, _ = ask(board, f"/{board.token}/api/file?run=first&file=plan.json", method=method)
    assert status in (404, 501)


def test_questions_reach_the_planner_with_the_options_of_a_run(board: BoardServer) -> None:
    def answer(body: str, token: str = board.token) -> tuple[int, str]:
        return ask(board, f"/{token}/api/plan", method="POST", body=body)[:2]

    board.store.summaries()
    assert answer('{"words": ["--card", "T4"]}') == (200, '{"words": ["--card", "T4"]}')
    options = str(board.store.root / "first" / "training_args.yaml")
    of_run = json.loads(answer('{"words": ["--card", "T4"], "run": "first"}')[1])
    assert of_run == {"words": ["--config", options, "--card", "T4"]}
    assert json.loads(answer('{"words": ["bad"]}')[1]) == {"problem": "it does not fit"}
    for wrong in (
        "no json",
        "[1]",
        "7",
        "",
        '{"run": "../x", "words": []}',
        '{"run": ["first"], "words": []}',
    ):
        assert answer(wrong)[0] == 404
    assert answer('{"words": []}', "guess")[0] == 403


def test_the_planner_learns_that_the_page_has_gone(board: BoardServer) -> None:
    GONE.clear()
    body = '{"words": ["wait"]}'
    with socket.create_connection(("127.0.0.1", board.port), timeout=10) as connection:
        head = f"Host: localhost\r\nContent-Length: {len(body)}"
        connection.sendall(f"POST /{board.token}/api/plan HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
        assert not GONE.wait(0.3)
    assert GONE.wait(10)


def test_files_of_a_run_come_as_they_are_and_absent_ones_empty(board: BoardServer) -> None:
    folder = board.store.root / "first"
    (folder / "plan.json").write_text('{"version": 2}')
    board.store.summaries()
    assert ask(board, f"/{board.token}/api/file?run=first&file=plan.json")[:2] == (200, '{"version": 2}')
    assert ask(board, f"/{board.token}/api/file?run=first&file=trace.json")[:2] == (200, "")


def events(answer: http.client.HTTPResponse, number: int) -> list[tuple[str, Any]]:
    """The next events of a stream."""
    found: list[tuple[str, Any]] = []
    name = ""
    while len(found) < number:
        text = answer.readline().decode()
        assert text, "the stream has ended"
        if text.startswith("event: "):
            name = text[7:].strip()
        elif text.startswith("data: "):
            found.append((name, json.loads(text[6:])))
    return found


def test_a_stream_sends_the_list_then_what_is_new(board: BoardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mobius.board.server._POLL_SECONDS", 0.02)
    path = board.store.root / "first" / "events.jsonl"
    connection = http.client.HTTPConnection("127.0.0.1", board.port, timeout=10)
    connection.request("GET", f"/{board.token}/api/events?run=first&run=nobody")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    (rows, listed), (run, told) = events(answer, 2)
    assert (rows, [row["id"] for row in listed["rows"]]) == ("runs", ["first"])
    assert (run, told["is_whole"], told["series"]["step"]) == ("run", True, [1.0, 2.0, 3.0, 4.0, 5.0])
    with path.open("a") as file:
        file.write(line(step(6), 6, 3.0))
    (_, listed), (_, told) = events(answer, 2)
    assert listed["rows"][0]["step"] == 6
    assert (told["is_whole"], told["series"]["step"]) == (False, [6.0])
    before = threading.active_count()
    answer.close()
    connection.close()
    for _ in range(100):
        if threading.active_count() < before:
            break
        threading.Event().wait(0.02)
    assert threading.active_count() < before  # nobody reads: nothing is polled any more


def test_two_boards_take_two_ports_and_keep_two_secrets(tmp_path: Path) -> None:
    with open_server(RunStore(tmp_path), planned, None) as one, open_server(RunStore(tmp_path), planned, None) as other:
        assert one.port != other.port
        assert one.token != other.token
        assert len(one.token) >= 32


def test_a_port_that_is_taken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} is taken.*--port"):
            open_server(RunStore(tmp_path), planned, port)
        monkeypatch.setattr(command, "PORT", port)
        with open_server(RunStore(tmp_path), planned, None) as next_one:
            assert port < next_one.port <= port + 20
    with pytest.raises(ConfigError, match=r"--port 99999 cannot be opened.*65535"):
        open_server(RunStore(tmp_path), planned, 99999)
    with pytest.raises(ConfigError, match="no folder"):
        command.run([str(tmp_path / "nowhere")])


def test_a_browser_gets_the_secret_by_a_file_of_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Browser:
        def open(self, url: str) -> None:
            asked.append(url)
            path = Path(url.removeprefix("file://"))
            assert "http://127.0.0.1:1/secret/" in path.read_text()
            assert path.stat().st_mode & 0o077 == 0

    monkeypatch.setattr("webbrowser.get", Browser)
    with opened_in_browser("http://127.0.0.1:1/secret/"):
        assert "secret" not in asked[0]
    assert not Path(asked[0].removeprefix("file://")).exists()


def test_the_command_says_where_the_page_is_and_ends_quietly(tmp_path: Path) -> None:
    """It imports neither torch nor transformers, and takes little memory."""
    words = [sys.executable, "-X", "importtime", "-m", "mobius", "board", str(tmp_path), "--port", "0", "--no_browser"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        url = first.split()[-1]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", url)
        assert f"ssh -N -L {url.split(':')[2].split('/')[0]}:127.0.0.1:" in second
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert int(status.partition("VmRSS:")[2].split()[0]) < 50 * 1024
        process.terminate()
        _, log = process.communicate(timeout=20)
        assert process.returncode == 0
    assert "Traceback" not in log
    assert not re.search(r"\| +(torch|transformers|numpy)$", log, re.MULTILINE)
