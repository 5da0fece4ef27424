"""Owns what a long run can be told: when its state is saved and taken up again, and when and how it is judged."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

from mobius.config.bounds import Bounds, Count, NonNegative, Positive

# What is typed is a member's name in small letters.
SaveStrategy = StrEnum("SaveStrategy", ["STEPS", "EPOCH", "NO"])
"""When checkpoints are saved."""
EvalStrategy = StrEnum("EvalStrategy", ["STEPS", "EPOCH", "NO"])
"""When the model is evaluated while it is trained."""
BestMetric = StrEnum("BestMetric", ["LOSS", "PERPLEXITY", "TOKEN_ACCURACY"])
"""Number of an evaluation that decides which checkpoint is the best; of the first two, less is better."""

ALL_CHECKPOINTS: Final = 0
"""`save_total_limit` that keeps all."""


def steps_between(every: float, num_steps: int) -> int:
    """Steps from one to the next of what comes `every` so many steps, or every such share of a run of `num_steps`."""
    return int(every) if every >= 1 else max(1, math.ceil(round(every * num_steps, 6)))


@dataclass(frozen=True)
class SavingConfig:
    """Checkpoints"""

    save_strategy: SaveStrategy = SaveStrategy.STEPS
    """When the whole state of the run is saved to save_dir/checkpoint-STEP: every save_steps, at the end of each epoch,
    or never. Unless never, also when the run is told to end early (Ctrl-C, SIGTERM, max_run_time)."""
    save_steps: Positive = 500
    """Steps between two checkpoints: whole, or below 1 a share of all (rounded up)."""
    save_total_limit: Annotated[int, Bounds(minimum=0)] = 2
    """Checkpoints to keep; older ones are removed, but never the best one. 0 keeps all."""
    save_only_model: bool = False
    """Save checkpoints without the optimizer's state, at a sixth of the size; no run can be resumed from them."""
    resume_from_checkpoint: str | None = None
    """Go on from a checkpoint: its folder, or true for the newest complete one in save_dir."""
    resume_changes: str | None = None
    """Options that may differ from those of the checkpoint though they change what is trained, with commas, such as
    learning_rate,num_iterations. Devices, stages, saving and logging may always differ."""
    max_run_time: Positive | None = None
    """Minutes after which the run saves and ends by itself, such as a little less than what a scheduler grants."""
    watchdog_minutes: NonNegative = 30.0
    """Minutes without any progress after which every rank tells what it does and waits for, and the run ends; 0: never.
    """

    @property
    def is_on(self) -> bool:
        """Whether the run saves its state at all."""
        return self.save_strategy is not SaveStrategy.NO

    @property
    def changes(self) -> tuple[str, ...]:
        """Names in `resume_changes`."""
        return tuple(filter(None, (word.strip() for word in (self.resume_changes or "").split(","))))


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation"""

    eval_strategy: EvalStrategy = EvalStrategy.NO
    """When the model is evaluated on eval_dataset or on the samples of val_size: every eval_steps, at the end of each
    epoch, or never."""
    eval_steps: Positive = 500
    """Steps between two evaluations: whole, or below 1 a share of all (rounded up)."""
    eval_on_start: bool = False
    """Evaluate before the first step, too."""
    do_train: bool = True
    """Train; no_do_train only evaluates or predicts, with the weights of model_path."""
    do_eval: bool = False
    """Evaluate after the last step."""
    metric_for_best_model: BestMetric = BestMetric.LOSS
    """Number of the evaluations that tells which checkpoint is the best one."""
    load_best_model_at_end: bool = False
    """Save the weights of the best checkpoint as the result, instead of the last step's."""
    early_stopping_patience: Count | None = None
    """Evaluations in a row that may bring no better metric_for_best_model before the run ends. Default: no limit."""
    do_predict: bool = False
    """Generate answers to the samples of eval_dataset or val_size after the last step, and score them."""
    predict_with_generate: bool = False
    """do_predict, under the name that LLaMA-Factory's users know."""
    max_new_tokens: Count = 256
    """Tokens of a generated answer at the most."""
    max_predict_samples: Count | None = None
    """Samples to answer of each dataset, from its start. Default: all."""

    @property
    def evaluates(self) -> bool:
        """Whether anything is evaluated."""
        return self.eval_strategy is not EvalStrategy.NO or self.eval_on_start or self.do_eval

    @property
    def predicts(self) -> bool:
        """Whether answers are generated."""
        return self.do_predict or self.predict_with_generate
