"""Chooses by simulation what stages keep from forward to backward, among plans that fit."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from mobius.config.config import Recompute
from mobius.plan.fit import fit_plan, levels_to_try, most_attention_kept
from mobius.plan.gpu_peak import LayerBytes
from mobius.plan.memory_use import ALIKE, by_score, by_simulation, closed_form, fits_host
from mobius.plan.plan import KeptLevel, Plan
from mobius.plan.profile import Profile
from mobius.plan.request import PlanRequest
from mobius.plan.search.products_home import with_products_home
from mobius.plan.simulation import plan_seconds


@lru_cache(maxsize=8)  # what is chosen for auto is then asked for by its numbers
def fit_by_simulation(request: PlanRequest, layer: LayerBytes | None, profile: Profile) -> Plan:
    """The fastest plan by simulation of what may be kept; arguments and errors as in `fit_plan`."""
    plans = list[Plan]()
    if (request.num_slices or 1) > 1:
        return _sliced_by_simulation(request, layer, profile)
    for level in levels_to_try(request, layer):
        if plans and len(plans[0].kept) == len(plans[0].resident) == plans[0].num_stages:
            break  # nothing is left to gain
        # What a refusal advises is of the request as it was asked.
        asked = request if level is request.plan.kept_level else replace(request, kept_level=level)
        plan = fit_plan(asked, layer=layer, choose=by_simulation(profile))
        # The level of a plan that keeps nothing says nothing.
        plans.append(plan if plan.kept else replace(plan, kept_level=KeptLevel.EVERYTHING))
    plans = [plan for plan in plans if fits_host(request, plan)] or plans
    seconds = [plan_seconds(plan, request, profile) for plan in plans]
    best = plans[0] if seconds[0] <= min(seconds) * (1 + ALIKE) else plans[seconds.index(min(seconds))]
    return with_products_home(request, best, layer=layer, profile=profile)


def _sliced_by_simulation(request: PlanRequest, layer: LayerBytes | None, profile: Profile) -> Plan:
    """The fastest plan of slices: as many stages keep attention's results as there is room for, or none do."""
    asked = fit_plan(request, layer=layer, choose=by_simulation(profile))
    if request.recompute is not Recompute.AUTO or request.num_attention_kept is not None:
        return asked
    most = most_attention_kept(request, layer=layer, choose=by_score(closed_form(request, profile)))
    if most == 0:
        return asked
    keeping = fit_plan(replace(request, num_attention_kept=most), layer=layer, choose=by_simulation(profile))
    if not fits_host(request, keeping):
        return asked
    return min((asked, keeping), key=lambda plan: plan_seconds(plan, request, profile))
