"""scripts/make_number_task.py: names of numbers, the check of answers, and the files that it writes."""

from __future__ import annotations

import pytest
from make_number_task import LIMITS, in_digits, in_words, is_right, make_samples


def test_every_number_is_read_back_from_its_name() -> None:
    assert in_words(4032) == "four thousand thirty-two"
    assert [in_digits(in_words(number)) for number in range(10_000)] == list(range(10_000))


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("four thousand thirty-two in digits:", "4032", True),
        ("four thousand thirty-two in digits:", " 4032\n", True),
        ("four thousand thirty-two in digits:", "4023", False),
        ("four thousand thirty-two in digits:", "4032 4032", False),
        ("seven in digits:", "07", False),
        ("zero in digits:", "", False),
        ("57 as a sum:", " 40 + 17", True),
        ("57 as a sum:", "0 + 57", True),
        ("57 as a sum:", "40 + 18", False),
        ("57 as a sum:", "40 + 17 + 0", False),
        ("57 as a sum:", "-3 + 60", False),
        ("57 as a sum:", "57", False),
    ],
)
def test_an_answer_is_checked_not_compared(prompt: str, answer: str, expected: bool) -> None:
    assert is_right(prompt, answer) is expected


@pytest.mark.parametrize("task", LIMITS)
def test_every_sample_is_right_and_no_tested_prompt_is_trained_on(task: str) -> None:
    train, test = make_samples(task, 2000, 300, seed=1)

    assert (len(train), len(test)) == (2000, 300)
    assert all(is_right(sample["prompt"], sample["completion"]) for sample in train + test)
    assert not {sample["prompt"] for sample in train} & {sample["prompt"] for sample in test}
    assert len({sample["prompt"] for sample in test}) == 300
