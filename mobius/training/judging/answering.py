"""Answers to the evaluation data: behind a run, or as all that a start does, without the memory of a training."""

from __future__ import annotations

from collections.abc import Collection

from mobius.config.config import Config
from mobius.interruption import Standing
from mobius.machine.cpu_dtype import settle_dtype
from mobius.models.families import load_model_config, locate_model
from mobius.models.tokenizer import load_tokenizer
from mobius.models.weights import check_model_weights
from mobius.planning.blueprint import sketch_blueprint
from mobius.planning.planned import adopt_plan
from mobius.ranks import Ranks
from mobius.training.data import RunData, read_data
from mobius.training.judging.generation import check_generation
from mobius.training.judging.prediction import PromptAndAnswer, prompts_of
from mobius.training.milestones import log_model
from mobius.training.opening import prepare_output, wait_for_readers
from mobius.training.results import Prediction


def only_answers(config: Config) -> bool:
    """Whether a start neither trains nor evaluates: without training, --do_eval alone asks for an evaluation."""
    return not config.evaluation.do_train and not config.evaluation.do_eval


def open_prediction(
    config: Config, ranks: Ranks, standing: Standing, *, given: Collection[str] | None
) -> Prediction | None:
    """The answers that the first rank is to generate with the weights of `--model_path`, in a folder that is ready.

    All ranks call it, and all but the first are done. No stage is loaded. Arguments are those of `run_training`.
    """
    adopted = adopt_plan(settle_dtype(config, ranks, given=given), given=given or ())
    config = adopted.config
    model_folder = locate_model(config.model.model_path)
    model_config = load_model_config(model_folder, config.model)
    tokenizer = load_tokenizer(model_folder, model_config.vocab_size)
    check_generation(model_folder, tokenizer, model_config.vocab_size)
    sketch = sketch_blueprint(config, ranks, model_config, saved=adopted.saved)
    check_model_weights(model_folder, sketch.parts, config.model)
    log_model(sketch, model_folder)
    meeting = wait_for_readers(ranks)
    output = prepare_output(sketch, standing, None, model_folder=model_folder)
    standing.goes_on_alone()
    try:
        config, data, _ = read_data(config, ranks, tokenizer)
        samples = prompts(data, config)
        if ranks.is_first:
            output.commit()
    except BaseException:
        output.discard()
        raise
    del meeting  # what the others still do needs nobody
    if not ranks.is_first:
        return None
    return Prediction(
        folder=model_folder,
        samples=samples,
        output=output.save_dir,
        max_new_tokens=config.evaluation.max_new_tokens,
        device=sketch.place.device,
        left="nothing is trained or evaluated",
    )


def prompts(data: RunData, config: Config) -> list[PromptAndAnswer]:
    """Samples to answer, of all datasets to evaluate on. Raises DataError and ConfigError."""
    most = config.evaluation.max_predict_samples
    parts = (prompts_of(dataset, indices, config.data, most=most) for dataset, indices in data.judged())
    return [sample for part in parts for sample in part]
