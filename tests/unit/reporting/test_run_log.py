"""What a run tells of itself is read by transformers, by boards that know LLaMA-Factory, and by trackers."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import TrainerState as TheirState

from mobius.config.config import Config, OptimConfig, OutputConfig, PipelineConfig, SavingConfig
from mobius.errors import CheckpointError
from mobius.reporting.events import CheckpointSaved, Evaluated, StepMetrics
from mobius.reporting.run_log import RunLog, WarningRecorder
from mobius.reporting.trackers import Trackers
from mobius.reporting.trainer_state import TrainerState

STEP = StepMetrics(
    step=1,
    epoch=0.25,
    loss=4.0,
    grad_norm=1.5,
    learning_rate=1e-5,
    step_seconds=10.0,
    tokens_per_second=100.0,
    num_tokens=1000,
    num_targets=600,
    num_samples=64,
    padding=0.25,
    peak_gpu_memory_gib=None,
    reserved_gpu_memory_gib=None,
    peak_host_memory_gib=1.0,
    wait_seconds={"weights": 0.5},
    skipped_steps=0,
    loss_scale=None,
)


USUAL = {"perplexity": 33.1, "token_accuracy": 0.5, "runtime": 2.0, "tokens_per_second": 10.0}
EVALUATION = {"eval_loss": 3.5, **{f"eval_{name}": value for name, value in USUAL.items()}}


def evaluated(log: RunLog, numbers: Mapping[str, float]) -> Evaluated:
    return Evaluated(step=log.state.global_step, numbers={**USUAL, **numbers}, num_samples=3)


class Kept:
    """A tracker that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, Mapping[str, float]]] = []

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.lines.append((step, numbers))

    def close(self) -> None:
        pass


def config(**output: int) -> Config:
    return Config(
        output=replace(OutputConfig(), **output),
        optim=OptimConfig(num_iterations=4),
        pipeline=PipelineConfig(batch_size=64),
        saving=SavingConfig(save_steps=0.5),
    )


def log_of_four_steps(folder: Path, kept: Kept | None = None, **output: int) -> RunLog:
    trackers = Trackers({} if kept is None else {"kept": lambda: kept})
    log = RunLog(folder, TrainerState.at_start(config(**output)), trackers, ideal_step_seconds=4.0)
    for step, seconds in enumerate((40.0, 10.0, 12.0, 8.0), start=1):
        loss = math.nan if step == 2 else 5.0 - step
        log.emit(replace(STEP, step=step, epoch=step / 4, loss=loss, step_seconds=seconds))
        if step == 2:
            log.emit(evaluated(log, {"loss": 3.5, "perplexity": 33.1}))
    log.finish()
    log.close()
    return log


def read(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word}: no JSON"))
    return found


def test_transformers_reads_the_state(tmp_path: Path) -> None:
    log_of_four_steps(tmp_path)

    state = TheirState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert (state.global_step, state.max_steps, state.epoch, state.num_train_epochs) == (4, 4, 1.0, 1)
    assert (state.num_input_tokens_seen, state.train_batch_size, state.logging_steps) == (4000, 64, 1)
    assert (state.eval_steps, state.save_steps) == (500, 2), "half of four steps"
    assert [entry["step"] for entry in state.log_history] == [1, 2, 2, 3, 4, 4]
    first, _, evaluation, *_, end = state.log_history
    assert {"loss": 4.0, "grad_norm": 1.5, "learning_rate": 1e-5, "epoch": 0.25}.items() <= first.items()
    assert (first["mfu"], first["wait_seconds"], first["step_seconds"]) == (0.1, {"weights": 0.5}, 40.0)
    assert evaluation == {**EVALUATION, "epoch": 0.5, "step": 2}
    assert end["train_runtime"] == 70.0


def test_a_line_per_shown_step_has_the_names_of_llama_factory(tmp_path: Path) -> None:
    log_of_four_steps(tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["current_steps"] for line in lines] == [1, 2, 2, 3, 4]
    assert lines[3] == {
        "current_steps": 3,
        "total_steps": 4,
        "loss": 2.0,
        "lr": 1e-5,
        "epoch": 0.75,
        "percentage": 75.0,
        "elapsed_time": "0:01:02",
        "remaining_time": "0:00:12",  # the median of 40, 10 and 12, for one step
        "throughput": 48.39,  # 3000 tokens in 62 s
        "total_tokens": 3000,
    }
    assert lines[2]["eval_loss"] == 3.5
    assert "loss" not in lines[2]
    assert lines[1]["loss"] == "nan"


def test_results_have_the_last_numbers_of_training_and_evaluation(tmp_path: Path) -> None:
    log_of_four_steps(tmp_path)

    train, evaluation = read(tmp_path / "train_results.json"), read(tmp_path / "eval_results.json")
    assert train["train_loss"] == pytest.approx((4 + 2 + 1) / 3), "of the steps that have one"
    assert train["train_runtime"] == 70.0
    assert train["train_samples_per_second"] == pytest.approx(4 * 64 / 70)
    assert train["train_steps_per_second"] == pytest.approx(4 / 70)
    assert (train["epoch"], train["num_input_tokens_seen"]) == (1.0, 4000)
    assert evaluation == {**EVALUATION, "epoch": 0.5}
    assert not [name for name in train if name.endswith("_total")], "of a run that was resumed"
    assert read(tmp_path / "all_results.json") == {**evaluation, **train}


def test_steps_between_logging_steps_are_in_the_metrics_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mobius")
    kept = Kept()
    log_of_four_steps(tmp_path, kept, logging_steps=3)

    shown = [text for text in caplog.messages if text.startswith("step ")]
    assert [text.split("  ")[0] for text in shown] == ["step 1/4", "step 3/4", "step 4/4"]
    assert shown[1].endswith(" 12s left")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    assert [(step, sorted(numbers)[0].split("/")[0]) for step, numbers in kept.lines] == [
        *((1, "train"), (2, "eval"), (3, "train"), (4, "train"))
    ]
    assert kept.lines[0][1]["train/wait_seconds/weights"] == 0.5
    assert kept.lines[1][1] == {"eval/loss": 3.5, **{f"eval/{name}": value for name, value in USUAL.items()}}


def test_a_line_tells_the_mean_loss_of_the_steps_since_the_line_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mobius")
    kept = Kept()
    log = RunLog(tmp_path, TrainerState.at_start(config(logging_steps=3)), Trackers({"kept": lambda: kept}))
    for step, loss in enumerate((9.0, 4.0, 2.0, 7.0), start=1):
        log.emit(replace(STEP, step=step, loss=loss, aux_loss=loss / 10, learning_rate=step * 1e-5))
    log.close()

    shown = {1: 9.0, 3: 3.0, 4: 7.0}
    assert [float(text.split("  loss ")[1].split()[0]) for text in caplog.messages] == list(shown.values())
    for prefix, entries in (("", [*log.state.entries()]), ("train/", [numbers for _, numbers in kept.lines])):
        assert [entry[f"{prefix}loss"] for entry in entries] == list(shown.values())
        assert [entry[f"{prefix}aux_loss"] for entry in entries] == pytest.approx([0.9, 0.3, 0.7])
        assert [entry[f"{prefix}learning_rate"] for entry in entries] == pytest.approx([1e-5, 3e-5, 4e-5])
    assert {line["current_steps"]: line["loss"] for line in lines_of(tmp_path / "trainer_log.jsonl")} == shown
    assert [line["loss"] for line in lines_of(tmp_path / "metrics.jsonl")] == [9.0, 4.0, 2.0, 7.0]
    assert log.last_loss == 7.0


def test_the_mean_goes_over_a_resume(tmp_path: Path) -> None:
    def losses_until(last: int, log: RunLog) -> None:
        for step in range(log.state.global_step + 1, last + 1):
            log.emit(replace(STEP, step=step, loss=float(step * step)))
        log.close()

    def shown(folder: Path) -> list[tuple[int, float]]:
        return [(line["current_steps"], line["loss"]) for line in lines_of(folder / "trainer_log.jsonl")]

    start = TrainerState.at_start(replace(config(logging_steps=4), optim=OptimConfig(num_iterations=9)))
    for stop in (1, 2, 4, 7):
        whole, parts = tmp_path / f"whole-{stop}", tmp_path / f"parts-{stop}"
        whole.mkdir()
        parts.mkdir()
        losses_until(9, RunLog(whole, start.snapshot(), Trackers({})))
        first = RunLog(parts, start.snapshot(), Trackers({}))
        losses_until(stop, first)
        losses_until(9, RunLog(parts, TrainerState.from_json(first.state.to_json()), Trackers({})))
        assert shown(parts) == shown(whole) == [(1, 1.0), (4, 29 / 3), (8, 43.5), (9, 81.0)]


def test_an_evaluation_before_the_first_step_has_no_time_left(tmp_path: Path) -> None:
    log = RunLog(tmp_path, TrainerState.at_start(config()), Trackers({}))
    log.emit(evaluated(log, {"loss": 8.0}))
    log.finish()
    log.close()

    (line,) = [json.loads(text) for text in (tmp_path / "trainer_log.jsonl").read_text().splitlines()]
    assert (line["eval_loss"], line["percentage"], line["remaining_time"]) == (8.0, 0.0, None)
    assert not (tmp_path / "train_results.json").exists()


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = log_of_four_steps(tmp_path / "absent")

    assert log.state.global_step == 4
    assert any("cannot write all results" in text for text in caplog.messages)


def steps(log: RunLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        seconds, loss = 10.0 * step, math.nan if step == 2 else 5.0 - step
        log.emit(replace(STEP, step=step, epoch=step / 4, loss=loss, step_seconds=seconds))
        if step == 2:
            log.emit(evaluated(log, {"loss": 3.5}))


def text_of_steps(folder: Path, last: int) -> str:
    """The state of a run that was made up to step `last`, where its checkpoint was saved; it went on to step 3."""
    folder.mkdir(exist_ok=True)
    log = RunLog(folder, TrainerState.at_start(config()), Trackers({}))
    steps(log, 1, last)
    text = log.state.to_json()
    steps(log, last + 1, 3)
    log.close()
    return text


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_leaves_what_the_uninterrupted_one_leaves(tmp_path: Path) -> None:
    whole = RunLog(tmp_path, TrainerState.at_start(config()), Trackers({}))
    steps(whole, 1, 4)
    whole.close()
    folder = tmp_path / "resumed"
    state = TrainerState.from_json(text_of_steps(folder, 2))
    with (folder / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 4, "epo')

    resumed = RunLog(folder, state.continued(config()), Trackers({}))
    steps(resumed, 3, 4)
    resumed.close()

    assert (folder / "metrics.jsonl").read_text() == (tmp_path / "metrics.jsonl").read_text()
    own, theirs = lines_of(folder / "trainer_log.jsonl"), lines_of(tmp_path / "trainer_log.jsonl")
    for line, other in zip(own, theirs, strict=True):
        assert {**line, "remaining_time": None} == {**other, "remaining_time": None}
    assert resumed.state.to_json() == whole.state.to_json()


def test_an_evaluation_that_the_checkpoint_does_not_know_is_made_again(tmp_path: Path) -> None:
    text = text_of_steps(tmp_path, 2)
    state = TrainerState.from_json(text)
    state.log_history = state.log_history[:-1]  # saved between step 2 and its evaluation

    log = RunLog(tmp_path, state, Trackers({}))
    assert [line.get("eval_loss") for line in lines_of(tmp_path / "trainer_log.jsonl")] == [None, None]
    log.emit(evaluated(log, {"loss": 3.5}))
    log.close()

    shown = lines_of(tmp_path / "trainer_log.jsonl")[-1]
    assert (shown["eval_loss"], shown["elapsed_time"], shown["throughput"]) == (3.5, "0:00:30", 66.67)
    assert shown["remaining_time"] is None, "this process has made no step"


def test_an_evaluation_behind_the_last_step_is_not_piled_up_by_each_resume(tmp_path: Path) -> None:
    text = text_of_steps(tmp_path, 2)
    for _ in range(3):
        log = RunLog(tmp_path, TrainerState.from_json(text), Trackers({}))
        log.emit(evaluated(log, {"loss": 3.5}))  # of --do_eval, behind the last save
        log.close()

    shown = [line["current_steps"] for line in lines_of(tmp_path / "trainer_log.jsonl") if "eval_loss" in line]
    assert shown == [entry["step"] for entry in log.state.entries() if "eval_loss" in entry] == [2, 2]


def test_results_of_a_resumed_run_are_those_of_its_process_with_totals_beside(tmp_path: Path) -> None:
    state = TrainerState.from_json(text_of_steps(tmp_path, 2))
    log = RunLog(tmp_path, state, Trackers({}))
    steps(log, 3, 4)
    log.finish()
    log.close()

    train = read(tmp_path / "train_results.json")
    assert (train["train_loss"], train["train_runtime"]) == (1.5, 70.0)
    assert train["train_steps_per_second"] == pytest.approx(2 / 70)
    assert (train["train_resumed_from_step"], train["train_steps_total"]) == (2, 4)
    assert (train["train_runtime_total"], train["num_input_tokens_seen"]) == (100.0, 4000)
    assert train["train_loss_total"] == pytest.approx((4 + 2 + 1) / 3)
    assert read(tmp_path / "eval_results.json") == {**EVALUATION, "epoch": 0.5}, "it was before the checkpoint"


def test_a_run_that_goes_on_in_another_folder_tells_no_totals_that_it_does_not_know(tmp_path: Path) -> None:
    state = TrainerState.from_json(text_of_steps(tmp_path / "first", 2))
    (tmp_path / "second").mkdir()
    log = RunLog(tmp_path / "second", state, Trackers({}))
    steps(log, 3, 4)
    log.finish()
    log.close()

    train = read(tmp_path / "second" / "train_results.json")
    assert "train_runtime_total" not in train
    assert "train_loss_total" not in train
    assert train["train_steps_total"] == 4
    shown = lines_of(tmp_path / "second" / "trainer_log.jsonl")[-1]
    assert (shown["elapsed_time"], shown["throughput"], shown["total_tokens"]) == ("0:01:10", 28.57, 4000)


def test_a_log_that_cannot_be_cut_is_told_before_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = TrainerState.from_json(text_of_steps(tmp_path, 2))
    before = (tmp_path / "metrics.jsonl").read_text()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(CheckpointError, match=r"cannot cut .*metrics\.jsonl to the 2 steps .*No space left"):
        RunLog(tmp_path, state, Trackers({}))

    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_the_state_goes_through_json_with_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    text = text_of_steps(tmp_path, 3)
    state = TrainerState.from_json(text)

    assert isinstance([*state.entries()][1]["loss"], float), "a curve is drawn of it"
    assert math.isnan([*state.entries()][1]["loss"])
    assert state.to_json() == text


def test_a_snapshot_does_not_change(tmp_path: Path) -> None:
    state = TrainerState.from_json(text_of_steps(tmp_path, 3))
    text = state.to_json()
    snapshot = state.snapshot()
    state.add({"step": 3})
    state.global_step = 9

    assert snapshot.to_json() == text
    assert [*json.loads(text)["log_history"], {"step": 3}] == json.loads(state.to_json())["log_history"]


def test_the_best_evaluation_is_in_the_state_that_transformers_reads(tmp_path: Path) -> None:
    log = RunLog(tmp_path, TrainerState.at_start(config()), Trackers({}))
    steps(log, 1, 4)
    assert log.state.best_metric is None
    log.state.set_best(3.5, 2, tmp_path / "checkpoint-2")
    log.emit(evaluated(log, {"loss": 9.0}))
    log.write_state(tmp_path)

    state = TheirState.load_from_json(str(tmp_path / "trainer_state.json"))
    best = (state.best_metric, state.best_global_step, state.best_model_checkpoint)
    assert best == (3.5, 2, str(tmp_path / "checkpoint-2"))
    log.state.set_best(3.0, 4)
    assert TrainerState.from_json(log.state.to_json()).best_model_checkpoint is None


def test_a_state_that_goes_on_has_the_length_and_the_logging_of_the_new_run(tmp_path: Path) -> None:
    state = TrainerState.from_json(text_of_steps(tmp_path, 2))

    later = state.continued(
        Config(
            output=OutputConfig(logging_steps=3),
            optim=OptimConfig(num_iterations=9),
            pipeline=PipelineConfig(batch_size=32),
        )
    )

    assert (later.max_steps, later.logging_steps, later.train_batch_size, later.num_train_epochs) == (9, 3, 32, 0)
    assert (later.global_step, later.epoch, later.log_history) == (2, 0.5, state.log_history)
    assert state.max_steps == 4
    assert later.log_history is not state.log_history


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"epoch": None}, "it has None for `epoch`"),
        ({"global_step": "2"}, "it has '2' for `global_step`"),
        ({"global_step": True}, "it has True for `global_step`"),
        ({"global_step": 1}, "entry 1 of log_history"),
        ({"max_steps": 4.5}, "it has 4.5 for `max_steps`"),
        ({"best_global_step": "one"}, "it has 'one' for `best_global_step`"),
        ({"best_model_checkpoint": 1}, "it has 1 for `best_model_checkpoint`"),
        ({"log_history": {}}, "it has {} for `log_history`"),
        ({"log_history": [{"loss": 1.0}]}, "entry 0 of log_history"),
        ({"log_history": [1]}, "entry 0 of log_history"),
        ({"log_history": [{"step": 1, "loss": "silu"}]}, "entry 0 of log_history has 'silu' for loss"),
        ({"total_flos": 0.0}, "it has total_flos"),
    ],
)
def test_a_foreign_state_is_refused_with_the_field(tmp_path: Path, changes: dict[str, object], problem: str) -> None:
    fields = {**json.loads(text_of_steps(tmp_path, 2)), **changes}

    with pytest.raises(CheckpointError, match="from another checkpoint") as raised:
        TrainerState.from_json(json.dumps(fields), path=tmp_path / "state.json")

    assert problem in str(raised.value)
    assert str(tmp_path / "state.json") in str(raised.value)


def test_a_state_that_lacks_a_field_or_is_no_json_is_refused(tmp_path: Path) -> None:
    fields = json.loads(text_of_steps(tmp_path, 2))
    del fields["epoch"]

    for text, problem in ((json.dumps(fields), "it lacks epoch"), ('{"epo', "is no JSON"), ("[]", r"it is \[\]")):
        with pytest.raises(CheckpointError, match=problem):
            TrainerState.from_json(text)


def test_the_feed_has_every_event_in_order_with_warnings_of_before(tmp_path: Path) -> None:
    with WarningRecorder() as warnings:
        logging.getLogger("mobius.data").warning("3 samples are cut")
        log = RunLog(tmp_path, TrainerState.at_start(config(logging_steps=3)), Trackers({}))
        warnings.connect(log)
        log.emit(STEP)
        logging.getLogger("mobius.engine").warning("step 2 is skipped")
        log.emit(replace(STEP, step=2, grad_norm=math.nan))
        log.emit(CheckpointSaved(step=2, path="out/checkpoint-2", num_bytes=2**20, seconds=0.5, waited_seconds=0.0))
        log.emit(evaluated(log, {"loss": 3.5}))
        log.finish()
        log.close()
        logging.getLogger("mobius").warning("after the end")

    feed = lines_of(tmp_path / "events.jsonl")
    assert [(line["event"], line["step"]) for line in feed] == [
        *(("warning", 0), ("step", 1), ("warning", 1), ("step", 2), ("checkpoint", 2), ("evaluation", 2), ("end", 2))
    ]
    assert feed[0]["text"] == "3 samples are cut"
    steps = [{k: v for k, v in line.items() if k not in ("event", "time")} for line in feed if line["event"] == "step"]
    assert steps == lines_of(tmp_path / "metrics.jsonl"), "the feed has what the metrics have, under the same names"
    assert feed[5]["numbers"] == {**USUAL, "loss": 3.5}
    assert {"reason": "last step", "num_steps": 2, "step_seconds": 20.0}.items() <= feed[6].items()


def test_a_resumed_run_cuts_the_feed_to_its_checkpoint(tmp_path: Path) -> None:
    state = TrainerState.from_json(text_of_steps(tmp_path, 2))
    log = RunLog(tmp_path, state, Trackers({}))
    steps(log, 3, 4)
    log.close()

    feed = [(line["event"], line["step"]) for line in lines_of(tmp_path / "events.jsonl")]
    assert feed == [("step", 1), ("step", 2), ("evaluation", 2), ("step", 3), ("step", 4), ("end", 4)]
    assert lines_of(tmp_path / "events.jsonl")[-1]["reason"] == "error", "the results were not written"


def test_a_feed_that_cannot_be_written_warns_and_does_not_wait_for_itself(tmp_path: Path) -> None:
    with WarningRecorder() as warnings:
        log = RunLog(tmp_path / "absent", TrainerState.at_start(config()), Trackers({}))
        warnings.connect(log)
        log.emit(STEP)
        log.close()
