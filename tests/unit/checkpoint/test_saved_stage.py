"""A stage that replicas share is saved as one that a single pipeline has, also where its states have two formats."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from harness.local_transport import LocalTransport, run_replica_threads
from torch import Tensor

from mobius.checkpoint.restore import restore
from mobius.checkpoint.saved_stage import SavedStage
from mobius.distributed.shards import Shards
from mobius.engine.adamw import AdamWSettings, FlatAdamW
from mobius.engine.stage_state import StageState, num_owned
from mobius.models.layout import StageLayout

SHAPES = {"embedding": (50, 32), "matrix": (33, 7), "norm": (37,), "frozen": (9, 9), "other": (200, 64)}
SETTINGS = AdamWSettings(0.9, 0.999, 1e-8, 0.1, seed=3)


def made(reduced: str, replica: int = 0, num_replicas: int = 1, *, num_updates: int = 3) -> StageState:
    """A stage after some updates with the same gradients."""
    smaller = {"matrix", "other"} if reduced else set()
    layout = StageLayout.of(SHAPES, frozen={"frozen"}, reduced=smaller, reduced_format=reduced)
    shards = None if num_replicas == 1 else Shards.of(layout, replica, num_replicas, tied={"embedding"})

    def zeros(length: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(length, dtype=dtype)

    gradients = zeros(num_owned(layout, shards), torch.bfloat16)
    state = StageState.with_buffers(layout, zeros(layout.num_units, torch.bfloat16), gradients, zeros, shards)
    generator, whole = torch.Generator().manual_seed(0), zeros(layout.num_trained, torch.bfloat16)
    for name, shape in SHAPES.items():
        state.set_parameter(name, torch.randn(shape, generator=generator))
        if layout.is_trained(name):
            layout.trained_views(whole)[name].copy_(torch.randn(shape, generator=generator))
    gradients.copy_(whole) if shards is None else shards.copy_owned(whole, gradients)
    for step in range(1, num_updates + 1):
        FlatAdamW(SETTINGS).update(state, step=step, learning_rate=1e-2, gradient_factor=1.0)
    return state


def saved(state: StageState, transport: LocalTransport | None = None) -> dict[str, Tensor]:
    replicas = None if transport is None else transport.replicas
    memory = SimpleNamespace(state=state, in_memory=lambda tensor: tensor)
    stage = SavedStage(memory, SHAPES, replicas=replicas)  # type: ignore[arg-type]
    return stage.named_tensors(stage.gather_from_replicas(stage.flat_tensors(has_optimizer=True)))


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("reduced", ["", "bf16", "compact"])
def test_replicas_save_what_one_pipeline_does(reduced: str, num_replicas: int) -> None:
    expected = saved(made(reduced))
    assert len({name for name in expected if name.startswith("matrix.")}) == (5 if reduced == "compact" else 3)

    def work(rank: int, transport: LocalTransport) -> dict[str, Tensor]:
        return saved(made(reduced, rank, num_replicas), transport)

    first, *others = run_replica_threads(num_replicas, 1, work)
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], value) for name, value in expected.items())
    assert others == [{}] * (num_replicas - 1)


class Reader:
    """A checkpoint that holds these tensors."""

    dtype = torch.bfloat16

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def dtype_of(self, name: str) -> torch.dtype | None:
        return self._tensors[name].dtype if name in self._tensors else None

    def read(self, name: str, out: Tensor) -> Tensor:
        saved = self._tensors[name]
        assert (saved.shape, saved.dtype) == (out.shape, out.dtype)
        return out.copy_(saved)


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("before", ["", "bf16", "compact"])
@pytest.mark.parametrize("after", ["", "bf16", "compact"])
def test_a_stage_is_restored_from_any_format(before: str, after: str, num_replicas: int) -> None:
    source = made(before)
    reader, parts = Reader(saved(source)), SimpleNamespace(stored_names={}, parameter_pieces={})
    parts.adapters = SimpleNamespace(has_frozen_base=False)
    master = torch.cat([own.state.read_master() for own in source.owned])
    for replica in range(num_replicas):
        state, same = (made(after, replica, num_replicas, num_updates=number) for number in (0, 3))
        states = SimpleNamespace(state_to_fill=lambda state=state: state, store=lambda _: None)
        memory = {0: SimpleNamespace(state=state, states=states)}
        restore(SimpleNamespace(memory=memory), parts, reader)  # type: ignore[arg-type]
        if before == after:
            assert torch.equal(state.weights, source.weights)
            assert all(map(torch.equal, state.tensors[2:], same.tensors[2:]))
        for own in state.owned:
            expected = {name: master[source.layout.slice_of(name)] for name in source.layout.trained_names}
            for each in state.layout.named_ranges(own.place):
                found = own.state.read_master(
                    slice(each.place.start - own.place.start, each.place.stop - own.place.start)
                )
                wanted = expected[each.name][each.offset : each.offset + len(found)]
                bits = 2**-16 if "compact" in (before, after) else 2**-23
                assert torch.allclose(found, wanted, rtol=bits, atol=0), each.name


@pytest.mark.parametrize("reduced", ["", "bf16", "compact"])
def test_parts_fit_one_buffer_whatever_their_sizes(reduced: str) -> None:
    for replica in range(3):
        state = made(reduced, replica, 3)
        moved = state.with_parts(torch.zeros(state.part_bytes, dtype=torch.uint8))
        for tensor, source in zip(moved.tensors[2:], state.tensors[2:], strict=True):
            assert tensor.data_ptr() % tensor.element_size() == 0
            tensor.copy_(source)
        assert all(map(torch.equal, moved.tensors, state.tensors))
