"""Runs training from start to end: read, plan, tokenize, connect ranks, load, train, save, report, predict."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from mobius.checkpoint.contents import CheckpointContents
from mobius.checkpoint.durable_steps import DurableSteps, empty_slot_before, slot_place
from mobius.checkpoint.hub import check_hub, push_to_hub, upload_command
from mobius.checkpoint.merged_model import merged_folder
from mobius.checkpoint.resume import find_resume
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.run_settings import check_disk_space_for_run, count_saves, prepare_output, write_settings
from mobius.checkpoint.saver import CheckpointSaver
from mobius.checkpoint.trained_weights import check_trained_weights
from mobius.checkpoint.whole_model import SavedLayout
from mobius.config.config import Config
from mobius.config.launch import resume_command
from mobius.distributed.rendezvous import open_watchdog_store
from mobius.distributed.watchdog import Watchdog
from mobius.engine.slot_files import SlotFiles
from mobius.errors import MobiusError
from mobius.models.tokenizer import pad_token_id
from mobius.process.activity import Activity
from mobius.process.ranks import Ranks, command_words, seconds_since_launch
from mobius.process.signal_handling import RunStatus, SavedAndStopped
from mobius.reporting.events import table_row
from mobius.reporting.trackers import check_installed
from mobius.training.data import RunData, packed_rows
from mobius.training.evaluation.evaluator import Evaluator
from mobius.training.evaluation.prediction import predict_and_report, prediction_samples
from mobius.training.evaluation.text_scores import check_scores_installed
from mobius.training.file_checks import check_save_dir, wait_until_inputs_are_read
from mobius.training.images import read_images
from mobius.training.inputs import ModelInputs, read_model, read_run_data
from mobius.training.loop import BEST, BEST_SAVED, BestEvaluation, StopReason, TrainingLoop
from mobius.training.out_of_memory import out_of_memory
from mobius.training.phases import Outcome, Run, Start, Training
from mobius.training.reference import save_scores
from mobius.training.reference_phase import scored_data
from mobius.training.reporting import (
    StartupMeter,
    log_disk_rates,
    log_host_memory_usage,
    log_stages,
    open_log,
    recordings_of,
    run_started,
)
from mobius.training.results import save_results
from mobius.training.run_setup import RunSetup, complete_run
from mobius.training.session import open_session
from mobius.training.teacher_phase import read_teacher

logger = logging.getLogger(__name__)


def run_training(
    config: Config,
    ranks: Ranks,
    *,
    given: Collection[str] | None = None,
    run_status: RunStatus | None = None,
) -> None:
    """Fine-tune as `config` says and write the results; every rank calls this.

    `given`: options that the user set. A plan (`--plan`) may not contradict them, and defaults of the device or values
    of a checkpoint do not replace them. If `given` is None (not known), all options count as set. `run_status` gets the
    text to print if the run is interrupted.

    Raises MobiusError for errors that a user can correct, and SavedAndStopped after a signal that requests a save.
    After an error the process should end without further cleanup: the device may wait forever for a neighbour.
    """
    try:
        predict = _run(config, ranks, given, run_status or RunStatus())
        if predict is not None:
            predict()  # only now, because the stages' memory is free
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, ranks.rank) from error


def _run(
    config: Config, ranks: Ranks, given: Collection[str] | None, run_status: RunStatus
) -> Callable[[], None] | None:
    """Train and evaluate if the options ask for it. Returns the function that then runs the prediction, or None.

    The caller runs that function after `_run` has returned, so that the stages' memory is free.
    """
    with StartupMeter() as startup:
        check_installed(config.output.trackers)
        if config.evaluation.do_predict:
            check_scores_installed()
        if not config.evaluation.do_train and not config.evaluation.do_eval:
            return _prepare_prediction(config, ranks, given, run_status)
        resume = find_resume(config, ranks, given=given)
        watchdog = Watchdog(
            Activity(),
            ranks,
            minutes=config.saving.watchdog_minutes,
            clean_up=run_status.clean_up if ranks.is_first else None,
            open_store=partial(open_watchdog_store, ranks) if ranks.num_ranks > 1 else None,
        )
        start = Start(ranks=ranks, run_status=run_status, startup=startup, watchdog=watchdog, resume=resume)
        try:
            run = _open_run(config if resume is None else resume.config, start, given)
            with _closing(run) as closing:
                with _discarded_after_errors(run.output):
                    training = _prepare_training(run, closing)
                outcome = _train(run, training)
                if outcome.stop_reason in (StopReason.SIGNAL, StopReason.TIME):
                    _stop_early(run, training, outcome.stop_reason)
                    return None
                save_results(run, training, outcome)
                watchdog.stop()
                _disconnect(run, training)
            _push(run)
        finally:
            watchdog.stop()
        return _prediction(run.config, run.model, run.data, run.output, run_status)


# read, plan, tokenize, connect ranks, load


def _open_run(config: Config, start: Start, given: Collection[str] | None) -> Run:
    """Read, plan, tokenize, connect the ranks and load the stages; if this fails, no files of the run are left.

    The watchdog starts after the data are read: while one rank tokenizes or runs the tower, the others wait.
    """
    ranks, startup, resume = start.ranks, start.startup, start.resume
    if config.output.push_to_hub and ranks.is_first:
        check_hub(config.output)

    def part_done(part: str, run_setup: RunSetup) -> None:
        startup.mark(part)
        if part == "rehearsal":  # from now on all ranks agree on the plan
            write_settings(output, run_setup)

    model = read_model(config, ranks, given=given, resume=resume)
    rendezvous = wait_until_inputs_are_read(ranks)
    output = prepare_output(model.draft, start.run_status, resume, model_folder=model.folder, layout=model.layout)
    with _discarded_after_errors(output):
        check_save_dir(model.config, ranks, output.save_dir, model.draft.rank_context.replica_rendezvous)
        startup.mark("planning")
        # Read data before the ranks connect: the process group would time out during a long tokenization.
        config, data = read_run_data(model, resume)
        startup.mark("data")
        images = read_images(replace(model, config=config), data)
        startup.mark("images")
        start.watchdog.start()
        teacher = read_teacher(replace(model, config=config), data, start, rendezvous)
        startup.mark("teacher")
        run_setup = complete_run(model.draft, config, packed=packed_rows(data.batches))
        run_setup = replace(run_setup, images=images)
        _check_disk_space(run_setup, start, data, output, model.layout)
        startup.mark("planning")
        resumed_from = None if resume is None else resume.reader.path
        slots = slot_place(config, ranks, resumed_from) if config.evaluation.do_train else None
        session = open_session(
            run_setup,
            model.folder,
            recordings=recordings_of(run_setup, output.save_dir),
            on_part_done=part_done,
            checkpoint=None if resume is None else resume.reader,
            activity=start.watchdog.activity,
            slots=slots if run_setup.result.request.keeps_steps else None,
        )
        del rendezvous  # the ranks are connected and no longer need its store
    log_stages(session)
    return Run(start=start, model=model, data=data, output=output, session=session, slots=slots, teacher=teacher)


def _check_disk_space(
    run_setup: RunSetup, start: Start, data: RunData, output: OutputFolder, layout: SavedLayout
) -> None:
    """Raise an error if the disk has no room for the checkpoints that the options ask for."""
    config = run_setup.config
    if not (config.saving.is_on and config.evaluation.do_train and start.ranks.is_first):
        return
    num_saves = count_saves(
        config,
        num_steps_done=start.steps_before,
        epochs_done=start.epochs_before,
        epochs=config.optim.num_train_epochs or data.batches.num_epochs_of(config.optim.num_steps),
    )
    check_disk_space_for_run(run_setup, output.save_dir, num_saves=num_saves, layout=layout)


@contextmanager
def _discarded_after_errors(output: OutputFolder) -> Iterator[None]:
    """Context of the phases before the first step: removes the files of the run if an error is raised."""
    try:
        yield
    except BaseException:
        output.discard()
        raise


@contextmanager
def _closing(run: Run) -> Iterator[ExitStack]:
    """Context of an open run: adds notes to errors, and at the end closes the run's folder and the yielded stack."""
    try:
        with ExitStack() as closing:
            closing.callback(run.output.close)
            yield closing
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, run.start.ranks.rank, run.session.run_setup) from error
    except MobiusError as error:
        if (older := run.output.older_results) is not None:
            error.add_note(f"The older results, which this run would have replaced, are in {older}: rename it back.")
        raise


# train


def _prepare_training(run: Run, closing: ExitStack) -> Training:
    """Create the parts that train, save, evaluate and log; `closing` closes the log. Collective."""
    start, resume, session, config = run.start, run.resume, run.session, run.config
    contents = CheckpointContents(
        session,
        run.model.files,
        data_fingerprint=run.data.fingerprint(),
        origin=run.model.origin,
        base=run.model.base,
        layout=run.model.layout,
    )
    best, best_saved = _best(run, BEST), _best(run, BEST_SAVED)
    durable = _make_durable(run, contents)
    saver = None
    if config.evaluation.do_train and config.saving.is_on:
        saver = _make_saver(run, contents, best_saved)
    evaluator = None
    if config.evaluation.evaluates:
        parts = run.data.evaluation_parts()
        samples = [(dataset.entry.name, dataset.tokenized, indices) for dataset, indices in parts]
        evaluator = Evaluator(session, samples, pad_token_id=pad_token_id(run.model.tokenizer))

    def before_update(stage: int) -> None:
        """Wait until the state of `stage` may change: pending saves have copied their part of the state."""
        for each in (saver, durable):
            if each is not None:
                each.before_update(stage)

    data = scored_data(run, evaluator)
    trainer = session.trainer(
        data.batches,
        num_steps_done=start.steps_before,
        counts=None if resume is None else resume.counts,
        before_update=before_update,
    )
    trainer.complete_rows = data.complete_rows
    state = resume.trainer_state().continued(config) if resume is not None and session.is_first else None
    if session.is_first:
        run.output.begin()
        if data.scores:
            save_scores(data.scores, run.output.save_dir)
    if durable is not None:
        durable.begin(None if resume is None else resume.reader)
    elif (  # remove the step that an earlier run left: otherwise the next start would resume from it
        run.slots is not None and session.is_first and (resume is None or run.slots.slot_of(resume.reader.path) is None)
    ):
        empty_slot_before(run.slots, run.output.save_dir)
    run_id = None if resume is None else resume.tracker_run_id
    log = open_log(session.run_setup, run.output.save_dir, state, tracker_run_id=run_id)
    if log is not None:
        closing.callback(log.close)
        start.startup.connect(log)
    if resume is not None and best.value is None and resume.loop_state.get(BEST, {}).get("value") is not None:
        logger.info(
            "the checkpoint's best evaluation does not count: it used other data or another metric than this run"
        )
        if log is not None:
            log.state.set_best(None)
    loop = TrainingLoop(
        session=session,
        trainer=trainer,
        saver=saver,
        evaluator=evaluator,
        log=log,
        run_status=start.run_status,
        output=run.output,
        started=min(start.startup.started, time.monotonic() - seconds_since_launch()),  # includes the launcher's time
        epoch=start.epochs_before,
        best=best,
        best_saved=best_saved,
        durable=durable,
    )
    return Training(loop=loop, saver=saver, durable=durable, log=log)


def _best(run: Run, key: str) -> BestEvaluation:
    """Return the checkpoint's best evaluation; empty if evaluations of this run cannot be compared with it."""
    evaluation, state = run.config.evaluation, {} if run.resume is None else run.resume.loop_state
    data = run.data.evaluation_fingerprint() if evaluation.evaluates else None
    return BestEvaluation.from_loop_state(evaluation.metric_for_best_model, state, key, data=data)


def _make_durable(run: Run, contents: CheckpointContents) -> DurableSteps | None:
    """Return the object that makes each step durable in the folders of optimizer states, or None; collective."""
    if run.slots is None or not run.session.run_setup.result.request.keeps_steps:
        return None
    arena = run.session.stages.arena
    files = None if arena is None else arena.state_files
    assert files is None or isinstance(files, SlotFiles)
    return DurableSteps(run.session, run.output.save_dir, contents, place=run.slots, files=files)


def _make_saver(run: Run, contents: CheckpointContents, best_saved: BestEvaluation) -> CheckpointSaver:
    output, resume = run.output, run.resume
    saver = CheckpointSaver(run.session, output.save_dir, contents, on_complete=output.remove_older_results)
    if resume is not None:
        saver.resume_from(resume.reader.path, resume.num_steps_done, best_saved.step)
    logger.info("%s", table_row("saving", saver.describe()))
    return saver


def _train(run: Run, training: Training) -> Outcome:
    """Run all remaining steps, with evaluations and saves between them; without --do_train, run no steps."""
    loaded_at, session, loop = time.monotonic(), run.session, training.loop
    if not run.config.evaluation.do_train:
        return Outcome(stop_reason=StopReason.LAST_STEP, loaded_at=loaded_at, trained_at=loaded_at)
    startup = run.start.startup
    startup.mark("optimizer")
    if training.log is not None:
        training.log.emit(run_started(session.run_setup, run.data.batches, startup))
    log_host_memory_usage(session, startup.host)
    stop_reason = loop.run()
    log_disk_rates(session, since=loaded_at)
    session.write_recordings()
    if stop_reason in (StopReason.LAST_STEP, StopReason.EARLY_STOPPING):
        check_trained_weights(
            session,
            num_updates=loop.trainer.counts.num_updates,
            num_steps=loop.trainer.num_steps_done,
            folder=run.output.save_dir,
        )
    return Outcome(stop_reason=stop_reason, loaded_at=loaded_at, trained_at=time.monotonic())


# end


def _stop_early(run: Run, training: Training, reason: StopReason) -> None:
    """End the run before its last step and report the checkpoint to resume from.

    After a signal, raises SavedAndStopped, which ends the process, so connections stay open. At the time limit, the run
    ends without an error; otherwise a launcher would start it again.
    """
    saver, loop, resume = training.saver, training.loop, run.resume
    if training.log is not None:
        training.log.finish(reason.value)
        training.log.close()
    text = "nothing is saved (--save_strategy no)" if saver is None else "no checkpoint could be saved"
    if loop.newest is not None:
        text = f"the state is saved in {loop.newest}"
        if training.durable is None and saver is not None and saver.newest_step != loop.trainer.num_steps_done:
            text = f"this step could not be saved; the newest checkpoint is {saver.newest}"
        inherited = None if resume is None else resume.inherited_save_dir
        text += f". To go on: {resume_command(command_words(), save_dir=inherited)}"
    run.session.all_ranks.barrier()
    run.start.watchdog.stop()
    if reason is StopReason.SIGNAL:
        raise SavedAndStopped(f"after a step: {text}")
    logger.info("--max_run_time %g minutes are over: %s", run.config.saving.max_run_time, text)
    _disconnect(run, training)


def _disconnect(run: Run, training: Training) -> None:
    """Close the connections and release memory."""
    for each in (training.saver, training.durable):
        if each is not None:
            each.close()
    run.session.close()


def _push(run: Run) -> None:
    """Upload the result if the options ask for it; the other ranks do not wait for the upload."""
    output, run_status = run.config.output, run.start.run_status
    if output.push_to_hub and run.start.ranks.is_first:
        saved = f"after the last step: the model is complete and checked in {run.output.save_dir}"
        run_status.set_status(f"{saved}; it was not uploaded. To do it: {upload_command(output)}")
        run_status.is_detached = True
        push_to_hub(output)


# predict


def _prepare_prediction(
    config: Config, ranks: Ranks, given: Collection[str] | None, run_status: RunStatus
) -> Callable[[], None] | None:
    """Prepare a run that only predicts, without stages; return the function that predicts, or None. Collective."""
    model = read_model(config, ranks, given=given, resume=None)
    rendezvous = wait_until_inputs_are_read(ranks)
    output = prepare_output(model.draft, run_status, None, model_folder=model.folder, layout=model.layout)
    run_status.is_detached = True
    with _discarded_after_errors(output):
        config, data = read_run_data(model, None)
        if ranks.is_first:
            output.begin()
            output.commit()
    del rendezvous  # the ranks need no store any more
    return _prediction(config, model, data, output, run_status)


def _prediction(
    config: Config, model: ModelInputs, data: RunData, output: OutputFolder, run_status: RunStatus
) -> Callable[[], None] | None:
    """Return a function that generates predictions for the evaluation data; None if this rank does not predict.

    When the function runs, the run's memory may be free.
    """
    evaluation, folder, left = config.evaluation, model.folder, "nothing is trained or evaluated"
    if not (evaluation.do_predict and model.draft.ranks.is_first):
        return None
    adapters, prompt = config.adapters, None
    if adapters.is_prompt and (evaluation.do_train or adapters.adapter_path is not None):
        prompt = output.save_dir if evaluation.do_train else Path(str(adapters.adapter_path)).expanduser()
    if evaluation.do_train:
        if not adapters.is_prompt:
            folder = output.save_dir if model.base is None else merged_folder(config)
        left = f"after the last step: the model is complete and checked in {output.save_dir}"
    elif evaluation.do_eval:
        left = "after the evaluation"
    run_status.set_status(f"{left}; not all answers were generated")
    run_status.is_detached = True
    return partial(
        predict_and_report,
        folder,
        prediction_samples(data),
        output=output.save_dir,
        max_new_tokens=evaluation.max_new_tokens,
        device=model.draft.device,
        prompt_folder=prompt,
    )
