"""What is stashed comes back as it left, and its memory on the device is given back meanwhile."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import pytest
import torch

from mobius.memory.activation_home import ActivationHome
from mobius.runtime.stash import Stash, home_bytes

CPU = torch.device("cpu")
SHAPE = (1, 2, 4)


class Waits:
    """Counts how often compute was told to wait."""

    number = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.number += 1
        yield


def make_stash(waits: Waits | None = None, *, round_size: int = 4) -> Stash:
    place_bytes = dict.fromkeys((0, 1), [2 * home_bytes((SHAPE, torch.float32))] * round_size)
    home = ActivationHome(place_bytes, register=False)
    return Stash(home, device=CPU, waiting=waits or Waits())


def test_inputs_come_back_as_they_left_though_their_memory_has_changed() -> None:
    stash, given = make_stash(), {}
    for stage in (0, 1):
        for microbatch in range(4):
            inputs = [torch.randn(SHAPE) for _ in range(2)]
            given[stage, microbatch] = [each.clone() for each in inputs]
            stash.put(stage, microbatch, [*inputs])
            stash.send(stage, microbatch)
            for each in inputs:
                each.zero_()

    for stage in (1, 0):
        for microbatch in range(4):
            stash.fetch(stage, microbatch)
            back = stash.take(stage, microbatch)
            for own, wanted in zip(back, given[stage, microbatch], strict=True):
                assert torch.equal(own, wanted)  # type: ignore[arg-type]
    assert len(stash) == 0


def test_no_more_than_two_that_have_left_keep_their_memory() -> None:
    waits = Waits()
    stash, alive = make_stash(waits), []
    for microbatch in range(4):
        inputs = [torch.randn(SHAPE) for _ in range(2)]
        alive.append(weakref.ref(inputs[0]))
        stash.put(0, microbatch, [*inputs])
        del inputs
        stash.send(0, microbatch)

    assert [each() is not None for each in alive] == [False, False, True, True]
    assert waits.number == 2, "compute waits before memory is given back"
    stash.fetch(0, 0)
    assert [each() is not None for each in alive] == [False] * 4
    assert waits.number == 4


def test_what_was_not_sent_stays_and_compute_waits_for_nothing() -> None:
    waits = Waits()
    stash, inputs = make_stash(waits), torch.randn(SHAPE)
    stash.put(0, 0, [inputs])

    assert stash.take(0, 0)[0] is inputs
    assert waits.number == 0


def test_without_room_on_the_host_nothing_is_sent() -> None:
    stash = Stash(None, device=CPU, waiting=Waits())
    stash.put(0, 0, [torch.zeros(SHAPE)])

    with pytest.raises(AssertionError, match="no room on the host for what stage 0 keeps"):
        stash.send(0, 0)


def test_clearing_forgets_everything() -> None:
    stash = make_stash()
    stash.put(0, 0, [torch.zeros(SHAPE), torch.zeros(SHAPE)])
    stash.send(0, 0)
    stash.put(1, 0, [torch.zeros(SHAPE)])

    stash.clear()

    assert len(stash) == 0


def test_tensors_of_several_shapes_and_formats_come_back_as_they_left() -> None:
    parts = ((1, 3, 5), torch.bfloat16), ((1, 3, 2, 7), torch.bfloat16), ((1, 2, 3), torch.float32)
    home = ActivationHome({0: [2 * home_bytes(*parts)] * 2}, register=False)
    stash = Stash(home, device=CPU, waiting=Waits())
    given = {m: [torch.randn(shape).to(dtype) for _ in range(2) for shape, dtype in parts] for m in range(2)}
    for microbatch, tensors in given.items():
        stash.put(0, microbatch, [*tensors])
        stash.send(0, microbatch)

    for microbatch, tensors in given.items():
        stash.fetch(0, microbatch)
        for own, wanted in zip(stash.take(0, microbatch), tensors, strict=True):
            assert torch.equal(own, wanted)  # type: ignore[arg-type]
