"""Data and rules of the tasks of learning_after_sft.py: what is good can be computed, so nobody has to judge answers.

For `preference` three words describe a thing, and the more of them are colours, the better; for `reward` two numbers
are added; `teacher` has text. A part of the things and of the sums is held out for tests.
"""

import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
Record = dict[str, str]

THINGS = re.findall(
    r"\w+",
    "lamp chair table vase bowl door box cup coat ring shelf bench plate clock bag mask kite boat drum fence glove hat "
    "jar key ladder mirror needle oar pillow quilt rope scarf tent umbrella violin wagon apron basket candle desk "
    "flute hammer kettle mug pen rug spoon towel",
)
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "purple", "pink")
OTHERS = ("wooden", "heavy", "small", "old", "broken", "smooth", "light", "tall")
FORM = re.compile(r"The (\w+) is (\w+), (\w+) and (\w+)\.")
SUMS = random.Random(0).sample([f"{first} + {second} =" for first in range(20) for second in range(20)], 400)


def split(items: Sequence[Item], *, held_out: bool) -> list[Item]:
    """Return each second item, which tests ask for, or the others, which are trained on."""
    return [item for number, item in enumerate(items) if (number % 2 == 1) is held_out]


def question(thing: str) -> str:
    """Return the prompt that asks for a description."""
    return f"Describe the {thing}."


def describe(thing: str, chance: random.Random) -> str:
    """Return a description of three words, each a colour or not with equal chance."""
    first, second, third = (chance.choice(chance.choice((COLOURS, OTHERS))) for _ in range(3))
    return f" The {thing} is {first}, {second} and {third}."


def num_colours(thing: str, answer: str) -> int:
    """Return the number of different colours in a description of `thing`; -1 if the answer has another form."""
    form = FORM.fullmatch(answer.strip())
    return len({*form.groups()[1:]} & {*COLOURS}) if form and form[1] == thing else -1


def descriptions(count: int, chance: random.Random) -> list[Record]:
    """Return samples of the form."""
    chosen = chance.choices(split(THINGS, held_out=False), k=count)
    return [{"prompt": question(thing), "completion": describe(thing, chance)} for thing in chosen]


def description_pairs(count: int, chance: random.Random) -> list[Record]:
    """Return pairs of descriptions, of which the chosen one has more colours."""
    pairs = list[Record]()
    while len(pairs) < count:
        thing = chance.choice(split(THINGS, held_out=False))
        one, other = describe(thing, chance), describe(thing, chance)
        if num_colours(thing, one) > num_colours(thing, other):
            pairs.append({"prompt": question(thing), "chosen": one, "rejected": other})
    return pairs


def win_rate(things: Sequence[str], answers: Sequence[str], others: Sequence[str]) -> float:
    """Return the share of answers that are better than the others; those that are as good count half."""
    points = 0.0
    for thing, own, other in zip(things, answers, others, strict=True):
        difference = num_colours(thing, own) - num_colours(thing, other)
        points += (difference > 0) + 0.5 * (difference == 0)
    return points / len(things)


def right_sum(prompt: str) -> str:
    """Return the sum for which a prompt asks."""
    return str(sum(map(int, re.findall(r"\d+", prompt))))


def sum_samples(count: int, chance: random.Random) -> list[Record]:
    """Return samples of right sums."""
    prompts = chance.sample(split(SUMS, held_out=False), count)
    return [{"prompt": prompt, "completion": f" {right_sum(prompt)}"} for prompt in prompts]


def texts(corpus: Path) -> list[Record]:
    """Return the texts of a corpus of instructions."""
    lines = map(json.loads, corpus.read_text(encoding="utf-8").splitlines())
    return [{"text": f"{line['input']}\n\n{line['output']}"} for line in lines]


def write(file: Path, records: Iterable[object]) -> Path:
    """Write records as JSON Lines; returns the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return file
