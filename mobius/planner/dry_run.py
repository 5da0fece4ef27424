"""The answer before the run (`--dry_run`), printed: the plan, its bytes, its predicted step, what could be better."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from contextlib import suppress
from operator import itemgetter

import torch
from transformers import PretrainedConfig

from mobius.config.config import Config, Dtype, MatmulDtype
from mobius.distributed.device_order import device_names, order_devices
from mobius.errors import MobiusError
from mobius.models.blocks import ModelParts
from mobius.planner.forecast import make_forecast
from mobius.planner.memory_estimates import estimated_layer
from mobius.planner.plan_table import describe_details
from mobius.planner.solver import PlanResult, solve
from mobius.planner.step_prediction import predict_step_seconds
from mobius.ranks import Ranks, visible_devices
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

WORTHWHILE_GAIN = 0.03
"""Least share of a step's tokens per second for which an option that changes rounding is mentioned."""


def run_dry(config: Config, ranks: Ranks, *, given: Collection[str] | None = None) -> bool:
    """Print what a run would do and save its plan to `--plan_output`, if that is given; whether it fits.

    `given` are the options that the user set; None: all of them. Raises MobiusError for what cannot be planned at all.
    """
    if not ranks.is_first:
        return True
    own = make_forecast(config, ranks, given=given)
    found = own.found
    logger.info("%s", own.verdict)
    for each in own.refusals:
        logger.error("does not fit: %s", each)
    if found is None:
        return False
    if own.fits and (name := config.planning.plan_output) is not None:
        own.save(name)
        logger.info("  plan         saved to %s; train by it with --plan %s", name, name)
    logger.info("")
    if not own.machine.on_cpu:
        _log_devices(config, own.machine.num_ranks)
    for lines in (
        *describe_details(found, own.available),
        *describe_spread_head(found),
        *describe_products(found, own.model.config),
    ):
        logger.info("%s", lines)
    return own.fits


def describe_spread_head(found: PlanResult) -> list[str]:
    """Say what `--spread_head` would bring to a depth-first plan, with the same numbers; nothing if that is little."""
    request, plan = found.request, found.plan
    if found.profile is None or plan.num_ranks == 1 or plan.spreads_head or not plan.is_depth_first:
        return []
    try:
        other = solve(request.with_pipeline(spread_head=True), layer=found.layer, profile=found.profile)
    except MobiusError:
        return []
    gain = found.step_seconds / other.step_seconds - 1
    host = format_bytes(other.host_estimate.total)
    text = f"with --spread_head: {other.step_seconds:.3f} s, {100 * gain:.1f} % more tokens/s, {host} of host memory"
    return [text] if gain >= WORTHWHILE_GAIN else []


def describe_products(found: PlanResult, model: PretrainedConfig) -> list[str]:
    """Compare a step in bf16 with those of as many stages and microbatches in the card's other formats of products.

    No plan is searched for: theirs is this one, or the best one by a bound. A search ends within 5 % of it.
    """
    request, config, seconds = found.request, found.request.config, dict[MatmulDtype, float]()
    is_bf16 = (config.model.dtype, config.model.matmul_dtype) == (Dtype.BF16, MatmulDtype.BF16)
    if found.profile is None or request.gpu_spec is None or not is_bf16:
        return []
    for each in request.gpu_spec.matmul_dtypes[1:]:
        shape = ModelParts(model, torch.device("cpu"), adapters=config.adapters, matmul_dtype=each).shape()
        for given in (None, found.plan):
            with suppress(MobiusError):  # with copies of resident stages it may not fit
                asked = request.with_products(each, shape)
                other = solve(asked, layer=estimated_layer, given=given, is_preliminary=True)
                assert other.profile is not None
                found_seconds = predict_step_seconds(other.plan, other.request, other.profile)
                seconds[each] = min(found_seconds, seconds.get(each, math.inf))
    if not seconds:
        return []
    (first, least), *others = sorted(seconds.items(), key=itemgetter(1))
    rest = [f"{each} {number:.3f}" for each, number in (*others, (config.model.matmul_dtype, found.step_seconds))]
    return [f"--matmul_dtype {first} would take {least:.3f} s per step ({', '.join(rest)})"]


def _log_devices(config: Config, num_ranks: int) -> None:
    """Say which GPU every rank would get, if it is for those that are here."""
    if config.planning.card is not None or torch.cuda.device_count() < num_ranks:
        return
    order = order_devices(config, num_ranks, None)
    names = device_names(visible_devices(), num_ranks)
    logger.info("GPUs of ranks 0 to %d: %s", num_ranks - 1, ", ".join(names[index] for index in order))
