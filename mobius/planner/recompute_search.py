"""Chooses by simulation what stages keep from forward to backward, among plans that fit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from mobius.config.config import Recompute
from mobius.planner.fit import fit_plan, levels_to_try, max_saving_attention
from mobius.planner.memory_policy import (
    ALIKE,
    WORTH,
    closed_form_score,
    fits_host,
    policy_by_score,
    policy_by_simulation,
)
from mobius.planner.offload_search import with_offloaded_microbatches
from mobius.planner.peak_memory import LayerBytes
from mobius.planner.profile import Profile
from mobius.planner.request import PlanRequest
from mobius.planner.step_prediction import predict_min_step_seconds, predict_step_seconds
from mobius.schedule.plan import Plan, RecomputeLevel


@lru_cache(maxsize=8)  # what is chosen for auto is then asked for by its numbers
def fit_by_simulation(
    request: PlanRequest, layer: LayerBytes | None, profile: Profile, to_beat: float = math.inf
) -> Plan:
    """The fastest plan by simulation of what may be kept; arguments and errors as in `fit_plan`.

    What does not promise to beat `to_beat` seconds, those of a plan with other numbers, is not looked at closely.
    """
    plans = list[Plan]()
    if (request.num_slices or 1) > 1:
        return _sliced_by_simulation(request, layer, profile)
    for level in levels_to_try(request, layer):
        if plans and len(plans[0].saved_activation_stages) == len(plans[0].resident) == plans[0].num_stages:
            break  # nothing is left to gain
        # What a refusal advises is of the request as it was asked.
        asked = request if level is request.plan.recompute_level else replace(request, recompute_level=level)
        plan = fit_plan(asked, layer=layer, policy=policy_by_simulation(profile, to_beat))
        # The level of a plan that keeps nothing says nothing.
        plans.append(plan if plan.saved_activation_stages else replace(plan, recompute_level=RecomputeLevel.NONE))
    plans = [plan for plan in plans if fits_host(request, plan)] or plans
    best, *others = plans
    for plan in others:
        if predict_min_step_seconds(plan, request, profile) < to_beat * (1 - WORTH):
            now = predict_step_seconds(best, request, profile)
            if predict_step_seconds(plan, request, profile) < now * (1 - ALIKE):
                best = plan
    return with_offloaded_microbatches(request, best, layer=layer, profile=profile)


def _sliced_by_simulation(request: PlanRequest, layer: LayerBytes | None, profile: Profile) -> Plan:
    """The fastest plan of slices: as many stages keep attention's results as there is room for, or none do."""
    asked = fit_plan(request, layer=layer, policy=policy_by_simulation(profile))
    if request.recompute is not Recompute.AUTO or request.num_saving_attention is not None:
        return asked
    most = max_saving_attention(request, layer=layer, policy=policy_by_score(closed_form_score(request, profile)))
    if most == 0:
        return asked
    keeping = fit_plan(replace(request, num_saving_attention=most), layer=layer, policy=policy_by_simulation(profile))
    if not fits_host(request, keeping):
        return asked
    return min((asked, keeping), key=lambda plan: predict_step_seconds(plan, request, profile))
