"""Tiles of tokens that nobody asked for are none where layers fit whole, else the largest that fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from harness.plan_requests import H200, find_published_shape, refusal_by, request_of

from mobius.config.config import Recompute
from mobius.errors import GpuMemoryError
from mobius.planner.fit import fit_plan
from mobius.planner.memory_estimates import estimate_gpu_memory_of_ranks, estimated_layer, tile_tokens
from mobius.planner.peak_memory import LayerBytes, LiveMemory, MicrobatchBytes, estimate_layer, find_peak
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import resolve_auto
from mobius.schedule.plan import MemoryUse
from mobius.units import GIB

LONG = {"seq_length": 65_536, "batch_size": 8, "num_chunks": 8, "num_rounds": 8, "num_stages": 32}


def long_request(**options: object) -> PlanRequest:
    return request_of(find_published_shape("7b"), **(LONG | options))


def least(request: PlanRequest) -> float:
    """GiB of the fullest rank with everything streamed and recomputed."""
    plan = request.plan.with_memory_uses([MemoryUse(0, 0, 2)] * 4)
    return max(need.total for need in estimate_gpu_memory_of_ranks(request, plan, estimated_layer(request))) / GIB


@pytest.mark.parametrize(
    ("limit", "expected"), [(60, None), (29, None), (27, 32768), (23.5, 16384), (20, 8192), (16.5, 4096)]
)
def test_auto_takes_whole_layers_or_the_largest_tiles_that_fit(limit: float, expected: int | None) -> None:
    request = long_request(gpu_memory_limit=limit)

    assert tile_tokens(request) == expected
    larger = {None: [], 32768: ["off"], 16384: ["off", "32768"], 8192: ["16384"], 4096: ["8192", "4096"]}[expected]
    for words in larger:
        assert least(request.with_pipeline(tile_tokens=words)) + request.mailbox_bytes / GIB > 0.97 * limit
    if limit > 16.5:
        assert fit_plan(request, layer=estimated_layer(request))
    else:
        with pytest.raises(GpuMemoryError):
            fit_plan(request, layer=estimated_layer(request))


def test_what_is_free_changes_nothing_so_that_all_ranks_find_the_same() -> None:
    request = long_request(gpu_memory_limit=23.5)
    machine = replace(H200, free_bytes=100 * GIB)

    assert tile_tokens(replace(request, machine=machine)) == tile_tokens(request) == 16384


def test_layers_that_cannot_run_in_tiles_get_none() -> None:
    whole = request_of(replace(find_published_shape("7b"), is_tileable=False), **(LONG | {"gpu_memory_limit": 24}))

    assert tile_tokens(whole) is None
    assert "--tile_tokens" not in refusal_by(lambda: fit_plan(whole, layer=estimated_layer(whole)))


def test_a_number_and_off_are_taken_as_they_are() -> None:
    assert tile_tokens(long_request(gpu_memory_limit=29, tile_tokens="512")) == 512
    assert tile_tokens(long_request(gpu_memory_limit=29, tile_tokens="off")) is None


def test_there_are_no_tiles_where_nothing_is_recomputed_or_on_a_cpu() -> None:
    kept = long_request(gpu_memory_limit=29, use_offload=False, recompute=Recompute.NONE)
    on_cpu = request_of(find_published_shape("7b"), Machine(2), **LONG)

    assert (tile_tokens(kept), tile_tokens(on_cpu)) == (None, None)


def test_tiles_come_before_more_rounds() -> None:
    asked = {"gpu_memory_limit": 40, "num_rounds": None}
    whole, tiled = (resolve_auto(long_request(tile_tokens=word, **asked)) for word in ("off", "auto"))

    assert tiled.candidate.num_rounds is not None
    assert whole.candidate.num_rounds is not None
    assert tiled.candidate.num_rounds < whole.candidate.num_rounds


def test_a_layer_that_was_measured_larger_than_its_estimate_is_refused_with_the_tiles_that_fit() -> None:
    request = long_request(gpu_memory_limit=29, resident_stages="0")
    whole = estimated_layer(request)
    larger = LayerBytes(whole.saved_activations * 2, whole.peak * 2)

    message = refusal_by(lambda: fit_plan(request, layer=larger))
    assert re.search(r"^  --tile_tokens 32768 +\d", message, re.MULTILINE)


def test_a_layer_in_tiles_takes_what_attention_needs_and_a_tile() -> None:
    shape, tokens = find_published_shape("7b"), 2**20
    hidden, heads = 4096, 32

    one, two = (estimate_layer(2, shape, tokens, compiled=True, tile_tokens=tile) for tile in (4096, 8192))

    # By hand, within attention's backward: query, key and value with their gradients, attention's result with its
    # gradient, and the input's gradient; in fp32 the sum of the queries' gradients, and two numbers per head.
    within = tokens * (2 * (6 + 2 + 1) * hidden + 4 * (hidden + 2 * heads))
    assert one.recomputed_peak == two.recomputed_peak == pytest.approx(within, rel=1e-3)
    assert (one.saved_activations, one.peak) == (two.saved_activations, two.peak)
    assert one.peak > 2 * one.recomputed_peak


def test_only_stages_that_recompute_run_in_tiles() -> None:
    size = MicrobatchBytes(activation=0, layer=LayerBytes(100, 150, 30), loss=0, embedding=0)
    plan = long_request(num_rounds=1, num_chunks=1, batch_size=1).plan

    recomputing, keeping = (find_peak(plan.with_memory_uses([MemoryUse(0, kept, 2)] * 4), 0, size) for kept in (0, 1))

    assert recomputing == LiveMemory(work=30)
    assert keeping.saved_activations == 100 * len(plan.cuts[plan.local_stages(0)[-1]].layers)
    assert keeping.work == 50
