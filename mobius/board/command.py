"""The command `mobius board`: opens the port, prints the page's address, and serves until it is interrupted."""

from __future__ import annotations

import errno
import secrets
import signal
import socket
import sys
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from mobius.board.planning import PlanningProcess
from mobius.board.runs import RunStore
from mobius.board.server import HOST, BoardServer, Planner
from mobius.config.command_parser import CommandParser
from mobius.errors import ConfigError, reason_of

PORT: Final = 8765
_MORE_PORTS: Final = 20


def parser() -> CommandParser:
    """Parser of the command's arguments."""
    text = "A page in the browser: all runs under a folder, live, and plans for new ones."
    own = CommandParser(prog="mobius board", description=text)
    own.add_argument("folder", nargs="?", type=Path, default=Path(), help="folder of runs (default: this one)")
    own.add_argument("--port", type=int, help=f"default: {PORT}, or the next free port")
    own.add_argument("--no_browser", action="store_true", help="only print the address")
    return own


def run(words: Sequence[str]) -> int:
    """Serve the page until Ctrl-C or SIGTERM. Raises ConfigError if the folder does not exist or the port is taken."""
    given = parser().parse_args(words)
    if not given.folder.is_dir():
        raise ConfigError(f"{given.folder} is no folder. Name one that has runs, or will have them, at any depth.")
    planning = PlanningProcess()
    server = open_server(RunStore(given.folder.resolve()), planning.answer, given.port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), closing(planning), server:
        sys.stdout.write(
            f"runs under {given.folder.resolve()}: {server.url}\n"
            f"from another machine: ssh -N -L {server.port}:{HOST}:{server.port} {socket.gethostname()}, "
            "then the same address there\n"
            "Ctrl-C ends the page, not the runs.\n"
        )
        sys.stdout.flush()
        with opened_in_browser("" if given.no_browser else server.url):
            server.serve_forever(poll_interval=3600)  # a request wakes the server
    return 0


def open_server(store: RunStore, planner: Planner, port: int | None) -> BoardServer:
    """Return the server on `port`; None tries several ports for a free one. Raises ConfigError if the port is taken."""
    token = secrets.token_urlsafe(24)
    ports = range(PORT, PORT + _MORE_PORTS) if port is None else (port,)
    for each in ports:
        try:
            return BoardServer(store, token=token, planner=planner, port=each)
        except (OSError, OverflowError) as error:
            if port is not None and getattr(error, "errno", None) != errno.EADDRINUSE:
                reason = reason_of(error)
                raise ConfigError(f"--port {port} cannot be opened: {reason}. Name one from 1024 to 65535.") from error
    taken = f"--port {port} is taken" if port is not None else f"the ports {PORT} to {ports[-1]} are taken"
    raise ConfigError(f"{taken}, perhaps by another board. Name another port with --port; 0 takes any free port.")


@contextmanager
def opened_in_browser(url: str) -> Iterator[None]:
    """Open `url` in a graphical browser, if there is one; an empty `url` opens none.

    The address is passed in a file that exists within the block, because every user of the machine could read a secret
    in the arguments of a command.
    """
    browser = None
    with suppress(webbrowser.Error):
        browser = webbrowser.get() if url else None
    if browser is None or type(browser) is webbrowser.GenericBrowser:  # a text browser would take over the terminal
        yield
        return
    with tempfile.NamedTemporaryFile("w", prefix="mobius-board-", suffix=".html") as file:  # only its owner can read it
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">\n')
        file.flush()
        browser.open(Path(file.name).as_uri())
        yield
