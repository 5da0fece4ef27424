"""Plans `--num_stages auto` again by what is measured on the machine, once the ranks have met.

It measures nothing itself (measure.py), keeps nothing (profile_cache.py) and decides nothing (blueprint.py). The number
of microbatches stays what the estimate chose: what is measured, and what the transport is made for, has their shape.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from mobius.optim.kernel import load_kernel
from mobius.planner.profile import Profile
from mobius.ranks import allows_peer_copies, cache_folder
from mobius.runtime.devices import optimizer_threads
from mobius.runtime.transport import Transport
from mobius.training.auto import check_agreement
from mobius.training.blueprint import Blueprint, redraw
from mobius.training.measure import MicrobatchShape, measure_profile
from mobius.training.profile_cache import cached_profile, profile_key, profile_path

logger = logging.getLogger(__name__)


def plan_by_measurement(blueprint: Blueprint, transport: Transport) -> Blueprint:
    """The plan that is to be run, on which all ranks agree; collective.

    It is `blueprint` unless the number of stages was left to us and there are GPUs: then they are measured, or read
    from the cache, and the run is planned again. Call it before the stages take memory. Raises PlanError if the ranks
    disagree, and what `draw_blueprint` does.
    """
    check_agreement(blueprint.plan, transport)
    if not is_to_be_measured(blueprint):
        return blueprint
    planned = redraw(blueprint, measured_profile(blueprint, transport))
    check_agreement(planned.plan, transport)
    return planned


def is_to_be_measured(blueprint: Blueprint) -> bool:
    """Whether what a measurement tells has a choice to make that is worth its seconds."""
    return blueprint.device.type == "cuda" and blueprint.asked.pipeline.num_stages is None


def measured_profile(blueprint: Blueprint, transport: Transport) -> Profile:
    """The profile of this machine for the run's model and microbatches; collective.

    Takes less than 30 s where it is not cached, and gives all memory back.
    """
    pipeline, config = blueprint.config.pipeline, blueprint.config
    shape = MicrobatchShape(
        pipeline.microbatch_size, config.data.seq_length, blueprint.dtype, pipeline.loss_chunk_tokens
    )
    key = profile_key(
        blueprint.shape,
        shape,
        device=blueprint.device,
        num_ranks=transport.num_ranks,
        is_compiled=blueprint.compiles,
        has_peer_copies=allows_peer_copies(),
    )
    path = profile_path(cache_folder() / "profiles", key)
    return cached_profile(path, partial(_measure, blueprint, shape, transport), transport)


def _measure(blueprint: Blueprint, shape: MicrobatchShape, transport: Transport) -> Profile:
    start = time.perf_counter()
    profile = measure_profile(
        blueprint.parts,
        shape,
        device=blueprint.device,
        transport=transport,
        kernel=load_kernel(cache_folder(), num_threads=optimizer_threads(blueprint.ranks.num_ranks)),
        messages_through_host=not allows_peer_copies(),
    )
    logger.info("measured in %.0f s, for auto: %s", time.perf_counter() - start, profile.describe())
    return profile
