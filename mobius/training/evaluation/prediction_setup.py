"""Setup of answers to the evaluation data, without the memory of training."""

from __future__ import annotations

from collections.abc import Collection

from mobius.checkpoint.run_settings import prepare_output
from mobius.config.config import Config
from mobius.hardware.cpu_dtype import resolve_dtype
from mobius.models.families import load_model_config, locate_model
from mobius.models.tokenizer import load_tokenizer
from mobius.models.weights import check_model_weights
from mobius.planner.plan_file import apply_saved_plan
from mobius.planner.run_setup import draft_run_setup
from mobius.ranks import Ranks
from mobius.signal_handling import RunStatus
from mobius.training.data import RunData, read_data
from mobius.training.evaluation.generation import check_generation_config
from mobius.training.evaluation.prediction import PromptAndLabel, split_prompts
from mobius.training.final_results import PredictionTask
from mobius.training.inputs import wait_until_inputs_are_read
from mobius.training.reporting import log_model


def only_answers(config: Config) -> bool:
    """Whether a run neither trains nor evaluates, but only predicts."""
    return not config.evaluation.do_train and not config.evaluation.do_eval


def prepare_prediction(
    config: Config, ranks: Ranks, run_status: RunStatus, *, given: Collection[str] | None
) -> PredictionTask | None:
    """Prepare the output folder and return the first rank's task to answer with `--model_path`; None on other ranks.

    Collective; loads no stage. Arguments are those of `run_training`.
    """
    config, saved = apply_saved_plan(resolve_dtype(config, ranks, given=given), given=given or ())
    model_folder = locate_model(config.model.model_path)
    model_config = load_model_config(model_folder, config.model)
    tokenizer = load_tokenizer(model_folder, model_config.vocab_size)
    check_generation_config(model_folder, tokenizer, model_config.vocab_size)
    draft = draft_run_setup(config, ranks, model_config, saved=saved)
    check_model_weights(model_folder, draft.parts, config.model)
    log_model(draft, model_folder)
    rendezvous = wait_until_inputs_are_read(ranks)
    output = prepare_output(draft, run_status, None, model_folder=model_folder)
    run_status.is_detached = True
    try:
        config, data, _ = read_data(config, ranks, tokenizer)
        samples = prediction_samples(data, config)
        if ranks.is_first:
            output.commit()
    except BaseException:
        output.discard()
        raise
    del rendezvous  # other ranks need no further rendezvous
    if not ranks.is_first:
        return None
    return PredictionTask(
        folder=model_folder,
        samples=samples,
        output=output.save_dir,
        max_new_tokens=config.evaluation.max_new_tokens,
        device=draft.rank_context.device,
        status_text="nothing is trained or evaluated",
    )


def prediction_samples(data: RunData, config: Config) -> list[PromptAndLabel]:
    """Return the samples to answer of all evaluation datasets. Raises DataError and ConfigError."""
    max_samples = config.evaluation.max_predict_samples
    parts = (
        split_prompts(dataset, indices, config.data, max_samples=max_samples)
        for dataset, indices in data.evaluation_parts()
    )
    return [sample for part in parts for sample in part]
