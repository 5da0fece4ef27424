"""Finds data options that have no effect on any sample of the datasets, and refuses them."""

from collections.abc import Collection, Mapping
from typing import Final

from mobius.config.config import DataConfig, Packing
from mobius.data.formats import Completion, Conversation, Document, Sample
from mobius.errors import DataError

_KINDS: Final = {
    Conversation: "conversations",
    Completion: "prompts with completions",
    Document: "plain text",
}
_ACTS_ON: Final[Mapping[str, tuple[type[Sample], ...]]] = {
    "chat_template": (Conversation,),
    "default_system": (Conversation,),
    "mask_history": (Conversation,),
    "train_on_prompt": (Conversation, Completion),
}
"""Data options -> kinds of samples that they affect; other options affect all kinds."""


def has_format_specific_options(config: DataConfig) -> bool:
    """Whether an option is set that affects some kinds of samples only."""
    return config.packing is Packing.JOINED or any(getattr(config, name) for name in _ACTS_ON)


def refuse_ineffective_options(config: DataConfig, samples: Collection[Sample]) -> None:
    """Raise DataError for options that affect none of the kinds in `samples`, one sample per dataset."""
    kinds = {type(sample) for sample in samples}
    wanted = {f"--{name}": acts_on for name, acts_on in _ACTS_ON.items() if getattr(config, name)}
    if config.packing is Packing.JOINED:
        wanted["--packing joined"] = (Document,)
    found = " and ".join(text for kind, text in _KINDS.items() if kind in kinds)
    problems = [
        f"`{name}` has no effect: it is for {' and '.join(_KINDS[kind] for kind in acts_on)}, and the data hold {found}"
        for name, acts_on in wanted.items()
        if kinds.isdisjoint(acts_on)
    ]
    if problems:
        raise DataError("; ".join(problems) + ". Remove it, or give the data in another format (docs/user/data.md)")
