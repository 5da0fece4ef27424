"""The life of a run, in order: read, plan, tokenize, meet, load, train, save, report.

run_training -> TrainingRun: open -> fit -> save -> close -> prediction, if one is asked for
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mobius.activity import Activity
from mobius.checkpoint.contents import CheckpointContents
from mobius.checkpoint.durable_steps import DurableSteps, empty_slot_before, remove_slots, slot_place
from mobius.checkpoint.export import save_model
from mobius.checkpoint.folders import checkpoint_path
from mobius.checkpoint.hub import check_hub, push_to_hub, upload_command
from mobius.checkpoint.merged_model import merged_folder
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.restore import SavedWeights, load_best_model
from mobius.checkpoint.resume import find_resume
from mobius.checkpoint.run_folder import OutputFolder
from mobius.checkpoint.run_settings import check_disk_space_for_run, count_saves, prepare_output, write_settings
from mobius.checkpoint.saver import CheckpointSaver
from mobius.checkpoint.slot_reader import SlotReader
from mobius.checkpoint.trained_weights import check_trained_weights, has_changed
from mobius.config.config import Config
from mobius.config.launch import resume_command
from mobius.data.chat_templates import resolve_template
from mobius.distributed.node_checks import check_same_data, join_replicas
from mobius.distributed.rendezvous import open_watchdog_store
from mobius.distributed.watchdog import Watchdog
from mobius.engine.slot_files import SlotFiles, SlotPlace
from mobius.errors import CheckpointError, MobiusError
from mobius.hardware.cpu_dtype import resolve_dtype
from mobius.models.families import load_model_config, locate_model
from mobius.models.model_files import ModelFiles, read_model_files
from mobius.models.peft_folder import AdapterBase
from mobius.models.tokenizer import load_tokenizer, pad_token_id
from mobius.models.weights import check_model_weights, folder_has_weights
from mobius.planner.plan_file import apply_saved_plan
from mobius.planner.run_setup import RunSetup, complete_run_setup, draft_run_setup
from mobius.ranks import Ranks, command_words, seconds_since_launch
from mobius.reporting.events import table_row
from mobius.reporting.run_log import METRICS_FILE, RunLog
from mobius.reporting.trackers import check_installed
from mobius.signal_handling import RunStatus, SavedAndStopped
from mobius.training.data import RunData, packed_rows, read_data
from mobius.training.evaluation.evaluator import Evaluator
from mobius.training.evaluation.generation import check_generation_config
from mobius.training.evaluation.prediction import predict_and_report, prediction_samples
from mobius.training.evaluation.text_scores import check_scores_installed
from mobius.training.file_checks import (
    check_same_model,
    check_save_dir,
    find_adapter_base,
    wait_until_inputs_are_read,
)
from mobius.training.loop import BEST, BEST_SAVED, BestEvaluation, StopReason, TrainingLoop
from mobius.training.out_of_memory import out_of_memory
from mobius.training.reporting import (
    StartupMeter,
    gather_memory,
    log_disk_rates,
    log_end_token,
    log_host_memory_usage,
    log_model,
    log_stages,
    open_log,
    recordings_of,
    run_started,
    write_final_report,
    write_records,
)
from mobius.training.session import Session, open_session

logger = logging.getLogger(__name__)


def run_training(
    config: Config,
    ranks: Ranks,
    *,
    given: Collection[str] | None = None,
    run_status: RunStatus | None = None,
) -> None:
    """Fine-tune as `config` says and leave the results; every rank calls it.

    `given` are the options that the user set, which a plan (`--plan`) may not contradict, and which neither a default
    of another kind of device nor a checkpoint replaces; None: not known, all of them are taken as they are.
    `run_status` is updated for interruptions.

    Raises MobiusError for what a user can mend, and SavedAndStopped where an interruption was asked to save and has.
    After an error the process should end without further cleaning up: the device may be waiting for a neighbour for
    good.
    """
    try:
        predict = _run(config, ranks, given, run_status or RunStatus())
        if predict is not None:
            predict()  # the stages' memory is free by now
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, ranks.rank) from error


def _run(
    config: Config, ranks: Ranks, given: Collection[str] | None, run_status: RunStatus
) -> Callable[[], None] | None:
    """Train and evaluate as far as that is asked for; returns the prediction that is left, if any."""
    with StartupMeter() as startup:
        check_installed(config.output.trackers)
        if config.evaluation.do_predict:
            check_scores_installed()
        run = TrainingRun(config, ranks, given=given, run_status=run_status, startup=startup)
        if run.only_predicts:
            return run.prepare_prediction()
        try:
            run.open()
            with run.until_closed():
                ending = run.fit()
                if ending in (StopReason.SIGNAL, StopReason.TIME):
                    run.stop_early(ending)
                    return None
                run.save()
                run.close()
            run.push()
        finally:
            run.watchdog.stop()
        return run.prediction()


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
        self.log: RunLog | None = None
        """The first rank's, from `fit` on."""
        self.ranks, self.given, self.run_status, self.startup = ranks, given, run_status, startup
        self.only_predicts = not config.evaluation.do_train and not config.evaluation.do_eval
        """Whether `prepare_prediction` takes the place of all else."""
        self.resume = None if self.only_predicts else find_resume(config, ranks, given=given)
        self.config = config if self.resume is None else self.resume.config
        """The configuration as far as it is resolved: after `open` with numbers in the place of auto."""
        resume = self.resume
        self.steps_before = 0 if resume is None else resume.num_steps_done
        self.epochs_before = 0.0 if resume is None else resume.epochs_done
        self.loop_state = {} if resume is None else resume.loop_state
        self.slots: SlotPlace | None = None
        """Where steps are kept, if they are durable; else an earlier start may have left some there."""
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
        if self.config.output.push_to_hub and self.ranks.is_first:
            check_hub(self.config.output)
        draft = self._read_model()
        rendezvous = wait_until_inputs_are_read(self.ranks)
        self.output = prepare_output(draft, self.run_status, self.resume, model_folder=self.model_folder)
        try:
            check_save_dir(self.config, self.ranks, self.output.save_dir, draft.rank_context.replica_rendezvous)
            # Before the ranks meet: a long tokenization inside a process group would run into its time-out.
            self.startup.mark("planning")
            self._read_data(draft)
            self.startup.mark("data")
            run_setup = complete_run_setup(draft, self.config, packed=packed_rows(self.data.batches))
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
        replicas, resume = None if self.only_predicts else join_replicas(self.config, self.ranks), self.resume
        # A checkpoint's format stays.
        config = resolve_dtype(self.config, self.ranks, given=self.given if resume is None else None)
        self.model_folder = locate_model(config.model.model_path)
        if resume is not None and not config.adapters.is_lora:  # a checkpoint of adapters has no weights of the base
            self.model_folder = resume.reader.path
        check_same_model(self.model_folder, config.adapters.adapter_path, replicas)
        model_config = load_model_config(self.model_folder, config.model)
        self.tokenizer = load_tokenizer(self.model_folder, model_config.vocab_size)
        if config.evaluation.do_predict:
            check_generation_config(self.model_folder, self.tokenizer, model_config.vocab_size)
        chat_template = resolve_template(config.data.chat_template)
        files = read_model_files(self.model_folder).with_chat_template(chat_template)
        self.model_files, end = files, self.tokenizer.eos_token_id
        if end is not None:  # each target ends with it
            self.model_files = files.with_end_token(end, model_config)
        self.config, saved = apply_saved_plan(config, given=self.given or ())
        draft = draft_run_setup(self.config, self.ranks, model_config, saved=saved, replica_rendezvous=replicas)
        self.device = draft.rank_context.device
        check_model_weights(self.model_folder, draft.parts, config.model)
        self.base = find_adapter_base(draft, self.model_folder, resume) if config.adapters.is_lora else None
        origin = Origin(config.model.model_path, folder_has_weights(self.model_folder))
        self.origin = origin if resume is None else resume.origin
        log_model(draft, self.model_folder)
        if self.model_files is not files:
            log_end_token(self.tokenizer, files.end_tokens(model_config))
        return draft

    def _read_data(self, draft: RunSetup) -> None:
        """Tokenize; all replicas must see the same samples, and a resumed run those that it has begun with."""
        self.config, self.data = read_data(self.config, self.ranks, self.tokenizer)
        if self.config.evaluation.do_predict:
            prediction_samples(self.data)  # refused now, not after the training
        check_same_data(self.data.fingerprint, self.data.evaluation_fingerprint, draft.rank_context.replica_rendezvous)
        if self.resume is not None:
            self.resume.check_steps(self.config)
            self.resume.check_data(self.data.fingerprint())
            self.data.batches.seek(self.steps_before)
            # A plan's file goes with old checkpoints.
            self.config = replace(self.config, planning=replace(self.config.planning, plan=None))

    def _check_disk_space(self, run_setup: RunSetup) -> None:
        """Refuse a run that could save none of the checkpoints that it is asked for."""
        config = run_setup.config
        if not (config.saving.is_on and config.evaluation.do_train and self.ranks.is_first):
            return
        num_saves = count_saves(
            config,
            num_steps_done=self.steps_before,
            epochs_done=self.epochs_before,
            epochs=config.optim.num_train_epochs or self.data.batches.num_epochs_of(config.optim.num_steps),
        )
        check_disk_space_for_run(run_setup, self.output.save_dir, num_saves=num_saves)

    def _load(self, run_setup: RunSetup) -> None:
        """Meet the other ranks, settle the plan, and fill the stages."""
        if self.config.evaluation.do_train:
            resumed_from = None if self.resume is None else self.resume.reader.path
            self.slots = slot_place(self.config, self.ranks, resumed_from)
        self.session = open_session(
            run_setup,
            self.model_folder,
            recordings=recordings_of(run_setup, self.output.save_dir),
            on_plan_resolved=partial(write_settings, self.output),
            on_part_done=self.startup.mark,
            checkpoint=None if self.resume is None else self.resume.reader,
            activity=self.watchdog.activity,
            slots=self.slots if run_setup.result.request.keeps_steps else None,
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
            if (older := self.output.older_results) is not None:
                error.add_note(f"The results that were to be replaced are in {older}: rename it to have them back.")
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
        self.loaded = self.trained = time.monotonic()
        if not self.config.evaluation.do_train:
            return StopReason.LAST_STEP
        self.startup.mark("optimizer")
        if self.log is not None:
            self.log.emit(run_started(self.session.run_setup, self.data.batches, self.startup))
        log_host_memory_usage(self.session, self.startup.host)
        ending = self.loop.run()
        log_disk_rates(self.session, since=self.loaded)
        self.session.write_recordings()
        if ending in (StopReason.LAST_STEP, StopReason.EARLY_STOPPING):
            check_trained_weights(
                self.session,
                num_updates=self.loop.trainer.counts.num_updates,
                num_steps=self.loop.trainer.num_steps_done,
                folder=self.output.save_dir,
            )
        self.trained = time.monotonic()
        return ending

    def _prepare_loop(self) -> None:
        """Put together what trains, saves, evaluates and logs."""
        resume, session, config = self.resume, self.session, self.config
        self.durable = self._make_durable()
        self.saver = self._make_saver() if config.evaluation.do_train and config.saving.is_on else None
        evaluator = None
        if config.evaluation.evaluates:
            parts = self.data.evaluation_parts()
            samples = [(dataset.entry.name, dataset.tokenized, indices) for dataset, indices in parts]
            evaluator = Evaluator(session, samples, pad_token_id=pad_token_id(self.tokenizer))
        trainer = session.trainer(
            self.data.batches,
            num_steps_done=self.steps_before,
            counts=None if resume is None else resume.counts,
            before_update=self._before_update,
        )
        state = resume.trainer_state().continued(config) if resume is not None and session.is_first else None
        if session.is_first:
            self.output.begin()
        if self.durable is not None:
            self.durable.begin(None if resume is None else resume.reader)
        elif (
            self.slots is not None
            and session.is_first
            and (resume is None or self.slots.slot_of(resume.reader.path) is None)
        ):
            empty_slot_before(self.slots, self.output.save_dir)
        run_id = None if resume is None else resume.tracker_run_id
        self.log = open_log(session.run_setup, self.output.save_dir, state, tracker_run_id=run_id)
        if self.log is not None:
            self.startup.connect(self.log)
        best = self._best(BEST)
        if best.value is None and self.loop_state.get(BEST, {}).get("value") is not None:
            logger.info("the best evaluation so far is on other data or by another metric: the best one begins anew")
            if self.log is not None:
                self.log.state.set_best(None)
        self.loop = TrainingLoop(
            session=session,
            trainer=trainer,
            saver=self.saver,
            evaluator=evaluator,
            log=self.log,
            run_status=self.run_status,
            output=self.output,
            started=min(self.startup.started, time.monotonic() - seconds_since_launch()),
            epoch=self.epochs_before,
            best=best,
            best_saved=self._best(BEST_SAVED),
            durable=self.durable,
        )

    def _before_update(self, stage: int) -> None:
        """Return when the state of `stage` may change: what is saved of it is copied."""
        for saver in (self.saver, self.durable):
            if saver is not None:
                saver.before_update(stage)

    def _contents(self) -> CheckpointContents:
        return CheckpointContents(
            self.session,
            self.model_files,
            data_fingerprint=self.data.fingerprint(),
            origin=self.origin,
            base=self.base,
        )

    def _make_durable(self) -> DurableSteps | None:
        """Return what makes each step durable, in the folders of optimizer states; collective."""
        if self.slots is None or not self.session.run_setup.result.request.keeps_steps:
            return None
        arena = self.session.stages.arena
        files = None if arena is None else arena.state_files
        assert files is None or isinstance(files, SlotFiles)
        return DurableSteps(
            self.session,
            self.output.save_dir,
            self._contents(),
            place=self.slots,
            files=files,
        )

    def _make_saver(self) -> CheckpointSaver:
        saver = CheckpointSaver(
            self.session,
            self.output.save_dir,
            self._contents(),
            on_complete=self.output.remove_older_results,
        )
        if self.resume is not None:
            saver.resume_from(self.resume.reader.path, self.steps_before, self._best(BEST_SAVED).step)
        logger.info("%s", table_row("saving", saver.describe()))
        return saver

    def _best(self, key: str) -> BestEvaluation:
        """The best evaluation of the run before this start, as far as those to come compare with it."""
        evaluation = self.config.evaluation
        data = self.data.evaluation_fingerprint() if evaluation.evaluates else None
        return BestEvaluation.from_loop_state(evaluation.metric_for_best_model, self.loop_state, key, data=data)

    def stop_early(self, ending: StopReason) -> None:
        """End before the last step: the state is saved as far as that worked. Raises SavedAndStopped after a signal.

        A run whose time is up ends well, or a launcher would start it again.
        """
        saver, resume = self.saver, self.resume
        if self.log is not None:
            self.log.finish(ending.value)
            self.log.close()
        text = "nothing is saved (--save_strategy no)" if saver is None else "no checkpoint could be saved"
        if self.loop.newest is not None:
            text = f"the state is saved in {self.loop.newest}"
            if self.durable is None and saver is not None and saver.newest_step != self.loop.trainer.num_steps_done:
                text = f"this step could not be saved; the newest checkpoint is {saver.newest}"
            inherited = None if resume is None else resume.inherited_save_dir
            text += f". To go on: {resume_command(command_words(), save_dir=inherited)}"
        self.session.all_ranks.barrier()
        self.watchdog.stop()
        if ending is StopReason.SIGNAL:
            raise SavedAndStopped(f"after a step: {text}")
        logger.info("--max_run_time %g minutes are over: %s", self.config.saving.max_run_time, text)
        self._disconnect()

    # save

    def save(self) -> None:
        """Evaluate what is to be saved, leave records and model, and report; raises CheckpointError for what failed.

        A run that was resumed after its last step has no report.
        """
        session, trains, steps = self.session, self.config.evaluation.do_train, self.loop.steps
        is_changed = not trains or self._has_changed()
        if trains and self.saver is not None and self.config.evaluation.load_best_model_at_end:
            self.loop.result_step = self._load_best_model(self.saver)
        self.loop.evaluate_final()
        problems = self._write_results(is_changed=is_changed)
        if self.log is not None:
            self.log.close()  # after the model: a tracker may hang
        session.activity.start_action("the report")
        per_rank = gather_memory(session)
        if not session.is_first:
            return
        if steps:
            loading, saving = self.loaded - self.startup.started, time.monotonic() - self.trained
            timings = {"loading": loading, "training": sum(steps.seconds), "saving": saving}
            problems += write_final_report(session.run_setup, steps, per_rank, timings)
        if trains:
            remove_slots(self.slots, self.output.save_dir, None if self.resume is None else self.resume.reader)
        if problems and trains:
            problems.append(f"The model itself is complete and checked: {self.output.save_dir}.")
        if problems:
            raise CheckpointError("\n".join(problems))

    def _has_changed(self) -> bool:
        """Whether the run has trained anything; warns if it has not. Collective.

        A resumed run is compared with its checkpoint, and counts as changed: what came before that is not known.
        """
        session, resume, number = self.session, self.resume, len(self.loop.steps)
        before = session.source if resume is None else SavedWeights(resume.reader, session.run_setup.parts)
        if resume is not None and isinstance(resume.reader, SlotReader):
            before = None  # later steps have taken its place
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
        if resume is not None and best is not None and best <= self.steps_before:
            earlier = checkpoint_path(resume.reader.path.parent, best)
        return load_best_model(self.session, saver.save_dir, saver.best_step, earlier) or last

    def _write_results(self, *, is_changed: bool) -> list[str]:
        """Records and model, each in its place; returns problems with which the run ends once everything is there."""
        session, output, log, problems = self.session, self.output, self.log, list[str]()
        if log is not None:
            output.recreate_if_removed()
            session.activity.start_action("the picture of the training and the model card")
            problems = write_records(log, session.run_setup, output.save_dir, origin=self.origin, is_changed=is_changed)
        if self.config.evaluation.do_train:
            return problems + save_model(session, output, self.model_files, self.run_status, self.base)
        if log is not None and not problems:
            output.commit()
        return problems

    # close

    def close(self) -> None:
        """End the connections and give memory back."""
        self.watchdog.stop()
        self._disconnect()

    def _disconnect(self) -> None:
        if self.saver is not None:
            self.saver.close()
        if self.durable is not None:
            self.durable.close()
        self.session.close()

    def push(self) -> None:
        """Upload the result if that is asked for; the other ranks, which are done, do not wait."""
        if self.config.output.push_to_hub and self.ranks.is_first:
            saved = f"after the last step: the model is complete and checked in {self.output.save_dir}"
            self.run_status.set_status(f"{saved}; it was not uploaded. To do it: {upload_command(self.config.output)}")
            self.run_status.is_detached = True
            push_to_hub(self.config.output)

    # predict

    def prepare_prediction(self) -> Callable[[], None] | None:
        """Prepare a run that only predicts, and return its `prediction`; collective, loads no stage."""
        draft = self._read_model()
        rendezvous = wait_until_inputs_are_read(self.ranks)
        self.output = prepare_output(draft, self.run_status, None, model_folder=self.model_folder)
        self.run_status.is_detached = True
        try:
            self._read_data(draft)
            if self.ranks.is_first:
                self.output.begin()
                self.output.commit()
        except BaseException:
            self.output.discard()
            raise
        del rendezvous  # other ranks need no further rendezvous
        return self.prediction()

    def prediction(self) -> Callable[[], None] | None:
        """Return a function that answers the evaluation data without the run's memory; None if this rank is not to."""
        evaluation, folder, left = self.config.evaluation, self.model_folder, "nothing is trained or evaluated"
        if not (evaluation.do_predict and self.ranks.is_first):
            return None
        if evaluation.do_train:
            folder = self.output.save_dir if self.base is None else merged_folder(self.config)
            left = f"after the last step: the model is complete and checked in {self.output.save_dir}"
        elif evaluation.do_eval:
            left = "after the evaluation"
        self.run_status.set_status(f"{left}; not all answers were generated")
        self.run_status.is_detached = True
        return partial(
            predict_and_report,
            folder,
            prediction_samples(self.data),
            output=self.output.save_dir,
            max_new_tokens=evaluation.max_new_tokens,
            device=self.device,
        )
