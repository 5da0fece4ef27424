"""Steps that ranks take together: each sees what all gave, and one that fails ends it for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from harness.forked import HANG_SECONDS

from mobius.errors import TransportError
from mobius.messages.meeting import Outcome, Told, read_all, read_numbers, take_together, told_text, told_value


class Board:
    """What `num_ranks` threads tell each other."""

    def __init__(self, num_ranks: int) -> None:
        self.values: list[Any] = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=HANG_SECONDS)


class ThreadMeeting:
    """One thread's seat at a board."""

    def __init__(self, board: Board, rank: int) -> None:
        self.rank, self.num_ranks, self._board = rank, len(board.values), board

    def gather(self, value: Told) -> list[Any]:
        self._board.values[self.rank] = told_text(value)
        self._board.barrier.wait()
        values = [told_value(text.encode(), by=rank) for rank, text in enumerate(self._board.values)]
        self._board.barrier.wait()
        return values


def together(steps_of: Callable[[int], list[Callable[[list[Any]], object]]], num_ranks: int = 3) -> list[Outcome]:
    board, outcomes = Board(num_ranks), dict[int, Outcome]()

    def run(rank: int) -> None:
        outcomes[rank] = take_together(ThreadMeeting(board, rank), steps_of(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[rank] for rank in range(num_ranks)]


def test_each_step_is_given_what_all_ranks_gave_in_the_one_before() -> None:
    outcomes = together(lambda rank: [lambda _: rank, lambda answers: (rank, sum(answers))])

    assert outcomes == [Outcome([[0, 3], [1, 3], [2, 3]])] * 3


@pytest.mark.parametrize("error", [OSError("no\nmore"), RuntimeError("no")])
def test_what_fails_on_one_rank_ends_it_on_all_and_no_later_step_is_taken(error: Exception) -> None:
    taken: list[int] = []

    def steps_of(rank: int) -> list[Callable[[list[Any]], object]]:
        def fail(_: list[Any]) -> None:
            if rank == 1:
                raise error

        return [fail, lambda _: taken.append(rank)]

    assert together(steps_of) == [Outcome([], "rank 1: no")] * 3
    assert taken == []


@pytest.mark.parametrize("value", [None, True, 3, -1.5, "\x00\u00ff\ud800", [], [[1], {"a": None}], {"": [0.1]}])
def test_what_may_be_told_arrives_as_it_was(value: Told) -> None:
    assert told_value(told_text(value).encode(), by=0) == value


@pytest.mark.parametrize("value", [{3: 4}, [{None: 1}], b"bytes", {1, 2}, float("nan"), [float("inf")], object()])
def test_what_would_arrive_as_something_else_is_refused_where_it_is_told(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        told_text(value)


@pytest.mark.parametrize("told", [None, 3, "01", {"0": 1}, [True], [1.0], ["1"], [-1], [[1]]])
def test_an_answer_of_another_form_is_one_error_that_names_the_rank(told: Any) -> None:
    with pytest.raises(TransportError, match="what rank 1 told the others cannot be read"):
        read_all([[0, 1], told], read_numbers)


@pytest.mark.parametrize("told", [None, 3, [], [None], [None, 1, 2], [3, 1], {"a": 1}])
def test_a_step_that_another_program_answers_is_one_error(told: Told) -> None:
    class Stranger:
        rank, num_ranks = 0, 2

        def gather(self, value: Told) -> list[Any]:
            return [value, told]

    with pytest.raises(TransportError, match="what rank 1 told the others cannot be read"):
        take_together(Stranger(), [lambda _: 1])
