"""The tools whose files are read, and whose a file is."""

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
"""Tools whose files are not read, and signs like those of a `Recipe`."""
_OWN_SIGNS: Final = frozenset(("model_path", "batch_size", "seq_length", "num_iterations", "save_dir", "chat_template"))
"""Names that Mobius alone has for what every tool must set; a file with one is Mobius' own."""


def find_recipe(keys: Collection[str]) -> Recipe | None:
    """Return the tool whose file has these keys; None for a file of Mobius' own.

    Raises ConfigError for keys of two tools, or of one whose files are not read.
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
    raise ConfigError(f"keys of two trainers, {' and '.join(parts)}; keep those of one")
