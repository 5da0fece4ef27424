"""Copies of stages beside training: each is of one step, updates wait no longer than they must, failures free all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mobius.checkpoint import stage_saver
from mobius.checkpoint.saved_stage import SavedStage
from mobius.checkpoint.stage_saver import AsyncStageSaver, SaveOutcome
from mobius.engine.stage_state import StageState
from mobius.hardware.streams import Event, Stream
from mobius.models.layout import StageLayout

SHAPES = {"a.weight": (40, 50), "a.bias": (50,)}
PATIENCE = 20.0


def zeros(length: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(length, dtype=dtype)


@dataclass
class FakeMemory:
    """A stage whose updates are done when the test says so."""

    state: StageState
    waiting: list[Callable[[], None]] | None = None

    @property
    def states(self) -> FakeMemory:
        return self

    def run_after_update(self, action: Callable[[], None]) -> None:
        if self.waiting is None:
            action()
        else:
            self.waiting.append(action)

    def is_in_memory(self, view: torch.Tensor) -> bool:
        return True


def make_stage(dtype: torch.dtype = torch.bfloat16, *, pending: bool = False) -> SavedStage:
    layout = StageLayout.of(SHAPES)
    state = StageState.with_buffers(layout, zeros(layout.num_units, dtype), zeros(layout.num_trained, dtype), zeros)
    return SavedStage(FakeMemory(state, [] if pending else None), frozenset(SHAPES))  # type: ignore[arg-type]


def set_all(stage: SavedStage, value: int) -> None:
    for tensor in stage.flat_tensors(has_optimizer=True).values():
        tensor.fill_(value)


def make(stages: Mapping[int, SavedStage], staging_bytes: int = 10**9) -> AsyncStageSaver:
    return AsyncStageSaver(
        stages,
        order=sorted(stages, reverse=True),
        has_optimizer=True,
        staging_bytes=staging_bytes,
        device=torch.device("cpu"),
        num_threads=2,
    )


@dataclass
class Disk:
    """Keeps what is written; a stage is held up until it is released."""

    held: bool = False
    release: threading.Event = field(default_factory=threading.Event)
    files: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    begun: threading.Event = field(default_factory=threading.Event)

    def write(self, stage: int, tensors: Mapping[str, Tensor]) -> None:
        self.begun.set()
        assert not self.held or self.release.wait(PATIENCE)
        self.files[stage] = {name: tensor.clone() for name, tensor in tensors.items()}

    def values(self) -> dict[int, set[float]]:
        return {stage: {float(v) for t in files.values() for v in t.unique()} for stage, files in self.files.items()}


@pytest.mark.parametrize(
    ("dtype", "keys"),
    [
        (torch.bfloat16, ["", ".exp_avg", ".exp_avg_sq", ".master_low"]),
        (torch.float16, ["", ".exp_avg", ".exp_avg_sq", ".master"]),
        (torch.float32, ["", ".exp_avg", ".exp_avg_sq"]),
    ],
)
def test_all_of_a_stage_is_written_by_name_and_shape(dtype: torch.dtype, keys: list[str]) -> None:
    stage = make_stage(dtype)
    for number, tensor in enumerate(stage.flat_tensors(has_optimizer=True).values()):
        tensor.copy_(torch.arange(len(tensor)) % 7 + number)
    expected = {
        name: view.clone() for name, view in stage.named_tensors(stage.flat_tensors(has_optimizer=True)).items()
    }
    snapshots, disk = make({3: stage}), Disk()
    snapshots.begin(disk.write)
    outcome = snapshots.wait()
    assert outcome.error is None
    assert outcome.num_bytes == sum(tensor.nbytes for tensor in stage.flat_tensors(has_optimizer=True).values())
    assert sorted(disk.files[3]) == sorted(f"{name}{key}" for name in SHAPES for key in keys)
    for name, tensor in expected.items():
        assert torch.equal(disk.files[3][name], tensor)
        assert disk.files[3][name].shape == SHAPES[name.removesuffix(".exp_avg").split(".exp_")[0].split(".master")[0]]
    snapshots.close()


def test_only_weights_are_written_where_no_optimizer_is_wanted_and_only_saved_names() -> None:
    stage = make_stage()
    one = SavedStage(stage.memory, frozenset(["a.bias"]))
    snapshots = AsyncStageSaver(
        {0: one}, order=[0], has_optimizer=False, staging_bytes=0, device=torch.device("cpu"), num_threads=1
    )
    disk = Disk()
    snapshots.begin(disk.write)
    snapshots.wait()
    assert list(disk.files[0]) == ["a.bias"]


@pytest.mark.parametrize("staging_bytes", [0, 50_000, 10**9])
def test_what_is_written_is_one_step_however_soon_the_next_updates_come(staging_bytes: int) -> None:
    stages = {number: make_stage() for number in range(4)}
    snapshots = make(stages, staging_bytes)
    for step in range(1, 6):
        for stage in stages.values():
            set_all(stage, step)
        disk = Disk()
        snapshots.begin(disk.write)
        for number in (3, 2, 1, 0):
            snapshots.before_update(number)
            set_all(stages[number], 100)
        assert snapshots.wait().error is None
        assert disk.values() == {number: {float(step)} for number in range(4)}
    snapshots.close()


def test_with_room_for_all_no_update_waits_for_the_disk() -> None:
    stages = {number: make_stage() for number in range(3)}
    snapshots, disk = make(stages), Disk(held=True)
    assert snapshots.staging_buffers.has_buffer_per_stage
    snapshots.begin(disk.write)
    for number in stages:
        snapshots.before_update(number)  # would hang
    assert not snapshots.is_done
    disk.release.set()
    snapshots.wait()


def test_without_room_an_update_waits_until_the_one_buffer_was_written_and_the_urgent_stage_is_next() -> None:
    stages = {number: make_stage() for number in range(4)}
    one = make(stages).num_bytes // 4
    snapshots, disk = make(stages, 2 * one - 1), Disk(held=True)
    assert snapshots.staging_buffers.num_bytes == one
    snapshots.begin(disk.write)
    snapshots.before_update(3)  # it is in the buffer
    assert disk.begun.wait(PATIENCE)
    waited = threading.Thread(target=snapshots.before_update, args=(0,))
    waited.start()
    time.sleep(0.2)
    assert waited.is_alive()
    disk.release.set()
    waited.join(PATIENCE)
    assert not waited.is_alive()
    outcome = snapshots.wait()
    assert list(disk.files)[:2] == [3, 0]
    assert outcome.waited_seconds >= 0.1


def test_without_any_memory_a_stage_is_written_from_where_it_is_and_its_update_waits_for_that() -> None:
    stages = {number: make_stage() for number in range(4)}
    snapshots, disk = make(stages, 0), Disk(held=True)
    assert snapshots.staging_buffers.num_bytes == 0
    snapshots.begin(disk.write)
    assert disk.begun.wait(PATIENCE)
    waiting = [threading.Thread(target=snapshots.before_update, args=(number,)) for number in (3, 0)]
    for thread in waiting:
        thread.start()
        time.sleep(0.1)
        assert thread.is_alive()
    disk.release.set()
    for thread in waiting:
        thread.join(PATIENCE)
    snapshots.wait()
    assert list(disk.files)[:2] == [3, 0]


def test_a_stage_is_read_only_once_its_own_update_is_done() -> None:
    stage = make_stage(pending=True)
    snapshots, disk = make({0: stage}), Disk()
    snapshots.begin(disk.write)
    time.sleep(0.1)
    assert not disk.begun.is_set()
    set_all(stage, 5)
    (tell,) = stage.memory.waiting  # type: ignore[attr-defined]
    tell()
    snapshots.wait()
    assert disk.values() == {0: {5.0}}


def test_the_saved_step_s_own_update_does_not_wait_for_the_save_that_waits_for_it() -> None:
    """Its pieces run in the optimizer's thread, and the save of the step may begin before them."""
    stage = make_stage(pending=True)
    snapshots, disk = make({0: stage}), Disk()
    snapshots.begin(disk.write)
    own = threading.Thread(target=snapshots.before_update, args=(0,), daemon=True)
    own.start()
    own.join(PATIENCE)
    assert not own.is_alive(), "the update waits for its own end"
    set_all(stage, 5)
    assert isinstance(stage.memory, FakeMemory)
    for action in stage.memory.waiting or ():
        action()
    snapshots.before_update(0)
    set_all(stage, 6)
    assert snapshots.wait().error is None
    assert disk.values() == {0: {5.0}}
    snapshots.close()


def test_a_failure_frees_updates_and_buffers_and_the_next_save_works() -> None:
    stages = {number: make_stage() for number in range(3)}
    snapshots = make(stages, 0)

    def fail(stage: int, tensors: Mapping[str, Tensor]) -> None:
        raise OSError(28, "No space left on device")

    for _ in range(3):
        snapshots.begin(fail)
        for number in stages:
            snapshots.before_update(number)  # would hang
        assert isinstance(snapshots.wait().error, OSError)
    disk = Disk()
    snapshots.begin(disk.write)
    assert snapshots.wait().error is None
    assert sorted(disk.files) == [0, 1, 2]
    snapshots.before_update(0)  # nothing is saved: at once


def ended(snapshots: AsyncStageSaver) -> SaveOutcome:
    """The outcome of a save, which must not hang."""
    end = time.monotonic() + PATIENCE
    while not snapshots.is_done and time.monotonic() < end:
        time.sleep(0.01)
    assert snapshots.is_done, "the save hangs"
    return snapshots.wait()


def empty_stage() -> SavedStage:
    layout = StageLayout.of({})
    state = StageState.with_buffers(layout, zeros(0, torch.bfloat16), zeros(0, torch.bfloat16), zeros)
    return SavedStage(FakeMemory(state), frozenset())  # type: ignore[arg-type]


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("empty", [0, 2])
def test_a_rank_without_parameters_saves_nothing_and_stages_without_them_hold_up_no_other(
    full: int, empty: int
) -> None:
    """With more stages than layers some ranks only pass messages on."""
    stages = {number: make_stage() if number < full else empty_stage() for number in range(full + empty)}
    snapshots, disk = make(stages), Disk()
    snapshots.begin(disk.write)
    for number in stages:
        snapshots.before_update(number)
    assert ended(snapshots).error is None
    assert list(disk.files) == list(range(full))
    snapshots.close()


def test_the_end_of_a_save_is_told_behind_its_last_file_by_no_thread_of_training() -> None:
    stages, told = {number: make_stage() for number in range(4)}, list[tuple[int, str]]()
    snapshots, disk = make(stages), Disk()
    snapshots.begin(disk.write, on_written=lambda: told.append((len(disk.files), threading.current_thread().name)))
    assert ended(snapshots).error is None
    assert told == [(4, "saving: writes")]

    def fails() -> None:
        raise OSError(28, "No space left on device")

    snapshots.begin(disk.write, on_written=fails)
    assert isinstance(ended(snapshots).error, OSError)
    snapshots.close()


class FakeEvent(Event):
    """Reached when the test says so, as a copy of a GPU is."""

    def __init__(self, log: list[str]) -> None:
        self._log, self.reached = log, threading.Event()

    def wait(self) -> None:
        self._log.append("compute waits")

    def synchronize(self) -> None:
        assert self.reached.wait(PATIENCE)


class FakeStream(Stream):
    """A GPU's copy stream: all it copies is done when the test says so."""

    def __init__(self) -> None:
        self.log, self.events = list[str](), list[FakeEvent]()

    def record(self) -> Event:
        self.events.append(FakeEvent(self.log))
        return self.events[-1]

    def finish(self) -> None:
        for event in self.events:
            event.reached.set()


def with_gpu(
    monkeypatch: pytest.MonkeyPatch,
    stages: Mapping[int, SavedStage],
    on_gpu: Collection[int],
    staging_bytes: int = 10**9,
) -> tuple[AsyncStageSaver, FakeStream]:
    """Snapshots that take some stages for a GPU's."""
    stream = FakeStream()
    monkeypatch.setattr(stage_saver, "new_stream", lambda device: stream)
    monkeypatch.setattr(AsyncStageSaver, "_is_on_gpu", lambda self, stage: stage in on_gpu)
    for name in ("lock_pages", "unlock_pages"):
        monkeypatch.setattr(stage_saver, name, lambda buffer: None)
    return make(stages, staging_bytes), stream


def test_copies_of_stages_on_a_gpu_are_enqueued_before_any_of_the_host_s_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They take no time, and the main thread waits for them where it would go on enqueuing work."""
    stages = {number: make_stage() for number in range(4)}
    snapshots, stream = with_gpu(monkeypatch, stages, (0, 2))
    is_free, copy_host = threading.Event(), snapshots._copy_host

    def held(*tensors: Mapping[str, Tensor]) -> None:
        assert is_free.wait(PATIENCE)
        copy_host(*tensors)

    monkeypatch.setattr(snapshots, "_copy_host", held)
    disk = Disk()
    snapshots.begin(disk.write)
    for number in (2, 0):
        training = threading.Thread(target=snapshots.before_update, args=(number,), daemon=True)
        training.start()
        training.join(PATIENCE / 10)
        assert not training.is_alive(), "training waits for a copy of the host"
    assert stream.log == ["compute waits", "compute waits"]
    assert not disk.files, "a copy that is on its way is not there yet"
    is_free.set()
    stream.finish()
    assert ended(snapshots).error is None
    assert sorted(disk.files) == [0, 1, 2, 3]
    snapshots.close()


def test_a_save_that_failed_ends_when_its_copies_from_the_gpu_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then they write into memory that the next save, or somebody else, would use."""
    stages = {number: make_stage() for number in range(5)}
    snapshots, stream = with_gpu(monkeypatch, stages, stages)

    def fails(stage: int, tensors: Mapping[str, Tensor]) -> None:
        raise OSError(28, "No space left on device")

    snapshots.begin(fails)
    ends = threading.Thread(target=snapshots.wait, daemon=True)
    ends.start()
    while len(stream.events) < len(stages):
        time.sleep(0.01)
    for event in stream.events[:-1]:
        event.reached.set()
    ends.join(0.3)
    assert ends.is_alive()
    stream.finish()
    ends.join(PATIENCE)
    assert not ends.is_alive()
