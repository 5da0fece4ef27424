"""What stages cost: a profile's seconds added up over the layers; when they run is simulation.py's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mobius.plan.partition import StageSpan
from mobius.plan.profile import Profile
from mobius.plan.shape import ModelShape

ACTION_GAP = 40e-6
"""Seconds of a GPU between two actions: events and other streams are waited for (0.02 to 0.08 ms in traces)."""
LAUNCH_BESIDE_UPDATES = 1.25
"""The host's seconds for a backward while its other cores update streamed stages, over those on an idle host: 2.2 to
2.6 ms in runs for 2.0 alone."""


@dataclass(frozen=True)
class StageCost:
    """What a stage costs: seconds per microbatch, and parameters."""

    forward: float
    """0 for the model's last stage, whose forward runs in its backward."""
    backward: float
    """With recompute where it recomputes; in the last stage also forward and loss, in the first the embedding's."""
    parameters: int
    is_resident: bool = False
    """Its state stays on the GPU, which updates it."""
    forward_launch: float = 0.0
    """What the host takes to enqueue the forward of a microbatch."""
    backward_launch: float = 0.0


@dataclass(frozen=True)
class StepRules:
    """How the runtime goes about a step."""

    clips: bool
    """Updates wait for the norm over all ranks."""
    message_bytes: int
    """Of an activation [B, L, H]."""
    overlaps_optimizer: bool = True
    weight_bytes: int = 2
    gradient_bytes: int = 2
    """Per parameter, on their way to the host."""
    is_tied: bool = False
    """Then the first and the last stage are updated after the step also without clipping."""


def stage_costs(
    spans: Sequence[StageSpan],
    shape: ModelShape,
    profile: Profile,
    *,
    resident: frozenset[int] = frozenset(),
    graph_stages: frozenset[int] = frozenset(),
) -> tuple[StageCost, ...]:
    """The cost of every stage; `graph_stages` keep their activations, the others recompute."""
    costs, launch = [], profile.launch
    for span in spans:
        layers = [profile.of_layer(layer) for layer in span.layers]
        forward = sum(layer.forward for layer in layers)
        keeps = span.stage in graph_stages
        backward = sum(layer.backward if keeps else layer.recomputed_backward for layer in layers)
        if span.is_first:
            forward += profile.embedding_forward
            backward += profile.embedding_backward
        if span.is_last:
            forward, backward = 0.0, forward + profile.loss + backward
        num_layers = len(span.layers)
        launch_back = launch.backward if keeps else launch.recomputed_backward
        forward_launch, backward_launch = (
            each * num_layers + profile.action_launch for each in (launch.forward, launch_back)
        )
        if len(resident) < len(spans):
            backward_launch *= LAUNCH_BESIDE_UPDATES
        costs.append(
            StageCost(
                forward + (0.0 if span.is_last else ACTION_GAP),
                backward + ACTION_GAP,
                span.num_parameters(shape),
                span.stage in resident,
                0.0 if span.is_last else forward_launch,
                backward_launch + (forward_launch if span.is_last else 0.0),
            )
        )
    return tuple(costs)
