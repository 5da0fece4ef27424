"""Results of a run after its last step: final evaluation, records, the model, and the report."""

from __future__ import annotations

import logging
import shlex
import time

from mobius.checkpoint.durable_steps import remove_slots
from mobius.checkpoint.export import save_model
from mobius.checkpoint.folders import checkpoint_path
from mobius.checkpoint.restore import SavedWeights, load_best_model
from mobius.checkpoint.slot_reader import SlotReader
from mobius.checkpoint.trained_weights import has_changed
from mobius.config.objective import ObjectiveName
from mobius.errors import CheckpointError
from mobius.process.ranks import path_from_here, program_words
from mobius.reporting.run_log import METRICS_FILE
from mobius.training.evaluation.sample_scores import write_sample_scores
from mobius.training.phases import Outcome, Run, Training
from mobius.training.reporting import gather_memory, write_final_report, write_records

logger = logging.getLogger(__name__)


def save_results(run: Run, training: Training, outcome: Outcome) -> None:
    """Evaluate the final weights, write records, model and report; raise CheckpointError with all problems.

    Collective. Writes no report if the run was resumed after its last step.
    """
    session, trains, loop = run.session, run.config.evaluation.do_train, training.loop
    is_changed = not trains or _has_changed(run, num_steps=len(loop.steps))
    if trains and training.saver is not None and run.config.evaluation.load_best_model_at_end:
        loop.result_step = _load_best_model(run, training)
    loop.evaluate_final()
    problems = []
    if loop.evaluator is not None and run.config.evaluation.save_scores:
        problems += write_sample_scores(session, loop.evaluator, run.output.save_dir)
    problems += _write_results(run, training, is_changed=is_changed)
    if training.log is not None:
        training.log.close()  # after the model is saved, because a tracker may hang
    session.activity.start_action("the report")
    per_rank = gather_memory(session)
    if not session.is_first:
        return
    if loop.steps:
        loading, saving = outcome.loaded_at - run.start.startup.started, time.monotonic() - outcome.trained_at
        timings = {"loading": loading, "training": sum(loop.steps.seconds), "saving": saving}
        problems += write_final_report(session.run_setup, loop.steps, per_rank, timings)
    if trains:
        remove_slots(run.slots, run.output.save_dir, None if run.resume is None else run.resume.reader)
    if problems and trains:
        problems.append(f"The model itself is complete and checked: {run.output.save_dir}.")
    if problems:
        raise CheckpointError("\n".join(problems))
    if trains:
        folder = path_from_here(run.output.save_dir)
        if run.config.objective.objective is ObjectiveName.REWARD:
            options = ", num_labels=1" if run.config.adapters.has_frozen_base else ""
            logger.info("load it: AutoModelForSequenceClassification.from_pretrained(%r%s)", folder, options)
        else:
            logger.info("talk to it: %s", shlex.join([*program_words(), "chat", folder]))


def _has_changed(run: Run, *, num_steps: int) -> bool:
    """Whether the run changed any parameter; warns if it did not. Collective.

    In a resumed run, the comparison and the warning are about the steps since the checkpoint. The result is then always
    True, because the steps before the checkpoint may have changed parameters.
    """
    session, resume = run.session, run.resume
    before = session.source if resume is None else SavedWeights(resume.reader, session.run_setup.parts)
    if resume is not None and isinstance(resume.reader, SlotReader):
        before = None  # a durable step, which later steps have overwritten
    if not num_steps or before is None:
        return True
    session.activity.start_action("the comparison with the weights before training")
    if has_changed(session, before):
        return True
    since = "" if resume is None else f" since {resume.reader.path.name}"
    if session.is_first:
        logger.warning(
            "no parameter was changed by %d step%s%s: every update was zero or too small for --dtype %s. Raise "
            "--learning_rate (%g), and look at the gradient norms in %s",
            num_steps,
            "" if num_steps == 1 else "s",
            since,
            run.config.model.dtype,
            run.config.optim.learning_rate,
            run.output.save_dir / METRICS_FILE,
        )
    return resume is not None


def _load_best_model(run: Run, training: Training) -> int:
    """Load the best checkpoint's weights unless the last step's weights are better; return the step of the result."""
    loop, saver, resume = training.loop, training.saver, run.resume
    assert saver is not None, "checkpoints were saved"
    last, best = loop.trainer.num_steps_done, loop.best_saved.step
    if loop.best.step == last:
        return last
    earlier = None
    if resume is not None and best is not None and best <= resume.num_steps_done:
        earlier = checkpoint_path(resume.reader.path.parent, best)
    return load_best_model(run.session, saver.save_dir, saver.best_step, earlier) or last


def _write_results(run: Run, training: Training, *, is_changed: bool) -> list[str]:
    """Write records and model; return the problems, with which the run fails after everything is written."""
    session, output, model, log, problems = run.session, run.output, run.model, training.log, list[str]()
    if log is not None:
        output.recreate_if_removed()
        session.activity.start_action("the picture of the training and the model card")
        problems = write_records(
            *(log, session.run_setup, output.save_dir),
            origin=model.origin,
            is_changed=is_changed,
            others=model.layout.others,
        )
    if run.config.evaluation.do_train:
        problems += save_model(session, output, model.files, run.start.run_status, model.base, model.layout)
        return problems
    if log is not None and not problems:
        output.commit()
    return problems
