"""Features of a run's images: made by the model's frozen tower in one pass before step 1, and kept on disk by content.

    image files -> processor -> tower and merger -> a file of features for each image -> rows of a step

The folder's name is a hash of the tower's weights, of the settings of tower and processor, and of the number format; so
features of another tower are never read. A rank reads the features of its own rows; ranks without the model's first
stage need none.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoImageProcessor, PretrainedConfig, PreTrainedTokenizerBase

from mobius.data.images import ImageFile, ImageRules
from mobius.data.token_store import tokenized_lock
from mobius.engine.step_inputs import StepImages
from mobius.errors import ConfigError, DataError, reason_of
from mobius.files.atomic_files import atomic_write
from mobius.hardware.devices import TORCH_DTYPES, free_cached_memory
from mobius.models.family_support import is_text_config_supported
from mobius.models.model_files import describe_error, read_json_object
from mobius.models.vision import TOWERS, VisionModel
from mobius.objectives.registry import make_objective
from mobius.process.ranks import cache_folder
from mobius.reporting.events import table_row

if TYPE_CHECKING:
    from mobius.training.data import RunData
    from mobius.training.inputs import ModelInputs

logger = logging.getLogger(__name__)

_CONFIG, _PROCESSOR = "config.json", "preprocessor_config.json"


@dataclass(frozen=True)
class ImageModel:
    """A model's tower and processor, of which only the settings are read."""

    folder: Path
    config: PretrainedConfig
    """Configuration of the whole model."""
    processor: Any
    rules: ImageRules


def find_image_model(folder: Path, tokenizer: PreTrainedTokenizerBase) -> ImageModel | str:
    """Return the tower of the model in `folder`, or why its images cannot be used (a clause)."""
    if not (folder / _CONFIG).is_file():
        return f"{folder} has no {_CONFIG}, so its model is not known"
    family = read_json_object(folder / _CONFIG).get("model_type")
    if family not in TOWERS:
        if is_text_config_supported(family):
            return f"the tower of the family {family!r} does not run in Mobius; images are for {', '.join(TOWERS)}"
        return f"a model of the family {str(family)!r} reads text only; images are for {', '.join(TOWERS)}"
    if not (folder / _PROCESSOR).is_file():
        return f"{folder} has no {_PROCESSOR}, which says how images are made ready; copy it from the model's page"
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
        ids = [config.image_token_id, config.vision_start_token_id, config.vision_end_token_id]
        token, before, after = map(str, tokenizer.convert_ids_to_tokens(ids))
        rules = ImageRules(
            ids[0],
            token,
            before,
            after,
            int(processor.patch_size),
            int(processor.merge_size),
            int(processor.size["shortest_edge"]),
            int(processor.size["longest_edge"]),
        )
    except Exception as error:  # any error of transformers for unexpected values
        return f"{_PROCESSOR}, config.json and tokenizer in {folder} do not describe images: {describe_error(error)}"
    tower = config.vision_config
    if (rules.patch_size, rules.merge_size) != (tower.patch_size, tower.spatial_merge_size) or not processor.do_resize:
        return f"{_PROCESSOR} in {folder} does not cut images into the patches of the tower in config.json"
    return ImageModel(folder, config, processor, rules)


class FeatureFiles:
    """Files with the features of images, in a folder for one tower."""

    def __init__(self, folder: Path, rules: ImageRules, width: int, dtype: torch.dtype) -> None:
        self.folder, self._rules, self._width, self._dtype = folder, rules, width, dtype

    def has(self, image: ImageFile) -> bool:
        """Whether the features of an image are on disk."""
        path = self._path(image)
        return path.is_file() and path.stat().st_size == self.num_bytes(image)

    def num_bytes(self, image: ImageFile) -> int:
        """Return the bytes of an image's features."""
        return self._rules.num_tokens(image) * self._width * self._dtype.itemsize

    def write(self, image: ImageFile, features: Tensor) -> None:
        """Write the features of an image. Raises DataError."""
        path, values = self._path(image), features.detach().to("cpu", self._dtype).contiguous()
        assert values.nbytes == self.num_bytes(image), (values.shape, image.grid)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path, has_many_writers=True) as temporary:
                temporary.write_bytes(values.view(torch.uint8).numpy().tobytes())
        except OSError as error:
            raise DataError(
                f"cannot keep features of images in {self.folder}: {reason_of(error)}. Free some space, or choose "
                "another place with the environment variable XDG_CACHE_HOME"
            ) from error

    def read(self, images: Sequence[ImageFile]) -> Tensor:
        """Return the features of `images`, one after the other: [tokens, width]. Raises DataError."""
        made = torch.empty(sum(map(self._rules.num_tokens, images)), self._width, dtype=self._dtype)
        values, start = made.flatten().view(torch.uint8).numpy(), 0
        for image in images:
            end = start + self.num_bytes(image)
            try:
                values[start:end] = np.fromfile(self._path(image), dtype=np.uint8)
            except (OSError, ValueError) as error:
                raise DataError(f"the features of {image.path} in {self.folder} are gone. Start again") from error
            start = end
        return made

    def _path(self, image: ImageFile) -> Path:
        return self.folder / image.content[:2] / image.content


@dataclass(frozen=True)
class RunImages:
    """Positions and features of the rows of a run."""

    vision: VisionModel
    files: FeatureFiles

    def of_rows(
        self,
        tokens: Tensor,
        images: Sequence[Sequence[ImageFile]],
        lengths: Sequence[Sequence[int]],
        *,
        has_first_stage: bool,
    ) -> StepImages:
        """Return the images of rows with `tokens` [B, L] of documents with `lengths` (() for one document a row)."""
        grids = [[image.grid for image in row] for row in images]
        is_image = (tokens == self.vision.image_token) & (tokens >= 0)
        places = torch.where(is_image, is_image.flatten().cumsum(0).view_as(is_image) - 1, -1)
        of_rows = [image for row in images for image in row] if has_first_stage else []
        return StepImages(self.vision.positions(tokens, lengths, grids), places, self.files.read(of_rows))


def read_images(model: ModelInputs, data: RunData) -> RunImages | None:
    """Return the images of a run, with features that are made now or were made by an earlier run; None without images.

    Each rank calls this; one of them makes features while others wait. Raises MobiusError.
    """
    if not data.images:
        return None
    assert isinstance(model.images, ImageModel), "without a tower, images are refused when a record is tokenized"
    source, config, device = model.images, model.config, model.draft.device
    began, dtype = time.monotonic(), TORCH_DTYPES[config.model.dtype]
    vision = VisionModel(source.config)
    fingerprint = _fingerprint(source, vision, dtype, device)
    width = model.draft.shape.hidden_size
    files = FeatureFiles(cache_folder() / "images" / fingerprint, source.rules, width, dtype)
    for image in data.images:
        image.check_unchanged()
    images = [*{image.content: image for image in data.images}.values()]
    num_missing = sum(not files.has(image) for image in images)
    with tokenized_lock(files.folder):
        if missing := [image for image in images if not files.has(image)]:
            _make(missing, files, source, vision, dtype=dtype, device=device)
    if model.draft.ranks.is_first:
        number, num_tokens = len(images), sum(map(source.rules.num_tokens, images))
        text = f"{number} images, {num_tokens:,} tokens: {number - num_missing} read from {files.folder}"
        seconds = f"{time.monotonic() - began:.1f} s"
        logger.info("%s", table_row("images", f"{text}, {num_missing} made by the frozen tower in {seconds}"))
    return RunImages(vision, files)


def refuse_other_uses(model: ModelInputs) -> None:
    """Raise ConfigError for options that would use data with images without their images."""
    config = model.config
    if make_objective(config.objective).teacher is not None:
        raise ConfigError("--teacher_model: the data have images, which a teacher does not get. Leave the records out.")
    if config.evaluation.do_predict and config.evaluation.do_train and not model.layout.is_whole:
        raise ConfigError(
            "--do_predict: the data have images, and the result is saved as a text model (--export_as), which does not "
            "see them. Use --export_as original, or --do_eval."
        )


def _make(
    images: Sequence[ImageFile],
    files: FeatureFiles,
    source: ImageModel,
    vision: VisionModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Make the features of `images` one after the other, so that they do not depend on each other."""
    vision.load_tower(source.folder, dtype, device)
    for image in tqdm(images, desc="images", unit="image", leave=False, disable=None):
        with image.open() as opened:
            made = source.processor(opened, return_tensors="pt")
        grid = tuple(made["image_grid_thw"][0].tolist())
        assert grid == image.grid, f"{image.path}: {grid} patches, and its size promised {image.grid}"
        (features,) = vision.features(made["pixel_values"].to(device), made["image_grid_thw"].to(device))
        if not bool(features.isfinite().all()):
            raise DataError(f"{image.path}: the tower gives features that are not finite in --dtype {dtype}")
        files.write(image, features)
    vision.forget_tower()
    free_cached_memory(device)


def _fingerprint(source: ImageModel, vision: VisionModel, dtype: torch.dtype, device: torch.device) -> str:
    facts = [
        *vision.tower_hashes(source.folder),
        source.config.vision_config.to_dict(),
        source.processor.to_dict(),
        *(str(dtype), device.type, transformers.__version__),
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
