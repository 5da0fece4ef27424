"""Single changes of a run that does not fit, each tried, with what it would then need.

It does not know what fits: the need of a changed request is asked of whoever knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from mobius.config.config import Recompute
from mobius.plan.budget import Remedy
from mobius.plan.fit_request import FitRequest
from mobius.plan.plan import make_plan

SMALLEST_CHUNK = 128
SEQUENCE_STEP = 64


def find_remedies(request: FitRequest, need: Callable[[FitRequest], int], available_bytes: int) -> list[Remedy]:
    """The least of each kind of change that fits, those first that cost the training least; empty if none does."""
    found = []
    for changes in (
        _recompute(request),
        _loss_chunks(request),
        _stages(request),
        _microbatches(request),
        _offload(request),
        _sequences(request),
    ):
        remedy = _first_that_fits(changes, need, available_bytes)
        if remedy is not None:
            found.append(remedy)
    return found


def _first_that_fits(
    changes: Iterable[tuple[str, FitRequest]], need: Callable[[FitRequest], int], available_bytes: int
) -> Remedy | None:
    for options, changed in changes:
        num_bytes = need(changed)
        if num_bytes <= available_bytes:
            return Remedy(options, num_bytes)
    return None


def _recompute(request: FitRequest) -> Iterator[tuple[str, FitRequest]]:
    if request.recompute is Recompute.NONE:
        yield "--recompute full", replace(request, recompute=Recompute.FULL)


def _loss_chunks(request: FitRequest) -> Iterator[tuple[str, FitRequest]]:
    chunk = min(request.tokens.loss_chunk, request.tokens.microbatch) // 2
    while chunk >= SMALLEST_CHUNK:
        yield f"--loss_chunk_tokens {chunk}", replace(request, tokens=replace(request.tokens, loss_chunk=chunk))
        chunk //= 2


def _stages(request: FitRequest) -> Iterator[tuple[str, FitRequest]]:
    """More stages are smaller ones; where all stay, nothing gets smaller by them."""
    plan, shape = request.plan, request.shape
    if plan.num_slots is None:
        return
    for number in range(plan.num_stages + plan.num_ranks, shape.num_layers + 1, plan.num_ranks):
        cut = make_plan(
            shape,
            num_ranks=plan.num_ranks,
            num_stages=number,
            num_microbatches=plan.num_microbatches,
            num_slots=plan.num_slots,
        )
        waits_for_all = len(request.waiting) == plan.num_stages
        ends = frozenset((0, number - 1)) if request.waiting else frozenset[int]()
        waiting = frozenset(range(number)) if waits_for_all else ends
        yield f"--num_stages {number}", replace(request, plan=cut, waiting=waiting)


def _microbatches(request: FitRequest) -> Iterator[tuple[str, FitRequest]]:
    batch, now = request.tokens.batch_size or 0, request.plan.num_microbatches
    for number in range(now + 1, batch + 1):
        if batch % number == 0:
            tokens = replace(request.tokens, microbatch=request.tokens.step // number)
            plan = replace(request.plan, num_microbatches=number)
            yield f"--num_chunks {number}", replace(request, tokens=tokens, plan=plan)


def _offload(request: FitRequest) -> Iterator[tuple[str, FitRequest]]:
    """Stream all stages; activations are then recomputed."""
    plan = request.plan
    if plan.num_slots is None:
        streamed = plan.with_resident([0] * plan.num_ranks, 2)
        yield (
            "--use_offload --recompute auto",
            replace(request, plan=streamed, num_resident=0, recompute=Recompute.AUTO),
        )


def _sequences(request: FitRequest) -> Iterator[tuple[str, FitRequest]]:
    batch, tokens = request.tokens.batch_size or 0, request.tokens
    if batch == 0:
        return
    for length in range((tokens.step // batch - 1) // SEQUENCE_STEP * SEQUENCE_STEP, 0, -SEQUENCE_STEP):
        step = batch * length
        shorter = replace(tokens, step=step, microbatch=step // request.plan.num_microbatches)
        yield f"--seq_length {length}", replace(request, tokens=shorter)
