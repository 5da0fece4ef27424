"""Actions: their text form both ways, their names and their neighbours."""

import pytest

from mobius.errors import ScheduleError
from mobius.schedule import Action, ActionKind, Schedule, incoming, outgoing

TEXTS_OF_TWO_STAGES = {
    "generate_data -1 0 -1 -1": Action(ActionKind.GENERATE_DATA, 0),
    "forward_first -1 0 1 0": Action(ActionKind.FORWARD_FIRST, 0, 0),
    "forward_last 0 1 -1 3": Action(ActionKind.FORWARD_LAST, 1, 3),
    "backward_last -1 1 0 3": Action(ActionKind.BACKWARD_LAST, 1, 3),
    "backward_first 1 0 -1 0": Action(ActionKind.BACKWARD_FIRST, 0, 0),
    "load -1 1 -1 -1": Action(ActionKind.LOAD, 1),
    "offload -1 1 -1 -1": Action(ActionKind.OFFLOAD, 1),
}


@pytest.mark.parametrize(("text", "action"), TEXTS_OF_TWO_STAGES.items())
def test_the_text_form_is_that_of_the_manual_both_ways(text: str, action: Action) -> None:
    assert action.to_text(2) == text
    assert Action.parse(text, 2) == action


def test_middle_stages_name_both_neighbours() -> None:
    assert Action(ActionKind.FORWARD_MIDDLE, 3, 1).to_text(8) == "forward_middle 2 3 4 1"
    assert Action(ActionKind.BACKWARD_MIDDLE, 3, 1).to_text(8) == "backward_middle 4 3 2 1"


def test_a_single_stage_is_last_and_has_no_neighbours() -> None:
    assert Action.parse("forward_last -1 0 -1 2", 1) == Action(ActionKind.FORWARD_LAST, 0, 2)
    assert Action.parse("backward_last -1 0 -1 2", 1) == Action(ActionKind.BACKWARD_LAST, 0, 2)
    with pytest.raises(ScheduleError, match="stage 0 of 1 takes forward_last"):
        Action.parse("forward_first -1 0 -1 2", 1)


def test_every_action_of_every_schedule_survives_the_round_trip(all_schedules: list[Schedule]) -> None:
    for schedule in all_schedules:
        if schedule.num_microbatches == 3:
            for action in {action for actions in schedule.actions for action in actions}:
                assert Action.parse(action.to_text(schedule.num_stages), schedule.num_stages) == action


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("load -1 3 -1", "has 4 fields"),
        ("", "has 0 fields"),
        ("forward_frist -1 0 1 0", "unknown word 'forward_frist'; did you mean forward_first"),
        ("xyz -1 0 1 0", "known are generate_data, forward_first"),
        ("forward_first -1 zero 1 0", "'zero' where a number"),
        ("forward_first -2 0 1 0", "'-2' where a number"),
        ("forward_first -1 0 1 1_0", "'1_0' where a number"),
        ("load -1 -1 -1 -1", "-1 for my_stage"),
        ("load -1 4 -1 -1", "there is no stage 4, the stages are 0 to 3"),
        ("load -1 3 -1 0", "a whole stage, not a microbatch"),
        ("forward_first -1 0 1 -1", "needs a microbatch"),
        ("forward_middle -1 0 1 0", "stage 0 of 4 takes forward_first"),
        ("backward_first 3 2 -1 0", "stage 2 of 4 takes backward_middle"),
        ("forward_first -1 0 2 0", "wrong neighbours: 'forward_first -1 0 1 0'"),
        ("backward_middle 1 2 3 0", "wrong neighbours: 'backward_middle 3 2 1 0'"),
        ("load 0 1 -1 -1", "wrong neighbours"),
    ],
)
def test_invalid_text_is_refused_by_the_field_that_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint):
        Action.parse(text, 4)


def test_activations_go_up_and_gradients_go_down() -> None:
    forward, backward = Action(ActionKind.FORWARD_MIDDLE, 1, 0), Action(ActionKind.BACKWARD_MIDDLE, 1, 0)
    assert (incoming(forward, 3), outgoing(forward, 3)) == (0, 2)
    assert (incoming(backward, 3), outgoing(backward, 3)) == (2, 0)
    assert incoming(Action(ActionKind.FORWARD_FIRST, 0, 0), 3) is None
    assert outgoing(Action(ActionKind.FORWARD_LAST, 2, 0), 3) is None
    assert incoming(Action(ActionKind.BACKWARD_LAST, 2, 0), 3) is None
    assert outgoing(Action(ActionKind.BACKWARD_FIRST, 0, 0), 3) is None
    for kind in (ActionKind.LOAD, ActionKind.OFFLOAD, ActionKind.GENERATE_DATA):
        assert incoming(Action(kind, 1), 3) is outgoing(Action(kind, 1), 3) is None


def test_names_are_short() -> None:
    names = [str(action) for action in TEXTS_OF_TWO_STAGES.values()]
    assert names == ["D0", "F0.0", "F1.3", "B1.3", "B0.0", "L1", "O1"]
