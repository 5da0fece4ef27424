"""Activations that are saved, recomputed or offloaded change no bit of loss and gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import harness.pipelines
import pytest
import torch
from harness.grids import named
from harness.packed_rows import LENGTH, ROWS, make_packed_batch
from harness.pipelines import (
    FAMILIES,
    Pipeline,
    Step,
    assert_same_bits,
    make_batch,
    make_model,
    plain_step,
    resident_stages,
)
from torch import Tensor
from transformers import PreTrainedModel

from mobius.config.config import AdapterConfig
from mobius.engine import saved_activations
from mobius.engine.step_inputs import StepBatch
from mobius.models import blocks, compiled
from mobius.models.compiled import CompiledModule
from mobius.schedule.plan import RecomputeLevel
from mobius.schedule.spec import ComputeOrder

FORMATS = (torch.float32, torch.bfloat16)
CASES: dict[str, dict[str, Any]] = {  # "places": resident stages among those of a rank
    "resident": {"num_slots": None},
    "streamed": {"num_slots": 1},
    "streamed, prefetched": {"num_slots": 2},
    "first resident": {"num_slots": 2, "places": (0,)},
    "streamed, rounds": {"num_slots": 2, "num_rounds": 2},
    "depth first": {"order": ComputeOrder.DEPTH_FIRST},
}

PIPELINES = ((1, 3), (2, 1), (4, 2), (2, 3))  # ranks, stages of each


def options_of(case: str, num_ranks: int, stages_per_rank: int) -> dict[str, Any]:
    options = dict(CASES[case])
    if "order" in options:  # a round has a microbatch for each rank
        options |= {"num_slots": stages_per_rank, "num_rounds": 2 if num_ranks < 3 else 1}
    resident = resident_stages(num_ranks, stages_per_rank, options.pop("places", ()))
    return {**options, "resident": resident}


def assert_levels_agree(model: PreTrainedModel, batch: StepBatch, *sizes: Any, **options: Any) -> None:
    """Saved products give the bits of everything saved; tests/pipeline/test_parity.py has those of the plain model."""
    saved, everything = (
        Pipeline(model, *sizes, keeps_graphs=True, recompute_level=level, **options).step(batch)
        for level in (RecomputeLevel.ELEMENTWISE, RecomputeLevel.NONE)
    )
    assert_same_bits(saved, everything, sizes)


@pytest.mark.grid
@pytest.mark.parametrize("num_slots", [None, 1, 2])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_saved_products_in_bf16_have_the_bits_of_everything_saved(family: str, num_slots: int | None) -> None:
    assert_levels_agree(make_model(family, 6), make_batch(4), 2, 2, 2, num_slots, dtype=torch.bfloat16)


def test_saved_products_in_rounds_mixed_residency_and_packed_rows_have_the_bits_of_everything_saved() -> None:
    model, batch = make_model("llama-tied", 6), make_batch(4)
    assert_levels_agree(model, batch, 2, 3, 4, 2, num_rounds=2)
    assert_levels_agree(model, batch, 2, 3, 4, 1, resident=frozenset({0, 3, 5}))
    for family in ("llama", "gemma3"):
        assert_levels_agree(make_model(family, 6), make_packed_batch(ROWS, LENGTH, 2), 2, 1, 2, 2)


@pytest.mark.grid
@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("half", [0, 1])  # every other pipeline; in both halves is one of three stages in a rank
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_offloaded_inputs_of_layers_change_no_bit(family: str, half: int, case: str) -> None:
    """Those of every stage but the model's last, or of the first stage of each rank."""
    first = sorted(CASES).index(case) + (family == "llama")
    for turn in range(half, len(PIPELINES), 2):
        num_ranks, stages_per_rank = PIPELINES[turn]
        num_stages, number = num_ranks * stages_per_rank, 4
        # Two layers in a stage of the longest pipeline; gemma3 has two kinds of them from 6 on.
        model = make_model(family, max(4 if family == "llama" else 6, num_stages + 1))
        batch, runs = make_batch(number), list[Step]()
        for offloaded in (frozenset[int](), frozenset(range(num_ranks)) - {num_stages - 1}, range(num_stages - 1)):
            pipeline = Pipeline(
                model,
                num_ranks,
                stages_per_rank,
                number,
                dtype=FORMATS[(first + turn) % len(FORMATS)],
                offloaded_activation_stages=frozenset(offloaded),
                **options_of(case, num_ranks, stages_per_rank),
            )
            runs.append(pipeline.step(batch))
            assert_same_bits(runs[-1], runs[0], (num_ranks, stages_per_rank, sorted(offloaded)))
        assert all(gradient.any() for gradient in runs[0][1].values())


@dataclass
class Calls:
    """Layers and microbatches by what became of them."""

    offloaded: list[int] = field(default_factory=list)
    """Layers of each microbatch and stage that were offloaded with their products."""
    recomputed: int = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    select, recomputed_backward = saved_activations._select_for_offload, CompiledModule.recomputed_backward

    def counted_select(saved: Any, room: int) -> Any:
        layers, tensors = select(saved, room)
        calls.offloaded.append(sum(layer.saved is not None for layer in layers))
        return layers, tensors

    def counted_recompute(*given: Any) -> Any:
        calls.recomputed += 1
        return recomputed_backward(*given)

    monkeypatch.setattr(saved_activations, "_select_for_offload", counted_select)
    monkeypatch.setattr(CompiledModule, "recomputed_backward", counted_recompute)
    return calls


@pytest.fixture(scope="module")
def graphs() -> dict[Hashable, Any]:
    """Graphs of layers by what they compute; ranks that are processes would each trace their own."""
    return {}


@pytest.fixture
def traced(graphs: dict[Hashable, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run in the graphs that would be compiled, which are of these tests alone.

    All are of whole operations: the compiler takes them apart alike, but here only one of two kinds would be.
    """
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, _: graph)
    monkeypatch.setattr("torch._inductor.decomposition.select_decomp_table", dict)
    # Ranks are threads: none may trace while another does, or calls what torch.compile made.
    tracing, graph = threading.Lock(), CompiledModule._graph

    def alone(self: CompiledModule, key: Hashable, make: Callable[[], Any]) -> Any:
        kind = self._name, blocks._signature(self._module), key
        with tracing:
            if kind not in graphs:
                graphs[kind] = graph(self, key, make)
            return graphs[kind]

    monkeypatch.setattr(CompiledModule, "_graph", alone)
    monkeypatch.setattr(
        compiled.CompiledFunction, "__call__", lambda self, *given, **more: self._function(*given, **more)
    )
    monkeypatch.setattr(harness.pipelines, "_PARTS", {})


def offloaded_step(
    model: PreTrainedModel, batch: StepBatch, num_ranks: int, per_rank: int, number: int, **options: Any
) -> Step:
    """A step whose stages but the last offload inputs of layers, and products of `number` microbatches of a round."""
    given = {"num_microbatches": len(batch.input_ids), "num_slots": 2, "compiled": True} | options
    offloaded = frozenset(range(num_ranks * per_rank - 1))
    return Pipeline(
        model,
        num_ranks,
        per_rank,
        offloaded_activation_stages=offloaded,
        num_offloaded_microbatches=number,
        **given,
    ).step(batch)


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "case",
    named({case: case for case in sorted(CASES)}, on_demand=CASES.keys() - {"streamed, rounds", "depth first"}),
)
def test_offloaded_products_change_no_bit_and_are_not_recomputed(case: str, calls: Calls) -> None:
    place = sorted(CASES).index(case)
    for turn, (num_ranks, per_rank) in enumerate(((1, 3), (2, 2), (3, 1))[place // 2 % 2 :][:2]):
        num_stages, num_microbatches = num_ranks * per_rank, (2, 4)[turn % 2]
        model, batch = make_model(("llama-tied", "qwen3")[place % 2], num_stages), make_batch(num_microbatches)
        dtype = FORMATS[(turn + place) % 2]
        options = {"dtype": dtype, **options_of(case, num_ranks, per_rank)}
        rounds = options.get("num_rounds", 1)
        runs = list[Step]()
        for number in (0, 1, num_microbatches // rounds):
            calls.offloaded, calls.recomputed = [], 0
            runs.append(offloaded_step(model, batch, num_ranks, per_rank, number, **options))
            where = f"N={num_ranks} v={per_rank} M={num_microbatches}, {number} offloaded"
            assert sum(calls.offloaded) == number * rounds * (num_stages - 1), where
            # The model's last stage is run again in its turn.
            assert calls.recomputed == num_stages * num_microbatches - sum(calls.offloaded), where
            assert_same_bits(runs[-1], runs[0], where)
        if dtype is torch.float32:
            loss, gradients = plain_step(model, batch, num_microbatches)
            assert torch.allclose(runs[-1][0], loss, rtol=1e-6), case
            for name, gradient in gradients.items():
                assert (runs[-1][1][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.usefixtures("traced")
def test_where_there_is_less_room_products_of_fewer_layers_are_offloaded(calls: Calls) -> None:
    model, batch = make_model("llama", 6), make_batch(4)
    expected = offloaded_step(model, batch, 1, 2, 0)
    offloaded = {}
    for room in (0, 12_000, 2**20):
        calls.offloaded = []
        assert_same_bits(offloaded_step(model, batch, 1, 2, 4, product_bytes=room), expected, room)
        offloaded[room] = {*calls.offloaded}
    assert offloaded[0] == {0}
    assert offloaded[2**20] == {3}, "all layers of the stage"
    assert offloaded[12_000] < {1, 2}


@pytest.mark.usefixtures("traced")
def test_offloaded_products_of_packed_rows_and_adapters_have_the_bits_of_recomputed_layers(calls: Calls) -> None:
    model = make_model("llama", 4)
    for batch, options in (
        (make_packed_batch(ROWS, LENGTH, 2), {"num_microbatches": 2}),
        (make_batch(4), {"adapters": AdapterConfig(lora_rank=2)}),
    ):
        expected = offloaded_step(model, batch, 2, 2, 0, **options)
        calls.offloaded = []
        assert_same_bits(offloaded_step(model, batch, 2, 2, 2, **options), expected, options)
        assert sum(calls.offloaded) == 2 * 3


def test_layers_that_are_not_compiled_offload_their_inputs(calls: Calls) -> None:
    model, batch = make_model("llama", 2), make_batch(2)
    expected, found = (offloaded_step(model, batch, 1, 2, number, compiled=False) for number in (0, 2))
    assert_same_bits(found, expected, "eager")
    assert calls.offloaded == [0] * 4


@pytest.mark.usefixtures("traced")
def test_neither_weights_nor_arguments_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    stay, left = set[int](), set[int]()
    make, select = CompiledModule.forward_with_saved, saved_activations._select_for_offload

    def storage(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def made(self: CompiledModule, weights: Any, gradient_factors: Any, inputs: Any, arguments: Any, level: Any) -> Any:
        stay.update(map(storage, weights.values()), map(storage, arguments.get("position_embeddings", ())))
        return make(self, weights, gradient_factors, inputs, arguments, level)

    def selected(saved: Any, room: int) -> Any:
        layers, tensors = select(saved, room)
        left.update(map(storage, tensors))
        return layers, tensors

    monkeypatch.setattr(CompiledModule, "forward_with_saved", made)
    monkeypatch.setattr(saved_activations, "_select_for_offload", selected)
    offloaded_step(make_model("llama", 2), make_batch(2), 1, 2, 2)
    assert stay
    assert left
    assert not stay & left
