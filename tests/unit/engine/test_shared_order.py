"""Where replicas share stages, reductions and gathers run beside compute, and nothing is read or reused too early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from harness.logged_streams import StreamLog
from harness.rank_memory import allocate_memory
from torch import Tensor

from mobius.distributed.shards import Segment
from mobius.engine.stage_memory import StageMemory
from mobius.engine.stage_state import StageState
from mobius.models.layout import FlatRange, StageLayout

STAGES = (0, 2, 4)


class LoggedReplicas:
    """The first of two replicas; the other one has the same sums, and 7 for each updated weight."""

    index, num_replicas = 0, 2

    def __init__(self, log: StreamLog) -> None:
        self._log = log
        self.calls: list[str] = []

    def reduce_scatter(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._called("reduce_scatter")
        for own, others in segments:
            values[own] *= 2
            values[others] = torch.nan

    def sum_over_replicas(self, own: Tensor) -> Tensor:
        return 2 * own

    def all_gather(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._called("all_gather")
        self._give(values, segments)

    def all_gather_for_load(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self._called("all_gather_for_load")
        self._give(values, segments)

    def all_gather_on_host(self, values: Tensor, segments: Sequence[Segment]) -> None:
        self.calls.append("on host")
        self._give(values, segments)

    def _give(self, values: Tensor, segments: Sequence[Segment]) -> None:
        for _, others in segments:
            values[others] = 7

    def _called(self, what: str) -> None:
        self.calls.append(what)
        self._log.mark(f"{what} {self.calls.count(what)}")


class HeldUpdates:
    """Updates that end when the test says so."""

    has_thread = True

    def __init__(self) -> None:
        self.followers: dict[int, list[Callable[[], None]]] = {}

    def submit(self, stage: int, pieces: Sequence[Callable[[], None]], **_: object) -> None:
        for piece in pieces:
            piece()
        self.followers[stage] = []

    def run_after_update(self, stage: int, action: Callable[[], None]) -> None:
        self.followers[stage].append(action) if stage in self.followers else action()

    def is_under_way(self, stage: int) -> bool:
        return stage in self.followers

    def wait(self, stage: int) -> None:
        for follower in self.followers.pop(stage, []):
            follower()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StreamLog:
    return StreamLog(monkeypatch)


@pytest.fixture
def replicas(log: StreamLog) -> LoggedReplicas:
    return LoggedReplicas(log)


def take(
    layouts: dict[int, StageLayout], replicas: LoggedReplicas, updates: HeldUpdates | None = None, **more: Any
) -> dict[int, StageMemory]:
    """Stages whose weights are their numbers plus 1."""
    given: Any = {"gradient_dtype": torch.bfloat16, "resident": (), "num_slots": 2, "updates": updates} | more
    memory, _ = allocate_memory(
        layouts, dtype=torch.bfloat16, deferred_updates=layouts, device=torch.device("cpu"), replicas=replicas, **given
    )
    for stage, own in memory.items():
        for name, (_, shape) in layouts[stage].offsets.items():
            own.state.set_parameter(name, torch.full(shape, float(stage + 1)))
    return memory


def backward(log: StreamLog, memory: StageMemory, name: str) -> Tensor:
    """A backward whose gradients are 3 throughout, sealed."""
    memory.weights.views()
    for gradient in memory.sums.views().values():
        gradient.fill_(3)
    log.mark(name)
    return memory.finish_gradients()


@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float32])
def test_a_streamed_stages_sums_are_reduced_while_the_next_stage_computes(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout], gradient_dtype: torch.dtype
) -> None:
    memory = take(layouts, replicas, gradient_dtype=gradient_dtype, num_slots=3)
    for number, stage in enumerate((4, 2, 0), start=1):
        memory[stage].weights.load()
        backward(log, memory[stage], f"backward {number}")
        memory[stage].offload()
    assert all(log.precedes(f"backward {number}", f"reduce_scatter {number}") for number in (1, 2, 3))
    assert not log.precedes("reduce_scatter 1", "backward 2"), "compute goes on"
    assert log.precedes("reduce_scatter 1", "backward 3"), "whose sums lie where the first ones were"
    assert not log.precedes("reduce_scatter 2", "backward 3")
    for number, stage in enumerate((4, 2, 0), start=1):
        memory[stage].states.wait_for_gradients()
        log.mark(f"arrived {number}", on="host")
        assert log.precedes(f"reduce_scatter {number}", f"arrived {number}")
        assert bool((memory[stage].state.own_gradient("matrix") == 6).all()), "the sum of both"


def test_resident_stages_sums_are_reduced_while_the_next_stage_computes(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout]
) -> None:
    memory = take(layouts, replicas, resident=STAGES)
    for number, stage in enumerate((4, 2, 0), start=1):
        backward(log, memory[stage], f"backward {number}")
    assert not log.precedes("reduce_scatter 1", "backward 2")
    assert log.precedes("reduce_scatter 1", "backward 3"), "whose sums lie where the first ones were"
    assert not log.precedes("reduce_scatter 2", "backward 3")


def test_compute_waits_for_a_reduction_where_it_wants_the_norm(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout]
) -> None:
    for resident in ((), STAGES):
        memory = take(layouts, replicas, resident=resident)
        if not resident:
            memory[4].weights.load()
        backward(log, memory[4], "backward")
        number = replicas.calls.count("reduce_scatter")
        log.mark("before")
        reduction = memory[4].sums.reduction
        assert reduction is not None
        reduction.wait()
        log.mark("norm")
        assert log.precedes(f"reduce_scatter {number}", "norm")
        assert not log.precedes(f"reduce_scatter {number}", "before")


def test_a_slot_is_filled_again_behind_the_departure_of_its_gradients(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout]
) -> None:
    memory = take(layouts, replicas, num_slots=1)
    memory[4].weights.load()
    backward(log, memory[4], "backward")
    memory[4].offload()
    memory[2].weights.load()
    memory[2].weights.views()
    log.mark("the next stage")
    assert log.precedes("reduce_scatter 1", "the next stage")


def test_compute_begins_behind_the_load_of_its_own_stage_not_behind_all_that_are_prefetched(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, copy, copies = take(layouts, replicas, num_slots=2), Tensor.copy_, list[str]()

    def marked(self: Tensor, source: Tensor, **named: Any) -> Tensor:
        copies.append(f"copy {len(copies)}")
        log.mark(copies[-1])
        return copy(self, source, **named)

    monkeypatch.setattr(Tensor, "copy_", marked)
    memory[4].weights.load()
    own = len(copies)
    memory[2].weights.load()
    memory[4].weights.views()
    log.mark("compute")
    assert 0 < own < len(copies)
    assert [log.precedes(name, "compute") for name in copies] == [True] * own + [False] * (len(copies) - own)


def updated(memory: StageMemory) -> None:
    """Submit an update that makes the own share of the weights 5, as far as it is called with pieces."""

    def update(state: StageState, *, pieces: Sequence[FlatRange], found_inf: Tensor | None = None) -> None:
        for own in memory.state.owned:
            own.state.weights.fill_(5)

    memory.states.update(update)


def mark_copies_home(log: StreamLog, memory: StageMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark each copy to the host's weights."""
    copy, host = Tensor.copy_, memory.state.weights.untyped_storage().data_ptr()

    def marked(self: Tensor, source: Tensor, **named: Any) -> Tensor:
        if self.untyped_storage().data_ptr() == host:
            log.mark("home")
        return copy(self, source, **named)

    monkeypatch.setattr(Tensor, "copy_", marked)


def test_the_first_load_behind_an_update_gathers_and_later_ones_find_all_at_home(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = take(layouts, replicas)
    own = memory[0]
    own.weights.load()
    backward(log, own, "backward")
    own.offload()
    updated(own)
    assert bool((own.state.weights[:384] == 1).any()), "the others' updates are not here yet"
    mark_copies_home(log, own, monkeypatch)
    own.weights.load()
    views = own.weights.views()
    log.mark("forward")
    assert log.precedes("all_gather_for_load 1", "forward")
    flat = own.state.weights
    places = own.state.shards
    assert places is not None
    assert all(bool((flat[part] == 5).all()) for part in places.own)
    assert all(bool((flat[part] == 7).all()) for part in places.others), "they went home"
    assert torch.equal(views["matrix"], own.state.layout.views(flat)["matrix"])
    own.offload()
    own.weights.load()  # into the other slot
    own.weights.views()
    log.mark("backward")
    assert log.precedes("home", "backward")
    assert not log.precedes("home", "forward")
    own.weights.gather_updated()
    log.mark("may be read", on="host")
    assert log.precedes("home", "may be read")
    assert replicas.calls == ["reduce_scatter", "all_gather_for_load"], "one gather for an update"


def test_frozen_weights_come_with_what_is_gathered(log: StreamLog, replicas: LoggedReplicas) -> None:
    layout = StageLayout.of({"matrix": (16, 16), "frozen": (8, 8)}, frozen={"frozen"})
    memory = take({0: layout}, replicas)[0]
    memory.weights.load()
    backward(log, memory, "backward")
    memory.offload()
    updated(memory)
    memory.weights.load()
    assert bool((memory.weights.views()["frozen"] == 1).all())
    assert replicas.calls[-1] == "all_gather_for_load"


def test_gradients_lie_over_gathered_weights_only_when_those_have_gone_home(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slot a stage may go from its first load to the end of its backward without leaving."""
    memory = take({4: layouts[4]}, replicas, num_slots=1)[4]
    memory.weights.load()
    backward(log, memory, "backward")
    memory.offload()
    updated(memory)
    mark_copies_home(log, memory, monkeypatch)
    memory.weights.load()
    reduce_scatter = replicas.reduce_scatter
    backward_begins = partial(backward, log, memory, "backward again")
    monkeypatch.setattr(
        replicas, "reduce_scatter", lambda *given: (reduce_scatter(*given), log.mark("cast comes next"))
    )
    backward_begins()
    assert log.precedes("all_gather_for_load 1", "home")
    assert log.precedes("home", "cast comes next")
    assert not log.precedes("home", "backward again"), "compute does not wait for it"


def test_gathers_run_in_the_order_of_loads_whichever_update_ends_first(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout], monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = HeldUpdates()
    memory = take(layouts, replicas, updates, num_slots=3)
    for stage in (4, 2, 0):
        memory[stage].weights.load()
        backward(log, memory[stage], "backward")
        memory[stage].offload()
        updated(memory[stage])
    lengths: list[int] = []
    monkeypatch.setattr(replicas, "all_gather_for_load", lambda values, segments: lengths.append(segments[-1][-1].stop))
    for stage in (0, 2, 4):
        memory[stage].weights.load()
    for stage in (2, 4):  # their updates end, and nobody can gather
        for follower in updates.followers.pop(stage):
            follower()
    assert lengths == []
    assert not memory[2].weights.is_ready()
    memory[0].weights.views()
    assert lengths == [layouts[stage].num_trained for stage in STAGES]
    memory[2].weights.views()
    assert memory[2].weights.is_ready()


def test_what_reads_the_host_gets_weights_that_no_load_has_brought(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout]
) -> None:
    memory = take(layouts, replicas)[2]
    memory.weights.load()
    backward(log, memory, "backward")
    memory.offload()
    updated(memory)
    for _ in range(2):  # once is enough
        memory.weights.gather_updated()
    shards = memory.state.shards
    assert shards is not None
    assert all(bool((memory.state.weights[part] == 7).all()) for part in shards.others)
    memory.weights.load()
    memory.weights.views()
    assert replicas.calls == ["reduce_scatter", "on host"], "and the next load is as ever"


@pytest.mark.parametrize("begins_in_the_step", [False, True])
def test_a_resident_stage_is_updated_and_spread_beside_compute(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout], begins_in_the_step: bool
) -> None:
    memory = take(layouts, replicas, resident=STAGES)[4]
    backward(log, memory, "backward")
    log.mark("tied matrices are summed")

    def update(state: StageState, *, pieces: Sequence[FlatRange], found_inf: Tensor | None = None) -> None:
        assert (found_inf is None) == (not begins_in_the_step)
        assert found_inf is None or float(found_inf) == 0
        log.mark("update")

    if begins_in_the_step:
        assert memory.states.begin_update(update)
    else:
        memory.states.update(update)
    log.mark("the next stage")
    assert log.precedes("reduce_scatter 1", "update")
    assert log.precedes("tied matrices are summed", "update")
    assert log.precedes("update", "all_gather 1")
    assert not log.precedes("update", "the next stage")
    assert not memory.weights.is_ready()
    memory.weights.views()
    assert memory.weights.is_ready()
    log.mark("the next forward")
    assert log.precedes("all_gather 1", "the next forward")


def test_a_resident_stage_is_saved_behind_its_spread(
    log: StreamLog, replicas: LoggedReplicas, layouts: dict[int, StageLayout]
) -> None:
    memory = take(layouts, replicas, resident=STAGES)[4]
    backward(log, memory, "backward")
    memory.states.update(lambda state, *, pieces, found_inf=None: None)
    memory.states.run_after_update(lambda: log.mark("a copy may begin"))
    assert log.precedes("all_gather 1", "a copy may begin")
