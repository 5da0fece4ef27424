"""Answers prompts of a dataset with the model of a folder, by transformers alone: what has a run taught it?

    python scripts/generate.py output/numbers numbers_test.jsonl
    python scripts/generate.py output/summaries assets/docstrings/train.jsonl --first 2000 --samples 3

The tokens before the last answer of a sample are those that training would give; then the likeliest token is taken at
each position, as with --do_predict. Prints the first answers beside the dataset's own; the share that is right, where
prompts are make_number_task.py's and can be checked, or else that are the dataset's to the letter; and the mean loss of
a token of the dataset's answers.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if importlib.util.find_spec("mobius") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from make_number_task import is_right

from mobius.config.cli import parse_args
from mobius.data.datasets import prepare_data
from mobius.errors import DataError, MobiusError
from mobius.log import printable
from mobius.training.evaluation.generation import TextGenerator
from mobius.training.evaluation.prediction import BATCH_SIZE, PromptAndLabel, label_text, split_prompts, text_of


def mean_loss(model: Any, samples: Sequence[PromptAndLabel]) -> float:
    """Cross entropy of the dataset's answers, as training computes it: a mean over all their tokens."""
    total = 0.0
    with torch.no_grad():
        for sample in samples:
            prompt, label = sample.prompt.tolist(), sample.label.tolist()
            given = {
                "input_ids": torch.tensor([prompt + label]),
                "labels": torch.tensor([[-100] * len(prompt) + label]),
            }
            total += model(**given, num_items_in_batch=1).loss.item()
    return total / sum(len(sample.label) for sample in samples)


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
        answerer = TextGenerator.of_folder(Path(given.model), torch.device("cpu"))
        with tempfile.TemporaryDirectory() as folder:
            dataset = prepare_data(config.data, answerer.tokenizer, cache_dir=Path(folder)).training[0]
            indices = range(len(dataset.tokenized))[given.first : given.first + given.samples]
            samples = split_prompts(dataset, indices, max_samples=None)
        samples = [sample for sample in samples if answerer.can_generate(sample.prompt)]
        if not samples:
            raise DataError(
                f"--first {given.first} --samples {given.samples}: no sample of the dataset's {len(dataset.tokenized)} "
                "is there that could be answered"
            )
    except (MobiusError, OSError) as error:
        print(f"error: {printable(str(error), sys.stderr)}", file=sys.stderr)
        return 2
    tokenizer, asked = answerer.tokenizer, [sample.prompt for sample in samples]
    given_answers = answerer.generate(asked, max_new_tokens=given.max_new_tokens, batch_size=BATCH_SIZE)
    answers = [text_of(answer.tokens, tokenizer, is_bare=True) for answer in given_answers if answer is not None]
    prompts = [text_of(prompt, tokenizer, is_bare=True) for prompt in asked]
    expected = [label_text(sample, tokenizer) for sample in samples]
    for told in list(zip(prompts, expected, answers, strict=True))[: given.shown]:
        for name, text in zip(("prompt", "dataset", "model"), told, strict=True):
            print(f"{name:8}| " + printable(text.strip(), sys.stdout).replace("\n", "\n        | "))
        print()
    num_right = sum(map(check, prompts, answers, expected))
    print(f"{num_right} of {len(answers)} answers are right ({num_right / len(answers):.1%})")
    print(f"loss of the dataset's answers: {mean_loss(answerer.model, samples):.4f} a token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
