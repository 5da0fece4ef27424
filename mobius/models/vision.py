"""Frozen tower of a model with images, and the positions of tokens among images.

The tower and its merger turn the pixels of an image into features, one for each of the image's tokens. They are never
trained, so the text is all that a run splits into stages; only the model's first stage needs features.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mobius.errors import CheckpointError
from mobius.models.structure import translate_config_errors
from mobius.models.tensor_file import StoredTensor
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
        config = copy.deepcopy(config)
        text = config.get_text_config(decoder=True)
        text.num_hidden_layers, text.layer_types = 1, text.layer_types[:1]  # the text's layers are not used here
        with translate_config_errors(config), torch.device("meta"):
            model = class_of(config, is_whole=True).from_config(config, trust_remote_code=False)
        self.name = TOWERS[config.model_type]
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

    def load_tower(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Read the tower's weights from `folder`. Raises CheckpointError if they do not fit."""
        tower: nn.Module = self.base.get_submodule(self.name)
        values = {name: tensor.read().to(device, dtype, copy=True) for name, tensor in self._stored(folder).items()}
        for module in tower.modules():
            if buffers := dict(module.named_buffers(recurse=False)):
                module._buffers.update({name: torch.empty_like(each, device=device) for name, each in buffers.items()})
                self.base._init_weights(module)
        tower.load_state_dict(values, assign=True)
        tower.requires_grad_(False)

    def forget_tower(self) -> None:
        """Release the tower's weights."""
        self.base.get_submodule(self.name).to("meta")

    def tower_hashes(self, folder: Path) -> list[tuple[str, str]]:
        """Return a hash of each of the tower's weights in `folder`. Raises CheckpointError as `load_tower` does."""
        return [
            (name, hashlib.sha256(tensor.read().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest())
            for name, tensor in sorted(self._stored(folder).items())
        ]

    def _stored(self, folder: Path) -> dict[str, StoredTensor]:
        """Return the tower's weights by their names in the tower."""
        found, mark = dict[str, StoredTensor](), f"{self.name}."
        for name, tensor in read_stored(folder).items():
            before, part, own = name.partition(mark)
            if part and (not before or before.endswith(".")):
                found[own] = tensor
        expected = {name: tuple(value.shape) for name, value in self.base.get_submodule(self.name).state_dict().items()}
        names = sorted(found.keys() | expected.keys())
        if wrong := [name for name in names if name not in found or found[name].shape != expected.get(name)]:
            raise CheckpointError(
                f"{folder}: its tensors {mark}* are not those of the tower in its config.json; the first that differs "
                f"is {wrong[0]!r}. Download the model again."
            )
        return found

    def features(self, pixels: Tensor, grids: Tensor) -> list[Tensor]:
        """Return the features [tokens, H] of each image, by the tower that `load_tower` has loaded.

        `pixels` and `grids` come from the family's image processor.
        """
        with torch.no_grad():
            found = self.base.get_image_features(pixels, grids, return_dict=True).pooler_output
        return [*found]
