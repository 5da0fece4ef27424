"""A run that does not fit is told the changes that do, each tried."""

from dataclasses import replace

import pytest

from mobius.config.config import Dtype, Recompute
from mobius.errors import GpuMemoryError
from mobius.plan.budget import ByteSizes, Remedy, StepTokens
from mobius.plan.fit import fit_plan
from mobius.plan.fit_request import FitRequest
from mobius.plan.plan import make_plan
from mobius.plan.remedies import find_remedies
from mobius.plan.shape import ModelShape
from mobius.units import GIB


def request_for(shape: ModelShape, *, slots: int | None = 2, recompute: Recompute = Recompute.AUTO) -> FitRequest:
    """64 x 2048 tokens in four chunks, in eight stages on four ranks."""
    plan = make_plan(shape, num_ranks=4, num_stages=8, num_microbatches=4, num_slots=slots)
    tokens = StepTokens(64 * 2048, 16 * 2048, 8192, batch_size=64)
    return FitRequest(
        plan, shape, ByteSizes.of(Dtype.BF16), tokens, gpu_bytes=None, recompute=recompute, waiting=frozenset(range(8))
    )


def test_the_least_of_each_kind_of_change_that_fits_is_told(llama_7b: ModelShape) -> None:
    asked = []

    def need(request: FitRequest) -> int:
        asked.append(request)
        return request.tokens.microbatch + 1000 * (40 - request.plan.num_stages) + request.tokens.loss_chunk

    request = request_for(llama_7b)
    assert need(request) == 32768 + 32000 + 8192
    found = find_remedies(request, need, available_bytes=66_000)
    # By hand: 66000 - 64768 = 1232 for a loss chunk; 6960 less by stages, chunks or a shorter sequence.
    assert found == [
        Remedy("--loss_chunk_tokens 1024", 32768 + 32000 + 1024),
        Remedy("--num_stages 16", 32768 + 24000 + 8192),
        Remedy("--num_chunks 8", 16384 + 32000 + 8192),
        Remedy("--seq_length 1600", 16 * 1600 + 32000 + 8192),
    ]
    assert all(each.waiting == frozenset(range(each.plan.num_stages)) for each in asked)


def test_where_all_stays_on_the_gpu_recomputing_and_offloading_are_tried(llama_7b: ModelShape) -> None:
    request = request_for(llama_7b, slots=None, recompute=Recompute.NONE)
    found = find_remedies(request, lambda r: 1 if r.recompute is not Recompute.NONE else 100, 50)
    assert [remedy.options for remedy in found] == ["--recompute full", "--use_offload --recompute auto"]


def test_a_refusal_names_changes_that_then_fit(llama_7b: ModelShape) -> None:
    gib = 22.0
    request = replace(request_for(llama_7b), gpu_bytes=int(gib * GIB))
    with pytest.raises(GpuMemoryError, match=r"Any of these alone fits: .*--num_chunks 8 \(needs") as caught:
        fit_plan(request, rank=0)
    assert f"{gib} GiB is available" in str(caught.value)
    changed = replace(
        request,
        plan=replace(request.plan, num_microbatches=8),
        tokens=replace(request.tokens, microbatch=request.tokens.step // 8),
    )
    fit_plan(changed, rank=0)
