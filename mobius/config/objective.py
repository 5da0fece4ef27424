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
    KTO = "kto"
    REWARD = "reward"
    POLICY = "policy"
    DISTILL = "distill"


class PolicyLoss(StrEnum):
    """Loss of rollouts, by TRL's names."""

    GRPO = "grpo"
    DAPO = "dapo"
    RLOO = "rloo"
    GSPO = "gspo"


class RewardScaling(StrEnum):
    """Rewards whose standard deviation divides an advantage."""

    GROUP = "group"
    BATCH = "batch"
    NONE = "none"


class Divergence(StrEnum):
    """Divergence between the distributions of teacher and student."""

    FORWARD = "forward"
    REVERSE = "reverse"
    JS = "js"


class LossType(StrEnum):
    """Loss of direct preference optimization, and of KTO, by TRL's names."""

    SIGMOID = "sigmoid"
    HINGE = "hinge"
    IPO = "ipo"
    ROBUST = "robust"
    APO_ZERO = "apo_zero"
    KTO = "kto"
    APO_ZERO_UNPAIRED = "apo_zero_unpaired"


_DEFAULT_BETA: Final = {ObjectiveName.SIMPO: 2.0}
_USUAL_BETA: Final = 0.1


def _only(*names: ObjectiveName, instead: str = "") -> Need:
    """Return the need of an option that these objectives alone have."""
    text = " or ".join(f"--objective {name.value}" for name in names)
    return Need("objective", lambda o: o.objective in names, f"without {text}", instead, is_strict=True)


_NOT_RLOO: Final = Need(
    "policy_loss", lambda o: o.policy_loss != PolicyLoss.RLOO, "with --policy_loss rloo", is_strict=True
)
_OF_SAMPLES: Final = ("loss", "perplexity", "token_accuracy")
_OF_PAIRS: Final = ("loss", "rewards/accuracies", "rewards/margins")
METRICS: Final = dict.fromkeys(ObjectiveName, _OF_PAIRS) | {
    ObjectiveName.SFT: _OF_SAMPLES,
    ObjectiveName.KTO: ("loss", "rewards/margins"),
    ObjectiveName.REWARD: ("loss", "accuracy", "margin"),
    ObjectiveName.POLICY: ("loss",),
    ObjectiveName.DISTILL: _OF_SAMPLES,
}
"""Objective -> metrics that may decide which checkpoint is best."""
PREFERENCES: Final = (ObjectiveName.DPO, ObjectiveName.ORPO, ObjectiveName.SIMPO, ObjectiveName.KTO)
_WITH_REFERENCE: Final = (ObjectiveName.DPO, ObjectiveName.KTO, ObjectiveName.POLICY)
OF_TOKENS: Final = (ObjectiveName.SFT, ObjectiveName.DISTILL)
"""Objectives on plain samples, whose tokens count each by itself."""
KTO_LOSSES: Final = (LossType.KTO, LossType.APO_ZERO_UNPAIRED)


@dataclass(frozen=True)
class ObjectiveConfig:
    """Objective"""

    objective: ObjectiveName = option(ObjectiveName.SFT)
    """Goal of training. sft: the targets of each sample (supervised fine-tuning). distill: the next tokens that another
    model expects. From pairs of a chosen and a rejected answer: dpo, compared with the model before step 1; orpo and
    simpo, without a reference; reward, a model that gives scores. From answers labelled good or bad: kto. From sampled
    completions with rewards (rollouts): policy."""
    beta: float | None = option(None, POSITIVE, aliases=("pref_beta",), needs=(_only(*PREFERENCES),))
    """Strength of the preference. Default: 0.1, with simpo 2."""
    loss_type: LossType | None = option(None, needs=(_only(ObjectiveName.DPO, ObjectiveName.KTO),))
    """Loss, by TRL's names and formulas. Default: sigmoid; with kto, kto (the other one is apo_zero_unpaired)."""
    desirable_weight: float = option(1.0, POSITIVE, needs=(_only(ObjectiveName.KTO),))
    """Factor of the loss of good answers."""
    undesirable_weight: float = option(1.0, POSITIVE, needs=(_only(ObjectiveName.KTO),))
    """Factor of the loss of bad answers."""
    label_smoothing: float = option(0.0, Bounds(minimum=0, below=0.5), needs=(_only(ObjectiveName.DPO),))
    """Share of pairs that are taken to be the wrong way round; only with loss_type robust."""
    simpo_gamma: float = option(0.5, NON_NEGATIVE, needs=(_only(ObjectiveName.SIMPO),))
    """Margin of simpo by which the chosen answer's reward exceeds the rejected one's."""
    sft_weight: float = option(
        0.0,
        NON_NEGATIVE,
        aliases=("pref_ftx",),
        needs=(_only(ObjectiveName.DPO, ObjectiveName.SIMPO, ObjectiveName.DISTILL),),
    )
    """Weight of the cross entropy that is added: of chosen answers (mean over an answer's tokens, then over pairs), or
    with distill of the targets."""
    center_rewards: float = option(
        0.0, NON_NEGATIVE, aliases=("center_rewards_coefficient",), needs=(_only(ObjectiveName.REWARD),)
    )
    """Weight of the squared sum of both answers' rewards that is added, which keeps rewards near 0."""

    reference_model: str | None = option(None, needs=(_only(ObjectiveName.DPO, ObjectiveName.KTO),))
    """Model whose log-probabilities are the reference, of the trained model's structure and vocabulary. It is loaded in
    place of the trained model for one forward pass before step 1. Default: the model before step 1."""

    policy_loss: PolicyLoss = option(PolicyLoss.DAPO, needs=(_only(ObjectiveName.POLICY),))
    """Loss of policy, by TRL's formulas. dapo: mean over all tokens of a step; grpo: over a completion's tokens, then
    over completions; gspo: grpo with one ratio for each completion, the geometric mean of its tokens' ratios; rloo: one
    ratio for each completion, the product, and advantages over the mean of the group's other rewards."""
    epsilon_low: float = option(
        0.2, Bounds(above=0, below=1), aliases=("epsilon",), needs=(_only(ObjectiveName.POLICY),)
    )
    """Distance below 1 from which a smaller ratio of probabilities, now to before step 1, no longer counts."""
    epsilon_high: float | None = option(None, POSITIVE, needs=(_only(ObjectiveName.POLICY),))
    """Distance above 1 from which a larger ratio no longer counts. Default: epsilon_low."""
    scale_rewards: RewardScaling = option(RewardScaling.GROUP, needs=(_only(ObjectiveName.POLICY), _NOT_RLOO))
    """Rewards whose standard deviation divides advantages: of the group, of the dataset (batch), or none."""
    importance_cap: float = option(2.0, POSITIVE, needs=(_only(ObjectiveName.POLICY), _NOT_RLOO))
    """Largest weight of a token, the ratio of its probability before step 1 to the sampler's, where rollouts have the
    sampler's `logprobs`."""
    kl_weight: float = option(0.0, NON_NEGATIVE, needs=(_only(ObjectiveName.POLICY), _NOT_RLOO))
    """Weight of the divergence from the model before step 1, which is added to the loss of each token."""

    teacher_model: str | None = option(None, needs=(_only(ObjectiveName.DISTILL),))
    """Model of any size whose expected next tokens distill learns; its tokenizer is the trained model's. It is loaded
    in place of the trained model for one forward pass before step 1, whose results are kept in the cache folder."""
    top_k_logprobs: int = option(32, Bounds(minimum=1, ceiling=1025), needs=(_only(ObjectiveName.DISTILL),))
    """Number of the teacher's most likely tokens that are kept for each target, with the probability of all others: 6
    bytes each on a disk, and 2."""
    divergence: Divergence = option(Divergence.FORWARD, needs=(_only(ObjectiveName.DISTILL),))
    """Distance of the student from the teacher. forward: Kullback-Leibler divergence, the mean by the teacher's
    probabilities; reverse: by the student's; js: Jensen-Shannon divergence."""
    temperature: float = option(1.0, POSITIVE, needs=(_only(ObjectiveName.DISTILL),))
    """Divisor of both models' logits in the divergence."""

    @property
    def beta_or_default(self) -> float:
        """`beta`, or the objective's default."""
        return _DEFAULT_BETA.get(self.objective, _USUAL_BETA) if self.beta is None else self.beta

    @property
    def head_work(self) -> float:
        """Work of the head as a multiple of its work in supervised fine-tuning.

        On sequences the head runs its forward once more, before the forward and the two products of backward.
        """
        return 1.0 if self.objective in OF_TOKENS else 4 / 3

    @property
    def teacher_bytes(self) -> int:
        """Bytes of the teacher's numbers of a token; 0 without a teacher."""
        return teacher_bytes(self.top_k_logprobs) if self.objective is ObjectiveName.DISTILL else 0

    @property
    def needs_reference(self) -> bool:
        """Whether a forward pass before step 1 scores the rows of the first epoch."""
        return self.objective in _WITH_REFERENCE

    @property
    def needs_divergence(self) -> bool:
        """Whether each step begins with a forward pass over mismatched answers."""
        return self.objective is ObjectiveName.KTO and self.loss_type is not LossType.APO_ZERO_UNPAIRED


def teacher_bytes(number: int) -> int:
    """Return the bytes of a teacher's `number` most likely tokens, and of their and the others' probabilities."""
    return 4 * number + 2 * (number + 1)


NO_OPTIONS: Final = ObjectiveConfig()
"""Supervised fine-tuning."""
