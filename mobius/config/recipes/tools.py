"""The tools whose files are read, and whose a file is."""

from collections.abc import Collection
from typing import Final

from mobius.config.recipes.axolotl import AXOLOTL
from mobius.config.recipes.llamafactory import LLAMAFACTORY
from mobius.config.recipes.recipe import Recipe
from mobius.config.recipes.trl import TRL
from mobius.errors import ConfigError, listed

RECIPES: Final = (LLAMAFACTORY, AXOLOTL, TRL)
_OWN_SIGNS: Final = frozenset(("model_path", "batch_size", "seq_length", "num_iterations", "save_dir", "chat_template"))
"""Names that Mobius alone has for what every tool must set; a file with one is Mobius' own."""


def find_recipe(keys: Collection[str]) -> Recipe | None:
    """Return the tool whose file has these keys; None for a file of Mobius' own.

    Raises ConfigError for keys of two tools.
    """
    found = [recipe for recipe in RECIPES if recipe.sign(keys) and not _OWN_SIGNS - recipe.rows.keys() & set(keys)]
    if len(found) < 2:
        return next(iter(found), None)
    parts = []
    for recipe in found:
        others = set[str]().union(*(other.rows for other in found if other is not recipe))
        own = [key for key in keys if key in recipe.rows and key not in others]
        parts.append(f"{recipe.name} ({listed(own or recipe.sign(keys))})")
    raise ConfigError(f"keys of two trainers, {' and '.join(parts)}; keep those of one")
