"""Weights of messages and records become a weight of each token; data without them have none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from mobius.config.config import Packing
from mobius.data.batches import TrainingBatches
from mobius.data.datasets import PreparedDataset
from mobius.data.mixture import WeightedSamples
from mobius.data.token_store import TokenizedSample

Prepare = Callable[..., PreparedDataset]
WriteLines = Callable[..., Path]

PAIR = {"prompt": "one", "completion": " two"}
NO_THOUGHTS = (
    "{% for m in messages %}{% set old = m.role == 'assistant' and not loop.last %}"
    "<{{ m.role }}>{{ 'gone' if old else m.content }}<|im_end|>{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)


def talk(*weights: object) -> dict[str, object]:
    """A conversation with an answer of each weight; None: without the field."""
    messages: list[dict[str, object]] = []
    for number, weight in enumerate(weights):
        messages.append({"role": "user", "content": f"question {number}"})
        messages.append({"role": "assistant", "content": f"answer {number}", "weight": weight})
    return {"messages": messages}


def weighted(tokenizer: PreTrainedTokenizerBase, sample: TokenizedSample) -> list[tuple[str, float]]:
    """Text and weight of each run of targets."""
    found = list[tuple[list[int], float]]()
    for token, is_target, weight in zip(
        sample.input_ids.tolist(), sample.is_target, sample.token_values["weight"].tolist(), strict=True
    ):
        if not is_target:
            found.append(([], 0.0))
        elif found and found[-1][0] and found[-1][1] == weight:
            found[-1][0].append(token)
        else:
            found.append(([token], weight))
    return [(str(tokenizer.decode(tokens)), weight) for tokens, weight in found if tokens]


@pytest.mark.parametrize(
    ("record", "options", "expected"),
    [
        (talk(0.5, 2), {}, [[("answer 0<|im_end|>", 0.5), ("answer 1<|im_end|>", 2.0)]]),
        (talk(0, None, 3), {}, [[("answer 1<|im_end|>", 1.0), ("answer 2<|im_end|>", 3.0)]]),
        (talk(2, 0.5), {"mask_history": True}, [[("answer 1<|im_end|>", 0.5)]]),
        (talk(2, 0.5) | {"loss_weight": 4}, {}, [[("answer 0<|im_end|>", 8.0), ("answer 1<|im_end|>", 2.0)]]),
        (talk(2, 0.5), {"chat_template": NO_THOUGHTS}, [[("answer 0<|im_end|>", 2.0)], [("answer 1<|im_end|>", 0.5)]]),
        (PAIR | {"loss_weight": 0.25}, {}, [[(" two<|im_end|>", 0.25)]]),
        (PAIR | {"prompt": "a one", "loss_weight": 3}, {"train_on_prompt": True}, [[(" one two<|im_end|>", 3.0)]]),
        ({"text": "words", "loss_weight": "0.5"}, {"packing": Packing.ON}, [[("words<|im_end|>", 0.5)]]),
        (
            {"a": "x", "b": " y", "c": 5},
            {"columns": (("prompt", "a"), ("completion", "b"), ("loss_weight", "c"))},
            [[(" y<|im_end|>", 5.0)]],
        ),
    ],
)
def test_targets_have_the_weight_of_their_message_and_record(
    prepare: Prepare,
    write_lines: WriteLines,
    tokenizer: PreTrainedTokenizerBase,
    record: Mapping[str, object],
    options: dict[str, Any],
    expected: list[list[tuple[str, float]]],
) -> None:
    tokenized = prepare(write_lines([record]), **options).tokenized
    samples = [tokenized.sample(index) for index in range(len(tokenized))]
    assert [weighted(tokenizer, sample) for sample in samples] == expected
    for sample in samples:
        assert sample.token_values["weight"].dtype == np.float32
        if not options.get("train_on_prompt"):
            assert (sample.token_values["weight"][~sample.is_target] == 1).all()


def test_an_answer_that_is_cut_keeps_its_weight(
    prepare: Prepare, write_lines: WriteLines, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokenized = prepare(write_lines([PAIR | {"completion": " two" * 50, "loss_weight": 2}]), seq_length=16).tokenized
    ((text, weight),) = weighted(tokenizer, tokenized.sample(0))
    assert (len(tokenized.sample(0)), weight, "<|im_end|>" in text) == (16, 2.0, False)


@pytest.mark.parametrize("record", [talk(1, 0, None), PAIR, PAIR | {"loss_weight": 1}, PAIR | {"loss_weight": None}])
def test_data_with_weights_of_zero_and_one_have_no_values(
    prepare: Prepare, write_lines: WriteLines, record: Mapping[str, object]
) -> None:
    prepared = prepare(write_lines([record]))
    assert prepared.tokenized.token_values == {}
    names = {path.name for path in prepared.cache_folder.iterdir()}
    assert names == {"facts.json", "input_ids.bin", "is_target.bin", "offsets.bin"}


def test_a_record_without_a_weight_counts_once_among_others(prepare: Prepare, write_lines: WriteLines) -> None:
    path = write_lines([PAIR, PAIR | {"loss_weight": 0.5}, PAIR])
    tokenized = prepare(path).tokenized
    found = [set(tokenized.sample(index).token_values["weight"].tolist()) for index in range(3)]
    assert found == [{1.0}, {1.0, 0.5}, {1.0}]
    batches = TrainingBatches(
        [WeightedSamples(tokenized)], batch_size=1, seq_length=64, pad_token_id=0, seed=1, is_packed=True
    )
    batch = next(batches)
    assert sorted(set(batch.token_values["weight"][batch.labels != -100].tolist())) == [0.5, 1.0]
    assert batch.token_values["weight"].shape == (1, 64)


def test_a_record_of_weight_zero_is_dropped_and_counted(prepare: Prepare, write_lines: WriteLines) -> None:
    prepared = prepare(write_lines([PAIR, PAIR | {"loss_weight": 0}, PAIR | {"loss_weight": 0.0}]))
    assert len(prepared.tokenized) == 1
    assert prepared.counts.dropped_by_reason == {"without a token to train on": 2}


def test_joined_text_carries_weights_over_the_bounds_of_rows(prepare: Prepare, write_lines: WriteLines) -> None:
    texts = [{"text": "some words of a text", "loss_weight": weight} for weight in (1, 2, 0.5, 4)]
    tokenized = prepare(write_lines(texts), packing=Packing.JOINED, seq_length=5).tokenized
    length = tokenized.input_ids.tolist().index(2) + 1
    weights = tokenized.token_values["weight"].tolist()
    assert weights == [weight for weight in (1.0, 2.0, 0.5, 4.0) for _ in range(length)][: len(weights)]
    assert len(weights) == len(tokenized.input_ids)


def test_a_table_may_hold_the_weight_as_text(prepare: Prepare, tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("prompt,completion,loss_weight\na, b,0.5\nc, d,\n")
    tokenized = prepare(path).tokenized
    assert [tokenized.sample(index).token_values["weight"].tolist()[-1] for index in range(2)] == [0.5, 1.0]
    assert json.loads((prepare(path).cache_folder / "facts.json").read_text())[0]["values"] == ["token.weight"]
