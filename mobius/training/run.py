"""The life of a run, in order: read, plan, tokenize, meet, load, train, save, report.

run_training -> TrainingRun: open -> fit -> save -> close -> answers to evaluation data, if any are asked for
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mobius.activity import Activity
from mobius.checkpoint.export import save_model
from mobius.checkpoint.folders import checkpoint_path
from mobius.checkpoint.merged_model import merged_folder
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.restore import SavedWeights, load_best_model
from mobius.checkpoint.resume import find_resume
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.run_settings import check_disk_space_for_run, count_saves, prepare_output, write_settings
from mobius.checkpoint.saver import CheckpointSaver, collect_run_metadata
from mobius.checkpoint.trained_weights import check_trained_weights, has_changed
from mobius.config.config import Config
from mobius.config.launch import resume_command
from mobius.data.batches import TrainingBatches
from mobius.data.chat_templates import resolve_template
from mobius.distributed.node_checks import check_same_data, join_replicas
from mobius.distributed.rendezvous import open_watchdog_store
from mobius.distributed.watchdog import Watchdog
from mobius.errors import MobiusError
from mobius.hardware.cpu_dtype import resolve_dtype
from mobius.models.families import load_model_config, locate_model
from mobius.models.model_files import ModelFiles, read_model_files
from mobius.models.peft_folder import AdapterBase
from mobius.models.tokenizer import load_tokenizer, pad_token_id
from mobius.models.weights import check_model_weights
from mobius.planner.plan_file import apply_saved_plan
from mobius.planner.run_setup import RunSetup, complete_run_setup, draft_run_setup
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
from mobius.training.file_checks import check_same_model, check_save_dir
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
    `run_status` is updated for interruptions.

    Raises MobiusError for what a user can mend, and SavedAndStopped where an interruption was asked to save and has.
    After an error the process should end without further cleaning up: the device may be waiting for a neighbour for
    good.
    """
    run_status = run_status or RunStatus()
    try:
        prediction = _run(config, ranks, given, run_status)
        if prediction is not None:
            run_status.set_status(f"{prediction.status_text}; not all answers were generated")
            run_status.is_detached = True
            prediction.run()  # the stages' memory is free by now
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, ranks.rank) from error


def _run(config: Config, ranks: Ranks, given: Collection[str] | None, run_status: RunStatus) -> PredictionTask | None:
    """Train and evaluate as far as that is asked for; returns the answers that are left to be generated."""
    with StartupMeter() as startup:
        check_installed(config.output.trackers)
        if config.evaluation.do_predict:
            check_scores_installed()
        if only_answers(config):
            return prepare_prediction(config, ranks, run_status, given=given)
        run = TrainingRun(config, ranks, given=given, run_status=run_status, startup=startup)
        try:
            run.open()
            with run.until_closed():
                ending = run.fit()
                if ending in (StopReason.SIGNAL, StopReason.TIME):
                    run.stop_early(ending)
                    return None
                run.save()
                run.close()
        finally:
            run.watchdog.stop()
        return run.prediction_task()


class TrainingRun:
    """Training and evaluation on one rank: `open`, `fit`, `save` and `close`, which all ranks call in this order."""

    model_folder: Path
    """Folder of the weights that the run begins with. This and all below are set by `open`."""
    model_files: ModelFiles
    tokenizer: PreTrainedTokenizerBase
    base: AdapterBase | None
    """The model that adapters are for; None without adapters."""
    origin: Origin
    output: OutputFolder
    data: RunData
    batches: TrainingBatches
    session: Session
    saver: CheckpointSaver | None
    loop: TrainingLoop
    """Set by `fit`, as `saver`."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        *,
        given: Collection[str] | None,
        run_status: RunStatus,
        startup: StartupMeter,
    ) -> None:
        """Find the checkpoint to resume from, if one is asked for; arguments are those of `run_training`."""
        self.timing = RunTimer()
        self.log: RunLog | None = None
        """The first rank's, from `fit` on."""
        self.ranks, self.given, self.run_status, self.startup = ranks, given, run_status, startup
        self.resume = find_resume(config, ranks, given=given)
        self.config = config if self.resume is None else self.resume.config
        """The configuration as far as it is resolved: after `open` with numbers in the place of auto."""
        self.watchdog = Watchdog(
            Activity(),
            ranks,
            minutes=config.saving.watchdog_minutes,
            clean_up=run_status.clean_up if ranks.is_first else None,
            open_store=partial(open_watchdog_store, ranks) if ranks.num_ranks > 1 else None,
        )

    # open

    def open(self) -> None:
        """Read, plan, tokenize, meet and load; a run that is refused leaves no files.

        The watchdog begins after the data: ranks wait for the one that tokenizes for as long as it takes.
        """
        draft = self._read_model()
        rendezvous = wait_until_inputs_are_read(self.ranks)
        self.output = prepare_output(draft, self.run_status, self.resume, model_folder=self.model_folder)
        try:
            check_save_dir(self.config, self.ranks, self.output.folder, draft.rank_context.replica_rendezvous)
            # Before the ranks meet: a long tokenization inside a process group would run into its time-out.
            self.startup.mark("planning")
            self._read_data(draft)
            self.startup.mark("data")
            run_setup = complete_run_setup(draft, self.config, packed=packed_rows(self.batches))
            self._check_disk_space(run_setup)
            self.watchdog.start()
            self.startup.mark("planning")
            self._load(run_setup)
            del rendezvous  # the ranks have met again
        except BaseException:
            self.output.discard()  # nothing is trained yet
            raise
        log_stages(self.session)

    def _read_model(self) -> RunSetup:
        """Read everything of the model but its weights, and draft the run: what cannot fit is refused at once."""
        replicas, resume = join_replicas(self.config, self.ranks), self.resume
        # A checkpoint's format stays.
        config = resolve_dtype(self.config, self.ranks, given=self.given if resume is None else None)
        self.model_folder = locate_model(config.model.model_path)
        if resume is not None and not config.adapters.is_lora:  # a checkpoint of adapters has no weights of the base
            self.model_folder = resume.reader.path
        check_same_model(config, self.model_folder, replicas)
        model_config = load_model_config(self.model_folder, config.model)
        self.tokenizer = load_tokenizer(self.model_folder, model_config.vocab_size)
        if config.evaluation.do_predict:
            check_generation_config(self.model_folder, self.tokenizer, model_config.vocab_size)
        chat_template = resolve_template(config.data.chat_template)
        self.model_files = read_model_files(self.model_folder).with_chat_template(chat_template)
        self.config, saved = apply_saved_plan(config, given=self.given or ())
        draft = draft_run_setup(self.config, self.ranks, model_config, saved=saved, replica_rendezvous=replicas)
        check_model_weights(self.model_folder, draft.parts, config.model)
        self.base = find_adapter_base(draft, self.model_folder, resume) if config.adapters.is_lora else None
        self.origin = origin_of(config, self.model_folder) if resume is None else resume.origin
        log_model(draft, self.model_folder)
        return draft

    def _read_data(self, draft: RunSetup) -> None:
        """Tokenize; all replicas must see the same samples, and a resumed run those that it has begun with."""
        self.config, self.data, self.batches = read_data(self.config, self.ranks, self.tokenizer)
        if self.config.evaluation.do_predict:
            prediction_samples(self.data, self.config)  # refused now, not after the training
        check_same_data(self.data.fingerprint, self.data.evaluation_fingerprint, draft.rank_context.replica_rendezvous)
        if self.resume is not None:
            self.resume.check_steps(self.config)
            self.resume.check_data(self.data.fingerprint())
            self.batches.seek(self.resume.num_steps_done)
            # A plan's file goes with old checkpoints.
            self.config = replace(self.config, planning=replace(self.config.planning, plan=None))

    def _check_disk_space(self, run_setup: RunSetup) -> None:
        """Refuse a run that could save none of the checkpoints that it is asked for."""
        config = run_setup.config
        if not (config.saving.is_on and config.evaluation.do_train and self.ranks.is_first):
            return
        num_saves = count_saves(
            config,
            num_steps_done=0 if self.resume is None else self.resume.num_steps_done,
            epochs_done=0.0 if self.resume is None else self.resume.epochs_done,
            epochs=config.optim.num_train_epochs or self.batches.num_epochs_of(config.optim.num_steps),
        )
        check_disk_space_for_run(run_setup, self.output.save_dir, num_saves=num_saves)

    def _load(self, run_setup: RunSetup) -> None:
        """Meet the other ranks, settle the plan, and fill the stages."""
        resume, activity = self.resume, self.watchdog.activity
        self.session = open_session(
            run_setup,
            self.model_folder,
            recordings=recordings_of(run_setup, self.output.training_folder),
            on_plan_resolved=partial(write_settings, self.output),
            on_part_done=self.startup.mark,
            restore=None if resume is None else restoring(resume, run_setup, self.model_folder, activity),
            activity=activity,
        )
        self.config = self.session.run_setup.config

    # fit

    @contextmanager
    def until_closed(self) -> Iterator[None]:
        """Context of an open run: says of an error what it leaves, and closes log and folder whatever happens."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error, self.ranks.rank, self.session.run_setup) from error
        except MobiusError as error:
            if (older := self.output.older_results_message) is not None:
                error.add_note(older)
            raise
        finally:
            if self.log is not None:
                self.log.close()
            self.output.close()

    def fit(self) -> StopReason:
        """Run all steps that are left, with the evaluations and saves between them; without training none."""
        try:
            self._prepare_loop()
        except BaseException:
            self.output.discard()  # nothing is trained yet
            raise
        self.timing.end_loading()
        if not self.config.evaluation.do_train:
            self.timing.end_training()
            return StopReason.LAST_STEP
        self.startup.mark("optimizer")
        if self.log is not None:
            self.log.emit(run_started(self.session.run_setup, self.batches, self.startup))
        log_host_memory_usage(self.session, self.startup.host)
        ending = self.loop.run()
        self.session.write_recordings()
        if ending in (StopReason.LAST_STEP, StopReason.EARLY_STOPPING):
            check_trained_weights(
                self.session,
                num_updates=self.loop.trainer.counts.num_updates,
                num_steps=self.loop.trainer.num_steps_done,
                folder=self.output.training_folder,
            )
        self.timing.end_training()
        return ending

    def _prepare_loop(self) -> None:
        """Put together what trains, saves, evaluates and logs."""
        resume, session, config = self.resume, self.session, self.config
        self.saver = self._make_saver() if config.evaluation.do_train and config.saving.is_on else None
        evaluator = None
        if config.evaluation.evaluates:
            pad = pad_token_id(self.tokenizer)
            evaluator = make_evaluator(session, evaluation_samples(self.data), pad_token_id=pad)
        trainer = session.trainer(
            self.batches,
            num_steps_done=0 if resume is None else resume.num_steps_done,
            counts=None if resume is None else resume.counts,
            before_update=None if self.saver is None else self.saver.before_update,
        )
        state = resume.trainer_state().continued(config) if resume is not None and session.is_first else None
        if session.is_first:
            self.output.begin()
        run_id = None if resume is None else resume.tracker_run_id
        self.log = open_log(session.run_setup, self.output.training_folder, state, tracker_run_id=run_id)
        if self.log is not None:
            self.startup.connect(self.log)
        self.loop = self._make_loop(trainer, evaluator)

    def _make_saver(self) -> CheckpointSaver:
        run_metadata = collect_run_metadata(
            self.session.run_setup, self.model_files, self.data.fingerprint(), base=self.base, origin=self.origin
        )
        complete = self.output.remove_older_results
        saver = CheckpointSaver(self.session, self.output.save_dir, run_metadata, on_complete=complete)
        if self.resume is not None:
            saver.resume_from(self.resume.reader.path, self.resume.num_steps_done, self._best(BEST_SAVED).step)
        logger.info("%s", table_row("saving", saver.describe()))
        return saver

    def _best(self, key: str) -> BestEvaluation:
        """The best evaluation of the run before this start, as far as those to come compare with it."""
        loop_state = {} if self.resume is None else self.resume.loop_state
        data = self.data.evaluation_fingerprint() if self.config.evaluation.evaluates else None
        return BestEvaluation.from_loop_state(self.config.evaluation.metric_for_best_model, loop_state, key, data=data)

    def _make_loop(self, trainer: Trainer, evaluator: Evaluator | None) -> TrainingLoop:
        loop_state = {} if self.resume is None else self.resume.loop_state
        best, older = self._best(BEST), self.output.older_results
        if best.value is None and loop_state.get(BEST, {}).get("value") is not None:
            logger.info("the best evaluation so far is on other data or by another metric: the best one begins anew")
            if self.log is not None:
                self.log.state.set_best(None)
        return TrainingLoop(
            config=self.config,
            trainer=trainer,
            saver=self.saver,
            evaluator=evaluator,
            log=self.log,
            run_status=self.run_status,
            folder=self.output.training_folder,
            save_dir=self.output.save_dir,
            started=min(self.timing.started, time.monotonic() - seconds_since_launch()),
            num_steps_done=trainer.num_steps_done,
            epoch=0.0 if self.resume is None else self.resume.epochs_done,
            best=best,
            best_saved=self._best(BEST_SAVED),
            num_replicas=self.ranks.num_replicas,
            older=None if older is None else f"{self.output.save_dir} is as it was",
            recreate_run_folder=self.output.recreate_if_removed,
        )

    def stop_early(self, ending: StopReason) -> None:
        """End before the last step: the state is saved as far as that worked. Raises SavedAndStopped after a signal.

        A run whose time is up ends well, or a launcher would start it again.
        """
        saver, resume = self.saver, self.resume
        if self.log is not None:
            self.log.finish(ending.value)
            self.log.close()
        text = "nothing is saved (--save_strategy no)" if saver is None else "no checkpoint could be saved"
        if saver is not None and saver.newest is not None:
            inherited = None if resume is None else resume.inherited_save_dir
            text = f"the state is saved in {saver.newest}"
            if saver.newest_step != self.loop.trainer.num_steps_done:
                text = f"this step could not be saved; the newest checkpoint is {saver.newest}"
            text += f". To go on: {resume_command(command_words(), save_dir=inherited)}"
        self.session.all_ranks.barrier()
        self.watchdog.stop()
        if ending is StopReason.SIGNAL:
            raise SavedAndStopped(f"after a step: {text}")
        logger.info("--max_run_time %g minutes are over: %s", self.config.saving.max_run_time, text)
        self._disconnect()

    # save

    def save(self) -> None:
        """Evaluate what is to be saved, leave records and model, and report; raises CheckpointError for what failed."""
        trains = self.config.evaluation.do_train
        is_changed = not trains or self._has_changed()
        if trains and self.saver is not None and self.config.evaluation.load_best_model_at_end:
            self.loop.result_step = self._load_best_model(self.saver)
        self.loop.evaluate_final()
        problems = self._write_results(is_changed=is_changed)
        if self.log is not None:
            self.log.close()  # after the model: a tracker may hang
        steps = self.loop.steps
        write_final_report(self.session, self.output, steps, self.timing.timings(steps), problems)

    def _has_changed(self) -> bool:
        """Whether the run has trained anything; warns if it has not. Collective.

        A resumed run is compared with its checkpoint, and counts as changed: what came before that is not known.
        """
        session, resume, number = self.session, self.resume, len(self.loop.steps)
        before = session.source if resume is None else SavedWeights(resume.reader, session.run_setup.parts)
        if not number or before is None:
            return True
        session.activity.start_action("the comparison with the weights before training")
        if has_changed(session, before):
            return True
        since = "" if resume is None else f" since {resume.reader.path.name}"
        if session.is_first:
            logger.warning(
                "no parameter was changed by %d step%s%s: every update was zero or too small for --dtype %s. Raise "
                "--learning_rate (%g), and look at the gradient norms in %s",
                number,
                "" if number == 1 else "s",
                since,
                self.config.model.dtype,
                self.config.optim.learning_rate,
                self.output.save_dir / METRICS_FILE,
            )
        return resume is not None

    def _load_best_model(self, saver: CheckpointSaver) -> int:
        """Make the weights of the best checkpoint the result, unless the last ones are better; returns their step."""
        last, best, resume = self.loop.trainer.num_steps_done, self.loop.best_saved.step, self.resume
        if self.loop.best.step == last:
            return last
        earlier = None
        if resume is not None and best is not None and best <= resume.num_steps_done:
            earlier = checkpoint_path(resume.reader.path.parent, best)
        return load_best_model(self.session, saver.save_dir, saver.best_step, earlier) or last

    def _write_results(self, *, is_changed: bool) -> list[str]:
        """Records and model, each in its place; returns problems with which the run ends once everything is there."""
        session, output, log, problems = self.session, self.output, self.log, list[str]()
        if log is not None:
            output.recreate_if_removed()
            session.activity.start_action("the picture of the training and the model card")
            problems = write_records(
                log, session.run_setup, output.training_folder, origin=self.origin, is_changed=is_changed
            )
            if output.is_renamed_at_commit:
                log.close()  # trackers open their files by name
        if self.config.evaluation.do_train:
            return problems + save_model(session, output, self.model_files, self.run_status, self.base)
        if log is not None:
            output.discard() if problems else output.commit()
        return problems

    # close

    def close(self) -> None:
        """End the connections and give memory back."""
        self.watchdog.stop()
        self._disconnect()

    def _disconnect(self) -> None:
        if self.saver is not None:
            self.saver.close()
        self.session.close()

    def prediction_task(self) -> PredictionTask | None:
        """Facts that answers to evaluation data need, without the run's memory; None where no answers are wanted."""
        config = self.config
        if not (config.evaluation.do_predict and self.session.is_first):
            return None
        whole = self.output.save_dir if self.base is None else merged_folder(config)
        trained = f"after the last step: the model is complete and checked in {self.output.save_dir}"
        return PredictionTask(
            folder=whole if config.evaluation.do_train else self.model_folder,
            samples=prediction_samples(self.data, config),
            output=self.output.save_dir,
            max_new_tokens=config.evaluation.max_new_tokens,
            device=self.session.run_setup.rank_context.device,
            status_text=trained if config.evaluation.do_train else "after the evaluation",
        )
