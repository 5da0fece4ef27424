"""Actions: the entries of a rank's list in a schedule, and their text form of five fields.

{action} {source_stage} {my_stage} {target_stage} {microbatch}      -1 if a field does not apply

forward_first -1 0 1 0            stage 0 computes microbatch 0 and sends its activation to stage 1
backward_first 1 0 -1 0           stage 0 receives the activation gradient of microbatch 0 from stage 1
evaluate_last 2 3 -1 0            stage 3 of 4 computes the loss of microbatch 0, without backward
head 3 4 3 0                      one rank computes norm, head and loss after the 4 stages, forward and backward
load -1 3 -1 -1                   starts copying the weights of stage 3 to a GPU slot
load_gradient_sums -1 3 -1 -1     starts copying gradients of stage 3, summed over earlier rounds, to the GPU
recompute_kv -1 1 -1 2            stage 1 recomputes keys and values of slice 2, for the backward of its sequence
offload_activations -1 1 -1 0     starts copying the saved activations of microbatch 0 in stage 1 to the host
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Direction(StrEnum):
    """Direction of a message; it is the same for the action that sends the message and the action that receives it."""

    FORWARD = "forward"
    """The message holds activations."""
    BACKWARD = "backward"
    """The message holds gradients of activations."""
    HEAD = "head"
    """The message goes between the last stage and a rank that computes the shared head: activations or gradients."""


class ActionKind(StrEnum):
    """Kinds of actions; a value is the first field of the text form."""

    GENERATE_DATA = "generate_data"
    FORWARD_FIRST = "forward_first"
    FORWARD_MIDDLE = "forward_middle"
    FORWARD_LAST = "forward_last"
    EVALUATE_LAST = "evaluate_last"
    """The last stage's forward with the loss, in an evaluation; in a step, BACKWARD_LAST computes both."""
    BACKWARD_FIRST = "backward_first"
    BACKWARD_MIDDLE = "backward_middle"
    BACKWARD_LAST = "backward_last"
    HEAD = "head"
    """Norm, head and loss, and their backward, if the ranks share them. They count as an additional last stage."""
    RECOMPUTE_KV = "recompute_kv"
    """Recompute a slice's keys and values in each layer of the stage, before the backward of the slice's sequence."""
    LOAD = "load"
    OFFLOAD = "offload"
    LOAD_GRADIENT_SUMS = "load_gradient_sums"
    """Copy a stage's unfinished gradient sums from the host to the GPU, where backwards add to them."""
    OFFLOAD_GRADIENT_SUMS = "offload_gradient_sums"
    """Copy a stage's unfinished gradient sums to the host, until another round of the step adds to them."""
    OFFLOAD_ACTIVATIONS = "offload_activations"
    """Copy layer inputs, which a microbatch's forward saved for backward, to the host."""
    PREFETCH_ACTIVATIONS = "prefetch_activations"
    """Copy the offloaded layer inputs back to the GPU."""

    @cached_property
    def is_forward(self) -> bool:
        return self in _FORWARD_KINDS

    @cached_property
    def is_backward(self) -> bool:
        return self in _BACKWARD_KINDS

    @cached_property
    def is_forward_or_backward(self) -> bool:
        return self.is_forward or self.is_backward

    @cached_property
    def direction(self) -> Direction:
        """Direction of the messages of a forward or backward."""
        return Direction.BACKWARD if self.is_backward else Direction.FORWARD

    @cached_property
    def runs_on_compute_lane(self) -> bool:
        """Whether the action computes with weights: forward, backward, head, or recomputation of keys and values."""
        return self.is_forward_or_backward or self in (ActionKind.RECOMPUTE_KV, ActionKind.HEAD)

    @property
    def has_microbatch(self) -> bool:
        """Whether the action is for one microbatch, not for all microbatches of a stage."""
        return self.runs_on_compute_lane or self in (ActionKind.OFFLOAD_ACTIVATIONS, ActionKind.PREFETCH_ACTIVATIONS)


_POSITIONS = (ActionKind.FORWARD_FIRST, ActionKind.FORWARD_MIDDLE, ActionKind.FORWARD_LAST)
_FORWARD_KINDS = (*_POSITIONS, ActionKind.EVALUATE_LAST)
_BACKWARD_KINDS = (ActionKind.BACKWARD_FIRST, ActionKind.BACKWARD_MIDDLE, ActionKind.BACKWARD_LAST)
_LETTERS = {
    ActionKind.GENERATE_DATA: "D",
    ActionKind.RECOMPUTE_KV: "K",
    ActionKind.HEAD: "H",
    ActionKind.LOAD: "L",
    ActionKind.OFFLOAD: "O",
    ActionKind.LOAD_GRADIENT_SUMS: "LS",
    ActionKind.OFFLOAD_GRADIENT_SUMS: "OS",
    ActionKind.OFFLOAD_ACTIVATIONS: "OA",
    ActionKind.PREFETCH_ACTIVATIONS: "PA",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank; `microbatch` is None if the action is for the whole stage."""

    kind: ActionKind
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        """Short name in the grid, the picture and the trace.

        `F4.1`, `B4.1`, `L4`, `O4`, `LS4` and `OS4` for gradient sums, `OA4.1` and `PA4.1` for offloaded and
        prefetched activations, `K4.1` for recomputed keys and values, `H8.1` for the head after 8 stages, `D0`.
        """
        letter = _LETTERS.get(self.kind, "F" if self.kind.is_forward else "B")
        return f"{letter}{self.stage}" if self.microbatch is None else f"{letter}{self.stage}.{self.microbatch}"

    def to_text(self, num_stages: int) -> str:
        """Return the text form of five fields; `num_stages` is needed for source and target."""
        numbers = (source_stage(self, num_stages), self.stage, target_stage(self, num_stages), self.microbatch)
        return " ".join([self.kind.value, *("-1" if n is None else str(n) for n in numbers)])


def compute_kinds(stage: int, num_stages: int) -> tuple[ActionKind, ActionKind]:
    """Return the kinds of `stage`'s forward and backward; a single stage is the last, because it computes the loss."""
    position = 2 if stage == num_stages - 1 else min(stage, 1)
    return _POSITIONS[position], _BACKWARD_KINDS[position]


def evaluation_kind(stage: int, num_stages: int) -> ActionKind:
    """Return the kind of `stage`'s forward in an evaluation."""
    return ActionKind.EVALUATE_LAST if stage == num_stages - 1 else compute_kinds(stage, num_stages)[0]


def source_stage(action: Action, num_stages: int) -> int | None:
    """Return the stage whose message `action` receives: activations in forward, their gradients in backward."""
    return _neighbour(action, num_stages, -1)


def target_stage(action: Action, num_stages: int) -> int | None:
    """Return the stage that receives the result of `action`; None if no other stage does."""
    return _neighbour(action, num_stages, 1)


def _neighbour(action: Action, num_stages: int, distance: int) -> int | None:
    """Return the stage at `distance` from the stage of `action`, in its direction; backward goes to lower stages."""
    if action.kind is ActionKind.HEAD:
        return action.stage - 1
    if not action.kind.is_forward_or_backward:
        return None
    stage = action.stage + (distance if action.kind.is_forward else -distance)
    return stage if 0 <= stage < num_stages else None


def describe_misfit(
    action: Action, num_stages: int, *, is_evaluation: bool = False, spreads_head: bool = False
) -> str | None:
    """Return why `action` is invalid among `num_stages` stages, in a step or an evaluation; None if valid.

    With `spreads_head`, the last of these stages is the head.
    """
    if not 0 <= action.stage < num_stages:
        return f"there is no stage {action.stage}, the stages are 0 to {num_stages - 1}"
    if not action.kind.has_microbatch:
        return None if action.microbatch is None else f"{action.kind} concerns a stage, not a microbatch"
    if action.microbatch is None:
        return f"{action.kind} needs a microbatch"
    is_head = spreads_head and action.stage == num_stages - 1
    if is_head or action.kind is ActionKind.HEAD:
        fits = is_head and action.kind is ActionKind.HEAD
        return None if fits else f"stage {action.stage} is {'' if is_head else 'not '}the head that ranks share"
    if not action.kind.is_forward_or_backward:
        turns = action.stage == num_stages - 1
        return f"stage {action.stage} is the model's last, whose backward follows its forward" if turns else None
    expected = compute_kinds(action.stage, num_stages)[action.kind.is_backward]
    where = ""
    if is_evaluation:
        expected, where = evaluation_kind(action.stage, num_stages), " in an evaluation"
    return None if action.kind is expected else f"stage {action.stage} of {num_stages} takes {expected}{where}"
