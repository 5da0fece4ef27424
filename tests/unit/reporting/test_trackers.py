"""Trackers get every number, and none of them can end a run, stop it or slow it down."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mobius.errors import ConfigError
from mobius.reporting.trackers import TrackedRun, Trackers, check_installed, start_trackers


class Recorder:
    """A tracker that keeps what it gets, after doing what a test wants in each step."""

    def __init__(self, before: Callable[[int], object] = lambda step: None) -> None:
        self.lines: list[tuple[int, Mapping[str, float]]] = []
        self.has_closed = threading.Event()
        self._before = before

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._before(step)
        self.lines.append((step, numbers))

    def close(self) -> None:
        self.has_closed.set()

    @property
    def is_closed(self) -> bool:
        return self.has_closed.is_set()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_each_tracker_gets_every_line_in_order_and_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    recorders = {"a": Recorder(), "b": Recorder()}
    trackers = Trackers({name: lambda tracker=tracker: tracker for name, tracker in recorders.items()})
    for step in range(1, 6):
        trackers.log(step, {"train/loss": 1 / step})
    trackers.close()

    for recorder in recorders.values():
        assert recorder.lines == [(step, {"train/loss": 1 / step}) for step in range(1, 6)]
        assert recorder.is_closed
    assert warnings_of(caplog) == []


def test_one_that_raises_is_told_once_and_gets_the_lines_after_that(caplog: pytest.LogCaptureFixture) -> None:
    def fail(step: int) -> None:
        if step in (2, 3):
            raise OSError("the server\nhas gone")

    recorder = Recorder(fail)
    trackers = Trackers({"a": lambda: recorder})
    for step in range(1, 5):
        trackers.log(step, {"train/loss": 1.0})
    trackers.close()

    assert [step for step, _ in recorder.lines] == [1, 4]
    told, lacking = warnings_of(caplog)
    assert told.startswith("--report_to a: it failed in step 2 (OSError: the server has gone)")
    assert lacking == "--report_to a: it has 2 of 4 lines"


@pytest.mark.parametrize("error", [RuntimeError("no key"), SystemExit(1)])
def test_one_that_cannot_start_is_told_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def start() -> Recorder:
        raise error

    recorder = Recorder()
    trackers = Trackers({"bad": start, "good": lambda: recorder})
    trackers.log(1, {"train/loss": 1.0})
    trackers.close()

    assert len(recorder.lines) == 1
    assert warnings_of(caplog)[0].startswith(f"--report_to bad: it cannot start ({type(error).__name__}")


def test_one_that_hangs_holds_neither_a_step_nor_the_end_nor_another_tracker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    never, recorder = threading.Event(), Recorder()
    trackers = Trackers({"hung": lambda: Recorder(lambda step: never.wait()), "good": lambda: recorder})
    start = time.monotonic()
    for step in range(3000):  # more than may wait
        trackers.log(step, {"train/loss": 1.0})
    trackers.close(seconds=0.3)
    assert time.monotonic() - start < 15  # neither for good nor for the 20 s that a run would wait
    assert recorder.has_closed.wait(60)
    never.set()

    (told,) = [text for text in warnings_of(caplog) if "hung" in text]
    assert "is abandoned" in told
    assert "3000 of 3000 lines" in told


def test_lines_that_a_slow_tracker_has_no_room_for_are_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()
    recorder = Recorder(lambda step: go.wait())
    trackers = Trackers({"slow": lambda: recorder})
    for step in range(1500):
        trackers.log(step, {"train/loss": 1.0})
    go.set()
    trackers.close()

    assert 1000 <= len(recorder.lines) <= 1001, "one is taken at the start"
    assert warnings_of(caplog) == [f"--report_to slow: it has {len(recorder.lines)} of 1500 lines"]


def test_a_package_that_is_not_installed_is_an_error_that_says_what_to_install() -> None:
    check_installed(["tensorboard"])
    with pytest.raises(ConfigError, match="--report_to no_tracker.*pip install no_tracker"):
        check_installed(["tensorboard", "no_tracker"])


def test_tensorboard_reads_what_was_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = start_trackers(["tensorboard"], TrackedRun("name", tmp_path, {"learning_rate": 1e-5}))
    for step in (1, 2):
        trackers.log(step, {"train/loss": 3.0 - step, "eval/loss": 0.5})
    trackers.close(seconds=100)

    assert trackers.run_id is None, "there is no server"
    assert warnings_of(caplog) == []
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "eval/loss"}
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]


def fake_package(name: str, monkeypatch: pytest.MonkeyPatch, *, is_online: bool) -> list[object]:
    """A package in the place of W&B or SwanLab, which are too large to install for tests; returns its calls.

    Without a network it starts offline only, and it asks on the terminal, as they do, if there is one.
    """
    calls: list[object] = []
    package = ModuleType(name)

    def init(*, mode: str | None = None, **given: object) -> SimpleNamespace:
        assert not sys.stdin.isatty()
        calls.append(mode)
        if mode is None and not is_online:
            raise RuntimeError("no API key configured")
        calls.append({key: value for key, value in given.items() if key != "settings"})
        return run

    run = SimpleNamespace(
        log=lambda data, step: calls.append((step, data)), finish=lambda: calls.append("finished"), settings=None
    )
    vars(package).update(init=init, log=run.log, finish=run.finish, Settings=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, name, package)
    return calls


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
@pytest.mark.parametrize("is_online", [True, False])
def test_wandb_and_swanlab_record_offline_where_they_cannot_go_online(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, is_online: bool
) -> None:
    calls = fake_package(name, monkeypatch, is_online=is_online)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)

    trackers = start_trackers([name], TrackedRun("mine", tmp_path, {"seed": 42}))
    trackers.log(1, {"train/loss": 2.0})
    trackers.close()

    assert trackers.run_id is not None
    started = {"wandb": {"name": "mine"}, "swanlab": {"experiment_name": "mine"}}[name]
    if is_online or name == "wandb":
        started |= {"id": trackers.run_id, "resume": "allow"}
    offline: list[object] = [] if is_online else ["offline"]
    assert calls == [None, *offline, {**started, "config": {"seed": 42}}, (1, {"train/loss": 2.0}), "finished"]
    assert sys.stdin is terminal
    expected = [] if is_online else [f"--report_to {name}: it cannot go online (RuntimeError: no API key configured)"]
    assert [text.split(";")[0] for text in warnings_of(caplog)] == expected


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_run_that_goes_on_is_the_same_run_for_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls = fake_package(name, monkeypatch, is_online=True)

    def id_of(known: str | None) -> str:
        calls.clear()
        trackers = start_trackers([name, "tensorboard"], TrackedRun("mine", tmp_path, {}, run_id=known))
        trackers.close()
        (given,) = (call for call in calls if isinstance(call, dict))
        assert (given["id"], given["resume"]) == (trackers.run_id, "allow")
        return str(given["id"])

    first, other = id_of(None), id_of(None)
    assert first != other
    assert len(first) == 21  # SwanLab took no other length before 0.7
    assert id_of(first) == first
    assert id_of("damaged/../id") not in (first, "damaged/../id")


def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A package in the place of MLflow, whose server gives runs ids of its own and finds them by tags."""
    calls: list[object] = []
    runs: list[tuple[str, str]] = []

    def search_runs(*, filter_string: str, output_format: str) -> list[SimpleNamespace]:
        assert output_format == "list"
        return [SimpleNamespace(info=SimpleNamespace(run_id=own)) for own, tag in runs if filter_string == tag]

    def start_run(run_id: str | None, *, run_name: str, tags: Mapping[str, str]) -> None:
        print("View run at")
        ((tag, value),) = tags.items()
        if run_id is None:
            runs.append((f"server's {len(runs)}", f"tags.`{tag}` = '{value}'"))
            calls.append(f"new {run_name}")
        else:
            calls.append(f"again {run_id}")

    package = ModuleType("mlflow")
    vars(package).update(
        search_runs=search_runs,
        start_run=start_run,
        log_params=lambda options: calls.append(dict(options)),
        log_metrics=lambda numbers, step: calls.append((step, numbers)),
        end_run=lambda: print("View run at") or calls.append("ended"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", package)
    return calls


def test_mlflow_gets_options_once_and_goes_on_with_the_run_of_a_resumed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = fake_mlflow(monkeypatch)
    options = {f"option_{number}": number for number in range(150)}
    run_id = None
    for step in (1, 2):
        trackers = start_trackers(["mlflow"], TrackedRun("mine", tmp_path, options, run_id=run_id))
        trackers.log(step, {"train/loss": 2.0})
        trackers.close(seconds=100)
        run_id = trackers.run_id

    new, first, second, *rest = calls
    assert new == "new mine"
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert len(first) == 100, "MLflow takes no more at a time"
    assert {**first, **second} == options
    expected = [(1, {"train/loss": 2.0}), "ended", "again server's 0", (2, {"train/loss": 2.0}), "ended"]
    assert rest == expected
    assert capsys.readouterr().out == ""


def test_trackio_goes_on_with_the_run_of_a_resumed_one_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[object] = []

    def init(**given: object) -> SimpleNamespace:
        print("* Trackio project initialized")
        calls.append(given)
        return SimpleNamespace(
            log=lambda numbers, step: calls.append((step, numbers)), finish=lambda: print("* Run finished")
        )

    package = ModuleType("trackio")
    vars(package).update(init=init)
    monkeypatch.setitem(sys.modules, "trackio", package)
    names = []
    for run_id in ("a" * 21, "a" * 21, "b" * 21):
        calls.clear()
        trackers = start_trackers(["trackio"], TrackedRun("mine", tmp_path, {"seed": 42}, run_id=run_id))
        trackers.log(3, {"train/loss": 2.0})
        trackers.close(seconds=100)
        given, logged = calls
        assert isinstance(given, dict)
        names.append(given.pop("name"))
        assert given == {"project": "mobius", "config": {"seed": 42}, "resume": "allow", "embed": False}
        assert logged == (3, {"train/loss": 2.0})
    assert names == ["mine-aaaaaaa", "mine-aaaaaaa", "mine-bbbbbbb"]
    assert capsys.readouterr().out == ""
