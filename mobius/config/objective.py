"""Options of the objective, which decides what a run learns from the rows of its data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from mobius.config.options import NON_NEGATIVE, POSITIVE, Bounds, Need, option


class ObjectiveName(StrEnum):
    """Objective of a run."""

    SFT = "sft"
    DPO = "dpo"
    ORPO = "orpo"
    SIMPO = "simpo"
    REWARD = "reward"


class LossType(StrEnum):
    """Loss of direct preference optimization, by TRL's names."""

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    IPO = "ipo"
    ROBUST = "robust"
    APO_ZERO = "apo_zero"


_DEFAULT_BETA: Final = {ObjectiveName.SIMPO: 2.0}
_USUAL_BETA: Final = 0.1


def _only(*names: ObjectiveName, instead: str = "") -> Need:
    """Return the need of an option that these objectives alone have."""
    text = " or ".join(f"--objective {name.value}" for name in names)
    return Need("objective", lambda o: o.objective in names, f"without {text}", instead, is_strict=True)


_OF_SAMPLES: Final = ("loss", "perplexity", "token_accuracy")
_OF_PAIRS: Final = ("loss", "rewards/accuracies", "rewards/margins")
METRICS: Final = dict.fromkeys(ObjectiveName, _OF_PAIRS) | {
    ObjectiveName.SFT: _OF_SAMPLES,
    ObjectiveName.REWARD: ("loss", "accuracy", "margin"),
}
"""Objective -> metrics that may decide which checkpoint is best."""
PREFERENCES: Final = (ObjectiveName.DPO, ObjectiveName.ORPO, ObjectiveName.SIMPO)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Objective"""

    objective: ObjectiveName = option(ObjectiveName.SFT)
    """Goal of training. sft: the targets of each sample (supervised fine-tuning). From pairs of a chosen and a rejected
    answer: dpo, with log-probabilities before step 1 as the reference; orpo and simpo, without a reference; reward, a
    model with a score in place of the next token (AutoModelForSequenceClassification)."""
    beta: float | None = option(None, POSITIVE, aliases=("pref_beta",), needs=(_only(*PREFERENCES),))
    """Strength of the preference. Default: 0.1, with simpo 2."""
    loss_type: LossType = option(LossType.SIGMOID, needs=(_only(ObjectiveName.DPO),))
    """Loss of dpo, by TRL's names and formulas."""
    label_smoothing: float = option(0.0, Bounds(minimum=0, below=0.5), needs=(_only(ObjectiveName.DPO),))
    """Share of pairs that are taken to be the wrong way round; only with loss_type robust."""
    simpo_gamma: float = option(0.5, NON_NEGATIVE, needs=(_only(ObjectiveName.SIMPO),))
    """Margin of simpo by which the chosen answer's reward exceeds the rejected one's."""
    sft_weight: float = option(
        0.0, NON_NEGATIVE, aliases=("pref_ftx",), needs=(_only(ObjectiveName.DPO, ObjectiveName.SIMPO),)
    )
    """Weight of the cross entropy of chosen answers (mean over an answer's tokens, then over pairs) that is added."""
    center_rewards: float = option(
        0.0, NON_NEGATIVE, aliases=("center_rewards_coefficient",), needs=(_only(ObjectiveName.REWARD),)
    )
    """Weight of the squared sum of both answers' rewards that is added, which keeps rewards near 0."""

    reference_model: str | None = option(None, needs=(_only(ObjectiveName.DPO),))
    """Model whose log-probabilities are the reference, of the trained model's structure and vocabulary. It is loaded in
    place of the trained model for one forward pass before step 1. Default: the model before step 1."""

    @property
    def beta_or_default(self) -> float:
        """`beta`, or the objective's default."""
        return _DEFAULT_BETA.get(self.objective, _USUAL_BETA) if self.beta is None else self.beta

    @property
    def head_work(self) -> float:
        """Work of the head as a multiple of its work in supervised fine-tuning.

        On sequences the head runs its forward once more, before the forward and the two products of backward.
        """
        return 1.0 if self.objective is ObjectiveName.SFT else 4 / 3


NO_OPTIONS: Final = ObjectiveConfig()
"""Supervised fine-tuning."""
