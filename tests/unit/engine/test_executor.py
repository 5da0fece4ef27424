"""A step leaves nothing behind, and an action that fails is marked in the schedule's grid."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from harness.local_transport import LocalTransport, run_rank_threads
from harness.pipelines import CPU, SEQ_LENGTH, ModelWeights, make_batch, make_model, plain_step
from harness.rank_memory import rules_of
from harness.schedules import even_cuts, spec_of
from torch import Tensor
from transformers import PreTrainedModel

from mobius.distributed.transport import SingleRankTransport
from mobius.engine import executor as executor_module
from mobius.engine.executor import Executor
from mobius.engine.stage import StageModule
from mobius.engine.stage_layers import MicrobatchContext, SavedForBackward
from mobius.engine.stage_memory import StageMemory
from mobius.engine.waits import Observers, WaitClock
from mobius.errors import TransportError
from mobius.models.blocks import LayerArguments, ModelParts
from mobius.schedule.build import build_schedule
from mobius.schedule.lanes import WaitCause
from mobius.schedule.plan import Plan
from mobius.training.stages import RankStages, StageOptions

NUM_STAGES, NUM_MICROBATCHES = 4, 3


class FailingStage(StageModule):
    """A stage whose backward fails at the call that `fail_at` counts down to."""

    fail_at = 0

    def backward(
        self,
        weights: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        saved_for_backward: list[SavedForBackward],
        gradient: Tensor,
        context: MicrobatchContext,
    ) -> Tensor:
        if self.fail_at == 0:
            raise RuntimeError("the card is on fire")
        self.fail_at -= 1
        return super().backward(weights, gradients, saved_for_backward, gradient, context)


def make_executor(
    model: PreTrainedModel,
    transport: SingleRankTransport | LocalTransport,
    *,
    clock: WaitClock | None = None,
    failing_stage: int | None = None,
    fail_at: int = 0,
    tied: frozenset[str] = frozenset(),
) -> tuple[Executor, dict[int, StageMemory]]:
    cuts = even_cuts(model.config.num_hidden_layers, NUM_STAGES)
    plan = Plan(transport.num_ranks, len(cuts), NUM_MICROBATCHES, (2,) * transport.num_ranks, cuts=cuts)
    stages = RankStages.allocate(
        ModelParts(model.config, CPU),
        plan,
        transport.rank,
        StageOptions(dtype=torch.float32, rules=rules_of(torch.float32), loss_chunk_tokens=16),
        device=CPU,
    )
    for memory in stages.memory.values():
        memory.sums.tied = tied
    stages.load_weights(ModelWeights(model))
    if failing_stage in stages.modules:
        failing = stages.modules[failing_stage]
        failing.__class__ = FailingStage
        failing.fail_at = fail_at  # type: ignore[attr-defined]
    schedule = build_schedule(spec_of(transport.num_ranks, plan.stages_per_rank, NUM_MICROBATCHES, 2))
    return stages.executor(schedule, transport, Observers(clock or WaitClock(CPU))), stages.memory


def test_a_step_leaves_nothing_saved_and_can_be_repeated() -> None:
    executor, _ = make_executor(make_model("llama"), SingleRankTransport())
    batch = make_batch(NUM_MICROBATCHES)

    first = executor.run(batch)
    assert len(executor._saved_activations) == 0
    second = executor.run(batch)

    assert torch.equal(first.loss, second.loss)
    assert all(torch.equal(own, second.squared_norms[stage]) for stage, own in first.squared_norms.items())


def test_what_layers_get_beside_hidden_states_is_asked_for_each_microbatch() -> None:
    executor, _ = make_executor(make_model("llama"), SingleRankTransport())
    inputs, asked = executor._layer_inputs, list[int]()

    def noted(seq_length: int, *more: Any) -> LayerArguments:
        asked.append(seq_length)
        return inputs(seq_length, *more)

    executor._layer_inputs = noted
    executor.run(make_batch(NUM_MICROBATCHES))

    assert asked == [SEQ_LENGTH] * (2 * NUM_STAGES * NUM_MICROBATCHES), "once forward and once backward"


def test_the_executor_has_no_branch_for_a_shared_head_or_a_router_loss() -> None:
    """Both stand behind objects, which models and plans without them have in a form that does nothing."""
    nodes = ast.walk(ast.parse(inspect.getsource(executor_module)))
    asked = [ast.unparse(node.test) for node in nodes if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert)]
    assert not [test for test in asked if "head" in test or "router" in test]
    assert {test for test in asked if "microbatch" in test} == {
        "action.microbatch is None",
        "microbatch == self._last_backward",
    }


def test_the_sums_of_a_step_are_its_loss_and_the_norm_of_every_tensor() -> None:
    model = make_model("llama")
    batch = make_batch(NUM_MICROBATCHES)
    executor, memory = make_executor(model, SingleRankTransport())
    expected_loss, expected = plain_step(model, batch, NUM_MICROBATCHES)

    sums = executor.run(batch, loss_scale=8.0)

    assert torch.equal(sums.loss, expected_loss), "the scale is on the gradients only"
    assert sums.squared_norms.keys() == {0, 1, 2, 3}
    for stage, state in ((stage, own.state) for stage, own in memory.items()):
        squares = [64 * float(expected[name].double().square().sum()) for name in state.layout.offsets]
        assert sums.squared_norms[stage].tolist() == pytest.approx(squares, rel=1e-5)


def test_names_that_are_sealed_later_are_left_out_of_the_norm() -> None:
    model = make_model("llama")
    batch = make_batch(NUM_MICROBATCHES)
    _, expected = plain_step(model, batch, NUM_MICROBATCHES)
    executor, memory = make_executor(model, SingleRankTransport(), tied=frozenset({"model.embed_tokens.weight"}))

    sums = executor.run(batch)

    first, *names = memory[0].state.layout.offsets
    assert first == "model.embed_tokens.weight"
    squares = [float(expected[name].double().square().sum()) for name in names]
    assert sums.squared_norms[0].tolist() == pytest.approx([0.0, *squares], rel=1e-5)


@pytest.mark.parametrize(("stage", "microbatch"), [(1, 0), (2, 1), (0, 2)])
def test_a_failing_action_is_marked_in_the_grid_and_nothing_stays_offloaded(stage: int, microbatch: int) -> None:
    executor, _ = make_executor(make_model("llama"), SingleRankTransport(), failing_stage=stage, fail_at=microbatch)

    with pytest.raises(RuntimeError, match="the card is on fire") as caught:
        executor.run(make_batch(NUM_MICROBATCHES))

    (note,) = caught.value.__notes__
    lines = note.splitlines()
    kind = "backward_first" if stage == 0 else "backward_middle"
    told = f"{kind} {stage + 1} {stage} {stage - 1} {microbatch} <-- ERROR HERE"
    assert lines[-1].startswith("rank 0, action ")
    assert lines[-1].endswith(told)
    marked = [line for line in lines[:-1] if line.endswith("<-- ERROR HERE")]
    assert len(marked) == 1
    assert marked[0].startswith("rank 0")
    assert f">B{stage}.{microbatch}<" in marked[0]
    assert len(executor._saved_activations) == 0


def test_the_rank_that_fails_is_the_one_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    monkeypatch.setattr("harness.local_transport.TIMEOUT_SECONDS", 2.0)
    others: list[BaseException] = []

    def work(transport: LocalTransport) -> None:
        executor, _ = make_executor(model, transport, failing_stage=1)
        try:
            executor.run(make_batch(NUM_MICROBATCHES))
        except TransportError as error:
            others.append(error)
            raise

    with pytest.raises(RuntimeError, match="on fire") as caught:
        run_rank_threads(2, work)

    assert "rank 1, action" in caught.value.__notes__[0].splitlines()[-1]
    (other,) = others
    assert "rank 0, action" in other.__notes__[0].splitlines()[-1], "the neighbour tells where it waited"


def test_waits_for_neighbours_are_counted_where_they_happen() -> None:
    model = make_model("llama")
    batch = make_batch(NUM_MICROBATCHES)

    def work(transport: LocalTransport) -> dict[str, float]:
        clock = WaitClock(CPU)
        executor, _ = make_executor(model, transport, clock=clock)
        executor.run(batch)
        return clock.collect()

    for waits in run_rank_threads(2, work):
        assert waits[WaitCause.NEIGHBOURS] > 0
        assert waits[WaitCause.OPTIMIZER] < 0.01, "there is no optimizer in this run"
