"""Tests on several cores: `--workers 4` forks as many processes once all tests are imported and collected.

    import, collect ---+--- worker 0      takes a file, runs its tests, takes another one, ... until none is left
                       +--- worker 1      the same
                       +--- this process  hears how each test ended, and tells it

Workers that import and collect for themselves, as pytest-xdist's do, take 18 s of a core each before their first test,
and 6 s for the server that forks runs (harness/forked.py); here that is a fork of the worker.
"""

from __future__ import annotations

import os
import signal
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import pytest
from harness import forked, runs

number = 0
"""This worker's."""

Location = tuple[str, int | None, str]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run the files of tests in N processes")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run all tests: files in their order, those of a file one after the other."""
    option = session.config.option
    if option.workers < 2 or option.collectonly or session.testsfailed:
        return None
    if os.environ.get("OMP_NUM_THREADS") != "1":  # threads of OpenMP do not survive a fork, and workers wait for them
        raise pytest.UsageError("--workers needs OMP_NUM_THREADS=1 in the environment, as scripts/test sets it")
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    session.config.pluginmanager.getplugin("terminalreporter").showfspath = False  # several are run at a time
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    forked.import_all()
    runs.kernel_folder()
    workers = dict[Connection, BaseProcess]()
    try:
        todo = _numbers(len(files))
        for each in range(min(option.workers, len(files))):
            ours, theirs = get_context("fork").Pipe(duplex=False)
            process = get_context("fork").Process(target=_work, args=(each, session, files, todo, theirs))
            process.start()
            theirs.close()
            workers[ours] = process
        _hear(session, workers)
    finally:
        for process in workers.values():
            _end(process)
    return True


def _numbers(count: int) -> int:
    """A pipe that gives the numbers below `count`, two bytes each, to whoever reads first."""
    read, write = os.pipe()
    os.write(write, struct.pack(f"{count}H", *range(count)))
    os.close(write)
    return read


def _hear(session: pytest.Session, workers: Mapping[Connection, BaseProcess]) -> None:
    """Tell how tests ended, until all workers have."""
    living, running = dict(workers), dict[Connection, tuple[str, Location]]()
    while living:
        told = wait(living, timeout=1)
        # What a test started may outlive its worker, with that one's end of the pipe.
        dead = [each for each, process in living.items() if not process.is_alive() and not each.poll()]
        for each in [*dead, *(each for each in told if each not in dead)]:
            assert isinstance(each, Connection)
            try:
                if each in dead:
                    raise EOFError
                _tell(session, running, each)
            except EOFError:
                process = living.pop(each)
                process.join()
                if process.exitcode:
                    _tell_death(session, *running.get(each, ("", ("", None, "no test"))), process.exitcode)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)


def _tell(session: pytest.Session, running: dict[Connection, tuple[str, Location]], worker: Connection) -> None:
    hook = session.config.hook
    match worker.recv():
        case "start", nodeid, location:
            running[worker] = (nodeid, location)
        case "report", data:
            report = hook.pytest_report_from_serializable(config=session.config, data=data)
            hook.pytest_runtest_logreport(report=report)
        case "warning", where:
            hook.pytest_warning_recorded.call_historic(kwargs=where)
        case "finish", nodeid, location:
            hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)


def _tell_death(session: pytest.Session, nodeid: str, location: Location, code: int) -> None:
    said = f"its worker ended with {code}: what is left of the file is not run"
    report = pytest.TestReport(nodeid, location, {}, "failed", said, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def _end(process: BaseProcess) -> None:
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGINT)  # its tests clean up
    process.join(10)
    process.kill()
    process.join()


def _work(each: int, session: pytest.Session, files: Sequence[list[pytest.Item]], todo: int, told: Connection) -> None:
    """Be a worker."""
    global number
    number, config = each, session.config
    plugins = config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # into files that all workers would share
    capture.start_global_capturing()
    capture.suspend_global_capture()
    plugins.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker{each}"
    factory._basetemp.mkdir()
    forked.fork_server()
    plugins.register(_Teller(config, told))
    for item, following in pairwise(chain(_taken(files, todo), [None])):
        assert item is not None
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    os._exit(0)  # without waiting for what tests left behind


def _taken(files: Sequence[list[pytest.Item]], todo: int) -> Iterator[pytest.Item]:
    while taken := os.read(todo, 2):
        yield from files[struct.unpack("H", taken)[0]]


class _Teller:
    """In a worker: tells the process that forked it what happens."""

    def __init__(self, config: pytest.Config, told: Connection) -> None:
        self._config, self._told = config, told

    def pytest_runtest_logstart(self, nodeid: str, location: Location) -> None:
        self._told.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._told.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if when != "runtest":
            return  # which the other process knows
        text, category = Warning(str(warning_message.message)), warning_message.category
        told = warnings.WarningMessage(text, category, warning_message.filename, warning_message.lineno)
        where = {"warning_message": told, "when": when, "nodeid": nodeid, "location": location}
        self._told.send(("warning", where))

    def pytest_runtest_logfinish(self, nodeid: str, location: Location) -> None:
        self._told.send(("finish", nodeid, location))
