"""Makes a task whose answers can be checked, as prompts and completions: does a run learn at all?

    python scripts/make_number_task.py numbers.jsonl --task words --samples 5000 --seed 0 --split 500

`words`: a number in English words, to be written in digits. `sums`: a number, to be written as a sum of two; of many
right answers the completion is one. With `--split` as many samples more go to numbers_test.jsonl, on other numbers.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
VALUES = {word: value for value, word in enumerate(ONES)} | {word: 10 * i for i, word in enumerate(TENS, start=2)}
LIMITS = {"words": 10_000, "sums": 1_000}
"""Numbers of a task are below this."""
PROMPTS = {"words": "{} in digits:", "sums": "{} as a sum:"}


def in_words(number: int) -> str:
    """`number`, at least 0 and below 10,000, in words: four thousand thirty-two."""
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    return f"{ONES[count]} {name}" + (f" {in_words(rest)}" if rest else "")


def in_digits(words: str) -> int:
    """The number that `words` name; another path than `in_words`: each word adds to or multiplies what it follows."""
    total = part = 0
    for word in re.split(r"[ -]", words):
        if word == "thousand":
            total, part = 1000 * part, 0
        elif word == "hundred":
            part *= 100
        else:
            part += VALUES[word]
    return total + part


def is_right(prompt: str, answer: str) -> bool:
    """Whether `answer`, white space around it aside, is one to `prompt`; ValueError if no task has such a prompt."""
    if match := re.fullmatch(r"([a-z -]+) in digits:", prompt.strip()):
        return answer.strip() == str(in_digits(match[1]))
    if match := re.fullmatch(r"(\d+) as a sum:", prompt.strip()):
        terms = re.fullmatch(r"(\d+) \+ (\d+)", answer.strip(), re.ASCII)
        return terms is not None and int(terms[1]) + int(terms[2]) == int(match[1])
    raise ValueError(f"not a prompt of a task with numbers: {prompt!r}")


def make_samples(task: str, num_train: int, num_test: int, seed: int) -> tuple[list[dict[str, str]], ...]:
    """Samples to train and to test on, which share no number; numbers repeat only where there are too few."""
    chance = random.Random(seed)
    numbers = list(range(LIMITS[task]))
    chance.shuffle(numbers)
    tested, trained = numbers[:num_test], numbers[num_test:]
    repeated = [trained[index % len(trained)] for index in range(num_train)]
    return tuple([_sample(task, number, chance) for number in chosen] for chosen in (repeated, tested))


def _sample(task: str, number: int, chance: random.Random) -> dict[str, str]:
    if task == "words":
        given, answer = in_words(number), f" {number}"
    else:
        first = chance.randint(0, number)
        given, answer = str(number), f" {first} + {number - first}"
    return {"prompt": PROMPTS[task].format(given), "completion": answer}


def _problems(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.output.suffix != ".jsonl":
        yield f"the file must end in .jsonl, and {arguments.output} does not"
    if arguments.samples < 1 or arguments.split < 0:
        yield "--samples must be at least 1, and --split at least 0"
    if arguments.split >= LIMITS[arguments.task]:
        yield f"--split must leave numbers to train on: {arguments.task} has {LIMITS[arguments.task]:,}"


def main(argv: list[str] | None = None) -> int:
    """Write the file or files; returns 2, with one line, on a mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--task", choices=LIMITS, default="words")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", type=int, default=0, metavar="N", help="write N samples more to OUT_test.jsonl")
    arguments = parser.parse_args(argv)
    if problems := list(_problems(arguments)):
        print(f"error: {'; '.join(problems)}", file=sys.stderr)
        return 2
    train, test = make_samples(arguments.task, arguments.samples, arguments.split, arguments.seed)
    files = {arguments.output: train}
    if test:
        files[arguments.output.with_stem(f"{arguments.output.stem}_test")] = test
    try:
        for path, samples in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
            print(f"{len(samples):,} samples written to {path}")
    except OSError as error:
        print(f"error: cannot write {path}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
