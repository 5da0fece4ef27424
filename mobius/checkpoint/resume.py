"""Resumes a run from a checkpoint: chooses the checkpoint, and merges its options and plan with this start's options.

Options that the user does not give come from the checkpoint. Given options may differ if they do not change what is
trained: options of devices, stages, saving, evaluation, logging. Other differences are refused with both values, unless
--resume_changes allows them.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final

from mobius.checkpoint.folders import find_checkpoints, find_whole, open_checkpoint, recover_interrupted_saves
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.reader import CheckpointReader
from mobius.config.config import Config, config_from, option_values, options
from mobius.config.earlier_results import MANIFEST_FILE, OPTIONS_FILE, PLAN_FILE, lock_if_free
from mobius.config.options import OptionValue
from mobius.config.sources import read_yaml, written_options
from mobius.config.validation import MUTUALLY_EXCLUSIVE, infer_eval_strategy, validate
from mobius.distributed.node_checks import check_same_facts
from mobius.distributed.rendezvous import Rendezvous, join_run
from mobius.engine.optimizer_stepper import StepCounts
from mobius.errors import CheckpointError, ConfigError, MobiusError, PlanError, quoted
from mobius.files.regular_files import read_bytes, read_text, typed_object
from mobius.planner.plan_file import ALL_AGAIN, apply_saved_plan
from mobius.process.log import RANK_ZERO_ONLY
from mobius.process.ranks import Ranks, is_restart, launch_id
from mobius.reporting.trainer_state import STATE_FILE, TrainerState

logger = logging.getLogger(__name__)

_NEWEST: Final = "true"
_CHANGES_NOTHING: Final = ("preprocessing_num_workers", "preview", "eval_dataset", "max_predict_samples", "merge")
"""Options of the training sections that do not change what is trained."""
_TRAINING_SECTIONS: Final = ("model", "data", "objective", "optim", "adapters")
"""Sections whose options decide what is trained."""
_TRAINING_OPTIONS: Final = ("batch_size", "fp32_gradients", "reduce_dtype")
_START_SECTIONS: Final = ("planning", "launch")
"""Sections that belong to a start; the checkpoint's values of their options are not used."""
_START_OPTIONS: Final = (
    *("resume_from_checkpoint", "resume_changes", "overwrite_output_dir", "max_run_time"),
    *("save_dir", "host_memory_limit", "gpu_memory_limit", "device"),
    *("do_train", "do_eval", "do_predict"),
)
LAUNCH: Final = "launch"
"""Key in the manifest's `data`: the launch that saved the checkpoint (`launch_id`)."""
ORIGIN: Final = "origin"
"""Key in the manifest's `data`: the weights that the run began with."""
TRACKER_RUN: Final = "tracker_run"
"""Key in the manifest's `data`: the run's id at the trackers' servers."""
REPLICAS: Final = "replicas"
"""Key in the manifest's `data`: the number of replicas of the run."""
_PLAN_OPTIONS: Final = (
    *("num_stages", "num_chunks", "num_rounds", "num_slices", "use_offload", "use_prefetch", "resident_stages"),
    *("recompute", "activation_offloading", "tile_tokens", "gpu_memory_limit", "host_memory_limit", "spread_head"),
)
"""Options whose change requires a new plan."""


@dataclass(frozen=True, kw_only=True)
class Resume:
    """The checkpoint that a run resumes from, and the options of the resumed run."""

    reader: CheckpointReader
    config: Config
    inherited_save_dir: str | None = None
    """Parent folder of the named checkpoint, which is --save_dir because the user gave none; else None."""
    rendezvous: Rendezvous | None = None
    """Rendezvous at which ranks agreed on the checkpoint. It is kept because other ranks may still read its store,
    which without torchrun is in the first rank's process."""

    @property
    def num_steps_done(self) -> int:
        """Steps that the run has done."""
        return self.reader.manifest.step

    @property
    def counts(self) -> StepCounts:
        """Counters of the optimizer steps. Raises CheckpointError if this version cannot read them."""
        try:
            counts = typed_object(StepCounts, self.reader.manifest.training)
            if not all(0 <= number < math.inf for number in astuple(counts)) or counts.loss_scale == 0:
                raise ValueError(f"has {quoted(counts)}")
        except ValueError as error:
            raise CheckpointError(f"{self.reader.path}: this version cannot read its counters: it {error}.") from None
        return counts

    @property
    def loop_state(self) -> Mapping[str, Any]:
        """State of the training loop."""
        return self.reader.manifest.data

    @property
    def epochs_done(self) -> float:
        """Number of passes over the data so far. Raises CheckpointError if the saved value is no such number."""
        found = self.loop_state.get("epoch", 0.0)
        if type(found) not in (int, float) or not 0 <= found < math.inf:
            raise CheckpointError(f"{self.reader.path}: its epoch is {quoted(found)}, which is impossible.")
        return float(found)

    @property
    def origin(self) -> Origin:
        """Origin of the weights that the run began with; partly unknown if the checkpoint does not name it."""
        return Origin.from_json(self.loop_state.get(ORIGIN), model_path=self.config.model.model_path)

    @property
    def tracker_run_id(self) -> str | None:
        """Id of the run at the trackers' servers, if there is one."""
        found = self.loop_state.get(TRACKER_RUN)
        return found if isinstance(found, str) else None

    def trainer_state(self) -> TrainerState:
        """Records of all earlier steps. Raises CheckpointError."""
        path = self.reader.path / STATE_FILE
        return TrainerState.from_json(read_text(path), path=path)

    def check_steps(self, config: Config) -> None:
        """Raise ConfigError if the run has fewer steps than the checkpoint."""
        optim, done = config.optim, self.num_steps_done
        if optim.num_steps < done:
            given = f"`--num_iterations` {optim.num_steps}"
            if optim.num_train_epochs is not None:
                given = f"`--num_train_epochs` {optim.num_train_epochs:g} ({optim.num_steps} steps)"
            raise ConfigError(
                f"{given}: {self.reader.path.name} has done {done} steps; give at least as many, or resume from an "
                "earlier checkpoint"
            )

    def check_data(self, fingerprint: str) -> None:
        """Raise CheckpointError if the run's data differ from the checkpoint's data."""
        saved = self.reader.manifest.data.get("fingerprint")
        if saved != fingerprint and "dataset" not in self.config.saving.changes:
            raise CheckpointError(
                f"{self.reader.path} was trained on other data, though the options are the same: the fingerprint is "
                f"{fingerprint} now, {saved} there. Restore the old data, or allow this by --resume_changes dataset."
            )


def find_resume(config: Config, ranks: Ranks, *, given: Collection[str] | None) -> Resume | None:
    """Find the checkpoint to resume from, if the options ask for it or a launcher restarted the run; all ranks call it.

    `given` are the options that the user set; None: all options. Raises CheckpointError and ConfigError.
    """
    word = config.saving.resume_from_checkpoint
    if word is None and not is_restart():
        return None
    rendezvous = join_run(ranks) if ranks.num_ranks > 1 else None
    named = _named_checkpoint(config)
    inherited = None if named is None or given is None or "save_dir" in given else str(named.parent)
    path = _agree_on_path(config, Path(inherited or config.output.save_dir), ranks, rendezvous)
    if path is None:
        logger.info("started again by the launcher, from the first step: there is no checkpoint yet")
        return None
    reader = open_same_checkpoint(path, ranks, rendezvous)
    merged, changed = _merge_options(config, reader.path, given, inherited)
    if not reader.manifest.has_optimizer:
        raise CheckpointError(
            f"{path} holds weights only (--save_only_model): no run can resume from it. Begin a new run with "
            f"--model_path {path}."
        )
    names = option_values(config) if given is None else given
    if not {"eval_steps", "eval_dataset", "val_size"}.isdisjoint(changed):
        merged, notice = infer_eval_strategy(merged, names)
        if notice is not None:
            logger.warning("%s", notice, extra=RANK_ZERO_ONLY)
    # Given options were checked when they were read; now check that they have an effect with the checkpoint's options.
    validate(
        merged,
        ranks.num_pipeline_ranks,
        ranks.num_replicas,
        is_exempt=lambda option, mode_options: option not in changed or any(name in names for name in mode_options),
    )
    merged = _with_saved_plan(merged, reader, ranks, given, changed)
    logger.info("resumed from %s: %d steps are done", path, reader.manifest.step)
    return Resume(reader=reader, config=merged, inherited_save_dir=inherited, rendezvous=rendezvous)


def open_same_checkpoint(path: Path, ranks: Ranks, rendezvous: Rendezvous | None) -> CheckpointReader:
    """Reader of the checkpoint `path`; collective if there are several nodes.

    Raises CheckpointError if it cannot be opened; with several nodes, on all processes if one process cannot open it or
    sees another checkpoint.
    """
    if rendezvous is None or ranks.num_nodes == 1:
        return open_checkpoint(path)
    reader = problem = None
    try:
        reader = open_checkpoint(path)
        found = hashlib.sha256(read_bytes(path / MANIFEST_FILE)).hexdigest()
    except (CheckpointError, OSError) as error:
        problem, found = error, f"none that can be read ({error})"
    hint = f"Every node reads {path}: copy it to the same place on each, or put it where all nodes see it."
    try:
        check_same_facts({"the checkpoint that the run goes on from": found}, rendezvous, hint=hint)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if reader is None:
        raise CheckpointError(str(problem))
    return reader


def _named_checkpoint(config: Config) -> Path | None:
    """Checkpoint that the user named by its path; None if no path was given."""
    word = config.saving.resume_from_checkpoint
    return None if word is None or word.lower() == _NEWEST else Path(word)


def _agree_on_path(config: Config, save_dir: Path, ranks: Ranks, rendezvous: Rendezvous | None) -> Path | None:
    """Path of the checkpoint, chosen by the first rank: other ranks could see the folder at another moment."""
    problem, path = None, None
    if ranks.is_first:
        try:
            path = _choose(config, save_dir)
        except MobiusError as error:
            problem = str(error)
    if rendezvous is not None:
        problem, path = rendezvous.gather([problem, None if path is None else str(path)])[0]
    if problem is not None:
        raise CheckpointError(problem)
    return None if path is None else Path(path)


def _choose(config: Config, save_dir: Path) -> Path | None:
    """Checkpoint to resume from; after a restart, the newest checkpoint that this launch has saved, if any."""
    named = _named_checkpoint(config)
    if named is not None and not is_restart():
        return named
    with lock_if_free(save_dir) as is_free:
        if is_free:  # else another run is writing there, and `OutputFolder.prepare` refuses this run
            for line in recover_interrupted_saves(save_dir):
                logger.info("%s", line)
    found = find_checkpoints(save_dir)
    if is_restart():
        launch = launch_id()
        own = [path for path, manifest in found.valid if launch and manifest.data.get(LAUNCH) == launch]
        # Other checkpoints in the folder are not used: an earlier run saved them, or they are later than the named one.
        if own or named is not None or config.saving.resume_from_checkpoint is None:
            return _newest_whole(own, found.invalid)[0] or named
    newest, unusable = _newest_whole([path for path, _ in found.valid], found.invalid)
    if newest is not None:
        return newest
    if unusable:
        reasons = "\n  ".join(f"{path.name}: {reason}" for path, reason in unusable)
        raise CheckpointError(
            f"--resume_from_checkpoint true: none of the checkpoints in {save_dir} can be used:\n  {reasons}\nGive "
            "the folder of another checkpoint, or start again with --overwrite_output_dir, which replaces this folder."
        )
    raise CheckpointError(
        f"--resume_from_checkpoint true: there is no complete checkpoint in {save_dir}. Give the folder of one, or "
        "the --save_dir of the run to resume, or leave the option out to start a new run."
    )


def _newest_whole(
    valid: Sequence[Path], invalid: Sequence[tuple[Path, str]]
) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the first undamaged checkpoint, and the unusable checkpoints with the reason; warn if there are both."""
    newest, damaged = find_whole(valid)
    unusable = [*damaged, *invalid]
    for path, reason in unusable if newest is not None else ():
        logger.warning("%s is skipped: %s", path, reason)
    return newest, unusable


def _merge_options(
    config: Config, path: Path, given: Collection[str] | None, save_dir: str | None
) -> tuple[Config, list[str]]:
    """Override the checkpoint's options with this start's; returns the config, and the given options that differ.

    `save_dir`, if not None, is used as --save_dir. Raises ConfigError for options that may not differ.
    """
    file = read_yaml(str(path / OPTIONS_FILE))
    if file.problems:
        raise CheckpointError(f"{path / OPTIONS_FILE} cannot be read: {file.problems[0]}")
    own = option_values(config)
    names = set(own if given is None else given)
    # An option that the checkpoint does not have, a newer one for instance, has its default.
    saved = {name: file.values.get(name, options()[name].default) for name in own}
    excluded = {name for pair in MUTUALLY_EXCLUSIVE if names & set(pair) for name in pair} - names
    merged = {}
    for name, value in own.items():
        value_now = options()[name].default if name in excluded else saved[name]
        is_own = options()[name].section in _START_SECTIONS or name in _START_OPTIONS
        merged[name] = value if name in names or is_own else value_now
    if save_dir is not None:
        merged["save_dir"] = save_dir
    _refuse_changes(merged, saved, config, path)
    return config_from(merged), [name for name in own if name in names and own[name] != saved[name]]


def _affects_training(name: str) -> bool:
    """Whether another value of option `name` changes what is trained."""
    is_part = options()[name].section in _TRAINING_SECTIONS and name not in _CHANGES_NOTHING
    return is_part or name in _TRAINING_OPTIONS


def _refuse_changes(
    values: Mapping[str, OptionValue], saved: Mapping[str, OptionValue], config: Config, path: Path
) -> None:
    allowed = set(config.saving.changes)
    changed = {name for name, value in values.items() if value != saved[name] and _affects_training(name)}
    own, old = (written_options(config_from(each)) for each in (values, saved))
    if "dtype" in changed:
        raise ConfigError(
            f"`--dtype` is {_shown(own['dtype'])}, {path.name} has {_shown(old['dtype'])}, in which its weights "
            "are stored: no --resume_changes allows another one. Leave it out, or begin a new run with "
            f"--model_path {path}"
        )
    if changed - allowed:
        raise ConfigError(
            *(
                f"`--{name}` is {_shown(own[name])}, {path.name} has {_shown(old[name])}"
                for name in values
                if name in changed - allowed
            ),
            hint="These options change what is trained. Leave them out to go on as before, or allow the changes by "
            f"--resume_changes {','.join(sorted(allowed | changed))}.",
        )


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _with_saved_plan(
    config: Config, reader: CheckpointReader, ranks: Ranks, given: Collection[str] | None, changed: Collection[str]
) -> Config:
    """Config with the checkpoint's plan, so that `auto` keeps its numbers, if that plan still fits."""
    if config.planning.plan is not None:
        return config
    planned = replace(config, planning=replace(config.planning, plan=str(reader.path / PLAN_FILE)))
    num_replicas = reader.manifest.data.get(REPLICAS, 1)
    try:
        if num_replicas != ranks.num_replicas:
            raise PlanError(f"it is for {num_replicas} replica(s)")
        _, saved = apply_saved_plan(planned, given=given or ())
        is_for_ranks = saved is not None and saved.plan.num_ranks == ranks.num_pipeline_ranks
        if is_for_ranks and not set(_PLAN_OPTIONS) & set(changed):
            return planned
        reason = "it is for another number of ranks"
        if anew := [name for name in _PLAN_OPTIONS if name in changed]:
            reason = f"--{anew[0]} has changed"
    except PlanError as error:
        reason = str(error).removesuffix(f". {ALL_AGAIN}")
    logger.info("the checkpoint's plan is not used (%s); the run is planned again", reason)
    return config
