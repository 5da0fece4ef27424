"""Tools whose files are read, and the detection of a file's tool."""

from collections.abc import Collection
from typing import Final

from mobius.config.recipes.axolotl import AXOLOTL
from mobius.config.recipes.llamafactory import LLAMAFACTORY
from mobius.config.recipes.recipe import Recipe, first_sign
from mobius.config.recipes.trl import TRL
from mobius.errors import ConfigError, listed

RECIPES: Final = (LLAMAFACTORY, AXOLOTL, TRL)
_UNREAD: Final = {
    "ms-swift": "tuner_type train_type sft_type rlhf_type split_dataset_ratio sampler_type external_plugins attn_impl "
    "model_author stream+temperature stream+max_new_tokens num_return_sequences ENV",
    "LLaMA-Factory's v1 trainer": "model+model_class model+peft_config model+dist_config model+kernel_config",
    "accelerate": "compute_environment distributed_type+num_processes",
    "DeepSpeed": "zero_optimization train_micro_batch_size_per_gpu",
    "Axolotl's cloud": "provider+project_name project_name+volumes",
}
"""Tools whose files are not supported, with the keys that identify them, as in a `Recipe`."""
_OWN_SIGNS: Final = frozenset(("model_path", "batch_size", "seq_length", "num_iterations", "save_dir", "chat_template"))
"""Mobius' names for settings that every tool needs; a file with one of them is in Mobius' format."""


def find_recipe(keys: Collection[str]) -> Recipe | None:
    """Return the tool whose file has these keys; None for a file in Mobius' format.

    Raises ConfigError for keys of two tools, or of a tool whose files are not supported.
    """
    for name, signs in () if _OWN_SIGNS & set(keys) else _UNREAD.items():
        if sign := first_sign(signs, keys):
            raise ConfigError(
                f"a file of {name} ({listed(sign)}), which is not read here: give the options of Mobius, such as "
                "--model_path, --dataset, --finetuning_type lora and --lora_rank (docs/user/options.md)"
            )
    found = [recipe for recipe in RECIPES if recipe.sign(keys) and not _OWN_SIGNS - recipe.rows.keys() & set(keys)]
    if len(found) < 2:
        return next(iter(found), None)
    parts = []
    for recipe in found:
        others = set[str]().union(*(other.rows for other in found if other is not recipe))
        own = [key for key in keys if key in recipe.rows and key not in others]
        parts.append(f"{recipe.name} ({listed(own or recipe.sign(keys))})")
    raise ConfigError(f"this file mixes options of {' and '.join(parts)}; keep those of one trainer")
