"""Ranks that have no process group yet tell each other things through a store, and never read an earlier meeting's."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from mobius.errors import TransportError
from mobius.messages.meeting import Told
from mobius.messages.store_meeting import StoreMeeting


def all_ranks(store: HashStore, num_ranks: int, *, told: Sequence[Sequence[Told]]) -> list[list[list[Told]]]:
    """Every rank gathers each of its values in turn, in a thread of its own; what each of them heard."""
    heard: list[list[list[Told]]] = [[] for _ in range(num_ranks)]

    def meet(rank: int) -> None:
        meeting = StoreMeeting(store, rank=rank, num_ranks=num_ranks)
        heard[rank] = [meeting.gather(value) for value in told[rank]]

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return heard


def test_every_rank_hears_all_values_in_the_order_of_ranks() -> None:
    told: list[list[Told]] = [[["first", 0], None], [["first", 1], "\x00\u00ff"], [["first", 2], {"3": 4.5}]]

    heard = all_ranks(HashStore(), 3, told=told)

    assert heard == [[[["first", 0], ["first", 1], ["first", 2]], [None, "\x00\u00ff", {"3": 4.5}]]] * 3


def test_a_later_meeting_at_the_same_store_does_not_hear_the_earlier_one() -> None:
    store = HashStore()

    first = all_ranks(store, 2, told=[["a"], ["b"]])
    second = all_ranks(store, 2, told=[["c"], ["d"]])

    assert first == [[["a", "b"]]] * 2
    assert second == [[["c", "d"]]] * 2


def test_a_rank_that_never_answers_stops_the_others_with_its_number() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))

    with pytest.raises(TransportError, match="rank 1 did not answer"):
        StoreMeeting(store, rank=0, num_ranks=2).gather("alone")


class Bomb:
    """What leaves a file behind wherever it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._file,)


@pytest.mark.parametrize(
    "told",
    ["", "[1", "\udcff", "[" * 100_000, "NaN", "9" * 5000, "a pickle"],
    ids=["nothing", "half", "no text", "deep", "no number", "long number", "pickle"],
)
def test_what_a_stranger_writes_to_the_store_is_one_error_and_is_never_run(told: str, tmp_path: Path) -> None:
    store, file = HashStore(), tmp_path / "was run"
    meeting = StoreMeeting(store, rank=0, num_ranks=2)
    text = pickle.dumps(Bomb(file)).hex() if told == "a pickle" else told
    store.set("mobius/1/0/1", text.encode("utf-8", "surrogateescape"))

    with pytest.raises(TransportError, match=r"what rank 1 told the others cannot be read \(.*same version of Mobius"):
        meeting.gather("the first")
    assert not file.exists()
