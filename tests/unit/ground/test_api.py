"""`mobius.finetune` and `mobius.plan` from Python: the same run, the same errors, an end with the caller's."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from harness.runs import ROOT

import mobius
from mobius import api
from mobius.errors import CheckpointError, ConfigError, DataError, HostMemoryError, RunFailedError
from mobius.ranks import cache_folder

PAGE = (ROOT / "docs" / "user" / "python.md").read_text(encoding="utf-8")
RECORDS = [{"text": f"number {number} is followed by {number + 1}"} for number in range(12)]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "nproc_per_node": 1,
    "num_stages": 2,
    "batch_size": 2,
    "num_chunks": 2,
    "seq_length": 32,
    "num_iterations": 2,
}


@pytest.mark.extended
def test_the_example_of_the_page_trains_and_its_result_has_what_the_folder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    events: list[Mapping[str, Any]] = []
    names: dict[str, Any] = {}
    more = "device='cpu', nproc_per_node=1, save_params='a.pt', save_results='b.txt', on_event=events.append, **options"
    exec(
        example.replace("assets/tiny-llama", str(ROOT / "assets" / "tiny-llama")).replace("**options", more),
        {"events": events},
        names,
    )
    result = names["result"]
    assert [event["event"] for event in events] == ["start", "step", "step", "end"]
    assert [step["loss"] for step in result.history] == [event["loss"] for event in events[1:3]]
    assert (result.folder / "model.safetensors").is_file()
    assert result.metrics["train_loss"] > 0
    assert result.plan["num_ranks"] == 1


@pytest.mark.extended
def test_an_error_of_a_rank_is_raised(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model"):  # the launcher does not look there
        mobius.finetune(tmp_path / "model", RECORDS, save_dir=tmp_path / "out", **SMALL)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], list[str]]:
    """A program in the place of the launcher; returns a function that sets it and the list of its words."""
    words: list[str] = []

    def use(program: str) -> list[str]:
        file = tmp_path / "program.py"
        file.write_text(f"import json, os, signal, sys, time\n{program}\n")

        def command(given: list[str], *_: object) -> tuple[list[str], None]:
            words.extend(given)
            return ["env", sys.executable, str(file)], None

        monkeypatch.setattr(api, "launch_command", command)
        return words

    return use


def test_a_result_has_what_the_folder_has(stand_in: Callable[[str], list[str]], tmp_path: Path) -> None:
    files = {
        "events.jsonl": [{"event": "step", "step": 1, "time": 0}, {"event": "end", "time": time.time() + 60}],
        "metrics.jsonl": [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 1.5}],
        "all_results.json": [{"train_loss": 2.0}],
        "plan.json": [{"num_ranks": 2}],
    }
    program = [f"open({str(tmp_path / name)!r}, 'w').write({_lines(rows)!r})" for name, rows in files.items()]
    stand_in("; ".join(program))
    events: list[Mapping[str, Any]] = []
    result = mobius.finetune("m", "a.jsonl", save_dir=tmp_path, on_event=events.append, progress=False)
    assert [event["event"] for event in events] == ["end"]  # the other one is of an earlier run
    assert (result.folder, result.metrics, result.plan) == (tmp_path, {"train_loss": 2.0}, {"num_ranks": 2})
    assert [step["loss"] for step in result.history] == [2.5, 1.5]


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_handler_that_fails_lets_the_run_save(stand_in: Callable[[str], list[str]], tmp_path: Path) -> None:
    saved, feed = tmp_path / "saved", tmp_path / "events.jsonl"
    stand_in(
        f"signal.signal(15, lambda *_: (print('x' * 200_000), open({str(saved)!r}, 'w').close(), sys.exit(130)))\n"
        f"open({str(feed)!r}, 'w').write(json.dumps(dict(event='step', time=time.time() + 60)) + chr(10))\n"
        "print('a step', flush=True); time.sleep(60)"
    )
    with pytest.raises(ZeroDivisionError):
        mobius.finetune("m", "a.jsonl", save_dir=tmp_path, on_event=lambda _: 1 / 0, progress=False)
    assert saved.is_file()


def test_options_become_words(stand_in: Callable[[str], list[str]], tmp_path: Path) -> None:
    words = stand_in("sys.exit(0)")
    mobius.finetune(
        "m",
        ["a.jsonl", "b.jsonl:0.3"],
        save_dir=tmp_path,
        master_port=29533,
        use_offload=False,
        seed=None,
        learning_rate=1e-5,
    )
    assert words == [
        *("--model_path=m", "--dataset", "a.jsonl", "b.jsonl:0.3", f"--save_dir={tmp_path}", "--master_port=29533"),
        *("--use_offload=false", "--learning_rate=1e-05"),
    ]
    with pytest.raises(ConfigError, match="a mapping is for YAML files"):
        mobius.finetune("m", "a.jsonl", lr_scheduler_kwargs={"min_lr": 0})  # type: ignore[arg-type]


def test_records_are_written_once_and_refused_where_they_cannot_be(stand_in: Callable[[str], list[str]]) -> None:
    words = stand_in("sys.exit(0)")
    for _ in range(2):
        mobius.finetune("m", iter(RECORDS), progress=False)
    files = {word.partition("=")[2] for word in words if word.startswith("--dataset=")}
    (file,) = map(Path, files)
    assert file.parent == cache_folder() / "records"
    assert [json.loads(line) for line in file.read_text().splitlines()] == RECORDS
    circle: dict[str, object] = {}
    circle["text"] = circle
    for data, message in (
        ([{"text": b"x"}], "record 0"),
        ([circle], "record 0"),
        ([7], "record 0 is int"),
        ([], "no records"),
    ):
        with pytest.raises(DataError, match=message):
            mobius.finetune("m", data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("program", "kind", "message"),
    [
        (
            "json.dump({'type': 'HostMemoryError', 'message': '3 GiB are missing'}, "
            "open(os.environ['MOBIUS_ERROR_FILE'], 'w')); sys.exit(1)",
            HostMemoryError,
            "3 GiB are missing",
        ),
        ("print('the last words'); os.kill(os.getpid(), signal.SIGKILL)", RunFailedError, "-9\nthe last words"),
        (
            "json.dump({'type': 'KeyError', 'message': 'KeyError: 3'}, open(os.environ['MOBIUS_ERROR_FILE'], 'w')); "
            "sys.exit(1)",
            RunFailedError,
            "KeyError: 3",
        ),
    ],
)
def test_a_run_that_fails_raises_its_error(
    stand_in: Callable[[str], list[str]], program: str, kind: type[Exception], message: str
) -> None:
    stand_in(program)
    with pytest.raises(kind, match=message):
        mobius.finetune("m", "a.jsonl", progress=False)


CALLER = """
import mobius, sys
from mobius import api
api.launch_command = lambda *_: (["env", sys.executable, sys.argv[1]], None)
mobius.finetune("m", "a.jsonl")
"""
CHILD = """
import signal, sys, time
from mobius.signal_handling import stop_with_caller
def end(number, frame):
    open(sys.argv[0] + ".end", "w").write(signal.Signals(number).name)
    sys.exit(130)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGTERM, end)
stop_with_caller()
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "received"), [(signal.SIGINT, "SIGINT"), (signal.SIGKILL, "SIGTERM")], ids=["Ctrl-C", "killed"]
)
def test_a_run_saves_and_ends_with_its_caller(tmp_path: Path, sent: signal.Signals, received: str) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(tmp_path / "child.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert caller.stdout is not None
    assert caller.stdout.readline() == "ready\n"
    caller.send_signal(sent)
    assert "KeyboardInterrupt" in caller.communicate()[1] or sent is signal.SIGKILL
    end, deadline = tmp_path / "child.py.end", time.monotonic() + 30
    while not (end.is_file() and end.read_text()) and time.monotonic() < deadline:  # it is empty when it is made
        time.sleep(0.01)
    assert end.read_text() == received


def test_the_plan_of_the_page_needs_no_gpu() -> None:
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {}, names)
    plan = names["plan"]
    assert plan.fits
    assert plan.tokens_per_second
    assert "RTX4090" in plan.describe()
    assert isinstance(plan, mobius.Forecast)
