"""Single changes of a run that would let it fit into the host's memory, for refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from mobius.config.config import ActivationOffloading
from mobius.errors import GpuMemoryError
from mobius.plan.budget import Remedy
from mobius.plan.choice import Answer, answer, settle
from mobius.plan.replicas.told import nodes_as_remedies
from mobius.plan.request import PlanRequest


def host_remedies(found: Answer) -> Iterator[Remedy]:
    """Host bytes of a pipeline where one thing that was asked for is left to the planner, then with more nodes."""
    if found.request.config.planning.plan is None:
        for option, changed in _left_open(found.request):
            with suppress(GpuMemoryError):
                again = answer(settle(changed), layer=found.layer, is_preliminary=True)
                yield Remedy(f"{option} auto", again.host.total)
    yield from nodes_as_remedies(found.request, found.plan)


def _left_open(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    pipeline = request.config.pipeline
    request = replace(request, num_rounds=pipeline.num_rounds)
    if pipeline.num_rounds is not None:
        yield "--num_rounds", replace(request.with_pipeline(num_rounds=None), num_rounds=None)
    if pipeline.resident_stages != "auto":
        yield "--resident_stages", request.with_pipeline(resident_stages="auto")
    if pipeline.activation_offloading is ActivationOffloading.ON:
        yield "--activation_offloading", request.with_pipeline(activation_offloading=ActivationOffloading.AUTO)
