"""Replicas in words: how a step is shared, and what more of them would change of memory that is too small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mobius.planner.memory_estimates import Remedy, estimate_host_memory
from mobius.planner.request import PlanRequest
from mobius.schedule.plan import Plan

MOST_NODES = 64
"""Nodes that a refusal looks at."""


def describe_replicas(request: PlanRequest) -> str:
    """One line: how many pipelines there are, where they are, and what each has of a step."""
    machine, rows = request.machine, request.config.pipeline.batch_size
    where = f"{machine.replicas_per_node} on each of {machine.num_nodes} node(s)"
    return (
        f"{machine.num_replicas} replicas of a pipeline of {machine.num_ranks} rank(s), {where}: each plays "
        f"{request.rows} of {rows} rows of a step, and updates 1/{machine.num_replicas} of each stage"
    )


def more_nodes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """Requests with more nodes that share the step, and what is typed for it; none where there is one pipeline."""
    machine, chunks = request.machine, request.num_chunks or 1
    if machine.num_replicas == 1:
        return
    for nodes in range(machine.num_nodes + 1, MOST_NODES + 1):
        replicas = nodes * machine.replicas_per_node
        if request.config.pipeline.batch_size % (replicas * chunks) == 0:
            yield (
                f"--nnodes {nodes}",
                replace(request, machine=replace(machine, num_nodes=nodes, num_replicas=replicas)),
            )


def nodes_as_remedies(request: PlanRequest, plan: Plan) -> Iterator[Remedy]:
    """Host bytes of a pipeline of `plan` with more nodes."""
    for options, changed in more_nodes(request):
        yield Remedy(options, estimate_host_memory(changed, plan).total)
