"""Plans a run on GPUs again by what is measured on the machine, once the ranks have met.

What the host does is looked at in every run that streams and whose plan is not given, for a second or two; layers and
everything else only for `--num_stages auto`, where that has a choice to make, and are kept for the next one. A run that
measures everything has looked at the host by that. The number of microbatches stays what the estimate chose: what is
measured, and what the transport is made for, has their shape.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace
from functools import partial

import torch

from mobius.errors import PlanError
from mobius.machine.devices import optimizer_threads
from mobius.measuring.bench import Bench
from mobius.measuring.host_rates import measure_host_rates, with_host_rates
from mobius.measuring.measure import MicrobatchShape, measure_launches, measure_profile
from mobius.measuring.profile_cache import cached_profile, profile_key, profile_path
from mobius.messages.transport import Transport
from mobius.optim.kernel import AdamWKernel, load_kernel
from mobius.plan.cards import action_launch
from mobius.plan.plan import Plan
from mobius.plan.profile import Profile
from mobius.planning.blueprint import Blueprint, redraw
from mobius.ranks import allows_peer_copies, cache_folder

logger = logging.getLogger(__name__)

DIGEST_BITS = 20


def plan_by_measurement(blueprint: Blueprint, transport: Transport) -> Blueprint:
    """The plan that is to be run, on which all ranks agree; collective.

    It is `blueprint` where nothing is measured: on CPUs, with `--plan`, in a run that goes on by its checkpoint's plan,
    and where everything stays on GPUs of a known speed. Call it before the stages take memory. Raises PlanError if the
    ranks disagree, and what `draw_blueprint` does.
    """
    check_agreement(blueprint.plan, transport)
    profile, is_new = blueprint.answer.profile, False
    if is_to_be_measured(blueprint):
        profile, is_new = measured_profile(blueprint, transport)
    if profile is not None and not is_new and is_host_to_be_measured(blueprint):
        profile = _with_host(profile, blueprint, transport)
    if profile is blueprint.answer.profile or profile is None:
        return blueprint
    planned = redraw(blueprint, profile)
    check_agreement(planned.plan, transport)
    return planned


def is_to_be_measured(blueprint: Blueprint) -> bool:
    """Whether layers are measured, as `PlanRequest.measures_layers` says."""
    return blueprint.place.device.type == "cuda" and blueprint.answer.request.measures_layers


def is_host_to_be_measured(blueprint: Blueprint) -> bool:
    """Whether the host is looked at, as `PlanRequest.measures_host` says: not for a plan that is a checkpoint's."""
    may_change = blueprint.place.device.type == "cuda" and not blueprint.is_given
    return may_change and blueprint.answer.request.measures_host


def measured_profile(blueprint: Blueprint, transport: Transport) -> tuple[Profile, bool]:
    """The profile of this machine for the run's model and microbatches, and whether it was measured now; collective.

    Takes less than 30 s where it is not cached, and gives all memory back.
    """
    shape = _microbatch(blueprint)
    key = profile_key(
        blueprint.shape,
        shape,
        device=blueprint.place.device,
        num_ranks=transport.num_ranks,
        is_compiled=blueprint.answer.request.compiles,
        has_peer_copies=allows_peer_copies(),
    )
    path = profile_path(cache_folder() / "profiles", key)
    return cached_profile(path, partial(_measure, blueprint, shape, transport), transport)


def _with_host(profile: Profile, blueprint: Blueprint, transport: Transport) -> Profile:
    """`profile` with what the host does now: its copies, its updates, and how fast it enqueues a layer."""
    start = time.perf_counter()
    launch = measure_launches(Bench(blueprint.place.device, transport), blueprint.parts, _microbatch(blueprint))
    rates = measure_host_rates(
        blueprint.dtype, device=blueprint.place.device, transport=transport, kernel=_kernel(blueprint)
    )
    logger.info(
        "host measured in %.1f s: %.2f billion updates per second and rank, or %.2f beside copies of %.0f GB/s each "
        "way, which alone do %.0f; a layer is enqueued in %.2f ms forward, %.2f backward, %.2f with recompute",
        time.perf_counter() - start,
        rates.updates / 1e9,
        rates.updates_beside_copies / 1e9,
        rates.copies_beside_updates / 1e9,
        rates.copies_each_way / 1e9,
        *(1e3 * seconds for seconds in (launch.forward, launch.backward, launch.recomputed_backward)),
    )
    return replace(with_host_rates(profile, rates), launch=launch, action_launch=action_launch(launch))


def _microbatch(blueprint: Blueprint) -> MicrobatchShape:
    batch, tokens, _ = blueprint.message_shape
    return MicrobatchShape(
        batch,
        tokens,
        blueprint.dtype,
        blueprint.config.pipeline.loss_chunk_tokens,
        blueprint.answer.request.packed,
        blueprint.tile_tokens,
    )


def _kernel(blueprint: Blueprint) -> AdamWKernel | None:
    return load_kernel(cache_folder(), num_threads=optimizer_threads(blueprint.place.ranks.num_local))


def _measure(blueprint: Blueprint, shape: MicrobatchShape, transport: Transport) -> Profile:
    start = time.perf_counter()
    profile = measure_profile(
        blueprint.parts,
        shape,
        device=blueprint.place.device,
        transport=transport,
        kernel=_kernel(blueprint),
        messages_through_host=not allows_peer_copies(),
    )
    logger.info("measured in %.0f s, for auto: %s", time.perf_counter() - start, profile.describe())
    return profile


def check_agreement(plan: Plan, transport: Transport) -> None:
    """Raise PlanError if the ranks have cut the model or the batch differently; collective."""
    facts = repr((plan.num_microbatches, plan.num_slices, plan.num_rounds, plan.cuts)).encode()
    own = int(hashlib.sha256(facts).hexdigest(), 16) % 2**DIGEST_BITS
    # All are equal if and only if their variance is 0; the numbers are small enough to be exact.
    everyone = transport.everyone
    sums = everyone.sum_over_ranks(torch.tensor([own, own * own], dtype=torch.float64)).tolist()
    if everyone.num_ranks * int(sums[1]) != int(sums[0]) ** 2:
        raise PlanError(
            "the ranks came to different plans, so their GPUs or CPUs differ. Give the numbers instead of auto: "
            f"--num_stages {plan.num_stages} --num_chunks {plan.num_chunks} --num_slices {plan.num_slices} "
            f"--num_rounds {plan.num_rounds} "
            f"(rank {everyone.rank}'s)."
        )
