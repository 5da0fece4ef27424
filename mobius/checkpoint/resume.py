"""Takes a run up again from a checkpoint: which one, with which options and plan, and its state into new stages.

Options that the user does not give are the checkpoint's. Given ones may differ where they do not change what is
trained: devices, stages, saving, evaluation, logging. The rest is refused with both values, or allowed by name.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch import Tensor

from mobius.checkpoint.folders import find_checkpoints, open_checkpoint, recover_interrupted_saves
from mobius.checkpoint.manifest import MANIFEST_FILE
from mobius.checkpoint.model_card import Origin
from mobius.checkpoint.reader import CheckpointReader
from mobius.checkpoint.run_folder import lock_if_free
from mobius.checkpoint.saved_stage import HasMemory, optimizer_tensors
from mobius.config.config import Config, config_from, option_values, options
from mobius.config.options import OptionValue
from mobius.config.sources import read_yaml, to_yaml
from mobius.config.validation import MUTUALLY_EXCLUSIVE, infer_eval_strategy, validate
from mobius.distributed.node_checks import check_same_facts
from mobius.distributed.rendezvous import Rendezvous, join_run
from mobius.engine.optimizer_stepper import StepCounts
from mobius.engine.stage_state import StageState
from mobius.errors import CheckpointError, ConfigError, MobiusError, PlanError, quoted
from mobius.log import RANK_ZERO_ONLY
from mobius.models.blocks import ModelParts
from mobius.models.weight_conversion.parameter_pieces import ParameterPiece
from mobius.planner.saved_plan import apply_saved_plan
from mobius.ranks import Ranks, is_restart, launch_id
from mobius.regular_files import read_bytes, read_text, typed_object
from mobius.reporting.trainer_state import STATE_FILE, TrainerState

logger = logging.getLogger(__name__)

_NEWEST: Final = "true"
_CHANGES_NOTHING: Final = frozenset(
    (
        "preprocessing_num_workers",
        "preview",
        "eval_dataset",
        "max_predict_samples",
        "merge",
    )
)
"""Options of model, data and optimizer that leave what is trained as it is."""
_TRAINING_SECTIONS: Final = ("model", "data", "optim", "adapters")
"""Sections whose options decide on what is trained."""
_TRAINING_OPTIONS: Final = ("batch_size", "fp32_gradients", "reduce_dtype")
_START_SECTIONS: Final = ("planning", "launch")
"""Sections that are a start's own; a checkpoint's are not taken over."""
_START_OPTIONS: Final = (
    *("resume_from_checkpoint", "resume_changes", "overwrite_output_dir", "max_run_time"),
    *("save_dir", "save_params", "save_results", "host_memory_limit", "gpu_memory_limit", "device"),
    *("do_train", "do_eval", "do_predict"),
)
_NUM_READER_THREADS: Final = 4
"""Threads of a rank that read a checkpoint."""
LAUNCH: Final = "launch"
"""Key in a checkpoint's position of the launcher's start that saved it (`launch_id`)."""
ORIGIN: Final = "origin"
"""Key in a checkpoint's position of the weights that its run began with."""
TRACKER_RUN: Final = "tracker_run"
"""Key in a checkpoint's position of the run's id at the trackers' servers."""
REPLICAS: Final = "replicas"
"""Key in a checkpoint's position of the number of pipelines that shared it."""
_PLAN_OPTIONS: Final = (
    *("num_stages", "num_chunks", "num_rounds", "num_slices", "use_offload", "use_prefetch", "resident_stages"),
    *("recompute", "activation_offloading", "tile_tokens", "gpu_memory_limit", "host_memory_limit"),
)
"""Options that make another plan."""
PLAN_FILE: Final = "plan.json"
OPTIONS_FILE: Final = "training_args.yaml"


@dataclass(frozen=True, kw_only=True)
class Resume:
    """A checkpoint that a run goes on from, and the options that it then has."""

    reader: CheckpointReader
    config: Config
    inherited_save_dir: str | None = None
    """--save_dir, where that is the named checkpoint's folder because no other was given."""
    rendezvous: Rendezvous | None = None
    """Where ranks agreed on it. Without torchrun the first rank's process is the store, and others may still read."""

    @property
    def num_steps_done(self) -> int:
        """Steps that the run has made."""
        return self.reader.manifest.step

    @property
    def counts(self) -> StepCounts:
        """Raises CheckpointError where the checkpoint's are not those of this version."""
        try:
            counts = typed_object(StepCounts, self.reader.manifest.training)
            if not all(0 <= number < math.inf for number in astuple(counts)) or counts.loss_scale == 0:
                raise ValueError(f"has {quoted(counts)}")
        except ValueError as error:
            raise CheckpointError(f"{self.reader.path}: what it counts is not this version's: it {error}.") from None
        return counts

    @property
    def loop_state(self) -> Mapping[str, Any]:
        """The loop's own numbers."""
        return self.reader.manifest.data

    @property
    def epochs_done(self) -> float:
        """Passes over the data that the run has made. Raises CheckpointError for what is no such number."""
        found = self.loop_state.get("epoch", 0.0)
        if type(found) not in (int, float) or not 0 <= found < math.inf:
            raise CheckpointError(f"{self.reader.path}: its epoch is {quoted(found)}, which no run can have made.")
        return float(found)

    @property
    def origin(self) -> Origin:
        """The weights that the run began with, as far as the checkpoint tells them."""
        return Origin.from_json(self.loop_state.get(ORIGIN), model_path=self.config.model.model_path)

    @property
    def tracker_run_id(self) -> str | None:
        """Id of the run at the trackers' servers; None where there is none."""
        found = self.loop_state.get(TRACKER_RUN)
        return found if isinstance(found, str) else None

    def trainer_state(self) -> TrainerState:
        """The records of all steps before. Raises CheckpointError."""
        path = self.reader.path / STATE_FILE
        return TrainerState.from_json(read_text(path), path=path)

    def check_steps(self, config: Config) -> None:
        """Raise ConfigError where the run, whose steps are counted now, would be shorter than what is done."""
        optim, done = config.optim, self.num_steps_done
        if optim.num_steps < done:
            given = f"`--num_iterations` {optim.num_steps}"
            if optim.num_train_epochs is not None:
                given = f"`--num_train_epochs` {optim.num_train_epochs:g} ({optim.num_steps} steps)"
            raise ConfigError(
                f"{given}: {self.reader.path.name} has {done} steps behind it; give at least as many, or go on from an "
                "earlier checkpoint"
            )

    def check_data(self, fingerprint: str) -> None:
        """Raise CheckpointError where the run's data are not those that the checkpoint was made with."""
        saved = self.reader.manifest.data.get("fingerprint")
        if saved != fingerprint and "dataset" not in self.config.saving.changes:
            raise CheckpointError(
                f"{self.reader.path} was trained on other data, though the options are the same: the samples are "
                f"{fingerprint}, its were {saved}. Bring the old data back, or allow it by --resume_changes dataset."
            )


def find_resume(config: Config, ranks: Ranks, *, given: Collection[str] | None) -> Resume | None:
    """The checkpoint to go on from, if that is asked for or a launcher has started the run again; all ranks call it.

    `given` are the options that the user set; None: all. Raises CheckpointError and ConfigError.
    """
    word = config.saving.resume_from_checkpoint
    if word is None and not is_restart():
        return None
    rendezvous = join_run(ranks) if ranks.num_ranks > 1 else None
    taken = _inherited_save_dir(config, given)
    path = _agreed(config, Path(config.output.save_dir if taken is None else taken), ranks, rendezvous)
    if path is None:
        logger.info("started again by the launcher, from the first step: there is no checkpoint yet")
        return None
    reader = open_same_checkpoint(path, ranks, rendezvous)
    merged, changed = _merged(config, reader.path, given, taken)
    if not reader.manifest.has_optimizer:
        raise CheckpointError(
            f"{path} holds weights only (--save_only_model): no run can go on from it. Begin a new one with "
            f"--model_path {path}."
        )
    names = option_values(config) if given is None else given
    if not {"eval_steps", "eval_dataset", "val_size"}.isdisjoint(changed):
        merged, notice = infer_eval_strategy(merged, names)
        if notice is not None:
            logger.warning("%s", notice, extra=RANK_ZERO_ONLY)
    # What this start gives was checked when it was read; here that it has an effect with what the checkpoint adds.
    validate(
        merged,
        ranks.num_pipeline_ranks,
        ranks.num_replicas,
        is_exempt=lambda option, mode_options: option not in changed or any(name in names for name in mode_options),
    )
    merged = _with_saved_plan(merged, reader, ranks, given, changed)
    logger.info("resumed from %s: %d steps are done", path, reader.manifest.step)
    return Resume(reader=reader, config=merged, inherited_save_dir=taken, rendezvous=rendezvous)


def open_same_checkpoint(path: Path, ranks: Ranks, rendezvous: Rendezvous | None) -> CheckpointReader:
    """The reader of the checkpoint `path`; collective where there are several nodes.

    Raises CheckpointError, there on all processes alike, where one cannot open it or has another checkpoint.
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


def restore(
    stages: HasMemory,
    parts: ModelParts,
    reader: CheckpointReader,
    *,
    weights_only: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Set weights and the optimizer's state of all of a rank's stages, to the bit. Raises CheckpointError.

    Frozen weights beside adapters are in no checkpoint, and stay as they are.
    With `weights_only` only working weights: to evaluate or save them, not to train on. `progress` is called with each
    parameter that is set.
    """
    stored, parameter_pieces = parts.stored_names, parts.parameter_pieces

    def set_one(job: tuple[StageState, str]) -> None:
        state, name = job
        stored_name = stored.get(name, name)
        _restore_parameter(state, name, reader, stored_name, parameter_pieces.get(stored_name), weights_only)

    layouts = [(own.state, own.state.layout) for own in stages.memory.values()]
    has_all = not parts.adapters.is_lora
    jobs = [(state, name) for state, layout in layouts for name in layout.offsets if has_all or layout.is_trained(name)]
    with ThreadPoolExecutor(_NUM_READER_THREADS, thread_name_prefix="reading") as threads:
        for _ in threads.map(set_one, jobs):
            progress()


class SavedWeights:
    """Source of the parameters that a checkpoint holds, in the format that it has them in."""

    def __init__(self, reader: CheckpointReader, parts: ModelParts) -> None:
        self._reader, self._parts = reader, parts

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Value of parameter `name`. Raises CheckpointError."""
        stored_name = self._parts.stored_names.get(name, name)
        return _read_weight(self._reader, stored_name, shape, self._parts.parameter_pieces.get(stored_name))


def _restore_parameter(
    state: StageState,
    name: str,
    reader: CheckpointReader,
    stored_name: str,
    pieces: Sequence[ParameterPiece] | None,
    weights_only: bool,
) -> None:
    layout = state.layout
    part, shape = layout.slice_of(name), layout.offsets[name][1]

    def place(target: Tensor, read: Callable[..., Tensor]) -> None:
        """Have `read` fill the parameter's part of `target`, or copy there what it reads."""
        view = target[part].view(shape)
        if view.device.type == "cpu":
            read(out=view)
        else:
            view.copy_(read())

    place(state.weights, partial(_read_weight, reader, stored_name, shape, pieces))
    if not layout.is_trained(name) or weights_only:
        return
    if state.shards is None:
        for key, tensor in optimizer_tensors(state).items():
            place(tensor, partial(reader.read_state, stored_name, key, shape))
        return
    owned = [(own.state, cut) for own in state.owned if (cut := own.overlap(part)) is not None]
    for key in optimizer_tensors(state) if owned else ():
        values = reader.read_state(stored_name, key, shape).reshape(-1)
        for own, (inside, given) in owned:
            optimizer_tensors(own)[key][inside].copy_(values[given])


def _read_weight(
    reader: CheckpointReader,
    name: str,
    shape: tuple[int, ...],
    pieces: Sequence[ParameterPiece] | None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """A parameter's weights, into `out` if it is given; pieces are read into their places, one after the other."""
    if pieces is None:
        return reader.read_weight(name, shape, out=out)
    whole = torch.empty(shape, dtype=reader.dtype) if out is None else out
    for piece in pieces:
        own = piece.of(whole)
        if own.is_contiguous():
            reader.read_weight(piece.name, piece.shape, out=own)
        else:
            own.copy_(reader.read_weight(piece.name, piece.shape))
    return whole


def _named(config: Config) -> Path | None:
    """The checkpoint that is given by its path."""
    word = config.saving.resume_from_checkpoint
    return None if word is None or word.lower() == _NEWEST else Path(word)


def _inherited_save_dir(config: Config, given: Collection[str] | None) -> str | None:
    named = _named(config)
    return None if named is None or given is None or "save_dir" in given else str(named.parent)


def _agreed(config: Config, save_dir: Path, ranks: Ranks, rendezvous: Rendezvous | None) -> Path | None:
    """Path of the checkpoint, chosen by the first rank: another one could see a folder at another moment."""
    problem, path = None, None
    if ranks.is_first:
        try:
            path = _chosen(config, save_dir)
        except MobiusError as error:
            problem = str(error)
    if rendezvous is not None:
        told = rendezvous.gather([problem, None if path is None else str(path)])[0]
        problem, path = told[0], None if told[1] is None else Path(told[1])
    if problem is not None:
        raise CheckpointError(problem)
    return path


def _chosen(config: Config, save_dir: Path) -> Path | None:
    """The newest checkpoint that this launch has saved; before the first one, that of the first start."""
    named = _named(config)
    if named is not None and not is_restart():
        return named
    with lock_if_free(save_dir) as is_free:
        if is_free:  # else another run is at it, which is told when the folder is prepared
            for line in recover_interrupted_saves(save_dir):
                logger.info("%s", line)
    found = find_checkpoints(save_dir)
    for path, reason in found.invalid:
        logger.warning("%s is passed over: %s", path, reason)
    if is_restart():
        launch = launch_id()
        own = [path for path, manifest in found.valid if launch and manifest.data.get(LAUNCH) == launch]
        # Others in the folder are those of an earlier run, which this one replaces, or behind the one that was named.
        if own or named is not None or config.saving.resume_from_checkpoint is None:
            return own[0] if own else named
    if found.valid:
        return found.valid[0][0]
    raise CheckpointError(
        f"--resume_from_checkpoint true: there is no complete checkpoint in {save_dir}. Name one by its folder, give "
        "the --save_dir of the run that is to go on, or leave the option out to begin anew."
    )


def _merged(
    config: Config, path: Path, given: Collection[str] | None, save_dir: str | None
) -> tuple[Config, list[str]]:
    """The checkpoint's options with those of this start over them, and names of those that are other ones.

    Raises ConfigError for what may not differ. `save_dir` is where nobody gave another one.
    """
    file = read_yaml(str(path / OPTIONS_FILE))
    if file.problems:
        raise CheckpointError(f"{path / OPTIONS_FILE} cannot be read: {file.problems[0]}")
    own = option_values(config)
    names = set(own if given is None else given)
    # A checkpoint without a value of its own has the default: of a newer option, for instance.
    saved = {name: file.values.get(name, option.default) for name, option in options().items()}
    for pair in MUTUALLY_EXCLUSIVE:
        if names & set(pair):
            saved |= {other: options()[other].default for other in pair if other not in names}
    taken = {name for name in own if name in names or _belongs_to_start(name)}
    merged = {name: own[name] if name in taken else saved[name] for name in own}
    if save_dir is not None:
        merged["save_dir"] = save_dir
    written = {name: file.values.get(name, options()[name].default) for name in own}
    _refuse_changes(merged, written, config, path)
    return config_from(merged), [name for name in own if name in names and own[name] != written[name]]


def _belongs_to_start(name: str) -> bool:
    return options()[name].section in _START_SECTIONS or name in _START_OPTIONS


def _affects_training(name: str) -> bool:
    """Whether another value trains something else."""
    is_part = options()[name].section in _TRAINING_SECTIONS and name not in _CHANGES_NOTHING
    return is_part or name in _TRAINING_OPTIONS


def _refuse_changes(
    values: Mapping[str, OptionValue], saved: Mapping[str, OptionValue], config: Config, path: Path
) -> None:
    allowed = set(config.saving.changes)
    wrong = [name for name, value in values.items() if value != saved[name] and _affects_training(name)]
    if values["dtype"] != saved["dtype"]:
        raise ConfigError(
            f"`--dtype` is {_shown(values['dtype'])}, {path.name} has {_shown(saved['dtype'])}, in which its weights "
            "are stored: no --resume_changes allows another one. Leave it out, or begin a new run with "
            f"--model_path {path}"
        )
    own_text, saved_text = (yaml.safe_load(to_yaml(config_from(each))) for each in (values, saved))
    problems = [
        f"`--{name}` is {_shown(own_text[name])}, {path.name} has {_shown(saved_text[name])}"
        for name in wrong
        if name not in allowed
    ]
    if problems:
        names = ",".join(sorted({*allowed, *wrong}))
        raise ConfigError(
            *problems,
            hint=f"These change what is trained. Leave them out to go on as before, or allow it by --resume_changes "
            f"{names}.",
        )


def _shown(value: object) -> str:
    return "not given" if value is None else str(value)


def _with_saved_plan(
    config: Config, reader: CheckpointReader, ranks: Ranks, given: Collection[str] | None, changed: Collection[str]
) -> Config:
    """The config with the checkpoint's plan where that fits, so that `auto` is not decided anew.

    It does not where options are `changed` that make another plan.
    """
    if config.planning.plan is not None:
        return config
    planned = replace(config, planning=replace(config.planning, plan=str(reader.path / PLAN_FILE)))
    num_replicas = reader.manifest.data.get(REPLICAS, 1)
    try:
        if num_replicas != ranks.num_replicas:
            raise PlanError(f"it is for {num_replicas} replica(s)")
        adopted = apply_saved_plan(planned, given=given or ())
        is_for_ranks = adopted.saved is not None and adopted.saved.plan.num_ranks == ranks.num_pipeline_ranks
        if is_for_ranks and not set(_PLAN_OPTIONS) & set(changed):
            return planned
        reason = "it is for another number of ranks"
        if anew := [name for name in _PLAN_OPTIONS if name in changed]:
            reason = f"--{anew[0]} is another one"
    except PlanError as error:
        reason = str(error)
    logger.info("the checkpoint's plan is not taken (%s); the run is planned anew", reason)
    return config
