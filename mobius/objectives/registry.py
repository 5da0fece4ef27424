"""Finds the objective that the options name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from mobius.config.objective import ObjectiveConfig, ObjectiveName
from mobius.objectives.cross_entropy import CrossEntropy
from mobius.objectives.distillation import Distillation
from mobius.objectives.kto import make_kto
from mobius.objectives.objective import Objective
from mobius.objectives.policy import make_policy
from mobius.objectives.preference import DirectPreference, OddsRatio, SimplePreference
from mobius.objectives.reward import RewardModel

OBJECTIVES: Final[Mapping[str, Callable[[ObjectiveConfig], Objective]]] = {
    ObjectiveName.SFT: lambda _: CrossEntropy(),
    ObjectiveName.DPO: DirectPreference,
    ObjectiveName.ORPO: OddsRatio,
    ObjectiveName.SIMPO: SimplePreference,
    ObjectiveName.KTO: make_kto,
    ObjectiveName.REWARD: RewardModel,
    ObjectiveName.POLICY: make_policy,
    ObjectiveName.DISTILL: Distillation,
}


def make_objective(config: ObjectiveConfig) -> Objective:
    """Return the objective of a run."""
    return OBJECTIVES[config.objective](config)
