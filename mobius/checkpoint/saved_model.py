"""Finds the model that a user gives to `mobius chat` or `mobius export`.

The model is the result of a run, a checkpoint, an adapter with its base, or a model of the Hub.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig

from mobius.checkpoint.folders import open_checkpoint
from mobius.checkpoint.slot_reader import is_durable_step
from mobius.checkpoint.whole_model import (
    TEXT_ALONE,
    SavedLayout,
    check_recorded,
    chosen_layout,
    find_whole_model,
    recorded_base,
)
from mobius.config.config import ExportAs
from mobius.config.earlier_results import MANIFEST_FILE, OPTIONS_FILE, checkpoints_in
from mobius.errors import CheckpointError, ConfigError
from mobius.files.regular_files import read_bytes
from mobius.models.adapter_kinds import open_adapter
from mobius.models.blocks import ModelParts
from mobius.models.families import locate_model
from mobius.models.model_files import (
    GENERATION_SETTINGS,
    TOKENIZER_SETTINGS,
    ModelFiles,
    read_copied_files,
    read_model_files,
)
from mobius.models.peft_folder import CONFIG_FILE, AdapterBase, AdapterFiles, AdapterFolder, check_base
from mobius.models.reward_head import as_reward_model
from mobius.models.tokenizer import load_tokenizer, pad_token_id
from mobius.models.weights import folder_has_weights

_CARD = ("README.md", "training_loss.png")


@dataclass(frozen=True)
class SavedModel:
    """A model on disk."""

    folder: Path
    """Folder with the model's config.json; for an adapter, the folder of its base."""
    adapter: AdapterFiles | None = None

    @property
    def adapter_to_merge(self) -> AdapterFolder | None:
        """The adapter, None without one. Raises ConfigError for a prompt, which cannot be merged."""
        if self.adapter is None or isinstance(self.adapter, AdapterFolder):
            return self.adapter
        raise ConfigError(
            f"{self.adapter.folder} holds {self.adapter.noun}, which is no part of the weights and cannot be merged. "
            "peft loads it beside its base, and `mobius chat` answers with it."
        )

    def find_layout(self, parts: ModelParts, export_as: ExportAs, *, base: str | None) -> SavedLayout:
        """Return the layout of an export. Its base is in this folder, or is the one from which its text was taken.

        `base` replaces the base that the folder names. Raises CheckpointError if the base is needed and is not here as
        it was, ConfigError if the layout is not possible.
        """
        recorded = {} if self.adapter is not None else recorded_base(self.folder)
        name = recorded.get("name") if base is None or self.adapter is not None else base
        if not isinstance(name, str):
            return chosen_layout(find_whole_model(str(self.folder), self.folder, parts), export_as)
        try:
            option = f"the base of {self.folder} (give --base, or --export_as text)," if base is None else "--base"
            whole = find_whole_model(name, locate_model(name, option=option), parts)
            if recorded:
                check_recorded(recorded, None if whole is None else whole.base, option=f"the base {name}")
        except CheckpointError:
            if export_as is ExportAs.TEXT:
                return TEXT_ALONE
            raise
        if whole is None:
            raise ConfigError(
                f"--base {base}: {self.folder} is no adapter, and this base has nothing more than text. Leave it out."
            )
        return chosen_layout(whole, export_as)

    def with_head(self, config: PretrainedConfig) -> PretrainedConfig:
        """Return `config` of the folder, changed to a reward model's if the adapter has its head."""
        if self.adapter is None or not self.adapter.is_reward_model:
            return config
        folder = self.adapter.folder if (self.adapter.folder / TOKENIZER_SETTINGS).is_file() else self.folder
        return as_reward_model(config, pad_token_id=pad_token_id(load_tokenizer(folder, config.vocab_size)))

    def model_files(self, config: PretrainedConfig) -> ModelFiles:
        """Return the files beside the weights, a result's card, and generation defaults (from `config` if missing).

        If an adapter's folder has a tokenizer, it has the chat template, too; then only generation defaults come from
        the base. Raises CheckpointError.
        """
        files = read_model_files(self.folder)
        own = {} if self.adapter is None else read_copied_files(self.adapter.folder)
        if TOKENIZER_SETTINGS in own:
            files = replace(files, copied={n: c for n, c in files.copied.items() if n == GENERATION_SETTINGS})
        if self.adapter is None and all((self.folder / name).is_file() for name in _CARD):
            own = {name: read_bytes(self.folder / name) for name in _CARD}
        defaults = {GENERATION_SETTINGS: GenerationConfig.from_model_config(config).to_json_string().encode()}
        return replace(files, copied={**defaults, **files.copied, **own})


def find_saved_model(given: str, *, base: str | None = None, is_exported: bool = False) -> SavedModel:
    """Find the model of a folder or Hugging Face id; `base` replaces the base that an adapter names.

    A text that `is_exported` may also have a base, of which it is a part.

    In a checkpoint, the manifest and all files without tensors are verified. Raises CheckpointError that says what a
    folder without a model holds instead, and ConfigError for a base without an adapter.
    """
    path = Path(given).expanduser()
    if path.is_file():
        raise CheckpointError(f"{given} is a file. Give a folder in Hugging Face's layout, such as a run's --save_dir.")
    folder = path if path.is_dir() else locate_model(given, option="")
    if (folder / MANIFEST_FILE).is_file():
        open_checkpoint(folder)
    if (folder / CONFIG_FILE).is_file() and not any(folder.glob("model*.safetensors")):
        adapter = open_adapter(folder)
        name = base or adapter.fields.get("base_model_name_or_path")
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"{folder} names no base model. Give it with --base.")
        base_folder = locate_model(name, option=f"the base of {folder} (or another --base),")
        check_base(folder, AdapterBase.of(name, base_folder))
        return SavedModel(base_folder, adapter)
    if base is not None and not is_exported:
        raise ConfigError(f"--base {base}: {given} is no adapter, and has no base. Leave the option out.")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{given} {_why_no_model(folder)}")
    locate_model(str(folder), option="")  # refuses pipes and devices among its files
    if not folder_has_weights(folder) and not is_durable_step(folder):
        raise CheckpointError(f"{given} has a config.json, but no weights (*.safetensors). Give a trained model.")
    return SavedModel(folder)


def _why_no_model(folder: Path) -> str:
    """Rest of a sentence about `folder`, which has no config.json: what it holds instead."""
    if names := checkpoints_in(folder):
        return f"has no model yet: its run has not ended. Give its newest checkpoint: {folder / names[0]}"
    if (folder / OPTIONS_FILE).is_file():
        return "has no model yet: its run has saved nothing. Wait for its end, or for a checkpoint (--save_steps)."
    foreign = [path.name for path in sorted(folder.glob("*")) if path.suffix in (".gguf", ".pt", ".pth", ".bin")]
    holds = f"holds {foreign[0]}, but " if foreign else ""
    return f"{holds}has no config.json, so it is neither a Hugging Face model nor an adapter. Give another folder."
