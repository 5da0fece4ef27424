"""The life of a run, in order: read, plan, tokenize, meet, load, train, save, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from mobius.config.config import Config
from mobius.config.yaml_file import to_yaml
from mobius.data.chat_templates import resolve_template
from mobius.errors import CheckpointError, GpuMemoryError, NonFiniteLossError, first_line
from mobius.interruption import Standing
from mobius.machine.available import huge_page_share
from mobius.machine.cpu_dtype import settle_dtype
from mobius.machine.devices import MemoryMeter
from mobius.models.attention import DocumentAttention
from mobius.models.base_files import BaseFiles, read_base_files
from mobius.models.families import load_model_config, locate_model
from mobius.models.tokenizer import load_tokenizer
from mobius.models.weights import check_model_weights
from mobius.output.metrics import StepMetrics
from mobius.output.output_folder import OutputFolder
from mobius.output.recordings import Recordings
from mobius.output.report import RankMemory, RunTimings, closing_lines, write_report
from mobius.output.run_log import METRICS_FILE, RunLog
from mobius.output.trackers import check_installed
from mobius.plan.simulation import steady_seconds
from mobius.planning.blueprint import Blueprint, complete_blueprint, sketch_blueprint
from mobius.planning.planned import adopt_plan, saved_plan_of
from mobius.ranks import Ranks
from mobius.training.data import packed_rows, read_data
from mobius.training.export import check_result, export_bytes, export_model, write_single_file
from mobius.training.records import ideal_step_seconds, leave_records, open_log
from mobius.training.session import Session, open_session
from mobius.training.trainer import Trainer, numbers_of_ranks
from mobius.units import GIB

logger = logging.getLogger(__name__)

_ENOUGH_HUGE_PAGES = 0.5


def run_training(
    config: Config, ranks: Ranks, *, given: Collection[str] | None = None, standing: Standing | None = None
) -> None:
    """Fine-tune as `config` says and leave the results; every rank calls it.

    `given` are the options that the user set, which a plan (`--plan`) may not contradict, and which no default of
    another kind of device replaces; None: not known, all of them are taken as they are. `standing` is kept up to
    date for an interruption.

    Raises MobiusError for what a user can mend. After an error the process should end without further cleaning up: the
    device may be waiting for a neighbour for good.
    """
    try:
        _run(config, ranks, given, standing or Standing())
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(
            f"rank {ranks.rank} ran out of GPU memory: {first_line(error)} To fit: raise --num_stages "
            "(smaller stages), raise --num_chunks (smaller microbatches), lower --resident_stages, --batch_size or "
            "--seq_length, or use --use_offload if it is off."
        ) from error


def _run(config: Config, ranks: Ranks, given: Collection[str] | None, standing: Standing) -> None:
    start = time.perf_counter()
    check_installed(config.output.trackers)
    config = settle_dtype(config, ranks, given=given)
    model_folder = locate_model(config.model.model_path)
    model_config = load_model_config(model_folder, config.model)
    tokenizer = load_tokenizer(model_folder, model_config.vocab_size)
    base_files = read_base_files(model_folder).with_chat_template(resolve_template(config.data.chat_template))
    adopted = adopt_plan(config, given=given or ())
    # What cannot fit is refused before the data are read, which may take long.
    sketch = sketch_blueprint(adopted.config, ranks, model_config, saved=adopted.saved)
    check_model_weights(model_folder, sketch.parts, config.model)
    _log_model(sketch, model_folder)
    output = _prepare_output(sketch, standing)
    try:
        # Before the ranks meet: a long tokenization inside a process group would run into its time-out.
        config, batches = read_data(adopted.config, ranks, tokenizer)
        blueprint = complete_blueprint(sketch, config, packed=packed_rows(batches), saved=adopted.saved)
        session = open_session(
            blueprint,
            model_folder,
            recordings=Recordings(config, rank=ranks.rank, device=blueprint.place.device, folder=output.partial),
            settled=partial(_tell_plan, output),
        )
    except BaseException:
        output.discard()  # nothing is trained yet: a refused run leaves nothing behind
        raise
    _warn_of_small_pages(session)
    logger.info("stages generated: %s", session.blueprint.plan.describe(blueprint.shape))
    trainer = session.trainer(batches)
    log = open_log(session.blueprint, output.partial)
    load_seconds = time.perf_counter() - start
    try:
        steps = _train(trainer, session.blueprint, output, standing, log)
        train_end = time.perf_counter()
        session.write_recordings()
        check_result(session, num_updates=trainer.num_updates, num_steps=len(steps), folder=output.partial)
        if log is not None:
            leave_records(log, session.blueprint, steps, output.partial, model_folder=model_folder)
    finally:
        if log is not None:
            log.close()
    problems = _save(session, output, base_files, standing)
    timings = RunTimings(
        load_seconds=load_seconds,
        training_seconds=sum(step.step_seconds for step in steps),
        save_seconds=time.perf_counter() - train_end,
    )
    _finish(session, output, steps, timings, problems)
    session.close()


def _prepare_output(blueprint: Blueprint, standing: Standing) -> OutputFolder:
    """Find out now, not after training, whether the results can be written; start the folder with the settings."""
    wanted = blueprint.config.output
    output = OutputFolder(
        Path(wanted.save_dir),
        overwrite=wanted.overwrite_output_dir,
        files={"--save_params": Path(wanted.save_params), "--save_results": Path(wanted.save_results)},
    )
    if blueprint.place.ranks.is_first:
        num_bytes = export_bytes(blueprint)
        output.prepare({"--save_dir": num_bytes, "--save_params": num_bytes})
        try:
            _write_settings(output, blueprint)
        except CheckpointError:
            output.discard()
            raise
    kept = f"{output.save_dir} is as it was" if output.save_dir.exists() else "nothing is left"
    standing.becomes(f"before the first step: nothing was trained, and {kept}", clear=output.discard)
    return output


def _tell_plan(output: OutputFolder, settled: Blueprint) -> None:
    """Put the plan that all ranks agreed on into the folder, and show every rank's actions if that is wanted."""
    if settled.place.ranks.is_first:
        _write_settings(output, settled)
    if settled.config.output.show_actions:
        for rank, actions in enumerate(settled.schedule.actions):
            logger.info("actions of rank %d:", rank)
            for action in actions:
                logger.info("  %s", action.to_text(settled.plan.num_stages))


def _write_settings(output: OutputFolder, blueprint: Blueprint) -> None:
    settings = {"training_args.yaml": to_yaml(blueprint.config), "plan.json": saved_plan_of(blueprint.answer).to_json()}
    for name, text in settings.items():
        try:
            (output.partial / name).write_text(text)
        except OSError as error:
            path = output.partial / name
            raise CheckpointError(
                f"--save_dir {output.save_dir}: cannot write {path} ({error.strerror}). Free some space, or choose "
                "another folder."
            ) from error


def _log_model(blueprint: Blueprint, folder: Path) -> None:
    """The milestone of the model; its weights follow when the stages are filled, each rank's own."""
    family, dtype = blueprint.parts.config.model_type, blueprint.config.model.dtype.value
    logger.info("model loaded: %s (%s), %.3g parameters, %s", folder, family, blueprint.shape.num_parameters, dtype)


def _warn_of_small_pages(session: Session) -> None:
    """Tell what slows the updates of a rank whose stages lie on small pages, if they are large."""
    arena = session.stages.arena
    if arena is None or arena.num_bytes < GIB:
        return
    share = huge_page_share()
    if share < _ENOUGH_HUGE_PAGES:
        logger.warning(
            "only %.0f %% of this process's memory lies on huge pages, which slows the optimizer. To change that: "
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`, or restart where memory is less fragmented.",
            100 * share,
        )


def _log_start(blueprint: Blueprint) -> None:
    config, pipeline = blueprint.config, blueprint.config.pipeline
    logger.info(
        "start of training: %d steps of %d rows x %d tokens, in %d microbatches of %d, on %s",
        config.optim.num_steps,
        pipeline.batch_size,
        config.data.seq_length,
        pipeline.num_microbatches,
        pipeline.microbatch_size,
        MemoryMeter(blueprint.place.device).device_name,
    )
    if blueprint.parts.attention is DocumentAttention.FLEX:
        logger.warning(
            "packed rows run by FlexAttention, their layers without graphs of their own, which is slower: "
            "variable-length attention takes bf16 and fp16 on GPUs from Ampere on, and heads of up to 256"
        )
    if blueprint.answer.forecast is not None:
        logger.info("%s", blueprint.answer.forecast.describe())


def _train(
    trainer: Trainer, blueprint: Blueprint, output: OutputFolder, standing: Standing, log: RunLog | None
) -> list[StepMetrics]:
    """Train to the end; the first rank, which has the log, tells each step."""
    _log_start(blueprint)
    total, numbers = blueprint.config.optim.num_steps, output.partial / METRICS_FILE
    steps = []
    lost = f"what was trained is lost, for only the end is saved; every step's numbers are in {numbers}"
    if output.save_dir.exists():
        lost += f", and {output.save_dir} is as it was"
    standing.becomes(f"in step 1 of {total}: {lost}")
    progress = tqdm(total=total, desc="training", unit="step", leave=False, disable=True if log is None else None)
    try:
        for metrics in trainer.train():
            progress.update()
            steps.append(metrics)
            standing.becomes(f"after step {metrics.step} of {total}: {lost}")
            if log is not None:
                log.step(metrics)
    except NonFiniteLossError as error:
        error.add_note(f"Nothing is saved; the numbers of the steps before it are in {numbers}.")
        raise
    finally:
        progress.close()
    return steps


def _save(session: Session, output: OutputFolder, base_files: BaseFiles, standing: Standing) -> list[str]:
    """Save the model, say where it is, and make the single file of it; returns the problem of that, if there is one.

    Once the model has its name, nothing that fails may hide that.
    """
    export_model(session, output, base_files=base_files, standing=standing)
    if session.transport.rank != 0:
        return []
    config = session.blueprint.config
    logger.info("model saved to %s (checked tensor by tensor)", output.save_dir)
    params = Path(config.output.save_params)
    unfinished = params.with_name(f"{params.name}.partial")
    saved = f"after the last step: the model is complete and checked in {output.save_dir}"
    standing.becomes(f"{saved}; {params} was not written", clear=unfinished.unlink)
    try:
        write_single_file(params, output)
    except CheckpointError as error:
        return [str(error)]
    standing.becomes(f"{saved} and in {params}; {config.output.save_results} was not written")
    logger.info("模型已保存到 %s (parameters saved to one file)", params)
    return []


def _finish(
    session: Session, output: OutputFolder, steps: list[StepMetrics], timings: RunTimings, problems: list[str]
) -> None:
    """Gather every rank's memory and write the report; then raise CheckpointError for `problems` and those of that."""
    blueprint, meter = session.blueprint, MemoryMeter(session.blueprint.place.device)
    reading = meter.read()
    own = [reading.peak_allocated, reading.peak_reserved, reading.allocated, reading.peak_host]
    rows = numbers_of_ranks(session.transport, own).tolist()
    if session.transport.rank != 0:
        return

    def gpu_bytes(value: float) -> int | None:
        return int(value) if meter.has_gpu else None

    per_rank = [
        RankMemory(
            rank=rank,
            device=meter.device_name,
            peak_allocated_bytes=gpu_bytes(row[0]),
            peak_reserved_bytes=gpu_bytes(row[1]),
            persistent_bytes=gpu_bytes(row[2]),
            peak_host_bytes=int(row[3]),
        )
        for rank, row in enumerate(rows)
    ]
    config = blueprint.config
    report = Path(config.output.save_results)
    plan_text, forecast = blueprint.plan.describe(blueprint.shape), blueprint.answer.forecast
    seconds, ideal = [step.step_seconds for step in steps], ideal_step_seconds(blueprint)
    mfu = None if ideal is None else ideal / steady_seconds(seconds)
    if forecast is not None:
        logger.info("%s", forecast.compare(seconds))
    for line in closing_lines(steps, per_rank, timings, mfu):
        logger.info("%s", line)
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        write_report(report, to_yaml(config), plan_text, steps, per_rank, timings, forecast, mfu)
        logger.info("results saved to %s", report)
    except (CheckpointError, OSError) as error:
        problems = [*problems, f"--save_results: {error}"]
    if problems:
        raise CheckpointError("\n".join([*problems, f"The model itself is complete and checked: {output.save_dir}."]))
