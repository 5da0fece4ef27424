"""Frozen tower of a model with images, and the positions of tokens among images.

The tower and its merger turn the pixels of an image into features, one for each of the image's tokens. They are never
trained, so the text is all that a run splits into stages; only the model's first stage needs features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mobius.errors import CheckpointError
from mobius.models.structure import translate_config_errors
from mobius.models.weights import read_stored
from mobius.models.whole_class import class_of

Grid = tuple[int, int, int]
"""Numbers of patches of an image: in time (1), from top to bottom, from left to right."""

TOWERS: Final[Mapping[str, str]] = {"qwen3_5": "visual", "qwen3_5_moe": "visual"}
"""Family of a whole model whose images are supported -> name of its tower, which is part of the base model."""


class VisionModel:
    """A whole model on the meta device; only its tower gets weights."""

    def __init__(self, config: PretrainedConfig) -> None:
        """`config` is the whole model's, of a family in `TOWERS`. Raises CheckpointError."""
        with translate_config_errors(config), torch.device("meta"):
            model = class_of(config, is_whole=True).from_config(config, trust_remote_code=False)
        self.config, self.name = config, TOWERS[config.model_type]
        self.base = cast(Any, getattr(model, model.base_model_prefix)).eval()
        self.image_token = int(cast(Any, config).image_token_id)
        self._merged = int(cast(Any, config).vision_config.spatial_merge_size) ** 2

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of tokens of an image, which is that of its features."""
        time, height, width = grid
        return time * height * width // self._merged

    def positions(self, tokens: Tensor, lengths: Sequence[Sequence[int]], grids: Sequence[Sequence[Grid]]) -> Tensor:
        """Return the positions of `tokens` [B, L] in time, height and width, int64 [3, B, L], on the host.

        `lengths` are those of each row's documents, which begin at 0 again; () for rows of one document. `grids` are
        those of each row's images.
        """
        made = torch.empty(3, *tokens.shape, dtype=torch.int64)
        for number, (row, own) in enumerate(zip(tokens, grids, strict=True)):
            left, start = list(own), 0
            rest = len(row) - sum(lengths[number] if lengths else ())
            for length in (*(lengths[number] if lengths else ()), rest):
                if length:
                    part = row[start : start + length]
                    made[:, number, start : start + length], left = self._in_document(part, left)
                    start += length
            assert not left, f"{len(left)} images of row {number} have no tokens"
        return made

    def _in_document(self, tokens: Tensor, grids: list[Grid]) -> tuple[Tensor, list[Grid]]:
        """Return the positions [3, L] of a document, whose images come first in `grids`, and the other grids."""
        is_image, number, found = tokens == self.image_token, 0, 0
        num_image_tokens = int(is_image.sum())
        while found < num_image_tokens:
            found += self.num_tokens(grids[number])
            number += 1
        assert found == num_image_tokens, "a document holds whole images"
        if not number:
            return torch.arange(len(tokens)).expand(3, -1), grids
        positions, _ = self.base.get_rope_index(
            tokens[None], mm_token_type_ids=is_image[None].int(), image_grid_thw=torch.tensor(grids[:number])
        )
        return positions[:, 0], grids[number:]

    def load_tower(self, folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
        """Read the tower's weights from `folder`. Raises CheckpointError if they do not fit."""
        tower: nn.Module = self.base.get_submodule(self.name)
        stored = read_stored(folder)
        mark, values = f"{self.name}.", dict[str, Tensor]()
        for name, tensor in stored.items():
            before, found, own = name.partition(mark)
            if found and (not before or before.endswith(".")):
                values[own] = tensor.read().to(dtype)
        self._fill(tower, values, folder, device)
        return tower

    def _fill(self, tower: nn.Module, values: Mapping[str, Tensor], folder: Path, device: torch.device) -> None:
        shapes = {name: tuple(value.shape) for name, value in tower.state_dict().items()}
        wrong = [name for name, shape in shapes.items() if name not in values or tuple(values[name].shape) != shape]
        if wrong or values.keys() - shapes.keys():
            first = [*wrong, *sorted(values.keys() - shapes.keys())][0]
            raise CheckpointError(
                f"{folder}: its tensors {self.name}.* are not those of its config.json; {first!r} is the first that "
                "differs. Download the model again."
            )
        tower.to_empty(device=device)
        for module in tower.modules():
            if any(True for _ in module.named_buffers(recurse=False)):
                self.base._init_weights(module)
        tower.load_state_dict(values)
        tower.to(next(iter(values.values())).dtype).requires_grad_(False).eval()

    def features(self, pixels: Tensor, grids: Tensor) -> list[Tensor]:
        """Return the features [tokens, H] of each image, by the tower that `load_tower` has loaded.

        `pixels` and `grids` come from the family's image processor.
        """
        with torch.no_grad():
            found = self.base.get_image_features(pixels, grids, return_dict=True).pooler_output
        return [*found]
