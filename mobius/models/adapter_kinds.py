"""Kinds of what is trained beside a frozen base: one class for each `--finetuning_type`.

All other code uses a kind through `peft_folder.AdapterFiles`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from mobius.config.config import AdapterConfig, Config, FinetuningType
from mobius.config.validation import LEAST_TEXT
from mobius.errors import CheckpointError
from mobius.models.model_files import read_json_object
from mobius.models.peft_folder import CONFIG_FILE, AdapterFiles, AdapterFolder
from mobius.models.prefix_folder import PrefixFolder
from mobius.models.prompt_folder import PromptFolder

KINDS: Final[Mapping[FinetuningType, type[AdapterFiles]]] = {
    FinetuningType.LORA: AdapterFolder,
    FinetuningType.PROMPT: PromptFolder,
    FinetuningType.P_TUNING: PromptFolder,
    FinetuningType.PREFIX: PrefixFolder,
}


def open_adapter(folder: Path, config: AdapterConfig | None = None) -> AdapterFiles:
    """Read the folder of an adapter or prompt: of the kind that the run trains, or without `config` its own kind.

    Raises CheckpointError.
    """
    path = folder / CONFIG_FILE
    peft_type = read_json_object(path).get("peft_type") if path.is_file() else None
    option, found = next(((word, each) for word, each in KINDS.items() if peft_type in each.peft_types), ("", None))
    kind = (found or AdapterFolder) if config is None else KINDS[config.finetuning_type]
    if found not in (None, AdapterFolder, kind):
        raise CheckpointError(
            f"{folder} holds {found.noun}, not {kind.noun}. Continue it with --finetuning_type {option}."
        )
    return kind(folder)


def adopt_adapter(config: Config, given: Collection[str] | None) -> Config:
    """Return `config` with the options of the adapter or prompt in --adapter_path, if there is one.

    `given`: options that the user set. Raises CheckpointError, also for a prompt that leaves no room in a row.
    """
    path = config.adapters.adapter_path
    if path is None:
        return config
    adapters = open_adapter(Path(path).expanduser(), config.adapters).complete(config.adapters, given)
    if adapters.num_reserved_tokens + LEAST_TEXT > config.data.seq_length:
        raise CheckpointError(
            f"--adapter_path {path} has {adapters.num_virtual_tokens} vectors, which leave no room for a sample in a "
            f"row of --seq_length {config.data.seq_length}. Raise --seq_length."
        )
    return replace(config, adapters=adapters)
