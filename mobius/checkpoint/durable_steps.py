"""Makes each step of a run with states on disks a checkpoint, so that at most one step is lost if the process ends.

    main thread       step 7 ............ | after_step(7)                    step 8 ............ | after_step(8)
    updates           7: slot 1 ....................... written              8: wait, slot 0 ........
    commit thread                           all written -> fdatasync, stages-RANK.json -> all ranks have
    first rank                                -> checkpoint.json of slot 1 -> save_dir/checkpoint-7
    first write of 8, each rank                                             -> no checkpoint-6, nor slot 0's manifest

A slot (engine/slot_files.py) has the files of a checkpoint, but its tensors are in the files of states. `checkpoint-7`
in the run's folder is a link to the slot. One rename makes it the newest checkpoint, and a run resumes from it as from
any other checkpoint (slot_reader.py). The other slot is overwritten only after that rename, so at least one slot is
always complete. Ranks exchange results at the launcher's store, because a collective would wait for updates.
Stages on a GPU are copied and written after each update. Links and file names are relative, so that a copied run uses
its copied files. The link FOLDER/NAME/run leads to the run that owns the slots in FOLDER/NAME; no other run removes
them.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mobius.checkpoint.contents import CheckpointContents, StepMetadata
from mobius.checkpoint.folders import NAMES, checkpoint_path, manifest_or_none, with_others
from mobius.checkpoint.manifest import Manifest
from mobius.checkpoint.reader import CheckpointReader
from mobius.checkpoint.saved_stage import WEIGHTS, OpenRun, SavedStage
from mobius.checkpoint.slot_reader import STAGES_FILES, Region, SlotReader, stages_to_json
from mobius.checkpoint.stage_saver import AsyncStageSaver
from mobius.checkpoint.tensor_files import translate_file_errors
from mobius.config.config import Config
from mobius.config.earlier_results import MANIFEST_FILE
from mobius.distributed.rendezvous import join_run
from mobius.engine.host_arena import whole_pages
from mobius.engine.optimizer_states import DiskStates
from mobius.engine.slot_files import NUM_SLOTS, Overwriting, SlotFiles, SlotPlace, done
from mobius.engine.state_files import Key, Version, padded, wait, weights_key
from mobius.errors import CheckpointError, StateFileError
from mobius.files.atomic_files import atomic_write, sync_to_disk
from mobius.process.ranks import Ranks

_OWNER = "run"
"""Name of the link, next to the slots of a run, to the run's folder `--save_dir`."""


def slot_place(config: Config, ranks: Ranks, resumed_from: Path | None) -> SlotPlace | None:
    """Return the place of a run's slots; None if the run has no folders of states. Raises CheckpointError.

    The first rank empties one slot, with which the run begins. The other slot is kept until the run has begun
    (`empty_slot_before`): it holds the checkpoint that the run is `resumed_from`, or the newest step of the run that
    this run replaces.
    """
    if not config.pipeline.state_folders:
        return None
    place = SlotPlace(config.pipeline.state_folders, config.slots_name, ranks.rank)
    kept = None if resumed_from is None else place.slot_of(resumed_from)
    if kept is None:
        manifests = {slot: manifest_or_none(place.folders(slot)[0]) for slot in range(NUM_SLOTS)}
        numbers = {slot: (each.save_number, each.step) for slot, each in manifests.items() if each is not None}
        kept = max(numbers, key=numbers.__getitem__, default=NUM_SLOTS - 1)
    place = place._replace(first_slot=1 - kept)
    if ranks.is_first:
        _empty(place, place.first_slot, Path(config.output.save_dir))
    return place


def empty_slot_before(place: SlotPlace, save_dir: Path) -> None:
    """Empty the slot with a step of an earlier start, once this run has begun; first rank. Raises CheckpointError."""
    _empty(place, 1 - place.first_slot, save_dir)


def remove_slots(place: SlotPlace | None, save_dir: Path, resumed: CheckpointReader | None) -> None:
    """Remove the durable steps of a run whose model is saved, and the links to them. Raises CheckpointError.

    The steps of the start that the run was `resumed` from are removed, too, if they belong to this run.
    """
    runs = set[Path]() if place is None else {folder.parent for folder in place.folders(0)}
    if isinstance(resumed, SlotReader):
        others = {file.parent.parent for file in resumed.files}
        runs |= {run for run in others if (run / _OWNER).resolve() == save_dir.resolve()}
    with translate_file_errors("remove", save_dir):
        _remove_links({run.resolve() / f"slot-{slot}" for run in runs for slot in range(NUM_SLOTS)}, save_dir)
    for run in runs:
        with translate_file_errors("remove", run):
            shutil.rmtree(run, ignore_errors=True)


class DurableSteps:
    """Owns the slots of a run: files of states, and the files and links that make them checkpoints."""

    def __init__(
        self,
        session: OpenRun,
        save_dir: Path,
        contents: CheckpointContents,
        *,
        place: SlotPlace,
        files: SlotFiles | None,
    ) -> None:
        """Take the slots; `files` belong to this rank's streamed stages, if it has any. Raises StateFileError."""
        self._save_dir, self._contents, self.place = save_dir, contents, place
        self._activity, self._ranks = session.activity, session.run_setup.ranks
        self._is_first, self._all_ranks = self._ranks.is_first, session.all_ranks
        pieces, saved = session.run_setup.parts.parameter_pieces, dict[int, SavedStage]()
        for stage, memory in session.memory.items():
            names = {parameter.name for parameter in contents.parameters if parameter.stage == stage}
            saved[stage] = SavedStage(memory, names, pieces=pieces)
        streamed = {stage: each for stage, each in saved.items() if each.memory.states.keeps_versions}
        self._files, self._memory = [] if files is None else [files], session.memory
        self._frozen = [stage for stage, each in streamed.items() if not each.memory.state.layout.num_trained]
        self._tensors = dict[Key, Mapping[str, Tensor]]()
        """Named tensors of each region, by the region's key; only their offsets, formats and shapes are used."""
        for stage, each in streamed.items():
            flat = each.flat_tensors(has_optimizer=True)
            self._tensors[weights_key(stage)] = each.named_tensors({WEIGHTS: flat.pop(WEIGHTS)})
            self._tensors[stage] = each.named_tensors(flat)
        self._copied = None
        if resident := {stage: each for stage, each in saved.items() if stage not in streamed}:
            self._copied = _CopiedStages(resident, session, place)
            self._files.append(self._copied.files)
        self._rendezvous = None if self._ranks.num_ranks == 1 else join_run(self._ranks)
        self._thread: threading.Thread | None = None
        self._committed = done()
        self.newest: Path | None = None
        """The newest durable step, on the first rank."""
        self.newest_step = 0

    def begin(self, resumed: CheckpointReader | None) -> None:
        """Prepare the first step; collective. If the run resumes from a slot, its state is moved to the other slot.

        Raises StateFileError and CheckpointError.
        """
        first, other = self.place.first_slot, 1 - self.place.first_slot
        is_kept = resumed is not None and self.place.slot_of(resumed.path) == other
        if resumed is not None and is_kept:
            versions = self._versions()
            if self._copied is not None:
                self._copied.begin(versions[-1])
            self._commit_all(versions, lambda folder: self._copy_texts(resumed, folder), resumed.manifest)
        if self._is_first:
            empty_slot_before(self.place, self._save_dir)
            for run in {folder.parent for folder in self.place.folders(other)}:
                with translate_file_errors("make", run):
                    _mark_owner(run, self._save_dir)
            for slot in [other] if is_kept else [first, other]:
                folder = self.place.folders(slot)[0]
                with translate_file_errors("make", folder):
                    folder.mkdir(parents=True, exist_ok=True)
                self._contents.write_common(folder)
        self._all_ranks.barrier()
        for files in self._files:
            files.open_slot(other)
        for stage in self._frozen:
            states = self._memory[stage].states
            assert isinstance(states, DiskStates), "versions are kept"
            states.write_frozen(self._files[0])
        for files in self._files:
            files.begin_version(other, done())

    def before_update(self, stage: int) -> None:
        """Wait until the state of `stage` may change; the stepper calls this."""
        if self._copied is not None:
            self._copied.saver.before_update(stage)

    def after_step(self, metadata: StepMetadata, *, save_number: int) -> None:
        """Make the finished step durable while the next step runs; raises the error of the previous step, if any.

        `save_number` is the number of the run's newest save, complete or not; higher numbers are newer.
        """
        self.finish()
        versions, self._committed = self._versions(), Future()
        if self._copied is not None:
            self._copied.begin(versions[-1])
        for files, version in zip(self._files, versions, strict=True):
            files.begin_version(1 - version.slot, Overwriting(self._committed, self._invalidate(1 - version.slot)))
        arguments = versions, metadata, save_number, self._committed
        self._thread = threading.Thread(target=self._commit, args=arguments, name="durable step", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last step is durable. Raises the error if writing it failed."""
        if self._thread is not None:
            with self._activity.waiting("the disks, until the last step is durable"):
                self._thread.join()
            self._thread = None
        self._committed.result()

    def close(self) -> None:
        """Close files; durable steps stay."""
        if self._copied is not None:
            self._copied.close()

    def _versions(self) -> list[Version]:
        return [files.version for files in self._files if files.version is not None]  # by now, all have a version

    def _commit(
        self,
        versions: Sequence[Version],
        metadata: StepMetadata,
        save_number: int,
        committed: Future[None],
    ) -> None:
        def commit() -> None:
            manifest = self._contents.manifest(metadata, [], save_number=save_number, has_optimizer=True)
            self._commit_all(versions, lambda folder: self._contents.write_history(folder, metadata), manifest)

        self._activity.start_task("durable", f"step {metadata.step}")
        _settle(committed, commit)
        self._activity.end_task("durable")

    def _commit_all(self, versions: Sequence[Version], write_texts: Callable[[Path], None], manifest: Manifest) -> None:
        """Wait until a step is durable on all ranks; all ranks call it. Raises MobiusError on all ranks."""
        folder = self.place.folders(versions[0].slot)[0]

        def sync() -> None:
            for files, version in zip(self._files, versions, strict=True):
                files.sync(version, self._check_copies)
            if not folder.is_dir():
                raise StateFileError(
                    f"--offload_states_to: {folder} was removed during the run, with the states of the last steps. "
                    "Resume from the newest checkpoint that is left: --resume_from_checkpoint true"
                )
            self._write_table(folder, versions)

        def publish() -> None:
            if self._is_first:
                write_texts(folder)
                self._publish(versions[0].slot, manifest)

        for part in (sync, publish):
            own: Exception | None = None
            try:
                part()
            except Exception as error:
                own = error
            told = None if own is None else str(own)
            gathered = [told] if self._rendezvous is None else self._rendezvous.gather(told)
            if own is not None:
                raise own
            for text in gathered:
                if text is not None:
                    raise CheckpointError(f"another rank cannot make its step durable: {text}")

    def _regions(self, versions: Sequence[Version]) -> tuple[list[Path], dict[Key, Region]]:
        """Return this rank's files of a version, and the regions in them."""
        regions, paths = dict[Key, Region](), list[Path]()
        tensors = self._tensors | (self._copied.tensors if self._copied else {})
        for files, version in zip(self._files, versions, strict=True):
            for key, chunks in files.chunks(version).items():
                moved = [(len(paths) + number, *place) for number, *place in chunks]
                regions[key] = Region.of(moved, tensors.get(key, {}))  # type: ignore[arg-type]
            paths += files.paths(version.slot)
        return paths, regions

    def _write_table(self, folder: Path, versions: Sequence[Version]) -> None:
        paths, regions = self._regions(versions)
        with translate_file_errors("write", folder), atomic_write(folder / f"stages-{self.place.rank}.json") as path:
            path.write_text(json.dumps(stages_to_json(folder, paths, [*regions.values()])), encoding="utf-8")

    def _publish(self, slot: int, manifest: Manifest) -> None:
        """Turn a slot into the newest checkpoint of the run, once its files are on the disks; on the first rank."""
        folder = self.place.folders(slot)[0]
        with translate_file_errors("write", folder):
            whole = with_others(folder, replace(manifest, others=()), skipped=(".raw", ".partial"))
            with atomic_write(folder / MANIFEST_FILE) as path:
                path.write_text(whole.to_json(), encoding="utf-8")
        link = checkpoint_path(self._save_dir, manifest.step)
        with translate_file_errors("link", link), NAMES:
            if not link.exists() or link.is_symlink():  # else the name belongs to a saved checkpoint, which is kept
                temporary = link.with_name(f"{link.name}.link")
                temporary.unlink(missing_ok=True)
                target = os.path.relpath(folder.resolve(), self._save_dir.resolve())
                temporary.symlink_to(target, target_is_directory=True)
                temporary.replace(link)
            sync_to_disk(self._save_dir)
        self.newest, self.newest_step = link, manifest.step

    def _invalidate(self, slot: int) -> Callable[[], None]:
        """Return a function that removes a slot's link and manifest, so that it is no checkpoint; for any rank."""
        folder = self.place.folders(slot)[0]

        def invalidate() -> None:
            with translate_file_errors("remove", folder), NAMES:
                _remove_links({folder.resolve()}, self._save_dir)
                # Sync now: if the removed link came back after a power cut, it would show the slot's next step under
                # the old step's number.
                sync_to_disk(self._save_dir)
                (folder / MANIFEST_FILE).unlink(missing_ok=True)
                if folder.is_dir():
                    sync_to_disk(folder)

        return invalidate

    def _copy_texts(self, resumed: CheckpointReader, folder: Path) -> None:
        for other in resumed.manifest.others:
            if not Path(other.file_name).match(STAGES_FILES):
                target = folder / other.file_name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(resumed.path / other.file_name, target)

    def _check_copies(self) -> None:
        """Raise the error of copying, if copying has failed."""
        if self._copied is not None and (error := self._copied.saver.error) is not None:
            raise error


class _CopiedStages:
    """Stages whose states are not on disks; they are copied after each update, and the copies are written."""

    def __init__(self, stages: Mapping[int, SavedStage], session: OpenRun, place: SlotPlace) -> None:
        sizes: dict[Key, int] = {
            stage: sum(each.nbytes for each in saved.flat_tensors(has_optimizer=True).values())
            for stage, saved in stages.items()
        }
        shares = session.run_setup.disk_shares
        self.files = SlotFiles(sizes, place=place, kind="copied", shares=shares)
        self.saver = AsyncStageSaver(
            stages,
            order=sorted(stages),
            has_optimizer=True,
            staging_bytes=sum(sizes.values()),
            device=session.run_setup.device,
            num_threads=session.run_setup.optimizer_threads,
            activity=session.activity,
        )
        self.tensors = dict[Key, Mapping[str, Tensor]]()
        self._sizes = sizes

    def begin(self, version: Version) -> None:
        """Copy and write all stages after the updates in progress; waits until the previous version is written."""
        self.saver.wait()

        def write(stage: int, tensors: Mapping[str, Tensor]) -> None:
            self.tensors[stage] = tensors
            region = whole_pages(next(iter(tensors.values())))[: padded(self._sizes[stage])]
            wait(self.files.write(stage, region, version))

        self.saver.begin(write)

    def close(self) -> None:
        self.saver.wait()
        self.saver.close()
        self.files.close()


def _settle(future: Future[None], action: Callable[[], None]) -> None:
    """Run `action`, and end a future with its success or its error."""
    try:
        action()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _empty(place: SlotPlace, slot: int, save_dir: Path) -> None:
    """Remove the contents of a slot; first the link to it and its manifest."""
    folders = place.folders(slot)
    with translate_file_errors("remove", save_dir):
        _remove_links({folders[0].resolve()}, save_dir)
    for path in folders:
        with translate_file_errors("remove", path):
            (path / MANIFEST_FILE).unlink(missing_ok=True)
            if path.is_dir():
                shutil.rmtree(path)


def _mark_owner(run: Path, save_dir: Path) -> None:
    """Link from `run`, a folder of slots, to the run that owns it. Raises OSError."""
    run.mkdir(parents=True, exist_ok=True)
    (run / _OWNER).unlink(missing_ok=True)
    (run / _OWNER).symlink_to(os.path.relpath(save_dir.resolve(), run.resolve()), target_is_directory=True)


def _remove_links(slots: Collection[Path], save_dir: Path) -> None:
    """Remove the links to slots; another rank may do it, too."""
    for path in save_dir.glob("checkpoint-*"):
        with suppress(FileNotFoundError):  # `resolve` raises it if another rank removes the link meanwhile
            if path.is_symlink() and path.resolve() in slots:
                path.unlink()
