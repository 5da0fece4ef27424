"""Packed rows cost attention within their documents only, and backward a little memory for each document."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.plan_requests import estimate_gpu_memory, request_of

from mobius.config.config import Dtype
from mobius.planner import gpu_specs
from mobius.planner.gpu_specs import GPU_SPECS, estimate_profile
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.peak_memory import LayerBytes, document_bytes
from mobius.planner.profile import LayerSeconds
from mobius.planner.rates import estimated_profile
from mobius.planner.request import Machine
from mobius.planner.solver import PlanResult, choose_candidate, resolve_auto, solve
from mobius.schedule.packed_rows import PackedRows
from mobius.schedule.partition import ModelShape


@pytest.fixture
def seven(llama_7b: ModelShape) -> ModelShape:
    """Llama-2-7B with its 32 heads of 128."""
    return replace(llama_7b, num_heads=32, head_size=128)


def layer_of(
    shape: ModelShape, *, seq_length: int, attention_length: float | None = None, tokens: int = 8192
) -> LayerSeconds:
    profile = estimate_profile(
        GPU_SPECS["H200"],
        shape,
        microbatch_tokens=tokens,
        seq_length=seq_length,
        num_ranks=4,
        attention_length=attention_length,
    )
    return profile.layer_kinds[0]


def test_a_row_that_is_measured_has_equal_documents_about_as_long_as_the_runs() -> None:
    assert PackedRows(60.0, 40).typical_row(512) == (57,) * 8 + (56,)
    assert PackedRows(60.0, 4).typical_row(512) == (128,) * 4
    assert PackedRows(512.0, 40).typical_row(512) == (512,)
    assert PackedRows(700.0, 40).typical_row(512) == (512,)
    assert PackedRows(0.4, 40).typical_row(3) == (1, 1, 1)


def test_a_layers_seconds_are_those_of_attention_within_documents(
    llama_7b: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_specs, "PACKED_COST", 1.0)
    full = layer_of(llama_7b, seq_length=4096)
    seconds = [layer_of(llama_7b, seq_length=4096, attention_length=each).forward for each in (4096.0, 700.0, 50.0)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == full.forward
    # By hand, per token: 2 x 202,383,360 for the parameters, 2 x 4096 for each token of the document.
    assert seconds[1] / seconds[0] == pytest.approx((404_766_720 + 8192 * 700) / (404_766_720 + 8192 * 4096))


def test_layers_over_packed_rows_alone_take_their_kernels_share_more(
    llama_7b: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = layer_of(llama_7b, seq_length=512)
    monkeypatch.setattr(gpu_specs, "PACKED_COST", 1.04)
    assert layer_of(llama_7b, seq_length=512) == full
    assert layer_of(llama_7b, seq_length=512, attention_length=512).forward == pytest.approx(1.04 * full.forward)


def test_a_request_estimates_by_the_length_of_its_documents(llama_7b: ModelShape) -> None:
    request = request_of(llama_7b, packed=PackedRows(60.0, 16))
    profile = estimated_profile(request)
    assert profile is not None
    assert profile.layer_kinds[0] == layer_of(llama_7b, tokens=8 * 512, seq_length=512, attention_length=60.0)
    assert (request.attention_length, request.with_options("data", seq_length=32).attention_length) == (60.0, 32)
    assert request_of(llama_7b).attention_length == 512


def test_a_backward_takes_128_fp32_rows_for_each_document_a_row_may_hold(seven: ModelShape) -> None:
    # 8 rows of 16 documents: 128 x 128 rows of 32 heads, each of 128 gradients and one sum of four bytes.
    assert document_bytes(seven, 8 * 16) == 128 * 128 * (32 * 128 + 32) * 4 == 270_532_608
    one, packed = (request_of(seven, packed=facts) for facts in (None, PackedRows(60.0, 16)))
    assert packed.microbatch_documents == 128
    assert estimated_layer(packed).peak - estimated_layer(one).peak == 270_532_608
    assert estimated_layer(packed).saved_activations == estimated_layer(one).saved_activations


def test_heads_that_are_wider_than_the_hidden_state_take_their_own_width(llama_7b: ModelShape) -> None:
    assert document_bytes(llama_7b, 1) == 128 * 4096 * 4  # nothing is known of heads
    assert document_bytes(replace(llama_7b, num_heads=24, head_size=256), 1) == 128 * (24 * 256 + 24) * 4


def test_only_variable_length_attention_takes_more_memory(seven: ModelShape) -> None:
    packed = PackedRows(60.0, 16)
    assert request_of(seven, packed=packed, dtype=Dtype.FP32).microbatch_documents == 0
    assert request_of(seven, Machine(4), packed=packed).microbatch_documents == 0
    assert request_of(seven).microbatch_documents == 0


def test_every_rank_has_the_steps_positions_and_bounds(seven: ModelShape) -> None:
    one, packed = (request_of(seven, packed=facts, resident_stages="0") for facts in (None, PackedRows(60.0, 16)))
    for rank in range(4):
        before, after = (
            estimate_gpu_memory(each, each.plan, rank=rank, layer=LayerBytes(1, 1)) for each in (one, packed)
        )
        # Four bytes for each of 64 x 512 positions and 64 x 16 documents.
        assert after.libraries - before.libraries == 4 * 64 * (512 + 16)
        assert after.total - before.total == 4 * 64 * (512 + 16)


def ask(shape: ModelShape, packed: PackedRows | None, **options: object) -> PlanResult:
    request = request_of(shape, packed=packed, **options)
    return solve(request, layer=estimated_layer(request))


def test_a_step_over_short_documents_is_shorter_and_its_mfu_counts_what_they_need(seven: ModelShape) -> None:
    options: dict[str, object] = {"seq_length": 4096, "batch_size": 8, "use_offload": False}
    full, packed = (ask(seven, facts, **options) for facts in (None, PackedRows(700.0, 32)))
    assert 0.88 < packed.step_seconds / full.step_seconds < 0.97
    # By hand: 6 x 6.607e9 parameters without the embedding, and attention's 6 x 32 x 4096 x 700, per token.
    operations = (6 * 6.607e9 + 6 * 32 * 4096 * 700) * 8 * 4096
    assert packed.mfu == pytest.approx(operations / packed.step_seconds / (4 * 989e12), rel=1e-3)


@pytest.mark.extended  # a quarter of a minute of searches
def test_auto_chooses_for_the_documents_and_remembers_them(seven: ModelShape) -> None:
    packed = PackedRows(700.0, 32)
    chosen = choose_candidate(request_of(seven, packed=packed, num_stages=None, num_chunks=None, gpu_memory_limit=24.0))
    assert chosen.request.packed == packed
    assert chosen.request.with_pipeline(use_offload=False).packed == packed


@pytest.mark.parametrize(
    ("mean", "is_as_measured"), [pytest.param(60.0, True, marks=pytest.mark.extended), (256.0, True), (400.0, False)]
)
def test_measured_slices_that_hold_the_documents_have_attended_over_them(
    seven: ModelShape, mean: float, is_as_measured: bool
) -> None:
    """A measured row has documents of that mean; longer than the slice, its tokens attended over less than they do."""
    request = resolve_auto(request_of(seven, packed=PackedRows(mean, 16), num_slices=2, num_rounds=1))
    estimate = estimated_profile(request)
    assert estimate is not None
    measured = replace(estimate, attention_length=None)

    found = solve(request, layer=estimated_layer(request), profile=measured).profile

    assert found is not None
    assert (found.layer_kinds == measured.layer_kinds) is is_as_measured
    assert found.layer_kinds[0].forward >= measured.layer_kinds[0].forward
