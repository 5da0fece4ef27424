"""What learning_after_sft.py trains on and how it judges: rules, what is held out, gains, and rows that are kept."""

from __future__ import annotations

import random
from pathlib import Path

import after_sft_tasks as tasks
import pytest
from learning_after_sft import QUICK, Runs, table


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (" The lamp is red, old and pink.", 2),
        (" The lamp is red, red and red.", 1),
        ("The lamp is old, tall and heavy.", 0),
        ("The door is red, blue and pink.", -1),
        ("The lamp is red, blue and pink. The lamp is red.", -1),
        ("red, blue, pink", -1),
    ],
)
def test_a_description_is_judged_by_its_colours_if_it_has_the_form(answer: str, expected: int) -> None:
    assert tasks.num_colours("lamp", answer) == expected


def test_the_chosen_answer_of_a_pair_wins_and_equal_answers_win_half() -> None:
    pairs = tasks.description_pairs(50, random.Random(1))
    things = [pair["prompt"].removeprefix("Describe the ").removesuffix(".") for pair in pairs]
    chosen, rejected = ([pair[side] for pair in pairs] for side in ("chosen", "rejected"))

    assert not {*things} & {*tasks.split(tasks.THINGS, held_out=True)}
    rates = [tasks.win_rate(things, *each) for each in ((chosen, rejected), (rejected, chosen), (chosen, chosen))]
    assert rates == [1.0, 0.0, 0.5]


def test_sums_are_right_and_not_those_that_are_asked() -> None:
    samples = tasks.sum_samples(150, random.Random(2))

    assert all(eval(sample["prompt"].removesuffix("=")) == int(sample["completion"]) for sample in samples)
    assert not {sample["prompt"] for sample in samples} & {*tasks.split(tasks.SUMS, held_out=True)}
    assert len({*tasks.SUMS}) == 400


def test_gains_are_over_chance_the_start_and_the_loss_without_a_teacher(tmp_path: Path) -> None:
    runs = Runs(tmp_path, tmp_path, QUICK, [], 0.0)
    for seed, gain in enumerate((0.1, 0.3)):
        runs.add("preference", "mobius", seed, "score", {0: 0.5, 2: 0.5 + gain})
        runs.add("reward", "mobius", seed, "score", {0: 0.4, 1: 0.0, 2: 0.4 + gain})
        runs.add("teacher", "hard", seed, "score", {1: 9.0, 3: 5.0})
        runs.add("teacher", "distill", seed, "score", {1: 9.0, 3: 5.0 - gain})

    read = Runs(tmp_path, tmp_path, QUICK, [], 0.0)
    numbers = ["2", "0.2000", "0.1414", "1.4", "0.100 0.300"]
    assert table(read.rows)[1:] == [
        [*names, *numbers] for names in (("reward", "mobius"), ("preference", "mobius"), ("teacher", "distill"))
    ]
    assert read.has("reward", "mobius", 1, 2)
    assert not read.has("reward", "mobius", 2, 2)
