"""What the board says of runs is what their files say, whatever state these are in."""

import fcntl
import json
import math
import os
from pathlib import Path

import pytest
from harness.run_feeds import BEGUN, evaluated, feed, line, started, step, write_run

from mobius.board.feed import History
from mobius.board.runs import RunStore, find_runs, seconds_left
from mobius.reporting.events import RunEnded


def only_row(root: Path) -> dict[str, object]:
    (row,) = RunStore(root).summaries()
    return row


def make_old(path: Path) -> None:
    os.utime(path, (BEGUN, BEGUN))


def test_a_run_is_found_at_any_depth_but_its_checkpoints_are_not(tmp_path: Path) -> None:
    write_run(tmp_path / "week" / "first", 3)
    (tmp_path / "week" / "first" / "checkpoint-3").mkdir()
    (tmp_path / "week" / "first" / "checkpoint-3" / "training_args.yaml").touch()
    (tmp_path / "starting").mkdir()
    (tmp_path / "starting" / "training_args.yaml").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "events.jsonl").touch()
    assert sorted(name for name, _ in find_runs(tmp_path)) == ["starting", "week/first"]
    states = {row["id"]: row["state"] for row in RunStore(tmp_path).summaries()}
    assert states == {"starting": "empty", "week/first": "done"}


def test_the_row_of_a_long_run_rests_on_the_ends_of_its_feed(tmp_path: Path) -> None:
    path = write_run(tmp_path / "long", 2000)
    assert path.stat().st_size > 1_000_000
    row = only_row(tmp_path)
    assert (row["state"], row["step"], row["num_steps"]) == ("done", 2000, 2000)
    assert row["eval_loss"] == pytest.approx(2.2 + 5 * math.exp(-2000 / 300))
    assert row["step_seconds"] == pytest.approx(0.5, abs=0.02)


def test_each_end_has_its_state(tmp_path: Path) -> None:
    ends = {"last step": "done", "early stopping": "done", "error": "failed", "signal": "stopped", "time": "stopped"}
    for reason in ends:
        write_run(tmp_path / reason, 3, ends=reason)
    assert {row["id"]: row["state"] for row in RunStore(tmp_path).summaries()} == ends


def test_a_run_is_killed_if_it_is_silent_and_nobody_locks_its_folder(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 5, total=100, ends=None)
    assert only_row(tmp_path)["state"] == "running"  # it may be of another machine
    make_old(path)
    assert only_row(tmp_path)["state"] == "killed"
    store = RunStore(tmp_path)
    lock = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        assert store.summaries()[0]["state"] == "running"
    finally:
        os.close(lock)
    assert store.summaries()[0]["state"] == "killed"


def test_looking_at_runs_locks_nothing_that_a_run_needs(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 5, ends=None)
    store = RunStore(tmp_path)
    store.summaries()
    store.history("run", (0, 0), 100)
    lock = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)


def test_a_run_that_goes_on_is_running_again(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 5, total=9, ends="signal")
    store = RunStore(tmp_path)
    assert store.summaries()[0]["state"] == "stopped"
    with path.open("a") as file:
        file.write(line(started(9), 5, 100.0) + line(step(6), 6, 100.5))
    (row,) = store.summaries()
    assert (row["state"], row["step"]) == ("running", 6)
    with path.open("a") as file:
        file.write(line(RunEnded(reason="last step", num_steps=1, step_seconds=1.0), 6, 101.0))
    assert store.summaries()[0]["state"] == "done"


def test_a_torn_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 2, ends=None)
    store = RunStore(tmp_path)
    whole = line(step(3), 3, 1.5)
    with path.open("a") as file:
        file.write(whole[:40])
    assert store.summaries()[0]["step"] == 2
    told, seen = store.history("run", (0, 0), 100)
    assert (told["num_steps"], told["num_unread"]) == (2, 0)
    with path.open("a") as file:
        file.write(whole[40:])
    assert store.summaries()[0]["step"] == 3
    told, _ = store.history("run", seen, 100)
    assert (told["is_whole"], told["series"]["step"]) == (False, [3.0])


def test_a_feed_that_a_resumed_run_has_cut_is_read_again(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", 20, ends=None)
    store = RunStore(tmp_path)
    store.summaries()
    _, seen = store.history("run", (0, 0), 100)
    path.write_text("".join(feed(10, total=20, ends=None)))
    assert store.summaries()[0]["step"] == 10
    told, _ = store.history("run", seen, 100)
    assert (told["is_whole"], told["num_steps"]) == (True, 10)


def test_many_steps_become_means_and_extremes_of_groups() -> None:
    history = History()
    for number in range(1, 2001):
        history.add(line(step(number, loss=float(number)), number, number).encode())
    series = history.series(0, 2000, 200)
    assert {name: len(values) for name, values in series.items()} == dict.fromkeys(series, 200)
    assert series["step"][:2] == [10.0, 20.0]
    assert series["loss"][:2] == [5.5, 15.5]
    assert (series["loss:min"][1], series["loss:max"][1]) == (11.0, 20.0)
    assert series["wait/weights"][0] == pytest.approx(0.12)


def test_numbers_of_an_objective_are_columns_from_the_step_where_they_begin() -> None:
    history = History()
    history.add(line(step(1), 1).encode())
    numbers = {"rewards/margins": 0.5, "rewards/accuracies": 1.0, "nll_loss": 2.0}
    history.add(line(step(2, numbers=numbers), 2).encode())
    history.add(b'{"current_steps": 3, "loss": 1.0, "percentage": 30.0}\n')  # of LLaMA-Factory
    series = history.series(0, 3, 100)
    assert {name: series[name] for name in numbers} == {name: [None, value, None] for name, value in numbers.items()}
    assert not {"percentage", "num_tokens", "epoch"} & series.keys()


def test_a_section_has_each_of_its_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 1000)
    store = RunStore(tmp_path)
    store.summaries()
    assert len(store.history("run", (0, 0), 100)[0]["series"]["step"]) == 100
    series = store.section("run", 401, 500, 100)["series"]
    assert series["step"] == [float(number) for number in range(401, 501)]
    assert store.section("run", 9000, 9999, 100)["series"]["step"] == [1.0]


def test_a_section_of_a_run_without_steps_is_empty(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/events.jsonl").write_text('{"event": "start", "num_steps": 8}\n')
    store = RunStore(tmp_path)
    store.summaries()
    assert not any(store.section("run", 0, 9, 100)["series"].values())


def test_lines_that_are_no_events_and_numbers_that_are_none_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    strange = [
        "no json",
        "[1, 2]",
        '{"event": "step", "step": "three"}',
        '{"event": "news", "step": 1, "text": NaN}',
        '{"event": "evaluation", "step": 1, "numbers": {"loss": NaN}}',
        '{"event": ["step"], "step": 1}',
        json.dumps({"event": "step", "step": 1, "loss": "nan", "grad_norm": 10**400, "wait_seconds": {"x": [1]}}),
        '{"event": "step", "step": 2, "loss": 1.5, "wait_seconds": 3}',
        "x" * 3_000_000,
    ]
    path.write_text("\n".join(strange) + "\n")
    store = RunStore(tmp_path)
    assert store.summaries()[0]["step"] in (0, 2)
    told, _ = store.history("run", (0, 0), 10)
    assert "NaN" not in json.dumps(told)
    assert told["series"]["loss"] == [None, 1.5]
    assert told["series"]["grad_norm"] == [None, None]
    assert told["num_unread"] >= 5


STRANGE = (
    *("1" * 400, "1e999", "-1e999", "1e308", "9" * 18, "NaN"),
    *('"text"', "null", "true", "[1]", '{"a": 1e999}'),
)
NUMBERS_OF = {
    "start": ("num_steps", "planned_gpu_bytes", "predicted_step_seconds", "startup_seconds", "time", "step"),
    "step": ("loss", "step_seconds", "wait_seconds", "time", "step"),
    "evaluation": ("numbers", "num_samples", "step"),
    "end": ("num_steps", "reason"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NUMBERS_OF.items() for name in names])
def test_a_bad_number_costs_its_run_that_number_and_nothing_else(tmp_path: Path, kind: str, name: str) -> None:
    """Whatever stands in the place of a number, the page gets JSON that a browser reads, of this run and of others."""
    write_run(tmp_path / "good", 6)
    ends = "last step" if kind == "end" else None
    for number, value in enumerate(STRANGE):
        lines = [json.loads(text) for text in (line(evaluated(5), 5, 2.5), *feed(6, total=9, ends=ends))]
        changed = next(each for each in lines if each["event"] == kind and (kind != "step" or each["step"] == 4))
        changed[name] = "HERE"
        (tmp_path / str(number)).mkdir()
        text = "".join(json.dumps(each) + "\n" for each in lines).replace('"HERE"', value)
        (tmp_path / str(number) / "events.jsonl").write_text(text)
    store = RunStore(tmp_path)
    rows = {row["id"]: row for row in store.summaries()}
    json.dumps(rows, allow_nan=False)
    assert (rows["good"]["step"], rows["good"]["state"]) == (6, "done")
    for number in range(len(STRANGE)):
        assert rows[str(number)]["step"] == 6
        told, _ = store.history(str(number), (0, 0), 10)
        json.dumps(told, allow_nan=False)
        assert sum(loss is not None for loss in told["series"]["loss"]) >= 5


def test_a_run_of_another_version_or_program_shows_what_can_be_read(tmp_path: Path) -> None:
    older, other = tmp_path / "older", tmp_path / "other"
    older.mkdir()
    (older / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5, "wait_seconds": {"home": 0.1}}\n')
    other.mkdir()
    shown = {"current_steps": 5, "total_steps": 10, "lr": 1e-4}
    lines = [{**shown, "loss": 2.5}, {**shown, "eval_loss": 2.25}]
    (other / "trainer_log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    store = RunStore(tmp_path)
    rows = {row["id"]: row for row in store.summaries()}
    assert (rows["older"]["step"], rows["older"]["loss"]) == (1, 3.5)
    assert (rows["other"]["step"], rows["other"]["num_steps"], rows["other"]["eval_loss"]) == (5, 10, 2.25)
    told, _ = store.history("older", (0, 0), 10)
    assert told["series"]["wait/home"] == pytest.approx([0.1])


def test_time_left_is_by_the_clock_with_its_spread() -> None:
    paces = [0.5] * 32 + [1.5] * 8 + [0.5] * 24  # an evaluation, say
    steps = [{"step": number, "time": BEGUN + sum(paces[:number])} for number in range(1, 65)]
    assert seconds_left(steps, 164) == [50.0, 50.0, 150.0]
    assert seconds_left(steps[:1], 164) is None
    assert seconds_left([{"step": 1}, {"step": 2}], 164) is None
