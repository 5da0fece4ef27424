"""Layers with experts: all their parameters are stored, move and are updated; those of a token's experts compute."""

import itertools
from dataclasses import replace

import pytest
from harness.plan_requests import H200, refusal_by, request_of

from mobius.planner.gpu_specs import GPU_SPECS, MEMORY_SHARE, estimate_profile
from mobius.planner.memory_estimates import estimate_host_memory
from mobius.planner.peak_memory import estimate_layer
from mobius.planner.rates import reference_profile
from mobius.planner.solver import resolve_auto, solve
from mobius.planner.step_prediction import predict_min_step_seconds
from mobius.schedule.partition import Experts, LayerWidths, ModelShape, TrainedParameters, cut_model
from mobius.schedule.plan import MemoryUse

HIDDEN, WIDTH, NUMBER, PER_TOKEN, SHARED, DENSE = 1024, 512, 16, 2, 256, 4096
ATTENTION = 4 * HIDDEN * HIDDEN
ROUTED = NUMBER * 3 * HIDDEN * WIDTH
SPARSE_LAYER = ATTENTION + ROUTED + NUMBER * HIDDEN + 3 * HIDDEN * SHARED
DENSE_LAYER = ATTENTION + 3 * HIDDEN * DENSE
ACTIVE = SPARSE_LAYER - ROUTED * (NUMBER - PER_TOKEN) // NUMBER
SHAPE = ModelShape(
    embedding_parameters=1000 * HIDDEN,
    layer_parameters=(DENSE_LAYER, *[SPARSE_LAYER] * 7),
    head_parameters=1000 * HIDDEN,
    hidden_size=HIDDEN,
    intermediate_size=DENSE,
    vocab_size=1000,
    is_tied=False,
    num_heads=8,
    head_size=128,
    experts=Experts(NUMBER, PER_TOKEN, (0, *[ROUTED] * 7), SHARED),
)
ALL_SPARSE = replace(SHAPE, layer_parameters=(SPARSE_LAYER,) * 8, experts=Experts(16, 2, (ROUTED,) * 8, SHARED))
SAME_SIZE = replace(ALL_SPARSE, experts=None)
"""A model of as many parameters, all of which compute."""


def test_total_and_active_parameters_are_told_apart() -> None:
    assert SHAPE.num_parameters == 2 * 1000 * HIDDEN + DENSE_LAYER + 7 * SPARSE_LAYER
    assert SHAPE.num_active == 2 * 1000 * HIDDEN + DENSE_LAYER + 7 * ACTIVE
    assert SHAPE.product_operations == 6 * (1000 * HIDDEN + DENSE_LAYER + 7 * ACTIVE)
    assert SHAPE.describe() == "2.3e+08 parameters, of which 7.58e+07 are active for a token"
    assert SAME_SIZE.num_active == SAME_SIZE.num_parameters


def test_frozen_experts_spare_the_operations_of_active_ones_only() -> None:
    # All but the experts is trained.
    others = (DENSE_LAYER, *[SPARSE_LAYER - ROUTED] * 7)
    assert SHAPE.experts is not None
    frozen = replace(
        SHAPE,
        trained=TrainedParameters(1000 * HIDDEN, others, 1000 * HIDDEN, is_on_gpu=False),
        experts=replace(SHAPE.experts, trained=(0,) * 8),
    )
    assert SHAPE.product_operations - frozen.product_operations == 2 * 7 * ROUTED * PER_TOKEN // NUMBER


def test_widths_are_those_of_what_a_layer_multiplies() -> None:
    # Attention's four products have an input and an output each, of which widths are halved by parameters.
    assert SHAPE.layer_widths(0) == LayerWidths(4 * HIDDEN, DENSE, 0)
    assert SHAPE.layer_widths(1) == LayerWidths(4 * HIDDEN + NUMBER, PER_TOKEN * WIDTH + SHARED, PER_TOKEN * HIDDEN)
    assert SHAPE.kind_of_layer == (0, *[1] * 7)
    assert SHAPE.layer_kinds == (0, 1)


def test_copies_for_experts_are_among_the_bytes_of_a_layer() -> None:
    inner = PER_TOKEN * WIDTH + SHARED
    found = estimate_layer(2, ALL_SPARSE, 100, compiled=True)
    graph = 4 * HIDDEN + NUMBER + 3 * HIDDEN + 3 * inner + 2 * PER_TOKEN * HIDDEN
    assert found.saved_activations == 2 * 100 * graph
    assert found.peak == 2 * 100 * (graph + 4 * HIDDEN + 3 * inner + 2 * PER_TOKEN * HIDDEN)
    assert found.saved_products == 2 * 100 * (graph - HIDDEN - inner)
    # The dense layer of the model is wider.
    mixed = estimate_layer(2, SHAPE, 100, compiled=True)
    assert mixed.saved_activations == 2 * 100 * (7 * HIDDEN + 3 * DENSE) > found.saved_activations


def test_seconds_go_by_active_parameters_and_passes_over_all_experts() -> None:
    profile = estimate_profile(GPU_SPECS["H200"], SHAPE, microbatch_tokens=4096, seq_length=512, num_ranks=1)
    assert profile.kind_of_layer == (0, *[1] * 7)
    as_one = replace(SHAPE, layer_parameters=(DENSE_LAYER, *[ACTIVE] * 7), experts=None)
    dense = estimate_profile(GPU_SPECS["H200"], as_one, microbatch_tokens=4096, seq_length=512, num_ranks=1)
    passes = 2 * (4 * PER_TOKEN * HIDDEN * 4096 + ROUTED) / (4800e9 * MEMORY_SHARE)
    assert profile.of_layer(0) == dense.of_layer(0)
    assert profile.of_layer(1).forward == pytest.approx(dense.of_layer(1).forward + passes)
    # Gradients of all experts are added to sums.
    sums = 8 * (SPARSE_LAYER - ACTIVE) / (4800e9 * MEMORY_SHARE)
    assert profile.of_layer(1).backward == pytest.approx(dense.of_layer(1).backward + passes + sums)


def test_bytes_are_those_of_all_parameters_and_mfu_that_of_active_ones() -> None:
    options = {"num_stages": 4, "resident_stages": "0"}
    found, other = (solve(resolve_auto(request_of(shape, H200, **options))) for shape in (ALL_SPARSE, SAME_SIZE))
    assert estimate_host_memory(found.request, found.plan) == estimate_host_memory(other.request, other.plan)
    assert [need.states for need in found.gpu_estimates] == [need.states for need in other.gpu_estimates]
    attention = 8 * HIDDEN * 512
    operations = (ALL_SPARSE.product_operations + 6 * attention) * found.request.step_tokens
    assert found.mfu == pytest.approx(operations / found.step_seconds / (4 * 989e12), rel=1e-3)
    assert found.step_seconds < other.step_seconds


def test_a_bound_computes_with_active_parameters_and_updates_all() -> None:
    def bound(shape: ModelShape, num_resident: int, batch_size: int) -> float:
        request = resolve_auto(request_of(shape, H200, num_stages=4, num_chunks=4, batch_size=batch_size))
        plan = request.plan.with_same_use(MemoryUse(num_resident, 0, 1 - num_resident))
        return predict_min_step_seconds(plan, request, reference_profile(request))

    assert bound(ALL_SPARSE, 1, 256) < 0.5 * bound(SAME_SIZE, 1, 256)
    # What the CPU updates of streamed stages is everything, and a few tokens compute in less time.
    assert bound(SAME_SIZE, 1, 8) < bound(ALL_SPARSE, 0, 8) == pytest.approx(bound(SAME_SIZE, 0, 8), rel=0.1)


def cut_of(work: list[int], num_stages: int) -> list[int]:
    """Numbers of layers; a layer has its work in active parameters, and three idle ones for each if it is above 1."""
    experts = Experts(4, 1, tuple(4 * own if own > 1 else 0 for own in work))
    layers = tuple(4 * own if own > 1 else 1 for own in work)
    shape = replace(SHAPE, layer_parameters=layers, experts=experts, head_parameters=0)
    assert shape.active_parameters == tuple(work)
    return [len(cut.layers) for cut in cut_model(shape, num_stages)]


def test_stages_take_as_long_where_dense_layers_lie_among_sparse_ones() -> None:
    assert cut_of([1, 1, 1, 1, 4, 4], 3) == [4, 1, 1]
    assert cut_of([4, 1, 4, 1, 4, 1], 3) == [2, 2, 2]
    assert cut_of([4] * 7, 3) == [3, 2, 2], "alike: by number"
    assert cut_of([1, 4], 2) == [1, 1]
    ends = [0, *itertools.accumulate(cut_of([1] * 20 + [4] * 4, 8))]
    assert max(sum(([1] * 20 + [4] * 4)[first:end]) for first, end in itertools.pairwise(ends)) == 5


@pytest.mark.parametrize(("gib", "fits_slots"), [(0.2, True), (0.05, False)])
def test_experts_that_do_not_fit_are_refused_with_the_arithmetic_of_a_layer(gib: float, fits_slots: bool) -> None:
    request = request_of(SHAPE, H200, num_stages=8, gpu_memory_limit=gib, num_chunks=64, batch_size=64)
    message = refusal_by(lambda: resolve_auto(request))
    assert "2.52e+07 of layer 1's 3.02e+07 parameters belong to its 16 experts" in message
    slot, sums = 2 * SPARSE_LAYER / 2**20, 4 * SPARSE_LAYER / 2**20
    assert f"{slot:.1f} MiB in each of 2 weight slot(s) and {sums:.1f} MiB for the fp32 sums" in message
    assert ("use GPUs with more memory" in message) is not fits_slots
