"""An option of the data that acts on none of the formats that are there is refused before anything is tokenized."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mobius.config.config import Packing
from mobius.data.datasets import PreparedData
from mobius.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}]}
ASKED = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}
ALPACA = {"instruction": "One?", "output": "Two."}
PAIR = {"prompt": "one", "completion": " two"}
TEXT = {"text": "one two"}

OPTIONS = {
    "chat_template": "chatml",
    "default_system": "Be brief.",
    "mask_history": True,
    "train_on_prompt": True,
    "packing": Packing.JOINED,
}
REFUSED = [
    *((name, record) for name in ("chat_template", "default_system", "mask_history") for record in (PAIR, TEXT)),
    ("train_on_prompt", TEXT),
    *(("packing", record) for record in (CHAT, ALPACA, PAIR)),
]
TAKEN = [
    *((name, record) for name in tuple(OPTIONS)[:4] for record in (CHAT, ALPACA, ASKED)),
    ("train_on_prompt", PAIR),
    ("packing", TEXT),
]


@pytest.mark.parametrize(("name", "record"), REFUSED)
def test_an_option_without_effect_on_the_format_is_refused(
    prepare_all: Callable[..., PreparedData], write_lines: Callable[..., Path], name: str, record: dict[str, object]
) -> None:
    with pytest.raises(DataError, match=rf"`--{name}( joined)?` has no effect: .* the data hold"):
        prepare_all(write_lines([record, record]), **{name: OPTIONS[name]})


@pytest.mark.parametrize(("name", "record"), TAKEN)
def test_an_option_is_taken_with_a_format_that_it_acts_on(
    prepare_all: Callable[..., PreparedData], write_lines: Callable[..., Path], name: str, record: dict[str, object]
) -> None:
    prepare_all(write_lines([record, record]), **{name: OPTIONS[name]})
