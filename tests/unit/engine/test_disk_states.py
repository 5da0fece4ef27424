"""States on disks: where no update waits for other stages, gradients need memory for three stages only."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.rank_memory import allocate_memory

from mobius.checkpoint.saved_stage import SavedStage
from mobius.checkpoint.stage_saver import AsyncStageSaver
from mobius.engine import host_arena, state_files
from mobius.engine.host_arena import HostArena
from mobius.engine.slot_files import DiskFolders
from mobius.engine.stage_memory import StageMemory
from mobius.engine.stage_state import StageState
from mobius.engine.update_queue import UpdateQueue
from mobius.errors import StateFileError
from mobius.models.layout import FlatRange, StageLayout
from mobius.schedule.memory_layout import DiskRules

NUM_STAGES, COUNT = 8, 4096
STATES = 10 * COUNT
"""Bytes of a stage's moments and the rest of its master."""


def make(
    folder: Path, deferred: Sequence[int], num_slots: int = 2, updates: UpdateQueue | None = None, **disks: Any
) -> tuple[Mapping[int, StageMemory], HostArena]:
    memory, arena = allocate_memory(
        {stage: StageLayout.of({"matrix": (COUNT // 64, 64)}) for stage in range(NUM_STAGES)},
        resident=(),
        num_slots=num_slots,
        dtype=torch.bfloat16,
        gradient_dtype=torch.bfloat16,
        deferred_updates=deferred,
        device=torch.device("cpu"),
        updates=updates or UpdateQueue(),
        disks=DiskFolders([folder]),
        rules={"disks": DiskRules(**disks)},
    )
    assert arena is not None
    return memory, arena


def step(memory: Mapping[int, StageMemory], value: float, ready: Callable[[int], object]) -> None:
    """Gradients of `value` plus the stage's number."""
    for stage in reversed(range(NUM_STAGES)):
        memory[stage].weights.load()
        memory[stage].weights.wait_until_updated()
        memory[stage].sums.views()["matrix"].add_(value + stage)
        memory[stage].finish_gradients()
        memory[stage].offload(ready)


def add_gradients(state: StageState, *, pieces: Sequence[FlatRange], found_inf: Any = None) -> None:
    state.exp_avg.add_(state.gradients.float())


@pytest.mark.parametrize("num_buffers", [3, 2, 1])
@pytest.mark.parametrize("deferred", [(), (0, 7), tuple(range(NUM_STAGES))])
def test_gradients_arrive_in_the_buffers_of_the_stages_that_are_updated(
    tmp_path: Path, deferred: tuple[int], num_buffers: int
) -> None:
    memory, arena = make(tmp_path, deferred, num_buffers=num_buffers)
    gradients = 2 * COUNT
    arriving = 0 if len(deferred) == NUM_STAGES else gradients
    assert arena.num_bytes == NUM_STAGES * 2 * COUNT + len(deferred) * gradients + num_buffers * (STATES + arriving)
    for value in (100.0, 200.0):
        step(memory, value, lambda stage: stage in deferred or memory[stage].states.begin_update(add_gradients))
        for stage in deferred:
            memory[stage].states.update(add_gradients)
    for stage, own in memory.items():
        own.weights.wait_until_updated()
        expected = sum(float(torch.tensor(value + stage).bfloat16()) for value in (100.0, 200.0))
        assert own.in_memory(own.state.exp_avg).unique().tolist() == [expected], stage
    arena.close()


def test_gradients_that_wait_for_all_stages_may_do_so_on_the_disks(tmp_path: Path) -> None:
    memory, arena = make(tmp_path, range(NUM_STAGES), has_gradients=True)
    assert arena.num_bytes == NUM_STAGES * 2 * COUNT + 3 * (STATES + 2 * COUNT)
    for value, is_skipped in ((1.0, False), (50.0, True), (100.0, False)):
        step(memory, value, lambda _: None)
        for own in memory.values():
            own.states.wait_for_gradients()
            if not is_skipped:
                own.states.update(add_gradients)
    for stage, own in memory.items():
        own.weights.wait_until_updated()
        assert own.in_memory(own.state.exp_avg).unique().tolist() == [101.0 + 2 * stage], stage
    arena.close()


@pytest.mark.parametrize("deferred", [(), range(NUM_STAGES)])
def test_a_rehearsal_leaves_the_states_and_all_buffers(tmp_path: Path, deferred: Sequence[int]) -> None:
    queue = UpdateQueue()
    memory, arena = make(tmp_path, deferred, updates=queue, has_gradients=True)
    for _ in range(3):
        step(memory, 1.0, lambda stage: memory[stage].states.discard_gradients())
        assert not any(map(queue.is_under_way, memory)), "stages of another plan would meet its writes"
    assert not any(own.in_memory(own.state.exp_avg).any() for own in memory.values())
    arena.close()


def test_states_of_a_start_are_made_in_the_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, arena = make(tmp_path, ())
    with monkeypatch.context() as patched:
        patched.setattr(host_arena, "map_zeros", None)
        for stage, own in memory.items():
            state = own.states.state_to_fill()
            assert not state.exp_avg.any(), "a buffer has what another stage left"
            state.exp_avg.fill_(stage + 1)
            own.states.store(state)
    assert [own.in_memory(own.state.exp_avg).unique().tolist() for own in memory.values()] == [
        [stage + 1.0] for stage in memory
    ]
    arena.close()


@pytest.mark.parametrize("num_buffers", [0, 1, NUM_STAGES])
def test_a_save_reads_what_is_on_disks_in_parts_and_holds_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_buffers: int
) -> None:
    monkeypatch.setattr(state_files, "CHUNK_BYTES", state_files.ALIGNMENT)
    memory, arena = make(tmp_path, (), has_weights=True)
    generator, expected = torch.Generator().manual_seed(0), dict[int, dict[str, torch.Tensor]]()
    for stage, own in memory.items():
        state = own.states.state_to_fill()
        for part in (state.weights, *state.parts.values()):
            part.copy_(torch.randint(0, 30000, (COUNT,), generator=generator))
        expected[stage] = {"": state.weights.clone()} | {f".{k}": each.clone() for k, each in state.parts.items()}
        own.states.store(state)
    stages = {stage: SavedStage(own, ["matrix"]) for stage, own in memory.items()}
    size, found, taken = STATES + 2 * COUNT, dict[int, dict[str, torch.Tensor]](), list[int]()
    saver = AsyncStageSaver(
        stages,
        order=[*stages],
        has_optimizer=True,
        staging_bytes=num_buffers * size,
        device=torch.device("cpu"),
        num_threads=1,
    )
    assert saver.staging_buffers.num_bytes == num_buffers * size
    map_pages = state_files.map_zeros
    monkeypatch.setattr(state_files, "map_zeros", lambda size, kind: taken.append(size) or map_pages(size, kind))

    def write(stage: int, tensors: Mapping[str, torch.Tensor]) -> None:
        assert all(tensor.is_meta for tensor in tensors.values()) == (num_buffers == 0)
        parts = memory[stage].parts
        found[stage] = {name: torch.cat([part.clone() for part in parts(each)]) for name, each in tensors.items()}

    saver.begin(write)
    assert saver.wait().error is None
    assert {*taken} == {state_files.ALIGNMENT}
    matrix = (COUNT // 64, 64)
    for stage, tensors in expected.items():
        turned = memory[stage].in_memory(memory[stage].state.weights.view(matrix).t()[3:9])  # as experts may be stored
        assert torch.equal(turned, tensors[""].view(matrix).t()[3:9]), stage
        for part, tensor in tensors.items():
            assert torch.equal(found[stage][f"matrix{part}"], tensor), (stage, part)
    saver.close()
    arena.close()


def add_one(state: StageState, *, pieces: Sequence[FlatRange], found_inf: Any = None) -> None:
    for part in pieces:
        state.weights[part.start : part.end].add_(1)
        state.exp_avg[part.start : part.end].add_(2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("deferred", [(), range(NUM_STAGES)])
@pytest.mark.parametrize("num_buffers", [1, 2])
def test_loads_bring_the_weights_of_the_last_update_with_the_fewest_buffers(
    tmp_path: Path, deferred: Sequence[int], num_buffers: int
) -> None:
    """More slots than buffers: loads are asked for while all buffers are taken."""
    disks: dict[str, Any] = {"num_buffers": num_buffers, "has_weights": True, "has_gradients": True}
    memory, arena = make(tmp_path, deferred, num_slots=4, **disks)
    assert arena.num_bytes == num_buffers * ((STATES + 2 * COUNT + 2 * COUNT) + 2 * COUNT)
    for stage, own in memory.items():
        state = own.states.state_to_fill()
        state.weights.fill_(10 * stage)
        own.states.store(state)
    for number in range(3):
        for first in range(0, NUM_STAGES, 4):
            stages = range(first, first + 4)
            for stage in stages:
                memory[stage].weights.load()
            for stage in stages:
                own = memory[stage]
                assert own.weights.views()["matrix"].unique().tolist() == [10 * stage + number], stage
                own.sums.views()["matrix"].add_(1)
                own.finish_gradients()
                own.offload(lambda stage: stage in deferred or memory[stage].states.begin_update(add_one))
        for stage in deferred:
            memory[stage].states.update(add_one)
    for stage, own in memory.items():
        own.weights.wait_until_updated()
        found = [own.in_memory(part).unique().tolist() for part in (own.state.weights, own.state.exp_avg)]
        assert found == [[10 * stage + 3], [6.0]], stage
    arena.close()


@pytest.mark.timeout(60)
def test_a_load_that_cannot_be_read_names_the_drive_and_later_loads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, arena = make(tmp_path / "drive", (), has_weights=True)

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing)
        memory[0].weights.load()
        with pytest.raises(StateFileError, match=rf"{tmp_path}/drive .* cannot be read: Input/output error"):
            memory[0].weights.views()
    for stage in (1, 2, 3):
        memory[stage].weights.load()
        memory[stage].weights.views()
        memory[stage].weights.release()
    arena.close()


def test_a_slot_is_given_back_only_after_a_load_that_nobody_used(tmp_path: Path) -> None:
    """Or the late copy would overwrite the next stage's weights."""
    memory, arena = make(tmp_path, (), num_slots=1, has_weights=True)
    for stage, own in memory.items():
        state = own.states.state_to_fill()
        state.weights.fill_(stage)
        own.states.store(state)
    for stage in (*range(NUM_STAGES - 1), 2):
        memory[stage].weights.load()
        memory[stage].weights.release()
    memory[NUM_STAGES - 1].weights.load()
    assert memory[NUM_STAGES - 1].weights.views()["matrix"].unique().tolist() == [NUM_STAGES - 1]
    arena.close()


@pytest.mark.timeout(60)
def test_a_disk_that_cannot_be_read_ends_the_run_and_no_stage_waits_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, arena = make(tmp_path, ())

    def failing(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    step(memory, 1.0, lambda stage: memory[stage].states.begin_update(add_gradients))
    with pytest.raises(StateFileError, match="cannot be read"):
        memory[NUM_STAGES - 1].weights.wait_until_updated()
    arena.close()
