"""Rollouts: records, groups and advantages."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from mobius.config.objective import RewardScaling
from mobius.data.datasets import PreparedDataset
from mobius.data.rollouts import with_advantages
from mobius.data.token_store import TokenizedSample, Values
from mobius.errors import DataError

Prepare = Callable[..., PreparedDataset]
WriteLines = Callable[..., Path]

REWARDS = {"one": (1.0, 0.0, 0.25), "two": (3.0, 5.0), "three": (2.0, 2.0)}


def rollouts(**further: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Name {name}.", "completion": f"{name} {place}", "reward": reward, **further}
        for name, rewards in REWARDS.items()
        for place, reward in enumerate(rewards)
    ]


def derive(values: Values) -> Values:
    return with_advantages(values, RewardScaling.GROUP)


def expected(scaling: RewardScaling | None) -> list[float]:
    """TRL's formulas, one rollout after the other."""
    every, result = [reward for rewards in REWARDS.values() for reward in rewards], []
    for rewards in REWARDS.values():
        mean = sum(rewards) / len(rewards)
        for reward in rewards:
            if scaling is None:
                result.append(reward - (sum(rewards) - reward) / (len(rewards) - 1))
                continue
            over = {RewardScaling.GROUP: rewards, RewardScaling.BATCH: every}.get(scaling)
            divisor = 1.0 if over is None else float(np.std(over, ddof=1)) + 1e-4
            result.append((reward - mean) / divisor)
    return result


@pytest.mark.parametrize("scaling", [*RewardScaling, None])
def test_advantages_are_those_of_the_formulas(
    write_lines: WriteLines, prepare: Prepare, scaling: RewardScaling | None
) -> None:
    dataset = prepare(write_lines(rollouts()), rows="rollouts", derive=lambda each: with_advantages(each, scaling))
    assert dataset.tokenized.sequence_values.keys() == {"reward", "advantage"}
    np.testing.assert_allclose(dataset.tokenized.sequence_values["advantage"], expected(scaling), rtol=1e-6)
    assert (dataset.tokenized.sequence_values["advantage"][-2:] == 0).all()


def test_equal_rewards_have_no_advantage_to_the_bit() -> None:
    values = {"reward": np.full(3, 0.1, np.float32)}
    values |= {name: np.zeros(3, np.float32) for name in ("group_high", "group_low")}
    for scaling in (*RewardScaling, None):
        assert (with_advantages(values, scaling)["advantage"] == 0).all()


def test_groups_do_not_depend_on_the_order_of_records(write_lines: WriteLines, prepare: Prepare) -> None:
    mixed = rollouts()[::2] + rollouts()[1::2]
    for file, records in (("prompts", mixed), ("groups", [each | {"group": each["prompt"]} for each in mixed])):
        dataset = prepare(write_lines(records, f"{file}.jsonl"), rows="rollouts", derive=derive)
        values = dataset.tokenized.sequence_values["advantage"].tolist()
        whole = expected(RewardScaling.GROUP)
        assert values == pytest.approx(whole[::2] + whole[1::2], rel=1e-6)


def test_a_group_joins_different_prompts(write_lines: WriteLines, prepare: Prepare) -> None:
    dataset = prepare(write_lines(rollouts(group=7)), rows="rollouts", derive=derive)
    rewards = np.array([reward for rewards in REWARDS.values() for reward in rewards])
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(dataset.tokenized.sequence_values["advantage"], wanted, rtol=1e-6)


def test_given_advantages_stay(write_lines: WriteLines, prepare: Prepare) -> None:
    records: list[Mapping[str, Any]] = [{"prompt": "a", "completion": "b", "advantage": "-0.5"}]
    dataset = prepare(write_lines(records), rows="rollouts", derive=derive)
    assert {name: each.tolist() for name, each in dataset.tokenized.sequence_values.items()} == {"advantage": [-0.5]}


def test_messages_and_text_become_tokens_as_completions_do(
    write_lines: WriteLines, prepare: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    asked, answer = [{"role": "user", "content": "Hi"}], [{"role": "assistant", "content": "Hello"}]
    chat = [{"prompt": asked, "completion": answer, "advantage": 1.0}]
    row = prepare(write_lines(chat, "chat.jsonl"), rows="rollouts").tokenized.sample(0)
    assert tokenizer.decode(row.input_ids[row.is_target].tolist()).strip() == f"Hello{tokenizer.eos_token}"


IDS = {"prompt_ids": [5, 6], "completion_ids": [7, 8, 9], "reward": 1.0}


def given(write_lines: WriteLines, prepare: Prepare, record: Mapping[str, Any], **options: Any) -> TokenizedSample:
    return prepare(write_lines([record]), rows="rollouts", **options).tokenized.sample(0)


def test_token_ids_stay_as_they_are_given(write_lines: WriteLines, prepare: Prepare) -> None:
    row = given(write_lines, prepare, IDS | {"logprobs": [-1.0, None, -0.5], "prompt": "a", "completion": "b"})
    assert (row.input_ids.tolist(), row.is_target.tolist()) == ([5, 6, 7, 8, 9], [False] * 2 + [True] * 3)
    np.testing.assert_array_equal(row.token_values["sampler"], np.array([0, 0, -1, math.nan, -0.5], np.float32))


def test_a_cut_completion_keeps_the_numbers_of_its_tokens(write_lines: WriteLines, prepare: Prepare) -> None:
    row = given(write_lines, prepare, IDS | {"logprobs": [-1.0, -2.0, -3.0]}, seq_length=4)
    assert row.token_values["sampler"].tolist() == [0, 0, -1, -2]


def test_rollouts_without_the_samplers_numbers_beside_others_have_unknown_ones(
    write_lines: WriteLines, prepare: Prepare
) -> None:
    records = [IDS, IDS | {"logprobs": [-1.0, -2.0, -3.0]}]
    dataset = prepare(write_lines(records), rows="rollouts").tokenized
    assert np.isnan(dataset.sample(0).token_values["sampler"]).all()


PAIR = {"prompt": "a", "completion": "b", "reward": 1.0}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (PAIR | {"advantage": 2.0}, "there are both `reward` and `advantage`"),
        (PAIR | {"reward": math.nan}, "`reward` must be a finite number, not nan"),
        (PAIR | {"reward": -math.inf}, "`reward` must be a finite number, not -inf"),
        (PAIR | {"reward": "good"}, "`reward` must be a finite number, not 'good'"),
        (PAIR | {"reward": None}, "`reward` must be a finite number, not None"),
        (PAIR | {"completion": " "}, "`completion` is empty"),
        (PAIR | {"logprobs": [-1.0]}, "`logprobs` belong to tokens, and the record has text"),
        (IDS | {"completion_ids": []}, "`completion` is empty"),
        (IDS | {"completion_ids": [7, -1]}, "`completion_ids` must hold token ids, not -1"),
        (IDS | {"completion_ids": "7 8"}, "`completion_ids` must be a list of token ids, not '7 8'"),
        (IDS | {"completion_ids": [10**6]}, "the token id 1000000 is not one of the"),
        (IDS | {"logprobs": [-1.0]}, "one number for each of the 3 `completion_ids`, not 1 numbers"),
        (
            IDS | {"logprobs": [-1.0, 0.5, -2.0]},
            "finite log-probabilities, at most 0, or null where there is none, not",
        ),
        (
            {"prompt": "a", "completion": "b"},
            "of completions with a reward or an advantage; --objective sft takes them",
        ),
    ],
)
def test_a_rollout_that_cannot_be_learned_from_is_refused(
    write_lines: WriteLines, prepare: Prepare, record: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepare(write_lines([record]), rows="rollouts", derive=derive)
    assert message in str(caught.value), json.dumps(str(caught.value))


def test_a_group_of_one_is_refused_with_its_place(write_lines: WriteLines, prepare: Prepare) -> None:
    records = [*rollouts(), {"prompt": "alone", "completion": "b", "reward": 1.0}]
    with pytest.raises(DataError, match=r"1 of 4 groups have only one rollout, the first of them rollout 8 of 8: .*"):
        prepare(write_lines(records), rows="rollouts", derive=derive)


def test_rewards_that_leave_no_score_in_sft_stay_samples(write_lines: WriteLines, prepare: Prepare) -> None:
    """The best completions of a file may be trained on as they are."""
    assert prepare(write_lines([PAIR])).format_name == "prompt-completion"
