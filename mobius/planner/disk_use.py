"""Optimizer states on a machine's disks: bytes stored there, bytes that a run writes, and the limits of both.

Each step reads and writes all states once. Folders have shares of the states by measured rates, or else equal shares.
If weights are on disks, too, each load reads them. Durable steps always write weights, and need twice the space, for
two slots.
Wear is written bytes / bytes that the drives are rated for (TBW in their data sheets).
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from mobius.config.config import Config, DurableSteps, OptimizerStates, split_names
from mobius.config.validation import find_problems
from mobius.errors import PlanError, StateFileError
from mobius.files.atomic_files import nearest_folder
from mobius.planner.memory_estimates import estimate_host_memory
from mobius.planner.request import Machine, PlanRequest
from mobius.planner.solver import PlanResult
from mobius.process.log import RANK_ZERO_ONLY
from mobius.schedule.memory_layout import RankUse, lay_out_rank
from mobius.schedule.partition import ModelShape
from mobius.units import format_bytes

logger = logging.getLogger(__name__)

TERABYTE = 10**12
USUAL_SHARE = 0.5
"""Share of a drive's rating that a run may write by default."""


@dataclass(frozen=True)
class DiskUse:
    """Optimizer states that a node's pipelines keep on the node's disks."""

    request: PlanRequest
    num_bytes: int
    """Bytes in all folders together."""
    written_bytes: int
    """Bytes that a step writes to all folders together."""

    @classmethod
    def of(cls, result: PlanResult) -> DiskUse | None:
        """Return the disk use of a planned run on each node; None if the run keeps no states on disks."""
        pipelines, host = result.request.machine.replicas_per_node, result.host_estimate
        return cls(result.request, host.disk * pipelines, host.disk_writes * pipelines) if host.disk else None

    @property
    def folders(self) -> tuple[str, ...]:
        return split_names(self.request.config.pipeline.offload_states_to)

    @property
    def num_steps(self) -> int | None:
        """Number of steps of the run; None if the number depends on data that are not read yet."""
        optim = self.request.config.optim
        return None if optim.num_iterations is None and optim.num_train_epochs is not None else optim.num_steps

    @property
    def ratings(self) -> tuple[float, ...]:
        """Terabytes that the drive of each folder is rated for; empty if unknown."""
        ratings = self.request.config.planning.disk_ratings
        return ratings * len(self.folders) if len(ratings) == 1 else ratings

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of all bytes in each folder."""
        return self.request.machine.disk_shares or (1 / len(self.folders),) * len(self.folders)

    @property
    def bytes_of_folders(self) -> list[int]:
        return [ceil(share * self.num_bytes) for share in self.shares]

    @property
    def rated(self) -> float:
        """Terabytes that can be written to all folders together until the first drive reaches its rating."""
        return min((rating / share for rating, share in zip(self.ratings, self.shares, strict=True)), default=0.0)

    def written(self, num_steps: int) -> float:
        """Terabytes that `num_steps` steps write to all folders together."""
        return num_steps * self.written_bytes / TERABYTE

    def describe(self) -> str:
        """Describe the bytes on disks, and the bytes written in 1,000 steps and in the whole run."""
        disks, parts = self.request.memory_rules.disks, [*map(format_bytes, self.bytes_of_folders)]
        assert disks is not None, "there are states on disks"
        each = f" ({parts[0]} in each)" if len({*parts}) == 1 else f" ({', '.join(parts)})"
        each *= len(parts) > 1
        what = "weights and " * (disks.has_weights or disks.keeps_steps) + "optimizer states"
        what += " and gradients" * disks.has_gradients + " of two steps (--durable_steps)" * disks.keeps_steps
        text = f"{format_bytes(self.num_bytes)} of {what} are in {','.join(self.folders)}{each}: 1,000 steps "
        text += f"write {format_terabytes(self.written(1000))}"
        if self.num_steps is not None:
            text += f", the run's {self.num_steps:,} steps {format_terabytes(self.written(self.num_steps))}"
        if self.num_steps is not None and self.ratings:
            share = self.written(self.num_steps) / self.rated
            text += f", {100 * share:.2g} % of the rating of the drive that wears out first"
        return text

    def check_space(self) -> None:
        """Raise StateFileError if a file system of this machine has no room for the states in its folders."""
        config, keeps_steps = self.request.config, self.request.keeps_steps
        for room in _rooms(config, self.bytes_of_folders, keeps_steps=keeps_steps):
            if room.needed > room.free:
                own = f", with this run's earlier steps ({format_bytes(room.own)}) overwritten" if room.own else ""
                kept = f" and the step to resume from ({format_bytes(room.kept)})" if room.kept else ""
                raise StateFileError(
                    f"--offload_states_to {room.folder}: {format_bytes(room.needed)} of optimizer states{kept} would "
                    f"be on its file system, {format_bytes(room.free)} is free{own} ({format_bytes(self.num_bytes)} "
                    f"are shared by {len(self.folders)} folder(s)). Free some space, name folders on more or larger "
                    "disks, or store fewer bytes: --optimizer_states compact, more --resident_stages"
                    f"{', --durable_steps off' if keeps_steps else ''}."
                )


def check_disks(result: PlanResult, *, is_here: bool) -> None:
    """Raise StateFileError if a run would write too much to its disks, or if disks of this machine have no room.

    `is_here`: the disks are in this machine. The error has arithmetic and advice. Call it before ranks create files.
    """
    if (use := DiskUse.of(result)) is None:
        return
    limit, number = result.request.config.planning.max_disk_writes, len(use.folders)
    source = f"--max_disk_writes {limit or 0:g}"
    if limit is None and use.ratings:
        limit = USUAL_SHARE * use.rated
        source = f"half of the rating of {number} drive(s) of {min(use.ratings):g} TB"
    if use.num_steps is not None and limit is not None and (written := use.written(use.num_steps)) > limit:
        steps = f"{use.num_steps:,} steps x {format_terabytes(use.written(1))}"
        head = (
            f"--offload_states_to {','.join(use.folders)}: the run would write {format_terabytes(written)} ({steps}), "
            f"{format_terabytes(limit)} may be written ({source}). Each of these writes less, or allows it:"
        )
        lines = [head, *_fewer_writes(result, use, limit), f"--max_disk_writes {ceil(written)}"]
        raise StateFileError("\n  ".join(lines))
    if is_here:
        use.check_space()


def with_room_for_steps(
    machine: Machine, config: Config, shape: ModelShape, *, is_possible: bool, agree: Callable[[int], int] = int
) -> Machine:
    """Return `machine`, with `may_keep_steps` set to whether its disks have room for durable steps.

    `agree` returns the smallest number of all ranks. `is_possible` is False for models whose weights are stored in
    another order than in memory. For such a model, --durable_steps on raises PlanError.
    """
    folders, steps = config.pipeline.state_folders, config.pipeline.durable_steps
    is_elsewhere = config.planning.card is not None
    if not folders or steps is DurableSteps.OFF or machine.num_replicas > 1 or is_elsewhere:
        return machine
    if steps is DurableSteps.ON:
        if not is_possible:
            raise PlanError(
                "--durable_steps on: this model's experts are stored in another order than in memory. Use off."
            )
        return machine
    rules = PlanRequest.of(config, shape, machine).memory_rules
    trained_layers = shape.layer_parameters if shape.trained is None else shape.trained.layers
    whole = rules.sizes_of(shape.num_parameters, shape.num_trained, sum(trained_layers))
    need = lay_out_rank({0: whole}, RankUse((), 1), rules, num_stages=1).stages[0].disk_bytes(rules, 0).stored
    rooms = _rooms(config, [ceil(need / len(folders))] * len(folders), keeps_steps=True)
    has_room = bool(agree(int(is_possible and all(room.needed <= room.free for room in rooms))))
    if not has_room and is_possible:
        logger.info(
            "steps are not durable: there is no room for the two steps to keep, %s in %s (--durable_steps)",
            *(format_bytes(need), config.pipeline.offload_states_to),
            extra=RANK_ZERO_ONLY,
        )
    return replace(machine, may_keep_steps=has_room)


def _fewer_writes(result: PlanResult, use: DiskUse, limit: float) -> Iterator[str]:
    """Yield changes with which a run would write less; the run may write `limit` terabytes."""
    request, written = result.request, use.written(use.num_steps or 0)

    def written_by(changed: PlanRequest) -> float:
        writes = estimate_host_memory(changed, result.plan).disk_writes
        return written * writes / result.host_estimate.disk_writes

    config = replace(request.config, optim=replace(request.config.optim, optimizer_states=OptimizerStates.COMPACT))
    less = written_by(replace(request, config=config))
    if less < written and not find_problems(config):
        yield f"--optimizer_states compact: {format_terabytes(less)}"
    if steps := int(limit / use.written(1)):
        yield f"fewer steps: --num_iterations {steps}; a larger --batch_size keeps the number of samples"
    if request.keeps_steps:
        less = written_by(request.with_pipeline(durable_steps=DurableSteps.OFF))
        yield f"--durable_steps off: {format_terabytes(less)}"
    for option in ("gradients_on_disks", "weights_on_disks"):
        without = format_terabytes(written_by(request.with_pipeline(**{option: False})))
        if without != format_terabytes(written):  # durable steps write weights even without --weights_on_disks
            yield f"without --{option}, with 2 more bytes of host memory per parameter: {without}"
    if request.config.planning.max_disk_writes is None:
        drives = ceil(written / (USUAL_SHARE * min(use.ratings)))
        yield f"more drives like these: {drives} in place of {len(use.folders)}"


def format_terabytes(terabytes: float) -> str:
    """Format as `1,990 TB` or `67.4 TB`; less than 0.1 TB in GB."""
    number, unit = (terabytes, "TB") if terabytes >= 0.1 else (1000 * terabytes, "GB")
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def check_folders(config: Config) -> None:
    """Raise StateFileError for folders of this machine that cannot hold states or are named twice."""
    problems, names = list[str](), dict[Path, str]()
    for name in split_names(config.pipeline.offload_states_to):
        path = Path(name).expanduser()
        if (reason := _why_no_folder(path)) is not None:
            problems.append(f"{name} {reason}")
        elif (other := names.setdefault(path.resolve(), name)) != name:
            problems.append(f"{other} and {name} are one folder. Name each folder once: each counts as one drive.")
    if problems:
        raise StateFileError("\n".join(f"--offload_states_to {problem}" for problem in problems))


def _why_no_folder(path: Path) -> str | None:
    """Return why a folder cannot hold states; None if it can. The folder need not exist yet."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "is a link that leads back to itself. Name a folder."
        if path.is_symlink():
            return f"is a link to {path.resolve()}, which is not there. Is its disk mounted? If so, create that folder."
    nearest = nearest_folder(path)
    if not nearest.is_dir():
        return "is a file. Name a folder." if nearest == path.resolve() else f"lies below the file {nearest}."
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"cannot be written to: {nearest} is read-only for this user. Name another folder, or change its rights."
    return None


@dataclass(frozen=True)
class _Room:
    """Room for states on one file system."""

    folder: Path
    needed: int
    """Maximum bytes of the run's states, plus bytes of an earlier step that still exists during their creation."""
    free: int
    """Free bytes, including the bytes of the run's existing slots, which the run overwrites."""
    own: int
    """Bytes of the run's existing slots."""
    kept: int
    """Bytes of an earlier step, if they are part of `needed`; else 0."""


def _rooms(config: Config, parts: Sequence[int], *, keeps_steps: bool) -> Iterator[_Room]:
    """Yield the room on each file system. `parts`: bytes of the states in each folder, in both slots if `keeps_steps`.

    The first new slot is created while the newest step of an earlier start still exists.
    """
    folders, by_device = config.pipeline.state_folders, dict[int, list[int]]()
    for number, folder in enumerate(folders):
        by_device.setdefault(nearest_folder(folder).stat().st_dev, []).append(number)
    for numbers in by_device.values():
        slots = dict[str, int]()
        for number in numbers:
            for file in (folders[number] / config.slots_name).glob("slot-*/*.raw"):
                slots[file.parent.name] = slots.get(file.parent.name, 0) + file.stat().st_size
        own, largest, need = sum(slots.values()), max(slots.values(), default=0), sum(parts[each] for each in numbers)
        beside = need // (2 if keeps_steps else 1) + largest
        free = shutil.disk_usage(nearest_folder(folders[numbers[0]])).free + own
        yield _Room(folders[numbers[0]], max(need, beside), free, own, largest if beside > need else 0)
