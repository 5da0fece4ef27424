"""An activity tells where a rank is, in the words of the schedule, and when anything was last begun or ended."""

from mobius.process.activity import Activity, format_duration
from mobius.schedule.action import Action, ActionKind


class Clock:
    """Seconds that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_action_is_told_with_stage_microbatch_wait_and_times() -> None:
    activity = Activity(clock=(clock := Clock()))
    activity.start_step(12)
    activity.start_action(Action(ActionKind.FORWARD_MIDDLE, 4, 1))
    clock.now += 5
    with activity.waiting("neighbours", rank=0, stage=3):
        clock.now += 1800
        assert activity.describe() == [
            "in step 12, at F4.1 (stage 4, microbatch 1) for 30 min 5 s",
            "waits for neighbours (output of stage 3), from rank 0 for 30 min 0 s",
        ]
    assert activity.describe() == ["in step 12, at F4.1 (stage 4, microbatch 1) for 30 min 5 s"]


def test_a_load_has_no_microbatch_and_a_text_no_stage() -> None:
    activity = Activity(clock=Clock())
    assert activity.describe() == ["before the first step, at the start for 0.0 s"]
    activity.start_action(Action(ActionKind.LOAD, 4))
    assert activity.describe() == ["before the first step, at L4 (stage 4) for 0.0 s"]


def test_threads_beside_the_main_one_are_told_while_they_work() -> None:
    activity = Activity(clock=(clock := Clock()))
    activity.start_task("optimizer", "stage 0")
    activity.start_task("writer", "stage 0 of checkpoint-20")
    clock.now += 2
    assert activity.describe()[1:] == [
        "optimizer: at stage 0 for 2.0 s",
        "writer: at stage 0 of checkpoint-20 for 2.0 s",
    ]
    activity.end_task("optimizer")
    assert activity.describe()[1:] == ["writer: at stage 0 of checkpoint-20 for 2.0 s"]


def test_a_wait_within_a_wait_gives_the_outer_one_back() -> None:
    activity = Activity(clock=Clock())
    with activity.waiting("weights"):
        with activity.waiting("optimizer"):
            assert "optimizer" in activity.describe()[1]
        assert "weights" in activity.describe()[1]


def test_everything_that_begins_or_ends_is_progress_and_asking_is_none() -> None:
    activity = Activity(clock=(clock := Clock()))

    def moves() -> bool:
        activity.describe()
        before = activity.last_progress
        clock.now += 1
        assert activity.last_progress == before
        return activity.last_progress != before

    assert not moves()
    for change in (
        lambda: activity.start_step(1),
        lambda: activity.start_action("the evaluation"),
        activity.progress,
        lambda: activity.start_task("optimizer", "stage 1"),
        lambda: activity.end_task("optimizer"),
    ):
        clock.now += 1
        change()
        assert activity.last_progress == clock.now
    clock.now += 1
    with activity.waiting("neighbours"):
        assert activity.last_progress == clock.now
        clock.now += 1
    assert activity.last_progress == clock.now


def test_durations_read_alike_at_every_length() -> None:
    texts = [format_duration(seconds) for seconds in (0.04, 59.94, 60, 119.6, 3599, 7500)]
    assert texts == ["0.0 s", "59.9 s", "1 min 0 s", "2 min 0 s", "59 min 59 s", "2 h 5 min"]
