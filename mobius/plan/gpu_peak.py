"""When a rank's GPU holds most, and what: activations that wait for backward, messages, and the work of that moment.

It knows the order of a step (schedule/looped.py), not how large a layer's graph is (working_set.py) nor weights.

    rank 1 of 2, stages 1, 3 and 5, the last of them the model's own:

    forward    F1 F1 F3 F3 | F5 B5 F5 B5 | B3 B3 B1 B1      stages that wait at each moment
    waiting    1  1  13 13 | 13  13      | 13 1  1          the model's last stage keeps one microbatch only

So the most is held at the model's last stage's turn, or when a stage begins its backward; it is looked for there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from mobius.limits import RECEIVES_AHEAD, max_sends_under_way
from mobius.plan.plan import Plan
from mobius.plan.working_set import LayerBytes


@dataclass(frozen=True)
class MicrobatchBytes:
    """What a microbatch takes, in bytes."""

    activation: int
    """A message, or a layer's input: [B, L, H]."""
    layer: LayerBytes
    loss: int
    embedding: int


@dataclass(frozen=True)
class Held:
    """Bytes at one moment, beside weights and optimizer."""

    stash: int = 0
    """Inputs of layers, for recomputing."""
    graphs: int = 0
    """Kept activations."""
    messages: int = 0
    """Received ahead, and sent but not yet let go."""
    work: int = 0

    @property
    def total(self) -> int:
        return self.stash + self.graphs + self.messages + self.work


def largest_moment(
    plan: Plan, rank: int, size: MicrobatchBytes, *, graph_stages: Collection[int], max_sends: int | None = None
) -> Held:
    """The moment of a step at which `rank` holds most; `graph_stages` keep their activations.

    `max_sends` is for runs whose messages under way are bounded otherwise.
    """
    sends = max_sends_under_way(plan.num_microbatches) if max_sends is None else max_sends
    own = _Rank(plan, plan.stages_of(rank), size, frozenset(graph_stages), sends)
    return max(own.moments(), key=lambda held: held.total)


@dataclass(frozen=True)
class _Rank:
    """One rank's step."""

    plan: Plan
    stages: range
    size: MicrobatchBytes
    graph_stages: frozenset[int]
    max_sends: int

    def moments(self) -> Iterator[Held]:
        """Those at which most may be held: turns of the model's last stage, and each stage's first backward."""
        waiting = [stage for stage in self.stages if not self.plan.spans[stage].is_last]
        turns = len(waiting) < len(self.stages)
        if turns:
            yield from self._turn(self.stages[-1], waiting)
        for index, stage in enumerate(waiting):
            is_first_backward = index == len(waiting) - 1 and not turns
            yield from self._backward(stage, waiting[: index + 1], is_first_backward=is_first_backward)

    def _turn(self, stage: int, waiting: list[int]) -> Iterator[Held]:
        """Forward, loss and backward of one microbatch of the model's last stage."""
        size, per_message = self.size, self.size.activation
        inputs, graphs = self._kept(stage)
        stash, kept = self._all_kept(waiting)
        is_only = self.plan.spans[stage].is_first
        gradients = 0 if is_only else self.plan.num_microbatches - 1
        messages = self._ahead() + self._sent(gradients, self._outputs(waiting))
        output = 0 if self._keeps(stage) else per_message  # a graph has its output in it
        yield Held(stash + inputs, kept + graphs, messages, output + size.loss)
        # The output and its gradient stay until the backward of the stage is done.
        yield Held(stash + inputs, kept + graphs, messages, output + per_message + self._layer_work(stage))
        if is_only:
            yield Held(stash, kept, messages, 3 * per_message + size.embedding)

    def _backward(self, stage: int, waiting: list[int], *, is_first_backward: bool) -> Iterator[Held]:
        """The first microbatch's backward of `stage`, the last of those that are `waiting`."""
        stash, kept = self._all_kept(waiting)
        if is_first_backward:
            sent = self._sent(0, self._outputs(waiting))
        else:
            sent = self._sent(self.plan.num_microbatches, self.max_sends)
        messages = self._ahead() + sent
        yield Held(stash, kept, messages, self._layer_work(stage))
        if self.plan.spans[stage].is_first:
            inputs, graphs = self._kept(stage)
            yield Held(stash - inputs, kept - graphs, messages, self.size.activation + self.size.embedding)

    def _keeps(self, stage: int) -> bool:
        return stage in self.graph_stages and len(self.plan.spans[stage].layers) > 0

    def _kept(self, stage: int) -> tuple[int, int]:
        """Inputs and graphs of a stage and a microbatch."""
        num_layers = len(self.plan.spans[stage].layers)
        if self._keeps(stage):
            return self.size.activation, num_layers * self.size.layer.graph
        return num_layers * self.size.activation, 0

    def _all_kept(self, stages: list[int]) -> tuple[int, int]:
        each = [self._kept(stage) for stage in stages]
        number = self.plan.num_microbatches
        return number * sum(inputs for inputs, _ in each), number * sum(graphs for _, graphs in each)

    def _layer_work(self, stage: int) -> int:
        """Of a layer's backward, beside what is kept."""
        if len(self.plan.spans[stage].layers) == 0:
            return 0
        return self.size.layer.peak - (self.size.layer.graph if self._keeps(stage) else 0)

    def _ahead(self) -> int:
        return 0 if self.plan.num_ranks == 1 else RECEIVES_AHEAD * self.size.activation

    def _outputs(self, stages: list[int]) -> int:
        """Outputs among the last messages that take memory of their own: a kept graph has its output in it."""
        number = self.plan.num_microbatches
        in_graphs = number if stages and self._keeps(stages[-1]) else 0
        return max(0, min(number * len(stages), self.max_sends) - in_graphs)

    def _sent(self, gradients: int, outputs: int) -> int:
        """Bytes of messages: gradients, and outputs before them; one rank alone hands its gradients over itself."""
        number = gradients if self.plan.num_ranks == 1 else min(self.max_sends, gradients + outputs)
        return number * self.size.activation
