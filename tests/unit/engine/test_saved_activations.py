"""What is offloaded comes back as it left, and its memory on the device is given back meanwhile."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import pytest
import torch

from mobius.engine.host_arena import PinnedActivationBuffer
from mobius.engine.saved_activations import SavedActivations, pinned_buffer_bytes

CPU = torch.device("cpu")
SHAPE = (1, 2, 4)


class Waits:
    """Counts how often compute was told to wait."""

    number = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.number += 1
        yield


def make_saved(waits: Waits | None = None, *, microbatches_per_round: int = 4) -> SavedActivations:
    region_bytes = dict.fromkeys((0, 1), [2 * pinned_buffer_bytes((SHAPE, torch.float32))] * microbatches_per_round)
    activation_buffer = PinnedActivationBuffer(region_bytes, register=False)
    return SavedActivations(activation_buffer, device=CPU, waiting=waits or Waits())


def test_inputs_come_back_as_they_left_though_their_memory_has_changed() -> None:
    saved_activations, given = make_saved(), {}
    for stage in (0, 1):
        for microbatch in range(4):
            inputs = [torch.randn(SHAPE) for _ in range(2)]
            given[stage, microbatch] = [each.clone() for each in inputs]
            saved_activations.put(stage, microbatch, [*inputs])
            saved_activations.offload(stage, microbatch)
            for each in inputs:
                each.zero_()

    for stage in (1, 0):
        for microbatch in range(4):
            saved_activations.prefetch(stage, microbatch)
            back = saved_activations.take(stage, microbatch)
            for own, wanted in zip(back, given[stage, microbatch], strict=True):
                assert torch.equal(own, wanted)  # type: ignore[arg-type]
    assert len(saved_activations) == 0


def test_no_more_than_two_that_have_left_keep_their_memory() -> None:
    waits = Waits()
    saved_activations, alive = make_saved(waits), []
    for microbatch in range(4):
        inputs = [torch.randn(SHAPE) for _ in range(2)]
        alive.append(weakref.ref(inputs[0]))
        saved_activations.put(0, microbatch, [*inputs])
        del inputs
        saved_activations.offload(0, microbatch)

    assert [each() is not None for each in alive] == [False, False, True, True]
    assert waits.number == 2, "compute waits before memory is given back"
    saved_activations.prefetch(0, 0)
    assert [each() is not None for each in alive] == [False] * 4
    assert waits.number == 4


def test_what_was_not_sent_stays_and_compute_waits_for_nothing() -> None:
    waits = Waits()
    saved_activations, inputs = make_saved(waits), torch.randn(SHAPE)
    saved_activations.put(0, 0, [inputs])

    assert saved_activations.take(0, 0)[0] is inputs
    assert waits.number == 0


def test_without_room_on_the_host_nothing_is_sent() -> None:
    saved_activations = SavedActivations(None, device=CPU, waiting=Waits())
    saved_activations.put(0, 0, [torch.zeros(SHAPE)])

    with pytest.raises(AssertionError, match="stage 0 has no pinned buffer for its activations"):
        saved_activations.offload(0, 0)


def test_clearing_forgets_everything() -> None:
    saved_activations = make_saved()
    saved_activations.put(0, 0, [torch.zeros(SHAPE), torch.zeros(SHAPE)])
    saved_activations.offload(0, 0)
    saved_activations.put(1, 0, [torch.zeros(SHAPE)])

    saved_activations.clear()

    assert len(saved_activations) == 0


def test_tensors_of_several_shapes_and_formats_come_back_as_they_left() -> None:
    parts = ((1, 3, 5), torch.bfloat16), ((1, 3, 2, 7), torch.bfloat16), ((1, 2, 3), torch.float32)
    activation_buffer = PinnedActivationBuffer({0: [2 * pinned_buffer_bytes(*parts)] * 2}, register=False)
    saved_activations = SavedActivations(activation_buffer, device=CPU, waiting=Waits())
    given = {m: [torch.randn(shape).to(dtype) for _ in range(2) for shape, dtype in parts] for m in range(2)}
    for microbatch, tensors in given.items():
        saved_activations.put(0, microbatch, [*tensors])
        saved_activations.offload(0, microbatch)

    for microbatch, tensors in given.items():
        saved_activations.prefetch(0, microbatch)
        for own, wanted in zip(saved_activations.take(0, microbatch), tensors, strict=True):
            assert torch.equal(own, wanted)  # type: ignore[arg-type]
