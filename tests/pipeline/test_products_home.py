"""Products of some microbatches wait on the host: no bit changes, and none of their products is run again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import harness.pipelines
import pytest
import torch
from harness.grids import named
from harness.packed_rows import LENGTH, ROWS, make_packed_batch
from harness.pipelines import Pipeline, make_batch, make_model, plain_step
from torch import Tensor
from transformers import PreTrainedModel

from mobius.config.config import AdapterConfig
from mobius.engine import saved_activations
from mobius.engine.executor import StepBatch
from mobius.models import compiled
from mobius.models.compiled import CompiledModule

SIZES = ((1, 3), (2, 2), (3, 1))
"""Ranks, and stages of each; layers are as many as stages."""
CASES: dict[str, dict[str, Any]] = {
    "resident": {"num_slots": None},
    "streamed": {"num_slots": 1},
    "streamed, prefetched": {"num_slots": 2},
    "first resident": {"num_slots": 2, "resident": frozenset({0})},
    "streamed, rounds": {"num_slots": 2, "accumulation_rounds": 2},
}
ON_DEMAND = ("first resident", "streamed, prefetched", "streamed", "resident")


@dataclass
class Calls:
    """Layers and microbatches by what became of them."""

    sent: list[int] = field(default_factory=list)
    """Layers of each microbatch and stage that left with their products."""
    recomputed: int = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    leave, recomputed_backward = saved_activations._select_for_offload, CompiledModule.recomputed_backward

    def counted_leave(kept: Any, room: int) -> Any:
        layers, leaving = leave(kept, room)
        calls.sent.append(sum(layer.saved is not None for layer in layers))
        return layers, leaving

    def counted_recompute(*given: Any) -> Any:
        calls.recomputed += 1
        return recomputed_backward(*given)

    monkeypatch.setattr(saved_activations, "_select_for_offload", counted_leave)
    monkeypatch.setattr(CompiledModule, "recomputed_backward", counted_recompute)
    return calls


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run in the graphs that would be compiled, which are of this test alone.

    All are of whole operations: the compiler takes them apart alike, but here only one of two kinds would be.
    """
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, _: graph)
    monkeypatch.setattr(compiled, "select_decomp_table", dict)
    # Ranks are threads: none may trace while another does, or calls what torch.compile made.
    tracing, graph = threading.Lock(), CompiledModule._graph

    def alone(self: CompiledModule, *given: Any) -> Any:
        with tracing:
            return graph(self, *given)

    monkeypatch.setattr(CompiledModule, "_graph", alone)
    monkeypatch.setattr(
        compiled.CompiledFunction, "__call__", lambda self, *given, **more: self._function(*given, **more)
    )
    monkeypatch.setattr(harness.pipelines, "_PARTS", {})


def step(
    model: PreTrainedModel, batch: StepBatch, num_ranks: int, per_rank: int, number: int, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    options = {"num_microbatches": len(batch.input_ids), "num_slots": 2} | options
    pipeline = Pipeline(
        model,
        num_ranks,
        per_rank,
        offloaded_activation_stages=frozenset(range(num_ranks * per_rank - 1)),
        num_offloaded_microbatches=number,
        compiled=True,
        **options,
    )
    return pipeline.run(batch), pipeline.gradients


def assert_equal(
    found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], where: str
) -> None:
    assert torch.equal(found[0], expected[0]), where
    assert found[1].keys() == expected[1].keys(), where
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), f"{where} {name}"


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("case", named({case: case for case in sorted(CASES)}, on_demand=ON_DEMAND))
def test_no_bit_changes_and_what_is_sent_is_not_run_again(case: str, calls: Calls) -> None:
    family = ("llama-tied", "qwen3")[sorted(CASES).index(case) % 2]
    for turn, (num_ranks, per_rank) in enumerate(SIZES):
        num_stages, num_microbatches = num_ranks * per_rank, (2, 4)[turn % 2]
        model, batch = make_model(family, num_stages), make_batch(num_microbatches)
        dtype = (torch.float32, torch.bfloat16)[(turn + sorted(CASES).index(case)) % 2]
        options = {"dtype": dtype, "num_microbatches": num_microbatches} | CASES[case]
        rounds = options.get("accumulation_rounds", 1)
        runs = []
        for number in (0, 1, num_microbatches // rounds):
            calls.sent, calls.recomputed = [], 0
            runs.append(step(model, batch, num_ranks, per_rank, number, **options))
            where = f"N={num_ranks} v={per_rank} M={num_microbatches} {number} home"
            assert sum(calls.sent) == number * rounds * (num_stages - 1), where
            # The model's last stage is run again in its turn.
            assert calls.recomputed == num_stages * num_microbatches - sum(calls.sent), where
            assert_equal(runs[-1], runs[0], where)
        if dtype is torch.float32:
            loss, gradients = plain_step(model, batch, num_microbatches)
            assert torch.allclose(runs[-1][0], loss, rtol=1e-6), case
            for name, gradient in gradients.items():
                assert (runs[-1][1][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.usefixtures("traced")
def test_where_there_is_less_room_products_of_fewer_layers_leave(calls: Calls) -> None:
    model, batch = make_model("llama", 6), make_batch(4)
    expected = step(model, batch, 1, 2, 0)
    sent = {}
    for room in (0, 12_000, 2**20):
        calls.sent = []
        assert_equal(step(model, batch, 1, 2, 4, product_bytes=room), expected, f"{room} bytes for a layer")
        sent[room] = {*calls.sent}
    assert sent[0] == {0}
    assert sent[2**20] == {3}, "all layers of the stage"
    assert sent[12_000] < {1, 2}


@pytest.mark.usefixtures("traced")
def test_packed_rows_and_adapters_have_the_bits_of_recomputed_layers(calls: Calls) -> None:
    lora = AdapterConfig(lora_rank=2)
    for batch, options in (
        (make_packed_batch(ROWS, LENGTH, 2), {"num_microbatches": 2}),
        (make_batch(4), {"adapters": lora}),
    ):
        model = make_model("llama", 4)
        expected = step(model, batch, 2, 2, 0, **options)
        calls.sent = []
        assert_equal(step(model, batch, 2, 2, 2, **options), expected, str(options))
        assert sum(calls.sent) == 2 * 3


def test_layers_that_are_not_compiled_send_their_inputs(calls: Calls) -> None:
    model, batch = make_model("llama", 2), make_batch(2)
    given = {"offloaded_activation_stages": frozenset({0}), "num_slots": 2}
    runs = []
    for number in (0, 2):
        pipeline = Pipeline(model, 1, 2, 2, num_offloaded_microbatches=number, **given)
        runs.append((pipeline.run(batch), pipeline.gradients))
    assert_equal(runs[1], runs[0], "eager")
    assert calls.sent == [0] * 4


@pytest.mark.extended  # compiling them takes half a minute; tests/gpu/test_products_home.py compiles them, too
def test_compiled_layers_go_on_from_what_came_back(calls: Calls) -> None:
    """Compiled graphs go by the strides of what they are given."""
    model, batch = make_model("llama", 2), make_batch(2)
    expected, found = (step(model, batch, 1, 2, number, dtype=torch.bfloat16) for number in (0, 1))
    assert_equal(found, expected, "compiled")
    assert sum(calls.sent) == 1


@pytest.mark.usefixtures("traced")
def test_neither_weights_nor_arguments_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    stay, left = set[int](), set[int]()
    make, leave = CompiledModule.forward_with_saved, saved_activations._select_for_offload

    def storage(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def made(self: CompiledModule, weights: Any, gradient_factors: Any, inputs: Any, arguments: Any, level: Any) -> Any:
        stay.update(map(storage, weights.values()), map(storage, arguments.get("position_embeddings", ())))
        return make(self, weights, gradient_factors, inputs, arguments, level)

    def leaving(kept: Any, room: int) -> Any:
        layers, tensors = leave(kept, room)
        left.update(map(storage, tensors))
        return layers, tensors

    monkeypatch.setattr(CompiledModule, "forward_with_saved", made)
    monkeypatch.setattr(saved_activations, "_select_for_offload", leaving)
    step(make_model("llama", 2), make_batch(2), 1, 2, 2)
    assert stay
    assert left
    assert not stay & left
