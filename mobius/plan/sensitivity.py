"""What limits a step: which part of the machine, made a little faster, would shorten it most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

from mobius.plan.profile import Profile

TRIED_FACTOR = 1.1


class Resource(StrEnum):
    """What a step may be limited by."""

    COMPUTE = "compute"
    PCIE = "PCIe"
    HOST_MEMORY = "host memory"
    CORES = "CPU cores"
    MESSAGES = "messages"


def with_faster(profile: Profile, resource: Resource, factor: float) -> Profile:
    """`profile` of a machine on which one thing is `factor` times as fast."""
    if resource is Resource.COMPUTE:
        kinds = tuple(
            replace(k, forward=k.forward / factor, backward=k.backward / factor,
                    recomputed_backward=k.recomputed_backward / factor)
            for k in profile.layer_kinds
        )  # fmt: skip
        return replace(profile, layer_kinds=kinds, loss=profile.loss / factor)
    copies = profile.copies
    if resource is Resource.PCIE:
        faster = replace(copies, down=copies.down * factor, up=copies.up * factor)
        return replace(profile, copies=faster)
    if resource is Resource.HOST_MEMORY:
        return replace(
            profile,
            copies=replace(
                copies,
                down_together=copies.down_together * factor,
                up_together=copies.up_together * factor,
                both_down=copies.both_down * factor,
                both_up=copies.both_up * factor,
            ),
            host_bandwidth=profile.host_bandwidth * factor,
            cpu_adamw_together=min(profile.cpu_adamw_together * factor, profile.cpu_adamw),
            cpu_adamw_beside_copies=profile.cpu_adamw_beside_copies * factor,
            copies_beside_cpu_adamw=profile.copies_beside_cpu_adamw * factor,
        )
    if resource is Resource.CORES:
        together = profile.cpu_adamw_together * factor
        return replace(profile, cpu_adamw=profile.cpu_adamw * factor, cpu_adamw_together=together)
    messages = profile.messages
    faster_messages = replace(messages, bandwidth=messages.bandwidth * factor, latency=messages.latency / factor)
    return replace(profile, messages=faster_messages)


def limiting_resource(profile: Profile, step_seconds: Callable[[Profile], float]) -> tuple[Resource, float]:
    """The resource whose 1.1-fold speed gains most, and the share of `step_seconds` that it gains (0.09 if all)."""
    now = step_seconds(profile)
    gains = {resource: 1 - step_seconds(with_faster(profile, resource, TRIED_FACTOR)) / now for resource in Resource}
    best = max(gains, key=lambda resource: gains[resource])
    return best, gains[best]
