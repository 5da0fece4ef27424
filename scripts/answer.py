"""Answers prompts of a dataset with the model of a folder, by transformers alone: what has a run taught it?

    python scripts/answer.py output/numbers numbers_test.jsonl
    python scripts/answer.py output/summaries assets/docstrings/train.jsonl --first 2000 --samples 3

The tokens before an answer are those that training would give; then the likeliest token is taken at each position.
Prints the first answers beside the dataset's own; the share that is right, where prompts are make_number_task.py's and
can be checked, or else that are the dataset's to the letter; and the mean loss of a token of the dataset's answers.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from make_number_task import is_right
from transformers import AutoModelForCausalLM, AutoTokenizer

from mobius.config.cli import parse_args
from mobius.data.datasets import prepare_data
from mobius.data.store import Row
from mobius.errors import DataError, MobiusError
from mobius.log import printable

BATCH_SIZE = 32


def split_row(row: Row) -> tuple[list[int], list[int]]:
    """Token ids of the prompt of a row's first answer, and those of the answer."""
    ids, is_target = row
    start = int(is_target.argmax())
    answer = takewhile(lambda pair: pair[1], zip(ids[start:].tolist(), is_target[start:], strict=True))
    return ids[:start].tolist(), [token for token, _ in answer]


def generate(model: Any, tokenizer: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> list[str]:
    """The model's answers to `prompts`, without special tokens; shorter prompts are padded on their left."""
    answers = list[str]()
    pad = tokenizer.eos_token_id
    for start in range(0, len(prompts), BATCH_SIZE):
        group = prompts[start : start + BATCH_SIZE]
        longest = max(map(len, group))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in group])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in group])
        output = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=pad,
        )
        answers += tokenizer.batch_decode(output[:, longest:], skip_special_tokens=True)
    return answers


def mean_loss(model: Any, rows: Sequence[tuple[list[int], list[int]]]) -> float:
    """Cross entropy of the dataset's answers, as training computes it: a mean over all their tokens."""
    total = 0.0
    with torch.no_grad():
        for prompt, answer in rows:
            given = {
                "input_ids": torch.tensor([prompt + answer]),
                "labels": torch.tensor([[-100] * len(prompt) + answer]),
            }
            total += model(**given, num_items_in_batch=1).loss.item()
    return total / sum(len(answer) for _, answer in rows)


def check(prompt: str, answer: str, expected: str) -> bool:
    """Whether an answer is right: by the task's check if the prompt is one of a task, else by the dataset's answer."""
    try:
        return is_right(prompt, answer)
    except ValueError:
        return answer.strip() == expected.strip()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("dataset", help="as main.py takes it")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="sample to begin with (default: 0)")
    parser.add_argument("--samples", type=int, default=500, metavar="N", help="samples to answer (default: 500)")
    parser.add_argument("--shown", type=int, default=3, metavar="N", help="answers to print (default: 3)")
    parser.add_argument("--max_new_tokens", type=int, default=64, metavar="N", help="of an answer (default: 64)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Print answers; returns 2, with one line, on a mistake."""
    given = parse_arguments(argv)
    try:
        options = ["--model_path", given.model, "--dataset", given.dataset, "--packing", "off"]
        config = parse_args(options)
        tokenizer = AutoTokenizer.from_pretrained(given.model, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, trust_remote_code=False)
        with tempfile.TemporaryDirectory() as folder:
            tokenized = prepare_data(config.data, tokenizer, cache_dir=Path(folder)).training[0].tokenized
            indices = range(len(tokenized))[given.first : given.first + given.samples]
            rows = [split_row(tokenized.sample(index)) for index in indices]
        if not rows:
            raise DataError(
                f"--first {given.first} --samples {given.samples}: the dataset has {len(tokenized)} samples"
            )
    except (MobiusError, OSError) as error:
        print(f"error: {printable(str(error), sys.stderr)}", file=sys.stderr)
        return 2
    answers = generate(model, tokenizer, [prompt for prompt, _ in rows], given.max_new_tokens)
    prompts = [tokenizer.decode(prompt, skip_special_tokens=True) for prompt, _ in rows]
    expected = [tokenizer.decode(answer, skip_special_tokens=True) for _, answer in rows]
    for told in list(zip(prompts, expected, answers, strict=True))[: given.shown]:
        for name, text in zip(("prompt", "dataset", "model"), told, strict=True):
            print(f"{name:8}| " + printable(text.strip(), sys.stdout).replace("\n", "\n        | "))
        print()
    num_right = sum(map(check, prompts, answers, expected))
    print(f"{num_right} of {len(answers)} answers are right ({num_right / len(answers):.1%})")
    print(f"loss of the dataset's answers: {mean_loss(model, rows):.4f} a token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
