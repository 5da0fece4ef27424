"""The life of a run, in order: read, plan, tokenize, meet, load, train, save, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedTokenizerBase

from mobius.activity import Activity
from mobius.checkpoints.folders import checkpoint_path
from mobius.config.config import Config
from mobius.config.launch import how_to_resume
from mobius.data.batches import Batches
from mobius.data.chat_templates import resolve_template
from mobius.errors import MobiusError
from mobius.interruption import SavedAndStopped, Standing
from mobius.machine.cpu_dtype import settle_dtype
from mobius.machine.host_use import HostUse
from mobius.messages.other_nodes import OtherNodes
from mobius.models.adapters.files import Base
from mobius.models.base_files import BaseFiles, read_base_files
from mobius.models.families import load_model_config, locate_model
from mobius.models.tokenizer import load_tokenizer, pad_token_id
from mobius.models.weights import check_model_weights
from mobius.output.model_card import Origin
from mobius.output.output_folder import OutputFolder
from mobius.output.run_log import METRICS_FILE, RunLog
from mobius.output.text_scores import check_scores_installed
from mobius.output.trackers import check_installed
from mobius.planning.alike import check_same_data, meet_replicas
from mobius.planning.blueprint import Blueprint, complete_blueprint, sketch_blueprint
from mobius.planning.planned import adopt_plan
from mobius.planning.same_files import check_same_model, check_save_dir
from mobius.ranks import Ranks, command_words, seconds_since_launch
from mobius.training.data import RunData, packed_rows, read_data
from mobius.training.export import check_result, has_changed
from mobius.training.judging.answering import only_answers, open_prediction, prompts
from mobius.training.judging.best import BEST, BEST_SAVED, BestSoFar
from mobius.training.judging.evaluation import Evaluator, evaluation_samples, make_evaluator
from mobius.training.judging.generation import check_generation
from mobius.training.loop import Ending, TrainingLoop
from mobius.training.milestones import log_host_use, log_model, log_stages, log_start
from mobius.training.opening import (
    base_of,
    merged_folder,
    origin_of,
    prepare_output,
    restore_folder,
    run_texts,
    tell_plan,
    wait_for_readers,
)
from mobius.training.out_of_memory import out_of_memory
from mobius.training.records import leave_records, open_log, recordings_of
from mobius.training.results import Prediction, Timing, finish, save_model, take_best
from mobius.training.resuming import Resume, SavedWeights, find_resume, restoring
from mobius.training.saving import CheckpointSaver, check_room, count_saves
from mobius.training.session import Session, open_session
from mobius.training.trainer import Trainer
from mobius.watchdog import Watchdog

logger = logging.getLogger(__name__)


def run_training(
    config: Config, ranks: Ranks, *, given: Collection[str] | None = None, standing: Standing | None = None
) -> None:
    """Fine-tune as `config` says and leave the results; every rank calls it.

    `given` are the options that the user set, which a plan (`--plan`) may not contradict, and which neither a default
    of another kind of device nor a checkpoint replaces; None: not known, all of them are taken as they are. `standing`
    is kept up to date for an interruption.

    Raises MobiusError for what a user can mend, and SavedAndStopped where an interruption was asked to save and has.
    After an error the process should end without further cleaning up: the device may be waiting for a neighbour for
    good.
    """
    standing = standing or Standing()
    try:
        prediction = _run(config, ranks, given, standing)
        if prediction is not None:
            standing.becomes(f"{prediction.left}; not all answers were generated")
            standing.goes_on_alone()
            prediction.run()  # the stages' memory is free by now
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, ranks.rank) from error


_OWNER_OF_PART: Final = {"connect": "connections", "rehearsal": "stages", "weights": "stages"}
"""Owner of the host memory that a part of the session's opening takes."""


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A run that is ready for its first step."""

    session: Session
    output: OutputFolder
    data: RunData
    batches: Batches
    tokenizer: PreTrainedTokenizerBase
    base_files: BaseFiles
    model_folder: Path
    resume: Resume | None
    host: HostUse
    base: Base | None
    """The model that adapters are for; None where there are none."""
    origin: Origin

    @property
    def config(self) -> Config:
        return self.session.blueprint.config


def _run(config: Config, ranks: Ranks, given: Collection[str] | None, standing: Standing) -> Prediction | None:
    timing = Timing()
    _check_installed(config)
    if only_answers(config):
        return open_prediction(config, ranks, standing, given=given)
    resume = find_resume(config, ranks, given=given)
    config = config if resume is None else resume.config
    watchdog = Watchdog(
        Activity(),
        rank=ranks.rank,
        num_ranks=ranks.num_local,
        first=ranks.node * ranks.num_local,
        minutes=config.saving.watchdog_minutes,
        left=standing.clear if ranks.is_first else None,
        beyond=OtherNodes(ranks) if ranks.num_nodes > 1 else None,
    )
    try:
        return _watched(_open(config, ranks, given, standing, resume, watchdog), ranks, standing, timing, watchdog)
    finally:
        watchdog.stop()


def _watched(run: _Opened, ranks: Ranks, standing: Standing, timing: Timing, watchdog: Watchdog) -> Prediction | None:
    try:
        return _train_and_save(run, standing, timing, watchdog)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, ranks.rank, run.session.blueprint) from error
    except MobiusError as error:
        if (older := run.output.told_older_results) is not None:
            error.add_note(older)
        raise
    finally:
        run.output.close()


def _train_and_save(run: _Opened, standing: Standing, timing: Timing, watchdog: Watchdog) -> Prediction | None:
    """Everything from the first step on; `watchdog` is stopped when connections are closed."""
    resume, is_first = run.resume, run.session.everyone.rank == 0
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
    log = open_log(session.blueprint, output.training_folder, state, tracker_run_id=run_id)
    loop = _loop(run, trainer, saver, evaluator, log, standing, timing)
    timing.ends_loading()
    try:
        ending = _train(run, loop) if trains else Ending.LAST_STEP
        timing.ends_training()
        if ending in (Ending.SIGNAL, Ending.TIME):
            _leave_early(ending, run, saver, loop, watchdog)
            return None
        is_changed = not trains or _has_changed(run, loop)
        if trains and saver is not None and config.evaluation.load_best_model_at_end:
            loop.result_step = _take_best(run, loop, saver)
        loop.judge_result()
        problems = _leave_result(run, log, standing, is_changed=is_changed)
    finally:
        if log is not None:
            log.close()  # behind the model: a tracker may hang
    finish(session, output, loop.steps, timing.of_run(loop.steps), problems)
    watchdog.stop()
    _close(run, saver)
    return _prediction(run) if config.evaluation.predicts and is_first else None


def _leave_result(run: _Opened, log: RunLog | None, standing: Standing, *, is_changed: bool) -> list[str]:
    """Records and model, each in its place; returns problems with which the run ends once everything is there."""
    session, output, problems = run.session, run.output, list[str]()
    if log is not None:
        restore_folder(output, session.blueprint)
        session.activity.begins("the picture of the training and the model card")
        problems = leave_records(
            log, session.blueprint, output.training_folder, origin=run.origin, is_changed=is_changed
        )
        if output.moves_at_the_end:
            log.close()  # trackers open their files by name
    if run.config.evaluation.do_train:
        return problems + save_model(session, output, run.base_files, standing, run.base)
    if log is not None:
        output.discard() if problems else output.commit()
    return problems


def _check_installed(config: Config) -> None:
    check_installed(config.output.trackers)
    if config.evaluation.predicts:
        check_scores_installed()


def _open(
    config: Config,
    ranks: Ranks,
    given: Collection[str] | None,
    standing: Standing,
    resume: Resume | None,
    watchdog: Watchdog,
) -> _Opened:
    """Read, plan, tokenize, meet and load; a run that is refused leaves nothing behind.

    The watchdog begins behind the data: ranks wait for the one that tokenizes for as long as it takes.
    """
    host = HostUse()
    everyone = meet_replicas(config, ranks)
    config = settle_dtype(config, ranks, given=given if resume is None else None)  # a checkpoint's format stays
    is_lora = config.adapters.is_lora
    model_folder = _model_folder(config, resume)
    check_same_model(config, model_folder, everyone)
    model_config = load_model_config(model_folder, config.model)
    tokenizer = load_tokenizer(model_folder, model_config.vocab_size)
    if config.evaluation.predicts:
        check_generation(model_folder, tokenizer, model_config.vocab_size)
    base_files = read_base_files(model_folder).with_chat_template(resolve_template(config.data.chat_template))
    adopted = adopt_plan(config, given=given or ())
    # What cannot fit is refused before the data are read, which may take long.
    sketch = sketch_blueprint(adopted.config, ranks, model_config, saved=adopted.saved, everyone=everyone)
    check_model_weights(model_folder, sketch.parts, config.model)
    base = base_of(sketch, model_folder, resume) if is_lora else None
    origin = origin_of(config, model_folder) if resume is None else resume.origin
    log_model(sketch, model_folder)
    meeting = wait_for_readers(ranks)
    output = prepare_output(sketch, standing, resume, model_folder=model_folder)
    try:
        check_save_dir(adopted.config, ranks, output.partial, everyone)
        # Before the ranks meet: a long tokenization inside a process group would run into its time-out.
        config, data, batches = read_data(adopted.config, ranks, tokenizer)
        if config.evaluation.predicts:
            prompts(data, config)  # refused now, not behind the training
        check_same_data(data.fingerprint, data.judged_fingerprint, everyone)
        if resume is not None:
            config = _continued(resume, config, data, batches)
        blueprint = complete_blueprint(sketch, config, packed=packed_rows(batches), saved=adopted.saved)
        _check_room(blueprint, output, batches, resume)
        watchdog.start()
        host.mark("data and tokenizer")
        session = open_session(
            blueprint,
            model_folder,
            recordings=recordings_of(blueprint, output.training_folder),
            settled=partial(tell_plan, output),
            passed=lambda part: host.mark(_OWNER_OF_PART[part]),
            restore=None if resume is None else restoring(resume, blueprint, model_folder, watchdog.activity),
            activity=watchdog.activity,
        )
    except BaseException:
        output.discard()  # nothing is trained yet
        raise
    del meeting  # the ranks have met again
    log_stages(session)
    return _Opened(
        session=session,
        output=output,
        data=data,
        batches=batches,
        tokenizer=tokenizer,
        base_files=base_files,
        model_folder=model_folder,
        resume=resume,
        host=host,
        base=base,
        origin=origin,
    )


def _model_folder(config: Config, resume: Resume | None) -> Path:
    """Folder of the model to train; a checkpoint of adapters has no weights of the base."""
    if resume is not None and not config.adapters.is_lora:
        return resume.reader.model_folder
    return locate_model(config.model.model_path)


def _continued(resume: Resume, config: Config, data: RunData, batches: Batches) -> Config:
    """The configuration of a resumed run, whose data must be the checkpoint's and go on where that ended."""
    resume.check_steps(config)
    resume.check_data(data.fingerprint())
    batches.seek(resume.steps_done)
    return replace(config, planning=replace(config.planning, plan=None))  # its file goes with old checkpoints


def _check_room(blueprint: Blueprint, output: OutputFolder, batches: Batches, resume: Resume | None) -> None:
    """Refuse a run that could save none of the checkpoints that it is asked for."""
    config = blueprint.config
    if not (config.saving.is_on and config.evaluation.do_train and blueprint.place.ranks.is_first):
        return
    num_saves = count_saves(
        config,
        steps_done=0 if resume is None else resume.steps_done,
        epochs_done=0.0 if resume is None else resume.epochs_done,
        epochs=config.optim.num_train_epochs or batches.num_epochs_of(config.optim.num_steps),
    )
    check_room(blueprint, output.save_dir, num_saves=num_saves)


def _saver(run: _Opened) -> CheckpointSaver | None:
    if not run.config.saving.is_on:
        return None
    texts = run_texts(run.session.blueprint, run.base_files, run.data.fingerprint(), base=run.base, origin=run.origin)
    saver = CheckpointSaver(run.session, run.output.save_dir, texts, made_safe=run.output.first_is_safe)
    if run.resume is not None:
        saver.continues(run.resume.reader.path, run.resume.steps_done, _best(run, BEST_SAVED).step)
    logger.info("%s", saver.describe())
    return saver


def _best(run: _Opened, key: str) -> BestSoFar:
    """The best evaluation of the run before this start, as far as those to come compare with it."""
    position = {} if run.resume is None else run.resume.position
    data = run.data.judged_fingerprint() if run.config.evaluation.evaluates else None
    return BestSoFar.from_position(run.config.evaluation.metric_for_best_model, position, key, data=data)


def _evaluator(run: _Opened) -> Evaluator | None:
    if not run.config.evaluation.evaluates:
        return None
    return make_evaluator(run.session, evaluation_samples(run.data), pad_token_id=pad_token_id(run.tokenizer))


def _trainer(run: _Opened, saver: CheckpointSaver | None) -> Trainer:
    resume = run.resume
    return run.session.trainer(
        run.batches,
        steps_done=0 if resume is None else resume.steps_done,
        counts=None if resume is None else resume.counts,
        before_update=None if saver is None else saver.before_update,
    )


def _loop(
    run: _Opened,
    trainer: Trainer,
    saver: CheckpointSaver | None,
    evaluator: Evaluator | None,
    log: RunLog | None,
    standing: Standing,
    timing: Timing,
) -> TrainingLoop:
    position = {} if run.resume is None else run.resume.position
    best, older = _best(run, BEST), run.output.older_results
    if best.value is None and position.get(BEST, {}).get("value") is not None:
        logger.info("the best evaluation so far is on other data or by another metric: the best one begins anew")
        if log is not None:
            log.forget_best()
    return TrainingLoop(
        config=run.config,
        trainer=trainer,
        saver=saver,
        evaluator=evaluator,
        log=log,
        standing=standing,
        folder=run.output.training_folder,
        save_dir=run.output.save_dir,
        started=min(timing.started, time.monotonic() - seconds_since_launch()),
        steps_done=trainer.num_steps_done,
        epoch=0.0 if run.resume is None else run.resume.epochs_done,
        best=best,
        best_saved=_best(run, BEST_SAVED),
        num_replicas=run.session.blueprint.place.ranks.num_replicas,
        older=None if older is None else f"{run.output.save_dir} is as it was",
        restore_folder=partial(restore_folder, run.output, run.session.blueprint),
    )


def _train(run: _Opened, loop: TrainingLoop) -> Ending:
    log_start(run.session.blueprint)
    log_host_use(run.session, run.host)
    ending = loop.run()
    run.session.write_recordings()
    if ending in (Ending.LAST_STEP, Ending.EARLY_STOPPING):
        check_result(
            run.session,
            num_updates=loop.trainer.counts.num_updates,
            num_steps=loop.trainer.num_steps_done,
            folder=run.output.training_folder,
        )
    return ending


def _has_changed(run: _Opened, loop: TrainingLoop) -> bool:
    """Whether the run has trained anything, which is told where it has not; collective.

    A resumed run is compared with its checkpoint, and counts as changed: what came before that is not known.
    """
    session, resume, number = run.session, run.resume, len(loop.steps)
    before = session.source if resume is None else SavedWeights(resume.reader, session.blueprint.parts)
    if not number or before is None:
        return True
    session.activity.begins("the comparison with the weights before training")
    if has_changed(session, before):
        return True
    since = "" if resume is None else f" since {resume.reader.path.name}"
    if session.everyone.rank == 0:
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


def _take_best(run: _Opened, loop: TrainingLoop, saver: CheckpointSaver) -> int:
    """Make the weights of the best checkpoint the result, unless the last ones are better; returns their step."""
    last, best, resume = loop.trainer.num_steps_done, loop.best_saved.step, run.resume
    if loop.best.step == last:
        return last
    earlier = None
    if resume is not None and best is not None and best <= resume.steps_done:
        earlier = checkpoint_path(resume.reader.path.parent, best)
    return take_best(run.session, saver, earlier) or last


def _leave_early(
    ending: Ending, run: _Opened, saver: CheckpointSaver | None, loop: TrainingLoop, watchdog: Watchdog
) -> None:
    """End a run before its last step: its state is saved as far as that worked. Raises SavedAndStopped after a signal.

    A run whose time is up ends well, or a launcher would start it again.
    """
    if loop.log is not None:
        loop.log.finish()
        loop.log.close()
    told = "nothing is saved (--save_strategy no)" if saver is None else "no checkpoint could be saved"
    if saver is not None and saver.newest is not None:
        command = how_to_resume(command_words(), save_dir=None if run.resume is None else run.resume.taken_save_dir)
        told = f"the state is saved in {saver.newest}"
        if saver.newest_step != loop.trainer.num_steps_done:
            told = f"this step could not be saved; the newest checkpoint is {saver.newest}"
        told += f". To go on: {command}"
    run.session.everyone.barrier()
    watchdog.stop()
    if ending is Ending.SIGNAL:
        raise SavedAndStopped(f"after a step: {told}")
    logger.info("--max_run_time %g minutes are over: %s", run.config.saving.max_run_time, told)
    _close(run, saver)


def _close(run: _Opened, saver: CheckpointSaver | None) -> None:
    if saver is not None:
        saver.close()
    run.session.close()


def _prediction(run: _Opened) -> Prediction:
    """Everything that answers to the evaluation data need, without the memory of the run."""
    config = run.config
    whole = run.output.save_dir if run.base is None else merged_folder(config)
    return Prediction(
        folder=whole if config.evaluation.do_train else run.model_folder,
        samples=prompts(run.data, config),
        output=run.output.save_dir,
        max_new_tokens=config.evaluation.max_new_tokens,
        device=run.session.blueprint.place.device,
        left=f"after the last step: the model is complete and checked in {run.output.save_dir}"
        if config.evaluation.do_train
        else "after the evaluation",
    )
