"""Whole runs on packed rows and mixtures end with the parameters of a plain loop that takes one sample at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from harness.rounding import assert_near_after_adam, reordered
from harness.runs import make_checkpoint, plain_training, run_main, tensors_of
from torch import Tensor
from transformers import AutoTokenizer

from mobius.config.config import DataConfig, DatasetEntry
from mobius.data.batches import Batch, TrainingBatches
from mobius.data.datasets import PreparedDataset, prepare_data
from mobius.data.mixture import WeightedSamples

BATCH, CHUNKS, LENGTH, EPOCHS = 6, 3, 96, 2
LEARNING_RATE, WARMUP, DECAY, CLIP = 2e-3, 3, 0.1, 0.5
"""AdamW's first step goes by signs, also of gradients that are only rounding: it is to be a short one."""
SHARE = reordered(BATCH * LENGTH)
Sample = tuple[Tensor, Tensor]
"""Tokens and labels [1, n]."""


def conversation(number: int) -> dict[str, object]:
    said = [("user", f"What is {number}?"), ("assistant", "one " * (number % 5 + 1)), ("user", "And twice?")]
    turns = [*said, ("assistant", f"It is {2 * number}.")]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def prompt(number: int) -> dict[str, object]:
    return {"prompt": f"Count to {number}.", "completion": " ".join(str(each) for each in range(number + 1))}


def instruction(number: int) -> dict[str, object]:
    return {"instruction": "Add one", "input": str(number), "output": f"{number} and 1 make {number + 1}"}


FORMATS: dict[str, tuple[Callable[[int], dict[str, object]], int, float]] = {
    "conversations": (conversation, 34, 0.5),
    "prompts": (prompt, 12, 2.0),
    "instructions": (instruction, 21, 1.0),
}
"""By file: how its records are made, their number, and its weight."""
ONE, MIXTURE = ["conversations"], list(FORMATS)


def entries_of(folder: Path, names: Sequence[str]) -> tuple[DatasetEntry, ...]:
    """Write the files; one that is alone has the weight 1."""
    made = []
    for name in names:
        make, number, weight = FORMATS[name]
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(make(each)) + "\n" for each in range(number)))
        made.append(DatasetEntry(str(path), weight=weight if len(names) > 1 else 1.0))
    return tuple(made)


def samples_of(batch: Batch) -> list[Sample]:
    """Each sample of a step by itself."""
    tokens, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
    assert batch.document_lengths is not None
    return [
        (tokens[row : row + 1, start:end], labels[row : row + 1, start:end])
        for row, lengths in enumerate(batch.document_lengths)
        for start, end in pairwise(accumulate(lengths, initial=0))
    ]


def assert_seen_by_weight(steps: Sequence[Sequence[Sample]], datasets: Sequence[PreparedDataset]) -> None:
    """Each sample of each dataset as often as its weight times the epochs, and nothing else."""
    expected = Counter[tuple[int, ...]]()
    for dataset in datasets:
        for index in range(len(dataset.tokenized)):
            expected[tuple(dataset.tokenized.sample(index).input_ids.tolist())] += round(dataset.entry.weight * EPOCHS)
    assert len(expected) == sum(len(dataset.tokenized) for dataset in datasets), "samples differ from each other"
    assert Counter(tuple(tokens[0].tolist()) for samples in steps for tokens, _ in samples) == expected


@pytest.mark.grid
@pytest.mark.parametrize("names", [ONE, MIXTURE], ids=["one format", "a mixture"])
@pytest.mark.parametrize("options", ["--use_offload --use_prefetch", "--no_offload"], ids=["streamed", "resident"])
def test_two_epochs_of_packed_rows_equal_a_plain_loop_of_samples(
    tmp_path: Path, names: Sequence[str], options: str
) -> None:
    model = make_checkpoint(tmp_path / "model")
    entries = entries_of(tmp_path, names)
    words = [f"{entry.name}:{entry.weight:g}" if len(names) > 1 else entry.name for entry in entries]
    arguments = f"""--model_path model --fp32 --num_stages 4 --num_chunks {CHUNKS} --batch_size {BATCH}
        --seq_length {LENGTH} --num_train_epochs {EPOCHS} --learning_rate {LEARNING_RATE} --warmup_steps {WARMUP}
        --weight_decay {DECAY} --max_grad_norm {CLIP} --save_dir out {options}""".split()
    result = run_main(2, tmp_path, "--dataset", *words, *arguments)
    assert result.returncode == 0, result.stdout

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prepared = prepare_data(DataConfig(dataset=entries, seq_length=LENGTH), tokenizer, cache_dir=tmp_path / "own")
    batches = TrainingBatches(
        [WeightedSamples(dataset.tokenized, dataset.entry.weight) for dataset in prepared.training],
        batch_size=BATCH,
        seq_length=LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        seed=42,
        is_packed=True,
        num_epochs=EPOCHS,
    )
    taken = list(batches)
    steps = [samples_of(batch) for batch in taken]
    assert_seen_by_weight(steps, prepared.training)
    assert any(len(lengths) > 1 for lengths in taken[0].document_lengths or ()), "rows hold several samples"
    assert () in (taken[-1].document_lengths or ()), "the last step has empty rows"

    losses = plain_training(model, steps, learning_rate=LEARNING_RATE, num_warmup_steps=WARMUP, decay=DECAY, clip=CLIP)
    logged = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["num_samples"] for row in logged] == list(map(len, steps))
    assert logged[-1]["epoch"] == EPOCHS
    assert [row["loss"] for row in logged] == pytest.approx(losses, rel=SHARE)
    trained, rates = tensors_of(tmp_path / "out"), [row["learning_rate"] for row in logged]
    assert_near_after_adam(trained, model.state_dict(), tensors_of(tmp_path / "model"), rates=rates, share=SHARE)
