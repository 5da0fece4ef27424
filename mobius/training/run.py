"""The life of a run, in order: read, plan, tokenize, meet, load, train, save, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mobius.activity import Activity
from mobius.checkpoint.export import save_model
from mobius.checkpoint.folders import checkpoint_path
from mobius.checkpoint.merged_model import merged_folder
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.restore import SavedWeights
from mobius.checkpoint.resume import Resume, find_resume
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.run_settings import prepare_output, write_settings
from mobius.checkpoint.saver import (
    CheckpointSaver,
    check_disk_space_for_run,
    collect_run_metadata,
    count_saves,
    load_best_model,
)
from mobius.checkpoint.trained_weights import check_trained_weights, has_changed
from mobius.config.config import Config
from mobius.config.launch import resume_command
from mobius.data.batches import TrainingBatches
from mobius.data.builtin_chat_templates import resolve_template
from mobius.distributed.node_checks import check_same_data, join_replicas
from mobius.distributed.rendezvous import open_watchdog_store
from mobius.distributed.watchdog import Watchdog
from mobius.errors import MobiusError
from mobius.hardware.cpu_dtype import resolve_dtype
from mobius.models.adapters.peft_folder import AdapterBase
from mobius.models.families import load_model_config, locate_model
from mobius.models.model_files import ModelFiles, read_model_files
from mobius.models.tokenizer import load_tokenizer, pad_token_id
from mobius.models.weights import check_model_weights
from mobius.planner.file_checks import check_same_model, check_save_dir
from mobius.planner.run_setup import RunSetup, complete_run_setup, draft_run_setup
from mobius.planner.saved_plan import apply_saved_plan
from mobius.ranks import Ranks, command_words, seconds_since_launch
from mobius.reporting.events import table_row
from mobius.reporting.run_log import METRICS_FILE, RunLog
from mobius.reporting.trackers import check_installed
from mobius.signal_handling import RunStatus, SavedAndStopped
from mobius.training.data import RunData, packed_rows, read_data
from mobius.training.evaluation.best_evaluation import BEST, BEST_SAVED, BestEvaluation
from mobius.training.evaluation.evaluator import Evaluator, evaluation_samples, make_evaluator
from mobius.training.evaluation.generation import check_generation_config
from mobius.training.evaluation.prediction_setup import only_answers, prediction_samples, prepare_prediction
from mobius.training.evaluation.text_scores import check_scores_installed
from mobius.training.final_results import PredictionTask, RunTimer, write_final_report
from mobius.training.inputs import find_adapter_base, origin_of, wait_until_inputs_are_read
from mobius.training.loop import StopReason, TrainingLoop
from mobius.training.out_of_memory import out_of_memory
from mobius.training.reporting import (
    StartupMeter,
    log_host_memory_usage,
    log_model,
    log_stages,
    open_log,
    recordings_of,
    run_started,
    write_records,
)
from mobius.training.session import Session, open_session, restoring
from mobius.training.trainer import Trainer

logger = logging.getLogger(__name__)


def run_training(
    config: Config, ranks: Ranks, *, given: Collection[str] | None = None, run_status: RunStatus | None = None
) -> None:
    """Fine-tune as `config` says and leave the results; every rank calls it.

    `given` are the options that the user set, which a plan (`--plan`) may not contradict, and which neither a default
    of another kind of device nor a checkpoint replaces; None: not known, all of them are taken as they are.
    `run_status` is kept up to date for an interruption.

    Raises MobiusError for what a user can mend, and SavedAndStopped where an interruption was asked to save and has.
    After an error the process should end without further cleaning up: the device may be waiting for a neighbour for
    good.
    """
    run_status = run_status or RunStatus()
    try:
        prediction = _run(config, ranks, given, run_status)
        if prediction is not None:
            run_status.set_status(f"{prediction.status_text}; not all answers were generated")
            run_status.detach_from_peers()
            prediction.run()  # the stages' memory is free by now
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, ranks.rank) from error


@dataclass(frozen=True, kw_only=True)
class _PreparedRun:
    """A run that is ready for its first step."""

    session: Session
    output: OutputFolder
    data: RunData
    batches: TrainingBatches
    tokenizer: PreTrainedTokenizerBase
    model_files: ModelFiles
    model_folder: Path
    resume: Resume | None
    startup: StartupMeter
    base: AdapterBase | None
    """The model that adapters are for; None where there are none."""
    origin: Origin

    @property
    def config(self) -> Config:
        return self.session.run_setup.config


def _run(config: Config, ranks: Ranks, given: Collection[str] | None, run_status: RunStatus) -> PredictionTask | None:
    with StartupMeter() as startup:
        return _run_measured(config, ranks, given, run_status, startup)


def _run_measured(
    config: Config, ranks: Ranks, given: Collection[str] | None, run_status: RunStatus, startup: StartupMeter
) -> PredictionTask | None:
    timing = RunTimer()
    _check_installed(config)
    if only_answers(config):
        return prepare_prediction(config, ranks, run_status, given=given)
    resume = find_resume(config, ranks, given=given)
    config = config if resume is None else resume.config
    watchdog = Watchdog(
        Activity(),
        ranks,
        minutes=config.saving.watchdog_minutes,
        clean_up=run_status.clean_up if ranks.is_first else None,
        open_store=partial(open_watchdog_store, ranks) if ranks.num_ranks > 1 else None,
    )
    try:
        return _watched(
            _prepare_run(config, ranks, given, run_status, resume, watchdog, startup),
            ranks,
            run_status,
            timing,
            watchdog,
        )
    finally:
        watchdog.stop()


def _watched(
    run: _PreparedRun, ranks: Ranks, run_status: RunStatus, timing: RunTimer, watchdog: Watchdog
) -> PredictionTask | None:
    try:
        return _train_and_save(run, run_status, timing, watchdog)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, ranks.rank, run.session.run_setup) from error
    except MobiusError as error:
        if (older := run.output.older_results_message) is not None:
            error.add_note(older)
        raise
    finally:
        run.output.close()


def _train_and_save(
    run: _PreparedRun, run_status: RunStatus, timing: RunTimer, watchdog: Watchdog
) -> PredictionTask | None:
    """Everything from the first step on; `watchdog` is stopped when connections are closed."""
    resume, is_first = run.resume, run.session.all_ranks.rank == 0
    session, output, config = run.session, run.output, run.config
    trains = config.evaluation.do_train
    try:
        saver, evaluator = _saver(run) if trains else None, _evaluator(run)
        trainer = _trainer(run, saver)
        state = resume.trainer_state().continued(config) if resume is not None and is_first else None
        if is_first:
            output.begin()
    except BaseException:
        output.discard()
        raise
    run_id = None if resume is None else resume.tracker_run_id
    log = open_log(session.run_setup, output.training_folder, state, tracker_run_id=run_id)
    if log is not None:
        run.startup.connect(log)
    loop = _loop(run, trainer, saver, evaluator, log, run_status, timing)
    timing.end_loading()
    try:
        ending = _train(run, loop) if trains else StopReason.LAST_STEP
        timing.end_training()
        if ending in (StopReason.SIGNAL, StopReason.TIME):
            _leave_early(ending, run, saver, loop, watchdog)
            return None
        is_changed = not trains or _has_changed(run, loop)
        if trains and saver is not None and config.evaluation.load_best_model_at_end:
            loop.result_step = _load_best_model(run, loop, saver)
        loop.evaluate_final()
        problems = _leave_result(run, log, run_status, is_changed=is_changed)
    finally:
        if log is not None:
            log.close()  # behind the model: a tracker may hang
    write_final_report(session, output, loop.steps, timing.timings(loop.steps), problems)
    watchdog.stop()
    _close(run, saver)
    return _prediction(run) if config.evaluation.predicts and is_first else None


def _leave_result(run: _PreparedRun, log: RunLog | None, run_status: RunStatus, *, is_changed: bool) -> list[str]:
    """Records and model, each in its place; returns problems with which the run ends once everything is there."""
    session, output, problems = run.session, run.output, list[str]()
    if log is not None:
        output.recreate_if_removed()
        session.activity.start_action("the picture of the training and the model card")
        problems = write_records(
            log, session.run_setup, output.training_folder, origin=run.origin, is_changed=is_changed
        )
        if output.is_renamed_at_commit:
            log.close()  # trackers open their files by name
    if run.config.evaluation.do_train:
        return problems + save_model(session, output, run.model_files, run_status, run.base)
    if log is not None:
        output.discard() if problems else output.commit()
    return problems


def _check_installed(config: Config) -> None:
    check_installed(config.output.trackers)
    if config.evaluation.predicts:
        check_scores_installed()


def _prepare_run(
    config: Config,
    ranks: Ranks,
    given: Collection[str] | None,
    run_status: RunStatus,
    resume: Resume | None,
    watchdog: Watchdog,
    startup: StartupMeter,
) -> _PreparedRun:
    """Read, plan, tokenize, meet and load; a run that is refused leaves nothing behind.

    The watchdog begins behind the data: ranks wait for the one that tokenizes for as long as it takes.
    """
    replica_rendezvous = join_replicas(config, ranks)
    config = resolve_dtype(config, ranks, given=given if resume is None else None)  # a checkpoint's format stays
    is_lora = config.adapters.is_lora
    model_folder = _model_folder(config, resume)
    check_same_model(config, model_folder, replica_rendezvous)
    model_config = load_model_config(model_folder, config.model)
    tokenizer = load_tokenizer(model_folder, model_config.vocab_size)
    if config.evaluation.predicts:
        check_generation_config(model_folder, tokenizer, model_config.vocab_size)
    model_files = read_model_files(model_folder).with_chat_template(resolve_template(config.data.chat_template))
    adopted = apply_saved_plan(config, given=given or ())
    # What cannot fit is refused before the data are read, which may take long.
    sketch = draft_run_setup(
        adopted.config, ranks, model_config, saved=adopted.saved, replica_rendezvous=replica_rendezvous
    )
    check_model_weights(model_folder, sketch.parts, config.model)
    base = find_adapter_base(sketch, model_folder, resume) if is_lora else None
    origin = origin_of(config, model_folder) if resume is None else resume.origin
    log_model(sketch, model_folder)
    rendezvous = wait_until_inputs_are_read(ranks)
    output = prepare_output(sketch, run_status, resume, model_folder=model_folder)
    try:
        check_save_dir(adopted.config, ranks, output.folder, replica_rendezvous)
        # Before the ranks meet: a long tokenization inside a process group would run into its time-out.
        startup.mark("planning")
        config, data, batches = read_data(adopted.config, ranks, tokenizer)
        if config.evaluation.predicts:
            prediction_samples(data, config)  # refused now, not behind the training
        check_same_data(data.fingerprint, data.evaluation_fingerprint, replica_rendezvous)
        if resume is not None:
            config = _continued(resume, config, data, batches)
        startup.mark("data")
        run_setup = complete_run_setup(sketch, config, packed=packed_rows(batches), saved=adopted.saved)
        _check_room(run_setup, output, batches, resume)
        watchdog.start()
        startup.mark("planning")
        session = open_session(
            run_setup,
            model_folder,
            recordings=recordings_of(run_setup, output.training_folder),
            on_plan_resolved=partial(write_settings, output),
            on_part_done=startup.mark,
            restore=None if resume is None else restoring(resume, run_setup, model_folder, watchdog.activity),
            activity=watchdog.activity,
        )
    except BaseException:
        output.discard()  # nothing is trained yet
        raise
    del rendezvous  # the ranks have met again
    log_stages(session)
    return _PreparedRun(
        session=session,
        output=output,
        data=data,
        batches=batches,
        tokenizer=tokenizer,
        model_files=model_files,
        model_folder=model_folder,
        resume=resume,
        startup=startup,
        base=base,
        origin=origin,
    )


def _model_folder(config: Config, resume: Resume | None) -> Path:
    """Folder of the model to train; a checkpoint of adapters has no weights of the base."""
    if resume is not None and not config.adapters.is_lora:
        return resume.reader.path
    return locate_model(config.model.model_path)


def _continued(resume: Resume, config: Config, data: RunData, batches: TrainingBatches) -> Config:
    """The configuration of a resumed run, whose data must be the checkpoint's and go on where that ended."""
    resume.check_steps(config)
    resume.check_data(data.fingerprint())
    batches.seek(resume.num_steps_done)
    return replace(config, planning=replace(config.planning, plan=None))  # its file goes with old checkpoints


def _check_room(run_setup: RunSetup, output: OutputFolder, batches: TrainingBatches, resume: Resume | None) -> None:
    """Refuse a run that could save none of the checkpoints that it is asked for."""
    config = run_setup.config
    if not (config.saving.is_on and config.evaluation.do_train and run_setup.rank_context.ranks.is_first):
        return
    num_saves = count_saves(
        config,
        num_steps_done=0 if resume is None else resume.num_steps_done,
        epochs_done=0.0 if resume is None else resume.epochs_done,
        epochs=config.optim.num_train_epochs or batches.num_epochs_of(config.optim.num_steps),
    )
    check_disk_space_for_run(run_setup, output.save_dir, num_saves=num_saves)


def _saver(run: _PreparedRun) -> CheckpointSaver | None:
    if not run.config.saving.is_on:
        return None
    run_metadata = collect_run_metadata(
        run.session.run_setup, run.model_files, run.data.fingerprint(), base=run.base, origin=run.origin
    )
    saver = CheckpointSaver(run.session, run.output.save_dir, run_metadata, on_complete=run.output.remove_older_results)
    if run.resume is not None:
        saver.resume_from(run.resume.reader.path, run.resume.num_steps_done, _best(run, BEST_SAVED).step)
    logger.info("%s", table_row("saving", saver.describe()))
    return saver


def _best(run: _PreparedRun, key: str) -> BestEvaluation:
    """The best evaluation of the run before this start, as far as those to come compare with it."""
    loop_state = {} if run.resume is None else run.resume.loop_state
    data = run.data.evaluation_fingerprint() if run.config.evaluation.evaluates else None
    return BestEvaluation.from_loop_state(run.config.evaluation.metric_for_best_model, loop_state, key, data=data)


def _evaluator(run: _PreparedRun) -> Evaluator | None:
    if not run.config.evaluation.evaluates:
        return None
    return make_evaluator(run.session, evaluation_samples(run.data), pad_token_id=pad_token_id(run.tokenizer))


def _trainer(run: _PreparedRun, saver: CheckpointSaver | None) -> Trainer:
    resume = run.resume
    return run.session.trainer(
        run.batches,
        num_steps_done=0 if resume is None else resume.num_steps_done,
        counts=None if resume is None else resume.counts,
        before_update=None if saver is None else saver.before_update,
    )


def _loop(
    run: _PreparedRun,
    trainer: Trainer,
    saver: CheckpointSaver | None,
    evaluator: Evaluator | None,
    log: RunLog | None,
    run_status: RunStatus,
    timing: RunTimer,
) -> TrainingLoop:
    loop_state = {} if run.resume is None else run.resume.loop_state
    best, older = _best(run, BEST), run.output.older_results
    if best.value is None and loop_state.get(BEST, {}).get("value") is not None:
        logger.info("the best evaluation so far is on other data or by another metric: the best one begins anew")
        if log is not None:
            log.forget_best()
    return TrainingLoop(
        config=run.config,
        trainer=trainer,
        saver=saver,
        evaluator=evaluator,
        log=log,
        run_status=run_status,
        folder=run.output.training_folder,
        save_dir=run.output.save_dir,
        started=min(timing.started, time.monotonic() - seconds_since_launch()),
        num_steps_done=trainer.num_steps_done,
        epoch=0.0 if run.resume is None else run.resume.epochs_done,
        best=best,
        best_saved=_best(run, BEST_SAVED),
        num_replicas=run.session.run_setup.rank_context.ranks.num_replicas,
        older=None if older is None else f"{run.output.save_dir} is as it was",
        recreate_run_folder=run.output.recreate_if_removed,
    )


def _train(run: _PreparedRun, loop: TrainingLoop) -> StopReason:
    run.startup.mark("optimizer")
    if loop.log is not None:
        loop.log.emit(run_started(run.session.run_setup, run.batches, run.startup))
    log_host_memory_usage(run.session, run.startup.host)
    ending = loop.run()
    run.session.write_recordings()
    if ending in (StopReason.LAST_STEP, StopReason.EARLY_STOPPING):
        check_trained_weights(
            run.session,
            num_updates=loop.trainer.counts.num_updates,
            num_steps=loop.trainer.num_steps_done,
            folder=run.output.training_folder,
        )
    return ending


def _has_changed(run: _PreparedRun, loop: TrainingLoop) -> bool:
    """Whether the run has trained anything, which is told where it has not; collective.

    A resumed run is compared with its checkpoint, and counts as changed: what came before that is not known.
    """
    session, resume, number = run.session, run.resume, len(loop.steps)
    before = session.source if resume is None else SavedWeights(resume.reader, session.run_setup.parts)
    if not number or before is None:
        return True
    session.activity.start_action("the comparison with the weights before training")
    if has_changed(session, before):
        return True
    since = "" if resume is None else f" since {resume.reader.path.name}"
    if session.all_ranks.rank == 0:
        logger.warning(
            "no parameter was changed by %d step%s%s: every update was zero or too small for --dtype %s. Raise "
            "--learning_rate (%g), and look at the gradient norms in %s",
            number,
            "" if number == 1 else "s",
            since,
            run.config.model.dtype,
            run.config.optim.learning_rate,
            run.output.save_dir / METRICS_FILE,
        )
    return resume is not None


def _load_best_model(run: _PreparedRun, loop: TrainingLoop, saver: CheckpointSaver) -> int:
    """Make the weights of the best checkpoint the result, unless the last ones are better; returns their step."""
    last, best, resume = loop.trainer.num_steps_done, loop.best_saved.step, run.resume
    if loop.best.step == last:
        return last
    earlier = None
    if resume is not None and best is not None and best <= resume.num_steps_done:
        earlier = checkpoint_path(resume.reader.path.parent, best)
    return load_best_model(run.session, saver, earlier) or last


def _leave_early(
    ending: StopReason, run: _PreparedRun, saver: CheckpointSaver | None, loop: TrainingLoop, watchdog: Watchdog
) -> None:
    """End a run before its last step: its state is saved as far as that worked. Raises SavedAndStopped after a signal.

    A run whose time is up ends well, or a launcher would start it again.
    """
    if loop.log is not None:
        loop.log.finish(ending.value)
        loop.log.close()
    told = "nothing is saved (--save_strategy no)" if saver is None else "no checkpoint could be saved"
    if saver is not None and saver.newest is not None:
        command = resume_command(
            command_words(), save_dir=None if run.resume is None else run.resume.inherited_save_dir
        )
        told = f"the state is saved in {saver.newest}"
        if saver.newest_step != loop.trainer.num_steps_done:
            told = f"this step could not be saved; the newest checkpoint is {saver.newest}"
        told += f". To go on: {command}"
    run.session.all_ranks.barrier()
    watchdog.stop()
    if ending is StopReason.SIGNAL:
        raise SavedAndStopped(f"after a step: {told}")
    logger.info("--max_run_time %g minutes are over: %s", run.config.saving.max_run_time, told)
    _close(run, saver)


def _close(run: _PreparedRun, saver: CheckpointSaver | None) -> None:
    if saver is not None:
        saver.close()
    run.session.close()


def _prediction(run: _PreparedRun) -> PredictionTask:
    """Everything that answers to the evaluation data need, without the memory of the run."""
    config = run.config
    whole = run.output.save_dir if run.base is None else merged_folder(config)
    return PredictionTask(
        folder=whole if config.evaluation.do_train else run.model_folder,
        samples=prediction_samples(run.data, config),
        output=run.output.save_dir,
        max_new_tokens=config.evaluation.max_new_tokens,
        device=run.session.run_setup.rank_context.device,
        status_text=f"after the last step: the model is complete and checked in {run.output.save_dir}"
        if config.evaluation.do_train
        else "after the evaluation",
    )
