"""Makes a synthetic dataset of long-tailed lengths: log-normal, as those of conversations and documents are.

    python benchmarks/make_dataset.py lengths.jsonl --samples 20000 --lengths lengths.json
    python benchmarks/make_dataset.py large.jsonl --gigabytes 2 --format messages

A record's text is made of words that are one token each in the tokenizer of --tokenizer, so that a record has as many
tokens as were drawn for it. `--lengths` writes these numbers for peers, which train on random tokens. A seed makes the
same file everywhere.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

TOKENIZER = Path(__file__).parents[1] / "assets" / "tiny-llama"
WIDTH = 1.0
"""Standard deviation of the lengths' logarithms: a tenth of the samples then holds over a third of the tokens."""
SMALLEST = 24
"""Tokens of the shortest sample: a few words for its prompt and its answer beside what the format adds."""
FORMAT_TOKENS = {"prompt-completion": 1, "messages": 16}
"""Tokens beside the words, at the most: the end-of-sequence token; a chat template's marks."""
DRAWN_AT_ONCE = 4096
POOL_WORDS = 2_000_000
"""Length of the text that records are cut from."""


def draw_lengths(random: np.random.Generator, count: int, *, mean: float, largest: int) -> NDArray[np.int64]:
    """Token counts of `count` samples; `mean` is the distribution's before they are bounded by `largest`."""
    drawn = random.lognormal(math.log(mean) - WIDTH**2 / 2, WIDTH, count)
    return np.clip(drawn.round().astype(np.int64), SMALLEST, largest)


def single_token_words(folder: Path) -> list[str]:
    """Words with the space before them that the tokenizer in `folder` makes one token of, wherever they stand."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = sorted({tokenizer.decode([number]) for number in tokenizer.get_vocab().values()})
    words = [word if word.startswith(" ") else f" {word}" for word in words if re.fullmatch(" ?[a-z]{2,}", word)]
    alone = [word for word in dict.fromkeys(words) if len(tokenizer.encode(word, add_special_tokens=False).ids) == 1]
    if len(alone) < 100:
        raise SystemExit(f"{folder}: only {len(alone)} English words are one token each in this tokenizer")
    return alone


class Texts:
    """Cuts texts of a given number of words out of one long random text."""

    def __init__(self, words: list[str], seed: int) -> None:
        self._random = np.random.default_rng([seed, 1])
        chosen = [words[index] for index in self._random.integers(0, len(words), POOL_WORDS)]
        self._pool = "".join(chosen)
        self._starts = np.cumsum([0, *map(len, chosen)])

    def cut(self, num_words: int) -> str:
        """A text of `num_words` words, each with the space before it."""
        first = int(self._random.integers(0, POOL_WORDS - num_words))
        return self._pool[self._starts[first] : self._starts[first + num_words]]

    def share(self, num_words: int) -> int:
        """Words of an answer out of a sample's: between a tenth and a half of them."""
        return max(1, int(num_words * self._random.uniform(0.1, 0.5)))


def records(lengths: Iterator[int], texts: Texts, format_name: str) -> Iterator[tuple[int, dict[str, object]]]:
    """Records of these lengths, endless if they are, each with its length."""
    for length in lengths:
        num_words = length - FORMAT_TOKENS[format_name]
        num_answer = texts.share(num_words)
        prompt, answer = texts.cut(num_words - num_answer), texts.cut(num_answer)
        if format_name == "messages":
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            yield length, {"messages": turns}
        else:
            yield length, {"prompt": prompt, "completion": answer}


def endless_lengths(mean: float, largest: int, seed: int) -> Iterator[int]:
    """Token counts without an end, drawn part by part."""
    random = np.random.default_rng(seed)
    while True:
        yield from draw_lengths(random, DRAWN_AT_ONCE, mean=mean, largest=largest).tolist()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="JSON-lines file to write")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--samples", type=int, default=20_000)
    size.add_argument("--gigabytes", type=float, help="write so much (10^9 bytes) instead of a number of samples")
    parser.add_argument("--mean", type=float, default=700, help="tokens of a sample")
    parser.add_argument("--largest", type=int, default=4096, help="tokens of the longest sample")
    parser.add_argument("--format", choices=FORMAT_TOKENS, default="prompt-completion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="folder with a tokenizer.json")
    parser.add_argument("--lengths", type=Path, help="JSON file for the token counts, in the order of the records")
    arguments = parser.parse_args()
    if not SMALLEST <= arguments.largest < POOL_WORDS:
        parser.error(f"--largest {arguments.largest}: must be at least {SMALLEST} and below {POOL_WORDS}")
    return arguments


def main() -> None:
    """Write the file and tell what is in it."""
    arguments = parse()
    texts = Texts(single_token_words(arguments.tokenizer), arguments.seed)
    drawn = endless_lengths(arguments.mean, arguments.largest, arguments.seed)
    most_bytes = math.inf if arguments.gigabytes is None else arguments.gigabytes * 1e9
    most_samples = arguments.samples if arguments.gigabytes is None else math.inf
    written, lengths = 0, list[int]()
    with arguments.output.open("w", encoding="utf-8") as file:
        for length, record in records(drawn, texts, arguments.format):
            if len(lengths) >= most_samples or written >= most_bytes:
                break
            written += file.write(json.dumps(record) + "\n")
            lengths.append(length)
    if arguments.lengths is not None:
        arguments.lengths.write_text(json.dumps(lengths), encoding="utf-8")
    print(
        f"{arguments.output}: {len(lengths):,} samples, {written / 1e9:.2f} GB, {sum(lengths):,} tokens, "
        f"{sum(lengths) / max(1, len(lengths)):.0f} in the mean, {max(lengths, default=0):,} at the most"
    )


if __name__ == "__main__":
    main()
