"""Actions: their text form, their names and their neighbours."""

import pytest

from mobius.schedule.action import Action, ActionKind, describe_misfit, source_stage, target_stage

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
def test_the_text_form_is_that_of_the_manual(text: str, action: Action) -> None:
    assert action.to_text(2) == text


def test_middle_stages_name_both_neighbours() -> None:
    assert Action(ActionKind.FORWARD_MIDDLE, 3, 1).to_text(8) == "forward_middle 2 3 4 1"
    assert Action(ActionKind.BACKWARD_MIDDLE, 3, 1).to_text(8) == "backward_middle 4 3 2 1"


def test_a_single_stage_is_last_and_has_no_neighbours() -> None:
    assert Action(ActionKind.FORWARD_LAST, 0, 2).to_text(1) == "forward_last -1 0 -1 2"
    assert Action(ActionKind.BACKWARD_LAST, 0, 2).to_text(1) == "backward_last -1 0 -1 2"
    assert describe_misfit(Action(ActionKind.FORWARD_FIRST, 0, 2), 1) == "stage 0 of 1 takes forward_last"


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        (Action(ActionKind.LOAD, 4), "there is no stage 4, the stages are 0 to 3"),
        (Action(ActionKind.LOAD, 3, 0), "load concerns a stage, not a microbatch"),
        (Action(ActionKind.FORWARD_FIRST, 0), "forward_first needs a microbatch"),
        (Action(ActionKind.FORWARD_MIDDLE, 0, 0), "stage 0 of 4 takes forward_first"),
        (Action(ActionKind.BACKWARD_FIRST, 2, 0), "stage 2 of 4 takes backward_middle"),
        (Action(ActionKind.BACKWARD_MIDDLE, 2, 0), None),
    ],
)
def test_an_action_that_cannot_be_is_told_why(action: Action, complaint: str | None) -> None:
    assert describe_misfit(action, 4) == complaint


def test_activations_go_up_and_gradients_go_down() -> None:
    forward, backward = Action(ActionKind.FORWARD_MIDDLE, 1, 0), Action(ActionKind.BACKWARD_MIDDLE, 1, 0)
    assert (source_stage(forward, 3), target_stage(forward, 3)) == (0, 2)
    assert (source_stage(backward, 3), target_stage(backward, 3)) == (2, 0)
    assert source_stage(Action(ActionKind.FORWARD_FIRST, 0, 0), 3) is None
    assert target_stage(Action(ActionKind.FORWARD_LAST, 2, 0), 3) is None
    assert source_stage(Action(ActionKind.BACKWARD_LAST, 2, 0), 3) is None
    assert target_stage(Action(ActionKind.BACKWARD_FIRST, 0, 0), 3) is None
    for kind in (ActionKind.LOAD, ActionKind.OFFLOAD, ActionKind.GENERATE_DATA):
        assert source_stage(Action(kind, 1), 3) is target_stage(Action(kind, 1), 3) is None


def test_names_are_short() -> None:
    names = [str(action) for action in TEXTS_OF_TWO_STAGES.values()]
    assert names == ["D0", "F0.0", "F1.3", "B1.3", "B0.0", "L1", "O1"]
