"""Optimizer states on a machine's disks: bytes that lie there, bytes that a run writes, and what is too much of either.

Each step reads and writes all of them once, and the folders take turns, so that each has an equal part. Wear is what is
written beside what the drives are rated for (TBW in their data sheets).
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from mobius.atomic_files import nearest_folder
from mobius.config.config import Config, OptimizerStates, split_names
from mobius.config.validation import find_problems
from mobius.errors import StateFileError
from mobius.planner.memory_estimates import estimate_host_memory
from mobius.planner.solver import PlanResult
from mobius.units import format_bytes

TERABYTE = 10**12
USUAL_SHARE = 0.5
"""Share of a drive's rating that a run may write if nothing else is said."""


@dataclass(frozen=True)
class DiskUse:
    """Optimizer states of a node's pipelines on its disks, of which each step writes every byte."""

    folders: tuple[str, ...]
    num_bytes: int
    """Bytes in all folders together."""
    num_steps: int | None
    """Steps of the run; None where they follow from data that are not read."""
    ratings: tuple[float, ...] = ()
    """Terabytes that the drive of each folder is rated for; empty where that is not known."""
    max_written: float | None = None
    """Terabytes that the run may write, as the user said; None: `USUAL_SHARE` of the ratings."""

    @classmethod
    def of(cls, result: PlanResult) -> DiskUse | None:
        """Return what a planned run takes of each node's disks; None where it keeps no states on disks."""
        request, planning = result.request, result.request.config.planning
        if not result.host_estimate.disk:
            return None
        folders, ratings = split_names(request.config.pipeline.offload_states_to), planning.disk_ratings
        return cls(
            folders,
            result.host_estimate.disk * request.machine.replicas_per_node,
            known_steps(request.config),
            ratings * len(folders) if len(ratings) == 1 else ratings,
            planning.max_disk_writes,
        )

    @property
    def bytes_of_folder(self) -> int:
        return ceil(self.num_bytes / len(self.folders))

    @property
    def limit(self) -> float | None:
        """Terabytes that the run may write to all folders together; None: as many as it likes."""
        if self.max_written is not None or not self.ratings:
            return self.max_written
        return USUAL_SHARE * min(self.ratings) * len(self.folders)

    def written(self, num_steps: int) -> float:
        """Terabytes that so many steps write to all folders together."""
        return num_steps * self.num_bytes / TERABYTE

    def describe(self) -> str:
        """Bytes there, and what is written in 1,000 steps and in all of the run's."""
        each = f" ({format_bytes(self.bytes_of_folder)} in each)" if len(self.folders) > 1 else ""
        text = f"{format_bytes(self.num_bytes)} of optimizer states are in {','.join(self.folders)}{each}: 1,000 steps "
        text += f"write {format_terabytes(self.written(1000))}"
        if self.num_steps is None:
            return text
        text += f", the run's {self.num_steps:,} steps {format_terabytes(self.written(self.num_steps))}"
        if self.ratings:
            share = self.written(self.num_steps) / len(self.folders) / min(self.ratings)
            of = "the drive is" if len(self.folders) == 1 else "the first drive to wear out is"
            text += f", {100 * share:.2g} % of what {of} rated for"
        return text

    def rows(self, *, is_here: bool) -> Iterator[list[str]]:
        """A table with a row for each folder; what is free is told of the disks of this machine, if they are these."""
        steps = [1000] if self.num_steps is None else [1000, self.num_steps]
        head = ["folder", "states", *(f"{number:,} steps write" for number in steps)]
        yield [*head, *["rated for"] * bool(self.ratings), *["free"] * is_here]
        for place, folder in enumerate(self.folders):
            row = [folder, format_bytes(self.bytes_of_folder)]
            row += [format_terabytes(self.written(number) / len(self.folders)) for number in steps]
            row += [format_terabytes(self.ratings[place])] if self.ratings else []
            yield [*row, *[format_bytes(_free_bytes(nearest_folder(Path(folder).expanduser())))] * is_here]

    def check_space(self) -> None:
        """Raise StateFileError if a file system of this machine has no room for its folders' states.

        Call it before any rank has made its files.
        """
        on_device = defaultdict[int, dict[str, Path]](dict)
        for folder in self.folders:
            place = nearest_folder(Path(folder).expanduser())
            on_device[place.stat().st_dev][folder] = place
        for places in on_device.values():
            need, free = len(places) * self.bytes_of_folder, _free_bytes(*places.values())
            if need > free:
                raise StateFileError(
                    f"--offload_states_to {','.join(places)}: {format_bytes(need)} of optimizer states would be there, "
                    f"{format_bytes(free)} is free ({format_bytes(self.num_bytes)} are shared by "
                    f"{len(self.folders)} folder(s)). Free some space, name folders on more or larger disks, or store "
                    "fewer bytes: --optimizer_states compact, more --resident_stages."
                )


def known_steps(config: Config) -> int | None:
    """Return the steps of a run; None where they are counted in epochs of data that are not read yet."""
    optim = config.optim
    return None if optim.num_iterations is None and optim.num_train_epochs is not None else optim.num_steps


def check_disks(result: PlanResult, *, is_here: bool) -> None:
    """Refuse a run that would write more to disks than it may, or for which these have no room if they `is_here`.

    Raises StateFileError with the arithmetic and what to change. Call it before any rank has made its files.
    """
    if (use := DiskUse.of(result)) is None:
        return
    if use.num_steps is not None and use.limit is not None and use.written(use.num_steps) > use.limit:
        raise StateFileError(_too_much(result, use, use.num_steps, use.limit))
    if is_here:
        use.check_space()


def _too_much(result: PlanResult, use: DiskUse, num_steps: int, allowed: float) -> str:
    """The refusal of a run that would write more than the `allowed` terabytes."""
    written, limit = use.written(num_steps), f"--max_disk_writes {allowed:g}"
    if use.max_written is None:
        limit = f"half of what {len(use.folders)} drive(s) of {min(use.ratings):g} TB are rated for"
    head = (
        f"--offload_states_to {','.join(use.folders)}: the run would write {format_terabytes(written)} "
        f"({num_steps:,} steps x {format_terabytes(use.written(1))}), {format_terabytes(allowed)} may be written "
        f"({limit}). Each of these lowers it, or allows it:"
    )
    fewer = _fewer_writes(result, use, int(allowed * TERABYTE / use.num_bytes), written)
    return "\n  ".join([head, *fewer, f"--max_disk_writes {ceil(written)}"])


def _fewer_writes(result: PlanResult, use: DiskUse, steps: int, written: float) -> Iterator[str]:
    """Changes with which a run writes less than `written` terabytes: `steps` are as many as it may take."""
    request = result.request
    for states in (OptimizerStates.BF16, OptimizerStates.COMPACT):
        config = replace(request.config, optim=replace(request.config.optim, optimizer_states=states))
        if not find_problems(config):
            less = estimate_host_memory(replace(request, config=config), result.plan).disk
            if less < result.host_estimate.disk:
                in_all = written * less / result.host_estimate.disk
                yield f"--optimizer_states {states}: {format_terabytes(in_all)}"
    if steps:
        yield f"fewer steps: --num_iterations {steps}, or for as many samples a larger --batch_size"
    if use.max_written is None:
        drives = ceil(written / (USUAL_SHARE * min(use.ratings)))
        yield f"more drives like these: {drives} in place of {len(use.folders)}"


def format_terabytes(terabytes: float) -> str:
    """`1,990 TB`, `67.4 TB`, or in GB what is less than 0.1 TB."""
    number, unit = (terabytes, "TB") if terabytes >= 0.1 else (1000 * terabytes, "GB")
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def _free_bytes(*places: Path) -> int:
    return min(shutil.disk_usage(place).free for place in places)
