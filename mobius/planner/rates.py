"""Seconds and rates with which a request is planned: estimated from data sheets, or measured on this machine."""

from __future__ import annotations

from dataclasses import replace

from mobius.config.config import Dtype, split_names
from mobius.errors import PlanError
from mobius.planner.gpu_specs import (
    GIGA,
    GPU_SPECS,
    LayerEstimate,
    check_matmul_dtype,
    estimate_profile,
    with_attention_length,
)
from mobius.planner.profile import DiskRates, Profile, ReplicaRates, with_frozen
from mobius.planner.request import PlanRequest


def profile_for(request: PlanRequest, measured: Profile | None) -> Profile | None:
    """Return the profile with which a request is planned, including the rates of its disks, if they are known."""
    profile, disks, given = _profile_for(request, measured), request.machine.disks, request.config.planning.disk_rates
    if given:
        number = len(split_names(request.config.pipeline.offload_states_to))
        disks = DiskRates(given[0], given[1], at_once=next(iter(given[2:]), None)).times(number * GIGA)
    if profile is None or disks is None or request.memory_rules.disks is None:
        return profile
    return replace(profile, disks=disks.times(1 / request.machine.replicas_per_node))


def _profile_for(request: PlanRequest, measured: Profile | None) -> Profile | None:
    """Return the measured profile, adapted to `request`, or else an estimate; None if the device is not known.

    The link between replicas is estimated if it was not measured, and attention's seconds are scaled to the length of
    the documents. Raises PlanError if the profile was measured for another microbatch, model or number of ranks.
    """
    if measured is None:
        return estimated_profile(request)
    given = (measured.num_ranks, measured.microbatch_tokens, len(measured.kind_of_layer))
    wanted = (request.machine.num_ranks, request.microbatch_tokens, request.shape.num_layers)
    if given != wanted:
        parts = "ranks, tokens of a microbatch and layers"
        raise PlanError(f"the profile is of another run: its {parts} are {given}, and here {wanted}.")
    if measured.replicas is None:
        measured = replace(measured, replicas=_replica_rates(request, measured))
    length = request.attention_length
    # Packed rows: the mean length of the measured documents; otherwise the length of a slice.
    own = measured.attention_length or min(length, request.slice_length)
    if request.plan.num_slices == 1 or measured.attention_length == length:
        return measured
    card, is_packed, estimate = request.gpu_spec, request.packed is not None, None
    if card is not None:
        estimate = LayerEstimate(card, request.shape, is_packed=is_packed, compiled=request.compiles)
    return with_attention_length(measured, request.shape, measured_length=own, length=length, estimate=estimate)


def estimated_profile(request: PlanRequest) -> Profile | None:
    """Return the estimate for one pipeline on the machine of `request`; None if the machine's GPU is not known.

    Pipelines on the same machine share its host memory bandwidth.
    """
    machine, gpu_spec = request.machine, request.gpu_spec
    if gpu_spec is None:
        return None
    check_matmul_dtype(request.config.model.matmul_dtype, gpu_spec.name, gpu_spec.matmul_dtypes)
    gpu_spec = gpu_spec.at(machine.product_share)
    if not machine.has_peer_copies:
        gpu_spec = replace(gpu_spec, has_peer_copies=False, nvlink=0.0)
    profile = estimate_profile(
        gpu_spec,
        request.shape,
        microbatch_tokens=request.microbatch_tokens,
        seq_length=request.config.data.seq_length,
        num_ranks=machine.num_ranks,
        host=replace(machine.host, bandwidth=machine.host.bandwidth / machine.replicas_per_node),
        compiled=request.compiles,
        attention_length=None if request.packed is None else request.attention_length,
        states=request.config.optim.optimizer_states,
    )
    profile = replace(profile, loss=profile.loss * request.config.objective.head_work)
    profile = with_frozen(profile, request.shape, gpu_spec.memory_rate)
    profile = LayerEstimate(gpu_spec, request.shape, compiled=request.compiles).with_eight_bit(profile)
    return replace(profile, replicas=_replica_rates(request, profile))


def reference_profile(request: PlanRequest) -> Profile:
    """Return an estimate with which plans are compared; for an unknown device, the estimate for another machine."""
    known = estimated_profile(request)
    if known is not None:
        return known
    machine = replace(request.machine, gpu_spec=request.machine.gpu_spec or GPU_SPECS["H200"])
    reference = estimated_profile(replace(request.with_options("model", dtype=Dtype.BF16), machine=machine))
    assert reference is not None, "the machine has a known card"
    return reference


def _replica_rates(request: PlanRequest, profile: Profile) -> ReplicaRates | None:
    """Estimate rates between replicas: of the nodes' link, or of messages within one node; None for one pipeline."""
    machine, messages = request.machine, profile.messages
    if machine.num_replicas == 1:
        return None
    if machine.num_nodes == 1:
        return ReplicaRates(machine.num_ranks * messages.bandwidth, messages.bandwidth, messages.is_through_host)
    rate = machine.node_link * GIGA * machine.replica_bytes_per_link
    return ReplicaRates(rate, rate, is_through_host=True)
